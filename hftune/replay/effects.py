"""What a key of a recipe can change in a training, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Effect(StrEnum):
    """What a difference changes first."""

    WEIGHTS = "the first weights"
    SAMPLES = "the samples of a step"
    SKIPPED = "a step that is left out"
    ITEMS = "the number of items"
    LR = "the learning rate"
    FORWARD = "the loss of equal weights"
    BACKWARD = "the gradient of an equal loss"
    UPDATE = "the update"
    ROUNDING = "rounding"


NOTHING: frozenset[Effect] = frozenset()
RATE, UPDATE, ROUNDING = frozenset({Effect.LR}), frozenset({Effect.UPDATE}), frozenset({Effect.ROUNDING})
CONTENT = frozenset({Effect.ITEMS, Effect.FORWARD, Effect.BACKWARD})
MODEL = CONTENT | {Effect.WEIGHTS}
DATA = CONTENT | {Effect.SAMPLES, Effect.UPDATE}
ANYTHING = frozenset(Effect)
UNKNOWN = ANYTHING - RATE
"""Of a key whose effects nobody has listed: a task's fields cannot touch the schedule."""
KEYS: Mapping[frozenset[Effect], str] = {
    NOTHING: (
        "recipe output_dir resume track eval checkpoint adapter.export task.eval_split task.test_split task.max_eval_samples "
        "task.max_test_samples task.data_files.eval task.data_files.test task.generation task.scores task.sample_fields "
        "train.num_workers train.log_every train.profile train.dead_after_s train.stall_after_s train.ema_decay"
    ),
    frozenset({Effect.WEIGHTS, Effect.SAMPLES, Effect.FORWARD}): "seed",
    frozenset({Effect.SAMPLES, Effect.LR}): "train.batch_size",
    frozenset({Effect.SKIPPED}): "train.skip",
    RATE: (
        "train.lr train.epochs train.max_steps train.schedule train.min_lr train.warmup_ratio train.decay_ratio train.cycles "
        "train.power train.gamma train.step_size"
    ),
    UPDATE: (
        "train.optimizer train.optimizer_args train.betas train.eps train.momentum train.weight_decay train.clip_norm "
        "train.groups train.layer_decay"
    ),
    UPDATE | {Effect.BACKWARD}: "train.freeze",
    frozenset({Effect.FORWARD, Effect.BACKWARD}): "task.label_smoothing task.focal_gamma",
    frozenset({Effect.FORWARD, Effect.BACKWARD, Effect.ROUNDING}): (
        "train.micro_batch_size train.micro_batch_tokens train.packing train.parts train.head_loss train.mixed_precision "
        "train.fsdp_gather train.tf32 train.batch_norm train.compile train.deterministic "
        "train.gradient_checkpointing"
    ),
    MODEL | UPDATE: "adapter",
    MODEL: (
        "task.type task.weights task.model task.model_revision task.model_config task.network task.network_args task.tokenizer"
    ),
    DATA: (
        "task.data_files task.data_dir task.dataset task.dataset_config task.dataset_revision task.datasets task.train_split "
        "task.max_train_samples task.eval_share task.eval_fold"
    ),
    ROUNDING: "parallel train.cudnn_benchmark",
}
"""What recipe keys can change, they and the keys below them; see UNKNOWN for any other."""
EFFECTS = {key: effects for effects, keys in KEYS.items() for key in keys.split()}


def effects_of(key: str) -> frozenset[Effect]:
    """Return what a recipe key can change."""
    if "dropout" in key.rpartition(".")[2] or "drop_path" in key:
        return frozenset({Effect.FORWARD, Effect.BACKWARD})
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((EFFECTS[prefix] for prefix in prefixes if prefix in EFFECTS), UNKNOWN)
