"""The base of tasks on answers to prompts that people have judged: their columns, tokens and padding. Knows no loss.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, S texts of each, N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from hftune.data.preferences import PROBLEMS, PROMPTS, encoded
from hftune.errors import DataError
from hftune.tasks.chat_task import ChatTask
from hftune.tasks.text import NO_LABEL, SeveralTexts, head_losses

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.tokenized import Texts
    from hftune.task import Batch


@dataclass
class JudgedAnswers(ChatTask, SeveralTexts):
    """Base of tasks on judged answers. Each of ``token_columns`` has its labels beside it, in a column that ends in _labels.

    A subclass says in a key of its own, bad_pairs if its ``samples_are`` pairs, whether samples with PROBLEMS are dropped.
    """

    prompt_column: str | None = None
    """Column of the prompts, texts or lists of messages. null: prompt, or what is usual, if there is one; it is not needed if
    answers are whole conversations."""
    system_column: str | None = None
    """Column of system messages to put before the prompts. null: system, if there is one."""

    libraries = (*ChatTask.libraries, "hftune.data.preferences")

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns of prompts, system messages and tools, if there are any."""
        names = rows.column_names
        usual = {"prompt": PROMPTS, "system": ("system",), "tools": ("tools",)}
        chosen = {
            name: getattr(self, f"{name}_column") or next(filter(names.__contains__, usual[name]), None) for name in usual
        }
        return {f"{name}_column": column for name, column in chosen.items() if column is not None}

    @property
    def _bad(self) -> str:
        return f"bad_{self.samples_are}"

    @property
    def drops(self) -> bool:
        """Whether samples with PROBLEMS are left out."""
        return getattr(self, self._bad) == "drop"

    def written_samples(self, split: str, read: Callable[..., list[Any]], empty: Mapping[str, Any]) -> Texts:
        """Return the samples of a split: what ``encoded`` makes of its rows, and dropped: in the first of them, how many rows
        were left out for each of PROBLEMS.

        Raises:
            DataError: some have problems, and are not dropped.
        """
        import numpy as np

        from hftune.data.tokenized import OFFSETS, flat_arrays

        def good(encoded: Dataset) -> dict[str, Any]:
            arrays: dict[str, Any] = dict(flat_arrays(encoded))
            problems = arrays.pop("problem")
            bad, counts = np.flatnonzero(problems), np.bincount(problems, minlength=1 + len(PROBLEMS))[1:]
            if len(bad) and (not self.drops or len(bad) == len(problems)):
                self.refuse(split, counts, int(bad[0]))
            for name in arrays:  # those that are bad have no tokens
                if name + OFFSETS not in arrays:
                    arrays[name] = np.delete(arrays[name], bad + 1 if name.endswith(OFFSETS) else bad)
            dropped = np.zeros((len(arrays["row"]), len(PROBLEMS)), np.int32)
            dropped[0] = counts
            return {**arrays, "dropped": dropped}

        encode = partial(encoded, read=read, empty=empty)
        return self.written(self.samples_are, split, encode, self.encode_settings, good)

    def depends_on(self, split: str) -> list[Any]:
        return [*super().depends_on(split), PROBLEMS]

    @property
    def encode_settings(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "drops": self.drops, "whole": not self.generates}

    def refuse(self, split: str, counts: np.ndarray, first: int) -> NoReturn:
        """Raise DataError for samples with PROBLEMS, of which the first is at this row."""
        advice = "Remove them" if self.drops else f"Set task.{self._bad}=drop to leave them out"
        row = self.row_of(split)(first)
        raise DataError(f"The {split} split has {self._described(counts)}; the first at row {row}. {advice}.")

    def _described(self, counts: np.ndarray) -> str:
        """Return how many samples have each of PROBLEMS, in words."""
        what = self.samples_are
        parts = [
            f"{count:,} {what[:-1] if count == 1 else what} {problem.format(max_length=self.max_length)}"
            for count, problem in zip(counts, PROBLEMS, strict=True)
            if count
        ]
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids, attention_mask and labels (N, T) int64, the first text of each sample first."""
        from hftune.data.tokenized import Ragged, ragged

        ids, labels = (
            Ragged.of([text for name in self.token_columns for text in ragged(examples, name + end).rows()])
            for end in ("", "_labels")
        )
        ids_NT, mask_NT = ids.padded(self.text_tokenizer.pad_token_id)
        return {"input_ids": ids_NT, "attention_mask": mask_NT, "labels": labels.padded(NO_LABEL)[0]}

    def shared_beginnings(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return those of the second texts with the first ones: their prompt, but for its last token, which has a label."""
        import torch

        labels = batch["labels"].unflatten(0, (2, -1))
        texts = batch["input_ids"][:, : labels.shape[2]].unflatten(0, (2, -1))
        same = (texts[0] == texts[1]) & (labels == NO_LABEL).all(0)
        counts_B = same.cumprod(1).sum(1)
        return torch.arange(len(counts_B)).repeat(2), torch.cat([torch.zeros_like(counts_B), counts_B])

    def reference_of(self, examples: Sequence[dict[str, Any]]) -> Tensor:
        """Return the reference's log-probabilities of the texts, (B, S) float32; zeros in trials before they are known."""
        import torch

        from hftune.data.tokenized import values

        if "reference" in examples[0]:
            return values(examples, "reference")
        return torch.zeros(len(examples), len(self.token_columns))

    def notices(self, datasets: Mapping[str, Texts], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        for split, samples in datasets.items():
            if (counts := samples[0]["dropped"]).any():
                messages.append(
                    f"Dropped of the {len(self.rows[split]):,} rows of the {split} split: {self._described(counts)}."
                )
        return messages

    def tokens(self, labels_NT: Tensor) -> Tensor:
        """Return the number of labels of each text, (B, S)."""
        return self._by_sample((labels_NT != NO_LABEL).sum(1))

    def logps(self, outputs: Any, labels_NT: Tensor) -> Tensor:
        """Return the log-probability of each text's labels, (B, S) float32."""
        return self._by_sample(-head_losses(outputs, labels_NT).sum(1))

    def _by_sample(self, values_N: Tensor) -> Tensor:
        return values_N.view(len(self.token_columns), -1).T

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with their loss as the error."""
        return [{**row, "error": round(row["loss"], 6)} for row in rows]
