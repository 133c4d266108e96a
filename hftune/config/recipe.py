"""Loads and validates recipes: defaults <- base <- recipe <- command line. Values are typed; problems are reported together.

OmegaConf reads and type-checks; it stops here. What leaves this module are plain dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import pickle
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from hftune.config.importing import find_beside, import_named, is_own
from hftune.config.keys import is_dotted, key_of, needing, problems_of
from hftune.config.sections import (
    SECTIONS,
    AdapterConfig,
    CheckpointConfig,
    EvalConfig,
    ParallelConfig,
    RunConfig,
    TrackConfig,
    TrainConfig,
)
from hftune.config.shipped_files import recipe_path, resource_dir
from hftune.errors import ConfigError, did_you_mean, format_value, holds, type_problem
from hftune.secrecy import keys_with_secrets
from hftune.task import BatchLossTask, Direction, Task

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast, where PyYAML was built with it


@dataclass
class Source:
    """Where the values of a recipe come from, so that messages can name it and secrets are not written to files."""

    origins: dict[str, str] = field(default_factory=dict)
    """The file that set each key; "" for the command line. Keys with their default are missing."""
    as_written: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """For each key with a text from the environment: what the recipe says, and the value here."""

    def locate(self, problem: str) -> str:
        """Append the files that set the keys in a message; nothing if all were typed on the command line.

        A shipped recipe is named only together with other files: on its own it is valid.
        """
        keys = [key for key in self.origins if re.search(rf"(?<![\w.]){re.escape(key)}=", problem)]
        origins = {self.origins[key] for key in keys}
        if len(origins) == 1:
            (origin,) = origins
            return problem if origin == "" or _is_shipped(origin) else f"{problem} ({origin})"
        listed = "; ".join(f"{key}: {_name_of(self.origins[key])}" for key in keys)
        return f"{problem} ({listed})" if listed else problem


@dataclass(kw_only=True)
class Recipe(RunConfig):
    """Everything that decides the result of a run. Where it runs, processes and nodes, is up to the launcher."""

    task: Task
    """What is learned; ``task.type`` is its class: a bare name in hftune.tasks, or the dotted path of your own."""
    train: TrainConfig = field(default_factory=TrainConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    source: Source = field(default_factory=Source, repr=False, compare=False)
    """Where the values come from. Not part of the recipe: neither compared nor written."""

    def __post_init__(self):
        super().__post_init__()
        if self.task.evaluates == self.eval.is_off:
            self.task.evaluates = not self.eval.is_off

    @classmethod
    def load(cls, source: str | Path, *overrides: str | Mapping[str, Any], trust_code: bool = True) -> Recipe:
        """Read a shipped recipe by name or any by path, then apply overrides in their order.

        Args:
            overrides: ``"section.key=value"``, whose value is read as YAML; or mappings such as ``{"section.key": value}``,
                also nested as in a recipe, whose values are taken as they are.
            trust_code: import the code that the recipe's files name, also from the folders of these files. False: refuse a
                recipe that names code other than hftune's own, or uses environment variables in its task.

        Raises:
            ConfigError: holding every problem found: unknown keys, wrong types, values out of bounds.
        """
        path = recipe_path(source)
        return _build([*_layers(path), _parse(overrides)], path.stem, trust_code)

    @classmethod
    def from_argv(cls, argv: Sequence[str | Mapping[str, Any]], trust_code: bool = True) -> Recipe:
        """Read ``recipe=<name or path> [section.key=value ...]``; overrides and ``trust_code`` as for ``load``.

        Raises:
            ConfigError: as ``load``, and for arguments in any other form.
        """
        words = [word for word in argv if isinstance(word, str)]
        sources = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
        if len(sources) != 1:
            bare = next((word for word in words if "=" not in word), None)
            if bare is not None and (Path(bare) / "recipe.yaml").is_file():
                bare = str(Path(bare) / "recipe.yaml")  # of an output folder
            hint = f" Did you mean recipe={bare}?" if bare is not None and not sources else ""
            raise ConfigError(f"Name one recipe, such as recipe=yelp_demo; {len(sources)} were given.{hint}")
        overrides = [word for word in argv if not (isinstance(word, str) and word.startswith("recipe="))]
        return cls.load(sources[0], *overrides, trust_code=trust_code)

    def validate(self) -> None:
        """Check what can be checked without torch: files that are missing, a metric that the task does not compute.

        Raises:
            ConfigError: holding every problem found.
        """
        self.refuse_secrets()
        self._refuse(*self.task.validate(), *self._metric_problems(), *self._batch_loss_problems(), *self._adapter_problems())

    def validate_metric(self) -> None:
        """Check ``eval.metric`` once the task has its data, on which may depend what it computes.

        Raises:
            ConfigError: the task does not compute it of these data.
        """
        self._refuse(*self._metric_problems())

    def refuse_secrets(self) -> None:
        """Check that what is written to files and sent to trackers holds no password of an address and no token.

        Raises:
            ConfigError: it does, naming the keys.
        """
        self._refuse(
            *(
                f"{key}={shown} holds a password or token, which would stand in files and on dashboards. Put it into an "
                f"environment variable, and write {key}='${{oc.env:NAME}}'."
                for key, shown in keys_with_secrets(self.to_dict())
            )
        )

    def _refuse(self, *problems: str) -> None:
        if problems:
            raise ConfigError([self.source.locate(problem) for problem in problems], self.recipe)

    def _metric_problems(self) -> Iterator[str]:
        metric, given, task = self.eval.metric, self.eval.greater_is_better, type(self.task).__name__
        directions = self.task.metric_directions
        if clash := next((name for name in self.eval.metrics if name in ("loss", *(directions or ()))), None):
            yield f"eval.metrics={clash}: {task} computes {clash} by itself. Leave it out."
        if directions is not None and metric not in (known := ("loss", *directions)) and self.eval.metrics:
            if given is None:
                yield (
                    f"eval.metric={metric}: a metric of eval.metrics does not declare whether greater is better. Set "
                    "eval.greater_is_better to true or false."
                )
        elif directions is not None and metric not in known:
            hint = did_you_mean(metric, known)
            yield f"eval.metric={metric!r} is not computed by {task}. It computes: {', '.join(known)}.{hint}"
        elif (direction := self.declared_direction) is not None and given not in (None, direction == "max"):
            better = "greater" if direction == "max" else "smaller"
            yield (
                f"eval.greater_is_better={format_value(given)} contradicts eval.metric={metric}: {better} values are "
                "better. Leave eval.greater_is_better out, or set it to null."
            )
        elif direction is None and given is None:
            yield (
                f"eval.metric={metric}: {task} does not declare whether greater is better. Set eval.greater_is_better to true "
                f'or false, or give {task} metric_directions = {{"{metric}": "max"}}, or "min".'
            )

    def _batch_loss_problems(self) -> Iterator[str]:
        if not isinstance(self.task, BatchLossTask):
            return
        name = type(self.task).__name__
        if self.train.batch_size == 1:
            yield f"train.batch_size=1: the loss of {name} compares the samples of a step with each other. Raise it."
        if (stages := self.parallel.pipeline_stages) > 1:
            yield (
                f"parallel.pipeline_stages={stages}: the loss of {name} compares the samples of a step with each other, and a "
                "pipeline has its micro-batches one after the other. Leave it at 1; DDP and FSDP can train it."
            )

    def _adapter_problems(self) -> Iterator[str]:
        adapter, origins = self.adapter, self.source.origins
        if adapter.type is None:
            if "adapter.type" not in origins:  # type: null switches off what a base has set
                yield from (
                    f"{key}={format_value(getattr(adapter, key.partition('.')[2]))} needs adapter.type=lora or dora."
                    for key in origins
                    if key.startswith("adapter.")
                )
            return
        if (stages := self.parallel.pipeline_stages) > 1:
            yield (
                f"adapter.type={adapter.type} does not work with parallel.pipeline_stages={stages}. Leave it at 1: DDP and "
                "FSDP train adapters."
            )
        if self.train.freeze:
            yield (
                f"train.freeze={format_value(self.train.freeze)}: adapter.type={adapter.type} freezes all but the adapters and "
                "adapter.train_also. Leave train.freeze out, and choose layers in adapter.targets."
            )
        if adapter.base_dtype == "bf16" and self.train.mixed_precision != "bf16":
            yield (
                f"adapter.base_dtype=bf16 needs train.mixed_precision=bf16, not {self.train.mixed_precision}: what is trained "
                "stays float32, and only there the two may meet. Or set adapter.base_dtype=auto."
            )

        if adapter.export != "merged" and type(self.task).save is Task.save:
            yield (
                f"adapter.export={adapter.export}: {type(self.task).__name__} has no method save, and the default one writes a "
                "whole model. Set adapter.export=merged, or write one that calls model.save_pretrained(directory)."
            )
        if adapter.quantize is not None:
            yield from self._quantize_problems(adapter.quantize)

    def _quantize_problems(self, kind: str) -> Iterator[str]:
        if self.adapter.export != "adapter":
            yield (
                f"adapter.quantize={kind} does not go with adapter.export={self.adapter.export}: adapters merged into 4 bits "
                "would be rounded away. Leave adapter.export at adapter; hftune merge puts them into the weights as they were."
            )
        if getattr(self.task, "model", self) is None:
            yield f"adapter.quantize={kind} quantises weights that are loaded; task.model=null builds new ones. Leave it out."
        if getattr(self.task, "weights", None) is not None:
            yield f"adapter.quantize={kind} does not go with task.weights. Save the model with them, and name it in task.model."

    @property
    def declared_direction(self) -> Direction | None:
        """The task's direction of ``eval.metric``; None if it declares none, as for metrics of ``eval.metrics``."""
        return "min" if self.eval.metric == "loss" else (self.task.metric_directions or {}).get(self.eval.metric)

    @property
    def greater_is_better(self) -> bool:
        """Whether the best model is the one with the greatest ``eval.metric``: as the task declares or the recipe says."""
        return self.declared_direction == "max" if self.declared_direction is not None else bool(self.eval.greater_is_better)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data; loading it again gives an equal recipe.

        A text with an environment variable stays as it is written, such as "${oc.env:WANDB_NAME}": it may be a secret, and
        this goes into files and to trackers.
        """
        plain = dataclasses.asdict(dataclasses.replace(self, source=Source()))
        del plain["source"]
        for key, (written, value) in self.source.as_written.items():
            section, _, name = key.rpartition(".")
            if getattr(getattr(self, section) if section else self, name) == value:  # otherwise it has been replaced since
                (plain[section] if section else plain)[name] = copy.deepcopy(written)
        plain["task"] = {"type": type_name(type(self.task)), **plain["task"]}
        return {
            key: {key_of(name): item for name, item in value.items()} if key in ("task", *SECTIONS) else value
            for key, value in plain.items()
        }

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML; texts from the environment as in ``to_dict``."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))

    def needs_trust(self) -> bool:
        """Return whether ``load`` refuses what ``to_yaml`` returns without ``trust_code``; its trackers are not considered."""
        values = {key: value for key, value in self.to_dict().items() if key != "track"}
        named = [*_code_of_task(self.task), *code_of_sections(self.train, self.eval, TrackConfig())]
        named += _code_of_callbacks(self.callbacks)
        return bool(named) or not is_own(f"{type(self.task).__module__}.") or _task_reads_environment(values)

    def environment_digests(self) -> dict[str, str]:
        """Return a short digest of each value that ``to_dict`` leaves out, to compare processes without disclosing it."""
        return {
            f"{key} (from the environment)": sha256(repr(value).encode()).hexdigest()[:8]
            for key, (_, value) in self.source.as_written.items()
        }


ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr"), "train.lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("train_batch_size", "global_batch_size"), "train.batch_size"),
    "per_device_train_batch_size": "train.micro_batch_size",
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "train.batch_size"),  # of all processes
    **dict.fromkeys(("bf16", "fp16", "precision"), "train.mixed_precision"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "train.betas"),
    **{"adam_epsilon": "train.eps", "warmup_steps": "train.warmup_ratio", "full_determinism": "train.deterministic"},
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip"), "train.clip_norm"),
    **{"early_stopping_patience": "eval.patience", "early_stopping_threshold": "eval.min_improvement"},
    **{"ema": "train.ema_decay", "layerwise_lr_decay": "train.layer_decay", "unfrozen_parameters": "train.freeze"},
    **{"lr_scheduler_type": "train.schedule", "optim": "train.optimizer", "logging_steps": "train.log_every"},
    **{
        **dict.fromkeys(("eval_steps", "eval_strategy"), "eval.every"),
        "per_device_eval_batch_size": "eval.batch_size",
        "metric_for_best_model": "eval.metric",
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": "resume",
        "save_steps": "checkpoint.every",
        "report_to": "track.with",
        "model_name_or_path": "task.model",
    },
}
"""Other toolkits' names for our keys."""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Spell nested keys with dots, as on the command line."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return items


