"""``hftune bisect``: find the recipe key, the lines of a data file or the version that made a run bad, by replaying steps.

``bisect_candidates.py`` has the search along a list of versions.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_trust_code, check_at_least_1, check_single, find_modules_here
from hftune.errors import ConfigError, TrainingError, format_value
from hftune.replay.bisection import Found, Judge, Scale, Try, smallest_bad, steps_to_compute
from hftune.replay.changes import DataFiles, KeyChange, LineChange, changed_keys, overrides, spell
from hftune.replay.tolerance import TOLERANCE
from hftune.tracking.console import note, one_line, short

if TYPE_CHECKING:
    from hftune.replay.history import History
    from hftune.replay.trials import Trials

MOST_SHOWN = 10
"""Keys or lines of a result that are printed."""
MOST_ALONE = 5
"""Keys of a result that are also tried each alone."""
WIDTH = 100
"""Columns of the changes of a try, and of a line of data."""
TRAIN_FILE = "task.data_files.train"
OTHER_SAMPLES = ("seed", "train.batch_size")
"""Keys that decide which samples form a step."""
MAYBE_NOISE = 1e-3
"""Below this one, the good end is computed twice: GPUs do not always give the same bits, and that adds up over steps."""
TIMES_NOISE = 3
"""A difference between the ends has to be so many times that of the good end to itself."""
NEAR = 0.01
"""Of the way between the ends: what a run may be off its ledger, as rounding adds up in steps on other numbers of processes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of the good run, then of the bad one")
    parser.add_argument(
        "--good", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the good end, over those of its run"
    )
    parser.add_argument("--bad", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the bad end, over those of its run")
    parser.add_argument(
        "--steps", type=int, metavar="K", help="steps of a try (default: as many as tell the two runs apart, 15 to 100)"
    )
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="STEP", help="first of them (default %(default)s)")
    parser.add_argument("--tries", type=int, default=60, metavar="N", help="most tries (default %(default)s)")
    parser.add_argument(
        "--candidates",
        metavar="A,B,...",
        help="search along a list instead: the first is good, the last is bad, such as 4.55,4.56",
    )
    parser.add_argument(
        "--try", dest="command", metavar="COMMAND", help="shell command that sets up a candidate, {}, before its try"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], dest="keys", metavar="KEY=VALUE", help="keys of a candidate, {}, in its try"
    )
    parser.add_argument("--data", nargs="+", default=[], metavar="PLACE", help="where the data are now, as for hftune replay")
    parser.add_argument("--json", action="store_true", help="print the result alone, as JSON")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Search, and print each try and the result. Exit code 1 if no cause was found."""
    check_at_least_1(options, "steps", "tries")
    if options.first < 1:
        raise ConfigError(f"--from {options.first} must be at least 1.")
    check_single("hftune bisect")
    if options.trust_code:
        find_modules_here()
    say = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
    try:
        result = search(options, say)
    except (TrainingError, KeyboardInterrupt) as error:
        from hftune.run import fail

        return fail(error)
    if options.json:
        from hftune.tracking.jsonl import strict_json

        print(strict_json(result, indent=2, ensure_ascii=False, default=str), flush=True)
    return 0 if result["found"] else 1


def search(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Search, and return the result as plain data."""
    if options.candidates is None:
        return prepare(options, say).run()
    from hftune.commands.bisect_candidates import search_candidates

    return search_candidates(options, say)


@dataclass
class End:
    """One of the two between which is searched."""

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


def prepare(options: argparse.Namespace, say: Callable[[str], None]) -> KeySearch:
    """Check the arguments and find the keys that differ, before anything is computed.

    Raises:
        ConfigError: there is nothing to search among.
    """
    from hftune.replay.history import BOUNDS, Change, History

    if options.command or options.keys:
        raise ConfigError("--try and --set are for versions: name them, --candidates A,B,...")
    if len(options.runs) > 2 or (len(options.runs) == 1 and not options.bad):
        raise ConfigError(
            f"{len(options.runs)} run(s) were given. Name the good and the bad one, or what makes one bad: --bad train.lr=0.1"
        )
    histories = [History.open(folder, trust_code=options.trust_code, data=options.data) for folder in options.runs]
    good, bad = End("good", histories[0], options.good), End("bad", histories[-1], options.bad)
    for end in (good, bad):
        check_first(end.history, options.first)
    recipes = [end.history.recipe_at(options.first, *end.words).to_dict() for end in (good, bad)]
    changes = changed_keys(*recipes)
    if not changes:
        raise ConfigError(
            f"No key that could change a loss differs between {good.label} and {bad.label}. hftune compare says what else "
            "does. Code: git bisect run hftune bisect-step. Libraries, and files of other contents: --candidates."
        )
    first = options.first
    good.history.check_change(Change(overrides=tuple(overrides(changes)), from_step=first))
    bounds = [f"train.{name}={format_value(recipes[0]['train'][name])}" for name in BOUNDS]  # as they were settled
    return KeySearch(good, bad, [*bounds, *good.words], changes, first, count_steps(good, bad, options), options.tries, say)


