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
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hftune.commands.arguments import add_recipe, check_at_least_1, writing
from hftune.commands.sweep_space import Space, Trial, number, parse, spell, trial_name
from hftune.config.addresses import refuse_address
from hftune.distributed.signals import handling
from hftune.errors import ConfigError, format_value

if TYPE_CHECKING:
    from hftune.config import Recipe

SWEEP = "sweep.json"
STOPPED = 75
"""Exit code if a signal stopped the sweep, and the same command goes on."""
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


def run(options: argparse.Namespace) -> int:
    """Train all trials that are not finished, and print and write what came of them."""
    check_at_least_1(options, "jobs", "processes", "optuna")
    sweep = Sweep.prepare(options)
    check_same_data(sweep)
    done = sum(trial.state == "finished" for trial in sweep.trials)
    count = sweep.num_trials or len(sweep.trials)
    print(f"{count} trials in {sweep.folder}{f', {done} of them finished' if done else ''}.", flush=True)
    runner = Runner(sweep)
    try:
        runner.run()
    finally:
        sweep.write()
    show(sweep)
    if runner.signal:
        print("hftune: The sweep was stopped. The same command goes on.", file=sys.stderr, flush=True)
        return STOPPED
    return 1 if any(trial.state != "finished" for trial in sweep.trials) else 0