def type_name(type_: type) -> str:
    """Return the ``task.type`` of a class: its bare name if it is in hftune.tasks, else its dotted path."""
    shipped = type_.__module__.startswith("hftune.tasks.")
    return type_.__qualname__ if shipped else f"{type_.__module__}.{type_.__qualname__}"


@dataclass
class _Layer:
    """What one recipe file, or the command line, sets."""

    values: dict[str, Any]
    """As they are nested in YAML; numbers, true and false are ``Written``."""
    path: Path | None = None
    """None: the command line."""
    replaced: list[str] = field(default_factory=list)
    """Keys that are not inherited from the layers below."""

    @property
    def origin(self) -> str:
        return "" if self.path is None else str(self.path)

    def locate(self, problem: str) -> str:
        return problem if self.path is None else f"{problem} ({self.path})"


def _layers(path: Path, above: tuple[Path, ...] = ()) -> list[_Layer]:
    """Read a recipe file and the ``base`` it names, the lowest first."""
    origin = f" ({path})"
    try:
        raw = pickle.loads(_read(path, path.read_text(encoding="utf-8-sig")))
    except Exception as error:  # YAML's errors share no base with OmegaConf's and OSError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a recipe: at its top level it needs keys such as task: and train:.")
    base = _as_typed(raw.pop("base", None), str)
    layer = _Layer(raw, path, _replaced(raw, origin))
    if base is None:
        if layer.replaced:
            raise ConfigError(f"replace={format_value(layer.replaced)} has no effect without a base.{origin}")
        return [layer]
    if not isinstance(base, str):
        raise ConfigError(f"base={format_value(base)} is not the name or the path of a recipe.{origin}")
    beside = path.parent / base
    try:
        below = beside if beside.is_file() else recipe_path(base, key="base")
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from error
    above = (*above, path.resolve())
    if below.resolve() in above:
        raise ConfigError(f"base={base} leads back to {below.resolve()}: a recipe cannot be its own base.{origin}")
    return [*_layers(below, above), layer]


