"""Measure training speed on the CPU side by side: samples and real tokens a second, padding, and memory for activations.

    python benchmarks/throughput.py [--data FOLDER] [--steps 1] [--rounds 5] [--layers 6 --width 384] [--threads 1]

The same BERT, reviews of at most 512 tokens, global batch and fused AdamW for all; they differ in how a global batch is cut:

padded        the original script's way: every text padded to 512, 8 rows a forward, accumulation in a plain PyTorch loop.
trainer       transformers.Trainer, DataCollatorWithPadding: 8 rows as they come, padded to the longest of the 8.
rebalance     Trainer with train_sampling_strategy="batch_rebalance". It sorts a global batch by length and cuts it into as
              many groups as there are accumulation steps (x processes), moving samples from the costliest group to the
              cheapest one until the costs, rows x longest + 0.001 x rows x longest^2, are about even. So 8 rows are its
              average, not its bound: long texts come in small groups and short ones in large groups.
trainer bf16  rebalance with bf16=True, where the CPU has it.
trainer packed  rebalance with hftune's layers, that compute no padding, and its dropout: what the kernels alone are worth.
hftune        what hftune.training builds: no padding, micro-batches of equal work, dropout of its own.
hftune padded the same with train.packing=off: sorted inside the global batch, 8 rows at most.

All of them get the same samples in the same global batches: each round draws its samples anew, Trainer takes them in order
(its "sequential" sampling; the rebalancing sampler's own shuffle is off), hftune's plan too. They take turns, so slow minutes
of a shared machine hit all of them. Timed is the training only, from the first access to the data to the last optimizer step;
no logging, saving or evaluation. Tokens and rows are counted where they enter the model. The ratios are medians over the
rounds; "by CPU" takes this process's CPU time instead of the clock's, which leaves out most of what other users of the machine
cost (with one thread; more threads burn CPU time waiting for each other). Untimed, each contender first trains on one global
batch, to warm up and to weigh what autograd keeps of the largest forward ("activations"; weights are not counted).
In each round a product of two matrices of the layers' sizes is timed, too: "of matmul" is the share of its rate that useful
arithmetic, that of real tokens, reaches by CPU time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from bert_on_reviews import Meter, add_model_options, pad_to, quiet, recipe_of, review_task
from contest import take_turns
from record import parse_options, print_table, save
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hftune.build import load_datasets, plan_batches
from hftune.config import Recipe
from hftune.data.tokenized import Texts
from hftune.distributed.accelerator import start_accelerator
from hftune.models.dropout import replace_dropout
from hftune.models.packing import find_packing, without_masks
from hftune.optim import build_optimizer
from hftune.settle import width_of, without_padding
from hftune.strategies.arithmetic import Arithmetic
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.packing import collate_for, install_packing


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"  # the GPU has a benchmark of its own, gpu.py
    quiet()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(
            review_task(options), folder, batch_size=options.batch_size, micro_batch_size=options.micro_batch_size
        )
        data = load_datasets(recipe)["train"]
        contenders = build_contenders(recipe, options.only)
        rounds = draw_rounds(data, options)
        for contender in contenders.values():
            contender.warm_up(rounds[0].select(range(options.batch_size)))
        turns: dict[str, Callable[[int], Any]] = {
            name: lambda turn, contender=contender: contender.time(rounds[turn]) for name, contender in contenders.items()
        }
        results = take_turns(turns | {"matmul": lambda turn: matmul_rate(options.width)}, options.rounds)
        report(options, contenders, results, results.pop("matmul"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, layers=6, width=384)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each draws other samples (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="global")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="rows of one forward")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], help="contenders; padded and rebalance always")
    parser.add_argument("--threads", type=int, default=1, help="1 is the calmest on a machine with other users")
    smoke = {"layers": 1, "width": 64, "vocab_size": 500, "rounds": 1, "batch_size": 16}
    return parse_options(parser, smoke)


def draw_rounds(data: Texts, options: argparse.Namespace) -> list[Texts]:
    """Draw the samples of every round; a sample may come in several rounds, never twice in one."""
    draw, count = np.random.default_rng(0), options.steps * options.batch_size
    return [data.select(draw.permutation(len(data))[:count]) for _ in range(options.rounds)]


Times = tuple[float, float]  # seconds by the clock, and of this process's CPU time


def now() -> Times:
    return time.perf_counter(), time.process_time()


def since(began: Times) -> Times:
    return time.perf_counter() - began[0], time.process_time() - began[1]


@dataclass
class Round:
    """What one contender did in one round."""

    seconds: float
    cpu_seconds: float
    samples: int
    tokens: int
    padded: int
    flops: float
    """Useful ones: of real tokens."""
    largest: tuple[int, int]  # rows, longest
    forwards: int


class Contender:
    """A model of its own, and a way to train it on samples in the order given."""

    def __init__(self, recipe: Recipe):
        torch.manual_seed(recipe.seed)
        self.recipe, self.model = recipe, recipe.task.build_model()  # with torch's own dropout
        self.meter = Meter(self.model)

    def train(self, data: Texts) -> Times:
        """Train on all of ``data`` once; return the time it took."""
        raise NotImplementedError

    def warm_up(self, data: Texts) -> None:
        with self.meter.weighing():
            self.train(data)
        self.activation_bytes = self.meter.activation_bytes

    def time(self, data: Texts) -> Round:
        self.meter.restart()
        times, meter = self.train(data), self.meter
        if meter.samples != len(data):
            raise RuntimeError(f"{type(self).__name__} trained on {meter.samples} samples of {len(data)}.")
        useful = Arithmetic.of(self.model).flops(self.recipe.task.lengths(data), len(data))
        return Round(*times, meter.samples, meter.tokens, meter.padded, useful, meter.largest, meter.num_forwards)


class Padded(Contender):
    """Everything padded to the maximum, means of means, a plain loop."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.optimizer = build_optimizer(self.model, recipe)

    def train(self, data: Texts) -> Times:
        config, task = self.recipe.train, self.recipe.task
        accumulation = config.batch_size // config.micro_batch_size

        def collate(examples: list) -> dict[str, torch.Tensor]:
            return pad_to(task.max_length, task.collate(examples), task.text_tokenizer.pad_token_id)

        self.model.train()
        began = now()
        for place, batch in enumerate(DataLoader(data, config.micro_batch_size, collate_fn=collate), start=1):
            (self.model(**batch).loss / accumulation).backward()
            if place % accumulation == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return since(began)


