"""Muon for the matrices of a model's layers, AdamW for everything else. Independent of processes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

MATRICES = "matrices"
"""Key of a parameter group: whether it is Muon's."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration that makes all singular values of a matrix about 1: torch.optim.Muon's default."""


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on the groups that are marked as MATRICES, torch.optim.AdamW on the others, as one optimizer.

    It differs from torch.optim.Muon (torch 2.13) in two ways, so that a step does not depend on how many processes compute it:

    - A matrix is orthogonalized as a whole. Where processes hold parts of it, ``whole`` and ``part`` lead there and back.
    - In float32 and not bfloat16. The iteration multiplies small singular values by up to 485; so a rounding to three digits,
      which a gradient's last bit can tip, would change the step.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable
    for LLM Training", for match_rms_adamw. Tests compare it to torch.optim.Muon, bit for bit if that does not round.
    """

    whole: Callable[[Tensor], Tensor] = staticmethod(lambda value: value)
    """Returns all of a tensor of which this process may hold a part. Collective if it does."""
    part: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda whole, like: whole)
    """Returns this process's part of a whole tensor, as it holds the second one."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ):
        """Build it on groups that say which are MATRICES.

        Args:
            betas, eps: AdamW's.
            momentum, nesterov, ns_steps, adjust_lr_fn: torch.optim.Muon's. With match_rms_adamw, one learning rate suits both.
        """
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn} is neither match_rms_adamw nor original")
        of_muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, MATRICES: False}
        super().__init__(params, {**defaults, **of_muon})
        rest = [group for group in self.param_groups if not group[MATRICES]]
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True) if rest else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take a step from the gradients that are there. Collective if processes hold parts of the matrices."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"] if group[MATRICES] else ():
                if (gradient := matrix.grad) is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                average = state["momentum_buffer"]
                average.lerp_(gradient, 1 - momentum)
                update = self.whole(gradient.lerp(average, momentum) if group["nesterov"] else average)
                matrix.mul_(1 - lr * group["weight_decay"])
                rows, columns = matrix.shape
                if group["adjust_lr_fn"] == "match_rms_adamw":  # steps as large as AdamW's usually are
                    factor = 0.2 * math.sqrt(max(rows, columns))
                else:
                    factor = math.sqrt(max(1, rows / columns))
                matrix.add_(self.part(orthogonalized(update, group["ns_steps"]), matrix), alpha=-lr * factor)
        if self._adamw is not None:
            self._adamw.state = self.state  # one state for both; whoever loads it makes a new one
            self._adamw.param_groups = [group for group in self.param_groups if not group[MATRICES]]
            self._adamw.step()


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """Return about U V^T for a matrix U S V^T, by Newton-Schulz iterations: its singular values come to lie around 1."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
