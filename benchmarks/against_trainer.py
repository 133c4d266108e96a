"""Train each kind of task beside transformers' Trainer, with the same settings: the metric, and samples a second.

    python benchmarks/against_trainer.py [--data FOLDER] [--tasks reviews tags] [--rounds 2]

FOLDER holds the real data, in the folders yelp, mnist and so on; without it, all tasks train on generated samples. Both start
from the same new weights, with the same optimizer, schedule, clipping and batch, in float32. Trainer shuffles and pads as it
does by default, and its model is scored by the task's own metrics; each round has another seed. "samples/s" are those of
training alone, without evaluations, saving and the loading of libraries, on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from contest import take_turns
from record import parse_options, print_table, save

SMALL_BERT = (
    "task.model_config={model_type: bert, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 512, initializer_range: 0.05}"
)
COMMON = ("train.micro_batch_tokens=null", "train.log_every=1", "checkpoint.every=null", "train.mixed_precision=no")
TASKS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "reviews": (
        "text_classification_demo",
        "accuracy",
        ("task.model=null", SMALL_BERT, "task.vocab_size=8192", "task.max_length=256", "train.epochs=2", "train.lr=5e-4"),
        ("task.data_files.train={}/yelp/train.jsonl", "task.data_files.eval={}/yelp/test.jsonl", "task.label_column=label"),
    ),
    "tags": ("token_classification_demo", "f1", ("train.epochs=3",), ()),
}
"""The recipe, the metric, settings, and the settings for real data."""


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch

    torch.set_num_threads(1)
    rows, measured = [], {}
    for name in options.tasks:
        turns: dict[str, Callable[[int], tuple[float, float]]] = {
            "hftune": lambda turn, name=name: train_ours(recipe_of(name, options, turn)),
            "Trainer": lambda turn, name=name: train_theirs(recipe_of(name, options, turn)),
        }
        results = take_turns(turns, options.rounds)
        metric = TASKS[name][1]
        scores, speeds = ({who: [run[place] for run in runs] for who, runs in results.items()} for place in (0, 1))
        ratio = median(ours / theirs for ours, theirs in zip(speeds["hftune"], speeds["Trainer"], strict=True))
        for who in turns:
            spread = f"{min(scores[who]):.3f} to {max(scores[who]):.3f}"
            rows.append((name, who, metric, f"{mean(scores[who]):.3f}", spread, f"{median(speeds[who]):.0f}"))
        measured[f"{name}: {metric} of hftune, of Trainer; samples a second against Trainer's"] = (
            f"{mean(scores['hftune']):.3f}, {mean(scores['Trainer']):.3f}; {ratio:.2f}x"
        )
    title = f"The same training by hftune and by transformers' Trainer, {options.rounds} seeds, one thread"
    table = print_table(title, ("task", "", "metric", "mean", "from ... to", "samples/s"), rows)
    save(__file__, options, [table], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the real data; default: generated samples")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--rounds", type=int, default=2, help="seeds (default %(default)s)")
    parser.add_argument("--train", type=int, default=4000, help="training samples of each task (default %(default)s)")
    parser.add_argument("--evaluate", type=int, default=1000, help="evaluation samples (default %(default)s)")
    return parse_options(parser, smoke={"rounds": 1, "train": 64, "evaluate": 32})


def recipe_of(name: str, options: argparse.Namespace, turn: int) -> Any:
    """Build the recipe that both train, with a seed for each round."""
    from hftune import Recipe

    recipe, _, settings, real = TASKS[name]
    words = [*COMMON, *settings, *(word.format(options.data) if "{}" in word else word for word in real if options.data)]
    words += ["train.batch_size=32", "train.micro_batch_size=32", f"seed={1 + turn}", "resume=never"]
    words += [f"task.max_train_samples={options.train}", f"task.max_eval_samples={options.evaluate}"]
    return Recipe.load(recipe, *words)


def train_ours(recipe: Any) -> tuple[float, float]:
    """Train with hftune; return the last metric, and samples a second."""
    from hftune import train

    with tempfile.TemporaryDirectory() as folder:
        recipe.output_dir = folder
        result = train(recipe)
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        seconds = [line["perf/step_s"] for line in lines if "perf/step_s" in line]
        samples = json.loads((Path(folder) / "run.json").read_text())["data"]["train"]["samples"]
    return result.metrics[metric_of(recipe)], samples * recipe.train.epochs / sum(seconds)


def train_theirs(recipe: Any) -> tuple[float, float]:
    """Train with Trainer from the same weights; return the metric, by the task's own rules, and samples a second."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hftune.build import build_model, load_datasets

    class Stopwatch(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = getattr(self, "began", time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    datasets, task, config = load_datasets(recipe), recipe.task, recipe.train
    torch.manual_seed(recipe.seed)
    model, stopwatch = build_model(recipe), Stopwatch()
    num_steps = math.ceil(len(datasets["train"]) / config.batch_size) * config.epochs
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            seed=recipe.seed,
            per_device_train_batch_size=config.batch_size,
            num_train_epochs=config.epochs,
            learning_rate=config.lr,
            lr_scheduler_type=config.schedule,
            warmup_steps=round(config.warmup_ratio * num_steps),
            weight_decay=config.weight_decay,
            max_grad_norm=config.clip_norm,
            optim="adamw_torch_fused",
            remove_unused_columns=False,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, task.collate, datasets["train"], callbacks=[stopwatch])
        trainer.train()
    return score(task, model, datasets["eval"])[metric_of(recipe)], len(datasets["train"]) * config.epochs / stopwatch.seconds


def score(task: Any, model: Any, dataset: Any, at_once: int = 64) -> dict[str, Any]:
    """Evaluate a model by its task."""
    import torch

    model.eval()
    rows = []
    for start in range(0, len(dataset), at_once):
        batch = task.collate([dataset[index] for index in range(start, min(start + at_once, len(dataset)))])
        with torch.no_grad():
            rows += task.predictions(model(**task.evaluation_inputs(batch)), model, batch)
    return task.metrics(rows)


def metric_of(recipe: Any) -> str:
    return next(metric for name, metric, *_ in TASKS.values() if name == recipe.recipe)


if __name__ == "__main__":
    main()
