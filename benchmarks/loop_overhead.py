"""Measure what hftune's loop costs beside a bare PyTorch loop over the same micro-batches, in milliseconds a step.

    python benchmarks/loop_overhead.py [--steps 300]

hftune: ``hftune.train``: plan, data loading, keyed dropout, finite checks, learning rate, ledger, heartbeat, console and
metrics.jsonl every 10 steps. Checkpoints are written once an epoch, which medians do not see; the one evaluation comes last.
bare: the same plan, dataset and collate through a plain DataLoader, then forward, sum of the losses over the items, backward,
``clip_grad_norm_``, fused AdamW. Both read data within their step, and each has its own copy of a tiny BERT.

They take turns step by step: a callback lets the bare loop take a step after each of hftune's, and the clock changes hands. So
a difference is between neighbours in time. Steps that log are rare and slow; the last line weights both kinds as they occur.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bert_on_reviews import add_model_options, quiet, recipe_of, review_task
from record import parse_options, print_table, save
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hftune import Callback, Recipe, train
from hftune.batch_plan import BatchPlan
from hftune.build import build_model, load_datasets, plan_batches
from hftune.callbacks import Step
from hftune.optim import build_optimizer

WARMUP_STEPS = 5
GOAL_MS = 2.0


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    quiet()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"batch_size": options.batch_size, "micro_batch_size": options.micro_batch_size}
        steps = options.steps + WARMUP_STEPS
        task = review_task(options, generated="hftune.data.demo:reviews")  # short texts: small steps show the overhead
        recipe = recipe_of(task, folder, epochs=1000, max_steps=steps, log_every=10, **sizes)
        recipe.eval.every, recipe.checkpoint.every = steps, "epoch"
        bare_ms, hftune_ms = race(recipe)
    report(options, recipe, bare_ms, hftune_ms)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, layers=2, width=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="1 is the calmest on a machine with other users")
    return parse_options(parser, smoke={"steps": 20, "layers": 1})


def race(recipe: Recipe) -> tuple[list[float], list[float]]:
    """Train with both loops at once; return each one's milliseconds, step by step."""
    data = load_datasets(recipe)["train"]
    turns = TurnTaking(bare_loop(recipe, build_model(recipe), data, plan_batches(recipe, data)))
    with Path(recipe.output_dir, "stdout").open("w") as file, redirect_stdout(file):
        train(recipe, callbacks=[turns])
    return turns.bare_ms[WARMUP_STEPS:], turns.hftune_ms[WARMUP_STEPS:]


class TurnTaking(Callback):
    """Lets the bare loop take one step after each of hftune's, and times both. It is called after hftune's own callbacks."""

    must_not_fail = True

    def __init__(self, bare: Iterator[None]):
        self.bare, self.bare_ms, self.hftune_ms = bare, [], []
        self.began = time.perf_counter()

    def on_step(self, step: Step) -> None:
        handed_over = time.perf_counter()
        next(self.bare)
        handed_back = time.perf_counter()
        self.hftune_ms.append(1e3 * (handed_over - self.began))
        self.bare_ms.append(1e3 * (handed_back - handed_over))
        self.began = time.perf_counter()


def bare_loop(recipe: Recipe, model: nn.Module, dataset: Any, plan: BatchPlan) -> Iterator[None]:
    """Train without hftune's loop and strategy, and without Accelerate; yield after each step."""
    optimizer = build_optimizer(model, recipe)
    model.train()
    for epoch in range(recipe.train.epochs):
        steps = [[micro_batch.samples.tolist() for micro_batch in step] for step in plan.epoch(epoch)]
        samples = [micro_batch for step in steps for micro_batch in step]
        loaded = iter(DataLoader(dataset, batch_sampler=samples, collate_fn=recipe.task.collate))
        for step in steps:
            num_items = sum(map(len, step))
            for _ in step:
                batch = next(loaded)
                outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                loss = cross_entropy(outputs.logits.float(), batch["labels"], reduction="sum") / num_items
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield


def report(options: argparse.Namespace, recipe: Recipe, bare_ms: list[float], hftune_ms: list[float]) -> None:
    """Print medians of all steps, of those that log and of the others. A log line falls into the step after its own."""
    every = recipe.train.log_every
    groups: dict[str, list[int]] = {"all steps": [], "without a log line": [], f"with one (every {every}th)": []}
    for place in range(len(bare_ms)):
        groups["all steps"].append(place)
        groups[list(groups)[2 if (place + WARMUP_STEPS) % every == 0 else 1]].append(place)
    rows, extra = [], {}
    for name, places in groups.items():
        bare, ours = median(bare_ms[place] for place in places), median(hftune_ms[place] for place in places)
        extra[name] = median(hftune_ms[place] - bare_ms[place] for place in places)
        rows.append((name, len(places), f"{bare:.2f}", f"{ours:.2f}", f"{extra[name]:+.2f}", f"{ours / bare:.3f}"))
    _, plain, logged = extra.values()
    rows.append(("weighed as they occur", "", "", "", f"{plain + (logged - plain) / every:+.2f}", ""))
    title = (
        f"BERT {options.layers} x {options.width}, global batch {options.batch_size} in micro-batches of "
        f"{options.micro_batch_size}, {options.threads} thread(s); medians (goal: at most {GOAL_MS:.0f} ms more a step)"
    )
    table = print_table(title, ("", "steps", "bare ms", "hftune ms", "difference", "ratio"), rows)
    what = f"the loop's own cost beside a bare PyTorch loop with steps of {median(bare_ms):.0f} ms"
    save(__file__, options, [table], {what: f"{plain + (logged - plain) / every:.1f} ms a step"})


if __name__ == "__main__":
    main()
