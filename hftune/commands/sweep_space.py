"""What a sweep tries: lists of values with commas between, or ranges, and the trials that are made of them. Runs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError

if TYPE_CHECKING:
    from hftune.config import Recipe

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
SHARED = ("replace", "task.type", "eval.metric", "eval.greater_is_better")
"""Keys that cannot vary, besides those of which each run has its own: trials are compared by one metric."""
MAX_NAME = 100
LOG_FROM = 10
"""Ratio of its ends from which a range is searched by orders of magnitude."""


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included."""

    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_FROM

    @property
    def distribution(self) -> Any:
        """What Optuna draws from."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.is_whole:
            return IntDistribution(int(self.low), int(self.high), log=self.is_log)
        return FloatDistribution(self.low, self.high, log=self.is_log)


@dataclass
class Space:
    """The words of a sweep."""

    recipe: str
    fixed: list[str]
    """Overrides that all trials have."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """Values by key, as they were typed."""
    ranges: dict[str, Range] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [*self.lists, *self.ranges]

    def sort_like(self, keys: Sequence[str]) -> None:
        """Put the keys into this order, if they are the same."""
        if set(keys) == set(self.keys):
            self.lists = {key: self.lists[key] for key in keys if key in self.lists}
            self.ranges = {key: self.ranges[key] for key in keys if key in self.ranges}

    def grid(self) -> list[dict[str, str]]:
        """Return the values of each trial, by key: all combinations of the lists."""
        return [dict(zip(self.lists, values, strict=True)) for values in product(*self.lists.values())]

    def corners(self) -> Iterator[dict[str, str]]:
        """Yield a few trials that have each value of each list, and each end of each range."""
        ends = {key: [spell(part.low), spell(part.high)] for key, part in self.ranges.items()}
        columns = {**self.lists, **ends}
        for index in range(max(map(len, columns.values()))):
            yield {key: values[min(index, len(values) - 1)] for key, values in columns.items()}


def parse(words: Sequence[str]) -> Space:
    """Read ``recipe=NAME key=value key=value,value key=low..high``.

    A comma inside brackets, braces or quotes belongs to a value.

    Raises:
        ConfigError: no recipe is named, or several; a value or a key is named twice; or nothing varies.
    """
    space = Space("", [])
    recipes = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word} is not KEY=VALUE.")
        if key == "recipe":
            recipes.append(text)
            continue
        if key in (*space.keys, *(other.partition("=")[0] for other in space.fixed)):
            raise ConfigError(f"{key} is given twice. List its values with commas: {key}=A,B.")
        values = split(text)
        if found := RANGE.fullmatch(text):
            low, high = (int(end) if re.fullmatch(r"[+-]?\d+", end) else float(end) for end in found.groups())
            if not low < high:
                raise ConfigError(f"{word}: the first end must be below the second.")
            space.ranges[key] = Range(low, high)
        elif len(values) == 1:
            space.fixed.append(word)
        elif len(set(values)) < len(values) or "" in values:
            raise ConfigError(f"{word}: a value is {'missing' if '' in values else 'given twice'}.")
        else:
            space.lists[key] = values
    if len(recipes) != 1 or len(split(recipes[0])) != 1:
        raise ConfigError("Name one recipe, such as recipe=yelp_demo. To compare recipes, sweep each and use hftune report.")
    from hftune.config.reference import resume_rule

    if clash := [key for key in space.keys if key in SHARED or resume_rule(key) == "own"]:
        raise ConfigError(f"{clash[0]} cannot vary in a sweep.")
    if not space.keys:
        raise ConfigError("Nothing varies. List values with commas, such as train.lr=1e-5,3e-5 seed=1,2.")
    space.recipe = recipes[0]
    return space


def split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def spell(value: float) -> str:
    """Write a number as a recipe has it, with at most four digits of a fraction's value."""
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}")) if math.isfinite(value) else str(value)


