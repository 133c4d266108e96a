"""Preference pairs: a language model learns to prefer the chosen answer of each pair to the rejected one, by DPO and its kin.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B pairs, S = 2 sides (chosen, rejected), N = S B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftune.config.keys import key
from hftune.data.preferences import SIDES
from hftune.tasks.answer_pairs import AnswerPairs
from hftune.tasks.preference_losses import METHODS, Method, Settings, scores, sft_losses

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.task import Batch


@dataclass
class Preferences(AnswerPairs):
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

    scored_head = "each"

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Add ``reference`` (B, S) float32."""
        return {**super().collate(examples), "reference": self.reference_of(examples)}

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
        logps_BS, tokens_BS = self.logps(outputs, labels_NT), self.tokens(labels_NT)
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
        losses_B, scores_BS, logps_BS, _ = self._compared(outputs, self.target(batch))
        return self.pair_rows(batch, losses_B, self._beta * scores_BS, logp=logps_BS)
