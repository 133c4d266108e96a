"""Loads and validates recipes: defaults <- base <- recipe <- command line. Values are typed; problems are reported together.

What leaves this module are plain dataclasses. OmegaConf follows references from value to value, and stops here.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, get_origin

from hftune.config.addresses import address_problem, copied_here, is_like_address
from hftune.config.importing import find_beside, import_named, is_own
from hftune.config.keys import Key, is_dotted, key_of, keys_of, needing, problems_of
from hftune.config.layers import Layer, Written, merge, read_files, read_overrides, remove
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
from hftune.config.values import WrongType, convert, unsupported
from hftune.errors import ConfigError, did_you_mean, format_value, holds, message_of, type_problem
from hftune.secrecy import keys_with_secrets
from hftune.task import BatchLossTask, Direction, Task


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
        names = {key: self.origins[key] or "the command line" for key in keys}
        names |= {key: f"recipe {Path(name).stem}" for key, name in names.items() if _is_shipped(name)}
        listed = "; ".join(f"{key}: {name}" for key, name in names.items())
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
        if self.task.eval_sets != self.eval.sets:
            vars(self.task)["eval_sets"] = self.eval.sets

    @classmethod
    def load(cls, source: str | Path, *overrides: str | Mapping[str, Any], trust_code: bool = True) -> Recipe:
        """Read a shipped recipe by name or any by path or address, then apply overrides in their order.

        Args:
            overrides: ``"section.key=value"``, whose value is read as YAML; or mappings such as ``{"section.key": value}``,
                also nested as in a recipe, whose values are taken as they are.
            trust_code: import the code that the recipe's files name, also from the folders of these files. False: refuse a
                recipe that names code other than hftune's own, or uses environment variables in its task.

        Raises:
            ConfigError: holding every problem found: unknown keys, wrong types, values out of bounds.
        """
        with copied_here(source, "recipe") as path:
            return _build([*read_files(recipe_path(path)), read_overrides(overrides)], Path(path).stem, trust_code)

    @classmethod
    def of_run(cls, folder: Path, values: dict[str, Any], *overrides: str | Mapping[str, Any], trust_code: bool) -> Recipe:
        """Build a recipe as ``load`` does, of nested values that the folder of a run has recorded."""
        return _build([Layer(values, folder), read_overrides(overrides)], folder.name, trust_code)

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
        problems = [*self.task.validate(), *self._metric_problems(), *self._batch_loss_problems(), *self._adapter_problems()]
        problems += [*self._named_problems("teacher"), *self._named_problems("reference"), *self._teacher_problems()]
        problems += self._training_problems()
        if is_like_address(str(self.output_dir)) and (problem := address_problem(str(self.output_dir))) is not None:
            problems.append(f"output_dir={self.output_dir}: {problem}")
        self._refuse(*problems)

    def validate_metric(self) -> None:
        """Check ``eval.metric`` once the task has its data, on which may depend what it computes, or raise ConfigError."""
        self._refuse(*self._metric_problems())

    def refuse_secrets(self) -> None:
        """Refuse a password of an address, or a token, in what goes into files and to trackers, or raise ConfigError."""
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
        given, task = self.eval.greater_is_better, type(self.task).__name__
        metric, name = self.eval.metric, self.eval.metric_name
        directions = self.task.metric_directions
        if clash := next((name for name in self.eval.metrics if name in ("loss", *(directions or ()))), None):
            yield f"eval.metrics={clash}: {task} computes {clash} by itself. Leave it out."
        if directions is not None and name not in (known := ("loss", *directions)) and self.eval.metrics:
            if given is None:
                yield (
                    f"eval.metric={metric}: a metric of eval.metrics does not declare whether greater is better. Set "
                    "eval.greater_is_better to true or false."
                )
        elif directions is not None and name not in known:
            hint = did_you_mean(metric, [*known, *(f"{each}/{one}" for each in self.eval.sets for one in known)])
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
                f'or false, or give {task} metric_directions = {{"{name}": "max"}}, or "min".'
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

    def _named_problems(self, kind: str) -> Iterator[str]:
        """Yield what is wrong with a second model, ``train.teacher`` or ``train.reference``, and the keys beside it."""
        name, key, origins = getattr(self.train, kind), f"train.{kind}", self.source.origins
        if name is None and key not in origins:  # null switches off what a base has set
            for beside in filter(lambda other: other.startswith(f"{key}_"), origins):
                yield f"{beside}={format_value(getattr(self.train, beside.partition('.')[2]))} needs {key}."
        if name is not None and not name.strip():
            yield f"{key} is empty. Name a model, or set it to null."
        if name is not None and kind == "reference" and not self.task.reference_fields:
            method = f" with task.method={self.task.method}" if hasattr(self.task, "method") else ""
            yield f"{key}={name}: {type(self.task).__name__}{method} compares with no other model. Leave it out."

    def _teacher_problems(self) -> Iterator[str]:
        if (teacher := self.train.teacher) is None:
            return
        kinds, losses = type(self.task).__mro__, {"loss", "num_items"}
        says = next((kind for kind in kinds if {"item_logits", *losses} & vars(kind).keys()), Task)
        if not hasattr(type(self.task), "item_logits"):
            yield f"train.teacher={teacher}: {kinds[0].__name__} cannot learn from a teacher, as it has no item_logits."
        elif "item_logits" not in vars(says):
            yield (
                f"train.teacher={teacher}: {says.__name__} has a loss or num_items of its own, whose items the item_logits "
                "that it inherits do not know. Give it its own."
            )
        for key, processes in (("pipeline_stages", "the stages of a pipeline"), ("context", "processes that share tokens")):
            if (value := getattr(self.parallel, key)) > 1:
                yield f"parallel.{key}={value} does not work with train.teacher, which {processes} cannot follow. Set it to 1."

    def _training_problems(self) -> Iterator[str]:
        if self.train.schedule == "plateau" and self.eval.is_off:
            yield "train.schedule=plateau follows eval.metric, but eval.every=never. Leave one of them out."
        if self.train.schedule == "plateau" and self.eval.interval.seconds is not None:
            yield (
                f"eval.every={self.eval.every}: with train.schedule=plateau the learning rate would depend on how fast this "
                "machine is. Set a number of steps or epochs."
            )
        if self.eval.min_improvement > 0 and self.eval.patience is None and self.train.schedule != "plateau":
            yield (
                f"eval.min_improvement={self.eval.min_improvement} needs eval.patience, the number of evaluations to wait for "
                "it, or train.schedule=plateau."
            )
        for key, processes in (("pipeline_stages", "stages"), ("context", "processes that share the tokens of a text")):
            if self.train.neftune_alpha is not None and (value := getattr(self.parallel, key)) > 1:
                yield (
                    f"parallel.{key}={value} does not work with train.neftune_alpha={self.train.neftune_alpha:g}, whose noise "
                    f"{processes} do not draw. Set it to 1."
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
        if getattr(self.task, "new_tokens", None) and adapter.export != "merged":
            yield (
                f"task.new_tokens does not go with adapter.export={adapter.export}: the base model has no rows for them. Set "
                "adapter.export=merged."
            )
        if adapter.init in ("pissa", "olora"):
            if adapter.export != "merged":
                yield (
                    f"adapter.init={adapter.init} changes the frozen weights, which a folder of adapters does not hold. Set "
                    f"adapter.export=merged, not {adapter.export}."
                )
            if adapter.quantize is not None:
                yield f"adapter.init={adapter.init} does not go with adapter.quantize={adapter.quantize}. Leave one out."
        if (kind := adapter.quantize) is None:
            return
        if adapter.export != "adapter":
            yield (
                f"adapter.quantize={kind} does not go with adapter.export={adapter.export}: adapters merged into 4 bits "
                "would be rounded away. Leave adapter.export at adapter; hftune merge puts them into the weights as they were."
            )
        if getattr(self.task, "model", self) is None:
            yield f"adapter.quantize={kind} quantises weights that are loaded; task.model=null builds new ones. Leave it out."
        if getattr(self.task, "weights", None) is not None:
            yield f"adapter.quantize={kind} does not go with task.weights. Save the model with them, and name it in task.model."

    @property
    def declared_direction(self) -> Direction | None:
        """The task's direction of ``eval.metric``; None if it declares none, as for metrics of ``eval.metrics``."""
        name = self.eval.metric_name
        return "min" if name == "loss" else (self.task.metric_directions or {}).get(name)

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
        from omegaconf import OmegaConf  # which quotes texts such as 1e3, unlike PyYAML

        return OmegaConf.to_yaml(OmegaConf.create(self.to_dict()))

    def needs_trust(self) -> bool:
        """Return whether ``load`` refuses what ``to_yaml`` returns without ``trust_code``; its trackers are not considered."""
        values = {key: value for key, value in self.to_dict().items() if key != "track"}
        named = [*_code_of_task(self.task), *code_of_sections(self.train, self.eval, TrackConfig(), self.callbacks)]
        return (
            bool(named)
            or bool(_queries_of_task(self.task))
            or not is_own(f"{type(self.task).__module__}.")
            or (_reads_environment(values) and _refers(values["task"]))
        )

    def environment_digests(self) -> dict[str, str]:
        """Return a short digest of each value that ``to_dict`` leaves out, to compare processes without disclosing it."""
        return {
            f"{key} (from the environment)": sha256(repr(value).encode()).hexdigest()[:8]
            for key, (_, value) in self.source.as_written.items()
        }


