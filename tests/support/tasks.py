"""Tasks made for tests."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from hftune import DataError, Task
from hftune.data.demo import articles, digits, picture_chats, pictures, questions, reviews, shapes
from hftune.tasks import Preferences, SequenceClassification


@functools.cache
def few_reviews(part: str) -> list[dict[str, Any]]:
    """100 and 37 of the demo's reviews."""
    return reviews(part)[: {"train": 100, "eval": 37}[part]]


@functools.cache
def few_articles(part: str) -> list[dict[str, Any]]:
    """40 and 10 of the demo's articles."""
    return articles(part)[: {"train": 40, "eval": 10}[part]]


@functools.cache
def few_digits(part: str) -> list[dict[str, Any]]:
    """300 and 101 of the demo's digits."""
    return list(digits(part, {"train": 300, "eval": 101}[part]))


@functools.cache
def few_questions(part: str) -> list[dict[str, Any]]:
    """100 and 37 of the demo's questions and answers; each has another one's answer as a hard negative, and a score."""
    rows = questions(part)[: {"train": 100, "eval": 37}[part]]
    rows[5] = {**rows[4], "answer": rows[5]["answer"]}
    return [{**row, "negative": rows[index - 1]["answer"], "score": index % 7} for index, row in enumerate(rows)]


@functools.cache
def few_shapes(part: str) -> list[dict[str, Any]]:
    """60 and 13 of the demo's shapes."""
    return list(shapes(part, {"train": 60, "eval": 13}[part]))


@functools.cache
def few_pictures(part: str) -> list[dict[str, Any]]:
    """16 and 7 of the demo's pictures."""
    return list(pictures(part, {"train": 16, "eval": 7}[part]))


@functools.cache
def few_picture_chats(part: str) -> list[dict[str, Any]]:
    """48 and 13 of the demo's chats with pictures; every third has none."""
    rows = list(picture_chats(part, {"train": 48, "eval": 13}[part]))
    for row in rows[2::3]:
        row["messages"] = [{**message, "content": message["content"].replace("<image>", "")} for message in row["messages"]]
        row["images"] = []
    return rows


def two_images(part: str) -> list[dict[str, Any]]:
    """Rows with two images and a label, none of which has a usual name."""
    images = [row["image"] for row in digits(part, 4)]
    return [{"after": image, "before": image, "kind": "ab"[place % 2]} for place, image in enumerate(images)]


def no_reviews(part: str) -> list[dict[str, Any]]:
    """Data that cannot be trained on."""
    return []


