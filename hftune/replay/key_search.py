"""``hftune bisect``'s search among the keys in which two runs differ, and among the lines of their data, by replaying steps."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError
from hftune.replay.bisection import MIN_STEPS, Judge, Scale, Try, find_bad, steps_to_compute
from hftune.replay.changes import DataFiles, KeyChange, LineChange, changed_keys, override, spell
from hftune.replay.history import BOUNDS, Change, History, Override
from hftune.replay.tolerance import TOLERANCE, relative
from hftune.tracking.console import hide_reports, note, one_line, short

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

MAX_SHOWN = 10
"""How many keys or lines of a result are printed."""
WIDTH = 100
"""Columns of the changes of a try, and of a line of data."""
TRAIN_FILE = "task.data_files.train"
OTHER_SAMPLES = ("seed", "train.batch_size")
"""Keys that decide which samples form a step."""
MAYBE_NOISE = 1e-3
"""If the ends differ by less, the good one is computed twice: GPUs do not always give the same bits, and that adds up."""
TIMES_NOISE = 3
"""Ends that differ by less than this many times the noise of the good one are not told apart."""
NEAR = 0.01
"""Tolerance of a whole run's losses, as a fraction of the difference of the ends; rounding differs with the processes."""
OTHER_STEPS = "Compute others: --steps K, --from STEP."

Say = Callable[[str], None]


@dataclass
class End:
    """One of the two runs between which is searched."""

    name: str
    """good or bad."""
    history: History
    words: list[str]
    """Overrides of the run's keys, as the user gave them."""

    @property
    def label(self) -> str:
        return " ".join([str(self.history.folder), *self.words])

    def recorded(self, first: int) -> list[float] | None:
        """Return the losses from a step on that the ledger has of this end; None if it was no run, or has none."""
        steps = self.history.ledger.steps
        losses = [steps[step].get("loss") for step in sorted(steps) if step >= first]
        return losses if not self.words and None not in losses else None


def search_for(options: argparse.Namespace, say: Say) -> Search:
    """Check the arguments and find the keys that differ, before anything is computed.

    Raises:
        ConfigError: there is nothing to search among.
    """
    if len(options.runs) > 2 or (len(options.runs) == 1 and not options.bad):
        raise ConfigError(
            f"{len(options.runs)} run(s) were given. Name the good and the bad one, or what makes one bad: --bad train.lr=0.1"
        )
    first = options.first
    histories = [History.open(folder, trust_code=options.trust_code, data=options.data) for folder in options.runs]
    for history in histories:
        if first not in history.ledger.steps:
            raise ConfigError(f"--from {first}: {history.folder} has steps {min(history.ledger.steps):,} to {history.last:,}.")
    good, bad = End("good", histories[0], options.good), End("bad", histories[-1], options.bad)
    recipes = [end.history.recipe_at(first, *end.words).to_dict() for end in (good, bad)]
    changes = changed_keys(*recipes)
    if not changes:
        raise ConfigError(
            f"No key that could change a loss differs between {good.label} and {bad.label}. hftune compare says what else "
            "does. Code and libraries: hftune bisect-step, for example with git bisect run."
        )
    good.history.check_change(Change((override(changes),), from_step=first))
    most = min(history.last for history in histories) - first + 1
    if (options.steps or 0) > most:
        raise ConfigError(f"--steps {options.steps}: from step {first} on there are {most} steps in the ledger.")
    known = good.recorded(first), bad.recorded(first)
    suggested = steps_to_compute(*known) if known[0] is not None and known[1] is not None else min(most, MIN_STEPS)
    bounds = {f"train.{name}": recipes[0]["train"][name] for name in BOUNDS}  # as training resolved them
    last = first + (options.steps or suggested) - 1
    return Search(good, bad, [bounds, *good.words], changes, first, last, say)


