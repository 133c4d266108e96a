"""Kill training with SIGKILL at random moments, start it again until it is done, and compare with a run that was left alone.

    python benchmarks/kill.py [N] [--seed 0] [--processes 1 2] [--only "while a checkpoint is written"] [--sharded]

N runs (default 10) of a small BERT with dropout, a checkpoint every third step and one at the end of an epoch. Each is killed
once or twice, at a random moment after its first checkpoint: all of its processes; one of them, where there are two; or, every
third time, at once when a checkpoint's temporary folder is seen (five seconds later at the latest). Then the same command is
given again. "bit-equal": all weights of the last model, all logged losses and the ledger's audit are those of the unbroken run.
With --sharded the processes train under FSDP, where each sends its pieces of a checkpoint to the main one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from filelock import FileLock
from record import parse_options, print_table, save
from safetensors.torch import load_file

from hftune.replay.audit import audit

SIZES = "{model_type: bert, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128}"
RECIPE = (
    *("recipe=yelp_demo", f"task.model_config={SIZES}", "task.vocab_size=300", "task.max_length=64"),
    *("task.max_train_samples=160", "task.max_eval_samples=32", "train.batch_size=16", "train.micro_batch_size=4"),
    *("train.micro_batch_tokens=null", "train.epochs=3", "train.log_every=1", "eval.every=7", "checkpoint.every=3"),
)
STEPS = 30
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
KINDS = ("all processes", "one process", "while a checkpoint is written")


def main() -> int:
    options = parse()
    draw, table, kills, equal = random.Random(options.seed), Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= FSDP if options.sharded else {}
        expected = {count: unbroken(folder / f"unbroken-{count}", count) for count in options.processes}
        for number in range(options.runs):
            count = options.processes[number % len(options.processes)]
            kind = options.only or KINDS[number // len(options.processes) % len(KINDS)]
            if kind == "one process" and count == 1:
                kind = KINDS[0]
            wanted = options.kills or 1 + draw.randrange(2)
            killed = broken_run(folder / str(number), count, kind, wanted, draw)
            same = outcome(folder / str(number)) == expected[count]
            key = (kind, count)
            table[key], kills[key], equal[key] = table[key] + 1, kills[key] + killed, equal[key] + same
            said = "bit-equal" if same else "DIFFERENT"
            print(f"{number + 1}: {count} processes, {kind}, killed {killed} times: {said}", flush=True)
    rows = [(*key, runs, kills[key], equal[key]) for key, runs in sorted(table.items())]
    rows.append(("all", "", table.total(), kills.total(), equal.total()))
    how = " under FSDP" if options.sharded else ""
    title = f"{options.runs} runs of {STEPS} steps{how}, seed {options.seed}"
    tables = [print_table(title, ("killed", "processes", "runs", "kills", "bit-equal"), rows)]
    what = f"{options.runs} runs{how} killed {kills.total()} times in all with SIGKILL at random moments, then resumed"
    save(__file__, options, tables, {what: f"{equal.total()} bit-equal to the unbroken run"})
    return 0 if equal.total() == options.runs else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int, nargs="?", default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, help="of each run; default: one or two")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--sharded", action="store_true", help="train under FSDP")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    return parse_options(parser, smoke={"runs": 1, "processes": [1], "kills": 1})


def start(folder: Path, count: int) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    command = [sys.executable, *launcher, "-m", "hftune.run", *RECIPE, f"output_dir={folder}"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def unbroken(folder: Path, count: int) -> tuple:
    if start(folder, count).wait() != 0:
        sys.exit((folder.parent / f"{folder.name}.log").read_text())
    return outcome(folder)


def outcome(folder: Path) -> tuple:
    """Return what has to be equal."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [[(key, value) for key, value in line.items() if not key.startswith("perf/")] for line in lines]
    model = load_file(folder / "model_last" / "model.safetensors")
    weights = [(name, model[name].view(torch.uint8).numpy().tobytes()) for name in sorted(model)]
    found = audit(folder)
    return logged, weights, (found.steps, found.whole_epochs, found.problems)


def broken_run(folder: Path, count: int, kind: str, kills: int, draw: random.Random) -> int:
    """Run until done, killing it on the way; return how often it was killed in time."""
    killed = 0
    while True:
        process, victims = start(folder, count), []
        if killed < kills and wait_for_moment(process, folder, kind, draw):
            victims = processes_of(process.pid)
            if kind == "one process":  # the launcher ends the other
                victims = draw.sample(sorted(victims - {process.pid}), min(1, len(victims) - 1))
            for victim in victims:
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            killed += bool(victims)  # none where both had just ended
            with FileLock(folder / ".lock", timeout=30):
                pass  # the last of them is gone
        if process.wait() == 0:
            return killed
        if not victims:
            sys.exit((folder.parent / f"{folder.name}.log").read_text())


def wait_for_moment(process: subprocess.Popen, folder: Path, kind: str, draw: random.Random) -> bool:
    """Wait for the moment to kill; False where the run ended before it came."""
    while not any((folder / "checkpoints").glob("step_*")):
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    until = time.monotonic() + draw.uniform(0, 0.8)
    while process.poll() is None:
        if time.monotonic() >= until and (
            kind != KINDS[2] or any((folder / "checkpoints").glob(".step_*.writing")) or time.monotonic() > until + 5
        ):
            return True
        time.sleep(0.0005)
    return False


def processes_of(parent: int) -> set[int]:
    """Return a process and all below it, also those that a launcher put into sessions of their own."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {parent}
    while more := {child for child, above in parents.items() if above in found} - found:
        found |= more
    return found


if __name__ == "__main__":
    sys.exit(main())
