"""``hftune sweep``: train a recipe with all combinations of some values, or let Optuna choose them, and compare the trials."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_recipe, check_at_least_1
from hftune.commands.sweep_space import Grid, Search, Space, Trial, parse
from hftune.distributed.signals import hangup
from hftune.errors import ConfigError, format_value

if TYPE_CHECKING:
    from hftune.config import Recipe

SWEEP = "sweep.json"
STOPPED, INTERRUPTED = 75, 130
"""Exit codes: a signal stopped the sweep, and the same command goes on; it was interrupted at once."""
POLL_S = 0.1
MAX_COMPARED = 12
"""Trials on the page that compares them, the best ones."""
BAR_COLUMNS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--jobs", type=int, default=1, help="trials to train at the same time (default %(default)s)")
    parser.add_argument("--processes", type=int, help="number of processes of each trial, on this machine (default: one)")
    parser.add_argument(
        "--optuna",
        type=int,
        metavar="TRIALS",
        help="let Optuna choose the values of this many trials, also from ranges such as train.lr=1e-5..1e-3; "
        'needs pip install "hftune[sweeps]"',
    )


@dataclass
class Sweep:
    """What is swept, and how."""

    space: Space
    recipe: Recipe
    """That of one trial; it differs from the others in the keys that vary."""
    folder: Path
    jobs: int
    processes: int | None
    num_trials: int | None
    """Of Optuna; None for a grid."""
    gpus: list[str] = field(default_factory=list)
    """Those to share out among jobs; empty if there are none, or a single job has all."""

    def words(self, trial: Trial) -> list[str]:
        """Return the command line of a trial."""
        given = [f"recipe={self.space.recipe}", *self.space.fixed, *(f"{key}={value}" for key, value in trial.values.items())]
        if self.recipe.track.with_:
            group = self.recipe.track.group or f"{self.recipe.recipe} sweep"
            given += [f"track.run_name={format_value(trial.name)}", f"track.group={format_value(group)}"]
        return [*given, f"output_dir={format_value(str(trial.folder))}"]

    def command(self, trial: Trial) -> list[str]:
        words = self.words(trial)
        if self.processes is None:
            return [sys.executable, "-m", "hftune.run", *words]
        return [sys.executable, "-m", "hftune.cli", "train", "--processes", str(self.processes), *words]

    def environment(self, slot: int) -> dict[str, str]:
        """Return the environment of the trial in one of ``jobs`` places: cores and GPUs are shared out."""
        from hftune.launchers.local import environment

        env = environment()
        if self.jobs == 1:
            return env
        count = self.processes or 1
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[slot * count : (slot + 1) * count])
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (self.jobs * count))))
        return env


def run(options: argparse.Namespace) -> int:
    """Train all trials that are not finished, and print and write what came of them."""
    check_at_least_1(options, "jobs", "processes", "optuna")
    sweep = prepare(options)
    if sweep.num_trials is None:
        chooser: Grid | Search = Grid(sweep.space, sweep.folder)
    else:
        chooser = Search(sweep.space, sweep.folder, sweep.num_trials, sweep.recipe)
    check_same_data(chooser.trials)
    done = sum(trial.state == "finished" for trial in chooser.trials)
    count = sweep.num_trials or len(chooser.trials)
    print(f"{count} trials in {sweep.folder}{f', {done} of them finished' if done else ''}.", flush=True)
    runner = Runner(sweep, chooser)
    try:
        runner.run()
    finally:
        write_summary(sweep, chooser.trials)
    show(sweep, chooser.trials)
    if runner.signal:
        print("hftune: The sweep was stopped. The same command goes on.", file=sys.stderr, flush=True)
        return STOPPED
    return 1 if any(trial.state != "finished" for trial in chooser.trials) else 0


def prepare(options: argparse.Namespace) -> Sweep:
    """Check every value before anything is trained.

    Raises:
        ConfigError: a trial's recipe is not valid, or the folder holds a different sweep.
    """
    from hftune.config import Recipe

    space = parse(options.words)
    if space.ranges and options.optuna is None:
        key, part = next(iter(space.ranges.items()))
        raise ConfigError(
            f"{key}={part.low:g}..{part.high:g} is a range: --optuna N searches it. A grid needs a list of values."
        )
    if options.optuna is not None and find_spec("optuna") is None:
        raise ConfigError('--optuna needs a package that is not installed: pip install "hftune[sweeps]".')
    recipes = []
    for values in space.corners() if options.optuna is not None else space.grid():
        words = [f"recipe={space.recipe}", *space.fixed, *(f"{key}={value}" for key, value in values.items())]
        recipes.append(Recipe.from_argv(words))
        recipes[-1].validate()
        if recipes[-1].eval.is_off:
            raise ConfigError("A sweep compares evaluations, and eval.every=never makes none.")
    recipe = recipes[0]  # without the keys that vary it might not be valid
    folder = Path(recipe.output_dir) / "sweep"
    sweep = Sweep(space, recipe, folder, options.jobs, options.processes, options.optuna)
    if options.jobs > 1:
        sweep.gpus = share_gpus(options.jobs, options.processes or 1)
    claim(sweep)
    return sweep


def share_gpus(jobs: int, processes: int) -> list[str]:
    """Return the GPUs for all jobs; empty if this machine has none.

    Raises:
        ConfigError: there are too few.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        import torch  # a second, once

        gpus = [str(index) for index in range(torch.cuda.device_count())]
    else:
        names = [name.strip() for name in given.split(",") if name.strip()]
        gpus = list(takewhile(lambda name: name != "-1", names))  # CUDA ignores what comes after it, too
    if 0 < len(gpus) < jobs * processes:
        raise ConfigError(
            f"--jobs {jobs} with {processes} process(es) each needs {jobs * processes} GPUs; there are {len(gpus)}."
        )
    return gpus