@dataclass
class Search:
    """The search among the keys of two recipes; and among the lines of the training data, if their file turns out to be it."""

    good: End
    bad: End
    words: list[Override]
    """Overrides of every try."""
    changes: list[KeyChange]
    first: int
    last: int
    """The steps of a try."""
    say: Say

    def run(self) -> dict[str, Any]:
        """Return the result as plain data, after it was printed."""
        from hftune.replay.engine import Replayer  # imports torch, which takes seconds

        hide_reports()
        count = f"{len(self.changes)} keys differ" if len(self.changes) > 1 else f"One key differs, {self.changes[0].key}"
        steps = f"steps {self.first} to {self.last}"
        self.say(f"{count}. A try computes {steps}: place from good (0) to bad (1), mean loss of each third.")
        if chance := [change.key for change in self.changes if change.key in OTHER_SAMPLES]:
            self.say(note(f"{' and '.join(chance)} put other samples into each step, so part of the difference is chance."))
        change = Change(tuple(self.words), from_step=self.first)
        with Replayer(self.good.history, self.first, change) as replayer:
            return self.search(lambda words: self._losses(replayer, words))

    def _losses(self, replayer: Replayer, words: Sequence[Override]) -> list[float]:
        """Compute the steps with these overrides, and return the loss of each; infinity once training would have stopped."""
        replayer.restart(Change(tuple(words), from_step=self.first))
        losses = []
        for step in replayer.advance(self.last):
            if not math.isfinite(step.loss):
                return losses + [math.inf] * (self.last - max(step.step, self.first) + 1)
            if step.step >= self.first:
                losses.append(step.loss)
        return losses

    def search(self, losses_with: Callable[[Sequence[Override]], list[float]]) -> dict[str, Any]:
        """Compute both ends, search among the keys, and return what was found. ``losses_with``: of overrides."""

        def losses(changes: Sequence[KeyChange]) -> list[float]:
            return losses_with([*self.words, override(changes)])

        ends = {"good": losses([]), "bad": losses(self.changes)}
        scale = Scale(*ends.values())
        for end in (self.good, self.bad):
            remark = remark_on(end, ends[end.name], self.first, scale)
            self.say(f"  {end.name:>6}  {curve_of(scale.curve(ends[end.name]))}  {end.label}{remark}")
        result: dict[str, Any] = {
            "steps": [self.first, self.last],
            "ends": {name: {"losses": of, "curve": scale.curve(of)} for name, of in ends.items()},
            "changed": [asdict(change) for change in self.changes],
            "found": [],
        }
        if scale.difference <= TOLERANCE:
            self.say(self._nothing_to_find())
            return result
        if scale.difference < MAYBE_NOISE and (noise := Scale(scale.good, losses([])).difference) > 0:
            self.say(f"The ends differ by {scale.difference:.0e}; the good one, computed again, from itself by {noise:.0e}.")
            if scale.difference < TIMES_NOISE * noise:
                self.say(f"That may be chance: there is nothing to find in these steps. {OTHER_STEPS}")
                return result
        judge = Judge(losses, scale, lambda made: self.say(line_of(made)))
        found = self._find("key", self.changes, judge, describe_key)
        if found and len(found) < len(self.changes) and judge.look(others(found, self.changes)).is_bad:
            fixed = " ".join(f"{change.key}={spell(change.good)}" for change in found)
            self.say(f"So there is another cause. To find it, leave this one out: add --bad {fixed}")
        result |= {"found": [asdict(change) for change in found], "tries": [asdict(made) for made in judge.tries.values()]}
        if [change.key for change in found] == [TRAIN_FILE]:
            result["lines"] = self._search_lines(found[0], losses_with, scale.good)
        return result

    def _nothing_to_find(self) -> str:
        """Say why both ends are the same."""
        count = self.last - self.first + 1
        known = self.good.recorded(self.first), self.bad.recorded(self.first)
        if known[0] and known[1] and Scale(known[0][:count], known[1][:count]).difference > TOLERANCE:
            return (
                "The keys make no difference in these steps, in which the runs differed: the cause is none of them. See "
                f"hftune compare {self.good.history.folder} {self.bad.history.folder}."
            )
        return f"The two ends have the same loss in these steps: there is nothing to find. {OTHER_STEPS}"

    def _search_lines(
        self, change: KeyChange, losses_with: Callable[[Sequence[Override]], list[float]], good: Sequence[float]
    ) -> dict[str, Any] | None:
        """Search among the lines in which two files of training data differ; None if the files cannot be mixed."""
        if not isinstance(change.good, str) or not isinstance(change.bad, str):
            self.say("Its lines are not searched: they are in several files.")
            return None
        try:
            files = DataFiles(Path(change.good).expanduser(), Path(change.bad).expanduser())
        except ConfigError as error:
            self.say(f"Its lines are not searched: {error}")
            return None
        self.say(f"{len(files.changes):,} lines differ between {change.good} and {change.bad}.")
        with scratch() as folder:

            def losses(changes: Sequence[LineChange]) -> list[float]:
                path = folder / f"{len(judge.tries)}{files.suffix}"  # a new name each time: data sets are cached by it
                files.write(changes, path)
                return losses_with([*self.words, {TRAIN_FILE: str(path)}])

            bad = losses_with([*self.words, override([change])])
            judge = Judge(losses, Scale(good, bad), lambda made: self.say(line_of(made, "lines ")))
            found = self._find("line", files.changes, judge, describe_line)
        return {
            "changed": len(files.changes),
            "found": [asdict(one) for one in found],
            "tries": [asdict(made) for made in judge.tries.values()],
        }

    def _find(self, noun: str, changes: Sequence[Any], judge: Judge, describe: Callable[[Any], list[str]]) -> list[Any]:
        """Search among changes; print what was found, and how much of the difference it makes."""
        found = find_bad(changes, lambda some: judge.look(some).is_bad)
        rest = others(found, changes)
        made, without = (judge.look(found), judge.look(rest)) if rest else (None, None)
        self.say("Cause:" if len(found) == 1 else f"Cause, {len(found):,} {noun}s that act together:")
        for change in found[:MAX_SHOWN]:
            self.say("\n".join(describe(change)))
        if len(found) > MAX_SHOWN:
            self.say(f"  and {len(found) - MAX_SHOWN:,} more")
        if made is not None and without is not None:
            other = f"the other {noun}" if len(rest) == 1 else f"the other {len(rest):,} {noun}s"
            share = "cannot be tried" if without.place is None else f"make{'s' if len(rest) == 1 else ''} {percent(without)}"
            what, them = ("It makes", "it") if len(found) == 1 else ("Together they make", "them")
            self.say(f"{what} {percent(made)} of the difference; {other} {share} without {them}.")
        return found


