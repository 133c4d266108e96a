"""Recipes as typed data: defaults <- base <- recipe <- command line. Knows nothing of torch, ranks or machines.

OmegaConf reads and type-checks; it stops here. What leaves this module are plain dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hftune.errors import ConfigError
from hftune.resources import recipe_path
from hftune.task import Task

@dataclass
class Section:
    """A part of a recipe. Bounds are checked on construction, so code and command line meet the same sentence."""

    def __post_init__(self):
        if problems := list(self.problems()):
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the values, one sentence each, with the full key as a user types it."""
        yield from ()


@dataclass
class TrainConfig(Section):
    """The optimization. Sizes are global: none of them depends on how many processes share the work."""

    epochs: int = 3
    """Passes over the training data, at least 1."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even in mid-epoch; the schedule then ends there. null: epochs decide."""
    batch_size: int = 32
    """Samples of one optimizer step, over ALL processes and machines."""
    micro_batch_size: int | None = None
    """Most samples in one forward pass: the memory knob. null: 8 (or no bound, where micro_batch_tokens is set)."""
    micro_batch_tokens: int | None = None
    """Most padded tokens (samples x longest) in one forward pass; evens out the cost of unequal lengths. null: no bound."""
    lr: float = 5e-5
    """Peak learning rate."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw decouples weight decay; adam adds it to the gradient; sgd takes momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moment estimates."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    """On weight matrices and embeddings only; biases and norm parameters (fewer than 2 dimensions) never decay."""
    warmup_ratio: float = 0.0
    """Share of all steps in which the learning rate rises linearly from 0, in [0, 1)."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """After the warmup: down to 0 linearly, down to 0 along half a cosine, or constant."""
    clip_norm: float | None = 1.0
    """Largest norm of the global gradient; larger ones are scaled down to it. null: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Precision of forward and backward; weights and optimizer stay float32. fp16 needs a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute. Needs a transformers model."""
    compile: bool = False
    """torch.compile the model, for changing shapes."""
    num_workers: int = 0
    """Processes that load and collate ahead of training, for each training process."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl; the first and the last step are always logged."""

    def problems(self) -> Iterator[str]:
        for name in ("epochs", "max_steps", "batch_size", "micro_batch_size", "micro_batch_tokens", "log_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"train.{name}={value} must be at least 1."
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size >= 1:
            yield (
                f"train.micro_batch_size={self.micro_batch_size} is larger than train.batch_size={self.batch_size}: "
                "a micro-batch is a part of the global batch. Lower the first or raise the second."
            )
        if not (self.lr > 0 and math.isfinite(self.lr)):
            yield f"train.lr={self.lr} must be above 0."
        for name in ("weight_decay", "momentum", "num_workers", "eps"):
            if not getattr(self, name) >= 0:
                yield f"train.{name}={getattr(self, name)} must not be negative."
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"train.betas={list(self.betas)} must both lie in [0, 1)."
        if not 0 <= self.warmup_ratio < 1:
            yield f"train.warmup_ratio={self.warmup_ratio} must lie in [0, 1): it is a share of all steps."
        if self.clip_norm is not None and not self.clip_norm > 0:
            yield f"train.clip_norm={self.clip_norm} must be above 0; null turns clipping off."

    @property
    def max_rows(self) -> int | None:
        """Most samples in one forward pass, once the default of ``micro_batch_size`` is filled in."""
        if self.micro_batch_size is None and self.micro_batch_tokens is None:
            return min(8, self.batch_size)
        return self.micro_batch_size


@dataclass
class EvalConfig(Section):
    """When to evaluate, and which metric picks the best model. The numbers do not depend on batch_size."""

    every: Union[int, str] = "epoch"  # noqa: UP007 - OmegaConf reads this spelling
    """Steps between two evaluations, or "epoch", or "2 epochs". One always follows the last step."""
    batch_size: int = 32
    """Samples in one forward pass of the evaluation, on each process."""
    metric: str = "loss"
    """The metric that picks the best model: loss, or one that the task computes."""
    greater_is_better: bool = False
    """True for accuracies, False for losses."""

    def problems(self) -> Iterator[str]:
        if self.batch_size < 1:
            yield f"eval.batch_size={self.batch_size} must be at least 1."
        if isinstance(self.every, int) and self.every < 1:
            yield f"eval.every={self.every} must be at least 1."
        if isinstance(self.every, str) and not re.fullmatch(r"epoch|[1-9]\d* epochs?", self.every):
            yield f"eval.every={self.every!r} is neither a number of steps nor 'epoch' nor, say, '2 epochs'."

    @property
    def every_epochs(self) -> int | None:
        """Epochs between two evaluations, where ``every`` is given in epochs."""
        return None if isinstance(self.every, int) else int(self.every.split()[0].replace("epoch", "1"))


@dataclass
class TrackConfig(Section):
    """Dashboards. metrics.jsonl is always written."""

    with_: list[str] = field(default_factory=list)
    """Any of wandb, tensorboard."""
    project: str = "hftune"
    """Project of the dashboards."""
    run_name: str | None = None
    """Name of this run. null: the recipe's name."""

    def problems(self) -> Iterator[str]:
        for name in self.with_:
            if name not in TRACKERS:
                yield f"track.with={name!r} is not one of {', '.join(TRACKERS)}.{_did_you_mean(name, TRACKERS)}"


TRACKERS = ("wandb", "tensorboard")


@dataclass(kw_only=True)
class RunConfig(Section):
    """The keys at the top of a recipe."""

    recipe: str = "unnamed"
    """Name of the recipe; names the output folder."""
    seed: int = 42
    """Of weights, shuffling and dropout, from 0 to 2**32 - 1."""
    output_dir: str | None = None
    """Where everything is written. null: outputs/<recipe>."""

    def __post_init__(self):
        super().__post_init__()
        self.output_dir = self.output_dir or f"outputs/{self.recipe}"

    def problems(self) -> Iterator[str]:
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed} must lie in 0 to {2**32 - 1}."


