"""Show losses and gradients of instruction tuning: TRL's SFTTrainer beside hftune, and the right values.

    python benchmarks/sft_scale.py [--steps 20] [--processes 2] [--accumulation 4]

The same generated chats in the same order with the same trained tokens, from the same weights of a small Llama without dropout:
on one process in one forward a step, and on two in four forwards each. Right is the mean over the trained tokens of the step: a
plain loop computes it in one forward, in float64 (but Llama's norms, which are always in float32). Answers differ in length, so
the mean of the forwards' own means is another value, which the same loop computes for the columns "averaged".

TRL is no dependency of hftune: ``pip install trl``. Each setting runs in processes of its own, those of two over Gloo through
torchrun; hftune trains before TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contest import start
from record import parse_options, print_table, save

if TYPE_CHECKING:  # the process that starts the others needs no torch
    from hftune.config import Recipe

BATCH_SIZE = 16
WORDS = (
    "task.model_config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128, initializer_range: 0.1, "
    "tie_word_embeddings: false}",
    *("task.generation=null", "task.max_eval_samples=4", "eval.metric=loss", "eval.every=never", "checkpoint.every=never"),
    *(f"train.batch_size={BATCH_SIZE}", "train.micro_batch_tokens=null", "train.log_every=1"),
    *("train.weight_decay=0", "train.schedule=constant", "train.warmup_ratio=0"),
)
Curves = dict[str, list[float]]
"""The ``loss`` and the gradient ``norm`` (before clipping) of each step."""


def main() -> None:
    options = parse()
    if find_spec("trl") is None:
        print("benchmarks/sft_scale.py compares hftune with TRL, which is not installed: pip install trl.", file=sys.stderr)
        raise SystemExit(2)
    if options.answer:
        measure(options)
        return
    tables, found = [], {}
    for num_processes, accumulation in ((1, 1), (options.processes, options.accumulation)):
        curves = run_setting(num_processes, accumulation, options.steps)
        setting = f"{num_processes} process{'es' if num_processes > 1 else ''}, accumulation {accumulation}"
        found[setting] = curves
        title = f"{setting}: steps of {BATCH_SIZE} chats, Llama 2 x 32 without dropout, TRL {version('trl')}"
        tables.append(print_table(title, ["step", *columns(curves)], table_rows(curves)))
    save(__file__, options, tables, figures(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of the second setting: 1, 2 or 4 (default %(default)s)")
    parser.add_argument("--accumulation", type=int, default=4, help="forwards a process in it: 1, 2 or 4 (default %(default)s)")
    parser.add_argument("--answer", type=Path, help="measure one setting in this process; write the curves there")
    return parse_options(parser, smoke={"steps": 3, "processes": 1})


def columns(curves: dict[str, Curves]) -> list[str]:
    """Name the columns of numbers, losses first."""
    return [f"{name} {kind}" for kind in ("loss", "norm") for name in curves]


def table_rows(curves: dict[str, Curves]) -> Iterator[list[str]]:
    """Yield the first step, every fifth and the last, and how far each contender was from the right value at most."""
    steps = len(curves["right"]["loss"])
    for step in sorted({1, *range(5, steps, 5), steps}):
        yield [str(step), *[f"{curves[name][kind][step - 1]:.6f}" for kind in ("loss", "norm") for name in curves]]
    yield ["furthest", *[f"{furthest(curves, name, kind, 'right'):.1e}" for kind in ("loss", "norm") for name in curves]]


def furthest(curves: dict[str, Curves], name: str, kind: str, other: str) -> float:
    """Return the largest relative difference of a contender's steps to another's."""
    return max(abs(a - b) / abs(b) for a, b in zip(curves[name][kind], curves[other][kind], strict=True))


def figures(found: dict[str, dict[str, Curves]]) -> dict[str, str]:
    """Say how far SFTTrainer is from hftune in the first setting, and how far both are from the right values in the last."""

    def apart(curves: dict[str, Curves], name: str, other: str) -> str:
        return ", ".join(f"{furthest(curves, name, kind, other):.1e}" for kind in ("loss", "norm"))

    (plain, first), *_, (setting, last) = found.items()
    what = (
        f"{len(first['right']['loss'])} steps of instruction tuning, largest relative difference of a loss, of a gradient norm"
    )
    names = {"hftune": "hftune", "TRL": "SFTTrainer", "averaged": "the mean of the forwards' means"}
    return {
        f"{what}; {plain}": f"SFTTrainer to hftune: {apart(first, 'TRL', 'hftune')}",
        f"{what}, each to the right one; {setting}": "; ".join(f"{names[name]} {apart(last, name, 'right')}" for name in names),
    }


def run_setting(num_processes: int, accumulation: int, steps: int) -> dict[str, Curves]:
    """Start the processes of one setting, wait, and return the curves of each contender."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        script = [__file__, "--steps", str(steps), "--accumulation", str(accumulation), "--answer", str(answer)]
        start(num_processes, script)
        return json.loads(answer.read_text())