class Tagger(nn.Module):
    """Tags every token, with dropout, in float64."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(30, 16), nn.Dropout(dropout), nn.Linear(16, 5)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        real_NT1 = (ids != 0).unsqueeze(-1)
        mean_N1D = (self.embed(ids) * real_NT1).sum(1, keepdim=True) / real_NT1.sum(1, keepdim=True)
        return self.head(self.drop(torch.tanh(self.embed(ids) + mean_N1D)))


@dataclass
class Tagging(Task):
    """Items are tokens, a few for some samples and many for others: an average of averages would be wrong."""

    dropout: float = 0.0

    def datasets(self) -> dict[str, Any]:
        rng = np.random.RandomState(0)
        return {
            part: [rng.randint(1, 30, rng.randint(1, 20)) for _ in range(size)] for part, size in (("train", 50), ("eval", 23))
        }

    def build_model(self) -> nn.Module:
        return Tagger(self.dropout)

    def lengths(self, dataset: Any) -> np.ndarray:
        return np.array([len(row) for row in dataset])

    def collate(self, examples: list) -> dict[str, Tensor]:
        ids = pad_sequence([torch.tensor(row) for row in examples], batch_first=True)
        return {"ids": ids, "labels": torch.where(ids == 0, -100, ids * 7 % 5)}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(outputs.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")

    def num_items(self, target: Tensor) -> int:
        return int((target != -100).sum())


@dataclass
class Braked(Task):
    """Each micro-batch takes ``pause_s`` as long as the file ``brake`` exists: what is done meanwhile can take as long as it may.

    SLOW_BEFORE and SLOW_WITHIN in the environment of a machine are the seconds that its data take before and in a round.
    """

    pause_s: float = 0.1
    brake: str = ""

    def datasets(self) -> dict[str, Any]:
        time.sleep(float(os.environ.get("SLOW_WITHIN" if "RANK" in os.environ else "SLOW_BEFORE", "0")))
        return super().datasets()

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if Path(self.brake).is_file():
            time.sleep(self.pause_s)
        return super().inputs(batch)


@dataclass
class BrakedTagging(Braked, Tagging):
    """See Braked."""


@dataclass
class BrakedReviews(Braked, SequenceClassification):
    """See Braked."""


class Net(nn.Module):
    """A small classifier with one thing in it that tempts distributed training to go wrong."""

    def __init__(self, trap: str):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if trap == "running statistics" else nn.Identity()
        self.unused = nn.Linear(8, 2) if trap == "unused parameters" else None
        self.dropped = nn.ModuleList(nn.Linear(4, 4) for _ in range(6 if trap == "dropped layers" else 0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer, drawn in zip(self.dropped, [torch.rand, np.random.random, lambda _: random.random()] * 2, strict=False):
            x = x if self.training and drawn(1) < 0.5 else x + torch.tanh(layer(x))
        return self.last(self.drop(self.norm(torch.tanh(self.first(x)))))


@dataclass
class Trapped(Task):
    """Two classes of random points; ``trap`` says what is special."""

    trap: str = "none"

    def datasets(self) -> dict[str, Any]:
        rng = np.random.RandomState(0)
        sizes = {"train": 48, "eval": 21}
        points = {part: rng.randn(size, 4) for part, size in sizes.items()}
        if self.trap == "other evaluation data" and os.environ.get("RANK") == "1":
            points["eval"] = points["eval"] + 1
        return {part: [{"x": row, "labels": int(row.sum() > 0)} for row in rows] for part, rows in points.items()}

    def build_model(self) -> nn.Module:
        return Net(self.trap)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.trap == "slow process" and os.environ.get("RANK") == "1":
            time.sleep(0.05)
        return cross_entropy(outputs, target, reduction="sum")

    def num_items(self, target: Tensor) -> int:
        return 0 if self.trap == "no items" else len(target)

    def predictions(self, outputs: Tensor, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What the model itself says, what was given, and a random draw, as sampling makes it."""
        if self.trap == "weights that are read" and os.environ.get("RANK") == "1":
            assert model.last.weight.isfinite().all()
        again, draws = model(batch["x"]), torch.rand(len(outputs))
        return [
            {"again": a, "given": b, "draw": c}
            for a, b, c in zip(again.tolist(), outputs.tolist(), draws.tolist(), strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"numpy": np.float32(0.5), "nothing": float("nan")}


@dataclass
class Weighed(SequenceClassification):
    """Says of each text what the head weighs."""

    def predict(self, model: nn.Module, inputs: list[str]) -> list[dict[str, Any]]:
        return [{"weight": float(model.classifier.weight.abs().sum())} for _ in inputs]


@dataclass
class SlowReviews(SequenceClassification):
    """A step after the third takes half a minute: the checks before training call the loss eight times, a step four times."""

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        self._calls = getattr(self, "_calls", 0) + 1
        if self._calls > 8 + 12:
            time.sleep(30)
        return super().loss(outputs, target)


@dataclass
class Signs(Trapped):
    """Two classes of points, by the sign of their sum; answers arrays of four numbers."""

    sample_fields = ("given",)

    def example_inputs(self) -> list[np.ndarray]:
        return [row["x"] for row in self.datasets()["eval"][:2]]

    def predict(self, model: nn.Module, inputs: list[np.ndarray]) -> list[dict[str, Any]]:
        logits = model(torch.tensor(np.stack(inputs)))
        return [{"label": ("negative", "positive")[number]} for number in logits.argmax(-1).tolist()]


class Greedy(Net):
    """Has memory for so many rows."""

    def __init__(self, most: int):
        super().__init__("none")
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} GiB.")
        return super().forward(x)


@dataclass
class TooLarge(Trapped):
    """Two classes of random points, and memory for few of them; for less on process 1."""

    most: int = 5

    def build_model(self) -> nn.Module:
        return Greedy(self.most - 2 * (os.environ.get("RANK") == "1"))


@dataclass
class FailingAt(Task):
    """Fails on process 1 when its loss is called for the ``at``-th time."""

    at: int = 3

    def datasets(self) -> dict[str, Any]:
        self.calls = 0
        samples = [{"input": torch.ones(2), "labels": torch.ones(1)} for _ in range(64)]
        return {"train": samples, "eval": samples}

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == self.at:
            raise ValueError("bad sample 17")
        return (outputs - target).square().sum()


