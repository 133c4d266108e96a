"""Measure what ledger.jsonl costs (each step its line, a start the hash of the weights) and how fast it is read and replayed.

    python benchmarks/ledger.py [--steps 100000] [--trained 200]

"in training" is the median time of a line between the steps of yelp_demo, where other work has taken the processor's caches.
Goal: less than 0.1 ms. "again and again" writes --steps lines one after the other; these are then read, and audited.

Then the last of --trained steps is replayed in a process that has torch loaded: setting up is to load data and model, and the
checkpoint; the farther back that lies, the longer it takes to compute the steps from there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import parse_options, print_table, save

from hftune import Recipe, train
from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.callbacks import Step, Wishes
from hftune.models.weights import weights_digest
from hftune.replay.audit import audit
from hftune.replay.engine import Replayer
from hftune.replay.history import History
from hftune.replay.ledger import read_ledger
from hftune.replay.tolerance import difference
from hftune.tracking.ledger import Ledger, plan_facts


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        in_training = cost_in_training(Path(name) / "run", options.trained)
        replayed = replay(Path(name) / "run", options.trained)
        again = write(Path(name), options.steps)
        size = (Path(name) / "ledger.jsonl").stat().st_size
        reading, record = timed(lambda: read_ledger(name))
        auditing, found = timed(lambda: audit(name))
        if record.problems or found.problems or found.steps != options.steps:
            raise RuntimeError(f"The ledger is not as it was written: {found.problems[:3]}")
    weights = {"weight": torch.zeros(options.megabytes, 2**18)}
    hashing, _ = timed(lambda: weights_digest(weights.items()))
    rows = [
        ("a step's line, in training (us; goal: at most 100)", f"{1e6 * in_training:.0f}"),
        ("a step's line, again and again (us)", f"{1e6 * again:.1f}"),
        (f"{options.steps:,} steps (MB)", f"{size / 1e6:.3g}"),
        ("reading them and checking the chain (s)", f"{reading:.3g}"),
        ("auditing them (s)", f"{auditing:.3g}"),
        (f"hashing {options.megabytes} MiB of first weights (s)", f"{hashing:.3g}"),
    ]
    tables = [print_table("ledger.jsonl", ("", "figure"), rows), replayed]
    save(__file__, options, tables, {"the ledger's line of a step, with its hash": f"{1e6 * in_training:.0f} us"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="lines to write and read (default %(default)s)")
    parser.add_argument("--trained", type=int, default=200, help="steps of yelp_demo (default %(default)s)")
    parser.add_argument("--megabytes", type=int, default=1024, help="of weights (default %(default)s)")
    return parse_options(parser, smoke={"steps": 500, "trained": 3, "megabytes": 16})


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a function takes, and its value."""
    began = time.perf_counter()
    value = function()
    return time.perf_counter() - began, value


def cost_in_training(folder: Path, steps: int) -> float:
    """Train, and return the median seconds that the line of a step takes."""
    original, seconds = Ledger.on_step, []

    def on_step(ledger: Ledger, step: Step) -> None:
        seconds.append(timed(lambda: original(ledger, step))[0])

    Ledger.on_step = on_step
    try:
        kept = (f"checkpoint.every={max(1, steps // 4)}", "checkpoint.keep=9")
        train(Recipe.load("yelp_demo", f"train.max_steps={steps}", "eval.every=never", *kept, f"output_dir={folder}"))
    finally:
        Ledger.on_step = original
    return median(seconds)


def replay(folder: Path, step: int) -> dict[str, Any]:
    """Replay a step, print how long it takes, and return the table."""
    began, seconds = time.perf_counter(), []
    history = History.open(folder)
    with Replayer(history, step) as replayer:
        start, ready = replayer.step, time.perf_counter()
        before = ready
        for replayed in replayer.advance(step):
            taken, now = replayed, time.perf_counter()
            seconds.append(now - before)
            before = now
        computed = time.perf_counter() - ready
    found = difference(taken, history.ledger.steps[step])
    rows = [
        ("setting up (s)", f"{ready - began:.3g}"),
        (f"computing {step - start} steps (s)", f"{computed:.3g}"),
        ("a step (ms)", f"{1e3 * median(seconds):.3g}"),
        ("relative difference of its loss from the ledger's", f"{found.loss:.1e}"),
    ]
    return print_table(
        f"replaying step {step:,} from checkpoint {start:,}, on one process as in training", ("", "figure"), rows
    )


def write(folder: Path, steps: int) -> float:
    """Write a ledger of a run over 32,000 samples, and return the mean seconds that a line takes."""
    plan, ledger, taken = BatchPlan(32_000, 32), Ledger(folder / "ledger.jsonl"), 0.0
    ledger.start(0, {"world_size": 1, **plan_facts(plan)})
    for epoch in range(-(-steps // plan.num_steps)):
        order_N = plan.epoch(epoch).order_N
        for place in range(min(plan.num_steps, steps - epoch * plan.num_steps)):
            digest = format_digest(*samples_digest(order_N[place * 32 : (place + 1) * 32]))
            step = epoch * plan.num_steps + place + 1
            results = {"loss": 1 / step, "grad_norm": 1 + 1 / step, "lr": 1e-3 / step, "num_items": 32.0}
            record = Step(
                step=step, epoch=0.0, wishes=Wishes({}), place=(epoch, place), num_samples=32, digest=digest, **results
            )
            began = time.perf_counter()
            ledger.on_step(record)
            taken += time.perf_counter() - began
    ledger.file.close()
    return taken / steps


if __name__ == "__main__":
    main()