def trial_name(values: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return a readable name for a folder: "lr_1e-5_seed_1"; a long one ends in a digest instead.

    Args:
        keys: those of the whole sweep. The last parts of their names are enough if these differ.
    """
    lasts = [key.rpartition(".")[2] for key in keys]
    short = len(set(lasts)) == len(lasts)
    words = [f"{key.rpartition('.')[2] if short else key}_{value}" for key, value in values.items()]
    name = re.sub(r"[^\w.+-]+", "-", "_".join(words)).strip("-")
    plain = re.sub(r"[^\w.+-]+", "", "_".join(words))
    is_exact = plain == "_".join(words) and len(name) <= MAX_NAME
    return name if is_exact else f"{name[:MAX_NAME]}-{sha256('_'.join(words).encode()).hexdigest()[:6]}"


@dataclass
class Trial:
    """One training of the sweep."""

    name: str
    values: dict[str, str]
    folder: Path
    number: int | None = None
    """Optuna's."""
    state: str = "waiting"
    """waiting, running, finished, failed or stopped."""
    value: float | None = None
    """Of the objective."""
    step: int | None = None
    seconds: float | None = None
    error: str | None = None
    facts_written: float | None = None
    """When its run.json was written, as far as it has been looked at."""

    def read_result(self) -> bool:
        """Take over the result of a finished run, and return whether there is one."""
        try:
            result = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        best = result.get("best") or {}
        if not isinstance(best.get("value"), (int, float)):
            why = "its eval.metric is not finite" if "value" in best else "it was never evaluated"
            self.state, self.error = "failed", f"{why}, so there is nothing to compare"
            return True
        self.state, self.value, self.step, self.seconds = "finished", best["value"], best.get("step"), result.get("seconds")
        return True


class Grid:
    """Chooses all combinations of the listed values, in order."""

    def __init__(self, space: Space, folder: Path):
        names = [(trial_name(values, space.keys), values) for values in space.grid()]
        self.trials = [Trial(name, values, folder / name) for name, values in names]
        """All of them, finished ones included."""
        self._waiting = [trial for trial in self.trials if not trial.read_result()]

    def next(self) -> Trial | None:
        """Return a trial that is not finished; None if there is none to start now."""
        return self._waiting.pop(0) if self._waiting else None

    def ended(self, trial: Trial) -> None:
        """Take note of a trial that has finished or failed."""


class Search:
    """Lets Optuna choose the values, by its tree-structured Parzen estimator, seeded by the recipe's seed.

    Its journal is in the sweep's folder, so that a search goes on where it was stopped.
    """

    def __init__(self, space: Space, folder: Path, num_trials: int, recipe: Recipe):
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._states = optuna.trial.TrialState
        self._space, self._folder, self._num_trials = space, folder, num_trials
        self._distributions = {
            **{key: optuna.distributions.CategoricalDistribution(values) for key, values in space.lists.items()},
            **{key: part.distribution for key, part in space.ranges.items()},
        }
        storage = JournalStorage(JournalFileBackend(str(folder / "optuna.log")))
        direction = "maximize" if recipe.greater_is_better else "minimize"
        self.study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        begun = self.study.get_trials(deepcopy=False)
        # A sampler that starts again with the same seed would repeat its first draws.
        self.study.sampler = optuna.samplers.TPESampler(seed=(recipe.seed + len(begun)) % 2**32, constant_liar=True)
        self.trials: list[Trial] = []
        self._interrupted: list[Trial] = []
        for known in begun:
            self._take_up(known)

    def _take_up(self, known: Any) -> None:
        is_running = known.state == self._states.RUNNING
        if is_running and known.params.keys() != self._distributions.keys():
            self.study.tell(known.number, state=self._states.FAIL)  # ended before all its values were drawn
            return
        trial = self._trial(known.number, known.params)
        if known.state == self._states.FAIL:
            trial.state = "failed"
        elif trial.read_result() and is_running:  # killed after the training
            self.ended(trial)
        elif is_running:
            self._interrupted.append(trial)

    def next(self) -> Trial | None:
        """Return an interrupted trial, or a new one."""
        if self._interrupted:
            return self._interrupted.pop(0)
        if len(self.trials) >= self._num_trials:
            return None
        asked = self.study.ask(self._distributions)
        return self._trial(asked.number, asked.params)

    def ended(self, trial: Trial) -> None:
        if trial.value is None:
            self.study.tell(trial.number, state=self._states.FAIL)
        else:
            self.study.tell(trial.number, trial.value)

    def _trial(self, number: int, params: Mapping[str, Any]) -> Trial:
        values = {key: value if isinstance(value, str) else spell(value) for key, value in params.items()}
        values = {key: values[key] for key in self._space.keys if key in values}
        name = f"{number:04d}_{trial_name(values, self._space.keys)}"
        self.trials.append(Trial(name, values, self._folder / name, number))
        return self.trials[-1]
