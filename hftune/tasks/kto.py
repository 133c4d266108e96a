"""Kahneman-Tversky optimization: a language model learns from single answers, each judged as desirable or undesirable.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, S = 2 texts of each (its own answer, one to another prompt), N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.data.messages import ChatError
from hftune.data.preferences import ALONE
from hftune.data.unpaired import JUDGED, TEXTS, judged_of, judged_tokens, mismatched, others_of
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.task import BatchLossTask
from hftune.tasks.judged_answers import JudgedAnswers
from hftune.tasks.late_rows import late_rows_each
from hftune.tasks.text import beginning

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.tokenized import Texts
    from hftune.task import Batch

COMPLETIONS = ("completion", "answer", "response", "messages", "conversations")
"""Usual names of a column of answers."""
KINDS = {True: "desirable", False: "undesirable"}
USUAL_RATIO = (1.0, 4 / 3)


@dataclass
class KTO(JudgedAnswers, BatchLossTask):
    """Learn to write desirable answers rather than undesirable ones, by Kahneman-Tversky optimization (KTO).

    An item is an answer. Its loss depends on how much likelier the model makes it than the reference does, compared with a
    baseline: how much likelier it makes answers to other prompts, the mean over the step. See docs/kto.md.
    """

    completion_column: str | None = None
    """Column of the answers: texts, lists of messages, or whole conversations. null: completion, or what is usual."""
    label_column: str = "label"
    """Column that is true for desirable answers and false for undesirable ones."""
    beta: float = key(0.1, gt=0)
    """Factor of the log-ratios in the loss: how dear it is to move away from the reference."""
    desirable_weight: float = key(1.0, gt=0)
    """Weight of the losses of desirable answers."""
    undesirable_weight: float = key(1.0, gt=0)
    """Weight of the losses of undesirable answers."""
    bad_samples: Literal["refuse", "drop"] = "refuse"
    """What to do with an empty answer or prompt, with no label, with more than max_length tokens, and with a prompt that no
    answer to another one fits behind. refuse: the data are refused, with the number of each kind. drop: they are left out and
    counted. No prompt or answer is ever cut."""

    scored_head = "each"
    libraries = (*JudgedAnswers.libraries, "hftune.data.unpaired")
    metric_directions = directions(
        "accuracy", "margin", "kl", *(f"{kind}_{what}" for what in ("reward", "length") for kind in KINDS.values())
    )
    sample_fields = ("prompt", "completion", "label", "reward")
    reference_fields = ("logp", "mismatched_logp")
    token_columns = TEXTS

    # Data

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        names = rows.column_names
        completion = self.completion_column or next(filter(names.__contains__, COMPLETIONS), COMPLETIONS[0])
        return {**super().find_columns(rows), "completion_column": completion, "label_column": self.label_column}

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return judged_of(row, self.read_columns)
        except ChatError:  # it is refused, or dropped, as a sample
            return []

    def tokenized(self, split: str) -> Texts:
        """Return the samples of a split: completion and mismatched with their labels, label, start, prompt, row, dropped."""
        import numpy as np

        from hftune.data.tokenized import cached_texts, column_of, lengths_of

        kind = getattr(self.rows[split].features[self.label_column], "dtype", "lists")
        if kind != "bool":
            raise DataError(f"task.label_column={self.label_column} of the {split} split holds {kind}, not true and false.")
        samples = self.written_samples(split, judged_tokens, JUDGED)

        def make() -> dict[str, Any]:
            starts_N, prompts_N, rows_N = (column_of(samples, name) for name in ("start", "prompt", "row"))
            others_N = others_of(starts_N, lengths_of(samples, "completion"), prompts_N, self.max_length)
            alone, kept = np.flatnonzero(others_N < 0), np.flatnonzero(others_N >= 0)
            counts = np.array(samples[0]["dropped"])
            counts[ALONE - 1] = len(alone)
            if (prompts_N == prompts_N[0]).all():
                raise DataError(f"All rows of the {split} split have one prompt. KTO compares answers to different ones.")
            if len(alone) and not (self.drops and len(kept)):
                self.refuse(split, counts, int(rows_N[alone[0]]))
            arrays: dict[str, Any] = {**(samples.select(kept.tolist()) if len(alone) else samples).contents()}
            arrays["dropped"] = np.zeros((len(kept), len(counts)), np.int32)
            arrays["dropped"][0] = counts
            return {**arrays, **mismatched(samples, kept, others_N[kept])}

        found = cached_texts(["mismatched", *self.depends_on(split), self.encode_settings], make)
        kinds = [kind for kind, count in self.class_counts(found).items() if count]
        if len(kinds) == 1:
            raise DataError(
                f"All answers of the {split} split are {kinds[0]} (task.label_column={self.label_column}). KTO learns from both"
                " kinds."
            )
        return found

    def class_counts(self, dataset: Texts) -> Mapping[str, int]:
        from hftune.data.tokenized import column_of

        desirable = int(column_of(dataset, "label").sum())
        return dict(zip(KINDS.values(), (desirable, len(dataset) - desirable), strict=True))

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Add ``desirable`` (B,) int64, 0 or 1, and ``reference`` (B, S) float32."""
        from hftune.data.tokenized import values

        more = {"desirable": values(examples, "label"), "reference": self.reference_of(examples)}
        return {**super().collate(examples), **more}

    def notices(self, datasets: Mapping[str, Texts], model: PreTrainedModel) -> list[str]:
        desirable, undesirable = self.class_counts(datasets["train"]).values()
        ratio, (least, most) = self.desirable_weight * desirable / (self.undesirable_weight * undesirable), USUAL_RATIO
        messages = super().notices(datasets, model)
        if not least <= ratio <= most:
            messages.append(
                f"Desirable answers have {ratio:.3g} times the weight of undesirable ones: {desirable:,} times "
                f"task.desirable_weight to {undesirable:,} times task.undesirable_weight. KTO's authors advise 1 to 1.33."
            )
        return messages

    # Loss

    def target(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("labels", "reference", "desirable")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return len(target["desirable"])

    def embed(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Return the log-ratios to the reference of each sample's own answer and of its mismatched one, (B, S)."""
        return self.logps(outputs, target["labels"]) - target["reference"]

    def batch_labels(self, target: Mapping[str, Tensor]) -> Tensor:
        return target["desirable"]

    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of the samples, (B,).

        Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024), eq. 8.
        """
        ratios_B, is_desirable_B = embeddings[:, 0], labels.bool()
        margins_B = self.beta * (ratios_B - _baseline(embeddings))
        desirable_B, undesirable_B = 1 - margins_B.sigmoid(), 1 - (-margins_B).sigmoid()
        return (self.desirable_weight * desirable_B).where(is_desirable_B, self.undesirable_weight * undesirable_B)

    # Evaluation

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), completion (its beginning, the last answer), label, tokens, reward, which is beta
        times the log-ratio, and of both texts log-probability and log-ratio."""
        target = self.target(batch)

        def made(ids: list, labels: list, desirable: bool, tokens: list, logps: list, ratios: list) -> dict[str, Any]:
            _, prompt, completion = self.answer_of(ids, labels)
            row = {"prompt": prompt, "completion": beginning(completion), "label": bool(desirable), "tokens": tokens[0]}
            for name, values in (("logp", logps), ("log_ratio", ratios)):
                row |= {name: values[0], f"mismatched_{name}": values[1]}
            return row | {"reward": self.beta * row["log_ratio"]}

        of_both = self.tokens(batch["labels"]), self.logps(outputs, batch["labels"]), self.embed(outputs, target)
        own = (batch[name][: len(target["desirable"])] for name in ("input_ids", "labels"))
        return late_rows_each(made, *own, target["desirable"], *of_both)

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the loss of one batch that holds the whole split; its baseline, kl; the share of answers whose reward is on
        their side of it; means of rewards and lengths of both kinds of answers, and margin, the difference of the rewards.

        Each row gets its loss.
        """
        import torch

        ratios_BS = torch.tensor([[row["log_ratio"], row["mismatched_log_ratio"]] for row in rows], dtype=torch.float64)
        losses, kl = (
            self.batch_losses(ratios_BS, torch.tensor([row["label"] for row in rows])).tolist(),
            _baseline(ratios_BS).item(),
        )
        for row, loss in zip(rows, losses, strict=True):
            row["loss"] = loss
        means = {
            f"{kind}_{name}": fmean(row[field] for row in rows if row["label"] == label)
            for name, field in (("reward", "reward"), ("length", "tokens"))
            for label, kind in KINDS.items()
        }
        accuracy = fmean((row["log_ratio"] > kl) == row["label"] for row in rows)
        margin = means["desirable_reward"] - means["undesirable_reward"]
        return {"loss": fmean(losses), "accuracy": accuracy, "margin": margin, "kl": kl, **means}

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the text with the answer, and that of the baseline, in pieces, each with whether its probability counts."""
        own, other = (self.pieces_of(example[name], example[f"{name}_labels"]) for name in TEXTS)
        return [(f"{KINDS[bool(example['label'])]}:\n", False), *own, ("\nmismatched, for the baseline:\n", False), *other]


def _baseline(ratios_BS: Tensor) -> Tensor:
    """Return how much likelier the model makes mismatched answers than the reference does, the mean; not below 0.

    It is no part of the graph: KTO keeps it as it is for a step.
    """
    return ratios_BS[:, 1].detach().mean().clamp(min=0)