def others(found: Sequence[Any], changes: Sequence[Any]) -> list[Any]:
    return [change for change in changes if change not in found]


def percent(made: Try) -> str:
    """Format the share of the difference that a try makes."""
    return "an unknown share" if made.place is None else f"{made.place:.0%}"


def remark_on(end: End, losses: Sequence[float], first: int, scale: Scale) -> str:
    """Say whether an end that was a run is computed as it was then, measured by how far the ends are apart."""
    recorded = end.recorded(first)
    if recorded is None:
        return ""
    recorded = recorded[: len(losses)]
    apart = [relative(now, then) for now, then in zip(losses, recorded, strict=True)]
    if max(apart) <= TOLERANCE:
        return ", as in its ledger"
    if Scale(recorded, losses).difference < NEAR * scale.difference:
        return f", as in its ledger to {max(apart):.0e}"
    index = next(index for index, value in enumerate(apart) if value > TOLERANCE)
    then, now = short(recorded[index]), short(losses[index])
    why = "Code, libraries, data or hardware differ" if end.name == "good" else "The keys do not explain all of it"
    command = "hftune replay" if end.name == "good" else "hftune compare"
    return f"; not as it was: step {first + index} had loss {then} and has {now} here. {why}: see {command}."


def curve_of(means: Sequence[float]) -> str:
    """Format the mean losses of the thirds."""
    return f"{'  '.join(f'{short(mean):>5}' for mean in means):<19}"


def line_of(made: Try, prefix: str = "") -> str:
    """Format a try: its place between good and bad, the means of its losses, and the changes."""
    what = one_line(prefix + " ".join(made.changes), WIDTH)
    if made.place is None:
        return f"  {'-':>6}  {curve_of([])}  {what}: cannot be tried. {one_line(made.problem or '', WIDTH)}"
    return f"  {made.place:>6.2f}  {curve_of(made.curve)}  {what}{'  (unclear)' if made.is_unclear else ''}"


def describe_key(change: KeyChange) -> list[str]:
    """Return both values of a key."""
    return [f"  {change.key}: {spell(change.good)} -> {spell(change.bad)}"]


def describe_line(change: LineChange) -> list[str]:
    """Return both versions of a line of data."""
    label = f"  line {change.number}"
    return [f"{label}  good  {one_line(change.good, WIDTH)}", f"{'':{len(label)}}  bad   {one_line(change.bad, WIDTH)}"]


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder for data files, where datasets also caches what it reads of them; both are gone afterwards."""
    import datasets

    with tempfile.TemporaryDirectory(prefix="hftune-bisect-") as folder:
        before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, Path(folder) / "cache"
        try:
            yield Path(folder)
        finally:
            datasets.config.HF_DATASETS_CACHE = before
