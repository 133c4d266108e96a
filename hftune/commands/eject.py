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
OPTIMIZERS, SCHEDULES = ("adamw", "sgd"), ("linear", "cosine", "constant")
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
    wrong += [f"train.schedule={train.schedule}"] * (train.schedule not in SCHEDULES)
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
    text = (
        LOOP.replace("@RECIPE@", recipe.recipe).replace("@AUTO@", task.auto_class).replace("@FACTOR@", FACTORS[train.schedule])
    )
    text = text.replace("@OPTIMIZER@", {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer]).replace("@OPTIONS@", options)
    text = text.replace("@SETTINGS@", "\n".join(f"{name} = {value!r}" for name, value in settings.items()))
    (output / "train.py").write_text(text, encoding="utf-8")


FACTORS = {
    "constant": "1.0",
    "linear": "1 - (step - NUM_WARMUP) / max(1, NUM_STEPS - NUM_WARMUP)",
    "cosine": "0.5 * (1 + math.cos(math.pi * (step - NUM_WARMUP) / max(1, NUM_STEPS - NUM_WARMUP)))",
}
LOOP = '''"""The training of @RECIPE@ in one file, on one process: torch and transformers, no hftune, which has written it.

The losses are those of the run (train/loss_step in metrics.jsonl), to 1e-5 in float32 on CPUs, if dropout is off: hftune draws
dropout by seed and sample, which is left out here. Beside this file are the tokenized samples and the weights that the run
began with.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import @AUTO@

HERE = Path(__file__).parent
@SETTINGS@

with (HERE / "samples.jsonl").open(encoding="utf-8") as lines:
    samples = [json.loads(line) for line in lines]
model = @AUTO@.from_pretrained(HERE / "model", dtype=torch.float32).train()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.@OPTIMIZER@(
    [  # biases and norms have no weight decay
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ],
    lr=LR,
    @OPTIONS@,
)


def order(epoch):
    """Return the samples of an epoch: all of them, shuffled by seed and epoch alone."""
    indices = np.arange(len(samples))
    np.random.RandomState([SEED % 2**32, epoch]).shuffle(indices)
    return indices


def batch_of(step):
    """Return the samples of a step, longest first, so that a micro-batch has little padding."""
    per_epoch = -(-len(samples) // BATCH_SIZE)  # the last batch of an epoch has what is left
    epoch, place = divmod(step, per_epoch)
    chosen = [samples[index] for index in order(epoch)[place * BATCH_SIZE : (place + 1) * BATCH_SIZE]]
    return sorted(chosen, key=lambda sample: -len(sample["input_ids"]))


def collate(chosen):
    """Return tensors of samples, with padding behind shorter ones, which the attention mask and labels of -100 leave out."""
    longest = max(len(sample["input_ids"]) for sample in chosen)
    tensors = {}
    for name in chosen[0]:
        fill = -100 if name == "labels" else 0
        rows = [
            value + [fill] * (longest - len(value)) if isinstance(value, list) else value
            for value in (sample[name] for sample in chosen)
        ]
        tensors[name] = torch.tensor(rows, device=device)
    return tensors


def lr_at(step):
    """Return the learning rate: a linear warmup, then the schedule."""
    if step < NUM_WARMUP:
        return LR * step / NUM_WARMUP
    factor = @FACTOR@
    return MIN_LR + (LR - MIN_LR) * factor


def num_items(labels):
    """Return what the loss of a step is the mean over: samples, or tokens with a label."""
    return int((labels != -100).sum())


for step in range(NUM_STEPS):
    batch = batch_of(step)
    micro_batches = [collate(batch[start : start + MICRO_BATCH_SIZE]) for start in range(0, len(batch), MICRO_BATCH_SIZE)]
    items = sum(num_items(micro_batch["labels"]) for micro_batch in micro_batches)  # of the whole step: no mean of means
    mean = 0.0
    for micro_batch in micro_batches:
        labels = micro_batch.pop("labels")
        logits = model(**micro_batch).logits
        loss = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum", ignore_index=-100) / items
        loss.backward()
        mean += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}/{NUM_STEPS}  loss {mean:.7f}  lr {lr_at(step):.3g}  grad_norm {norm:.5f}", flush=True)

model.save_pretrained(HERE / "trained")
'''
