"""The base of tasks on pairs of answers to a prompt, of which one is better: their data, tokenized and padded. Knows no loss.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B pairs, S = 2 sides (chosen, rejected), N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hftune.data.messages import ChatError
from hftune.data.preferences import PROBLEMS, PROMPTS, SIDES, encode, pair_of
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.tasks.chat_task import ChatTask
from hftune.tasks.text import NO_LABEL, SeveralTexts, beginning

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.tokenized import Texts
    from hftune.task import Batch


@dataclass
class AnswerPairs(ChatTask, SeveralTexts):
    """Base of tasks that compare two answers to a prompt. A sample is the texts with the chosen and with the rejected one."""

    prompt_column: str | None = None
    """Column of the prompts, texts or lists of messages. null: prompt, or what is usual, if there is one; it is not needed if
    both answers are whole conversations."""
    chosen_column: str = "chosen"
    """Column of the better answers: texts, lists of messages, whole conversations, or their turns in one text as HH-RLHF has
    them."""
    rejected_column: str = "rejected"
    """Column of the worse answers, likewise."""
    system_column: str | None = None
    """Column of system messages to put before the prompts. null: system, if there is one."""
    bad_pairs: Literal["refuse", "drop"] = "refuse"
    """What to do with pairs that cannot be compared: equal answers, an empty one, more than max_length tokens. refuse: the data
    are refused, with the number of each kind. drop: they are left out and counted. No prompt or answer is ever cut."""

    samples_are = "pairs"
    libraries = (*ChatTask.libraries, "hftune.data.preferences")
    metric_directions = directions("accuracy", "margin", *(f"{side}_{what}" for what in ("reward", "length") for side in SIDES))
    sample_fields = ("prompt", *SIDES, "margin")

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns of both answers, and those of prompts, system messages and tools, if there are any."""
        names = rows.column_names
        usual = {"prompt": PROMPTS, "system": ("system",), "tools": ("tools",)}
        chosen = {
            name: getattr(self, f"{name}_column") or next(filter(names.__contains__, usual[name]), None) for name in usual
        }
        found = {f"{name}_column": column for name, column in chosen.items() if column is not None}
        return {**found, **{f"{side}_column": getattr(self, f"{side}_column") for side in SIDES}}

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return pair_of(row, self.read_columns)[0]
        except ChatError:  # it is refused, or dropped, as a pair
            return []

    def tokenized(self, split: str) -> Texts:
        """Return the pairs of a split: chosen and chosen_labels, rejected and rejected_labels, their row and margin; and
        dropped: in the first of them, how many rows were left out for each of PROBLEMS."""
        import numpy as np

        from hftune.data.tokenized import OFFSETS, flat_arrays

        drops = self.bad_pairs == "drop"

        def comparable(encoded: Dataset) -> dict[str, Any]:
            arrays: dict[str, Any] = dict(flat_arrays(encoded))
            problems = arrays.pop("problem")
            bad, counts = np.flatnonzero(problems), np.bincount(problems, minlength=1 + len(PROBLEMS))[1:]
            if len(bad) and (not drops or len(bad) == len(problems)):
                advice = "Remove them" if drops else "Set task.bad_pairs=drop to leave them out"
                row = self.row_of(split)(int(bad[0]))
                raise DataError(f"The {split} split has {self._described(counts)}; the first at row {row}. {advice}.")
            for name in arrays:  # those that are bad have no tokens
                if name + OFFSETS not in arrays:
                    arrays[name] = np.delete(arrays[name], bad + 1 if name.endswith(OFFSETS) else bad)
            dropped = np.zeros((len(arrays["row"]), len(PROBLEMS)), np.int32)
            dropped[0] = counts
            return {**arrays, "dropped": dropped}

        settings = {"max_length": self.max_length, "drops": drops, "whole": not self.generates}
        return self.written("pairs", split, encode, settings, comparable)

    def _described(self, counts: np.ndarray) -> str:
        """Return how many pairs have each of PROBLEMS, in words."""
        parts = [
            f"{count:,} {'pair' if count == 1 else 'pairs'} {problem.format(max_length=self.max_length)}"
            for count, problem in zip(counts, PROBLEMS, strict=True)
            if count
        ]
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    @property
    def token_columns(self) -> Sequence[str]:
        return SIDES

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids, attention_mask and labels (N, T) int64, chosen texts before rejected ones."""
        from hftune.data.tokenized import Ragged, ragged

        ids, labels = (
            Ragged.of([text for side in SIDES for text in ragged(examples, side + end).rows()]) for end in ("", "_labels")
        )
        ids_NT, mask_NT = ids.padded(self.text_tokenizer.pad_token_id)
        return {"input_ids": ids_NT, "attention_mask": mask_NT, "labels": labels.padded(NO_LABEL)[0]}

    def notices(self, datasets: Mapping[str, Texts], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        for split, pairs in datasets.items():
            if (counts := pairs[0]["dropped"]).any():
                messages.append(
                    f"Dropped of the {len(self.rows[split]):,} rows of the {split} split: {self._described(counts)}."
                )
        return messages

    def pair_rows(self, batch: Batch, losses_B: Tensor, rewards_BS: Tensor, **others_BS: Tensor) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), both answers (their beginnings, the last ones), their rewards, tokens, and what
        else is known of both; loss; and margin, the difference of the rewards."""
        tokens_BS = (batch["labels"] != NO_LABEL).sum(1).view(len(SIDES), -1).T
        ids, labels, rows = batch["input_ids"].tolist(), batch["labels"].tolist(), []
        of_sides = {"reward": rewards_BS, "tokens": tokens_BS, **others_BS}
        for place, loss in enumerate(losses_B.tolist()):
            (_, prompt, chosen), (_, _, rejected) = (
                self.answer_of(ids[row], labels[row]) for row in (place, place + len(losses_B))
            )
            row: dict[str, Any] = {"prompt": prompt, "chosen": beginning(chosen), "rejected": beginning(rejected)}
            for name, values_BS in of_sides.items():
                row |= {f"{side}_{name}": value for side, value in zip(SIDES, values_BS[place].tolist(), strict=True)}
            rows.append(row | {"loss": loss, "margin": row["chosen_reward"] - row["rejected_reward"]})
        return rows

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with their loss as the error."""
        return [{**row, "error": round(row["loss"], 6)} for row in rows]

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
