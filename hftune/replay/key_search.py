"""``hftune bisect``'s search among the keys in which two runs differ, and among the lines of their data, by replaying steps."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.data.files import FORMAT_OF, format_of
from hftune.errors import ConfigError, format_value
from hftune.replay.bisection import MIN_STEPS, Judge, Scale, Try, find_bad, steps_to_compute
from hftune.replay.differences import ROUNDING, effects_of
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
SEPARATED = ("csv", "tsv")
LINE_FORMATS = ("json", "text", *SEPARATED)
"""Formats that have a row a line."""

LossesWith = Callable[[Sequence[Override]], list[float]]
"""Returns the losses of the steps of a try with these overrides."""


# What can be changed one by one


class _Missing:
    def __str__(self) -> str:
        return "missing"


MISSING = _Missing()
"""In the place of the value of a key that a recipe does not have."""


@dataclass(frozen=True)
class KeyChange:
    """A key of the recipe that has another value in the bad run."""

    key: str
    good: Any
    bad: Any
    replaces: bool = False
    """Whether the good value, or a part of it, must not be inherited: the bad one is a mapping that lacks it, or is missing."""

    def __str__(self) -> str:
        return f"{self.key}={spell(self.bad)}"

    @property
    def description(self) -> str:
        return f"  {self.key}: {spell(self.good)} -> {spell(self.bad)}"


@dataclass(frozen=True)
class LineChange:
    """A line of a data file that is different in the bad one."""

    number: int
    """Counted from 1, as editors do."""
    good: str = field(repr=False)
    bad: str = field(repr=False)

    def __str__(self) -> str:
        return str(self.number)

    @property
    def description(self) -> str:
        label = f"  line {self.number}"
        return f"{label}  good  {one_line(self.good, WIDTH)}\n{'':{len(label)}}  bad   {one_line(self.bad, WIDTH)}"


def spell(value: Any) -> str:
    """Return a value as one would type it."""
    return str(value) if isinstance(value, (str, _Missing)) else format_value(value)


def override(changes: Iterable[KeyChange]) -> dict[str, Any]:
    """Return the values that make these changes to the good run's recipe."""
    changes = list(changes)
    replaced = [change.key for change in changes if change.replaces]
    values = {change.key: change.bad for change in changes if change.bad is not MISSING}
    return {"replace": replaced, **values} if replaced else values


