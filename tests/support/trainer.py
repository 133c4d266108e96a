"""What transformers' Trainer logs on the batches of hftune's plan: the losses that twenty steps without accumulation must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed

from hftune import Recipe
from hftune.build import build_model, plan_batches

STEPS = 20


def planned_batches(recipe: Recipe, dataset: Any, collate: Callable[[list], Any] | None = None) -> DataLoader:
    """Return the batches of all epochs, in the plan's order; ``collate`` instead of the task's."""
    plan = plan_batches(recipe, dataset)
    samples = [part.samples.tolist() for epoch in range(recipe.train.epochs) for step in plan.epoch(epoch) for part in step]
    return DataLoader(dataset, batch_sampler=samples, collate_fn=collate or recipe.task.collate)


def losses_of_trainer(
    recipe: Recipe, folder: Path, batches: Iterable[Any], kind: type[Trainer] = Trainer, arguments: Any = TrainingArguments
) -> list[float]:
    """Train by Trainer with the recipe's weights and settings for STEPS steps; return the loss of each."""
    config = recipe.train
    set_seed(0)
    settings = arguments(
        output_dir=str(folder),
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        warmup_steps=round(config.warmup_ratio * STEPS),
        lr_scheduler_type=config.schedule,
        max_grad_norm=config.clip_norm,
        max_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = kind(build_model(recipe), settings)
    trainer.get_train_dataloader = lambda: batches
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
