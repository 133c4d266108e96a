"""Draw README's figure: the losses of one training on 1, 2 and 4 processes, by hftune and by transformers.Trainer.

    python benchmarks/figure.py [--steps 125] [--processes 1 2 4] [--figure docs/assets/same-training.svg]

A small BERT with BERT's dropout of 0.1 learns generated reviews for one epoch (recipe yelp_demo). Both contenders start
from the same weights and get the same samples, seed, learning rates, AdamW, clipping at 1.0 and a global batch of 32. Each
shuffles in its own way.

hftune   is given train.batch_size=32 and train.micro_batch_size=8, however many processes it is started on.
Trainer  is given what keeps its global batch at 32: 32 rows a device on 1 process, 16 on 2, 8 on 4. The table also has the
         other way, 8 rows a device and as many accumulation steps as that takes. Everything else is Trainer's default.

The left panels show the loss that each of them logs. The right one shows how far each run is from the same contender's run
on 1 process. For Trainer this is measured on the loss that BERT returns, averaged over the global batch, before Trainer
scales it. So it shows what still differs once the scale is corrected: each process draws dropout masks of its own, and
clipping sees a gradient that is too large.

Trainer takes the ``**kwargs`` of BERT's ``forward`` to mean that the model divides its loss by ``num_items_in_batch``. BERT
does not, so loss and gradient come out multiplied by processes x accumulation (transformers 5.23; see gradient_scale.py).
AdamW divides most of that out again: the evaluation after the last step, computed by the same code for both, hardly moves.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contest import start
from record import HERE, parse_options, print_table, save

if TYPE_CHECKING:  # the process that starts the others needs no torch
    from matplotlib.axes import Axes

    from hftune import Recipe

GLOBAL_BATCH = 32
ROWS = 8
"""Samples in one forward pass: hftune's on any number of processes, Trainer's where it accumulates."""
WORDS = (
    *("task.model_config.hidden_dropout_prob=0.1", "task.model_config.attention_probs_dropout_prob=0.1"),
    *(f"train.batch_size={GLOBAL_BATCH}", f"train.micro_batch_size={ROWS}", "train.micro_batch_tokens=null"),
    *("train.log_every=1", "checkpoint.every=never"),
)
COLOURS = {1: "#9ecae1", 2: "#f28e2b", 4: "#1f3b73"}
STYLE = {
    "svg.hashsalt": "hftune",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Of matplotlib, in figures that are the same byte for byte for the same curves."""
WIDTHS = {1: 5.0, 2: 2.6, 4: 1.0}
"""Thick below thin, so that curves that lie on each other can all be seen."""


@dataclass
class Curve:
    """What one run was like."""

    logged: list[float]
    """The loss of each step, as the contender logs it."""
    unscaled: list[float]
    """The mean loss over the samples of each step, as the model computes it."""
    eval_loss: float
    """Mean over the evaluation split after the last step."""

    def distance(self, other: Curve) -> list[float]:
        """Return each step's relative difference to another run, of the unscaled loss."""
        return [abs(mine - its) / its for mine, its in zip(self.unscaled, other.unscaled, strict=True)]