def changed_keys(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys that differ between two recipes and can change a loss, in the order of the good one.

    Args:
        good: a recipe as plain nested data, as ``Recipe.to_dict`` returns it.
    """
    if good.get("task", {}).get("type") != bad.get("task", {}).get("type"):  # their keys mean different things
        whole = KeyChange("task", good.get("task", MISSING), bad.get("task", MISSING), replaces=True)
        good, bad = ({key: value for key, value in recipe.items() if key != "task"} for recipe in (good, bad))
        return [whole, *_differing("", good, bad)]
    return [*_differing("", good, bad)]


def _differing(prefix: str, good: Mapping[str, Any], bad: Mapping[str, Any]) -> Iterator[KeyChange]:
    for name in dict.fromkeys([*good, *bad]):
        key, one, other = f"{prefix}{name}", good.get(name, MISSING), bad.get(name, MISSING)
        if one == other or effects_of(key) <= ROUNDING:
            continue
        are_mappings = isinstance(one, Mapping) and isinstance(other, Mapping)
        # Each key of a mapping is a change of its own if none goes, and all can be typed.
        if are_mappings and (not prefix or ({*one} <= {*other} and all(re.fullmatch(r"\w+", str(word)) for word in other))):
            yield from _differing(f"{key}.", one, other)
        else:
            yield KeyChange(key, one, other, replaces=other is MISSING or isinstance(one, Mapping))


class DataFiles:
    """Two data files, of which a third one can be mixed: the good one with some of the bad one's lines.

    Raises:
        ConfigError: they cannot be mixed line by line: each needs a row a line, in one format, and as many of them.
    """

    def __init__(self, good: Path, bad: Path):
        self.suffix = good.suffix
        kind = format_of(good.name)
        for path in (good, bad):
            if format_of(path.name) != kind or kind not in LINE_FORMATS or path.suffix.lower() not in FORMAT_OF:
                raise ConfigError(
                    f"{good} and {bad}: a search over rows needs two files of one format: .jsonl, .csv, .tsv, .txt."
                )
        self._lines, bad_lines = (_lines(path, kind) for path in (good, bad))
        if (count := len(self._lines)) != (other := len(bad_lines)):
            raise ConfigError(
                f"{good} has {count:,} lines and {bad} has {other:,}. Then no step has the samples it had, so no line can be "
                "blamed."
            )
        pairs = enumerate(zip(self._lines, bad_lines, strict=True), start=1)
        self.changes = [LineChange(number, one, other) for number, (one, other) in pairs if one != other]
        if kind in SEPARATED and self.changes and self.changes[0].number == 1:
            raise ConfigError(f"{good} and {bad} have different columns: a search over rows needs the same header.")

    def write(self, changes: Sequence[LineChange], path: Path) -> None:
        """Write the good file with these lines of the bad one."""
        lines = [*self._lines]
        for change in changes:
            lines[change.number - 1] = change.bad
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")


def _lines(path: Path, kind: str) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    lines = text.removesuffix("\n").split("\n")
    spread = next((n for n, line in enumerate(lines, 1) if kind in SEPARATED and line.count('"') % 2), None)
    if spread is not None or (kind == "json" and text.lstrip().startswith("[")):
        where = f"line {spread} has a cell of several lines" if spread else "it is one JSON list"
        raise ConfigError(f"{path} does not have a row a line: {where}. Write it as .jsonl, then search over its rows.")
    return lines


# The search


@dataclass
class End:
    """One of the two runs between which is searched."""

    name: str
    """good or bad."""
    history: History
    words: list[str]

    @property
    def label(self) -> str:
        return " ".join([str(self.history.folder), *self.words])

    def recorded(self, first: int) -> list[float]:
        """Return the losses from a step on that the ledger has of this end; none if it was no run, or one is missing."""
        steps = self.history.ledger.steps
        losses = [steps[step].get("loss") for step in sorted(steps) if step >= first]
        return losses if not self.words and None not in losses else []

    def remark(self, losses: Sequence[float], first: int, scale: Scale) -> str:
        """Say whether an end that was a run is computed as it was then, measured by how far the ends are apart."""
        if not (recorded := self.recorded(first)[: len(losses)]):
            return ""
        apart = [relative(now, then) for now, then in zip(losses, recorded, strict=True)]
        if max(apart) <= TOLERANCE:
            return ", as in its ledger"
        if Scale(recorded, losses).difference < NEAR * scale.difference:
            return f", as in its ledger to {max(apart):.0e}"
        index = next(index for index, value in enumerate(apart) if value > TOLERANCE)
        then, now = short(recorded[index]), short(losses[index])
        why, command = ("The keys do not explain all of it", "compare")
        if self.name == "good":
            why, command = ("Code, libraries, data or hardware differ", "replay")
        return f"; not as it was: step {first + index} had loss {then} and has {now} here. {why}: see hftune {command}."


def search_for(options: argparse.Namespace, say: Callable[[str], None]) -> Search:
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
    count = options.steps or (steps_to_compute(*known) if all(known) else min(most, MIN_STEPS))
    bounds = {f"train.{name}": recipes[0]["train"][name] for name in BOUNDS}  # as training resolved them
    return Search(good, bad, [bounds, *good.words], changes, first, first + count - 1, say)


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
    say: Callable[[str], None]

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

    def search(self, losses_with: LossesWith) -> dict[str, Any]:
        """Compute both ends, search among the keys, and return what was found."""

        def losses(changes: Sequence[KeyChange]) -> list[float]:
            return losses_with([*self.words, override(changes)])

        ends = {"good": losses([]), "bad": losses(self.changes)}
        scale = Scale(*ends.values())
        for end in (self.good, self.bad):
            remark = end.remark(ends[end.name], self.first, scale)
            self.say(f"  {end.name:>6}  {curve_of(scale.curve(ends[end.name]))}  {end.label}{remark}")
        result: dict[str, Any] = {
            "steps": [self.first, self.last],
            "ends": {name: {"losses": of, "curve": scale.curve(of)} for name, of in ends.items()},
            "changed": [*map(asdict, self.changes)],
            "found": [],
        }
        if scale.difference <= TOLERANCE:
            known = [end.recorded(self.first)[: len(ends["good"])] for end in (self.good, self.bad)]
            if all(known) and Scale(*known).difference > TOLERANCE:
                self.say(
                    "The keys make no difference in these steps, in which the runs differed: the cause is none of them. See "
                    f"hftune compare {self.good.history.folder} {self.bad.history.folder}."
                )
            else:
                self.say(f"The two ends have the same loss in these steps: there is nothing to find. {OTHER_STEPS}")
            return result
        if scale.difference < MAYBE_NOISE and (noise := Scale(scale.good, losses([])).difference) > 0:
            self.say(f"The ends differ by {scale.difference:.0e}; the good one, computed again, from itself by {noise:.0e}.")
            if scale.difference < TIMES_NOISE * noise:
                self.say(f"That may be chance: there is nothing to find in these steps. {OTHER_STEPS}")
                return result
        judge = Judge(losses, scale, lambda made: self.say(line_of(made)))
        found, rest = self._find("key", self.changes, judge)
        if rest and judge.look(rest).is_bad:
            fixed = " ".join(f"{change.key}={spell(change.good)}" for change in found)
            self.say(f"So there is another cause. To find it, leave this one out: add --bad {fixed}")
        result |= {"found": [*map(asdict, found)], "tries": [*map(asdict, judge.tries.values())]}
        if [change.key for change in found] == [TRAIN_FILE]:
            result["lines"] = self._search_lines(found[0], losses_with, scale.good)
        return result

    def _search_lines(self, change: KeyChange, losses_with: LossesWith, good: Sequence[float]) -> dict[str, Any] | None:
        """Search among the lines in which two files of training data differ; None if the files cannot be mixed."""
        try:
            if not isinstance(change.good, str) or not isinstance(change.bad, str):
                raise ConfigError("they are in several files.")
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
            found, _ = self._find("line", files.changes, judge)
        return {"changed": len(files.changes), "found": [*map(asdict, found)], "tries": [*map(asdict, judge.tries.values())]}

    def _find(self, noun: str, changes: Sequence[Any], judge: Judge) -> tuple[list[Any], list[Any]]:
        """Search among changes; print what was found, and how much of the difference it makes. Return it, and the others."""
        found = find_bad(changes, lambda some: judge.look(some).is_bad)
        rest = [change for change in changes if change not in found]
        made, without = (judge.look(found), judge.look(rest)) if rest else (None, None)
        self.say("Cause:" if len(found) == 1 else f"Cause, {len(found):,} {noun}s that act together:")
        for change in found[:MAX_SHOWN]:
            self.say(change.description)
        if len(found) > MAX_SHOWN:
            self.say(f"  and {len(found) - MAX_SHOWN:,} more")
        if made is not None and without is not None:
            own = "an unknown share" if made.place is None else f"{made.place:.0%}"
            other = f"the other {noun}" if len(rest) == 1 else f"the other {len(rest):,} {noun}s"
            share = "cannot be tried" if without.place is None else f"make{'s' if len(rest) == 1 else ''} {without.place:.0%}"
            what, them = ("It makes", "it") if len(found) == 1 else ("Together they make", "them")
            self.say(f"{what} {own} of the difference; {other} {share} without {them}.")
        return found, rest


def curve_of(means: Sequence[float]) -> str:
    return f"{'  '.join(f'{short(mean):>5}' for mean in means):<19}"


def line_of(made: Try, prefix: str = "") -> str:
    """Format a try: its place between good and bad, the means of its losses, and the changes."""
    what = one_line(prefix + " ".join(made.changes), WIDTH)
    if made.place is None:
        return f"  {'-':>6}  {curve_of([])}  {what}: cannot be tried. {one_line(made.problem or '', WIDTH)}"
    return f"  {made.place:>6.2f}  {curve_of(made.curve)}  {what}{'  (unclear)' if made.is_unclear else ''}"


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