@dataclass(kw_only=True)
class Recipe(RunConfig):
    """All that decides the outcome of a run. Never says where to run: processes and machines belong to the launcher."""

    task: Task
    """What is learned; ``task.type`` is its class: a name in hftune.tasks, or an import path of your own."""
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    @classmethod
    def load(cls, source: str | Path, *overrides: str) -> Recipe:
        """Read a shipped recipe by name or any by path, then apply ``section.key=value`` overrides.

        Raises:
            ConfigError: holding every problem found: unknown keys, wrong types, values out of bounds.
        """
        path = recipe_path(source)
        return _build({f" ({path})": _read(path), "": _parse(overrides)}, default_name=path.stem)

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
        problems = list(self.task.problems())
        names = self.task.metric_names
        if names is not None and self.eval.metric not in (known := ("loss", *names)):
            problems.append(
                f"eval.metric={self.eval.metric!r} is not computed by {type(self.task).__name__}. "
                f"It computes: {', '.join(known)}.{_did_you_mean(self.eval.metric, known)}"
            )
        if problems:
            raise ConfigError(problems, self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data; loading it again gives an equal recipe."""
        plain = dataclasses.asdict(self)
        plain["task"] = {"type": _type_name(type(self.task)), **plain["task"]}
        return {
            key: {_spell(name): item for name, item in value.items()} if key in SECTIONS else value
            for key, value in plain.items()
        }

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))


SECTIONS: dict[str, type[Section]] = {"train": TrainConfig, "eval": EvalConfig, "track": TrackConfig}


def _read(path: Path) -> DictConfig:
    """Read a recipe file over its ``base``, where it names one."""
    try:
        raw = OmegaConf.load(path)
    except Exception as error:  # YAML's errors share no base with OmegaConf's and OSError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"{path} is not a recipe: its top level must be keys such as task: and train:.")
    base = raw.pop("base", None)
    if base is None:
        return raw
    beside = path.parent / str(base)
    return OmegaConf.merge(_read(beside if beside.is_file() else recipe_path(base)), raw)


def _parse(overrides: tuple[str, ...]) -> DictConfig:
    for word in overrides:
        if not re.match(r"[A-Za-z_][\w.]*=", word):
            raise ConfigError(f"{word!r} is not of the form section.key=value, such as train.lr=3e-5.")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except Exception as error:  # as above
        raise ConfigError(f"{' '.join(overrides)} cannot be read: {error}") from error


def _build(layers: dict[str, DictConfig], default_name: str) -> Recipe:
    """Apply each layer's values to the typed sections one by one, collecting every problem before giving up."""
    schema = _Schema(_import_task([OmegaConf.select(raw, "task.type") for raw in layers.values()]))
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
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or name}: {str(error).splitlines()[0]}.")
    if problems:
        raise ConfigError(problems, default_name)
    top = sections.pop("top")
    return Recipe(**vars(top), **sections)