def measure(options: argparse.Namespace) -> None:
    """Train each contender on the processes there are; the main one writes the curves to ``options.answer``."""
    from bert_on_reviews import quiet

    from hftune import Recipe
    from hftune.build import load_datasets

    quiet()
    rows = BATCH_SIZE // options.accumulation // int(os.environ.get("WORLD_SIZE", 1))
    words = (f"task.max_train_samples={options.steps * BATCH_SIZE}", f"train.micro_batch_size={rows}")
    recipe = Recipe.load("chats_demo", *WORDS, *words, f"output_dir={options.answer.parent / 'hftune'}")
    batches = planned_batches(recipe, load_datasets(recipe)["train"])
    hftune = train_with_hftune(recipe)
    trl = train_with_trl(recipe, batches, options.accumulation)
    if int(os.environ.get("RANK", 0)) == 0:
        right, averaged = (train_plainly(recipe, batches, size) for size in (BATCH_SIZE, rows))
        answer = {"right": right, "TRL": trl, "hftune": hftune, "averaged": averaged}
        options.answer.write_text(json.dumps(answer))


def planned_batches(recipe: Recipe, data: Any) -> list[list[dict[str, list[int]]]]:
    """Return the samples of each of hftune's steps, as TRL takes them."""
    from hftune.build import plan_batches

    steps = plan_batches(recipe, data).epoch(0)
    return [[shifted(data[int(index)]) for part in step for index in part.samples] for step in steps]


def shifted(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return a sample as TRL takes it, whose models shift the labels themselves."""
    inputs, labels = (sample[name].tolist() for name in ("input_ids", "labels"))
    return {"input_ids": [*inputs, labels[-1]], "labels": [-100, *labels]}  # the last token is a trained one


def train_with_hftune(recipe: Recipe) -> Curves:
    """Return what hftune logs. Collective."""
    from hftune import train

    train(recipe)
    lines = [json.loads(line) for line in Path(recipe.output_dir, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    return {"loss": [line["train/loss"] for line in steps], "norm": [line["train/grad_norm"] for line in steps]}


def trl_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of TRL's trainers for what a recipe says, on CPUs, with the samples in their order."""
    config = recipe.train
    return {
        **{"num_train_epochs": 1, "train_sampling_strategy": "sequential", "max_grad_norm": config.clip_norm},
        **{"learning_rate": config.lr, "lr_scheduler_type": config.schedule, "weight_decay": config.weight_decay},
        **{"adam_beta1": config.betas[0], "adam_beta2": config.betas[1], "adam_epsilon": config.eps},
        **{"bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True},
    }


def train_with_trl(recipe: Recipe, batches: Sequence[list[dict[str, list[int]]]], accumulation: int) -> Curves:
    """Return what SFTTrainer logs. Collective."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from hftune.build import build_model

    config = recipe.train
    settings = SFTConfig(
        f"{recipe.output_dir}-trl",
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        max_length=None,
        logging_steps=1,
        **trl_settings(recipe),
    )
    samples = Dataset.from_list([sample for batch in batches for sample in batch])
    trainer = SFTTrainer(build_model(recipe), settings, train_dataset=samples, processing_class=recipe.task.text_tokenizer)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return {"loss": [line["loss"] for line in steps], "norm": [line["grad_norm"] for line in steps]}


def train_plainly(recipe: Recipe, batches: Sequence[list[dict[str, list[int]]]], rows: int) -> Curves:
    """Train in float64; the loss of a step is the mean of the means over the trained tokens of each ``rows`` samples.

    That is right if ``rows`` are all of the step.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from hftune.build import build_model

    def padded(samples: Sequence[dict[str, list[int]]], name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(sample[name]) for sample in samples], batch_first=True, padding_value=value)

    def mean_loss(samples: Sequence[dict[str, list[int]]]) -> torch.Tensor:
        # Padding is to the right, where causal attention lets no real token see it.
        logits_NTV, labels_NT = model(padded(samples, "input_ids", 0)).logits, padded(samples, "labels", -100)
        return cross_entropy(logits_NTV[:, :-1].flatten(0, 1), labels_NT[:, 1:].flatten())

    config, model = recipe.train, build_model(recipe).double()
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, config.betas, config.eps, config.weight_decay)
    curves: Curves = {"loss": [], "norm": []}
    for batch in batches:
        loss = torch.stack([mean_loss(batch[start : start + rows]) for start in range(0, len(batch), rows)]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["norm"].append(norm.item())
    return curves


if __name__ == "__main__":
    main()