@lru_cache
def _read(path: Path, text: str) -> bytes:
    """Parse a file, whose text is given, once, as sweeps and tests load the same recipes over and over.

    Returns:
        The values, pickled, which copies them ten times as fast as copy.deepcopy.
    """
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return pickle.dumps(_as_written(values, yaml.load(text, _Texts)))


@dataclass(frozen=True)
class Written:
    """A number, true or false, and how it is written: for a key typed as text, 1e3, 1.10 and no are texts."""

    value: float
    text: str

    def __repr__(self) -> str:
        return self.text


class _Texts(_LOADER):  # type: ignore[valid-type, misc]
    """Reads all plain values as texts, also those that YAML would take for numbers."""

    yaml_implicit_resolvers = {"<": _LOADER.yaml_implicit_resolvers["<"]}  # the key <<, which merges mappings


def _as_written(values: Any, texts: Any) -> Any:
    """Return what OmegaConf has read, with ``Written`` for numbers, true and false; ``texts``: what ``_Texts`` has read."""
    if isinstance(values, dict):
        texts = texts or {}  # of an empty file
        keys = map(_as_written, values, texts)
        return dict(zip(keys, map(_as_written, values.values(), texts.values()), strict=True))
    if isinstance(values, list):
        return [*map(_as_written, values, texts)]
    return Written(values, texts) if isinstance(values, (int, float)) and isinstance(texts, str) else values


