"""Let machines die, hang, leave and come while a job trains, and compare with a run that was left alone.

    python benchmarks/elastic.py [RUNS] [--events 30] [--machines 4] [--seed 0] [--at-once 1]

Network namespaces with host names of their own, one torchrun with ``rdzv_backend: hftune`` in each, one process a machine, a
small BERT with dropout, Gloo, an output folder that all see, a checkpoint every tenth step. The events are drawn with their
times: a training process killed; all processes of a machine killed; a machine without power (nobody hears that its connections
are closed), and a second one killed within five seconds of that; its cable cut for some seconds; SIGTERM to its launcher; a
machine that hangs (SIGSTOP) for some seconds; a machine that comes. A launcher that has ended is started by a later one.

"seconds": from the event to the next finished step. "pause": without a step, which is less where machines leave or come by
word. "lost": steps that were finished and computed again. "equal": losses and weights of the last model are those of the
unbroken run of one process to 1e-5 of the largest of each tensor, and the audit is clean; key.bias is left out, as its true
gradient is zero, and Adam makes steps of rounding noise.

Each event ends all processes, and new ones import everything, as many as four at once on the cores of this one machine. Under
--smoke they are forks of an interpreter that has done so. --meeting: at a host that stays (hftune meeting), or in a folder that
all see.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from record import parse_options, print_table, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.elastic import PORT, Agent, ElasticJob, Resumption, Stuck  # noqa: E402
from tests.support.machines import Machine, NotAllowed, several_machines  # noqa: E402
from tests.support.runs import environment, warm_python  # noqa: E402

SIZES = (
    "{model_type: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
    "hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, initializer_range: 0.2}"
)
WORDS = (
    *("recipe=yelp_demo", "task.type=tests.support.tasks.BrakedReviews", f"task.model_config={SIZES}", "task.vocab_size=300"),
    *("task.max_length=64", "task.max_train_samples=200", "task.max_eval_samples=37", "train.batch_size=16"),
    *("train.micro_batch_tokens=null", "train.micro_batch_size=4", "train.epochs=10000", "train.log_every=1", "train.lr=5e-5"),
    *("eval.every=100000", "checkpoint.every=10", "resume=auto"),
)
AWAY_S = (5.0, 10.0)
"""How long a cable is cut, or a machine hangs."""
BACK_S = 60.0
"""For a machine that was away to be taken in again, or to give up."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Outcome:
    """One event, and how the job went on."""

    kind: str
    machine: str
    step: int
    """Before it happened."""
    resumption: Resumption


@dataclass(frozen=True)
class BrokenRun:
    """What became of a run."""

    number: int
    outcomes: list[Outcome]
    difference: float = math.nan
    """The furthest that a loss or a weight is from the unbroken run's."""
    problems: Sequence[str] = ()
    """What the audit has found, or that the run got stuck."""

    @property
    def is_equal(self) -> bool:
        return self.difference <= TOLERANCE and not self.problems

    @property
    def row(self) -> tuple:
        lost = sum(one.resumption.lost_steps for one in self.outcomes)
        return self.number, len(self.outcomes), lost, f"{self.difference:.1e}", "yes" if self.is_equal else "NO"


class Machines:
    """Which machines train, and what can be done to them."""

    def __init__(self, job: ElasticJob, machines: list[Machine], draw: random.Random):
        self.job, self.machines, self.draw = job, machines, draw
        self.agents: dict[str, Agent] = {}
        self.struck = 0.0
        """When the last event happened."""

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.name in self.agents and self.agents[machine.name].is_alive]

    @property
    def down(self) -> list[Machine]:
        return [machine for machine in self.machines if machine not in self.alive]

    def start(self, machine: Machine) -> None:
        self.agents[machine.name] = self.job.start(machine)

    def strike(self, kind: str) -> Outcome:
        """Let an event happen, and wait until the job has gone on."""
        machine = self.draw.choice(self.down if kind == "arrival" else self.alive)
        step, self.struck = self.job.step, time.monotonic()
        undo = KINDS[kind](self, machine)
        found = self.job.wait_for_resumption(self.struck, comes=self.agents[machine.name] if kind == "arrival" else None)
        if kind == "SIGTERM":
            self.job.wait_for_end(self.agents[machine.name])
        if undo is not None:
            away_s = self.draw.uniform(*AWAY_S)
            time.sleep(max(0.0, self.struck + away_s - time.monotonic()))
            self._back(machine, undo)
        return Outcome(kind, machine.name, step, found)

    def _back(self, machine: Machine, undo: Callable[[], None]) -> None:
        """Let a machine come back, and wait until it is taken in again or its launcher has ended."""
        agent, back = self.agents[machine.name], time.monotonic()
        undo()
        self.job.wait_for(
            lambda: not agent.is_alive or self.job.resumption(back), f"answer of {machine.name}, which is back", BACK_S
        )


