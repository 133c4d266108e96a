"""The base of tasks whose sample is an anchor, such as a query, and the texts that are compared for it.

torch and transformers are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, K texts of each that the model reads, N = B K texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.data.columns import TEXTS, Role
from hftune.tasks.text import SeveralTexts

if TYPE_CHECKING:
    from torch import Tensor

    from hftune.task import Batch

ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_A")
POSITIVES = ("positive", "answer", "document", "passage", "pos", "sentence2", "sentence_B")
"""Usual names of the columns."""


@dataclass
class ComparedTexts(SeveralTexts):
    """Base of tasks that compare texts for an anchor. ``encode`` returns the tokens of each, in columns named by ``ids_of``."""

    anchor_column: str | None = None
    """Column of the anchors: queries, questions, or one side of a pair. null: the column that is usual for it."""
    positive_column: str | None = None
    """Column of the text that belongs to each anchor: a relevant passage, an answer. null: the column that is usual for it."""
    negative_columns: list[str] = field(default_factory=list)
    """Columns of hard negatives: texts that look relevant to the anchor and are not."""

    prepares_as_needed = True
    columns: ClassVar[Mapping[str, Role]] = {
        "anchor": Role("text", ANCHORS, usual_inputs=TEXTS),
        "positive": Role("text", POSITIVES, optional_in={"predict"}),
        "negative": Role("text", optional_in={"predict"}),
    }

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        columns = [name for name in (self.anchor_column, self.positive_column, *self.negative_columns) if name is not None]
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            yield f"Column {repeated[0]!r} is named twice by task.anchor_column, positive_column and negative_columns."

    @property
    def num_texts(self) -> int:
        """K: the anchor, the positive and the negatives."""
        return 2 + len(self.negative_columns)

    @property
    def token_columns(self) -> Sequence[str]:
        return [ids_of(index) for index in range(self.num_texts)]

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids, attention_mask and, if there are, token_type_ids (N, T) int64; and the rest.

        The longest texts come first: without padding, texts of equal length are computed together. ``rows`` (B, K) says where
        the texts of each sample are. Columns with a value or an array for each sample keep their names.
        """
        import numpy as np
        import torch

        from hftune.data.tokenized import Ragged, ragged, values

        names, order_N = examples[0].keys(), None
        batch: Batch = {}
        for kind, padding in {"input_ids": self.text_tokenizer.pad_token_id, "token_type_ids": 0}.items():
            if ids_of(0, kind) not in names:
                continue
            columns = [ragged(examples, ids_of(index, kind)).rows() for index in range(self.num_texts)]
            all_texts = [text for texts in zip(*columns, strict=True) for text in texts]
            order_N = np.argsort([-len(text) for text in all_texts], kind="stable")
            batch[kind], batch["attention_mask"] = Ragged.of([all_texts[index] for index in order_N]).padded(padding)
        rows_BK = torch.from_numpy(np.argsort(order_N)).view(len(examples), -1)
        rest = [name for name in names if name != "cut" and not name.startswith(("input_ids_", "token_type_ids_"))]
        return {**batch, "rows": rows_BK, **{name: values(examples, name) for name in rest}}

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}


def ids_of(index: int, kind: str = "input_ids") -> str:
    """Return the name of the column with the tokens of one of a sample's texts."""
    return f"{kind}_{index}"
