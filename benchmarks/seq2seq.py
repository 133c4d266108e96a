"""An encoder-decoder trained by hftune and by transformers' Seq2SeqTrainer at the same settings: scores and samples a second.

Both begin with the same weights and tokens, and see each sample once an epoch; the orders differ. With --model and
--data it is a pretrained model on files of your own; else a new T5 on the sentences of the demo.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contest import take_turns
from record import parse_options, print_table, save
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from hftune import Recipe, load_model, train
from hftune.build import build_model, load_datasets

SCORES = ("rouge_l", "chrf", "exact_match")


class Labels:
    """Collates labels alone, of which the model makes decoder inputs and loss itself."""

    def __init__(self, task: Any):
        self.task = task

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: self.task.collate(rows)[name] for name in ("input_ids", "attention_mask", "labels")}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"hftune": train_ours, "Seq2SeqTrainer": train_theirs}
        found = take_turns(
            {name: lambda turn, run=run: run(recipe_of(options, folder, turn)) for name, run in contenders.items()},
            options.rounds,
        )
    rows = [
        (name, turn, f"{run['seconds']:.1f}", f"{run['speed']:.1f}", *(f"{run['scores'][score]:.4f}" for score in SCORES))
        for name, runs in found.items()
        for turn, run in enumerate(runs)
    ]
    title = f"{options.samples} samples, {options.epochs} epochs of batches of {options.batch_size}; {options.threads} threads"
    table = print_table(title, ("", "round", "s", "samples/s", *SCORES), rows)
    speeds = {name: sorted(run["speed"] for run in runs)[len(runs) // 2] for name, runs in found.items()}
    gain = speeds["hftune"] / speeds["Seq2SeqTrainer"]
    save(__file__, options, [table], {"seq2seq, samples a second": f"{gain:.2f} x Seq2SeqTrainer's"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the Hub or folder of an encoder-decoder; default: a new small T5")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and dev.jsonl; default: the demo's sentences")
    parser.add_argument("--prefix", help="text before each source")
    parser.add_argument("--samples", type=int, default=2000, help="training samples")
    parser.add_argument("--eval-samples", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    return parse_options(parser, {"samples": 64, "eval_samples": 8, "epochs": 1, "batch_size": 16, "rounds": 1, "threads": 1})


def recipe_of(options: argparse.Namespace, folder: str, turn: int) -> Recipe:
    words = [
        *(f"task.max_train_samples={options.samples}", f"task.max_eval_samples={options.eval_samples}"),
        *(
            "task.scores=[rouge, chrf]",
            f"task.prefix={json.dumps(options.prefix)}",
            f"train.epochs={options.epochs}",
            f"seed={turn}",
        ),
        *(f"train.batch_size={options.batch_size}", f"train.lr={options.lr}", "train.mixed_precision=no", "eval.every=never"),
        *("train.warmup_ratio=0", "train.log_every=20", f"output_dir={folder}/{turn}", "resume=never"),
    ]
    if options.model is not None:
        words += [f"task.model={options.model}", "replace=[task.model_config]"]
    if options.data is not None:
        words += [f"task.data_files.train={options.data}/train.jsonl", f"task.data_files.eval={options.data}/dev.jsonl"]
    return Recipe.load("seq2seq_demo" if options.model is None else "seq2seq", *words)


def train_ours(recipe: Recipe) -> dict[str, Any]:
    result = train(recipe)
    model = load_model(result.output_dir, device=device()).model
    return {**timed(result.seconds, recipe), "scores": scores_of(recipe, model)}


def train_theirs(recipe: Recipe) -> dict[str, Any]:
    dataset, config = load_datasets(recipe)["train"], recipe.train
    set_seed(recipe.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            **{"output_dir": folder, "num_train_epochs": config.epochs, "per_device_train_batch_size": config.batch_size},
            **{"learning_rate": config.lr, "weight_decay": config.weight_decay, "max_grad_norm": config.clip_norm},
            **{"lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "logging_steps": 20, "save_strategy": "no"},
            **{"report_to": [], "disable_tqdm": True, "use_cpu": device() == "cpu", "remove_unused_columns": False},
        )
        model = build_model(recipe)
        trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=Labels(recipe.task))
        start = time.perf_counter()
        trainer.train()
    return {**timed(time.perf_counter() - start, recipe), "scores": scores_of(recipe, model)}


def timed(seconds: float, recipe: Recipe) -> dict[str, float]:
    return {"seconds": seconds, "speed": len(load_datasets(recipe)["train"]) * (recipe.train.epochs or 1) / seconds}


@torch.no_grad()
def scores_of(recipe: Recipe, model: PreTrainedModel) -> dict[str, float]:
    """Generate for the evaluation rows, and score the texts."""
    task, rows = replace(recipe.task), []  # a new one, that loads evaluation rows, too
    data, model = task._rows["eval"], model.to(device()).eval()
    for start in range(0, len(data), 50):
        part = data[start : start + 50]
        texts = task.predict(model, part[task._source])
        rows += [{"target": target, **text} for target, text in zip(part[task._target], texts, strict=True)]
    return task.metrics(rows)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