ELSEWHERE = {
    other: ours
    for ours, others in {
        "train.lr": "learning_rate max_lr base_lr",
        "train.epochs": "num_train_epochs num_epochs max_epochs",
        "train.batch_size": "train_batch_size global_batch_size gradient_accumulation_steps accumulate_grad_batches",
        "train.micro_batch_size": "per_device_train_batch_size",
        "train.mixed_precision": "bf16 fp16 precision",
        "train.optimizer": "optim",
        "train.betas": "adam_beta1 adam_beta2",
        "train.eps": "adam_epsilon",
        "train.freeze": "unfrozen_parameters",
        "train.layer_decay": "layerwise_lr_decay",
        "train.schedule": "lr_scheduler_type",
        "train.ema_decay": "ema",
        "train.clip_norm": "max_grad_norm gradient_clip_val grad_clip",
        "train.deterministic": "full_determinism",
        "train.log_every": "logging_steps",
        "eval.every": "eval_steps eval_strategy",
        "eval.batch_size": "per_device_eval_batch_size",
        "eval.metric": "metric_for_best_model",
        "eval.patience": "early_stopping_patience",
        "eval.min_improvement": "early_stopping_threshold",
        "checkpoint.every": "save_steps",
        "checkpoint.keep": "save_total_limit",
        "track.with": "report_to",
        "task.model": "model_name_or_path",
        "resume": "resume_from_checkpoint",
    }.items()
    for other in others.split()
}
"""Our keys by other toolkits' names for them."""


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


