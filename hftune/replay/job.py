"""What ``hftune replay`` is asked for, checked as far as that needs no torch: steps, changes, and where to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hftune.errors import ConfigError
from hftune.replay.history import Change, History
from hftune.replay.spikes import EARLIER, losses_of, suspect_of


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
    """How many samples to show, those with the greatest loss."""
    why: bool = False
    """Whether to find out if batch or update is to blame."""
    must_look: bool = False
    """Whether the user has asked for samples or for why, and wants an error where that cannot be had."""

    @property
    def steps(self) -> str:
        """The steps that are asked for, in words."""
        return f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    @property
    def begin(self) -> int:
        """The first step that must be right for what is asked for."""
        if self.why:
            suspect = suspect_of(losses_of(self.history.ledger.steps), self.first, self.last)
            return max(1, min(self.first, suspect - EARLIER))
        return min(self.first, self.change.from_step) if self.change else self.first


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
        _check_without(history, change, last)


def _check_without(history: History, change: Change, last: int) -> None:
    """Refuse to leave out samples of other steps only, or all samples of a step."""
    steps, is_used = range(change.from_step, last + 1), False
    for step in steps:
        is_left_out = [sample in change.without for sample in history.samples_of(step).tolist()]
        is_used = is_used or any(is_left_out)
        if all(is_left_out) and step not in change.skip:
            raise ConfigError(f"--without: these are all samples of step {step:,}. To skip the whole step: --skip {step}")
    if not is_used:
        which = f"step {last:,} uses" if len(steps) == 1 else f"steps {steps.start:,} to {last:,} use"
        raise ConfigError(f"--without: {which} none of these samples, so nothing would be changed.")


def check_output(history: History, output: Path) -> None:
    """Refuse to write into a run, or over what is there, or raise ConfigError."""
    if output.resolve().is_relative_to(history.folder.resolve()):
        raise ConfigError(f"--output {output} is in the run's own folder, into which a replay never writes. Name another one.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already. Name a new folder, or leave the option out.")


def new_folder(history: History, first: int, last: int) -> Path:
    """Return a folder beside the run that is not there yet."""
    name = f"step_{first}" if first == last else f"steps_{first}_{last}"
    names = (history.aside / (name if number == 1 else f"{name}_{number}") for number in range(1, 10**6))
    return next(path for path in names if not path.exists())


def numbers_of(option: str, text: str | None) -> frozenset[int]:
    """Read numbers such as 35,17 or 130:140, or raise ConfigError."""

    def numbers() -> Iterator[int]:
        for part in (text or "").split(",") if text else ():
            if part.strip().isdecimal():
                yield int(part)
            else:
                first, last = range_of(option, part)
                yield from range(first, last + 1)

    return frozenset(numbers())


def range_of(option: str, text: str) -> tuple[int, int]:
    """Read a range such as 130:140, both included, or raise ConfigError."""
    if not (found := re.fullmatch(r"\s*(\d+)\s*[:-]\s*(\d+)\s*", text)):
        what = "steps as FIRST:LAST, such as 130:140" if option == "--steps" else "numbers, such as 35,17 or 130:140"
        raise ConfigError(f"{option} {text}: give {what}.")
    return int(found[1]), int(found[2])
