"""How fast one NVIDIA GPU trains, setting by setting, and beside Trainer: tokens a second, MFU, idle time and peak memory.

Not run by itself: benchmarks/gpu.py does, and --only chooses settings by their words. They are:

bert    a BERT of --layers x --width, by default bert-base's size, on reviews, global batch --batch-size. precision no or bf16;
        eager, or layers compiled one by one; activations stored, or recomputed for the backward pass; and the batch padded to
        512 tokens in micro-batches of --rows rows, cut by hftune's plan into micro-batches of at most as many padded tokens,
        packed, without padding, into micro-batches of as many real tokens, or trained by transformers' Trainer: --rows rows as
        they come, padded to their longest, accumulated to the global batch.
article the network of recipe wikitext2 (4096 wide, 16 heads, 8 layers, 33,278 words, blocks of 35 tokens) on random tokens, a
        step of one micro-batch of 20, 80 or 320 blocks.

Tokens are real ones, padding not counted. Loading is part of the time: samples are read, collated, pinned and copied as in a
training. Every setting runs over the same samples once untimed, as kernels are chosen and compiled then, then timed, then over
two steps under torch.profiler (not Trainer): "idle" is the share of that time in which the GPU computed nothing. The profiler
slows the host down, so it is an upper bound. "graphs" is how many the compiler made, and how many of them again for other
inputs. Settings take turns in rounds, each on a fresh model alone on the GPU. Peak memory is what PyTorch's allocator held at
most while timed.

MFU is perf/mfu of a training (docs/speed.md): the matrix products of layers and head, forward and backward, for real tokens,
over what the GPU could have done; the column after it counts padding as work. The peak is --peak-tflops, by default the GPU's
dense bf16 peak from NVIDIA's data sheet where hftune knows it, for float32 rows as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from bert_on_reviews import add_model_options, pad_to, quiet, recipe_of, review_task
from contest import take_turns
from record import print_table
from torch import Tensor, nn

from hftune.batch_plan import BatchPlan
from hftune.build import Parts, build_model, plan_batches
from hftune.config import Recipe
from hftune.distributed.accelerator import on_cpu, start_accelerator
from hftune.distributed.devices import known_tflops
from hftune.optim import build_optimizer
from hftune.settle import settle_packing
from hftune.strategies.arithmetic import Arithmetic
from hftune.strategies.data_parallel import DataParallel
from hftune.tasks import LanguageModeling, SequenceClassification

Setting = tuple[str, str, str, str, str]  # model, precision, compile, activations, batches
PRECISIONS, MODES, ACTIVATIONS = ("no", "bf16"), ("eager", "layers"), ("stored", "recomputed")
SETTINGS: list[Setting] = [
    *product(("bert",), PRECISIONS, ("eager",), ("stored",), ("trainer",)),
    *product(("bert",), PRECISIONS, MODES, ACTIVATIONS, ("padded", "plan", "packed")),
    *product(("article",), PRECISIONS, MODES, ("stored",), ("20", "80", "320")),
]


def add_speed_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Add the options of this part; return their values for --smoke."""
    add_model_options(parser, layers=12, width=768)
    parser.add_argument("--batch-size", type=int, default=256, help="global")
    parser.add_argument("--rows", type=int, default=32, help="rows of a padded micro-batch; the plan's tokens are 512 x rows")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, help="dense, of one GPU; needed for MFU on GPUs not known here")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load samples, for bert")
    words, only = sorted({word for setting in SETTINGS for word in setting}), ["bert", "bf16", "eager", "stored"]
    parser.add_argument("--only", nargs="*", choices=words, default=only, help="measure the settings with all these words")
    smoke = {"layers": 1, "width": 64, "vocab_size": 500, "batch_size": 8, "rows": 4, "steps": 2, "rounds": 1}
    return {**smoke, "only": ["bert", "no", "eager", "stored"]}


