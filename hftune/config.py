"""Recipes, and how one comes about: defaults <- base <- recipe <- command line, each value typed, every problem told at once.

OmegaConf reads and type-checks; it stops here. What leaves this module are plain dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hftune.errors import ConfigError
from hftune.messages import did_you_mean, holds, spell, type_problem
from hftune.resources import recipe_path
from hftune.sections import CheckpointConfig, EvalConfig, ParallelConfig, RunConfig, Section, TrackConfig, TrainConfig, key_of
from hftune.task import Direction, Task


@dataclass(kw_only=True)
class Recipe(RunConfig):
    """All that decides the outcome of a run. Never says where to run: processes and machines belong to the launcher."""

    task: Task
    """What is learned; ``task.type`` is its class: a name in hftune.tasks, or an import path of your own."""
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    @classmethod
    def load(cls, source: str | Path, *overrides: str) -> Recipe:
        """Read a shipped recipe by name or any by path, then apply ``section.key=value`` overrides.

        Raises:
            ConfigError: holding every problem found: unknown keys, wrong types, values out of bounds.
        """
        path = recipe_path(source)
        return _build({**_layers(path), "": _parse(overrides)}, default_name=path.stem)

    @classmethod
    def from_argv(cls, argv: list[str]) -> Recipe:
        """Read ``recipe=<name or path> [section.key=value ...]``.

        Raises:
            ConfigError: as ``load``, and for arguments of another form.
        """
        sources = [word.partition("=")[2] for word in argv if word.startswith("recipe=")]
        if len(sources) != 1:
            raise ConfigError(f"Name one recipe, such as recipe=yelp_demo; {len(sources)} were given.")
        return cls.load(sources[0], *[word for word in argv if not word.startswith("recipe=")])

    def check(self) -> None:
        """Look for what can be found wrong without torch: missing files, a metric that the task does not compute.

        Raises:
            ConfigError: holding every problem found.
        """
        problems = [*self.task.problems(), *self._metric_problems()]
        if problems:
            raise ConfigError(problems, self.recipe)

    def _metric_problems(self) -> Iterator[str]:
        metric, said, task = self.eval.metric, self.eval.greater_is_better, type(self.task).__name__
        directions = self.task.metric_directions
        if directions is not None and metric not in (known := ("loss", *directions)):
            hint = did_you_mean(metric, known)
            yield f"eval.metric={metric!r} is not computed by {task}. It computes: {', '.join(known)}.{hint}"
        elif (direction := self._direction) is not None and said not in (None, direction == "max"):
            better = "greater" if direction == "max" else "smaller"
            yield (
                f"eval.greater_is_better={spell(said)} contradicts eval.metric={metric}, which is better the {better} it is. "
                "Leave eval.greater_is_better out, or set it to null."
            )
        elif direction is None and said is None:
            yield (
                f"eval.metric={metric}: {task} does not say whether more of it is better. Set eval.greater_is_better to true "
                f'or false, or give {task} metric_directions = {{"{metric}": "max"}}, or "min".'
            )

    @property
    def _direction(self) -> Direction | None:
        """What the task says of ``eval.metric``."""
        return "min" if self.eval.metric == "loss" else (self.task.metric_directions or {}).get(self.eval.metric)

    @property
    def greater_is_better(self) -> bool:
        """Whether the best model is the one with the greatest ``eval.metric``: as the task says, else as the recipe does."""
        return self._direction == "max" if self._direction is not None else bool(self.eval.greater_is_better)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data; loading it again gives an equal recipe."""
        plain = dataclasses.asdict(self)
        plain["task"] = {"type": type_name(type(self.task)), **plain["task"]}
        return {
            key: {key_of(name): item for name, item in value.items()} if key in SECTIONS else value
            for key, value in plain.items()
        }

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))


SECTIONS: dict[str, type[Section]] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "parallel": ParallelConfig,
    "track": TrackConfig,
}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Spell nested keys with dots, as on the command line."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return items


def type_name(type_: type) -> str:
    """Return what ``task.type`` says for a class: its bare name for those of hftune.tasks, else its import path."""
    shipped = type_.__module__.startswith("hftune.tasks.")
    return type_.__qualname__ if shipped else f"{type_.__module__}.{type_.__qualname__}"