def _as_typed(value: Any, hint: Any = Any) -> Any:
    """Return a value of a layer as its type wants it: for a text, ``Written`` as it is written, else what YAML reads.

    Raises:
        ValueError: YAML 1.1 reads a number as a different one, 1:30 as 90, 010 as 8; or of a number for a text it is not known
            how it is written.
    """
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if isinstance(value, (list, tuple)):
        inner = next((get_args(kind) for kind in kinds if get_origin(kind) in (list, tuple)), ())
        return [_as_typed(item, inner[0] if inner else Any) for item in value]
    if isinstance(value, Mapping):
        inner = next((get_args(kind) for kind in kinds if get_origin(kind) is dict), (Any, Any))
        return {_as_typed(key, inner[0]): _as_typed(item, inner[1]) for key, item in value.items()}
    number = value.value if isinstance(value, Written) else value
    is_text = str in kinds and type(number) not in kinds
    if not isinstance(value, Written):
        if is_text and isinstance(value, (int, float)):
            raise ValueError("this key takes a text. Quote it.")
        return str(value) if isinstance(value, Path) else value
    if not is_text and not isinstance(number, bool) and _ODD_NUMBER.fullmatch(value.text):
        raise ValueError(
            f"YAML reads {value.text} as the number {number}. Write {number}, or put a text in quotes: '{value.text}'."
        )
    return value.text if is_text else number


