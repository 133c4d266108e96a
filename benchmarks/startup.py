"""How long a training takes from the command to the end of its first optimizer step, and how much CPU time of all processes.

    python benchmarks/startup.py [--against FOLDER] [--rounds 5] [--processes 2 1]

The command is `hftune train --processes N recipe=yelp_demo`, on CPUs, with one thread a process and the data in the cache: a
small BERT on generated reviews, so that nearly all of it is start-up. The end of the first step is its line in ledger.jsonl.
FOLDER is another checkout, such as that of an earlier commit (`git worktree add FOLDER COMMIT`), which takes turns with this
one. Each tree has a cache of its own, filled by a run that is not counted. CPU time is what the processes that were alive at
that moment had used, launchers included.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from contest import take_turns
from record import HERE, parse_options, print_table, save

RECIPE = ("recipe=yelp_demo", "task.max_eval_samples=100", "train.max_steps=20")
LONGEST_S = 300


@dataclass
class Start:
    """What one start took."""

    seconds: float
    cpu_seconds: float
    private_mib: float
    """Of the process that holds most: memory that is its own and no part of a file."""


def main() -> None:
    options = parse()
    trees = {"this tree": HERE.parent, **({"the other": options.against} if options.against else {})}
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            (name, count): partial(start, tree, count, Path(folder) / name.replace(" ", "-"), options.smoke)
            for count in options.processes
            for name, tree in trees.items()
        }
        for contender in () if options.smoke else contenders.values():
            contender(-1)  # fills the caches
        results = take_turns(contenders, options.rounds)
    rows, measured = [], {}
    for (name, count), starts in results.items():
        seconds, cpu_seconds = (median(getattr(one, field) for one in starts) for field in ("seconds", "cpu_seconds"))
        ratio = ""
        if name == "this tree" and options.against:
            ratio = f"{median(own.seconds / other.seconds for own, other in pairs(results, count)):.2f}x"
        rows.append((name, count, f"{seconds:.2f}", f"{cpu_seconds:.2f}", ratio))
        if name == "this tree":
            what = f"from the command to the end of the first step, {count} process{'es' * (count > 1)}, warm cache"
            against = f"; {ratio} that of {commit_of(options.against)}" if ratio else ""
            measured[what] = f"{seconds:.1f} s, {cpu_seconds:.1f} s of CPU time{against}"
    title = f"hftune train recipe=yelp_demo to the end of its first step, median of {options.rounds}"
    table = print_table(title, ("", "processes", "seconds", "CPU s", "x the other"), rows)
    save(__file__, options, [table], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=lambda name: Path(name).resolve(), help="another checkout of hftune to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (default %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 1])
    return parse_options(parser, smoke={"rounds": 1, "processes": [2]})


def commit_of(tree: Path) -> str:
    """Return git's commit of a checkout; of another folder, its name."""
    asked = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=tree, capture_output=True, text=True)
    return asked.stdout.strip() or tree.name


def pairs(results: dict, count: int) -> list[tuple[Start, Start]]:
    """Return what both trees took in each round."""
    return list(zip(results["this tree", count], results["the other", count], strict=True))


def start(tree: Path, count: int, folder: Path, is_smoke: bool, turn: int) -> Start:
    """Start a training of a tree, wait for its first step, and kill it; see ``until_first_step``."""
    output = folder / f"{count}-{turn}"
    output.parent.mkdir(exist_ok=True)
    several = ["--processes", str(count)] if count > 1 else []
    tiny = ["task.max_train_samples=64", "task.vocab_size=200"] if is_smoke else []
    command = ["-m", "hftune.cli", "train", *several, *RECIPE, *tiny, f"output_dir={output}"]
    return until_first_step(command, folder, output / "ledger.jsonl", LONGEST_S, tree)


def until_first_step(words: Sequence[str], folder: Path, ledger: Path, longest_s: float, tree: Path) -> Start:
    """Start a Python command on CPUs, wait until it has written its first step into a file, and kill it.

    Raises:
        RuntimeError: it ended before, or took too long; the message has its output.
    """
    env = {**os.environ, "PYTHONPATH": str(tree), "HF_DATASETS_CACHE": str(folder / "cache")}
    env |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    began = time.monotonic()
    with (folder / "log").open("w+") as log:
        # In the folder: with -m, Python imports from the current one first.
        process = subprocess.Popen([sys.executable, *words], env=env, cwd=folder, stdout=log, stderr=log)
        try:
            while not has_step(ledger):
                if process.poll() is not None or time.monotonic() - began > longest_s:
                    raise RuntimeError(f"{words} did not come to its first step:\n{Path(log.name).read_text()}")
                time.sleep(0.01)
            seconds, members = time.monotonic() - began, family(process.pid)
            return Start(seconds, cpu_seconds(members), max(map(private_mib, members)))
        finally:
            for member in reversed(family(process.pid)):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def private_mib(process: psutil.Process) -> float:
    with suppress(OSError):  # it has just ended
        if found := re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


def has_step(ledger: Path) -> bool:
    return ledger.is_file() and b'{"step": 1,' in ledger.read_bytes()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started, directly or not; nothing if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Add up the CPU time that processes have used so far."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
