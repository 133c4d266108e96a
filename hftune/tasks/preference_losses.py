"""Losses of preference pairs, from the log-probabilities of both answers. Independent of models, micro-batches and processes.

Each method is a function of two scores: a of the chosen answer and b of the rejected one. A score is the log-probability of an
answer, less that of the reference where the method has one, and divided by the answer's tokens where it averages.

Shape suffixes: B pairs, S = 2 sides (chosen, rejected).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # recipes name methods, and are read before torch is imported
    from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """What the functions read besides scores; see the keys of ``Preferences``."""

    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0
    divergence: str = "reverse_kl"
    alpha: float = 0.5


def sigmoid(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Rafailov et al., "Direct Preference Optimization" (2023), eq. 7; with label smoothing, known as cDPO: Mitchell, "A note
    on DPO with noisy preferences" (2023); with other divergences: see ``diverged``."""
    margin = o.beta * (diverged(a, o) - diverged(b, o))
    return -(1 - o.label_smoothing) * logsigmoid(margin) - o.label_smoothing * logsigmoid(-margin)


def robust(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Chowdhury et al., "Provably Robust DPO" (2024), eq. 10: unbiased if a share of the labels, label_smoothing, is wrong."""
    margin = o.beta * (a - b)
    share = o.label_smoothing
    return (-(1 - share) * logsigmoid(margin) + share * logsigmoid(-margin)) / (1 - 2 * share)


def hinge(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Liu et al., "Statistical Rejection Sampling Improves Preference Optimization" (2023), after SLiC."""
    return (1 - o.beta * (a - b)).relu()


def ipo(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), eq. 17; on averages,
    as its authors computed it."""
    return (a - b - 1 / (2 * o.beta)) ** 2


def apo_zero(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """D'Oosterlinck et al., "Anchored Preference Optimization" (2024), eq. 7: chosen answers become likelier."""
    return 1 - (o.beta * a).sigmoid() + (o.beta * b).sigmoid()


def apo_down(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """The same, eq. 8: both become less likely, the rejected one more so; if the model is better than the chosen answers."""
    return (o.beta * a).sigmoid() + 1 - (o.beta * (a - b)).sigmoid()


def simpo(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward" (2024), eq. 6."""
    return -logsigmoid(o.beta * (a - b) - o.gamma)


def orpo(a: Tensor, b: Tensor, o: Settings) -> Tensor:
    """Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model" (2024), eq. 7, times its lambda."""
    return -o.beta * logsigmoid(_log_odds(a) - _log_odds(b))


def logsigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _log_odds(a: Tensor) -> Tensor:
    from torch import finfo

    a = a.clamp(max=-finfo(a.dtype).eps)  # of an answer that is certain, they are infinite
    return a - (-a.expm1()).log()


def _exp(x: Tensor) -> Tensor:
    return x.clamp(max=80).exp()  # of more, two infinite values would have no difference in float32


def diverged(a: Tensor, o: Settings) -> Tensor:
    """Return f'(exp(a)) of a divergence, without its constant, by which margins do not change.

    Source: Wang et al., "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints"
    (2023), table 1.
    """
    if o.divergence == "forward_kl":
        return -_exp(-a)
    if o.divergence == "js":
        return logsigmoid(a)
    return -_exp(-o.alpha * a) / o.alpha if o.divergence == "alpha" else a


@dataclass(frozen=True)
class Method:
    """A value of ``task.method``."""

    losses: Callable[[Tensor, Tensor, Settings], Tensor]
    has_reference: bool = True
    averages: bool = False
    """Whether scores are divided by the tokens of the answer, unless the recipe says otherwise."""
    beta: float = 0.1
    sft_weight: float = 0.0


METHODS = {
    "sigmoid": Method(sigmoid),
    "robust": Method(robust),
    "hinge": Method(hinge),
    "ipo": Method(ipo, averages=True),
    "apo_zero": Method(apo_zero),
    "apo_down": Method(apo_down),
    "simpo": Method(simpo, has_reference=False, averages=True, beta=2.0),
    # Xu et al., "Contrastive Preference Optimization" (2024), eq. 5: DPO with a uniform reference, and an SFT term.
    "cpo": Method(sigmoid, has_reference=False, sft_weight=1.0),
    "orpo": Method(orpo, has_reference=False, averages=True, sft_weight=1.0),
}


def scores(logps_BS: Tensor, tokens_BS: Tensor, reference_BS: Tensor | None, averages: bool) -> Tensor:
    """Return the scores of both answers (B, S); see above."""
    scores_BS = logps_BS if reference_BS is None else logps_BS - reference_BS
    return scores_BS / tokens_BS if averages else scores_BS


def sft_losses(logps_BS: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens of each chosen answer, (B,).

    Source: Pang et al., "Iterative Reasoning Preference Optimization" (2024), eq. 1.
    """
    return -logps_BS[:, 0] / tokens_BS[:, 0]
