"""Optimizers, their parameter groups, and schedules as pure functions of the optimizer step. Knows no batch and no rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from hftune.config.sections import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters: matrices and embeddings decay, biases and norm parameters (under 2 dimensions) do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build ``train.optimizer``, fused: one kernel for all parameters, on CPUs and GPUs.

    But for sgd under fp16: where the scaler skips the first step, fused SGD keeps momentum that was never written (torch 2.13).
    """
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=config.mixed_precision != "fp16")
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer]
    return kind(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)


def num_warmup_steps(num_steps: int, config: TrainConfig) -> int:
    """Return in how many steps the learning rate rises; the next one, which there always is, is the first at its peak."""
    return min(math.ceil(config.warmup_ratio * num_steps), num_steps - 1)  # a run of one step would have rate 0


def lr_at(step: int, num_steps: int, config: TrainConfig, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step ``step`` (0-based) out of ``num_steps``.

    A function, not an object: nothing to save, nothing that can be stepped once too often.
    Source: transformers.optimization.get_{linear,cosine,constant}_schedule_with_warmup, to which tests compare it; with
    ``train.min_lr``, torch.optim.lr_scheduler.CosineAnnealingLR's ``eta_min``; torch.optim.lr_scheduler.StepLR, stepped after
    each epoch, for step, which counts its epochs from the first step on, whatever the warmup.
    """
    num_warmup = num_warmup_steps(num_steps, config)
    if step < num_warmup:
        return config.lr * step / num_warmup
    if config.schedule == "step":
        return config.lr * config.gamma ** (step // (steps_per_epoch * config.step_size))
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    factor = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}
    return config.min_lr + (config.lr - config.min_lr) * max(0.0, factor[config.schedule])
