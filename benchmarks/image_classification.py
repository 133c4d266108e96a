"""Image classification beside transformers.Trainer: the same new model, images and settings; accuracy and images per second.

    python benchmarks/image_classification.py FOLDER     # with train/CLASS/* and test/CLASS/*; without it: generated shapes

Trainer prepares images as transformers' documentation does: the image processor decodes and scales each one in every epoch.
hftune does that once, which its time includes. Evaluations are not timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from bert_on_reviews import quiet
from record import parse_options, print_table, save
from transformers import AutoImageProcessor, Trainer, TrainerCallback, TrainingArguments

from hftune import Recipe, train
from hftune.build import build_model
from hftune.data.demo_shapes import NUM_SHAPES, shapes

SIZES = "layer_type: basic, embedding_size: 32, hidden_sizes: [32, 64, 128], depths: [1, 1, 1]"
MODEL = f"task.model_config={{model_type: resnet, {SIZES}}}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="with train/ and test/; default: generated shapes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each, with different seeds (default %(default)s)")
    parser.add_argument("--image-size", type=int, default=112)
    return parse_options(parser, {"epochs": 1, "seeds": 1, "image_size": 32})


def recipe_of(options: argparse.Namespace, folder: Path, seed: int) -> Recipe:
    words = [
        *("task.model=null", MODEL, "task.augmentation=null", f"task.image_size={options.image_size}", f"seed={seed}"),
        *(f"task.data_dir={options.folder}", f"train.epochs={options.epochs}", "train.batch_size=32", "train.lr=1e-3"),
        *(
            "train.micro_batch_size=32",
            "train.mixed_precision=no",
            "train.num_workers=0",
            "train.log_every=1",
            f"output_dir={folder}/ours{seed}",
        ),
    ]
    return Recipe.load("image_classification", *words)


def training_seconds(folder: Path) -> float:
    """Return the seconds of all steps, without evaluations and exports."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sum(line["perf/step_s"] for line in lines if "perf/step_s" in line)


class Clock(TrainerCallback):
    """Measures the seconds of a training alone."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.began


def with_trainer(recipe: Recipe, processor_folder: Path, folder: Path) -> tuple[float, float]:
    """Train as the recipe says; return accuracy and seconds."""
    config, task = recipe.train, recipe.task
    processor = AutoImageProcessor.from_pretrained(processor_folder, backend="pil")

    def prepare(rows: dict[str, list]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    data = datasets.load_dataset("imagefolder", data_dir=str(task.data_dir)).with_transform(prepare)
    arguments = TrainingArguments(
        output_dir=str(folder / "theirs"),
        learning_rate=config.lr,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_ratio,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=recipe.eval.batch_size,
        num_train_epochs=config.epochs,
        max_grad_norm=config.clip_norm,
        seed=recipe.seed,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = Trainer(
        model=build_model(recipe), args=arguments, train_dataset=data["train"], eval_dataset=data["test"], callbacks=[clock]
    )
    trainer.train()
    found = trainer.predict(data["test"])
    return float((found.predictions.argmax(-1) == found.label_ids).mean()), clock.seconds


def paint(folder: Path, counts: dict[str, int]) -> Path:
    """Write generated shapes where photographs would be, and return the folder."""
    for part, name in (("train", "train"), ("eval", "test")):
        for index, row in enumerate(shapes(part, counts[part])):
            (folder / name / row["label"]).mkdir(parents=True, exist_ok=True)
            row["image"].save(folder / name / row["label"] / f"{index}.png")
    return folder


def row_of(name: str, found: Sequence[tuple[float, float]], num_images: int) -> tuple[str, ...]:
    accuracies, seconds = zip(*found, strict=True)
    spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
    return name, f"{fmean(accuracies):.3f}", spread, f"{num_images / fmean(seconds):.0f}"


def main() -> None:
    options = parse()
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder, title = Path(name), "generated shapes"
        if options.folder is None:
            options.folder = paint(folder / "shapes", {"train": 64, "eval": 24} if options.smoke else NUM_SHAPES)
        else:
            title = options.folder.name
        ours, theirs = [], []
        for seed in range(options.seeds):
            recipe = recipe_of(options, folder, seed)
            began = time.perf_counter()
            recipe.task.datasets()  # decodes the images, the first time
            decoding = time.perf_counter() - began if seed == 0 else 0.0
            result = train(recipe)
            ours.append((result.metrics["accuracy"], training_seconds(result.output_dir) + decoding))
            theirs.append(with_trainer(recipe, result.model_dir, folder))
        num_images = options.epochs * len(recipe.task.datasets()["train"])
    rows = [row_of("hftune", ours, num_images), row_of("Trainer", theirs, num_images)]
    table = print_table(f"{title}, {options.epochs} epochs", ("", "accuracy", "of seeds", "images/s"), rows)
    what = f"Accuracy and images/s, {title}, {options.epochs} epochs, mean of {options.seeds} seeds"
    save(__file__, options, [table], {what: f"{rows[0][1]}, {rows[0][3]}/s; Trainer {rows[1][1]}, {rows[1][3]}/s"})


if __name__ == "__main__":
    main()