def measure_all(options: argparse.Namespace, device: str, folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a table of all settings that were asked for, and a line for each of them."""
    quiet()
    settings = [setting for setting in SETTINGS if set(options.only) <= set(setting)]
    turns = {setting: lambda turn, setting=setting: measure(options, setting, folder) for setting in settings}
    return report(options, device, take_turns(turns, options.rounds))


@dataclass
class PaddedReviews(SequenceClassification):
    """Reviews padded to the maximum, whatever their lengths."""

    def lengths(self, dataset: Any) -> np.ndarray:
        return np.full(len(dataset), self.max_length, np.int32)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad_to(self.max_length, super().collate(examples), self.text_tokenizer.pad_token_id)


@dataclass
class RandomTokens(LanguageModeling):
    """Blocks of random tokens, and no tokenizer."""

    num_words: int = 33278
    num_blocks: int = 20

    def datasets(self) -> dict[str, Any]:
        draw = np.random.RandomState(0)
        rows = [draw.randint(0, self.num_words, self.block_length + 1) for _ in range(self.num_blocks)]
        blocks = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
        return {"train": blocks, "eval": blocks[:1]}

    def build_model(self) -> nn.Module:
        from hftune.models.transformer_lm import TransformerLM, TransformerLMConfig

        fields = {name: value for name, value in self.model_config.items() if name != "model_type"}
        return TransformerLM(TransformerLMConfig(vocab_size=self.num_words, **fields))

    def lengths(self, dataset: Any) -> np.ndarray:
        return np.full(len(dataset), self.block_length, np.int32)

    def collate(self, examples: list) -> dict[str, Tensor]:
        return {name: torch.tensor(np.stack([example[name] for example in examples])) for name in ("input_ids", "labels")}


@dataclass
class Round:
    """What one setting did in one round."""

    seconds: float
    real: np.ndarray
    """Tokens of each sample; ``padded``: with padding."""
    padded: np.ndarray
    arithmetic: Arithmetic
    num_items: int
    peak_bytes: int
    idle: float | None
    compiled: Compilations

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return float(self.real.sum()) / self.seconds

    def flop_rate(self, lengths: np.ndarray) -> float:
        return self.arithmetic.flops(lengths, self.num_items) / self.seconds


def recipe_for(options: argparse.Namespace, setting: Setting, folder: str) -> Recipe:
    model, precision, compiled, recomputed, batches = setting
    if model == "article":
        recipe = Recipe.load("wikitext2", f"output_dir={folder}", f"train.mixed_precision={precision}")
        recipe.task = RandomTokens(
            model_config=recipe.task.model_config, tokenizer="words", num_blocks=int(batches) * options.steps
        )
        recipe.train.batch_size = recipe.train.micro_batch_size = int(batches)
        recipe.train.compile = compiled == "layers"
        return recipe
    is_by_rows = batches in ("padded", "trainer")
    bound = {"micro_batch_size": options.rows} if is_by_rows else {"micro_batch_tokens": 512 * options.rows}
    return recipe_of(
        review_task(options, PaddedReviews if batches == "padded" else SequenceClassification),
        folder,
        batch_size=options.batch_size,
        mixed_precision=precision,
        compile=compiled == "layers",
        packing="auto" if batches == "packed" else "off",
        gradient_checkpointing=recomputed == "recomputed",
        **bound,
    )


def measure(options: argparse.Namespace, setting: Setting, folder: str) -> Round | None:
    """Train one setting alone on the GPU; None where its memory does not suffice."""
    try:
        recipe = recipe_for(options, setting, folder)
        data = recipe.task.datasets()["train"]
        if setting[0] == "bert":
            chosen = np.random.default_rng(0).integers(len(data), size=options.steps * options.batch_size)
            data = data.select(chosen)
        done = (train_by_trainer if setting[-1] == "trainer" else train)(options, recipe, data)
        print(f"{' '.join(setting)}: {done.rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        return done
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()  # the model is in cycles
        if setting[2] == "layers":
            torch.compiler.reset()
        torch.cuda.empty_cache()


def train(options: argparse.Namespace, recipe: Recipe, data: Any) -> Round:
    began = time.time()
    parts = Parts({"train": data}, plan_batches(recipe, data), build_model(recipe), options.steps)
    strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
    settle_packing(recipe, strategy, parts)
    is_bert = isinstance(recipe.task, SequenceClassification)
    if is_bert and recipe.train.packing == "auto" and not parts.plan.packed:
        raise SystemExit(f"benchmarks/gpu.py cannot pack: {' '.join(parts.notices)}")
    strategy.prepare(parts.model, build_optimizer(parts.model, recipe))

    def run(num_steps: int = options.steps) -> None:
        take_steps(strategy, recipe, data, parts.plan, num_steps, options.num_workers if is_bert else 0)

    run()
    reset_peak()
    started = time.perf_counter()
    run()
    seconds, peak = time.perf_counter() - started, peak_bytes()
    micro_batches = [micro_batch for step in parts.plan.epoch(0) for micro_batch in step]
    real = SequenceClassification.lengths(recipe.task, data) if is_bert else recipe.task.lengths(data)
    padded = real if parts.plan.packed else np.concatenate([[each.length] * len(each.samples) for each in micro_batches])
    num_items = len(data) if is_bert else int(real.sum())
    idle = idle_share(lambda: run(2))
    return Round(seconds, real, padded, parts.arithmetic, num_items, peak, idle, Compilations.since(began))


def take_steps(strategy: DataParallel, recipe: Recipe, data: Any, plan: BatchPlan, num_steps: int, num_workers: int) -> None:
    """Train on the first steps of a plan, loading included, until the GPU has finished."""
    with closing(strategy.batches(data, islice(plan.epoch(0), num_steps), num_workers)) as batches:
        for step, batch in enumerate(batches):
            strategy.forward_backward(batch, recipe.seed, step)
            strategy.report(strategy.clip_grad_norm(recipe.train.clip_norm))
            strategy.optimizer_step(recipe.train.lr)
            strategy.sharding.clear_gradient()
    synchronize()


def train_by_trainer(options: argparse.Namespace, recipe: Recipe, data: Any) -> Round:
    """Let transformers' Trainer take the same number of steps over the same samples, twice; the second time is timed."""
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class OneDevice(TrainingArguments):
        n_gpu = 1  # with several, Trainer would compute on all of them from this process

    class Stopwatch(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            padded.clear()
            reset_peak()
            self.began = time.perf_counter()

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.seconds = time.perf_counter() - self.began

    padded: list[int] = []
    pad = DataCollatorWithPadding(recipe.task.text_tokenizer)

    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = pad(examples)
        rows, longest = batch["input_ids"].shape
        padded.extend([longest] * rows)
        return batch

    config, stopwatch, began = recipe.train, Stopwatch(), time.time()
    start_accelerator(config)  # with the same numerics
    torch.manual_seed(recipe.seed)
    arguments = OneDevice(
        recipe.output_dir,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.batch_size // options.rows,
        num_train_epochs=1,
        learning_rate=config.lr,
        max_grad_norm=config.clip_norm,
        optim="adamw_torch_fused",
        bf16=config.mixed_precision == "bf16",
        use_cpu=on_cpu(),
        dataloader_num_workers=options.num_workers,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(recipe.task.build_model(), arguments, collate, data.to_dataset(), callbacks=[stopwatch])
    trainer.remove_callback(PrinterCallback)
    for _ in range(2):
        trainer.train()
    arithmetic, real = Arithmetic.of(trainer.model), recipe.task.lengths(data)
    found = Compilations.since(began)
    return Round(stopwatch.seconds, real, np.array(padded), arithmetic, len(data), peak_bytes(), None, found)


def synchronize() -> None:
    """Wait for the GPU; nothing waits on a CPU."""
    if not on_cpu():
        torch.cuda.synchronize()


def reset_peak() -> None:
    if not on_cpu():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the most bytes that PyTorch's allocator held since ``reset_peak``; 0 on a CPU, where nobody counts them."""
    return 0 if on_cpu() else torch.cuda.max_memory_allocated()


def idle_share(run: Callable[[], None]) -> float | None:
    """Run once more under the profiler; return the share of the time in which the GPU computed nothing. None on a CPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints when it starts and stops (torch 2.13)
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([] if on_cpu() else [ProfilerActivity.CUDA])]
    began = time.perf_counter()
    with profile(activities=kinds, acc_events=True) as profiled:
        run()
        seconds = time.perf_counter() - began
    on_gpu = [event.time_range for event in profiled.events() if event.device_type == DeviceType.CUDA]
    return None if on_cpu() else 1 - covered((span.start, span.end) for span in on_gpu) / 1e6 / seconds


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much of a line the intervals cover together; several streams of a GPU may compute at once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def report(
    options: argparse.Namespace, device: str, results: dict[Setting, list[Round | None]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Print medians over the rounds, headed by what was measured on."""
    peak = options.peak_tflops or (known_tflops(device) or {}).get("bf16")
    rows, rates, lines = [], {}, {}
    for setting, rounds in results.items():
        done = [run for run in rounds if run is not None]
        if not done:
            rows.append((*setting, "out of memory", "", "", "", "", "", ""))
            continue
        rates[setting] = rate = median(run.rate for run in done)
        flop_rates = [median(run.flop_rate(getattr(run, which)) for run in done) for which in ("real", "padded")]
        shares = [f"{flop_rate / peak / 1e12:.1%}" if peak else "-" for flop_rate in flop_rates]
        padding = 1 - done[0].real.sum() / done[0].padded.sum()
        memory = f"{max(run.peak_bytes for run in done) / 2**30:.2f}"
        rows.append((*setting, f"{rate:,.0f}", f"{padding:.1%}", *shares, memory, *waits_and_graphs(done)))
        what = f"BERT {options.layers} x {options.width}" if setting[0] == "bert" else "TransformerLM 8 x 4096, blocks of 35"
        lines[setting] = (
            f"training {what}, {', '.join(setting[1:]).removeprefix('no, ')}",
            f"{rate:,.0f} tokens/s, MFU {shares[0]}, {memory} GiB at most",
        )
    title = f"{device}, torch {torch.__version__}; {options.rounds} rounds of {options.steps} steps; " + (
        f"MFU of {peak:g} TFLOP/s" if peak else "MFU needs --peak-tflops for this GPU"
    )
    header = ("model", "precision", "compile", "activations", "batches", "tokens/s", "padding", "MFU", "with padding")
    table = print_table(title, (*header, "peak GiB", "idle", "graphs"), rows)
    return table, {what: said + beside_trainer(setting, rates) for setting, (what, said) in lines.items()}


def beside_trainer(setting: Setting, rates: dict[Setting, float]) -> str:
    theirs = rates.get((*setting[:2], "eager", "stored", "trainer"))
    return f", {rates[setting] / theirs:.2f} x Trainer" if theirs and setting[-1] != "trainer" else ""


class Compilations(NamedTuple):
    """What torch compiled in this process since some time."""

    graphs: int
    again: int
    """Those of them that were compiled because the inputs were of another kind than before."""
    hit_limit: bool
    """Whether further kinds of inputs are computed uncompiled."""

    @classmethod
    def since(cls, began: float) -> Compilations:
        """Count from a point in time on, as ``time.time`` tells it. torch remembers the last 64."""
        from torch._dynamo.utils import get_compilation_metrics

        found = [metrics for metrics in get_compilation_metrics() if (metrics.start_time or 0) >= began]
        done = [metrics for metrics in found if not metrics.fail_reason]
        again = sum(metrics.recompile_reason is not None for metrics in done)
        return cls(len(done), again, any("limit" in (metrics.fail_reason or "") for metrics in found))


def waits_and_graphs(done: list[Any]) -> tuple[str, str]:
    """Return the median idle share of rounds, and the most graphs compiled in one, those for other inputs after a plus."""
    idle = [run.idle for run in done if run.idle is not None]
    most = max(run.compiled for run in done)
    again = f"{most.graphs - most.again} + {most.again}{' (limit)' if most.hit_limit else ''}" if most.graphs else "-"
    return f"{median(idle):.1%}" if idle else "-", again