def _replaced(raw: dict[str, Any], origin: str) -> list[str]:
    """Remove the key ``replace`` from a layer and return it, or raise ConfigError."""
    keys = _as_typed(raw.pop("replace", None))
    if keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        return keys or []
    raise ConfigError(f"replace={format_value(keys)} is not a list of keys, such as [task.model_config].{origin}")


def _parse(overrides: Sequence[str | Mapping[str, Any]]) -> _Layer:
    values: dict[str, Any] = {}
    for override in overrides:
        for key, value in override.items() if isinstance(override, Mapping) else [_read_word(override)]:
            if not (isinstance(key, str) and _KEY.fullmatch(key)):
                raise ConfigError(f"{key!r} is not a key of a recipe, such as train.lr.")
            if key == "base":
                raise ConfigError("base=... belongs in a recipe file; here, name the recipe itself: recipe=...")
            for name in reversed(key.split(".")):
                value = {name: value}
            _merge(values, value)
    return _Layer(values, None, _replaced(values, ""))


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Put other values over nested ones: mappings are merged, all else is replaced."""
    for key, other in others.items():
        if isinstance(other, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _merge(values[key], other)
        else:
            values[key] = other


def _read_word(word: str) -> tuple[str, Any]:
    """Read ``section.key=value``."""
    key, equals, text = word.partition("=") if isinstance(word, str) else ("", "", "")
    if not (equals and _KEY.fullmatch(key)):
        hint = " Unpack the list: Recipe.load(name, *overrides)." if isinstance(word, (list, tuple)) else ""
        raise ConfigError(f"{word!r} is not of the form section.key=value, such as train.lr=3e-5.{hint}")
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        return key, _as_written(read["value"], yaml.load(text, _Texts))
    except Exception as error:  # as above
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{word} cannot be read: {reason}.") from error


_KEY = re.compile(r"[A-Za-z_][\w.]*")
_ODD_NUMBER = re.compile(r"[-+]?(\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|0[\d_]+)")


def _build(layers: list[_Layer], default_name: str, trust_code: bool = True) -> Recipe:
    """Apply each layer's values to the typed sections one by one, and collect every problem before raising."""
    for place, layer in enumerate(layers):
        for key in layer.replaced:
            for below in layers[:place]:
                _remove(below.values, key)
    schema, source = _Schema.of(_import_task(layers, trust_code)), Source()
    schema.values.top.recipe = default_name
    problems = []
    for layer in layers:
        problems += [layer.locate(problem) for key in layer.replaced if (problem := schema.unknown(key))]
        for key, value in schema.leaves(layer.values):
            if problem := schema.assign(key, value):
                problems.append(layer.locate(problem))
            source.origins[key] = layer.origin
    for chooser in ("schedule", "optimizer"):
        _drop_keys_of_other_choices(chooser, needing(TrainConfig, chooser), schema, source, layers)
    if not trust_code:
        _check_environment(schema, layers)
    sections: dict[str, Any] = {}
    for name in schema.types:
        try:
            sections[name] = OmegaConf.to_object(schema.values[name])
            if name == "task":
                problems += map(source.locate, problems_of(sections[name], name))
        except ConfigError as error:
            problems += map(source.locate, error.problems)
        except MissingMandatoryValue as error:
            problems.append(f"{error.full_key} is missing. It has no default: set {error.full_key}=...")
        except OmegaConfBaseException as error:
            reads_environment = _reads_environment(OmegaConf.to_container(schema.values, resolve=False))
            problems.append(f"{(error.full_key or name).removeprefix('top.')}: {_reason(error, reads_environment)}.")
    if problems:
        raise ConfigError(problems, default_name)
    for key, name in [
        *_code_of_task(sections["task"]),
        *code_of_sections(sections["train"], sections["eval"], sections["track"]),
        *_code_of_callbacks(sections["top"].callbacks),
    ]:
        _check_code(key, name, source.origins.get(key, ""), layers, trust_code)
    source.as_written = dict(_texts_from_environment(schema, sections))
    top = sections.pop("top")
    recipe = Recipe(**vars(top), **sections, source=source)
    recipe.refuse_secrets()
    return recipe