@dataclass
class Faulty(Task):
    """Learns at once, but for ``fault``, which strikes the process ``rank`` when it loads sample ``sample`` for training.

    In the first attempt or round only, where a launcher restarts the processes. The time goes into the file ``note``.
    """

    fault: str = "none"
    rank: int = 1
    sample: int = -1
    pause_s: float = 0.0
    note: str | None = None

    def datasets(self) -> dict[str, Any]:
        rows = [{"x": torch.ones(2), "labels": torch.ones(1), "id": torch.tensor(index)} for index in range(64)]
        return {"train": rows, "eval": rows[:8]}

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.sample in batch["id"].tolist():
            self.strike()
        time.sleep(self.pause_s)
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().sum()

    def strike(self) -> None:
        if int(os.environ["RANK"]) != self.rank or os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
            return
        if os.environ.get("HFTUNE_ROUND", "0") != "0":  # a process that was in the first one, too
            return
        if self.note is not None:
            Path(self.note).write_text(str(time.time()))
        if self.fault == "raise":
            raise ValueError("bad sample 17")
        if self.fault == "data error":
            raise DataError("Sample 17 has no label.")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "abort":
            os.abort()
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "leave":
            os._exit(0)
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)


class Blend(nn.Module):
    """A network for ImageRestoration: what is damaged becomes a learned share of the image's mean colour."""

    def __init__(self, start: float):
        super().__init__()
        self.share = nn.Parameter(torch.tensor(start))

    def forward(self, image, mask):
        return torch.where(mask > 0, self.share * image.mean((2, 3), keepdim=True), image)


class NormBlend(nn.Module):
    """A small convolutional network for ImageRestoration, with a norm in the middle.

    ``told``: where each process writes the bits of the means that its forward passes begin with, in training.
    """

    def __init__(self, norm="batch", checkpointing=False, told=None):
        super().__init__()
        self.told = told
        # No bias: before BatchNorm its gradient is rounding noise, which Adam would make steps of full length of.
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm == "batch" else nn.GroupNorm(2, 8)
        self.checkpointing = checkpointing

    def forward(self, image, mask):
        hidden = self.first(torch.cat([image, mask], 1))
        if self.told and self.training:
            with Path(f"{self.told}.{torch.distributed.get_rank()}").open("a") as file:
                file.write(f"{self.norm.running_mean.numpy().tobytes().hex()}\n")
        if self.checkpointing and self.training:
            hidden = torch.utils.checkpoint.checkpoint(self.norm, hidden, use_reentrant=False)
        else:
            hidden = self.norm(hidden)
        return self.last(hidden.relu())


class Chain(nn.Module):
    """A little language model that cuts itself: each token sees the mean of those before it."""

    def __init__(self, num_layers: int, dropout: float, norm: bool = False):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        last = TokenNorm if norm else nn.Identity
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), last()) for _ in range(num_layers)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        return ChainStage(self, 0, 1)(None, input_ids)

    def stage(self, index: int, count: int) -> nn.Module:
        return ChainStage(self, index, count)


class TokenNorm(nn.Module):
    """BatchNorm over all tokens of a micro-batch, padding included."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, hidden_NTD: Tensor) -> Tensor:
        return self.norm(hidden_NTD.flatten(0, 1)).view_as(hidden_NTD)


class ChainStage(nn.Module):
    def __init__(self, model: Chain, index: int, count: int):
        super().__init__()
        size = len(model.layers) // count
        self.embed = model.embed if index == 0 else None
        self.layers = nn.ModuleList(model.layers[index * size : (index + 1) * size])
        self.head = model.head if index == count - 1 else None

    def forward(self, hidden_NTD: Tensor | None, input_ids: Tensor) -> Tensor:
        if hidden_NTD is None:
            hidden_NTD = self.embed(input_ids)
        for layer in self.layers:
            seen = torch.arange(1, hidden_NTD.shape[1] + 1, dtype=hidden_NTD.dtype)[:, None]
            hidden_NTD = hidden_NTD + layer(hidden_NTD.cumsum(1) / seen)
        return hidden_NTD if self.head is None else self.head(hidden_NTD)


@dataclass
class NextToken(Task):
    """Predict the next of 30 tokens, in sequences of unequal lengths."""

    model: str = "gpt2"
    """gpt2 (tied), llama, llama_tied, transformer_lm, or chain or norm_chain, which cut themselves."""
    dropout: float = 0.0
    num_layers: int = 4
    float64: bool = False
    num_samples: int = 70

    metric_directions = {"mean_tokens": None}

    def datasets(self) -> dict[str, Any]:
        rng = np.random.RandomState(0)
        return {
            part: [rng.randint(1, 30, rng.randint(2, 20)) for _ in range(size)]
            for part, size in (("train", self.num_samples), ("eval", 23))
        }

    def build_model(self) -> nn.Module:
        model = (
            Chain(self.num_layers, self.dropout, self.model == "norm_chain") if self.model.endswith("chain") else self.decoder()
        )
        return model.double() if self.float64 else model

    def decoder(self) -> nn.Module:
        """Return one of transformers', which is imported here because it takes seconds."""
        from transformers import AutoConfig, AutoModelForCausalLM

        import hftune.models.transformer_lm  # noqa: F401 - registers it

        sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": self.num_layers, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 24, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
        if self.model == "gpt2":
            drops = {f"{name}_pdrop": self.dropout for name in ("attn", "resid", "embd")}
            config = AutoConfig.for_model("gpt2", **sizes, **drops, initializer_range=0.2)
        elif self.model.startswith("llama"):
            tied = self.model == "llama_tied"
            config = AutoConfig.for_model(
                "llama", **sizes, initializer_range=0.2, tie_word_embeddings=tied, attention_dropout=self.dropout
            )
        elif self.model == "transformer_lm":
            config = AutoConfig.for_model("transformer_lm", **sizes, dropout=self.dropout)
        return AutoModelForCausalLM.from_config(config)

    def lengths(self, dataset: Any) -> np.ndarray:
        return np.array([len(row) - 1 for row in dataset])

    def collate(self, examples: list) -> dict[str, Tensor]:
        ids = pad_sequence([torch.tensor(row[:-1]) for row in examples], batch_first=True)
        labels = pad_sequence([torch.tensor(row[1:]) for row in examples], batch_first=True, padding_value=-100)
        return {"input_ids": ids, "labels": labels}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        logits = getattr(outputs, "logits", outputs)
        return cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")

    def num_items(self, target: Tensor) -> int:
        return int((target != -100).sum())

    def predictions(self, outputs: Any, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        best = getattr(outputs, "logits", outputs).argmax(-1)
        return [{"tokens": row[known != -100].tolist()} for row, known in zip(best, batch["labels"], strict=True)]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"mean_tokens": float(np.mean([len(row["tokens"]) for row in rows]))}