def check_first(history: History, step: int) -> None:
    """Refuse a first step that a run has not finished, or raise ConfigError."""
    if step not in history.ledger.steps:
        raise ConfigError(f"--from {step}: {history.folder} has steps {min(history.ledger.steps):,} to {history.last:,}.")


def count_steps(good: End, bad: End, options: argparse.Namespace) -> int:
    """Return the number of steps of a try, as the user said or as the ledgers suggest."""
    most = min(end.history.last for end in (good, bad)) - options.first + 1
    if options.steps is not None:
        if options.steps > most:
            raise ConfigError(f"--steps {options.steps}: from step {options.first} on there are {most} steps in the ledger.")
        return options.steps
    known = good.recorded(options.first), bad.recorded(options.first)
    if known[0] is not None and known[1] is not None:
        return steps_to_compute(known[0], known[1])
    return min(most, 15)


@dataclass
class KeySearch:
    """The search among the keys of two recipes; and among the lines of the training data, if their file turns out to be it."""

    good: End
    bad: End
    words: list[str]
    """Overrides of every try."""
    changes: list[KeyChange]
    first: int
    num_steps: int
    most_tries: int
    say: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """Return the result as plain data, after it was printed."""
        from hftune.replay.trials import Trials  # imports torch, which takes seconds
        from hftune.tracking.console import hide_reports

        hide_reports()
        last = self.first + self.num_steps - 1
        count = f"{len(self.changes)} keys differ" if len(self.changes) > 1 else f"One key differs, {self.changes[0].key}"
        self.say(
            f"{count}. A try computes steps {self.first} to {last}: place from good (0) to bad (1), mean loss of each third."
        )
        if chance := [change.key for change in self.changes if change.key in OTHER_SAMPLES]:
            self.say(note(f"{' and '.join(chance)} put other samples into each step, so part of the difference is chance."))
        with Trials(self.good.history, self.first, last) as trials:
            return self._search(trials)

    def _search(self, trials: Trials) -> dict[str, Any]:
        def losses(changes: Sequence[KeyChange]) -> list[float]:
            return trials.losses([*self.words, *overrides(changes)])

        ends = losses([]), losses(self.changes)
        scale = Scale(*ends)
        for end, computed in zip((self.good, self.bad), ends, strict=True):
            self._say_end(end, computed, scale)
        result: dict[str, Any] = {
            "steps": [self.first, trials.last],
            "ends": {name: {"losses": of, "curve": scale.curve(of)} for name, of in zip(("good", "bad"), ends, strict=True)},
            "changed": [asdict(change) for change in self.changes],
            "found": [],
        }
        if scale.difference <= TOLERANCE:
            self.say(self._nothing_to_find())
            return result
        if scale.difference < MAYBE_NOISE and (noise := Scale(scale.good, losses([])).difference) > 0:
            self.say(
                f"Computed again, the good end differs from itself by {noise:.0e}, and the ends by {scale.difference:.0e}."
            )
            if scale.difference < TIMES_NOISE * noise:
                self.say("That may be chance: there is nothing to find in these steps. Compute others: --steps K, --from STEP.")
                return result
        judge = Judge(losses, scale, lambda made: self.say(line_of(made)))
        found = smallest_bad(self.changes, lambda some: judge.look(some).is_bad is True, self.most_tries)
        self._say_found(found, judge)
        result |= {"found": [asdict(change) for change in found.changes], "is_smallest": found.is_smallest}
        result |= {"tries": [asdict(made) for made in judge.tries.values()]}
        if [change.key for change in found.changes] == [TRAIN_FILE]:
            result["lines"] = LineSearch(found.changes[0], self, trials, scale.good).run()
        return result

    def _say_end(self, end: End, losses: Sequence[float], scale: Scale) -> None:
        self.say(f"  {end.name:>6}  {curve_of(scale.curve(losses))}  {end.label}{remark_on(end, losses, self.first, scale)}")

    def _nothing_to_find(self) -> str:
        """Say why the two ends are equal."""
        steps, count = f"steps {self.first} to {self.first + self.num_steps - 1}", self.num_steps
        known = self.good.recorded(self.first), self.bad.recorded(self.first)
        if known[0] and known[1] and Scale(known[0][:count], known[1][:count]).difference > TOLERANCE:
            return (
                f"With all these keys {steps} are as without them, although the runs differed there: the cause is none of the "
                f"keys. See hftune compare {self.good.history.folder} {self.bad.history.folder}."
            )
        return f"The two ends have the same loss in {steps}: there is nothing to find. Compute others: --steps K, --from STEP."

    def _say_found(self, found: Found[KeyChange], judge: Judge) -> None:
        """Try the keys alone, and the others without them, and print what came of it."""
        rest = [change for change in self.changes if change not in found.changes]
        parts = share_of(judge, found, rest, "key")
        alone = {}
        if found.is_smallest and 1 < len(found.changes) <= MOST_ALONE:
            alone = {change.key: f"  ({percent(judge.look([change]))} of the difference alone)" for change in found.changes}
        self.say(heading(found, "key", self.most_tries))
        for change in found.changes[:MOST_SHOWN]:
            self.say(f"  {change.key}: {spell(change.good)} -> {spell(change.bad)}{alone.get(change.key, '')}")
        if (more := len(found.changes) - MOST_SHOWN) > 0:
            self.say(f"  and {more} more")
        if parts:
            self.say(parts)
        if parts and judge.look(rest).is_bad:
            fixed = " ".join(f"{change.key}={spell(change.good)}" for change in found.changes)
            self.say(f"So there is another cause. To find it, leave this one out: add --bad {fixed}")


