"""``hftune replay``: compute past steps of a run again, from the nearest checkpoint, and compare them with its ledger.

``commands/replay_steps.py`` computes; it imports torch, which this module does only once the arguments are known to be valid.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hftune import __version__
from hftune.commands.arguments import add_trust_code, argv_of_one, check_at_least_1, find_modules_here
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

if TYPE_CHECKING:
    from hftune.replay.history import Change, History

WORST = 10
"""Samples that are shown of a single step."""
FAR_S = 30.0
"""Seconds to the first step that is asked for, from which on a user is told why it takes so long."""


@dataclass(frozen=True)
class Job:
    """What is to be replayed."""

    history: History
    first: int
    last: int
    change: Change
    output: Path
    """A new folder."""
    save_every: int | None = None
    as_json: bool = False
    worst: int = 0
    """Samples to show, those with the greatest loss."""
    why: bool = False
    """Whether to find out if batch or update is to blame."""
    asked_to_look: bool = False
    """Whether --worst or --why was given."""

    @property
    def steps(self) -> str:
        """The steps that are asked for, in words."""
        return f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    @property
    def begin(self) -> int:
        """The first step that must be right for what is asked for."""
        if self.why:
            from hftune.replay.verdict import EARLIER, losses_of, suspect_of

            suspect = suspect_of(losses_of(self.history.ledger.steps), self.first, self.last)
            return max(1, min(self.first, suspect - EARLIER))
        return min(self.first, self.change.from_step) if self.change else self.first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="output folder of a run, such as outputs/yelp")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, help="step to compute again, counted from 1")
    asked.add_argument("--steps", metavar="FIRST:LAST", help="steps to compute again, such as 130:140")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="keys of the recipe that are other ones from the first of these steps on, such as train.lr=1e-5",
    )
    parser.add_argument(
        "--without",
        metavar="SAMPLES",
        help="training samples, by their numbers in samples.jsonl, that count for nothing from then on, such as 1001,3570",
    )
    parser.add_argument("--skip", metavar="STEPS", help="steps that are left out, such as 137 or 137,140:142")
    parser.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="step from which on --set, --without and --skip hold (default: the first of the steps)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[SPLIT=]PATH",
        help="where the data are now, if they have moved: a folder, or train=FILE",
    )
    parser.add_argument(
        "--worst",
        type=int,
        metavar="K",
        help=f"show the K samples with the greatest loss; 0: look at none (default: {WORST} of a single step as it was)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="say whether the batch makes the loss, or an update before it: the batch at the weights of earlier steps",
    )
    parser.add_argument("--output", type=Path, help="new folder for what is found (default: beside the run, RUN_replay/...)")
    parser.add_argument(
        "--save-every", type=int, metavar="STEPS", help="write a checkpoint after so many steps, from which later replays start"
    )
    parser.add_argument("--processes", type=int, help="number of processes to start on this machine (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Replay. Exit code 1 if the steps are not those of the ledger. Under a launcher every process calls it."""
    from hftune.run import fail, outlive_readers

    outlive_readers()
    if options.trust_code:
        find_modules_here()
    try:
        job = job_of(options)
        with reserved(job):
            if options.processes is not None:
                return on_processes(job, options)
            announce(job)
            from hftune.commands.replay_steps import replay  # imports torch: only once everything has been checked

            is_equal = replay(job)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 0 if is_equal or ProcessInfo.from_environment().world_size > 1 else 1


def job_of(options: argparse.Namespace) -> Job:
    """Check the arguments, as far as that needs no torch.

    Raises:
        ConfigError: naming what is wrong.
    """
    from hftune.replay.history import Change, History

    check_at_least_1(options, "processes", "save_every")
    history = History.open(options.folder, trust_code=options.trust_code, data=options.data)
    first, last = (options.step, options.step) if options.step is not None else range_of("--steps", options.steps)
    if last < first:
        raise ConfigError(f"--steps {options.steps}: the last step comes before the first one.")
    history.check_step(first)
    history.check_step(last)
    change = Change(
        tuple(options.set),
        frozenset(numbers_of("--without", options.without)),
        frozenset(numbers_of("--skip", options.skip)),
        first if options.from_step is None else options.from_step,
    )
    check_change(history, change, first, last, options.from_step is not None)
    check_left_out(history, change, first, last)
    check_without(history, change, last)
    check_look(options, change)
    check_output(history, options.output)
    history.recipe_at(last, *change.overrides_at(last))  # what is wrong with it should show at once
    return Job(
        history,
        first,
        last,
        change,
        options.output or new_folder(history.aside, first, last),
        options.save_every,
        options.json,
        (WORST if first == last and not change else 0) if options.worst is None else options.worst,
        options.why,
        bool(options.worst) or options.why,
    )


def check_change(history: History, change: Change, first: int, last: int, names_from: bool) -> None:
    """Refuse a change that cannot be made, or makes no difference to these steps, or raise ConfigError."""
    if names_from and not change:
        raise ConfigError("--from says from which step on something is changed: give --set, --without or --skip, too.")
    if names_from:
        history.check_step(change.from_step)
    if change.from_step > last:
        raise ConfigError(f"--from {change.from_step:,} comes after the last step, {last:,}: nothing would be changed.")
    history.check_change(change)
    num_rows = history.start_of(last)["plan"]["num_samples"]
    if beyond := sorted(row for row in change.without if row >= num_rows):
        raise ConfigError(f"--without {beyond[0]}: the training data have rows 0 to {num_rows - 1:,}.")
    if outside := sorted(step for step in change.skip if not change.from_step <= step <= last):
        raise ConfigError(f"--skip {outside[0]}: the steps that are replayed and changed are {change.from_step:,} to {last:,}.")