def identity(sweep: Sweep) -> dict[str, Any]:
    """Return what makes trials comparable. To the lists of a grid values may be added later, but not to those of Optuna."""
    from hftune.config.recipe import flat

    space = sweep.space
    varying = ("output_dir", *space.keys)
    shared = {
        key: value
        for key, value in flat(sweep.recipe.to_dict()).items()
        if not any(key == name or key.startswith(f"{name}.") for name in varying)
    }
    digest = sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()
    own = {"recipe": space.recipe, "fixed": sorted(space.fixed), "keys": space.keys}
    by = {"by": "grid"} if sweep.num_trials is None else {"by": "optuna", "lists": space.lists}
    return {**own, **by, "digest": digest}


def claim(sweep: Sweep) -> None:
    """Create the folder, or raise ConfigError if it holds a different sweep."""
    path = sweep.folder / SWEEP
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["sweep"]
    except FileNotFoundError:
        before = None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read. Remove it, or set output_dir=... to a different folder.") from error
    if before is not None:
        sweep.space.sort_like(before.get("keys", []))  # the names of the trials begin with the first key
    own = identity(sweep)
    if before is not None and before != own:
        changed = next(name for name in own if before.get(name) != own[name])
        was = (
            "" if changed == "digest" else f": {changed} {format_value(before.get(changed))}, not {format_value(own[changed])}"
        )
        raise ConfigError(f"{sweep.folder} holds a different sweep{was}. Set output_dir=... to a different folder.")
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"sweep": own, "trials": []}), encoding="utf-8") if before is None else None
    except OSError as error:
        raise ConfigError(f"{sweep.folder} cannot be written: {error.strerror}. Set output_dir=...") from error


def check_same_data(trials: Sequence[Trial], begun: Trial | None = None) -> None:
    """Raise ConfigError if trials are known to be of different data or code, whose scores cannot be compared.

    Args:
        begun: a trial that has not finished, which is compared with those that have.
    """
    from hftune.tracking.facts import differing

    alike = defaultdict[str, list[Path]](list)
    for trial in trials:
        if trial.state == "finished" or trial is begun:  # keys but these change neither rows nor samples nor code
            own = [word for word in trial.values.items() if word[0].startswith(("task.", "train.optimizer", "train.schedule"))]
            alike[str(own)].append(trial.folder)
    for folders in alike.values():
        if found := differing(folders, "data", "code"):
            what = {"data": "The data", "code": "Files of your code"}[found[0]]
            raise ConfigError(
                f"{what} have changed between {found[1]} and {found[2]}, so their scores cannot be compared. Undo the change, "
                "or set output_dir=... to a different folder."
            )