def _build(layers: list[Layer], default_name: str, trust_code: bool = True) -> Recipe:
    """Apply each layer's values to the typed sections one by one, and collect every problem before raising."""
    for place, layer in enumerate(layers):
        for name in layer.replaced:
            for below in layers[:place]:
                remove(below.values, name)
    schema, source = _Schema(_import_task(layers, trust_code)), Source()
    schema.values[""]["recipe"] = default_name
    problems = []
    for layer in layers:
        problems += [layer.locate(problem) for name in layer.replaced if (problem := schema.unknown(name))]
        for name, value in schema.leaves(layer.values):
            if problem := schema.assign(name, value):
                problems.append(layer.locate(problem))
            source.origins[name] = layer.origin
    # Drop keys such as train.gamma that a lower layer set for its own schedule or optimizer, which a higher one replaces.
    ranks, train = {layer.origin: rank for rank, layer in enumerate(layers)}, schema.values["train"]
    for chooser in ("schedule", "optimizer"):
        for name, choices in needing(TrainConfig, chooser).items():
            set_by, chosen_by = (source.origins.get(key) for key in (f"train.{name}", f"train.{chooser}"))
            if set_by is None or chosen_by is None or "${" in str(train[chooser]):
                continue
            if ranks[set_by] < ranks[chosen_by] and train[chooser] not in choices:
                train[name] = keys_of(TrainConfig, "train")[name].default
                del source.origins[f"train.{name}"]
    reads_environment = _reads_environment(plain := schema.plain())
    if not trust_code and reads_environment and _refers(plain["task"]):
        raise ConfigError(f"The task of {layers[-2].path} refers to environment variables, which can be secrets. {TRUST}")
    resolved, unresolved = schema.resolve()
    problems += unresolved
    sections: dict[str, Any] = {}
    for name, values in resolved.items():
        try:
            sections[name] = schema.types[name](**values)
            if name == "task":
                problems += map(source.locate, problems_of(sections[name], name))
        except ConfigError as error:
            problems += map(source.locate, error.problems)
    if problems:
        raise ConfigError(problems, default_name)
    for name, code in [
        *_code_of_task(sections["task"]),
        *code_of_sections(sections["train"], sections["eval"], sections["track"], sections[""].callbacks),
    ]:
        _check_code(name, code, source.origins.get(name, ""), layers, trust_code)
    for name in _queries_of_task(sections["task"]):
        if not trust_code and (origin := source.origins.get(name, "")):
            raise ConfigError(f"{name} ({origin}) is run by a database, and may change it. {TRUST}")
    if reads_environment:
        # Then every reference may lead to it. Numbers are not withheld: they are no secrets, and a run must not resume silently
        # with different ones.
        source.as_written = {
            (f"{section}.{name}" if section else name): (written, copy.deepcopy(value))
            for section, raws in schema.values.items()
            for name, raw in raws.items()
            if _refers(raw) and (written := _unresolved(raw, value := getattr(sections[section], name))) != value
        }
    top = sections.pop("")
    recipe = Recipe(**vars(top), **sections, source=source)
    recipe.refuse_secrets()
    return recipe