def main() -> None:
    options = parse()
    if options.answer:
        train_with_trainer(options)
        return
    import matplotlib  # noqa: F401  (a missing package is better found before minutes of training)

    hftune = {count: run_hftune(count, options) for count in options.processes}
    trainer = {count: run_trainer(count, GLOBAL_BATCH // count, options) for count in options.processes}
    rows = [row("hftune", count, ROWS, curve, hftune) for count, curve in hftune.items()]
    rows += [row("Trainer", count, GLOBAL_BATCH // count, curve, trainer) for count, curve in trainer.items()]
    if options.accumulation:
        accumulated = {count: run_trainer(count, ROWS, options) for count in options.processes}
        rows += [row("Trainer", count, ROWS, curve, accumulated) for count, curve in accumulated.items()]
    header = ("", "processes", "rows a device", "first loss logged", "last loss logged", "evaluation loss", "furthest from 1")
    table = print_table(f"{options.steps} steps of {GLOBAL_BATCH} generated reviews, BERT 2 x 128", header, rows)
    draw(hftune, trainer, options.figure)
    print(f"\nDrawn: {os.path.relpath(options.figure)}")
    save(__file__, options, [table], measured(hftune, trainer))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=125, help="optimizer steps of each run (default: one epoch, 125)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes, 1 first")
    parser.add_argument("--accumulation", action=argparse.BooleanOptionalAction, default=True, help="Trainer's other way, too")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs" / "assets" / "same-training.svg")
    parser.add_argument("--eval-samples", type=int, default=800, help="reviews to evaluate on (default: all 800)")
    parser.add_argument("--rows", type=int, default=ROWS, help="of --answer: rows a device")
    parser.add_argument("--answer", type=Path, help="train with Trainer in this process; write the curve there")
    smoke = {"steps": 3, "processes": [1, 2], "accumulation": False, "eval_samples": 16}
    return parse_options(parser, {**smoke, "figure": Path(tempfile.gettempdir()) / "same-training.svg"})


def row(name: str, processes: int, rows: int, curve: Curve, runs: dict[int, Curve]) -> tuple[Any, ...]:
    """Describe a run in a row of the table."""
    losses = [f"{loss:.4f}" for loss in (curve.logged[0], curve.logged[-1], curve.eval_loss)]
    return (name, processes, rows, *losses, f"{max(curve.distance(runs[1])):.1e}")


def measured(hftune: dict[int, Curve], trainer: dict[int, Curve]) -> dict[str, str]:
    """Say what the runs of each contender have logged, and how far apart they are."""
    *others, last = hftune
    what = f"{len(hftune[1].logged)} steps on {', '.join(map(str, others))} and {last} processes, dropout on"

    def first(runs: dict[int, Curve]) -> str:
        return ", ".join(f"{curve.logged[0]:.2f}" for curve in runs.values())

    def furthest(runs: dict[int, Curve]) -> str:
        return f"{max(max(curve.distance(runs[1])) for curve in runs.values()):.1e}"

    return {
        f"first loss logged of {what}": f"hftune {first(hftune)}; Trainer {first(trainer)}",
        f"largest relative difference of a loss in {what}, Trainer's scale corrected": (
            f"hftune {furthest(hftune)}; Trainer {furthest(trainer)}"
        ),
    }


def run_hftune(processes: int, options: argparse.Namespace) -> Curve:
    """Run ``python -m hftune.run`` on that many processes, and read its output folder."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=yelp_demo", *WORDS, f"task.max_eval_samples={options.eval_samples}"]
        words += [f"train.max_steps={options.steps}", f"output_dir={folder}"]
        start(processes, ["-m", "hftune.run", *words])
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        return Curve(losses, losses, json.loads(Path(folder, "result.json").read_text())["metrics"]["loss"])


def run_trainer(processes: int, rows: int, options: argparse.Namespace) -> Curve:
    """Run this script with ``--answer`` on that many processes, with so many rows a device."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        sizes = ["--steps", str(options.steps), "--eval-samples", str(options.eval_samples), "--rows", str(rows)]
        start(processes, [__file__, *sizes, "--answer", str(answer)])
        return Curve(**json.loads(answer.read_text()))


def train_with_trainer(options: argparse.Namespace) -> None:
    """Train with Trainer on the processes there are; the main one writes the curve to ``options.answer``."""
    from bert_on_reviews import quiet

    quiet()
    import torch
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    from hftune import Recipe

    words = (*WORDS, f"task.max_eval_samples={options.eval_samples}", f"output_dir={options.answer.parent / 'trainer'}")
    recipe = Recipe.load("yelp_demo", *words)
    data = recipe.task.datasets()  # from the cache, where the runs of hftune have put them
    torch.manual_seed(recipe.seed)  # the weights that hftune begins with
    model = recipe.task.build_model()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        recipe.output_dir,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=GLOBAL_BATCH // options.rows // processes,
        max_steps=options.steps,
        learning_rate=recipe.train.lr,
        lr_scheduler_type=recipe.train.schedule,
        warmup_steps=recipe.train.warmup_ratio,  # Trainer takes a fraction for a share of the steps
        max_grad_norm=recipe.train.clip_norm,
        weight_decay=recipe.train.weight_decay,
        seed=recipe.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    collate = DataCollatorWithPadding(recipe.task.text_tokenizer)
    trainer = Trainer(model, arguments, collate, train_dataset=data["train"].to_dataset())
    trainer.remove_callback(PrinterCallback)
    losses: list[float] = []
    hook = model.register_forward_hook(lambda model, inputs, outputs: losses.append(outputs.loss.item()))
    trainer.train()
    hook.remove()
    gathered = trainer.accelerator.gather(torch.tensor(losses)).view(processes, options.steps, -1)
    unscaled = gathered.mean(dim=(0, 2)).tolist()  # every forward has as many rows as the others
    if trainer.is_world_process_zero():
        logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        options.answer.write_text(json.dumps(asdict(Curve(logged, unscaled, evaluate(model, data["eval"], recipe)))))


def evaluate(model: Any, data: Any, recipe: Recipe) -> float:
    """Return the mean loss over all samples of a split."""
    import torch
    from torch.nn.functional import cross_entropy

    model.eval()
    total = 0.0
    for first in range(0, len(data), ROWS):
        tensors = recipe.task.collate(data.__getitems__(range(first, min(first + ROWS, len(data)))))
        with torch.no_grad():
            total += cross_entropy(model(**tensors).logits, tensors["labels"], reduction="sum").item()
    return total / len(data)


def draw(hftune: dict[int, Curve], trainer: dict[int, Curve], path: Path) -> None:
    """Draw the three panels into an SVG file, byte for byte the same for the same curves."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        # A background of its own, so that the lines keep their contrast on a dark page.
        canvas, (left, middle, right) = pyplot.subplots(1, 3, figsize=(9.6, 3.1), layout="constrained", facecolor="white")
        draw_losses(left, "hftune", hftune)
        draw_losses(middle, "Trainer", trainer)
        left.set_ylim(middle.get_ylim())
        left.legend(frameon=False, title="hftune and Trainer on", alignment="left")
        draw_distances(right, hftune, trainer)
        canvas.supxlabel("optimizer step", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, metadata={"Date": None})
        pyplot.close(canvas)


def draw_losses(axes: Axes, name: str, runs: dict[int, Curve]) -> None:
    """Draw the losses that a contender has logged."""
    for count, curve in runs.items():
        label = f"{count} process{'es' if count > 1 else ''}"
        axes.plot(steps_of(curve), curve.logged, color=COLOURS.get(count), lw=WIDTHS.get(count), label=label)
    axes.set_title(f"{name}: loss as logged", loc="left", fontweight="bold")
    axes.set_ylim(bottom=0)


def draw_distances(axes: Axes, hftune: dict[int, Curve], trainer: dict[int, Curve]) -> None:
    """Draw how far the runs on several processes are from that on one."""
    for name, runs in (("Trainer, its scale corrected", trainer), ("hftune", hftune)):
        several = {count: curve.distance(runs[1]) for count, curve in runs.items() if count > 1}
        for count, distances in several.items():  # no difference at all has no place on this scale, and leaves a gap
            shown = [distance or float("nan") for distance in distances]
            axes.plot(steps_of(runs[count]), shown, color=COLOURS.get(count), lw=1.2)
        top = max(max(distances) for distances in several.values())
        axes.annotate(name, (len(runs[1].logged), 2 * top), ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_ylim(1e-9, 10)
    axes.set_title("relative difference from 1 process", loc="left", fontweight="bold")


def steps_of(curve: Curve) -> range:
    return range(1, len(curve.logged) + 1)


if __name__ == "__main__":
    main()
