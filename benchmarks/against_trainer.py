"""Train each kind of task beside transformers' Trainer, with the same settings: the metric, and samples a second.

    python benchmarks/against_trainer.py [--data FOLDER] [--tasks reviews tags sentences questions images masks] [--rounds 2]

FOLDER holds the real data, in the folders yelp, images and so on; without it, and where it has none for a task, samples are
generated. Both start from the same new weights, with the same optimizer, schedule, clipping and batch, in float32. Trainer
shuffles, pads and prepares images in every epoch as it does by default; its model is scored by the task's own metrics. Each
round has another seed. "samples/s" are those of training alone on one thread, without evaluations, saving and the loading of
libraries. hftune decodes images once, before the training: the first round's time includes it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from contest import take_turns
from record import parse_options, print_table, save

SMALL_BERT = (
    "task.model_config={model_type: bert, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 512, initializer_range: 0.05}"
)
SMALL_RESNET = (
    "task.model_config={model_type: resnet, layer_type: basic, embedding_size: 32, hidden_sizes: [32, 64, 128], "
    "depths: [1, 1, 1]}"
)
COMMON = (
    *("train.micro_batch_tokens=null", "train.batch_size=32", "train.micro_batch_size=32", "train.mixed_precision=no"),
    *("train.log_every=50", "checkpoint.every=never", "train.num_workers=0", "resume=never"),
)


@dataclass(frozen=True)
class Case:
    """A training that both do."""

    recipe: str
    metric: str
    settings: tuple[str, ...]
    real: tuple[str, ...] = ()
    """Settings for the real data, with {} for their folder."""


CASES = {
    "reviews": Case(
        "text_classification_demo",
        "accuracy",
        ("task.model=null", SMALL_BERT, "task.vocab_size=8192", "task.max_length=256", "train.epochs=2", "train.lr=5e-4"),
        ("task.data_files.train={}/yelp/train.jsonl", "task.data_files.eval={}/yelp/test.jsonl", "task.label_column=label"),
    ),
    "tags": Case("token_classification_demo", "f1", ("train.epochs=3",)),
    "sentences": Case("seq2seq_demo", "chrf", ("train.epochs=6", "eval.every=6 epochs")),
    "questions": Case("question_answering_demo", "f1", ("train.epochs=4", "eval.every=4 epochs", "eval.batch_tokens=null")),
    "images": Case(
        "image_classification",
        "accuracy",
        ("task.model=null", SMALL_RESNET, "task.augmentation=null", "train.epochs=10", "train.lr=1e-3", "eval.every=10 epochs"),
    ),
    "masks": Case(
        "masked_lm_demo",
        "perplexity",
        (
            *("task.dataset=hftune.data.demo:reviews", SMALL_BERT, "task.vocab_size=8192", "task.join_texts=true"),
            *("task.masking=tokens", "task.mlm_probability=0.15", "train.epochs=4", "train.lr=2e-3", "eval.every=4 epochs"),
        ),
        ("task.data_files.train={}/yelp/train.jsonl", "task.data_files.eval={}/yelp/test.jsonl", "task.text_column=text"),
    ),
}


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch

    torch.set_num_threads(1)
    rows, measured = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.tasks:
            case = CASES[name]
            contenders: dict[str, Callable[[Any, str], tuple[float, float]]] = {"hftune": train_ours, "Trainer": train_theirs}
            results = take_turns(
                {who: partial(run, name, options, Path(folder), train) for who, train in contenders.items()}, options.rounds
            )
            scores, speeds = ({who: [found[place] for found in all_] for who, all_ in results.items()} for place in (0, 1))
            ratio = median(ours / theirs for ours, theirs in zip(speeds["hftune"], speeds["Trainer"], strict=True))
            for who in contenders:
                spread = f"{min(scores[who]):.3f} to {max(scores[who]):.3f}"
                rows.append((name, who, case.metric, f"{mean(scores[who]):.3f}", spread, f"{median(speeds[who]):.0f}"))
            measured[f"{name}: {case.metric} of hftune, of Trainer; samples a second against Trainer's"] = (
                f"{mean(scores['hftune']):.3f}, {mean(scores['Trainer']):.3f}; {ratio:.2f}x"
            )
    title = f"The same training by hftune and by transformers' Trainer, {options.rounds} seeds, one thread"
    table = print_table(title, ("task", "", "metric", "mean", "from ... to", "samples/s"), rows)
    save(__file__, options, [table], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the real data; default: generated samples")
    parser.add_argument("--tasks", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=2, help="seeds (default %(default)s)")
    parser.add_argument("--train", type=int, default=4000, help="training samples of each task (default %(default)s)")
    parser.add_argument("--evaluate", type=int, default=400, help="evaluation samples (default %(default)s)")
    parser.add_argument("--max-epochs", type=int, help="fewer epochs than each task has")
    return parse_options(parser, smoke={"rounds": 1, "train": 64, "evaluate": 32, "max_epochs": 1})


def run(
    name: str,
    options: argparse.Namespace,
    folder: Path,
    train: Callable[[Any, str], tuple[float, float]],
    turn: int,
) -> tuple[float, float]:
    return train(recipe_of(name, options, folder, turn), CASES[name].metric)


def recipe_of(name: str, options: argparse.Namespace, folder: Path, turn: int) -> Any:
    """Build the recipe that both train, with a seed for each round."""
    from hftune import Recipe

    case = CASES[name]
    words = [*case.settings, *COMMON, *(word.format(options.data) for word in case.real if options.data), f"seed={1 + turn}"]
    if name == "images":
        words += [f"task.data_dir={image_folder(options, folder)}", "task.eval_split=test"]
    words += [f"task.max_train_samples={options.train}", f"task.max_eval_samples={options.evaluate}"]
    if options.max_epochs:
        words += [f"train.epochs={options.max_epochs}", "eval.every=epoch"]
    return Recipe.load(case.recipe, *words)


def image_folder(options: argparse.Namespace, folder: Path) -> Path:
    """Return a folder with train/CLASS/*.png and test/CLASS/*.png: the real photographs, or generated shapes."""
    from hftune.data.demo import shapes

    images = folder / "images"
    if images.exists():
        return images
    counts = {"train": options.train // 4, "test": options.evaluate // 2}
    for split, count in counts.items():
        if options.data:
            for path in sorted((options.data / "images" / "flowers" / split).glob("*.png")):
                link = images / split / path.name.partition("_")[0] / path.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
        else:
            for index, row in enumerate(shapes({"train": "train", "test": "eval"}[split], count)):
                path = images / split / row["label"] / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                row["image"].save(path)
    return images


def train_ours(recipe: Any, metric: str) -> tuple[float, float]:
    """Train with hftune; return the last metric, and samples a second."""
    from hftune import train

    began = time.perf_counter()
    num_samples = len(recipe.task.datasets()["train"])  # decodes images
    preparing = time.perf_counter() - began if recipe.recipe == "image_classification" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        recipe.output_dir = folder
        result = train(recipe)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        timed = [(line["step"], line["perf/step_s"]) for line in lines if "perf/step_s" in line]
        steps = [0, *(step for step, _ in timed)]
        seconds = sum(mean_s * (step - before) for (step, mean_s), before in zip(timed, steps, strict=False))
    return result.metrics[metric], num_samples * recipe.train.epochs / (preparing + seconds)


def train_theirs(recipe: Any, metric: str) -> tuple[float, float]:
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
        dataset, collate = theirs(recipe, datasets["train"], Path(folder))
        trainer = Trainer(model, arguments, collate, dataset, callbacks=[stopwatch])
        trainer.train()
    return score(task, model, datasets["eval"])[metric], len(datasets["train"]) * config.epochs / stopwatch.seconds


def theirs(recipe: Any, dataset: Any, folder: Path) -> tuple[Any, Callable[[list], dict[str, Any]] | None]:
    """Return the data set that Trainer reads, and how it makes batches: None for its own way."""
    task = recipe.task
    if recipe.recipe == "image_classification":
        return prepared_images(task, folder), None
    if recipe.recipe == "question_answering_demo":  # windows as in run_qa.py; the model computes its loss
        return dataset, lambda rows: inputs_and_positions(task, task.collate(rows))
    if recipe.recipe == "seq2seq_demo":  # the model makes decoder inputs and loss of the labels
        names = ("input_ids", "attention_mask", "labels")
        return dataset, lambda rows: {name: value for name, value in task.collate(rows).items() if name in names}
    if recipe.recipe == "masked_lm_demo":  # as the example script run_mlm.py does, whose collator masks anew in every epoch
        from transformers import DataCollatorForLanguageModeling

        tokenizer, special = task.text_tokenizer, set(task.text_tokenizer.all_special_ids)
        rows = [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
        rows = [{"input_ids": ids, "special_tokens_mask": [int(token in special) for token in ids]} for ids in rows]
        return rows, DataCollatorForLanguageModeling(tokenizer, mlm_probability=task.mlm_probability)
    return dataset, task.collate


def inputs_and_positions(task: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {**task.inputs(batch), "start_positions": batch["start"], "end_positions": batch["end"]}


def prepared_images(task: Any, folder: Path) -> Any:
    """Return the images as transformers' documentation prepares them: decoded and scaled whenever one is read."""
    from datasets import load_dataset
    from transformers import AutoImageProcessor

    task.save(task.build_model(), folder)  # with the image processor
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prepare(rows: dict[str, list]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    return load_dataset("imagefolder", data_dir=str(task.data_dir), split="train").with_transform(prepare)


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


if __name__ == "__main__":
    main()
