"""An optimizer of your own: a subclass of torch.optim.Optimizer whose state tensors have the shape of their parameters."""

import torch


class Lion(torch.optim.Optimizer):
    """Step by the sign of a momentum. Source: Chen et al., 2023, arXiv:2302.06675, algorithm 2."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (fast, slow) = group["lr"], group["betas"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - fast).sign()
                weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.lerp_(weight.grad, 1 - slow)
