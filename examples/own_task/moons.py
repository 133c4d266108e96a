"""A task of your own: which of two half moons does a point lie on?   hftune train recipe=moons.yaml

A task describes data, model, loss and metrics. It is independent of processes, devices and launchers.
"""

from dataclasses import dataclass

from hftune import Task


@dataclass
class Moons(Task):
    """The fields are the keys of the recipe's ``task:`` section."""

    num_samples: int = 600
    width: int = 32

    def datasets(self):
        from sklearn.datasets import make_moons

        points, moons = make_moons(self.num_samples, noise=0.1, random_state=0)
        rows = [{"input": point, "labels": moon} for point, moon in zip(points.astype("float32"), moons, strict=True)]
        return {"train": rows[:-100], "eval": rows[-100:]}

    def build_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 2))

    def loss(self, outputs, target):
        """Return the SUM of the sample losses: the loop divides by the number of samples in the global batch."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, target, reduction="sum")

    def predictions(self, outputs, model, batch):
        """Return one row a sample. The rows are written to predictions.jsonl and passed to ``metrics``."""
        pairs = zip(batch["labels"].tolist(), outputs.argmax(-1).tolist(), strict=True)
        return [{"label": label, "prediction": prediction} for label, prediction in pairs]

    def metrics(self, rows):
        """Return the metrics of a whole split, from the rows of all its samples."""
        return {"accuracy": sum(row["label"] == row["prediction"] for row in rows) / len(rows)}

    def predict(self, model, inputs):
        """Answer raw inputs, pairs of coordinates, for ``hftune.load_model``."""
        import torch

        device = next(model.parameters()).device
        shares = model(torch.tensor(inputs, dtype=torch.float32, device=device)).softmax(-1)
        return [{"label": int(share.argmax()), "probability": float(share.max())} for share in shares]
