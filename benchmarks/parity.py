"""Measure how far the losses of a run move with the number of processes and the size of the micro-batches.

    python benchmarks/parity.py [--steps 30] [--processes 1 2 4] [--micro-batch-sizes 2 4 8 16] [--dropout off on] [--fsdp 2]

yelp_demo, made small, at one global batch of 16 and the learning rate of yelp; every cell is a real run, over Gloo if it has
several processes. A cell is the largest relative difference of a step's loss to the run with one process and one micro-batch a
step (dropout off), or to the one with one process and the same micro-batches (dropout on), in float32. --fsdp: numbers of
processes that train under FSDP, which shards weights, gradients and optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from record import parse_options, print_table, save

SMALL = (
    "task.model_config={model_type: bert, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 128, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, initializer_range: 0.1}",
    *("task.max_length=128", "task.max_eval_samples=101", "train.batch_size=16", "train.lr=5e-5", "train.log_every=1"),
    *("train.micro_batch_tokens=null", "checkpoint.every=never"),
)
NO_DROPOUT = ("task.model_config.hidden_dropout_prob=0.0", "task.model_config.attention_probs_dropout_prob=0.0")
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""What ``accelerate launch --config_file accelerate_configs/fsdp.yaml`` puts into the environment, as far as it matters."""


def main() -> None:
    """Run every cell and print the table."""
    options = parse()
    rows, furthest, evaluations = [], dict.fromkeys(options.dropout, 0.0), []
    groups = [(count, False) for count in options.processes] + [(count, True) for count in options.fsdp]
    for processes, sharded in groups:
        row = [f"{processes} process{'es' if processes > 1 else ''}{', FSDP' if sharded else ''}"]
        for size in options.micro_batch_sizes:
            cell = []
            for dropout in options.dropout:
                losses, metrics = run(options.steps, processes, size, dropout, sharded)
                expected, expected_metrics = run(options.steps, 1, 16 if dropout == "off" else size, dropout)
                apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
                furthest[dropout] = max(furthest[dropout], apart)
                cell.append(f"{apart:.1e}")
                if dropout == "off":
                    evaluations.append(metrics == expected_metrics)
            row.append(" / ".join(cell))
        rows.append(row)
    title = (
        f"Largest relative difference of a loss in {options.steps} steps, dropout {' / '.join(options.dropout)} (goal: 1e-5)"
    )
    table = print_table(title, ["", *(f"micro-batch {size}" for size in options.micro_batch_sizes)], rows)
    if evaluations:
        print(f"Evaluation metrics equal to the last digit in {sum(evaluations)} of {len(evaluations)} runs.")
    figure = "; ".join(f"dropout {name}: {apart:.1e}" for name, apart in furthest.items())
    save(__file__, options, [table], {subject(options): figure})


def subject(options: argparse.Namespace) -> str:
    """Name what was measured."""
    fsdp = f", and under FSDP on {format_value(options.fsdp)}" if options.fsdp else ""
    return (
        f"largest relative difference of a loss in {options.steps} steps on {format_value(options.processes)} processes{fsdp}, "
        f"in micro-batches of {format_value(options.micro_batch_sizes)}"
    )


def format_value(counts: Iterable[int]) -> str:
    """Join numbers as a sentence does."""
    *first, last = map(str, counts)
    return f"{', '.join(first)} and {last}" if first else last


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--fsdp", type=int, nargs="*", default=[], help="numbers of processes under FSDP (default: none)")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--dropout", nargs="+", choices=("off", "on"), default=["off", "on"])
    smoke = {"steps": 3, "processes": [2], "fsdp": [], "micro_batch_sizes": [4], "dropout": ["on"]}
    return parse_options(parser, smoke)


@cache
def run(steps: int, processes: int, size: int, dropout: str, sharded: bool = False) -> tuple[list[float], dict]:
    """Train once on real processes; return the losses of its steps and the metrics of its evaluation."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    words = ["-m", "hftune.run", "recipe=yelp_demo", *SMALL, *(NO_DROPOUT if dropout == "off" else ())]
    words += [f"train.max_steps={steps}", f"train.micro_batch_size={size}"]
    words += [f"eval.batch_size={size}"] if dropout == "off" else []
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **(FSDP if sharded else {})}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, *words, f"output_dir={folder}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        metrics = json.loads(Path(folder, "result.json").read_text())["metrics"]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses, {name: value for name, value in metrics.items() if name != "loss"}


if __name__ == "__main__":
    main()