def _layers(path: Path, above: tuple[Path, ...] = ()) -> dict[str, DictConfig]:
    """Read a recipe file and the ``base`` it names, the lowest first, under the origin that messages give."""
    origin = f" ({path})"
    try:
        raw = OmegaConf.load(path)
    except Exception as error:  # YAML's errors share no base with OmegaConf's and OSError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"{path} is not a recipe: its top level must be keys such as task: and train:.")
    base = raw.pop("base", None)
    if base is None:
        return {origin: raw}
    if not isinstance(base, str):
        raise ConfigError(f"base={spell(base)} is not the name or the path of a recipe.{origin}")
    beside = path.parent / base
    try:
        below = beside if beside.is_file() else recipe_path(base, key="base")
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from error
    above = (*above, path.resolve())
    if below.resolve() in above:
        raise ConfigError(f"base={base} leads back to {below.resolve()}: a recipe cannot build on itself.{origin}")
    return {**_layers(below, above), origin: raw}


def _parse(overrides: Sequence[str]) -> DictConfig:
    for word in overrides:
        if not re.match(r"[A-Za-z_][\w.]*=", word):
            raise ConfigError(f"{word!r} is not of the form section.key=value, such as train.lr=3e-5.")
        try:
            OmegaConf.from_dotlist([word])
        except Exception as error:  # as above
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"{word} cannot be read: {reason}.") from error
        if word.startswith("base="):
            raise ConfigError("base=... belongs in a recipe file; here, name the recipe itself: recipe=...")
    return OmegaConf.from_dotlist(list(overrides))


def _build(layers: dict[str, DictConfig], default_name: str) -> Recipe:
    """Apply each layer's values to the typed sections one by one, collecting every problem before giving up."""
    schema = _Schema(_import_task([_task_type(raw) for raw in layers.values()]))
    schema.values.top.recipe = default_name
    problems = []
    for origin, raw in layers.items():
        for key, value in schema.leaves(OmegaConf.to_container(raw, resolve=False)):
            if problem := schema.assign(key, value):
                problems.append(problem + origin)
    sections: dict[str, Any] = {}
    for name in schema.types:
        try:
            sections[name] = OmegaConf.to_object(schema.values[name])
        except ConfigError as error:
            problems += error.problems
        except MissingMandatoryValue as error:
            problems.append(f"{error.full_key} is missing. It has no default: set {error.full_key}=...")
        except OmegaConfBaseException as error:
            problems.append(f"{(error.full_key or name).removeprefix('top.')}: {str(error).splitlines()[0]}.")
    if problems:
        raise ConfigError(problems, default_name)
    top = sections.pop("top")
    return Recipe(**vars(top), **sections)


def _task_type(raw: DictConfig) -> Any:
    task = raw.get("task")
    return task.get("type") if isinstance(task, DictConfig) else None


