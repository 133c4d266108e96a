"""Measure what the second pass of a loss over the global batch costs, beside one pass and beside sentence-transformers.

    python benchmarks/in_batch_negatives.py [--rounds 20]

A step is forward and backward for a batch of generated questions and answers with a fresh BERT, no optimizer. One pass keeps
the graphs of all of them, and so takes the memory of the whole batch; two passes keep that of a micro-batch.
sentence-transformers has MultipleNegativesRankingLoss, of one pass, and CachedMultipleNegativesRankingLoss, which embeds
as many texts at a time here. All compute padding, start from the same weights and take turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from bert_on_reviews import bert_config
from contest import take_turns
from record import parse_options, print_table, save
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from hftune.build import build_model, load_datasets, plan_batches
from hftune.config.recipe import EvalConfig, Recipe, TrainConfig
from hftune.data.demo import questions
from hftune.strategies.data_parallel import DataParallel
from hftune.tasks import Embeddings

Step = Callable[[int], tuple[float, float]]
"""Takes the step; returns its milliseconds and its loss."""


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "hftune, one pass": ours(options, options.batch_size, Path(folder)),
            "hftune, two passes": ours(options, options.micro_batch_size),
            "sentence-transformers, one pass": theirs(options, folder, MultipleNegativesRankingLoss),
            "sentence-transformers, two passes": theirs(
                options, folder, CachedMultipleNegativesRankingLoss, mini_batch_size=2 * options.micro_batch_size
            ),
        }
    for step in contenders.values():
        step(0)  # warm up
    report(options, take_turns(contenders, options.rounds))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="1 is the calmest on a machine with other users")
    return parse_options(parser, smoke={"layers": 1, "width": 64, "batch_size": 16, "micro_batch_size": 4, "rounds": 2})


def recipe_of(options: argparse.Namespace, micro_batch_size: int) -> Recipe:
    """Build the recipe; without dropout, so that all contenders have the same loss."""
    config = bert_config(options.layers, options.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = Embeddings(model_config=config, dataset="hftune.data.demo:questions", vocab_size=1000, max_length=64)
    sizes = {"batch_size": options.batch_size, "micro_batch_size": micro_batch_size, "packing": "off"}
    return Recipe(task=task, train=TrainConfig(**sizes), eval=EvalConfig(metric="recall_at_1"), recipe="benchmark")


def ours(options: argparse.Namespace, micro_batch_size: int, export: Path | None = None) -> Step:
    """Return hftune's step; its model is written to ``export``."""
    recipe = recipe_of(options, micro_batch_size)
    data, model = load_datasets(recipe)["train"], build_model(recipe)
    if export is not None:
        recipe.task.save(model, export)
    strategy = DataParallel(Accelerator(), recipe.task)
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = next(strategy.batches(data, plan_batches(recipe, data).epoch(0), num_workers=0))

    def step(turn: int) -> tuple[float, float]:
        began = time.perf_counter()
        strategy.forward_backward(batch, seed=0, step=turn)
        milliseconds = 1e3 * (time.perf_counter() - began)
        loss = strategy.report(torch.zeros(())).loss
        strategy.sharding.clear_gradient()
        return milliseconds, loss

    return step


def theirs(options: argparse.Namespace, folder: str, kind: Any, **settings: Any) -> Step:
    """Return the step of a loss of sentence-transformers, on the samples of hftune's first step."""
    model = SentenceTransformer(folder, device="cpu").train()
    recipe, rows, loss_of = recipe_of(options, options.batch_size), questions("train"), kind(model, **settings)
    (micro_batch,) = plan_batches(recipe, load_datasets(recipe)["train"]).epoch(0)[0]
    pairs = [rows[sample] for sample in micro_batch.samples]

    def step(turn: int) -> tuple[float, float]:
        features = [model.preprocess([pair[name] for pair in pairs]) for name in ("query", "answer")]
        began = time.perf_counter()
        loss = loss_of(features, None)
        loss.backward()
        milliseconds = 1e3 * (time.perf_counter() - began)
        model.zero_grad()
        return milliseconds, loss.item()

    return step


def report(options: argparse.Namespace, results: dict[str, list[tuple[float, float]]]) -> None:
    """Print the median of each contender's steps, and its loss."""
    medians = {name: median(milliseconds for milliseconds, _ in steps) for name, steps in results.items()}
    first = medians["hftune, one pass"]
    rows = [(name, f"{value:.1f}", f"{value / first:.2f}", f"{results[name][0][1]:.6f}") for name, value in medians.items()]
    sizes = f"{options.batch_size} pairs in micro-batches of {options.micro_batch_size}"
    table = print_table(f"{sizes}, BERT {options.layers} x {options.width}", ["", "ms", "of one pass", "loss"], rows)
    cost = medians["hftune, two passes"] / first
    beside = medians["sentence-transformers, two passes"] / medians["hftune, two passes"]
    what = f"a step over {sizes} by cached gradients, BERT {options.layers} x {options.width}"
    save(__file__, options, [table], {what: f"{cost:.2f} x one pass; sentence-transformers' {beside:.2f} x ours"})


if __name__ == "__main__":
    main()
