"""``hftune replay``: compute past steps of a run again, from the nearest checkpoint, and compare them with its ledger."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hftune import __version__
from hftune.commands.arguments import add_trust_code, argv_of_one, check_at_least_1
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

if TYPE_CHECKING:
    from hftune.replay.history import Change, History, Job

WORST = 10
"""How many samples of a single step are shown by default."""
FAR_S = 30.0
"""If the first step that is asked for takes this many seconds to reach, the user is told why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="output folder of a run, such as outputs/yelp, or its address")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, help="step to compute again, counted from 1")
    asked.add_argument("--steps", metavar="FIRST:LAST", help="steps to compute again, such as 130:140")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="keys of the recipe to change from the first of these steps on, such as train.lr=1e-5",
    )
    parser.add_argument(
        "--without",
        metavar="SAMPLES",
        help="training samples whose losses do not count from then on, by their numbers in samples.jsonl, such as 1001,3570",
    )
    parser.add_argument("--skip", metavar="STEPS", help="steps to skip, such as 137 or 137,140:142")
    parser.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="first step to which --set, --without and --skip apply (default: the first of the steps)",
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
        help="say whether the batch makes the loss or an update before it, by the batch's loss at earlier weights",
    )
    parser.add_argument("--output", type=Path, help="new folder for what is found (default: beside the run, RUN_replay/...)")
    parser.add_argument(
        "--save-every", type=int, metavar="STEPS", help="write a checkpoint every STEPS steps, from which later replays start"
    )
    parser.add_argument("--processes", type=int, help="number of processes to start on this machine (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Replay. Exit code 1 if the steps are not those of the ledger. Under a launcher every process calls it."""
    job = job_of(options)
    with reserved(job):
        if options.processes is not None:
            from hftune.launchers.local import start_processes

            recipe = job.history.recipe_at(job.last, *job.change.overrides_at(job.last))
            libraries = ("hftune.replay.outcome", *recipe.task.libraries)
            start_processes("hftune.cli", [*argv_of_one(options), f"--output={job.output}"], options.processes, libraries)
            return 0 if json.loads((job.output / "replay.json").read_text(encoding="utf-8"))["equal"] else 1
        announce(job)
        from hftune.replay.outcome import replay  # imports torch: only once everything has been checked

        is_equal = replay(job)
    return 0 if is_equal or ProcessInfo.from_environment().world_size > 1 else 1


def job_of(options: argparse.Namespace) -> Job:
    """Check the arguments, as far as that needs no torch.

    Raises:
        ConfigError: naming what is wrong.
    """
    from hftune.replay.history import Change, History, Job

    check_at_least_1(options, "processes", "save_every")
    history = History.open(options.folder, trust_code=options.trust_code, data=options.data)
    first = last = options.step
    if options.steps is not None:
        first, last = range_of("--steps", options.steps)
        if last < first:
            raise ConfigError(f"--steps {options.steps}: the last step comes before the first one.")
    history.check_step(first)
    history.check_step(last)
    without, skip = numbers_of("--without", options.without), numbers_of("--skip", options.skip)
    change = Change(tuple(options.set), without, skip, first if options.from_step is None else options.from_step)
    if options.from_step is not None and not change:
        raise ConfigError("--from says from which step on something is changed: give --set, --without or --skip, too.")
    check_change(history, change, first, last)
    if options.worst is not None and options.worst < 0:
        raise ConfigError(f"--worst {options.worst}: give a number of samples.")
    if change and (options.worst or options.why):
        name = "--worst" if options.worst else "--why"
        raise ConfigError(f"{name} looks into steps as they were. Leave it out beside --set, --without and --skip.")
    if (output := options.output) is None:
        name = f"step_{first}" if first == last else f"steps_{first}_{last}"
        names = (history.aside / (name if number == 1 else f"{name}_{number}") for number in range(1, 10**6))
        output = next(path for path in names if not path.exists())
    elif output.resolve().is_relative_to(history.folder.resolve()):
        raise ConfigError(f"--output {output} is in the run's own folder, into which a replay never writes. Name another one.")
    elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already. Name a new folder, or leave the option out.")
    history.recipe_at(last, *change.overrides_at(last))  # what is wrong with it should show at once
    return Job(
        history,
        first,
        last,
        change,
        output,
        options.save_every,
        options.json,
        worst=(WORST if first == last and not change else 0) if options.worst is None else options.worst,
        why=options.why,
        must_look=bool(options.worst) or options.why,
    )


def check_change(history: History, change: Change, first: int, last: int) -> None:
    """Refuse a change that cannot be made, or makes no difference to these steps.

    Raises:
        ConfigError: naming the option.
    """
    if not change:
        if all(history.ledger.steps.get(step, {}).get("skipped") for step in range(first, last + 1)):
            steps = f"Step {first:,} was" if first == last else f"Steps {first:,} to {last:,} were"
            raise ConfigError(f"{steps} skipped by the run (train.skip). To see what it would have done: --set train.skip=[]")
        return
    if change.from_step > last:
        raise ConfigError(f"--from {change.from_step:,} comes after the last step, {last:,}: nothing would be changed.")
    history.check_step(change.from_step)
    history.check_change(change)
    num_rows = history.start_of(last)["plan"]["num_samples"]
    if beyond := sorted(row for row in change.without if row >= num_rows):
        raise ConfigError(f"--without {beyond[0]}: the training data have rows 0 to {num_rows - 1:,}.")
    if outside := sorted(step for step in change.skip if not change.from_step <= step <= last):
        raise ConfigError(f"--skip {outside[0]}: the steps that are replayed and changed are {change.from_step:,} to {last:,}.")
    if change.without and not change.overrides:  # under other keys a step may have other samples
        used = {step: {*history.samples_of(step).tolist()} for step in range(change.from_step, last + 1)}
        if emptied := [step for step, samples in used.items() if samples <= change.without and step not in change.skip]:
            step = emptied[0]
            raise ConfigError(f"--without: these are all samples of step {step:,}. To skip the whole step: --skip {step}")
        if not any(samples & change.without for samples in used.values()):
            which = f"step {last:,} uses" if len(used) == 1 else f"steps {change.from_step:,} to {last:,} use"
            raise ConfigError(f"--without: {which} none of these samples, so nothing would be changed.")


def numbers_of(option: str, text: str | None) -> frozenset[int]:
    """Read numbers such as 35,17 or 130:140, or raise ConfigError."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, last = (int(part), int(part)) if part.strip().isdecimal() else range_of(option, part)
        found |= {*range(first, last + 1)}
    return frozenset(found)


def range_of(option: str, text: str) -> tuple[int, int]:
    """Read a range such as 130:140, both included, or raise ConfigError."""
    if not (found := re.fullmatch(r"\s*(\d+)\s*[:-]\s*(\d+)\s*", text)):
        what = "steps as FIRST:LAST, such as 130:140" if option == "--steps" else "numbers, such as 35,17 or 130:140"
        raise ConfigError(f"{option} {text}: give {what}.")
    return int(found[1]), int(found[2])


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
