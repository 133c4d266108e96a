"""Measure what it costs to plan an epoch of ten million samples: seconds and peak memory, padded and packed.

    python benchmarks/batch_plan.py [--samples 10000000] [--rounds 3]

Each measurement is a process of its own, because a process's peak memory never goes down again; the plans take turns. "packed"
is the plan of training without padding (train.packing=auto), which deals samples to micro-batches of equal work.
"layout" is ``BatchPlan(...).epoch(0)``, "walk" visits every micro-batch of every step. The peak holds Python, numpy and
the lengths themselves; the column before it says how much that is without any plan. Lengths are drawn like Yelp's: log-normal,
median 115 tokens, cut at 512.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from contest import take_turns
from record import parse_options, print_table, save

from hftune.batch_plan import BatchPlan

BOUNDS = ("row bound", "token bound", "packed")
BERT_BASE_WIDTH, PARTS = 768, 4
FIELDS = ("layout_s", "walk_s", "before_mib", "peak_mib", "num_steps", "num_micro_batches")


def main() -> None:
    options = parse()
    if options.only:
        print(json.dumps(measure(options, options.only)))
        return
    results = take_turns({name: lambda turn, name=name: in_own_process(name) for name in BOUNDS}, options.rounds)
    title = (
        f"One epoch of {options.samples:,} samples, global batches of {options.batch_size}, micro-batches of at most "
        f"{options.rows} rows or {options.tokens} tokens; median of {options.rounds} rounds (goal: under 4 s and 400 MiB)"
    )
    header = ("", "layout s", "walk s", "both s", "MiB before", "peak MiB", "steps", "micro-batches")
    table = print_table(title, header, [row(name, runs) for name, runs in results.items()])
    layout, walk, peak = (
        max(median(run[field] for run in runs) for runs in results.values()) for field in ("layout_s", "walk_s", "peak_mib")
    )
    what = f"laying out an epoch of {options.samples:,} samples, and walking through it"
    save(__file__, options, [table], {what: f"{layout:.1f} s, and {walk:.1f} s; {peak:.0f} MiB in all"})


def row(name: str, runs: list[dict[str, float]]) -> tuple[str, ...]:
    """Lay out one bound's medians."""
    layout, walk, before, peak, steps, micro_batches = (median(run[field] for run in runs) for field in FIELDS)
    both = median(run["layout_s"] + run["walk_s"] for run in runs)
    seconds = [f"{value:.2f}" for value in (layout, walk, both)]
    return (name, *seconds, f"{before:.0f}", f"{peak:.0f}", f"{steps:,.0f}", f"{micro_batches:,.0f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=128, help="global (default %(default)s, as in the yelp recipe)")
    parser.add_argument("--rows", type=int, default=32, help="most rows of a micro-batch, where rows are bounded")
    parser.add_argument("--tokens", type=int, default=4096, help="most padded tokens of one, where tokens are bounded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=BOUNDS, help="measure one in this process and print it as JSON")
    return parse_options(parser, smoke={"samples": 10_000, "rounds": 1})


def in_own_process(name: str) -> dict[str, float]:
    """Measure in a fresh interpreter, with the options that this one was given."""
    command = [sys.executable, *sys.argv, "--only", name]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Plan one epoch and walk through it."""
    lengths = draw_lengths(options.samples)
    bound: dict[str, Any] = (
        {"micro_batch_size": options.rows} if name == "row bound" else {"micro_batch_tokens": options.tokens}
    )
    if name == "packed":
        bound |= {"micro_batch_size": options.rows, "packed": True, "parts": PARTS, "width": BERT_BASE_WIDTH}
    before_mib = peak_mib()
    began = time.perf_counter()
    steps = BatchPlan(options.samples, options.batch_size, lengths=lengths, **bound).epoch(0)
    laid_out = time.perf_counter()
    num_micro_batches = num_samples = 0
    for step in steps:
        for micro_batch in step:
            num_micro_batches += 1
            num_samples += len(micro_batch.samples)
    walked = time.perf_counter()
    if num_samples != options.samples:
        raise RuntimeError(f"The plan holds {num_samples} samples of {options.samples}.")
    values = (laid_out - began, walked - laid_out, before_mib, peak_mib(), len(steps), num_micro_batches)
    return dict(zip(FIELDS, values, strict=True))


def draw_lengths(count: int, at_once: int = 1_000_000) -> np.ndarray:
    """Draw lengths in slices, so that drawing them is not what fills the memory."""
    draw, lengths = np.random.default_rng(0), np.empty(count, np.int32)
    for start in range(0, count, at_once):
        part = lengths[start : start + at_once]
        part[:] = np.clip(draw.lognormal(np.log(115), 0.85, len(part)), 5, 512)
    return lengths


def peak_mib() -> float:
    """Return the most memory this process ever had resident."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main()
