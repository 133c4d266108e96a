"""Show losses and gradients of DPO and KTO on 1, 2 and 4 processes, by hftune and by TRL, and their speed beside each other.

    python benchmarks/preferences.py [--steps 20] [--processes 1 2 4] [--rounds 5] [--data FOLDER]

A small Llama learns generated chats first, then which of their answers are better: the same data in the same order in global
batches of 16, 4 rows in a forward pass, without dropout. So TRL accumulates 4 times on 1 process, twice on 2, and not on 4.
Each table and panel shows how far a contender is from its own run on 1 process.

KTO's baseline is a mean over a batch of answers to other prompts. TRL computes it over a forward pass and the processes, hftune
over the global batch.

Speed is that of an epoch on one thread, in one forward a step, the reference's log-probabilities included, which hftune
computes before the first step and TRL in each. FOLDER holds Yelp's reviews, train.jsonl; then an answer is a review, and the
worse answer one with other stars. Without it, the pairs are the generated ones. Both take turns, with another seed each time.

TRL is no dependency of hftune: ``pip install "trl==1.16.*"``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from contest import start, take_turns
from figure import COLOURS, STYLE
from record import HERE, parse_options, print_table, save
from sft_scale import trl_settings

if TYPE_CHECKING:  # the process that starts the others needs no torch
    from matplotlib.axes import Axes

    from hftune import Recipe

BATCH_SIZE, ROWS = 16, 4
METHODS = ("dpo", "kto")
COMMON = (
    *("task.max_eval_samples=8", "eval.every=never", "eval.metric=loss", "checkpoint.every=never", "resume=never"),
    *("train.micro_batch_tokens=null", "train.log_every=1", "train.weight_decay=0", "train.warmup_ratio=0"),
)
LONG = (
    "task.model_config={model_type: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 512, initializer_range: 0.1, "
    "tie_word_embeddings: false}",
    *("replace=[task.model_config]", "task.vocab_size=4096", "task.max_length=512"),
)
Curves = dict[str, list[float]]
"""The ``loss`` and the gradient ``norm`` (before clipping) of each step."""


def main() -> None:
    options = parse()
    if find_spec("trl") is None:
        print(
            'benchmarks/preferences.py compares hftune with TRL, which is not installed: pip install "trl==1.16.*".',
            file=sys.stderr,
        )
        raise SystemExit(2)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if options.answer:
        train_with_trl(recipe_of(options.method, options.steps, options.model, options.answer.parent), options.answer)
        return
    tables, measured, curves = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        if options.processes:
            start(
                1,
                [
                    "-m",
                    "hftune.run",
                    "recipe=chats_demo",
                    f"train.max_steps={options.chat_steps}",
                    f"output_dir={folder}/chats",
                ],
            )
            options.model = Path(folder, "chats", "model")
        for method in METHODS if options.processes else ():
            curves[method] = found = {
                name: {count: run(count, method, options) for count in options.processes}
                for name, run in (("hftune", run_hftune), ("TRL", run_trl))
            }
            title = f"{method}: {options.steps} steps of {BATCH_SIZE}, TRL {version('trl')}"
            header = ("", "processes", "first loss", "last loss", "loss furthest from 1", "norm furthest from 1")
            tables.append(
                print_table(title, header, [row(name, count, runs) for name, runs in found.items() for count in runs])
            )
            counts = ", ".join(map(str, options.processes))
            what = f"{method}, {options.steps} steps on {counts} processes: largest relative difference"
            furthest = {name: [worst(runs, kind) for kind in ("loss", "norm")] for name, runs in found.items()}
            measured[f"{what} of a loss, of a gradient norm"] = "; ".join(
                f"{name} {', '.join(f'{value:.1e}' for value in values)}" for name, values in furthest.items()
            )
    if curves:
        draw(curves, options.figure)
        print(f"\nDrawn: {os.path.relpath(options.figure)}")
    if options.rounds:
        table, speeds = compare_speed(options)
        tables, measured = [*tables, table], {**measured, **speeds}
    save(__file__, options, tables, measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[1, 2, 4], help="numbers of them, 1 first; none: speed alone"
    )
    parser.add_argument("--chat-steps", type=int, default=60, help="steps of the chats before (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed (default %(default)s); 0: no speed")
    parser.add_argument("--pairs", type=int, default=320, help="of a round (default %(default)s)")
    parser.add_argument("--data", type=Path, help="folder of Yelp's reviews; default: generated pairs")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs" / "assets" / "preferences.svg")
    parser.add_argument("--answer", type=Path, help="train with TRL in this process; write the curves there")
    parser.add_argument("--method", choices=METHODS, help="of --answer")
    parser.add_argument("--model", type=Path, help="of --answer: the model to begin with")
    smoke = {"steps": 3, "processes": [1, 2], "chat_steps": 2, "rounds": 1, "pairs": 32}
    return parse_options(parser, {**smoke, "figure": Path(tempfile.gettempdir()) / "preferences.svg"})


def recipe_of(method: str, steps: int, model: Path, folder: Path) -> Recipe:
    """Return the recipe that both train."""
    from hftune import Recipe

    return Recipe.load(f"{method}_demo", *words_of(steps, model), f"output_dir={folder}/{method}")


def words_of(steps: int, model: Path) -> list[str]:
    sizes = [f"train.batch_size={BATCH_SIZE}", f"train.micro_batch_size={ROWS}", f"task.max_train_samples={steps * BATCH_SIZE}"]
    return [*COMMON, *sizes, f"task.model={model}", "task.model_config={}", "replace=[task.model_config]"]


def run_hftune(processes: int, method: str, options: argparse.Namespace) -> Curves:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"recipe={method}_demo", *words_of(options.steps, options.model), f"output_dir={folder}/run"]
        start(processes, ["-m", "hftune.run", *words])
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "train/loss" in line]
        return {"loss": [line["train/loss"] for line in steps], "norm": [line["train/grad_norm"] for line in steps]}


def run_trl(processes: int, method: str, options: argparse.Namespace) -> Curves:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = ["--steps", str(options.steps), "--method", method, "--model", str(options.model)]
        start(processes, [__file__, *words, "--answer", str(answer)])
        return json.loads(answer.read_text())


def train_with_trl(recipe: Recipe, answer: Path) -> None:
    """Train on the processes there are; the main one writes the curves."""
    from bert_on_reviews import quiet

    quiet()
    accumulation = BATCH_SIZE // ROWS // int(os.environ.get("WORLD_SIZE", 1))
    trainer = trl_trainer(recipe, per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulation, logging_steps=1)
    trainer.train()
    if trainer.is_world_process_zero():
        steps = [line for line in trainer.state.log_history if "loss" in line]
        answer.write_text(json.dumps({"loss": [line["loss"] for line in steps], "norm": [line["grad_norm"] for line in steps]}))


def trl_trainer(recipe: Recipe, **settings: Any) -> Any:
    """Return TRL's trainer for the recipe, which reads its samples in the order of its plan, as texts."""
    from copy import deepcopy

    import trl
    from datasets import Dataset

    from hftune.build import build_model, load_datasets, plan_batches

    task = recipe.task
    samples, tokenizer = load_datasets(recipe)["train"], task.text_tokenizer
    order = [int(index) for step in plan_batches(recipe, samples).epoch(0) for part in step for index in part.samples]
    sides = {"dpo": ("chosen", "rejected"), "kto": ("completion",)}[method := "kto" if "kto" in recipe.recipe else "dpo"]

    def texts(sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return prompt and answers as TRL takes them, which adds the token that ends an answer."""
        starts = {side: next(place for place, label in enumerate(sample[f"{side}_labels"]) if label >= 0) for side in sides}
        answers = {side: tokenizer.decode(sample[f"{side}_labels"][start:-1]) for side, start in starts.items()}
        label = {"label": bool(sample["label"])} if method == "kto" else {}
        return {"prompt": tokenizer.decode(sample[sides[0]][: starts[sides[0]] + 1]), **answers, **label}

    kinds = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig)}
    trainer_of, settings_of = kinds[method]
    arguments = settings_of(
        f"{recipe.output_dir}-trl",
        beta=0.1,
        max_length=task.max_length,
        gradient_checkpointing=False,
        **trl_settings(recipe),
        **settings,
    )
    rows, model = Dataset.from_list([texts(samples[index]) for index in order]), build_model(recipe)
    trainer = trainer_of(model, deepcopy(model), arguments, train_dataset=rows, processing_class=tokenizer)
    first, found = samples[order[0]], trainer.train_dataset[0]
    whole = [*first[sides[0]].tolist(), int(first[f"{sides[0]}_labels"][-1])]
    if [*found["prompt_ids"], *found[f"{sides[0]}_ids"]] != whole:
        raise SystemExit("TRL reads other tokens than hftune.")
    return trainer


def row(name: str, count: int, runs: Mapping[int, Curves]) -> tuple[Any, ...]:
    first, last = runs[count]["loss"][0], runs[count]["loss"][-1]
    return (
        name,
        count,
        f"{first:.6f}",
        f"{last:.6f}",
        *(f"{max(distances(runs, count, kind)):.1e}" for kind in ("loss", "norm")),
    )


def distances(runs: Mapping[int, Curves], count: int, kind: str) -> list[float]:
    """Return each step's relative difference to the contender's run on 1 process."""
    return [abs(mine - its) / abs(its) for mine, its in zip(runs[count][kind], runs[1][kind], strict=True)]


def worst(runs: Mapping[int, Curves], kind: str) -> float:
    return max(max(distances(runs, count, kind)) for count in runs)


def compare_speed(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Train an epoch by each in turn; return a table, and what it says."""
    import torch
    from bert_on_reviews import quiet

    quiet()
    torch.set_num_threads(1)
    rows, measured = [], {}
    with tempfile.TemporaryDirectory() as folder:
        data = reviews(options, Path(folder)) if options.data else {}
        for method in METHODS:
            contenders: dict[str, Callable[[int], float]] = {
                name: partial(time_of, method, data.get(method), options, Path(folder))
                for name, time_of in (("hftune", time_hftune), ("TRL", time_trl))
            }
            seconds = take_turns(contenders, options.rounds)
            for name, found in seconds.items():
                speeds = [options.pairs / value for value in found]
                rows.append((method, name, f"{median(speeds):.1f}", f"{min(speeds):.1f} to {max(speeds):.1f}"))
            ratio = median(its / mine for mine, its in zip(seconds["hftune"], seconds["TRL"], strict=True))
            measured[f"{method} on {'reviews' if options.data else 'generated answers'}, samples a second against TRL's"] = (
                f"{ratio:.2f}x"
            )
    title = f"Epochs of {options.pairs} samples, one thread, median of {options.rounds} rounds, TRL {version('trl')}"
    return print_table(title, ("method", "", "samples/s", "from ... to"), rows), measured


def reviews(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write pairs and judged answers made of Yelp's reviews; return their files by method."""
    lines = [json.loads(line) for line in (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = []
    for place, line in enumerate(lines[: options.pairs]):
        other = next(other for other in lines[place + 1 :] if other["label"] != line["label"])
        prompt = f"Write a review with {line['label'] + 1} stars."
        pairs.append({"prompt": f"{prompt} Its number is {place}.", "chosen": line["text"], "rejected": other["text"]})
    judged = [
        {"prompt": pair["prompt"], "completion": pair[("chosen", "rejected")[place % 2]], "label": place % 2 == 0}
        for place, pair in enumerate(pairs)
    ]
    files = {method: folder / f"{method}.jsonl" for method in METHODS}
    for path, rows in zip(files.values(), (pairs, judged), strict=True):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return files


def speed_recipe(method: str, data: Path | None, options: argparse.Namespace, folder: Path, turn: int) -> Recipe:
    from hftune import Recipe

    words = [*COMMON, f"train.batch_size={BATCH_SIZE}", f"train.micro_batch_size={BATCH_SIZE}", f"seed={1 + turn}"]
    words += [f"output_dir={folder}/{method}-{turn}", f"task.max_train_samples={options.pairs}"]
    if data:
        bad = "task.bad_pairs=drop" if method == "dpo" else "task.bad_samples=drop"
        words += [*LONG, "task.dataset=null", f"task.data_files.train={data}", bad]
    return Recipe.load(f"{method}_demo", *words)


def time_hftune(method: str, data: Path | None, options: argparse.Namespace, folder: Path, turn: int) -> float:
    """Return the seconds of the reference and of all steps."""
    from hftune import settle, train

    recipe, add_references, seconds = speed_recipe(method, data, options, folder, turn), settle.add_references, []

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        add_references(*arguments)
        seconds.append(time.perf_counter() - began)

    settle.add_references = timed
    try:
        train(recipe)
    finally:
        settle.add_references = add_references
    lines = [json.loads(line) for line in Path(recipe.output_dir, "metrics.jsonl").read_text().splitlines()]
    return sum(seconds) + math.fsum(line["perf/step_s"] for line in lines if "perf/step_s" in line)


def time_trl(method: str, data: Path | None, options: argparse.Namespace, folder: Path, turn: int) -> float:
    """Return the seconds of all steps."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    recipe, stopwatch = speed_recipe(method, data, options, folder, turn), Stopwatch()
    trainer = trl_trainer(recipe, per_device_train_batch_size=BATCH_SIZE, logging_strategy="no")
    trainer.add_callback(stopwatch)
    trainer.train()
    return stopwatch.seconds


def draw(curves: Mapping[str, Mapping[str, Mapping[int, Curves]]], path: Path) -> None:
    """Draw how far losses and gradient norms are from those on 1 process, byte for byte the same for the same curves."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        # A background of its own, so that the lines keep their contrast on a dark page.
        canvas, panels = pyplot.subplots(1, 4, figsize=(9.6, 2.9), sharey=True, layout="constrained", facecolor="white")
        places = [(method, kind) for method in curves for kind in ("loss", "norm")]
        for axes, (method, kind) in zip(panels, places, strict=True):
            draw_distances(axes, curves[method], kind)
            axes.set_title(f"{method.upper()}: {'loss' if kind == 'loss' else 'gradient norm'}", loc="left", fontweight="bold")
        panels[0].legend(frameon=False, fontsize=7)
        panels[0].set_ylabel("relative difference from 1 process")
        panels[0].set_yscale("log")
        panels[0].set_ylim(1e-9, 10)
        canvas.supxlabel("optimizer step", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, metadata={"Date": None})
        pyplot.close(canvas)


def draw_distances(axes: Axes, found: Mapping[str, Mapping[int, Curves]], kind: str) -> None:
    for (name, runs), style in zip(found.items(), ("-", ":"), strict=True):
        for count in runs:
            if count > 1:  # no difference at all has no place on this scale, and leaves a gap
                shown = [distance or float("nan") for distance in distances(runs, count, kind)]
                label = f"{name}, {count} processes"
                axes.plot(range(1, 1 + len(shown)), shown, style, color=COLOURS.get(count), lw=1.4, label=label)


if __name__ == "__main__":
    main()
