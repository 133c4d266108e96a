"""The base of tasks on pairs of answers to a prompt, of which one is better: their data, tokenized and padded. Knows no loss.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B pairs, S = 2 sides (chosen, rejected), N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hftune.data.messages import ChatError
from hftune.data.preferences import PAIR, SIDES, pair_of, pair_tokens
from hftune.metrics.records import directions
from hftune.tasks.judged_answers import JudgedAnswers
from hftune.tasks.late_rows import late_rows_each
from hftune.tasks.text import beginning

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from hftune.data.tokenized import Texts
    from hftune.task import Batch


@dataclass
class AnswerPairs(JudgedAnswers):
    """Base of tasks that compare two answers to a prompt. A sample is the texts with the chosen and with the rejected one."""

    chosen_column: str = "chosen"
    """Column of the better answers: texts, lists of messages, whole conversations, or their turns in one text as HH-RLHF has
    them."""
    rejected_column: str = "rejected"
    """Column of the worse answers, likewise."""
    bad_pairs: Literal["refuse", "drop"] = "refuse"
    """What to do with pairs that cannot be compared: equal answers, an empty one, more than max_length tokens, an empty prompt
    or different ones. refuse: the data are refused, with the number of each kind. drop: they are left out and counted. No
    prompt or answer is ever cut."""

    samples_are = "pairs"
    token_columns = SIDES
    metric_directions = directions("accuracy", "margin", *(f"{side}_{what}" for what in ("reward", "length") for side in SIDES))
    sample_fields = ("prompt", *SIDES, "margin")

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns of both answers, and those of prompts, system messages and tools, if there are any."""
        return {**super().find_columns(rows), **{f"{side}_column": getattr(self, f"{side}_column") for side in SIDES}}

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return pair_of(row, self.read_columns)[0]
        except ChatError:  # it is refused, or dropped, as a pair
            return []

    def tokenized(self, split: str) -> Texts:
        """Return the pairs of a split: chosen and chosen_labels, rejected and rejected_labels, their row and margin; and
        dropped, see ``written_samples``."""
        return self.written_samples(split, pair_tokens, PAIR)

    def pair_rows(self, batch: Batch, losses_B: Tensor, rewards_BS: Tensor, **others_BS: Tensor) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), both answers (their beginnings, the last ones), their rewards, tokens, and what
        else is known of both; loss; and margin, the difference of the rewards."""
        of_sides = {"reward": rewards_BS, "tokens": self.tokens(batch["labels"]), **others_BS}

        def made(ids: list, labels: list, loss: float, *values: list) -> dict[str, Any]:
            (_, prompt, chosen), (_, _, rejected) = map(self.answer_of, ids, labels)
            row: dict[str, Any] = {"prompt": prompt, "chosen": beginning(chosen), "rejected": beginning(rejected)}
            for name, both in zip(of_sides, values, strict=True):
                row |= {f"{side}_{name}": value for side, value in zip(SIDES, both, strict=True)}
            return row | {"loss": loss, "margin": row["chosen_reward"] - row["rejected_reward"]}

        texts = (batch[name].unflatten(0, (2, -1)).transpose(0, 1) for name in ("input_ids", "labels"))  # (B, 2, T)
        return late_rows_each(made, *texts, losses_B, *of_sides.values())

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the share of pairs whose chosen answer has the greater reward, and means of margin, rewards and lengths."""
        means = {"margin": "margin"} | {f"{side}_reward": f"{side}_reward" for side in SIDES}
        means |= {f"{side}_length": f"{side}_tokens" for side in SIDES}
        found = {name: fmean(row[field] for row in rows) for name, field in means.items()}
        return {"accuracy": fmean(row["margin"] > 0 for row in rows), **found}

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the texts with the chosen and with the rejected answer in pieces, each with whether it is compared."""
        chosen, rejected = (self.pieces_of(example[side], example[f"{side}_labels"]) for side in SIDES)
        return [("chosen:\n", False), *chosen, ("\nrejected:\n", False), *rejected]