def _unresolved(raw: Any, value: Any) -> Any:
    """Return a value with its texts as they are written, and everything else resolved."""
    if isinstance(raw, dict) and isinstance(value, dict):
        return {key: _unresolved(raw[key], value[key]) for key in raw}
    if isinstance(raw, list) and isinstance(value, list):
        return [_unresolved(*pair) for pair in zip(raw, value, strict=True)]
    return raw if isinstance(value, (str, list, dict)) else value


def _refers(raw: Any) -> bool:
    """Say whether a text refers to other values."""
    return any("${" in text for text in _texts(raw))


def _reads_environment(raw: Any) -> bool:
    """Say whether a text calls a resolver of omegaconf, such as ${oc.env:NAME}."""
    return any(re.search(r"\$\{.*:", text, flags=re.DOTALL) for text in _texts(raw))


def _texts(raw: Any) -> Iterator[str]:
    if isinstance(raw, str):
        yield raw
    elif isinstance(raw, (dict, list)):
        for part in raw.values() if isinstance(raw, dict) else raw:
            yield from _texts(part)


TRUST = "Add --trust-code (in Python: trust_code=True) if you trust whoever wrote it."


CODE_FIELDS = ("dataset", "network")
"""Fields of tasks that may name code to import: package.module.Class or module:function."""


def _code_of_task(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the keys of a task whose values name code that is not hftune's, with these values."""
    for name in CODE_FIELDS:
        value = getattr(task, name, None)
        if isinstance(value, str) and not is_own(value) and (name != "dataset" or _is_function(value)):
            yield f"task.{name}", value
    for entry in getattr(task, "datasets_", None) or ():
        if _is_function(value := str(entry.get("dataset", ""))) and not is_own(value):
            yield "task.datasets", value


def _is_function(dataset: str) -> bool:
    return ":" in dataset and "://" not in dataset


def _queries_of_task(task: Task) -> list[str]:
    """Return the keys of a task with queries, which a database runs, and which may change it."""
    keys = [f"task.query.{split}" for split in getattr(task, "query", None) or ()]
    return keys + ["task.datasets" for entry in getattr(task, "datasets_", None) or () if "query" in entry]


def code_of_sections(
    train: TrainConfig, eval_: EvalConfig, track: TrackConfig, callbacks: Sequence[Any] = ()
) -> list[tuple[str, str]]:
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
    ] + [("callbacks", entry["type"] if isinstance(entry, dict) else entry) for entry in callbacks]