def _reason(error: OmegaConfBaseException, reads_environment: bool) -> str:
    if missing := re.search(r"Environment variable '(.*)' not found", str(error)):
        return f"the environment variable {missing[1]} is not set"
    if reads_environment and isinstance(error, ValidationError):  # OmegaConf would show the value, which may be a secret
        return "the value that it refers to has the wrong type"
    return str(error).splitlines()[0]


def _remove(values: Any, full_key: str) -> None:
    """Remove the values of a key and everything below it from a layer's."""
    *sections, last = full_key.split(".")
    for name in sections:
        values = values.get(name) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(last, None)


def _drop_keys_of_other_choices(
    chooser: str, owners: Mapping[str, Sequence[str]], schema: _Schema, source: Source, layers: list[_Layer]
) -> None:
    """Drop keys such as train.gamma that a lower layer set for its own schedule or optimizer, which a higher one replaces.

    Args:
        chooser: "schedule" or "optimizer".
        owners: the schedules or optimizers that each key is for.
    """
    ranks = {layer.origin: rank for rank, layer in enumerate(layers)}
    chosen = OmegaConf.to_container(schema.values.train, resolve=False)[chooser]
    for name, choices in owners.items():
        origins = [source.origins.get(key) for key in (f"train.{name}", f"train.{chooser}")]
        if None in origins or "${" in str(chosen):
            continue
        if ranks[origins[0]] < ranks[origins[1]] and chosen not in choices:
            schema.values.train[name] = getattr(TrainConfig, name)
            del source.origins[f"train.{name}"]


