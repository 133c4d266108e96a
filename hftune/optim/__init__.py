"""Optimizers, their parameter groups, and schedules as pure functions of the step. Independent of batches and ranks."""

from hftune.optim.groups import freeze, parameter_groups
from hftune.optim.optimizers import OPTIMIZERS, build_optimizer, optimizer_class
from hftune.optim.schedules import check_schedule, ema_decay_at, lr_at, num_warmup_steps

__all__ = [
    "OPTIMIZERS",
    "build_optimizer",
    "check_schedule",
    "ema_decay_at",
    "freeze",
    "lr_at",
    "num_warmup_steps",
    "optimizer_class",
    "parameter_groups",
]