def check_left_out(history: History, change: Change, first: int, last: int) -> None:
    """Refuse steps that the run has left out, all of them, unless something is changed, or raise ConfigError."""
    if not change and all(history.ledger.steps.get(step, {}).get("skipped") for step in range(first, last + 1)):
        steps = f"Step {first:,} was" if first == last else f"Steps {first:,} to {last:,} were"
        raise ConfigError(f"{steps} left out of the run (train.skip). To see what it would have done: --set train.skip=[]")


def check_without(history: History, change: Change, last: int) -> None:
    """Refuse to leave out samples of other steps only, or all samples of a step, or raise ConfigError."""
    if not change.without or change.overrides:  # under other keys a step may have other samples
        return
    steps, is_used = range(change.from_step, last + 1), False
    for step in steps:
        left_out = [sample in change.without for sample in history.samples_of(step).tolist()]
        is_used = is_used or any(left_out)
        if all(left_out) and step not in change.skip:
            raise ConfigError(f"--without: these are all samples of step {step:,}. To leave the whole step out: --skip {step}")
    if not is_used:
        which = f"step {last:,} uses" if len(steps) == 1 else f"steps {steps.start:,} to {last:,} use"
        raise ConfigError(f"--without: {which} none of these samples, so nothing would be changed.")


def check_look(options: argparse.Namespace, change: Change) -> None:
    """Refuse to look into steps that are changed, or raise ConfigError."""
    if options.worst is not None and options.worst < 0:
        raise ConfigError(f"--worst {options.worst}: give a number of samples.")
    if change and (options.worst or options.why):
        name = "--worst" if options.worst else "--why"
        raise ConfigError(f"{name} looks into steps as they were. Leave it out beside --set, --without and --skip.")


def check_output(history: History, output: Path | None) -> None:
    """Refuse to write into a run, or over what is there, or raise ConfigError."""
    if output is None:
        return
    if output.resolve().is_relative_to(history.folder.resolve()):
        raise ConfigError(f"--output {output} is in the run's own folder, into which a replay never writes. Name another one.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already. Name a new folder, or leave the option out.")


@contextmanager
def reserved(job: Job) -> Iterator[None]:
    """Make the new folder at once, so that no other replay takes it; at the end it goes if nothing was written.

    Raises:
        ConfigError: it cannot be made.
    """
    if not ProcessInfo.from_environment().is_main:
        yield
        return
    try:
        job.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{job.output} cannot be made: {error.strerror}. Say where to write: --output FOLDER.") from error
    try:
        yield
    finally:
        with suppress(OSError):  # something is in it
            job.output.rmdir()
            job.history.aside.rmdir()


def numbers_of(option: str, text: str | None) -> Iterator[int]:
    """Read numbers such as 35,17 or 130:140, or raise ConfigError."""
    for part in (text or "").split(",") if text else ():
        if part.strip().isdecimal():
            yield int(part)
        else:
            first, last = range_of(option, part)
            yield from range(first, last + 1)


def range_of(option: str, text: str) -> tuple[int, int]:
    """Read a range such as 130:140, both included, or raise ConfigError."""
    if not (found := re.fullmatch(r"\s*(\d+)\s*[:-]\s*(\d+)\s*", text)):
        what = "steps as FIRST:LAST, such as 130:140" if option == "--steps" else "numbers, such as 35,17 or 130:140"
        raise ConfigError(f"{option} {text}: give {what}.")
    return int(found[1]), int(found[2])


def new_folder(aside: Path, first: int, last: int) -> Path:
    """Return a folder beside the run that is not there yet."""
    name = f"step_{first}" if first == last else f"steps_{first}_{last}"
    names = (aside / (name if number == 1 else f"{name}_{number}") for number in range(1, 10**6))
    return next(path for path in names if not path.exists())


def announce(job: Job) -> None:
    """Say on the main process what is about to be computed, and for how long: importing the libraries takes seconds."""
    if not ProcessInfo.from_environment().is_main or job.as_json:
        return
    from hftune.tracking.console import duration, note

    start = job.history.nearest(job.begin)
    seconds = job.history.seconds_per_step()
    count, origin = job.last - start, f"checkpoint {start:,}" if start else "the first weights"
    about = "" if seconds is None or count * seconds < 1 else f", about {duration(count * seconds)}"
    print(
        f"hftune {__version__}: replaying {job.steps} of {job.history.folder} from {origin}: {count:,} "
        f"step{'s' * (count > 1)}{about}; loading libraries ...",
        flush=True,
    )
    if seconds is not None and (job.begin - start) * seconds > FAR_S:
        before = f"is of step {start:,}" if start else "of an earlier step is gone"
        print(
            note(
                f"The nearest checkpoint {before}, so {job.begin - start:,} steps have to be computed first. --save-every "
                "writes some beside the run on the way, from which later replays start. checkpoint.keep_every keeps "
                "more of them while a run trains."
            ),
            flush=True,
        )


def on_processes(job: Job, options: argparse.Namespace) -> int:
    """Replay on several processes of this machine; return the exit code."""
    from hftune.launchers.local import start_processes

    recipe = job.history.recipe_at(job.last, *job.change.overrides_at(job.last))
    libraries = ("hftune.commands.replay_steps", *recipe.task.libraries)
    start_processes("hftune.cli", [*argv_of_one(options), f"--output={job.output}"], options.processes, libraries)
    return 0 if json.loads((job.output / "replay.json").read_text(encoding="utf-8"))["equal"] else 1