def hang(machines: Machines, machine: Machine) -> Callable[[], None]:
    machine.signal(signal.SIGSTOP)
    return lambda: machine.signal(signal.SIGCONT)


def two_machines(machines: Machines, machine: Machine) -> None:
    """A second one, while the others find out about the first."""
    second = machines.draw.choice([other for other in machines.alive if other is not machine])
    machine.power_off()
    time.sleep(machines.draw.uniform(0.0, 5.0))
    machines.struck = time.monotonic()
    second.kill()


def cut(machines: Machines, machine: Machine) -> Callable[[], None]:
    machine.cut()
    return machine.mend


KINDS: dict[str, Callable[[Machines, Machine], Callable[[], None] | None]] = {
    "process killed": lambda machines, machine: machines.agents[machine.name].kill_worker(),
    "machine killed": lambda machines, machine: machine.kill(),
    "power off": lambda machines, machine: machine.power_off(),
    "two machines": two_machines,
    "cable cut": cut,
    "hang": hang,
    "SIGTERM": lambda machines, machine: machines.agents[machine.name].process.send_signal(signal.SIGTERM),
    "arrival": lambda machines, machine: machines.start(machine),
}
"""The events. What a function returns undoes it."""


def main() -> int:
    options = parse()
    try:
        with several_machines(1):
            pass
    except NotAllowed as error:
        print(f"benchmarks/elastic.py {error}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("HF_DATASETS_CACHE", name)
        python = warm_python() if options.smoke else sys.executable
        run = partial(break_run, folder, options, unbroken(folder / "unbroken", options, python), python)
        with ProcessPoolExecutor(options.at_once) as pool:
            runs = list(pool.map(run, range(1, options.runs + 1)))
    return report(options, runs)


def break_run(folder: Path, options: argparse.Namespace, expected: Path, python: str, number: int) -> BrokenRun:
    """Train through all events, in a process that the network namespaces are named after."""
    found, job_folder = [], folder / str(number)
    job_folder.mkdir()
    try:
        with several_machines(options.machines + 1) as machines:
            for outcome in broken_run(job_folder, machines, options, number, python):
                found.append(outcome)
                print(f"  {number}.{len(found)}: {outcome.kind}, {outcome.machine}, after step {outcome.step}:", end=" ")
                now = outcome.resumption
                print(f"{now.seconds:.1f} s, {now.lost_steps} steps lost, {now.world_size} machines go on", flush=True)
        run = BrokenRun(number, found, *compare(job_folder / "out", expected))
    except Stuck as error:
        if options.keep is not None:
            options.keep.mkdir(exist_ok=True)
            (options.keep / f"{number}.txt").write_text(str(error))
        print(f"STUCK: {error}", file=sys.stderr)
        run = BrokenRun(number, found, problems=("stuck",))
    print(*run.row, *run.problems, sep="  ", flush=True)
    return run


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int, nargs="?", default=1)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="of events, in this order; default: drawn from all")
    parser.add_argument("--steps", type=int, default=40, help="for each event; those that are left are taken at full speed")
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a micro-batch takes at least")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--meeting", choices=("folder", "host"), default="host")
    parser.add_argument("--keep", type=Path, help="folder for what the launchers of a run that got stuck have said")
    two = {"events": 2, "steps": 30, "pause": 0.1, "machines": 2, "kinds": ["power off", "arrival"]}
    return parse_options(parser, smoke={"runs": 1, **two})


def num_steps(options: argparse.Namespace) -> int:
    return options.steps * (options.events + 1)


