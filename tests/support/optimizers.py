"""Optimizers made for tests."""

import torch


class Counted(torch.optim.Optimizer):
    """Counts its steps in Python's numbers, in its state and in its groups, and steps the shorter the more it took."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "patience": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["patience"] *= 0.9
            for weight in group["params"]:
                count = self.state[weight]["count"] = self.state[weight].get("count", 0) + 1
                weight.add_(weight.grad, alpha=-group["lr"] * group["patience"] / count**0.5)


class Reads(torch.optim.SGD):
    """Reads a weight when it is built."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.norm = self.param_groups[0]["params"][0].detach().norm().item()
