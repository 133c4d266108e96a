"""Scores of texts for a query, with AutoModelForSequenceClassification: rerankers (cross-encoders) and reward models.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, K candidates of each (the positive first), N = B K pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.config.keys import key
from hftune.metrics.records import directions
from hftune.tasks.compared_texts import ComparedTexts, ids_of
from hftune.tasks.late_rows import late_rows_each
from hftune.tasks.text import beginning, check_inputs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from hftune.task import Batch


@dataclass
class Reranking(ComparedTexts):
    """Learn a score that is highest for the text that belongs to an anchor: the relevant passage, or the better answer.

    The model reads anchor and candidate together. The candidates of a sample are its positive and its negatives, so a sample is
    compared with no other one. An item is a sample.
    """

    ranking: Literal["listwise", "pairwise", "pointwise"] = key("listwise", changes="forward backward")
    """The loss of a sample. listwise: cross-entropy of its positive among its candidates. pairwise: -log sigmoid(score of the
    positive - score of a negative), the mean over the negatives; with one negative, a reward model (Bradley-Terry). pointwise:
    binary cross-entropy of each candidate, the mean."""
    center: float = key(0.0, ge=0, changes="forward backward")
    """Factor of (sum of a sample's scores) ** 2 in the loss, which keeps the scores around 0. Reward models take 0.01."""
    max_length: int = key(512, ge=3)
    """Maximum length of an anchor and a candidate together, in tokens; the longer one is truncated at the end."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    metric_directions = directions("accuracy", "mrr_at_10")
    sample_fields = ("anchor", "positive", "rank", "margin")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if not self.negative_columns:
            yield "task.negative_columns=[] must name a column at least: texts that are to get a lower score."

    @property
    def num_texts(self) -> int:
        return 1 + len(self.negative_columns)

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        anchors, *candidates = (rows[column] for column in self.text_columns_read)
        encoded: dict[str, list] = {"cut": [False] * len(anchors)}
        for index, texts in enumerate(candidates):
            pairs = self._pairs(anchors, texts, self.named_config)
            encoded["cut"] = [any(flags) for flags in zip(encoded["cut"], pairs.pop("cut"), strict=True)]
            encoded |= {ids_of(index, kind): ids for kind, ids in pairs.items()}
        return encoded

    def encoded_by(self) -> Any:
        return [self.max_length, self.has_types(self.named_config)]

    def _pairs(self, anchors: Sequence[str], texts: Sequence[str], config: PreTrainedConfig) -> dict[str, list]:
        from hftune.data.tokenized import pair_ids

        return pair_ids(anchors, texts, self.text_tokenizer, self.max_length, self.has_types(config))

    def config_overrides(self) -> dict[str, Any]:
        return {**super().config_overrides(), "num_labels": 1}

    def target(self, batch: Batch) -> Tensor:
        return batch["rows"]

    def num_items(self, target: Tensor) -> int:
        return len(target)

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the summed loss of the samples.

        Source: Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach" (2007); Burges et al., "Learning to
        Rank using Gradient Descent" (2005), the pairwise one; Eisenstein et al., "Helping or Herding?" (2023), centring.
        """
        from torch.nn.functional import logsigmoid

        scores_BK = outputs.logits.flatten()[target]
        positives_B1, negatives_BJ = scores_BK[:, :1], scores_BK[:, 1:]
        if self.ranking == "listwise":
            losses_B = -scores_BK.log_softmax(1)[:, 0]
        elif self.ranking == "pairwise":
            losses_B = -logsigmoid(positives_B1 - negatives_BJ).mean(1)
        else:
            losses_B = -(logsigmoid(positives_B1).sum(1) + logsigmoid(-negatives_BJ).sum(1)) / scores_BK.shape[1]
        return losses_B.sum() + self.center * scores_BK.sum(1).square().sum()

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return the scores of each sample's candidates, the rank of the positive, last of equals, and its lead."""

        def row(scores: list[float]) -> dict[str, Any]:
            first, *others = scores
            return {"rank": 1 + sum(not other < first for other in others), "margin": first - max(others), "scores": scores}

        return late_rows_each(row, outputs.logits.float().flatten()[batch["rows"]])

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the share of samples whose positive has the highest score, and the mean reciprocal rank."""
        import numpy as np

        from hftune.metrics.retrieval import mrr_at, recall_at

        ranks_N = np.array([row["rank"] for row in rows])
        return {"accuracy": recall_at(ranks_N, 1), "mrr_at_10": mrr_at(ranks_N, 10)}

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of anchor and positive, and an error that grows with the lead of a negative."""
        anchors, positives = (self.rows[self.described][self.read_columns[f"{name}_column"]] for name in ("anchor", "positive"))
        return [
            {"anchor": beginning(anchor), "positive": beginning(positive), **row, "error": -row["margin"]}
            for anchor, positive, row in zip(anchors, positives, rows, strict=True)
        ]

    def input_columns(self) -> dict[str, str | None]:
        return {"anchor": self.anchor_column, "positive": self.positive_column}

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the score of each pair of anchor and text: a list of two, or one text with a tab between them."""
        from hftune.data.tokenized import Ragged

        anchors, texts = self.sides(inputs, "anchor and candidate")
        check_inputs([*anchors, *texts])
        pairs = self._pairs(anchors, texts, model.config)
        ids_NT, mask_NT = Ragged.of(pairs["input_ids"]).padded(self.text_tokenizer.pad_token_id)
        batch = {"input_ids": ids_NT, "attention_mask": mask_NT}
        if "token_type_ids" in pairs:
            batch["token_type_ids"], _ = Ragged.of(pairs["token_type_ids"]).padded(0)
        logits = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits
        return [{"score": score} for score in logits.float().flatten().tolist()]