def unbroken(folder: Path, options: argparse.Namespace, python: str) -> Path:
    words = [*WORDS, f"train.max_steps={num_steps(options)}", f"output_dir={folder}"]
    done = subprocess.run([python, "-m", "hftune.run", *words], env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return folder


def broken_run(
    folder: Path, machines: list[Machine], options: argparse.Namespace, number: int, python: str
) -> Iterator[Outcome]:
    """Let events happen, and yield how the job went on after each; then let it train to its end.

    Raises:
        Stuck: it does not go on.
    """
    draw = random.Random(f"{options.seed}/{number}")
    *members, stays = machines
    endpoint = f"{stays.address}:{PORT}" if options.meeting == "host" else str(folder / "meeting")
    words = [*WORDS, f"train.max_steps={num_steps(options)}", f"task.pause_s={options.pause}", "train.dead_after_s=20"]
    conf = "last_call=3,regroup_every=3"
    job = ElasticJob(folder, endpoint, words, f"1:{len(members)}", python, 10 * options.events, conf)
    there = Machines(job, members, draw)
    meeting = job.run(stays, "-m", "hftune.cli", "meeting", str(PORT)) if options.meeting == "host" else None
    try:
        for machine in members[: max(2, len(members) - 1)]:
            there.start(machine)
        for place in range(options.events):
            job.wait_for_step(job.step + draw.randint(3, options.steps // 3))
            kinds = possible_kinds(there)
            wanted = options.kinds[place % len(options.kinds)] if options.kinds else draw_kind(kinds, there, draw)
            yield there.strike(wanted if wanted in kinds else kinds[0])
        job.brake.unlink()
        job.wait_for_end(*(there.agents[machine.name] for machine in there.alive), timeout_s=300)
        if not (job.output_dir / "result.json").exists():
            raise Stuck(f"All launchers have ended, and training has not.\n{job.words_of_all()}")
    finally:
        job.end()
        if meeting is not None:
            meeting.machine.kill()


def possible_kinds(there: Machines) -> list[str]:
    """Return the events after which a machine trains."""
    arrival = ["arrival"] if there.down else []
    if len(there.alive) == 1:
        return [*arrival, "process killed"]
    return [*arrival, *(kind for kind in KINDS if kind != "arrival" and (kind != "two machines" or len(there.alive) > 2))]


def draw_kind(kinds: list[str], there: Machines, draw: random.Random) -> str:
    """Let machines come about as often as they go."""
    if "arrival" in kinds and draw.random() < len(there.down) / len(there.machines):
        return "arrival"
    return draw.choice([kind for kind in kinds if kind != "arrival"])


def compare(folder: Path, expected: Path) -> tuple[float, list[str]]:
    """Return the furthest that losses and weights are from the unbroken run's, and what the audit has found."""
    from safetensors.torch import load_file

    from hftune.replay.audit import audit

    ours, theirs = (load_file(path / "model_last" / "model.safetensors") for path in (folder, expected))
    weights = [
        float((ours[name] - value).abs().max() / value.abs().max())
        for name, value in theirs.items()
        if not name.endswith("key.bias") and value.abs().max() > 0
    ]
    pairs = zip(losses(folder), losses(expected), strict=True)
    return max([*weights, *(abs(one - other) / abs(other) for one, other in pairs)]), audit(folder).problems


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def report(options: argparse.Namespace, runs: list[BrokenRun]) -> int:
    header = ("event", "events", "lost", "most lost", "seconds", "slowest", "pause", "longest")
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    rows = [
        row(kind, [one for one in outcomes if kind in (one.kind, "all")])
        for kind in (*KINDS, "all")
        if any(kind in (one.kind, "all") for one in outcomes)
    ]
    seconds = [outcome.resumption.seconds for outcome in outcomes] or [math.nan]
    figure = f"median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s to the next step"
    tables = [
        print_table(f"{len(outcomes)} events on {options.machines} machines; medians", header, rows),
        print_table("The runs", ("run", "events", "lost", "furthest", "equal"), [run.row for run in runs]),
    ]
    what = f"{len(runs)} runs, {options.events} kills, power failures, cuts, hangs, departures and arrivals each"
    equal = sum(run.is_equal for run in runs)
    save(__file__, options, tables, {what: f"{equal} equal to the undisturbed run to {TOLERANCE:g}; {figure}"})
    return 0 if equal == len(runs) else 1


def row(kind: str, outcomes: list[Outcome]) -> tuple:
    found = [one.resumption for one in outcomes]
    seconds, pauses, lost = zip(*((one.seconds, one.pause_s, one.lost_steps) for one in found), strict=True)
    times = [f"{figure:.1f}" for each in (seconds, pauses) for figure in (statistics.median(each), max(each))]
    return kind, len(found), sum(lost), max(lost), *times


if __name__ == "__main__":
    sys.exit(main())