def heading(found: Found[Any], what: str, most_tries: int) -> str:
    """Introduce a result."""
    count = f"{len(found.changes):,} {what}s"
    if not found.is_smallest:
        return f"{most_tries} tries were made. The cause is among these {count}; --tries N makes more."
    return "Cause:" if len(found.changes) == 1 else f"Cause, {count} that act together:"


def percent(made: Try) -> str:
    """Format the share of the difference that a try makes."""
    return "an unknown share" if made.place is None else f"{made.place:.0%}"


def share_of(judge: Judge, found: Found[Any], rest: Sequence[Any], what: str) -> str:
    """Say how much of the difference a result makes, and how much the other changes do without it; empty if there are none."""
    if not rest or not found.is_smallest:
        return ""
    made, others = judge.look(found.changes), judge.look(rest)
    is_one = len(found.changes) == 1
    other = f"the other {what}" if len(rest) == 1 else f"the other {len(rest):,} {what}s"
    makes = "cannot be tried" if others.place is None else f"make{'s' if len(rest) == 1 else ''} {percent(others)}"
    subject = "It makes" if is_one else "Together they make"
    return f"{subject} {percent(made)} of the difference; {other} {makes} without {'it' if is_one else 'them'}."


def remark_on(end: End, losses: Sequence[float], first: int, scale: Scale) -> str:
    """Say whether an end that was a run is computed as it was then, measured by how far the ends are apart."""
    recorded = end.recorded(first)
    if recorded is None:
        return ""
    recorded = recorded[: len(losses)]
    apart = [abs(now - then) / (abs(then) or 1.0) if now != then else 0.0 for now, then in zip(losses, recorded, strict=True)]
    if max(apart) <= TOLERANCE:
        return ", as in its ledger"
    if Scale(recorded, losses).difference < NEAR * scale.difference:
        return f", as in its ledger to {max(apart):.0e}"
    index = next(index for index, value in enumerate(apart) if not value <= TOLERANCE)
    then, now = short(recorded[index]), short(losses[index])
    why = "Code, libraries, data or hardware are others" if end.name == "good" else "The keys do not explain all of it"
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


class LineSearch:
    """The search among the lines in which two files of training data differ."""

    def __init__(self, change: KeyChange, keys: KeySearch, trials: Trials, good: Sequence[float]):
        self.change, self.keys, self.trials, self.good = change, keys, trials, good

    def run(self) -> dict[str, Any] | None:
        """Return the result as plain data, after it was printed; None if the files cannot be mixed."""
        say = self.keys.say
        try:
            files = DataFiles(*(Path(path).expanduser() for path in (self.change.good, self.change.bad)))
        except (ConfigError, TypeError) as error:  # a list of files, or no file
            say(f"Its lines are not searched: {error}" if isinstance(error, ConfigError) else "Its lines are not searched.")
            return None
        say(f"{len(files.changes):,} lines differ between {self.change.good} and {self.change.bad}.")
        with scratch() as folder:
            judge = self._judge(files, folder)
            found = smallest_bad(files.changes, lambda some: judge.look(some).is_bad is True, self.keys.most_tries)
            rest = [change for change in files.changes if change not in found.changes]
            parts = share_of(judge, found, rest, "line")
        self._say_found(found)
        if parts:
            say(parts)
        return {
            "changed": len(files.changes),
            "found": [asdict(change) for change in found.changes],
            "is_smallest": found.is_smallest,
            "tries": [asdict(made) for made in judge.tries.values()],
        }

    def _judge(self, files: DataFiles, folder: Path) -> Judge:
        def losses(changes: Sequence[LineChange]) -> list[float]:
            path = folder / f"{len(judge.tries)}{files.suffix}"  # another name each time: data sets are cached by it
            files.write(changes, path)
            return self.trials.losses([*self.keys.words, f"{TRAIN_FILE}={format_value(str(path))}"])

        bad = self.trials.losses([*self.keys.words, *overrides([self.change])])
        judge = Judge(losses, Scale(self.good, bad), lambda made: self.keys.say(line_of(made, "lines ")))
        return judge

    def _say_found(self, found: Found[LineChange]) -> None:
        say = self.keys.say
        say(heading(found, "line", self.keys.most_tries))
        for change in found.changes[:MOST_SHOWN]:
            say(f"  line {change.number}  good  {one_line(change.good, WIDTH)}")
            say(f"  {'':>{len(str(change.number)) + 5}}  bad   {one_line(change.bad, WIDTH)}")
        if (more := len(found.changes) - MOST_SHOWN) > 0:
            say(f"  and {more:,} more")


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
