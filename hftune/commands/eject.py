"""``hftune eject``: write a run's training as one plain Python file, with the samples and first weights that it begins with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_trust_code, check_single, local_path, writing
from hftune.errors import ConfigError, format_value

if TYPE_CHECKING:
    from hftune.build import Parts
    from hftune.config import Recipe

TASKS = ("SequenceClassification", "LanguageModeling", "Chats")
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
FACTORS = {
    "constant": "1.0",
    "linear": "1 - (step - NUM_WARMUP) / max(1, NUM_STEPS - NUM_WARMUP)",
    "cosine": "0.5 * (1 + math.cos(math.pi * (step - NUM_WARMUP) / max(1, NUM_STEPS - NUM_WARMUP)))",
}
"""Of the learning rate after the warmup, by ``train.schedule``."""
TEMPLATE = Path(__file__).with_name("eject.py.jinja")
WRITTEN = {
    *("epochs", "max_steps", "batch_size", "micro_batch_size", "micro_batch_tokens", "packing", "head_loss", "parts", "lr"),
    *("optimizer", "betas", "eps", "momentum", "weight_decay", "warmup_ratio", "warmup_steps", "schedule", "min_lr"),
    *("clip_norm", "gradient_checkpointing", "compile", "deterministic", "tf32"),
}
"""The keys of ``train`` that the file knows, or that change no more than rounding; others must have their defaults."""
SIMPLE = ("label_smoothing", "focal_gamma", "class_weights")
"""The same of tasks: these must have their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=local_path, help="output folder of a run, such as outputs/yelp")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="new folder (default: ejected in the run's folder)")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Write train.py, samples.jsonl and model/, and say how to run them."""
    from hftune.config import Recipe

    check_single("hftune eject")
    source, output = options.folder / "recipe.yaml", options.output or options.folder / "ejected"
    if not source.is_file():
        raise ConfigError(f"{options.folder} holds no recipe.yaml. Name the output folder of a run, such as outputs/yelp.")
    if output.exists():
        raise ConfigError(f"{output} exists. Remove it, or name a new folder with --output.")
    recipe = Recipe.load(source, "replace=[track]", trust_code=options.trust_code)
    check(recipe)
    from hftune.build import build
    from hftune.distributed.progress import Progress

    parts = build(recipe, Progress())
    check_parts(recipe, parts)
    with writing(output):
        output.mkdir(parents=True)
        eject(recipe, parts, output)
    print(f"{output}: {len(parts.datasets['train']):,} samples, the first weights, and train.py. python {output / 'train.py'}")
    return 0


def check(recipe: Recipe) -> None:
    """Refuse recipes that the plain loop does not compute, or raise ConfigError naming the keys."""
    from hftune.config.keys import effects, keys_of
    from hftune.config.recipe import type_name

    train, task, wrong = recipe.train, recipe.task, list[str]()
    if (kind := type_name(type(task))) not in TASKS:
        raise ConfigError(f"hftune eject writes {', '.join(TASKS)}, and this run has task.type={kind}.")
    learns = effects("forward backward update lr samples skipped")
    for name, described in keys_of(type(train), "train").items():  # type: ignore[arg-type]
        value = getattr(train, name)
        is_plain = value == described.default or (name, value) == ("mixed_precision", "auto") or name in WRITTEN
        if described.rule.changes & learns and not is_plain:
            wrong.append(f"train.{name}={format_value(value)}")
    wrong += [f"train.optimizer={train.optimizer}"] * (train.optimizer not in OPTIMIZERS)
    wrong += [f"train.schedule={train.schedule}"] * (train.schedule not in FACTORS)
    wrong += [f"adapter.type={recipe.adapter.type}"] * (recipe.adapter.type is not None)
    wrong += [f"task.{name}={format_value(value)}" for name in SIMPLE if (value := getattr(task, name, None))]
    if wrong:
        raise ConfigError(f"hftune eject does not write {', '.join(wrong)}: its loop would be another training.")


def check_parts(recipe: Recipe, parts: Parts) -> None:
    """Refuse what only the data or the model show, or raise ConfigError."""
    if getattr(recipe.task, "kind", "single_label_classification") != "single_label_classification":
        raise ConfigError(f"hftune eject does not write task.problem_type={recipe.task.kind}, only classes.")
    if (
        parts.plan.mixture is not None
        or parts.plan.window is not None
        or not type(parts.model).__module__.startswith("transformers.")
    ):
        raise ConfigError("hftune eject writes one data set, shuffled as a whole, and models of transformers.")


def eject(recipe: Recipe, parts: Parts, output: Path) -> None:
    """Write the three into an empty folder."""
    from jinja2 import Environment

    from hftune.optim.schedules import num_warmup_steps

    task, train = recipe.task, recipe.train
    with (output / "samples.jsonl").open("w", encoding="utf-8") as file:
        for index in range(len(parts.datasets["train"])):
            batch = task.collate([parts.datasets["train"][index]])
            given = {name: value[0].tolist() for name, value in task.inputs(batch).items() if hasattr(value, "tolist")}
            file.write(json.dumps({**given, "labels": task.target(batch)[0].tolist()}) + "\n")
    task.save(parts.model, output / "model")
    settings: dict[str, Any] = {
        "SEED": recipe.seed,
        "NUM_STEPS": parts.num_steps,
        "BATCH_SIZE": train.batch_size,
        "MICRO_BATCH_SIZE": min(8, train.batch_size),
        "LR": train.lr,
        "MIN_LR": train.min_lr,
        "NUM_WARMUP": num_warmup_steps(parts.num_steps, train),
        "WEIGHT_DECAY": train.weight_decay,
        "CLIP_NORM": train.clip_norm,
    }
    options = f"betas={tuple(train.betas)}, eps={train.eps}" if train.optimizer == "adamw" else f"momentum={train.momentum}"
    template = Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)  # it is no HTML
    text = template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        recipe=recipe.recipe,
        auto_class=task.auto_class,
        settings=settings,
        optimizer=OPTIMIZERS[train.optimizer],
        options=options,
        factor=FACTORS[train.schedule],
    )
    (output / "train.py").write_text(text, encoding="utf-8")