@dataclass
class Sweep:
    """What is swept, and the trials. Its journal, sweep.json, says what was tried when the same command comes again."""

    space: Space
    recipe: Recipe
    """That of the first trial, whatever values are added later; it differs from the others in the keys that vary."""
    folder: Path
    jobs: int
    processes: int | None
    num_trials: int | None
    """Of Optuna; None for a grid."""
    gpus: list[str] = field(default_factory=list)
    """Those to share out among jobs; empty if there are none, or a single job has all."""
    trials: list[Trial] = field(default_factory=list)
    """All that are known, finished ones included."""

    @classmethod
    def prepare(cls, options: argparse.Namespace) -> Sweep:
        """Check every value before anything is trained, and take up what was trained earlier.

        Raises:
            ConfigError: a trial's recipe is not valid, or the folder holds a different sweep.
        """
        from hftune.config import Recipe

        space = parse(options.words)
        if space.ranges and options.optuna is None:
            key, (low, high) = next(iter(space.ranges.items()))
            raise ConfigError(f"{key}={low:g}..{high:g} is a range: --optuna N searches it. A grid needs a list of values.")
        if options.optuna is not None and find_spec("optuna") is None:
            raise ConfigError('--optuna needs a package that is not installed: pip install "hftune[sweeps]".')
        recipes = []
        for values in space.corners() if options.optuna is not None else space.grid():
            recipes.append(Recipe.from_argv(space.words(values)))
            recipes[-1].validate()
            if recipes[-1].eval.is_off:
                raise ConfigError("A sweep compares evaluations, and eval.every=never makes none.")
        recipe = recipes[0]  # without the keys that vary it might not be valid
        refuse_address(recipe.output_dir, "a sweep")
        sweep = cls(space, recipe, recipe.folder / "sweep", options.jobs, options.processes, options.optuna)
        if options.jobs > 1:
            sweep.gpus = share_gpus(options.jobs, options.processes or 1)
        sweep.open()
        return sweep

    def open(self) -> None:
        """Read the trials of an earlier call, or raise ConfigError if the folder holds a different sweep."""
        path, own = self.folder / SWEEP, self.identity()
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            was, trials = before["sweep"], before["trials"]
            was["keys"].sort()  # earlier versions had them in the order of the words
        except FileNotFoundError:
            was, trials = own, []
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read. Remove it, or set output_dir=... to a different folder.") from error
        if was != own:
            changed = next(name for name in own if was.get(name) != own[name])
            how = (
                "" if changed == "digest" else f": {changed} {format_value(was.get(changed))}, not {format_value(own[changed])}"
            )
            raise ConfigError(f"{self.folder} holds a different sweep{how}. Set output_dir=... to a different folder.")
        if self.num_trials is None:
            names = {frozenset(trial["values"].items()): trial["name"] for trial in trials}
            grid = [(names.get(frozenset(values.items())), values) for values in self.space.grid()]
            self.trials = [Trial(name or trial_name(values), values) for name, values in grid]
        else:
            self.trials = [Trial(**trial) for trial in sorted(trials, key=lambda trial: trial["name"])]
        for trial in self.trials:
            # Failed ones of a grid are tried again; those of a search count.
            if not trial.read_result(self.folder_of(trial)) and not (self.num_trials and trial.state == "failed"):
                trial.state, trial.value = "waiting", None
        if self.num_trials is not None:
            self._begin_search()
        with writing(self.folder, " Set output_dir=..."):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write()

    def _begin_search(self) -> None:
        """Let Optuna's tree-structured Parzen estimator learn from the trials so far."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # A sampler that starts again with the same seed would repeat its first draws.
        sampler = optuna.samplers.TPESampler(seed=(self.recipe.seed + len(self.trials)) % 2**32, constant_liar=True)
        self.study = optuna.create_study(direction="maximize" if self.recipe.greater_is_better else "minimize", sampler=sampler)
        self.asked: dict[str, Any] = {}
        """Optuna's trials that it has been asked for in this call, by the names of ours."""
        for trial in self.trials:
            self.ended(trial)

    def next(self) -> Trial | None:
        """Return a trial that is not finished; None if there is none to start now."""
        if waiting := [trial for trial in self.trials if trial.state == "waiting"]:
            return waiting[0]
        if len(self.trials) >= (self.num_trials or 0):
            return None
        asked = self.study.ask({key: self.space.distribution(key) for key in self.space.keys})
        values = {key: value if isinstance(value, str) else spell(value) for key, value in asked.params.items()}
        values = {key: values[key] for key in self.space.keys}
        self.trials.append(Trial(f"{len(self.trials):04d}_{trial_name(values)}", values))
        self.asked[self.trials[-1].name] = asked
        return self.trials[-1]

    def ended(self, trial: Trial) -> None:
        """Tell Optuna what has come of a trial; of one that an earlier call has asked for, what it was, too."""
        if self.num_trials is None:
            return
        from optuna.trial import TrialState, create_trial

        if (asked := self.asked.get(trial.name)) is not None:
            self.study.tell(asked, trial.value, state=TrialState.FAIL if trial.value is None else None)
        elif trial.value is not None:
            known = {key: self.space.distribution(key, value) for key, value in trial.values.items()}
            params = {key: value if key in self.space.lists else number(value) for key, value in trial.values.items()}
            self.study.add_trial(create_trial(params=params, distributions=known, value=trial.value))

    def identity(self) -> dict[str, Any]:
        """Return what makes trials comparable. To the lists of a grid values may be added later, not to those of Optuna."""
        from hftune.config.recipe import flat

        space = self.space
        varying = ("output_dir", *space.keys)
        shared = {
            key: value
            for key, value in flat(self.recipe.to_dict()).items()
            if not any(key == name or key.startswith(f"{name}.") for name in varying)
        }
        digest = sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()
        own = {"recipe": space.recipe, "fixed": sorted(space.fixed), "keys": sorted(space.keys)}
        by = {"by": "grid"} if self.num_trials is None else {"by": "optuna", "lists": space.lists}
        return {**own, **by, "digest": digest}

    def folder_of(self, trial: Trial) -> Path:
        return self.folder / trial.name

    def words(self, trial: Trial) -> list[str]:
        """Return the recipe and the overrides of a trial."""
        given = self.space.words(trial.values)
        if self.recipe.track.with_:
            group = self.recipe.track.group or f"{self.recipe.recipe} sweep"
            given += [f"track.run_name={format_value(trial.name)}", f"track.group={format_value(group)}"]
        return [*given, f"output_dir={format_value(str(self.folder_of(trial)))}"]

    def command(self, trial: Trial) -> list[str]:
        alone = self.processes is None
        program = ["hftune.run"] if alone else ["hftune.cli", "train", "--processes", str(self.processes)]
        return [sys.executable, "-m", *program, *self.words(trial)]

    def environment(self, slot: int) -> dict[str, str]:
        """Return the environment of the trial in one of ``jobs`` places: cores and GPUs are shared out."""
        from hftune.launchers.local import environment
        from hftune.tracking.facts import COMMAND

        env = environment()
        del env[COMMAND]  # a trial's is its own
        if self.jobs == 1:
            return env
        count = self.processes or 1
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[slot * count : (slot + 1) * count])
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (self.jobs * count))))
        return env

    def ranked(self) -> list[Trial]:
        finished = [trial for trial in self.trials if trial.value is not None]
        return sorted(finished, key=lambda trial: trial.value or 0.0, reverse=self.recipe.greater_is_better)

    def over_seeds(self) -> list[dict[str, Any]]:
        """Return mean and standard deviation over the seeds, for each combination of the other keys, the best mean first."""
        groups = defaultdict[str, list[Trial]](list)
        for trial in self.ranked():
            groups[str({**trial.values, "seed": None})].append(trial)
        rows = []
        for trials in groups.values():
            values = [trial.value or 0.0 for trial in trials]
            own = {key: value for key, value in trials[0].values.items() if key != "seed"}
            deviation = statistics.stdev(values) if len(values) > 1 else None
            rows.append({"values": own, "mean": statistics.fmean(values), "deviation": deviation, "trials": len(values)})
        return sorted(rows, key=lambda row: row["mean"], reverse=self.recipe.greater_is_better)

    def write(self) -> None:
        """Write sweep.json: what is swept, and the trials, the best first."""
        from hftune.atomic import write_text

        listed = [*self.ranked(), *(trial for trial in self.trials if trial.value is None)]
        objective = {"metric": self.recipe.eval.metric, "greater_is_better": self.recipe.greater_is_better}
        summary: dict[str, Any] = {"sweep": self.identity(), "objective": objective, "trials": [*map(asdict, listed)]}
        if "seed" in self.space.keys:
            summary["over_seeds"] = self.over_seeds()
        write_text(self.folder / SWEEP, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def share_gpus(jobs: int, processes: int) -> list[str]:
    """Return the GPUs for all jobs; empty if this machine has none.

    Raises:
        ConfigError: there are too few.
    """
    from hftune.launchers.forks import gpus

    found = gpus()
    if 0 < len(found) < jobs * processes:
        raise ConfigError(
            f"--jobs {jobs} with {processes} process(es) each needs {jobs * processes} GPUs; there are {len(found)}."
        )
    return found


def check_same_data(sweep: Sweep, begun: Trial | None = None) -> None:
    """Raise ConfigError if trials are known to be of different data or code, whose scores cannot be compared.

    Args:
        begun: a trial that has not finished, which is compared with those that have.
    """
    from hftune.tracking.facts import differing

    alike = defaultdict[str, list[Path]](list)
    for trial in sweep.trials:
        if trial.state == "finished" or trial is begun:  # keys but these change neither rows nor samples nor code
            own = [word for word in trial.values.items() if word[0].startswith(("task.", "train.optimizer", "train.schedule"))]
            alike[str(own)].append(sweep.folder_of(trial))
    for folders in alike.values():
        if found := differing(folders, "data", "code"):
            what = {"data": "The data", "code": "Files of your code"}[found[0]]
            raise ConfigError(
                f"{what} have changed between {found[1]} and {found[2]}, so their scores cannot be compared. Undo the change, "
                "or set output_dir=... to a different folder."
            )


class Running(NamedTuple):
    """A trial that is being trained."""

    trial: Trial
    process: subprocess.Popen
    began: float
    facts_written: float | None
    """When its run.json was written, as far as it has been looked at."""


class Runner:
    """Keeps up to ``jobs`` trials running, each a process with a log of its own, until none is left or a signal comes."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.running: dict[int, Running] = {}
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

        with handling(self._forward):
            try:
                while True:
                    self._start()
                    if not self.running:
                        return
                    for one in self.running.values():
                        if self.signal and one.process.pid not in self._told:
                            self._told.add(one.process.pid)
                            one.process.send_signal(signal.SIGTERM)
                    time.sleep(POLL_S)
                    self._collect()
            finally:
                for one in self.running.values():
                    kill(one.process)

    def _start(self) -> None:
        for slot in range(self.sweep.jobs):
            if slot in self.running or self.signal:
                continue
            if (trial := self.sweep.next()) is None:
                return
            trial.state, folder = "running", self.sweep.folder_of(trial)
            folder.mkdir(parents=True, exist_ok=True)
            self.sweep.write()
            before = time_written(folder)
            with (folder / "output.log").open("ab") as log:
                # A session of its own: the terminal would also send Ctrl-C to it, which would then receive it twice.
                process = subprocess.Popen(
                    self.sweep.command(trial),
                    env=self.sweep.environment(slot),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.running[slot] = Running(trial, process, time.monotonic(), before)
            print(f"{trial.name}: started", flush=True)

    def _collect(self) -> None:
        for slot, one in list(self.running.items()):
            code, written = one.process.poll(), time_written(self.sweep.folder_of(one.trial))
            if one.facts_written != written:
                self.running[slot] = one._replace(facts_written=written)
                check_same_data(self.sweep, one.trial)
            if code is not None:
                del self.running[slot]
                self._judge(one.trial, code, time.monotonic() - one.began)
                self.sweep.write()

    def _judge(self, trial: Trial, code: int, seconds: float) -> None:
        from hftune.tracking.console import duration, short

        folder = self.sweep.folder_of(trial)
        if code == 0 and trial.read_result(folder) and trial.value is not None:
            text = f"{self.sweep.recipe.eval.metric} {short(trial.value)} at step {trial.step}  {duration(seconds)}"
        elif self.signal and code != 0:
            trial.state = text = "stopped"
        else:
            trial.state = "failed"
            trial.error = trial.error or last_line(folder / "output.log") or f"exit code {code}"
            text = f"failed: {trial.error} (exit code {code}; see {folder / 'output.log'})"
        print(f"{trial.name}: {text}", flush=True)
        if trial.state != "stopped":
            self.sweep.ended(trial)

    def _forward(self, number: int, frame: Any) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal:
            print("Stopping after the current step of each trial; Ctrl-C again ends them at once.", flush=True)
        self.signal = number
        self._told.clear()


def time_written(folder: Path) -> float | None:
    """Return when run.json was written, which says what a trial is trained on; None if there is none."""
    path = folder / "run.json"
    return path.stat().st_mtime if path.is_file() else None


def last_line(path: Path) -> str | None:
    """Return hftune's last words in a log, or else its last line."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("hftune: ")]
    return (said or lines or [None])[-1]


def show(sweep: Sweep) -> None:
    """Print a table of the finished trials and one of the means over the seeds; write the page that compares the trials."""
    from hftune.commands.report import write
    from hftune.reporting.page import page
    from hftune.tracking.console import aligned, duration, short

    ranked, keys, metric = sweep.ranked(), sweep.space.keys, sweep.recipe.eval.metric
    if not ranked:
        return
    best, worst = ranked[0].value or 0.0, ranked[-1].value or 0.0
    rows = [[*keys, metric, "", "at step", "time"]]
    for trial in ranked:
        value, seconds = trial.value or 0.0, trial.seconds
        marks = 1 + round((BAR_COLUMNS - 1) * ((value - worst) / (best - worst) if best != worst else 1))
        cells = [short(value), "\N{BLACK SQUARE}" * marks, str(trial.step), "" if seconds is None else duration(seconds)]
        rows.append([*(trial.values[key] for key in keys), *cells])
    print("", *aligned(rows), sep="\n", flush=True)
    if "seed" in keys and len(keys) > 1:
        rows = [[*(key for key in keys if key != "seed"), f"mean {metric}", "", "seeds"]]
        for row in sweep.over_seeds():
            deviation = "" if row["deviation"] is None else f"± {short(row['deviation'])}"
            rows.append([*row["values"].values(), short(row["mean"]), deviation, str(row["trials"])])
        print("", *aligned(rows), sep="\n", flush=True)
    has_more = len(ranked) > MAX_COMPARED
    compared = [sweep.folder_of(trial) for trial in ranked[:MAX_COMPARED]]
    write(sweep.folder / "compare.html", page(compared, are_selected=has_more))
    what = f"the best {MAX_COMPARED}" if has_more else "all"
    print(f"\nbest: {compared[0]}\n{sweep.folder / 'compare.html'} compares {what}; {sweep.folder / SWEEP} lists them.")
