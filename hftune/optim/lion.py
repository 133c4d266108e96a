"""Lion, which neither torch nor a library that also works on CPUs has. Independent of processes: each number on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Step by the sign of a momentum, with decoupled weight decay. Needs a third to a tenth of AdamW's learning rate.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must both be in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                gradient, state = parameter.grad, self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=-lr)
                momentum.lerp_(gradient, 1 - beta2)
