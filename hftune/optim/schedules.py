"""Schedules of the learning rate, as pure functions of the optimizer step. Independent of batches and ranks.

A bare name in ``train.schedule`` is one of ``factor_at``; a dotted path leads to the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hftune.config.importing import import_named
from hftune.config.keys import is_dotted
from hftune.config.sections import TrainConfig
from hftune.errors import ConfigError, TrainingError, format_value


def num_warmup_steps(num_steps: int, config: TrainConfig) -> int:
    """Return the number of warmup steps. At least one step follows them, and the first of these has the peak learning rate.

    ``check_schedule`` refuses as many ``train.warmup_steps`` as steps, or more.
    """
    asked = math.ceil(config.warmup_ratio * num_steps) if config.warmup_steps is None else config.warmup_steps
    return min(asked, num_steps - 1)  # a run of one step would have rate 0


def factor_at(step: int, num_steps: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Return the factor of ``train.lr`` after the warmup, for a bare name of ``train.schedule``: those that recipes may use.

    Source of wsd: Haegele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", section 3.
    """
    num_warmup = num_warmup_steps(num_steps, config)
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":  # to 0 in a straight line
            return max(0.0, 1 - progress)
        case "cosine":  # to 0 along half a cosine
            return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
        case "cosine_restarts":  # likewise, train.cycles times, each time from the peak
            return 0.0 if progress >= 1 else 0.5 * (1 + math.cos(math.pi * ((config.cycles * progress) % 1)))
        case "polynomial":  # to 0 as the share of steps that are left, to the power of train.power
            return max(0.0, 1 - progress) ** config.power
        case "inverse_sqrt":  # as if the rise had taken the steps of the warmup; 10,000 if there is none
            timescale = num_warmup or 10_000
            return 1 / math.sqrt((step - num_warmup + timescale) / timescale)
        case "step":  # times train.gamma after every train.step_size epochs, counted from the first step, warmup included
            return config.gamma ** (step // (steps_per_epoch * config.step_size))
        case "wsd":  # at the peak, and to 0 in a straight line in the last train.decay_ratio of all steps
            num_decay = max(1, min(math.ceil(config.decay_ratio * num_steps), num_steps - num_warmup))
            return max(0.0, min(1.0, (num_steps - step) / num_decay))
    raise ValueError(f"no schedule {config.schedule}")


def lr_at(step: int, num_steps: int, config: TrainConfig, steps_per_epoch: int, num_falls: int = 0) -> float:
    """Return the learning rate of optimizer step ``step`` (0-based) out of ``num_steps``.

    A function, not an object: nothing to save, nothing that can be stepped once too often. The warmup comes first, whatever the
    schedule; a user's function also gets steps counted from the start of the run.
    Source: transformers.get_scheduler, to which tests compare all that it has; with ``train.min_lr``, its ``lr_end`` and
    torch.optim.lr_scheduler.CosineAnnealingLR's ``eta_min``. For step: StepLR, stepped after each epoch. For plateau:
    ReduceLROnPlateau.

    Args:
        num_falls: how often evaluations have made the learning rate fall, with ``train.schedule=plateau``.

    Raises:
        TrainingError: a user's function returned something other than a finite number of at least 0.
    """
    num_warmup = num_warmup_steps(num_steps, config)
    if step < num_warmup:
        return config.lr * step / num_warmup
    if is_dotted(config.schedule):
        factor = _user_schedule(config)(step, num_steps, steps_per_epoch)
        if problem := _factor_problem(factor):
            raise TrainingError(f"train.schedule={config.schedule} returned {problem} for step {step} of {num_steps}.")
        return config.lr * float(factor)
    if config.schedule == "plateau":
        return max(config.min_lr, config.lr * config.gamma**num_falls)
    return config.min_lr + (config.lr - config.min_lr) * factor_at(step, num_steps, steps_per_epoch, config)


def ema_decay_at(step: int, config: TrainConfig) -> float:
    """Return the decay of ``train.ema_decay`` after optimizer step ``step`` (0-based): smaller in the early steps.

    Otherwise a short run would end with an average of mostly initial weights. Source: TensorFlow's ExponentialMovingAverage
    with ``num_updates``, and the warmup of diffusers' EMAModel.
    """
    return 0.0 if config.ema_decay is None else min(config.ema_decay, (1 + step) / (10 + step))


def check_schedule(config: TrainConfig, num_steps: int, steps_per_epoch: int) -> None:
    """Refuse a warmup without an end; try a user's schedule on the first, a middle and the last step.

    Raises:
        ConfigError: the warmup has all steps or more; a user's schedule cannot be imported, fails, or returns something other
            than a finite number of at least 0.
    """
    if (num_warmup := config.warmup_steps or 0) >= num_steps > 1:
        raise ConfigError(
            f"train.warmup_steps={num_warmup}, but training has {num_steps:,} steps in all, and would end before the learning "
            f"rate reaches train.lr. Set fewer than {num_steps:,}, or train longer."
        )
    if not is_dotted(config.schedule):
        return
    schedule, asked = _user_schedule(config), "f(step, num_steps, steps_per_epoch)"
    for step in sorted({0, num_steps // 2, num_steps - 1}):
        try:
            factor = schedule(step, num_steps, steps_per_epoch)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(
                f"train.schedule={config.schedule} cannot be called as {asked} with {step}, {num_steps}, {steps_per_epoch}: "
                f"{type(error).__name__}: {error}."
            ) from error
        if problem := _factor_problem(factor):
            raise ConfigError(
                f"train.schedule={config.schedule} returned {problem} for step {step} of {num_steps}. {asked} must return the "
                "factor of train.lr: a finite number of at least 0."
            )


def _user_schedule(config: TrainConfig) -> Callable[[int, int, int], float]:
    module, _, attribute = config.schedule.rpartition(".")
    found = import_named("train.schedule", config.schedule, module, attribute)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"train.schedule={config.schedule} is not a function f(step, num_steps, steps_per_epoch).")
    return found


def _factor_problem(factor: Any) -> str | None:
    """Format a factor that is not a finite number of at least 0; return None if it is one."""
    try:
        is_fine = not isinstance(factor, (bool, str)) and math.isfinite(number := float(factor)) and number >= 0
    except (TypeError, ValueError):
        is_fine = False
    return None if is_fine else format_value(factor)
