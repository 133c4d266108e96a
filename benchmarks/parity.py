"""Measure how far the losses of a run move with the number of processes and the size of the micro-batches.

    python benchmarks/parity.py [--steps 30] [--processes 1 2 4] [--micro-batch-sizes 2 4 8 16]

yelp_demo, made small, at one global batch of 16 and the learning rate of yelp; every cell is a real run, over Gloo where it has
several processes. A cell is the largest relative difference of a step's loss to the run with one process and one micro-batch a
step (dropout off), or to the one with one process and the same micro-batches (dropout on), in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from contest import print_table

SMALL = (
    "task.model_config={model_type: bert, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 128, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, initializer_range: 0.1}",
    *("task.max_length=128", "task.max_eval_samples=101", "train.batch_size=16", "train.lr=5e-5", "train.log_every=1"),
    "train.micro_batch_tokens=null",
)
NO_DROPOUT = ("task.model_config.hidden_dropout_prob=0.0", "task.model_config.attention_probs_dropout_prob=0.0")


def run(processes: int, folder: Path, *overrides: str) -> tuple[list[float], dict]:
    """Train once on real processes; return the losses of its steps and the metrics of its evaluation."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    words = ["-m", "hftune.run", "recipe=yelp_demo", *SMALL, *overrides, f"output_dir={folder}"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, *words], env=env, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return losses, {name: value for name, value in metrics.items() if name != "loss"}


def furthest(losses: list[float], reference: list[float]) -> str:
    """Format the largest relative difference of two equally long curves."""
    return f"{max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)):.1e}"


def main() -> None:
    """Run every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()
    rows, evaluations = [], []
    with tempfile.TemporaryDirectory() as folder:
        steps, out = f"train.max_steps={options.steps}", Path(folder) / "out"
        whole, metrics = run(1, out, steps, *NO_DROPOUT, "train.micro_batch_size=16")
        dropout = {size: run(1, out, steps, f"train.micro_batch_size={size}")[0] for size in options.micro_batch_sizes}
        for processes in options.processes:
            row = [f"{processes} process{'es' if processes > 1 else ''}"]
            for size in options.micro_batch_sizes:
                micro = f"train.micro_batch_size={size}"
                off, evaluated = run(processes, out, steps, *NO_DROPOUT, micro, f"eval.batch_size={size}")
                on, _ = run(processes, out, steps, micro)
                evaluations.append(evaluated == metrics)
                row.append(f"{furthest(off, whole)} / {furthest(on, dropout[size])}")
            rows.append(row)
    title = f"Largest relative difference of a loss in {options.steps} steps, dropout off / on (goal: 1e-5)"
    print_table(title, ["", *(f"micro-batch {size}" for size in options.micro_batch_sizes)], rows)
    print(f"Evaluation metrics equal to the last digit in {sum(evaluations)} of {len(evaluations)} runs.")


if __name__ == "__main__":
    main()
