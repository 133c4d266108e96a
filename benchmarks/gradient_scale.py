"""Show the gradient of one step, however it is computed: transformers.Trainer beside hftune.

    python benchmarks/gradient_scale.py [--accumulation 4] [--processes 1 2]

Loss and global gradient norm (before clipping) of the first step on the same 16 reviews, from the same weights of a small BERT
without dropout: on one process and on two, in one forward a process and in four. All four ask for the same mathematics.

Trainer takes the ``**kwargs`` of BERT's ``forward`` to mean that the model divides its loss by the ``num_items_in_batch`` that
it is given; BERT ignores it. So Trainer neither divides by the accumulation steps nor undoes its own multiplication by the
number of processes: its gradient is too large by their product (transformers 5.23; issue 47688 is about the accumulation).

Each setting runs in processes of its own, those of two over Gloo through torchrun; hftune is measured before Trainer is made.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contest import start
from record import parse_options, print_table, save

if TYPE_CHECKING:  # the process that starts the others needs no torch
    from hftune.config import Recipe

NUM_SAMPLES = 16


def main() -> None:
    options = parse()
    if options.answer:
        measure(options)
        return
    rows, norms = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for num_processes in options.processes:
            for accumulation in (1, options.accumulation):
                answer = run_setting(num_processes, accumulation, Path(folder) / "answer.json")
                norms[num_processes, accumulation] = {name: answer[name][1] for name in answer}
                setting = f"{num_processes} process{'es' if num_processes > 1 else ''}, accumulation {accumulation}"
                rows.append((setting, *[f"{number:.4f}" for number in (*answer["trainer"], *answer["hftune"])]))
    title = f"The first step on the same {NUM_SAMPLES} reviews, BERT 2 x 64 without dropout: equal numbers are right"
    table = print_table(title, ("", "Trainer loss", "Trainer grad norm", "hftune loss", "hftune grad norm"), rows)
    save(__file__, options, [table], figure(norms))


def figure(norms: dict[tuple[int, int], dict[str, float]]) -> dict[str, str]:
    """Describe the last setting; right is what Trainer computes in the first, one forward on one process."""
    (_, right), *_, ((num_processes, accumulation), found) = norms.items()
    where = f"{num_processes} process{'es' if num_processes > 1 else ''}"
    what = f"first gradient norm with accumulation {accumulation} on {where}, where {right['trainer']:.3f} is right"
    return {what: f"hftune {found['hftune']:.3f}, Trainer {found['trainer']:.3f}"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulation", type=int, default=4, help="forwards a process where there are several: 2, 4 or 8")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    parser.add_argument("--answer", type=Path, help="measure one setting in this process; write the numbers there")
    return parse_options(parser, smoke={"processes": [1]})


def run_setting(num_processes: int, accumulation: int, answer: Path) -> dict[str, list[float]]:
    """Start the processes of one setting, wait, and return (loss, gradient norm) of each contender."""
    script = [__file__, "--accumulation", str(accumulation), "--answer", str(answer)]
    start(num_processes, script)
    return json.loads(answer.read_text())


def measure(options: argparse.Namespace) -> None:
    """Compute both contenders' first step on the processes there are."""
    from bert_on_reviews import bert_config, quiet, recipe_of

    from hftune.build import load_datasets
    from hftune.tasks import SequenceClassification

    quiet()
    config = bert_config(2, 64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    task = SequenceClassification(
        model=None,
        model_config=config,
        dataset="hftune.data.demo:reviews",
        label_names=list("12345"),
        max_train_samples=NUM_SAMPLES,
    )
    rows = NUM_SAMPLES // options.accumulation // int(os.environ.get("WORLD_SIZE", 1))
    recipe = recipe_of(task, str(options.answer.parent), batch_size=NUM_SAMPLES, micro_batch_size=rows)
    data = load_datasets(recipe)["train"].select(range(NUM_SAMPLES))
    answer = {"hftune": hftune_step(recipe, data), "trainer": trainer_step(recipe, data, options.accumulation)}
    if int(os.environ.get("RANK", 0)) == 0:
        options.answer.write_text(json.dumps(answer))


def hftune_step(recipe: Recipe, data: Any) -> tuple[float, float]:
    """Return loss and gradient norm (before clipping) of hftune's first step. Collective."""
    from hftune.build import build_model, choose_strategy, plan_batches
    from hftune.distributed.session import Session
    from hftune.optim import build_optimizer

    model = build_model(recipe)
    with Session(recipe) as session:
        strategy = choose_strategy(session.join(), recipe, session.progress)
        strategy.prepare(model, build_optimizer(model, recipe))
        batch = next(strategy.batches(data, plan_batches(recipe, data).epoch(0), num_workers=0))
        strategy.forward_backward(batch, recipe.seed, step=0)
        report = strategy.report(strategy.clip_grad_norm(recipe.train.clip_norm))
        return report.loss, report.grad_norm


def trainer_step(recipe: Recipe, data: Any, accumulation: int) -> tuple[float, float]:
    """Return loss and gradient norm that Trainer logs for its first step. Collective."""
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    from hftune.build import build_model

    arguments = TrainingArguments(
        recipe.output_dir,
        per_device_train_batch_size=recipe.train.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        learning_rate=recipe.train.lr,
        max_grad_norm=recipe.train.clip_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    collate = DataCollatorWithPadding(recipe.task.text_tokenizer)
    trainer = Trainer(build_model(recipe), arguments, collate, train_dataset=data.to_dataset())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    first = trainer.state.log_history[0]
    return first["loss"], first["grad_norm"]


if __name__ == "__main__":
    main()
