"""Measure what checkpoints cost the training thread of a 22 M-parameter BERT, and how long it takes to resume.

    python benchmarks/checkpoint_cost.py [--steps 200] [--every 100]

First: --steps steps of 16 reviews on one process with a checkpoint every --every steps. "on the training thread" is the wait
that a callback hears of: copying to the host and waiting for an earlier checkpoint that is being written. Goal: at most 2 %.

Second: a small model with 200,000 samples, whose checkpoint is set to the beginning, the middle and the end of the epoch; the
seconds from calling train to the first forward pass. Goal: they do not depend on the place.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from contest import take_turns
from record import parse_options, print_table, save

from hftune import Callback, Recipe, train
from hftune.callbacks import CheckpointDone
from hftune.checkpoints.checkpointer import Checkpointer, newest
from hftune.config.sections import CheckpointConfig
from hftune.strategies.data_parallel import DataParallel

LARGE = "{model_type: bert, hidden_size: 384, num_hidden_layers: 12, num_attention_heads: 6, intermediate_size: 1536}"
SMALL = "{model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}"
MODELS = {"large": LARGE, "small": SMALL}
PLACES = {"beginning": 0.001, "middle": 0.5, "end": 0.999}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        costs, measured = cost(Path(name), options)
        starts = resume(Path(name), options)
    save(__file__, options, [costs, starts], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="of resuming (default %(default)s)")
    parser.add_argument("--model", choices=MODELS, default="large", help="for the first part (default %(default)s)")
    parser.add_argument("--samples", type=int, default=200_000, help="for the second part (default %(default)s)")
    return parse_options(parser, smoke={"steps": 4, "every": 2, "rounds": 1, "model": "small", "samples": 2000})


def cost(folder: Path, options: argparse.Namespace) -> tuple[dict, dict[str, str]]:
    """Train with checkpoints and print what they cost; return the table, and the row of README's."""
    sizes = (
        f"task.model_config={MODELS[options.model]}",
        "task.vocab_size=1000",
        "task.max_length=128",
        "task.max_eval_samples=16",
    )
    steps = (
        f"train.max_steps={options.steps}",
        f"checkpoint.every={options.every}",
        "train.batch_size=16",
        "train.log_every=10",
    )
    waits = Waits()
    train(Recipe.load("yelp_demo", *sizes, *steps, "eval.every=1000000", f"output_dir={folder / 'cost'}"), callbacks=[waits])
    lines = [json.loads(line) for line in (folder / "cost" / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "train/loss" in line]
    computing = sum(16 * (b["step"] - a["step"]) / b["perf/samples_per_s"] for a, b in pairwise(training))
    blocked = [seconds for step, seconds in waits.of_step.items() if step < options.steps]  # the last one delays no step
    between = computing * options.every / options.steps
    tensors = newest(folder / "cost" / "checkpoints")[0].tensors["model"]
    parameters = f"{sum(map(_size, tensors.values())) / 1e6:.1f} M parameters"
    title = f"{parameters}, {options.steps} steps, a checkpoint every {options.every}"
    rows = [
        ("seconds of training between two checkpoints", f"{between:.3g}"),
        ("seconds on the training thread, each", f"{median(blocked):.3g}"),
        ("share (goal: at most 2 %)", f"{100 * median(blocked) / between:.3g} %"),
    ]
    what = f"a checkpoint of {parameters} with AdamW: time that training waits for it"
    return print_table(title, ("", "figure"), rows), {what: f"{median(blocked):.3g} s"}


class Waits(Callback):
    """Keeps the seconds for which training waited for each checkpoint, by its step."""

    def __init__(self):
        self.of_step: dict[int, float] = {}

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        self.of_step[checkpoint.step] = checkpoint.waited_s


def _size(tensor: Any) -> int:
    return tensor.numel()


def resume(folder: Path, options: argparse.Namespace) -> dict:
    """Time the start from several places in an epoch."""
    model = (f"task.model_config={SMALL}", "task.vocab_size=150", "task.max_length=16", "task.label_names=[a,b]")
    files = {part: folder / f"{part}.jsonl" for part in ("train", "eval")}
    for part, path in files.items():
        count = options.samples if part == "train" else 8
        path.write_text("".join(json.dumps({"text": f"number {n % 97}", "label": n % 2}) + "\n" for n in range(count)))
    data = (
        *("task.dataset=json", *(f"task.data_files.{part}={path}" for part, path in files.items())),
        *("train.batch_size=16", "checkpoint.every=1", "checkpoint.keep=1"),
    )
    recipe = Recipe.load("yelp_demo", *model, *data, "train.epochs=1", f"output_dir={folder / 'long'}")
    seconds_to_first_step(recipe, steps=1)
    written, _ = newest(folder / "long" / "checkpoints")
    text = (written.path / "recipe.yaml").read_text()
    num_steps = options.samples // 16

    def resume_at(place: float) -> float:
        step = max(1, int(place * num_steps))
        progress = {**written.progress, "state": {**written.progress["state"], "step": step, "step_in_epoch": step}}
        checkpointer = Checkpointer(folder / "long" / "checkpoints", CheckpointConfig(keep=1))
        for path in (folder / "long" / "checkpoints").glob("step_*"):
            path.rename(folder / f"{path.name}-{time.monotonic()}")
        checkpointer.write(step, written.tensors, progress, text, None, [])
        checkpointer.wait()
        return seconds_to_first_step(recipe)

    places = {name: lambda turn, place=place: resume_at(place) for name, place in PLACES.items()}
    seconds = take_turns(places, options.rounds)
    rows = [(name, f"{median(runs):.2f}") for name, runs in seconds.items()]
    title = f"resuming in an epoch of {num_steps:,} steps; median of {options.rounds} rounds"
    return print_table(title, ("from the", "seconds"), rows)


class Reached(Exception):
    """The step that was waited for has begun."""


def seconds_to_first_step(recipe: Recipe, steps: int = 0) -> float:
    """Train until ``steps`` steps are taken and the next begins; return the seconds until then."""
    original, taken, began = DataParallel.forward_backward, 0, time.perf_counter()

    def forward_backward(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise Reached
        taken += 1
        return original(*arguments, **options)

    DataParallel.forward_backward = forward_backward
    try:
        train(recipe)
    except Reached:
        return time.perf_counter() - began
    finally:
        DataParallel.forward_backward = original
    raise RuntimeError("Training ended before that step.")


if __name__ == "__main__":
    main()
