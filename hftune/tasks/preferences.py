"""Preference pairs: a language model learns to prefer the chosen answer of each pair to the rejected one, by DPO and its kin.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B pairs, S = 2 sides (chosen, rejected), N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.data.messages import ChatError
from hftune.data.preferences import PROBLEMS, PROMPTS, SIDES, encode, pair_of
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.tasks.chat_task import ChatTask
from hftune.tasks.preference_losses import METHODS, Method, Settings, scores, sft_losses
from hftune.tasks.text import NO_LABEL, beginning, head_losses

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.tokenized import Texts
    from hftune.task import Batch


@dataclass
class Preferences(ChatTask):
    """Learn which of two answers to a prompt is better: direct preference optimization (DPO), and methods like it.

    An item is a pair. Its loss is a function of the log-probabilities that the model gives both answers and, for most methods,
    of those that the model gave them before training: see docs/preferences.md.
    """

    method: str = key("sigmoid", choices=tuple(METHODS))
    """Loss of a pair: sigmoid (DPO, with label_smoothing cDPO), robust, hinge, ipo, apo_zero or apo_down; without a reference
    model simpo, cpo or orpo."""
    beta: float | None = key(None, gt=0)
    """Factor of the margin in the loss: how dear it is to move away from the reference; for ipo tau, for orpo lambda. null:
    0.1, or 2 for simpo."""
    label_smoothing: float = key(0.0, ge=0, lt=0.5, needs=("method", ("sigmoid", "robust", "cpo")))
    """Share of the pairs that are taken to be the wrong way round, for sigmoid, robust and cpo."""
    gamma: float = key(1.0, ge=0, needs=("method", ("simpo",)))
    """Margin that simpo asks for."""
    divergence: str = key("reverse_kl", choices=("reverse_kl", "forward_kl", "js", "alpha"), needs=("method", ("sigmoid",)))
    """Divergence from the reference that sigmoid bounds: reverse_kl is DPO's."""
    alpha: float = key(0.5, gt=0, lt=1, needs=("divergence", ("alpha",)))
    """Of the alpha divergence: near 0 it is reverse_kl, near 1 forward_kl."""
    length_normalized: bool | None = None
    """Whether log-probabilities are divided by the tokens of their answer. null: for ipo, simpo and orpo."""
    sft_weight: float | None = key(None, ge=0)
    """Weight in the loss of a pair of the mean cross-entropy of its chosen answer's tokens, also known as rpo_alpha. null: 1
    for cpo and orpo, 0 for others."""
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

    # Data

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
        """Return the pairs of a split: chosen and chosen_labels, rejected and rejected_labels, their row, and dropped: in the
        first of them, how many rows were left out for each of PROBLEMS."""
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
                arrays[name] = np.delete(arrays[name], bad + 1) if name.endswith(OFFSETS) else arrays[name]
            arrays["row"] = np.delete(arrays["row"], bad)
            dropped = np.zeros((len(arrays["row"]), len(PROBLEMS)), np.int32)
            dropped[0] = counts
            return {**arrays, "dropped": dropped}

        return self.written("pairs", split, encode, {"max_length": self.max_length, "drops": drops}, comparable)

    def _described(self, counts: np.ndarray) -> str:
        """Return how many pairs have each of PROBLEMS, in words."""
        parts = [
            f"{count:,} {'pair' if count == 1 else 'pairs'} {problem.format(max_length=self.max_length)}"
            for count, problem in zip(counts, PROBLEMS, strict=True)
            if count
        ]
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    def lengths(self, dataset: Texts) -> np.ndarray:
        return self.sizes(dataset).sum(1)

    def sizes(self, dataset: Texts) -> np.ndarray:
        from hftune.data.tokenized import sizes_of

        return sizes_of(dataset, SIDES)

    def padded_length(self, sizes: Sequence[int]) -> int:
        """Return the tokens of a pair's texts, which are padded to the longer one."""
        return len(sizes) * max(sizes)

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids, attention_mask and labels (N, T) int64, chosen texts before rejected ones.

        ``reference`` (B, S) float32: the reference's log-probabilities; zeros in trials before they are known.
        """
        import torch

        from hftune.data.tokenized import Ragged, ragged, values

        ids, labels = (
            Ragged.of([text for side in SIDES for text in ragged(examples, side + end).rows()]) for end in ("", "_labels")
        )
        ids_NT, mask_NT = ids.padded(self.text_tokenizer.pad_token_id)
        known = "reference" in examples[0]
        reference_BS = values(examples, "reference") if known else torch.zeros(len(examples), len(SIDES))
        batch = {"input_ids": ids_NT, "attention_mask": mask_NT, "labels": labels.padded(NO_LABEL)[0]}
        return {**batch, "reference": reference_BS}

    def notices(self, datasets: Mapping[str, Texts], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        for split, pairs in datasets.items():
            if (counts := pairs[0]["dropped"]).any():
                messages.append(
                    f"Dropped of the {len(self.rows[split]):,} rows of the {split} split: {self._described(counts)}."
                )
        return messages

    # Loss

    @property
    def _method(self) -> Method:
        return METHODS[self.method]

    @property
    def reference_fields(self) -> Sequence[str]:
        return tuple(f"{side}_logp" for side in SIDES) if self._method.has_reference else ()

    def target(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("labels", "reference")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return len(target["reference"])

    def loss(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        return self.sample_losses(outputs, target).sum()

    def sample_losses(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        return self._compared(outputs, target)[0]

    def _compared(self, outputs: Any, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the losses of the pairs (B,), and their scores, log-probabilities and trained tokens, each (B, S)."""
        labels_NT, method = target["labels"], self._method
        logps_BS = -head_losses(outputs, labels_NT).sum(1).view(len(SIDES), -1).T
        tokens_BS = (labels_NT != NO_LABEL).sum(1).view(len(SIDES), -1).T
        averages = method.averages if self.length_normalized is None else self.length_normalized
        scores_BS = scores(logps_BS, tokens_BS, target["reference"] if method.has_reference else None, averages)
        settings = Settings(self._beta, self.label_smoothing, self.gamma, self.divergence, self.alpha)
        losses_B = method.losses(scores_BS[:, 0], scores_BS[:, 1], settings)
        if weight := method.sft_weight if self.sft_weight is None else self.sft_weight:
            losses_B = losses_B + weight * sft_losses(logps_BS, tokens_BS)
        return losses_B, scores_BS, logps_BS, tokens_BS

    @property
    def _beta(self) -> float:
        return self._method.beta if self.beta is None else self.beta

    # Evaluation

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), both answers (their beginnings, the last ones), and of each its log-probability,
        trained tokens and reward: beta times its score; and margin, the difference of the rewards."""
        found = self._compared(outputs, self.target(batch))
        losses, scored, logps, tokens = (values.tolist() for values in found)
        ids, labels, rows = batch["input_ids"].tolist(), batch["labels"].tolist(), []
        for place in range(len(losses)):
            (_, prompt, chosen), (_, _, rejected) = (
                self.answer_of(ids[row], labels[row]) for row in (place, place + len(losses))
            )
            row: dict[str, Any] = {"prompt": prompt, "chosen": beginning(chosen), "rejected": beginning(rejected)}
            for side, score, logp, count in zip(SIDES, scored[place], logps[place], tokens[place], strict=True):
                row |= {f"{side}_logp": logp, f"{side}_tokens": count, f"{side}_reward": self._beta * score}
            rows.append(row | {"loss": losses[place], "margin": row["chosen_reward"] - row["rejected_reward"]})
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