class _Schema:
    """The typed sections of a recipe with one kind of task, and the values set so far."""

    def __init__(self, task_type: type[Task]):
        self.types = {"top": RunConfig, "task": task_type, **SECTIONS}
        self.values = OmegaConf.create(
            {  # ${seed} means ${top.seed}
                **{item.name: f"${{top.{item.name}}}" for item in dataclasses.fields(RunConfig)},
                **{name: _structured(type_) for name, type_ in self.types.items()},
            }
        )
        keys = [(name, key) for name in self.types for key in self.values[name]]
        hints = {name: get_type_hints(type_) for name, type_ in self.types.items()}
        self.hints = {name: {key: hints[name][key] for key in self.values[name]} for name in self.types}
        self.known = ["task.type", *(key_of(key) if name == "top" else f"{name}.{key_of(key)}" for name, key in keys)]
        self.mappings = {f"{name}.{key}" for name, key in keys if holds(dict, self.hints[name][key])}

    def leaves(self, raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted key, value) down to the typed fields, and inside free mappings such as task.data_files."""
        for key, value in raw.items():
            full_key = f"{prefix}{key}"
            is_section = full_key in self.types or full_key in self.mappings
            if isinstance(value, dict) and (is_section or not (prefix or key in self.hints["top"])):  # misspelled ones, too
                yield from self.leaves(value, f"{full_key}.")
            elif not (value is None and full_key in self.types):  # an empty section sets nothing
                yield full_key, value

    def assign(self, full_key: str, value: Any) -> str | None:
        """Set one value; return what is wrong with it, or None."""
        section, _, key = full_key.partition(".") if "." in full_key else ("top", "", full_key)
        if full_key == "task.type":  # already imported
            return None
        if full_key in self.types:
            example = next(known for known in self.known if known.startswith(f"{full_key}."))
            return f"{full_key}={spell(value)} must be a section of keys, such as {example}=..."
        mapping = key.partition(".")[0]
        if f"{section}.{mapping}" in self.mappings and "." in key:
            if self.values[section][mapping] is None:
                self.values[section][mapping] = {}
            OmegaConf.update(self.values[section], key, value, force_add=True)
            return None
        hint = self.hints.get(section, {}).get(field_name := self._field_name(section, key))
        if hint is None:
            return f"{full_key} is not a key of a recipe.{self._nearest(full_key)}"
        if value is False and "no" in get_args(hint):
            value = "no"  # YAML reads a bare no as false
        default = getattr(self.types[section], field_name, None)
        if value is None and full_key in self.mappings and not holds(type(None), hint):
            value = {}  # what a base recipe has put there can be taken out again
            self.values[section][field_name] = value
            return None
        if holds(bool, hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
            # OmegaConf would read every number as true or false.
            return f"{full_key}={spell(value)} {type_problem(hint, value, default)}"
        if holds(str, hint) and any(isinstance(part, bool) for part in (value if isinstance(value, list) else [value])):
            return f"{full_key}={spell(value)}: YAML reads a bare yes, no, on or off as true or false. Put texts in quotes."
        try:
            OmegaConf.update(self.values[section], field_name, value)
        except OmegaConfBaseException:
            return f"{full_key}={spell(value)} {type_problem(hint, value, default)}"
        return None

    def _field_name(self, section: str, key: str) -> str:
        return f"{key}_" if f"{key}_" in self.hints.get(section, {}) else key

    def _nearest(self, full_key: str) -> str:
        """Suggest the key meant: the same name in another section first, then the most alike, else all there are."""
        name = full_key.rpartition(".")[2]
        same = [known for known in self.known if known.rpartition(".")[2] == name]
        if "." in full_key:
            same = difflib.get_close_matches(full_key, same, n=1) or same
        if near := same or difflib.get_close_matches(full_key, self.known, n=1, cutoff=0.75):
            return f" Did you mean {near[0]!r}?"
        section = full_key.partition(".")[0]
        siblings = [known.partition(".")[2] for known in self.known if known.startswith(f"{section}.")]
        if siblings:
            return f" Keys of {section}: {', '.join(siblings)}."
        return f" Sections: task, {', '.join(SECTIONS)}. Keys at the top: recipe, base, seed, output_dir, resume."


def _structured(type_: type) -> DictConfig:
    if "__dataclass_fields__" not in vars(type_):
        raise ConfigError(f"task.type={type_name(type_)} must be a dataclass: write @dataclass above the class.")
    try:
        return OmegaConf.structured(type_)
    except OmegaConfBaseException as error:
        raise ConfigError(f"task.type={type_name(type_)}: {str(error).splitlines()[0]}") from error


def _import_task(names: list[Any]) -> type[Task]:
    """Import the class that the last layer which names one names; a bare name means hftune.tasks."""
    name = next((name for name in reversed(names) if name is not None), None)
    if name is None:
        raise ConfigError("task.type is missing. Name a class of hftune.tasks, such as SequenceClassification, or your own.")
    module, _, attribute = (str(name) if "." in str(name) else f"hftune.tasks.{name}").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        shipped = importlib.import_module("hftune.tasks").__all__
        hint = did_you_mean(name, shipped)
        raise ConfigError(f"task.type={name} cannot be imported: {error}. Shipped: {', '.join(shipped)}.{hint}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.type={name} is not a subclass of hftune.Task.")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"task.type={name} must define: {', '.join(missing)}.")
    return found