def time_written(trial: Trial) -> float | None:
    """Return when the run.json of a trial was written, which says what it is trained on; None if there is none."""
    path = trial.folder / "run.json"
    return path.stat().st_mtime if path.is_file() else None


class Runner:
    """Keeps up to ``jobs`` trials running, each a process with a log of its own, until none is left or a signal comes."""

    def __init__(self, sweep: Sweep, chooser: Grid | Search):
        self.sweep, self.chooser = sweep, chooser
        self.running: dict[int, tuple[Trial, subprocess.Popen, float]] = {}
        """By slot."""
        self.signal = 0
        """The last signal that asked to stop."""
        self._told: set[int] = set()
        """Processes that it was passed on to: one that starts as it comes must get it, too."""

    def run(self) -> None:
        """Train.

        SIGHUP, of a terminal that is closed, stops the trials as SIGTERM does: they have sessions of their own.

        Raises:
            KeyboardInterrupt: after a second Ctrl-C; all trials have been killed.
        """
        from hftune.launchers.local import kill

        with self._forwarding():
            try:
                while True:
                    self._start()
                    if not self.running:
                        return
                    if self.signal:
                        self._pass_on()
                    time.sleep(POLL_S)
                    self._collect()
            finally:
                for _, process, _ in self.running.values():
                    kill(process)

    def _start(self) -> None:
        for slot in range(self.sweep.jobs):
            if slot in self.running or self.signal:
                continue
            if (trial := self.chooser.next()) is None:
                return
            trial.folder.mkdir(parents=True, exist_ok=True)
            trial.state, trial.facts_written = "running", time_written(trial)
            with (trial.folder / "output.log").open("ab") as log:
                # A session of its own: the terminal would also send Ctrl-C to it, which would then receive it twice.
                process = subprocess.Popen(
                    self.sweep.command(trial),
                    env=self.sweep.environment(slot),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.running[slot] = trial, process, time.monotonic()
            print(f"{trial.name}: started", flush=True)

    def _pass_on(self) -> None:
        for _, process, _ in self.running.values():
            if process.pid not in self._told:
                self._told.add(process.pid)
                process.send_signal(signal.SIGTERM)

    def _collect(self) -> None:
        for slot, (trial, process, began) in list(self.running.items()):
            code = process.poll()
            if trial.facts_written != (written := time_written(trial)):
                trial.facts_written = written
                check_same_data(self.chooser.trials, trial)
            if code is None:
                continue
            del self.running[slot]
            self._judge(trial, code, time.monotonic() - began)
            write_summary(self.sweep, self.chooser.trials)

    def _judge(self, trial: Trial, code: int, seconds: float) -> None:
        from hftune.tracking.console import duration, short

        if code == 0 and trial.read_result() and trial.value is not None:
            text = f"{self.sweep.recipe.eval.metric} {short(trial.value)} at step {trial.step}  {duration(seconds)}"
            print(f"{trial.name}: {text}", flush=True)
        elif self.signal and code != 0:
            trial.state = "stopped"
            print(f"{trial.name}: stopped", flush=True)
        else:
            trial.state = "failed"
            trial.error = trial.error or last_line(trial.folder / "output.log") or f"exit code {code}"
            print(f"{trial.name}: failed: {trial.error} (exit code {code}; see {trial.folder / 'output.log'})", flush=True)
        if trial.state != "stopped":
            self.chooser.ended(trial)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            if not self.signal:
                print("Stopping after the current step of each trial; Ctrl-C again ends them at once.", flush=True)
            self.signal = number
            self._told.clear()

        numbers = [signal.SIGINT, signal.SIGTERM, *hangup()]
        before = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def last_line(path: Path) -> str | None:
    """Return hftune's last words in a log, or else its last line."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("hftune: ")]
    return (said or lines or [None])[-1]


def best_first(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Return the finished trials, the best first."""
    finished = [trial for trial in trials if trial.value is not None]
    return sorted(finished, key=lambda trial: trial.value or 0.0, reverse=sweep.recipe.greater_is_better)


def over_seeds(sweep: Sweep, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return mean and standard deviation over the seeds, for each combination of the other keys, the best mean first."""
    groups = defaultdict[tuple[tuple[str, str], ...], list[float]](list)
    for trial in trials:
        if trial.value is not None:
            groups[tuple((key, value) for key, value in trial.values.items() if key != "seed")].append(trial.value)
    rows = [
        {
            "values": dict(key),
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
            "trials": len(values),
        }
        for key, values in groups.items()
    ]
    return sorted(rows, key=lambda row: row["mean"], reverse=sweep.recipe.greater_is_better)


def write_summary(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Write sweep.json: what was swept, and the trials, the best first."""
    from hftune.atomic import write_text

    names = ("name", "values", "state", "value", "step", "seconds", "error")
    listed = [*best_first(sweep, trials), *(trial for trial in trials if trial.value is None)]
    objective = {"metric": sweep.recipe.eval.metric, "greater_is_better": sweep.recipe.greater_is_better}
    summary: dict[str, Any] = {"sweep": identity(sweep), "objective": objective}
    summary["trials"] = [{name: getattr(trial, name) for name in names} for trial in listed]
    if "seed" in sweep.space.keys:
        summary["over_seeds"] = over_seeds(sweep, trials)
    write_text(sweep.folder / SWEEP, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def show(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Print the tables, and write the page that compares the trials."""
    from hftune.commands.report import write
    from hftune.reporting.page import page
    from hftune.tracking.console import aligned

    ranked = best_first(sweep, trials)
    if not ranked:
        return
    print("", *aligned(trial_rows(sweep, ranked)), sep="\n", flush=True)
    if "seed" in sweep.space.keys and len(sweep.space.keys) > 1:
        print("", *aligned(seed_rows(sweep, trials)), sep="\n", flush=True)
    compared = [trial.folder for trial in ranked[:MAX_COMPARED]]
    write(sweep.folder / "compare.html", page(compared, are_selected=len(ranked) > MAX_COMPARED))
    what = f"the best {MAX_COMPARED}" if len(ranked) > MAX_COMPARED else "all"
    print(f"\nbest: {ranked[0].folder}\n{sweep.folder / 'compare.html'} compares {what}; {sweep.folder / SWEEP} lists them.")


def trial_rows(sweep: Sweep, ranked: Sequence[Trial]) -> list[list[str]]:
    """Return the table of the finished trials: each value has a bar, one mark for the worst."""
    from hftune.tracking.console import duration, short

    rows = [[*sweep.space.keys, sweep.recipe.eval.metric, "", "at step", "time"]]
    best, worst = ranked[0].value or 0.0, ranked[-1].value or 0.0
    for trial in ranked:
        value = trial.value or 0.0
        marks = 1 + round((BAR_COLUMNS - 1) * ((value - worst) / (best - worst) if best != worst else 1))
        own = [trial.values[key] for key in sweep.space.keys]
        time_s = "" if trial.seconds is None else duration(trial.seconds)
        rows.append([*own, short(value), "\N{BLACK SQUARE}" * marks, str(trial.step), time_s])
    return rows


def seed_rows(sweep: Sweep, trials: Sequence[Trial]) -> list[list[str]]:
    """Return the table of the means over the seeds."""
    from hftune.tracking.console import short

    rows = [[*(key for key in sweep.space.keys if key != "seed"), f"mean {sweep.recipe.eval.metric}", "", "seeds"]]
    for row in over_seeds(sweep, trials):
        deviation = "" if row["deviation"] is None else f"± {short(row['deviation'])}"
        rows.append([*row["values"].values(), short(row["mean"]), deviation, str(row["trials"])])
    return rows