@dataclass
class SlowEmbedding(NextToken):
    """The embeddings learn at a tenth of the rate."""

    def parameter_groups(self, model: nn.Module, config: Any) -> list[dict[str, Any]]:
        slow = [*model.get_input_embeddings().parameters()]
        rest = [value for value in model.parameters() if value is not slow[0]]
        return [{"params": slow, "lr": 0.1 * config.lr}, {"params": rest}]


@dataclass
class FromWeights(NextToken):
    """May start from weights of one's own."""

    weights: str | None = None


@dataclass
class OwnOptimizer(NextToken):
    """Builds its own optimizer, for all weights but those of the positions, which the recipe freezes; and has test data."""

    def datasets(self) -> dict[str, Any]:
        datasets = super().datasets()
        return {**datasets, "test": datasets["eval"][:7]}

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        trained = [value for name, value in model.named_parameters() if "wpe" not in name]
        return torch.optim.NAdam([{"params": trained}], lr=2 * config.lr)


@dataclass
class StoppedWhileEvaluated(NextToken):
    """The process that scores gets SIGTERM in the first evaluation of a folder's first run."""

    def predictions(self, outputs: Any, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        marker = Path(sys.argv[-1].removeprefix("output_dir=")) / "stopped"
        if not marker.exists() and torch.distributed.is_initialized():  # and not before training, when outputs are tried
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().predictions(outputs, model, batch)


@dataclass
class StoppedWhileGenerating(StoppedWhileEvaluated):
    """The processes generate as well, and not equally much."""

    def predictions(self, outputs: Any, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        rows = super().predictions(outputs, model, batch)
        model.generate(batch["input_ids"][:, :1], min_new_tokens=4, max_new_tokens=4 + 8 * int(os.environ["RANK"]))
        return rows


@dataclass
class FailingLoss(NextToken):
    """Fails in the third step."""

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 25:
            raise ValueError("no such token")
        return super().loss(outputs, target)


@dataclass
class SlowUpload(Trapped):
    """The dashboards of the main process take ``upload_s`` to close."""

    upload_s: float = 0.0

    def build_model(self) -> nn.Module:
        from hftune.tracking.tracker import Tracker

        def close(tracker: Tracker, text: str) -> None:
            print("uploading", flush=True)
            time.sleep(self.upload_s)
            print("uploaded", flush=True)

        Tracker.close = close
        return super().build_model()


@dataclass
class HoldsTheLock(Trapped):
    """The main process computes its metrics in C code that holds Python's lock for ``hold_s``."""

    hold_s: float = 0.0

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        ctypes.PyDLL(None).usleep(int(1e6 * self.hold_s))
        return {}


@dataclass
class PrecisePreferences(Preferences):
    """In float64, so that a comparison is one of formulas, and not of the order in which tokens are added up."""

    def build_model(self) -> nn.Module:
        return super().build_model().double()
