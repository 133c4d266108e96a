"""What is known of a recipe's key, said once, at its definition. Knows neither the sections nor the tasks that have keys.

A key is a field of a dataclass. ``key`` adds to a field what its type cannot say: bounds, choices, what the key changes in a
training, and whether a resumed run may change it. A plain field, as a task of your own may have, is a key without bounds that
may change anything. The docstring below a field is the key's sentence in the reference, in editors and in the help.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hftune.errors import did_you_mean, format_value, type_problem


class Effect(StrEnum):
    """What a key can change first in a training; the value says it to a person."""

    WEIGHTS = "the first weights"
    SAMPLES = "the samples of a step"
    SKIPPED = "a step that is left out"
    ITEMS = "the number of items"
    LR = "the learning rate"
    FORWARD = "the loss of equal weights"
    BACKWARD = "the gradient of an equal loss"
    UPDATE = "the update"
    ROUNDING = "rounding"
    OUTPUT = "what is measured, kept or exported"


_GROUPS = {
    "nothing": "",
    "compute": "forward backward rounding",
    "model": "weights items forward backward",
    "data": "samples items forward backward update",
    "unknown": "weights samples skipped items forward backward update rounding output",
}
"""Words for several effects. unknown: a task's field cannot touch the schedule."""

Resume = Literal["own", "harmless", "length", "free", "fixed"]
"""Whether a resumed run may change a key. own: each run has its own value. harmless: yes, and the result is the same. length:
yes, and only the number of steps depends on it. free: yes, and from there on the run is a different one. fixed: no."""