def _texts_from_environment(schema: _Schema, sections: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the keys whose texts may hold an environment variable, with what is written there and their value.

    If anything comes from the environment, every reference may lead to it. Numbers are not withheld: they are no secrets, and
    a run must not resume silently with different ones.
    """
    if not _reads_environment(OmegaConf.to_container(schema.values, resolve=False)):
        return
    for section in schema.types:
        raws, values = (OmegaConf.to_container(schema.values[section], resolve=resolve) for resolve in (False, True))
        for name, raw in raws.items():
            if (written := _unresolved(raw, values[name])) != values[name]:
                key = name if section == "top" else f"{section}.{name}"
                yield key, (written, copy.deepcopy(getattr(sections[section], name)))


def _unresolved(raw: Any, value: Any) -> Any:
    """Return a value with its texts as they are written, and everything else resolved."""
    if isinstance(raw, dict) and isinstance(value, dict):
        return {key: _unresolved(raw[key], value[key]) for key in raw}
    if isinstance(raw, list) and isinstance(value, list):
        return [_unresolved(*pair) for pair in zip(raw, value, strict=True)]
    return raw if isinstance(value, (str, list, dict)) else value


def _reads_environment(raw: Any) -> bool:
    """Say whether a text calls one of OmegaConf's resolvers, such as ${oc.env:NAME}."""
    return any(re.search(r"\$\{.*:", text, flags=re.DOTALL) for text in _texts(raw))


def _texts(raw: Any) -> Iterator[str]:
    if isinstance(raw, str):
        yield raw
    elif isinstance(raw, (dict, list)):
        for part in raw.values() if isinstance(raw, dict) else raw:
            yield from _texts(part)


TRUST = "Add --trust-code (in Python: trust_code=True) if you trust whoever wrote it."


def _check_environment(schema: _Schema, layers: list[_Layer]) -> None:
    """Refuse a task that uses environment variables, which the address of a file could leak. Raise ConfigError."""
    if _task_reads_environment(OmegaConf.to_container(schema.values, resolve=False)):
        raise ConfigError(f"The task of {layers[-2].path} refers to environment variables, which can be secrets. {TRUST}")


def _task_reads_environment(values: Any) -> bool:
    return _reads_environment(values) and any("${" in text for text in _texts(values["task"]))


def _code_of_task(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the keys of a task whose values name code that is not hftune's, with these values."""
    for name in task.code_fields:
        value = getattr(task, name, None)
        if isinstance(value, str) and not is_own(value) and (name != "dataset" or ":" in value):
            yield f"task.{name}", value
    for entry in getattr(task, "datasets_", None) or ():
        if ":" in (value := str(entry.get("dataset", ""))) and not is_own(value):
            yield "task.datasets", value


def _code_of_callbacks(callbacks: Sequence[Any]) -> list[tuple[str, str]]:
    return [("callbacks", entry["type"] if isinstance(entry, dict) else entry) for entry in callbacks]


def code_of_sections(train: TrainConfig, eval_: EvalConfig, track: TrackConfig) -> list[tuple[str, str]]:
    """Return the keys of these sections whose values name code that is not hftune's or torch's, each with one such value.

    Every name in ``eval.metrics`` is one: modules of ``evaluate`` are scripts, which may even come from the Hub.
    """
    named = [("train.optimizer", train.optimizer), ("train.schedule", train.schedule)]
    named += [("eval.metrics", name) for name in eval_.metrics]
    named += [("track.with", name) for name in track.with_]
    is_torchs = re.compile(r"torch\.optim\.\w+")  # classes that can only be optimizers, see optim.optimizer_class
    return [
        (key, name)
        for key, name in named
        if (key == "eval.metrics" or is_dotted(name))
        and not (is_own(name) or (key == "train.optimizer" and is_torchs.fullmatch(name)))
    ]


def _check_code(key: str, name: str, origin: str, layers: list[_Layer], trust_code: bool) -> None:
    if not trust_code and origin:  # what was typed on the command line is meant
        raise ConfigError(f"{key}={name} ({origin}) is not hftune's own code, and importing it would run it. {TRUST}")
    if trust_code and (is_dotted(name) or key != "eval.metrics"):
        find_beside(key, name, [layer.path.parent for layer in reversed(layers) if layer.path is not None])


def _is_shipped(origin: str) -> bool:
    return Path(origin).parent == resource_dir("recipes")


def _name_of(origin: str) -> str:
    if origin and _is_shipped(origin):
        return f"recipe {Path(origin).stem}"
    return origin or "the command line"


def _task_type(raw: Mapping[str, Any]) -> Any:
    task = raw.get("task")
    return _as_typed(task.get("type")) if isinstance(task, dict) else None


class _Schema:
    """The typed sections of a recipe with one kind of task, and the values set so far."""

    def __init__(self, task_type: type[Task]):
        self.types: dict[str, type] = {"top": RunConfig, "task": task_type, **SECTIONS}
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
        self.mappings = {
            f"{name}.{key}" for name, key in keys if holds(dict, hint := self.hints[name][key]) and get_origin(hint) is not list
        }

    @classmethod
    def of(cls, task_type: type[Task]) -> _Schema:
        """Return a schema with all defaults: a copy, as each is read from the dataclasses but once."""
        defaults, pickled = _defaults(task_type)
        schema = copy.copy(defaults)
        schema.values = copy.deepcopy(schema.values) if pickled is None else pickle.loads(pickled)
        return schema

    def leaves(self, raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted key, value) down to the typed fields, and inside mappings with free keys such as task.data_files."""
        for key, value in raw.items():
            full_key = f"{prefix}{_as_typed(key, str)}"
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
            return f"{full_key}={format_value(value)} must be a section of keys, such as {example}=..."
        mapping, dot, name = key.partition(".")
        is_inside = f"{section}.{mapping}" in self.mappings and dot != ""
        hint = self.hints.get(section, {}).get(field_name := self._field_name(section, mapping if is_inside else key))
        if hint is None:
            return f"{full_key} is not a key of a recipe.{self._nearest(full_key)}"
        try:
            value = _as_typed({name: value}, hint)[name] if is_inside else _as_typed(value, hint)
        except ValueError as error:
            return f"{full_key}={format_value(value)}: {error}"
        if value is False:  # as YAML reads a bare no or off
            value = next((word for word in ("no", "off") if word in get_args(hint)), value)
        default = getattr(self.types[section], field_name, None)
        if value is None and full_key in self.mappings and not holds(type(None), hint):
            value = {}  # removes what a base recipe has set
            self.values[section][field_name] = value
            return None
        if holds(bool, hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
            # OmegaConf would read every number as true or false.
            return f"{full_key}={format_value(value)} {type_problem(hint, value, default)}"
        try:
            if is_inside and self.values[section][mapping] is None:
                self.values[section][mapping] = {}
            OmegaConf.update(self.values[section], field_name, {name: value} if is_inside else value, force_add=is_inside)
        except OmegaConfBaseException:
            return f"{full_key}={format_value(value)} {type_problem(hint, value, default)}"
        return None

    def unknown(self, full_key: str) -> str | None:
        """Say that a key to replace does not exist, or return None."""
        inside = any(full_key.startswith(f"{mapping}.") for mapping in self.mappings)
        if inside or full_key in self.types or full_key in self.known:
            return None
        return f"replace=[{full_key}]: {full_key} is not a key of a recipe.{self._nearest(full_key)}"

    def _field_name(self, section: str, key: str) -> str:
        return f"{key}_" if f"{key}_" in self.hints.get(section, {}) else key

    def _nearest(self, full_key: str) -> str:
        """Suggest a key: first the same name in a different section, then the most similar one, else list all."""
        name = full_key.rpartition(".")[2]
        if name in ELSEWHERE:
            return f" Did you mean {ELSEWHERE[name]!r}?"
        same = [known for known in self.known if known.rpartition(".")[2] == name]
        if "." in full_key:
            same = difflib.get_close_matches(full_key, same, n=1) or same
        if near := same or difflib.get_close_matches(full_key, self.known, n=1, cutoff=0.75):
            return f" Did you mean {near[0]!r}?"
        section = full_key.partition(".")[0]
        siblings = [known.partition(".")[2] for known in self.known if known.startswith(f"{section}.")]
        if siblings:
            return f" Keys of {section}: {', '.join(siblings)}."
        top = ["base", "replace", *(item.name for item in dataclasses.fields(RunConfig))]
        return f" Sections: task, {', '.join(SECTIONS)}. Keys at the top: {', '.join(top)}."


@cache
def _defaults(task_type: type[Task]) -> tuple[_Schema, bytes | None]:
    """Return the schema of a kind of task, and its values pickled; None where a class cannot be, as a function has made it."""
    schema = _Schema(task_type)
    try:
        return schema, pickle.dumps(schema.values)
    except (AttributeError, TypeError, pickle.PicklingError):
        return schema, None


def _structured(type_: type) -> DictConfig:
    if "__dataclass_fields__" not in vars(type_):
        raise ConfigError(f"task.type={type_name(type_)} must be a dataclass: write @dataclass above the class.")
    try:
        return OmegaConf.structured(type_)
    except OmegaConfBaseException as error:
        raise ConfigError(f"task.type={type_name(type_)}: {str(error).splitlines()[0]}") from error


def _import_task(layers: list[_Layer], trust_code: bool) -> type[Task]:
    """Import the task class that the highest layer names; a bare name is one of hftune.tasks."""
    named = [(name, layer.origin) for layer in layers if (name := _task_type(layer.values)) is not None]
    if not named:
        raise ConfigError("task.type is missing. Name a class of hftune.tasks, such as SequenceClassification, or your own.")
    name, origin = named[-1]
    module, _, attribute = (str(name) if "." in str(name) else f"hftune.tasks.{name}").rpartition(".")
    if not is_own(f"{module}."):
        _check_code("task.type", name, origin, layers, trust_code)
    try:
        found = import_named("task.type", name, module, attribute)
    except ConfigError as error:
        if not isinstance(error.__cause__, (ImportError, AttributeError, ValueError, TypeError)):
            raise
        shipped = importlib.import_module("hftune.tasks").__all__
        raise ConfigError(f"{error} Shipped: {', '.join(shipped)}.{did_you_mean(name, shipped)}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.type={name} is not a subclass of hftune.Task.")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"task.type={name} must define: {', '.join(missing)}.")
    return found