def _check_code(key: str, name: str, origin: str, layers: list[Layer], trust_code: bool) -> None:
    if not trust_code and origin:  # what was typed on the command line is meant
        raise ConfigError(f"{key}={name} ({origin}) is not hftune's own code, and importing it would run it. {TRUST}")
    if trust_code and (is_dotted(name) or key != "eval.metrics"):
        paths = (layer.path for layer in reversed(layers) if layer.path is not None)
        find_beside(key, name, [path.parent for path in paths if path.is_file()])  # not of a run's folder


def _is_shipped(origin: str) -> bool:
    return Path(origin).parent == resource_dir("recipes")


class _Schema:
    """The keys of a recipe with one kind of task, and the values set so far, by section and field; "" has those at the top."""

    def __init__(self, task_type: type[Task]):
        if "__dataclass_fields__" not in vars(task_type):
            raise ConfigError(f"task.type={type_name(task_type)} must be a dataclass: write @dataclass above the class.")
        self.types: dict[str, type] = {"": RunConfig, "task": task_type, **SECTIONS}
        self.keys = {name: {key.name: key for key in keys_of(type_, name).values()} for name, type_ in self.types.items()}
        if odd := next((hint for key in self.keys["task"].values() if (hint := unsupported(key.type)) is not None), None):
            raise ConfigError(f"task.type={type_name(task_type)}: a key cannot be of the type {getattr(odd, '__name__', odd)}.")
        self.values = {
            section: {
                key.field: key.default if key.default is dataclasses.MISSING else copy.deepcopy(key.default)
                for key in keys.values()
            }
            for section, keys in self.keys.items()
        }
        self.known = ["task.type", *(name for keys in self.keys.values() for name in keys)]
        self.mappings = {
            key.name
            for keys in self.keys.values()
            for key in keys.values()
            if holds(dict, key.type) and get_origin(key.type) is not list
        }

    def leaves(self, raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (dotted key, value) down to the typed fields, and inside mappings with free keys such as task.data_files."""
        for name, value in raw.items():
            try:
                full = f"{prefix}{convert(name, str)}"
            except WrongType:
                raise ConfigError(f"{prefix}{format_value(name)}: a key is a text. Quote it.") from None
            is_section = full in self.types or full in self.mappings
            if isinstance(value, dict) and (is_section or not (prefix or name in self.keys[""])):  # misspelled ones, too
                yield from self.leaves(value, f"{full}.")
            elif not (value is None and full in self.types):  # an empty section sets nothing
                yield full, value

    def assign(self, name: str, value: Any) -> str | None:
        """Set one value; return what is wrong with it, or None."""
        if name == "task.type":  # already imported
            return None
        if name in self.types:
            example = next(known for known in self.known if known.startswith(f"{name}."))
            return f"{name}={format_value(convert(value))} must be a section of keys, such as {example}=..."
        section, _, rest = name.partition(".") if "." in name else ("", "", name)
        outer, dot, inner = rest.partition(".")
        is_inside = dot != "" and f"{section}.{outer}" in self.mappings
        key = self.keys.get(section, {}).get(f"{section}.{outer}" if is_inside else name)
        if key is None:
            return f"{name} is not a key of a recipe.{self._nearest(name)}"
        values = self.values[section]
        try:
            if is_inside:
                merged: dict[str, Any] = values[key.field] if isinstance(values[key.field], dict) else {}  # type: ignore
                merge(merged, convert({inner: value}, key.type))
                values[key.field] = merged
            elif value is None and name in self.mappings and not holds(types.NoneType, key.type):
                values[key.field] = {}  # removes what a base recipe has set
            else:
                values[key.field] = convert(value, key.type)
        except WrongType as error:
            if error.args:
                return f"{name}={format_value(value)}: {error}"
            return f"{name}={format_value(_plain(value))} {type_problem(key.type, _plain(value), key.default)}"
        return None

    def plain(self) -> dict[str, Any]:
        """Return the values as a recipe nests and calls them, references as they are written; missing ones left out."""
        nested: dict[str, Any] = {name: {} for name in self.types if name}
        for section, values in self.values.items():
            given = {key_of(name): value for name, value in values.items() if value is not dataclasses.MISSING}
            (nested[section] if section else nested).update(given)
        return nested

    def resolve(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Follow all references. Return the values of the sections that are whole, and what is wrong with the others."""
        whole, problems = {}, []
        for section, keys in self.keys.items():
            values = dict(self.values[section])
            wrong = []
            for key in keys.values():
                if values[key.field] is dataclasses.MISSING:
                    wrong.append(f"{key.name} is missing. It has no default: set {key.name}=...")
                elif _refers(values[key.field]):
                    try:
                        values[key.field] = self._referred(key)
                    except WrongType as error:
                        wrong.append(f"{key.name}: {error}.")
            problems += wrong
            if not wrong:
                whole[section] = values
        return whole, problems

    def _referred(self, key: Key) -> Any:
        """Return the value of a key that refers to others, or raise WrongType with the reason."""
        from omegaconf import OmegaConf  # takes a while, and few recipes have references
        from omegaconf.errors import OmegaConfBaseException

        try:
            holder = OmegaConf.create(self.plain())
            for part in key.name.split("."):
                holder = holder[part]
            found = OmegaConf.to_container(holder, resolve=True) if OmegaConf.is_config(holder) else holder
        except OmegaConfBaseException as error:
            missing = re.search(r"Environment variable '(.*)' not found", str(error))
            reason = f"the environment variable {missing[1]} is not set" if missing else message_of(error)
            raise WrongType(reason) from error
        try:
            return convert(found, key.type, is_resolved=True)
        except WrongType as error:  # the value may be a secret
            raise WrongType("the value that it refers to has the wrong type") from error

    def unknown(self, name: str) -> str | None:
        """Say that a key to replace does not exist, or return None."""
        inside = any(name.startswith(f"{mapping}.") for mapping in self.mappings)
        if inside or name in self.types or name in self.known:
            return None
        return f"replace=[{name}]: {name} is not a key of a recipe.{self._nearest(name)}"

    def _nearest(self, full: str) -> str:
        """Suggest a key: first the same name in a different section, then the most similar one, else list all."""
        name = full.rpartition(".")[2]
        if name in ELSEWHERE:
            return f" Did you mean {ELSEWHERE[name]!r}?"
        same = [known for known in self.known if known.rpartition(".")[2] == name]
        if "." in full:
            same = difflib.get_close_matches(full, same, n=1) or same
        if near := same or difflib.get_close_matches(full, self.known, n=1, cutoff=0.75):
            return f" Did you mean {near[0]!r}?"
        section = full.partition(".")[0]
        siblings = [known.partition(".")[2] for known in self.known if known.startswith(f"{section}.")]
        if siblings:
            return f" Keys of {section}: {', '.join(siblings)}."
        return f" Sections: task, {', '.join(SECTIONS)}. Keys at the top: base, replace, {', '.join(self.keys[''])}."


def _plain(value: Any) -> Any:
    """Return what a message shows of a value: numbers as YAML reads them."""
    if isinstance(value, Written):
        return value.value
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return {_plain(name): _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _import_task(layers: list[Layer], trust_code: bool) -> type[Task]:
    """Import the task class that the highest layer names; a bare name is one of hftune.tasks."""
    tasks = [(layer.values.get("task"), layer.origin) for layer in layers]
    named = [(_plain(task["type"]), origin) for task, origin in tasks if isinstance(task, dict) and "type" in task]
    named = [(name, origin) for name, origin in named if name is not None]
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