class ByTrainer(Contender):
    """transformers.Trainer; a ``train()`` a round, which goes on with the same weights."""

    def __init__(self, recipe: Recipe, strategy: str, bf16: bool = False):
        super().__init__(recipe)
        config = recipe.train
        arguments = TrainingArguments(
            recipe.output_dir,
            train_sampling_strategy=strategy,
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
            num_train_epochs=1,
            learning_rate=config.lr,
            max_grad_norm=config.clip_norm,
            optim="adamw_torch_fused",
            bf16=bf16,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        collate = DataCollatorWithPadding(recipe.task.text_tokenizer)
        self.stopwatch = Stopwatch()
        self.trainer = InOrder(self.model, arguments, collate, callbacks=[self.stopwatch])
        self.trainer.remove_callback(PrinterCallback)

    def train(self, data: Texts) -> Times:
        self.trainer.train_dataset = data.to_dataset()  # lists, as its collator expects
        self.trainer.train()
        return self.stopwatch.times


class InOrder(Trainer):
    """Trainer, but for the shuffle of its rebalancing sampler, which no argument turns off."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, BatchRebalanceSampler):
            sampler.shuffle = False
        return sampler


class Stopwatch(TrainerCallback):
    """Times from where Trainer begins to load data, after all preparations, to its last optimizer step."""

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times = since(self.began)


class Packed(ByTrainer):
    """Trainer with layers that compute no padding."""

    def __init__(self, recipe: Recipe, strategy: str):
        super().__init__(recipe, strategy)
        replace_dropout(self.model)
        install_packing(self.model)
        pad = self.trainer.data_collator
        self.trainer.data_collator = lambda examples: with_packing(pad(examples))
        self.trainer.compute_loss = partial(self.compute_loss, self.trainer.compute_loss)

    def compute_loss(
        self, original: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        with without_masks():
            return original(model, inputs, *args, **kwargs)


def with_packing(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {**batch, "packing": find_packing(batch)}


class ByHftune(Contender):
    """What hftune.training builds and hftune.loop calls, without its log."""

    def __init__(self, recipe: Recipe, packing: str):
        super().__init__(replace(recipe, train=replace(recipe.train, packing=packing)))
        replace_dropout(self.model)
        self.strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
        if packing == "auto":
            self.strategy.collate_packed = collate_for(self.model, recipe.task)
        self.strategy.prepare(self.model, build_optimizer(self.model, recipe))

    def train(self, data: Texts) -> Times:
        config, strategy = self.recipe.train, self.strategy
        plan = replace(plan_batches(self.recipe, data), shuffle=False, width=width_of(self.model))
        if strategy.collate_packed is not None:  # bounded as eight of the longest rows are
            plan = without_padding(replace(config, micro_batch_size=None), plan)
        began = now()
        for step, batch in enumerate(strategy.batches(data, plan.epoch(0), num_workers=0)):
            strategy.forward_backward(batch, self.recipe.seed, step)
            strategy.report(strategy.clip_grad_norm(config.clip_norm))
            strategy.optimizer_step(config.lr)
            strategy.sharding.clear_gradient()
        return since(began)


KINDS: dict[str, Callable[[Recipe], Contender]] = {
    "padded": Padded,
    "trainer": partial(ByTrainer, strategy="sequential"),
    "rebalance": partial(ByTrainer, strategy="batch_rebalance"),
    "trainer bf16": partial(ByTrainer, strategy="batch_rebalance", bf16=True),
    "trainer packed": partial(Packed, strategy="batch_rebalance"),
    "hftune": partial(ByHftune, packing="auto"),
    "hftune padded": partial(ByHftune, packing="off"),
}


def build_contenders(recipe: Recipe, only: Sequence[str]) -> dict[str, Contender]:
    return {name: kind(recipe) for name, kind in KINDS.items() if name in {*only, "padded", "rebalance"}}


def matmul_rate(width: int) -> float:
    """Return the floating point operations per CPU second of a product as large as those of a feed-forward block."""
    one, other, count = torch.randn(1024, width), torch.randn(width, 4 * width), 20
    one @ other
    began = time.process_time()
    for _ in range(count):
        one @ other
    return count * 2 * 1024 * width * 4 * width / (time.process_time() - began)


def report(
    options: argparse.Namespace, contenders: dict[str, Contender], results: dict[str, list[Round]], rates: list[float]
) -> None:
    """Print medians over the rounds. Ratios are medians of the rounds' own ratios, each between equal samples."""
    for runs in zip(*results.values(), strict=True):
        if len({run.tokens for run in runs}) != 1:
            raise RuntimeError(f"The contenders saw other samples: {[run.tokens for run in runs]} tokens.")
    rows = []
    for name, rounds in results.items():
        largest = max((run.largest for run in rounds), key=lambda shape: shape[0] * shape[1])
        rows.append(
            (
                name,
                f"{median(run.tokens / run.seconds for run in rounds):,.0f}",
                f"{median(run.samples / run.seconds for run in rounds):.2f}",
                *[f"{ratio:.2f}" for ratio in speed_ratios(rounds, results["padded"])],
                *[f"{ratio:.2f}" for ratio in speed_ratios(rounds, results["rebalance"])],
                f"{median(run.flops / run.cpu_seconds / rate for run, rate in zip(rounds, rates, strict=True)):.2f}",
                f"{1 - sum(run.tokens for run in rounds) / sum(run.padded for run in rounds):.1%}",
                f"{sum(run.forwards for run in rounds) / options.rounds / options.steps:.1f}",
                f"{largest[0]} x {largest[1]}",
                f"{contenders[name].activation_bytes / 2**20:,.0f}",
            )
        )
    mean = sum(run.tokens for run in results["padded"]) / sum(run.samples for run in results["padded"])
    title = (
        f"BERT {options.layers} x {options.width}, global batch {options.batch_size}, "
        f"{'reviews of ' + options.data.name if options.data else 'generated reviews'} (mean {mean:.0f} tokens), "
        f"{options.rounds} rounds of {options.steps} steps, {options.threads} CPU thread(s)"
    )
    ratios = ("x padded", "by CPU", "x rebalance", "by CPU")
    header = ("", "tokens/s", "samples/s", *ratios, "of matmul", "padding", "forwards", "largest", "activations MiB")
    table = print_table(title, header, rows)
    what = f"training speed on {'the lengths of ' + options.data.name if options.data else 'generated reviews'}, "
    what += f"BERT {options.layers} x {options.width}"
    save(__file__, options, [table], {what: figure(results)})


def figure(results: dict[str, list[Round]]) -> str:
    """Say how many times as fast hftune is as each of the others, by CPU time, which load of the machine hardly moves."""
    others = {
        "padded": "padding every text to 512",
        "trainer": "Trainer with dynamic padding",
        "rebalance": "Trainer with `batch_rebalance`",
        "trainer bf16": "that in bf16",
    }
    others = {name: said for name, said in others.items() if name in results}
    ratios = {name: speed_ratios(results["hftune"], results[name])[1] for name in others}
    return "; ".join(f"{ratios[name]:.1f} x {said}" for name, said in others.items())


def speed_ratios(mine: list[Round], others: list[Round]) -> Times:
    """How many times as fast, on the same samples: by the clock and by CPU time."""
    pairs = list(zip(mine, others, strict=True))
    by_clock = median(other.seconds / run.seconds for run, other in pairs)
    return by_clock, median(other.cpu_seconds / run.cpu_seconds for run, other in pairs)


if __name__ == "__main__":
    main()