def effects(words: str) -> frozenset[Effect]:
    """Return the effects named by words such as "weights samples" or "compute".

    Raises:
        ValueError: a word names none.
    """
    names = " ".join(_GROUPS.get(word, word) for word in words.split()).upper().split()
    if unknown := [name for name in names if name not in Effect.__members__]:
        raise ValueError(f"{unknown[0].lower()!r} is no effect of a key.")
    return frozenset(Effect[name] for name in names)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a field's definition says beside its type and default."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    """Bounds of a number, or of each number of a list: above, at least, below, at most."""
    choices: Sequence[str] = ()
    """Texts that it can be. For a type such as int | str, its only texts."""
    own: str | None = None
    """An example of a dotted path to the user's own code, which is accepted instead of a choice. None: it is not."""
    read: Callable[[Any], Any] | None = None
    """Reads the value; raises ValueError, whose text says what the value is not."""
    needs: tuple[str, Sequence[str]] | None = None
    """A different key of the section, such as "schedule", and the values with which this one has a meaning: with others it must
    have its default."""
    changes: frozenset[Effect] = effects("unknown")
    inside: Mapping[str, frozenset[Effect]] = dataclasses.field(default_factory=dict)
    """What single keys of a mapping change, if not the same."""
    resume: Resume = "free"

    @property
    def bounds(self) -> str:
        """The bounds in words, such as "in [0, 1)" or "at least 1"; empty if there are none."""
        low, high = (
            None if bound is None else f"{bound:g}" if isinstance(bound, float) else str(bound)
            for bound in (self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le)
        )
        if low is not None and high is not None:
            return f"in {'(' if self.ge is None else '['}{low}, {high}{')' if self.le is None else ']'}"
        if low is not None:
            return f"{'above' if self.ge is None else 'at least'} {low}"
        return "" if high is None else f"{'below' if self.le is None else 'at most'} {high}"

    def holds(self, number: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return (
            math.isfinite(number)
            and (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )


def key(
    default: Any = dataclasses.MISSING,
    *,
    changes: str = "unknown",
    inside: Mapping[str, str] | None = None,
    resume: Resume | None = None,
    **rule: Any,
) -> Any:
    """Define a key: ``lr: float = key(5e-5, gt=0, changes="lr")``.

    Args:
        default: its default; for a list or a mapping the function that makes it. Left out: the key must be given.
        changes: what it can change in a training: names of ``Effect``, or "nothing", "compute", "model", "data".
        inside: the same for single keys of a mapping, where it differs.
        resume: whether a resumed run may change it, see ``Resume``. None: harmless where it changes nothing but rounding; fixed
            where it changes the first weights or the samples of a step; otherwise free.
        rule: bounds, choices and what else ``Rule`` has.
    """
    changed = effects(changes)
    derived: Resume = "free"
    if changed <= {Effect.ROUNDING}:
        derived = "harmless"
    elif changed & {Effect.WEIGHTS, Effect.SAMPLES}:
        derived = "fixed"
    exceptions = {name: effects(words) for name, words in (inside or {}).items()}
    given = {"default_factory": default} if callable(default) else {"default": default}
    metadata = {"key": Rule(**rule, changes=changed, inside=exceptions, resume=resume or derived)}
    return dataclasses.field(**given, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    name: str
    """As it is typed: "train.lr"."""
    type: Any
    default: Any
    """dataclasses.MISSING if there is none."""
    rule: Rule
    owner: type
    """The section or task that has it."""
    field: str
    """Its name there, ``with_`` for track.with."""

    @property
    def text(self) -> str:
        """Its docstring, on one line; empty if it has none."""
        return _docstrings(self.owner).get(self.field, "")

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value of the right type, as one sentence that names the key; None if it is in order."""
        rule, said = self.rule, f"{self.name}={format_value(value)}"
        if rule.read is not None:
            try:
                rule.read(value)
            except ValueError as error:
                return f"{said} {error}"
            return None
        items = value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, (int, float)) and not isinstance(item, bool) and get_origin(self.type) is not Literal:
                if not rule.holds(item):
                    finite = "" if math.isfinite(item) else " and finite" if rule.bounds else "finite"
                    return f"{said}{': each' if items is value else ''} must be {rule.bounds}{finite}.{self._null()}"
            elif self.texts and item is not None and item not in self.texts and not (rule.own is not None and is_dotted(item)):
                numbers = [kind for kind in get_args(self.type) if kind in (int, float)]
                named = f"is not one of {', '.join(self.texts)}"
                if numbers:
                    named = f"{type_problem(numbers[0], item).rstrip('.')}, nor {' or '.join(self.texts)}"
                own = "" if rule.own is None else f", nor a dotted path such as {rule.own}"
                hint = did_you_mean(item, self.texts)
                return f"{self.name}={format_value(item)} {named}{own}.{hint}{self._null()}"
        return None

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that it can be, one by one; empty if any text will do."""
        return (*self.rule.choices, *_literals(self.type))

    def _null(self) -> str:
        """Return what null means, as the key's sentence says it: " null: no limit."."""
        _, found, meaning = self.text.rpartition(" null: ")
        return f" null: {meaning}" if found else ""


def _literals(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(text for part in get_args(hint) for text in _literals(part))


def is_dotted(name: Any) -> bool:
    """Say whether a name is a dotted path, which leads to the user's code; a bare name is hftune's."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) and "." in name


def key_of(field_name: str) -> str:
    """Return a field's key in recipes: ``with_`` avoids Python's keyword, the recipe says ``with``."""
    return field_name.removesuffix("_")


@cache
def keys_of(type_: type, section: str = "") -> dict[str, Key]:
    """Return the keys of a section, or of a task, by the names of their fields; inherited ones first.

    Args:
        section: its name in a recipe, such as "train"; empty for the keys at the top.
    """
    hints, found = get_type_hints(type_), {}
    for item in dataclasses.fields(type_):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        rule = item.metadata.get("key", Rule())
        if section == "task" and rule.resume != "harmless":  # what is learned, and from which data
            rule = dataclasses.replace(rule, resume="fixed")
        name = f"{section}.{key_of(item.name)}" if section else key_of(item.name)
        found[item.name] = Key(name, hints[item.name], default, rule, type_, item.name)
    return found


def needing(type_: type, chooser: str) -> dict[str, Sequence[str]]:
    """Return the fields of a section that have a meaning only with some values of a different one, and these values."""
    rules = {name: described.rule.needs for name, described in keys_of(type_).items()}
    return {name: needs[1] for name, needs in rules.items() if needs is not None and needs[0] == chooser}


def problems_of(section: Any, name: str) -> Iterator[str]:
    """Yield what is wrong with the values of a section or a task, one sentence for each, as far as the keys' rules say it."""
    for field_name, described in keys_of(type(section), name).items():  # type: ignore[arg-type]  # mypy takes the class for its instance
        value = getattr(section, field_name)
        if (problem := described.problem(value)) is not None:
            yield problem
        elif described.rule.needs is not None and value != described.default:
            chooser, choices = described.rule.needs
            if (chosen := getattr(section, chooser)) not in choices:
                listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
                yield f"{described.name}={format_value(value)} needs {name}.{chooser}={listed}, not {chosen}."


@cache
def _docstrings(type_: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of those that it inherits from, each on one line."""
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in type_.__mro__ if dataclasses.is_dataclass(kind)]):
        try:
            (class_,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError, SyntaxError):  # of a class that a function or a notebook has made
            continue
        found |= {
            node.target.id: " ".join(str(after.value.value).split())  # type: ignore[union-attr]  # a name
            for node, after in pairwise(class_.body)  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        }
    return found