class _Schema:
    """The typed sections of a recipe with one kind of task, and the values set so far."""

    def __init__(self, task_type: type[Task]):
        self.types = {"top": RunConfig, "task": task_type, **SECTIONS}
        self.values = OmegaConf.create({name: _structured(type_) for name, type_ in self.types.items()})
        keys = [(name, key) for name in self.types for key in self.values[name]]
        hints = {name: get_type_hints(type_) for name, type_ in self.types.items()}
        self.hints = {name: {key: hints[name][key] for key in self.values[name]} for name in self.types}
        self.known = ["task.type", *(_spell(key) if name == "top" else f"{name}.{_spell(key)}" for name, key in keys)]
        self.mappings = {f"{name}.{key}" for name, key in keys if _holds(dict, self.hints[name][key])}

    def leaves(self, raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted key, value) down to the typed fields, and inside free mappings such as task.data_files."""
        for key, value in raw.items():
            full_key = f"{prefix}{key}"
            if isinstance(value, dict) and (full_key in self.types or full_key in self.mappings):
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
            return f"{full_key}={value!r} must be a section of keys, such as {example}=..."
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
        try:
            OmegaConf.update(self.values[section], field_name, value)
        except OmegaConfBaseException:
            return f"{full_key}={value!r} {_complaint(hint, value, default)}"
        return None

    def _field_name(self, section: str, key: str) -> str:
        return f"{key}_" if f"{key}_" in self.hints.get(section, {}) else key

    def _nearest(self, full_key: str) -> str:
        """Suggest the key meant: the same name in another section first, then the most alike, else all there are."""
        name = full_key.rpartition(".")[2]
        same = [known for known in self.known if known.rpartition(".")[2] == name]
        if near := same or difflib.get_close_matches(full_key, self.known, n=1, cutoff=0.75):
            return f" Did you mean {near[0]!r}?"
        section = full_key.partition(".")[0]
        siblings = [known.partition(".")[2] for known in self.known if known.startswith(f"{section}.")]
        if siblings:
            return f" Keys of {section}: {', '.join(siblings)}."
        return f" Sections: task, {', '.join(SECTIONS)}. Keys at the top: recipe, base, seed, output_dir."


def _structured(type_: type) -> DictConfig:
    if "__dataclass_fields__" not in vars(type_):
        raise ConfigError(f"task.type={_type_name(type_)} must be a dataclass: write @dataclass above the class.")
    try:
        return OmegaConf.structured(type_)
    except OmegaConfBaseException as error:
        raise ConfigError(f"task.type={_type_name(type_)}: {str(error).splitlines()[0]}") from error


def _import_task(names: list[Any]) -> type[Task]:
    """Import the class that the last layer which names one names; a bare name means hftune.tasks."""
    name = next((name for name in reversed(names) if name is not None), None)
    if name is None:
        raise ConfigError("task.type is missing. Name a class of hftune.tasks, such as SequenceClassification, or your own.")
    module, _, attribute = (str(name) if "." in str(name) else f"hftune.tasks.{name}").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        shipped = importlib.import_module("hftune.tasks").__all__
        hint = _did_you_mean(name, shipped)
        raise ConfigError(f"task.type={name} cannot be imported: {error}. Shipped: {', '.join(shipped)}.{hint}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.type={name} is not a subclass of hftune.Task.")
    return found


def _type_name(type_: type) -> str:
    shipped = type_.__module__.startswith("hftune.tasks.")
    return type_.__qualname__ if shipped else f"{type_.__module__}.{type_.__qualname__}"


def _complaint(hint: Any, value: Any, default: Any) -> str:
    """Say why ``value`` does not fit the type, and what would."""
    if get_origin(hint) is Literal:
        return f"is not one of {', '.join(get_args(hint))}.{_did_you_mean(value, get_args(hint))}"
    parts = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    kinds = [_KINDS.get(get_origin(part) or part, str(part)) for part in parts]
    example = f", such as {default}" if isinstance(default, (int, float, str, tuple)) else ""
    return f"is not {' or '.join(kinds)}{example}."


_KINDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    list: "a list such as [a,b]",
    tuple: "a list of the right length",
    dict: "a section of keys",
    types.NoneType: "null",
}


def _holds(kind: type, hint: Any) -> bool:
    return any((get_origin(part) or part) is kind for part in (hint, *get_args(hint)))


def _did_you_mean(value: Any, choices: Any) -> str:
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _spell(field_name: str) -> str:
    """Spell a field as recipes do: ``with_`` avoids Python's keyword, the recipe says ``with``."""
    return field_name.removesuffix("_")
