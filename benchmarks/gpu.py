"""Measure a bert-base-sized BERT on one NVIDIA GPU: tokens a second, MFU, idle time and peak memory, setting by setting.

    python benchmarks/gpu.py [--data FOLDER] [--peak-tflops 989] [--steps 10] [--rounds 2]

Settings: precision no or bf16; eager, or layers compiled one by one; gradient checkpointing off or on; and the batch padded to
512 tokens in micro-batches of --rows rows, cut by hftune's plan into micro-batches of at most as many padded tokens, or packed,
without padding, into micro-batches of as many real tokens. --only keeps the settings with these words, such as
--only bf16 packed. All of them train through hftune's DataParallel on the same samples.

Tokens are real ones, padding not counted. Loading is part of the time: samples are read, collated, pinned and copied as in a
training. Every setting runs over the same steps once untimed (kernels are chosen and compiled then), then timed, then over two
of them under torch.profiler: "idle" is the share of that time in which the GPU computed nothing. The profiler slows the host
down, so it is an upper bound. "graphs" is how many the compiler made, and how many of them again for other inputs. Settings
take turns in rounds, each on a fresh model alone on the GPU. Peak memory is what PyTorch's allocator held at most while timed.

MFU is perf/mfu of a training (docs/speed.md): the matrix products of the layers, forward and backward, for real tokens, over
what the GPU could have done; the column after it counts padding as work. The peak is --peak-tflops, by default the GPU's dense
bf16 peak from NVIDIA's data sheet where hftune knows it, for float32 rows as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
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
from record import parse_options, print_table, save
from torch import Tensor

from hftune.batch_plan import BatchPlan
from hftune.build import Parts, build_model, load_datasets, plan_batches
from hftune.config import Recipe
from hftune.distributed.accelerator import on_cpu, start_accelerator
from hftune.distributed.devices import known_tflops
from hftune.optim import build_optimizer
from hftune.settle import settle_packing
from hftune.strategies.data_parallel import DataParallel
from hftune.tasks import SequenceClassification

WORDS = (("no", "bf16"), ("eager", "layers"), ("stored", "recomputed"), ("padded", "plan", "packed"))
Setting = tuple[str, str, str, str]  # one word of each


def main() -> int:
    options = parse()
    if (why_not := missing_gpu(options)) is not None:
        print(f"benchmarks/gpu.py {why_not}", file=sys.stderr)
        return 2
    quiet()
    settings: list[Setting] = [setting for setting in product(*WORDS) if set(options.only) <= set(setting)]
    with tempfile.TemporaryDirectory() as folder:
        turns = {setting: lambda turn, setting=setting: measure(options, setting, folder) for setting in settings}
        report(options, take_turns(turns, options.rounds))
    return 0


def missing_gpu(options: argparse.Namespace) -> str | None:
    """Say why this machine cannot run the benchmark. Under --smoke any can, on its CPU."""
    if options.smoke:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return None
    if torch.version.cuda is None or on_cpu() or not torch.cuda.is_available():
        return "needs a machine with an NVIDIA GPU and a CUDA build of PyTorch; --smoke tries it on the CPU."
    return None


def device_name() -> str:
    return "CPU" if on_cpu() else torch.cuda.get_device_name()


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


def peak_tflops(options: argparse.Namespace) -> float | None:
    """Return what the GPU computes at best in bf16; None if nobody says so."""
    return options.peak_tflops or (known_tflops(device_name()) or {}).get("bf16")


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, layers=12, width=768)
    parser.add_argument("--batch-size", type=int, default=256, help="global")
    parser.add_argument("--rows", type=int, default=32, help="rows of a padded micro-batch; the plan's tokens are 512 x rows")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, help="dense, of one GPU; needed for MFU on GPUs not known here")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load samples")
    words = sorted({word for group in WORDS for word in group})
    parser.add_argument("--only", nargs="*", choices=words, default=[], help="measure only settings with all these words")
    smoke = {"layers": 1, "width": 64, "vocab_size": 500, "batch_size": 8, "rows": 4, "steps": 2, "rounds": 1}
    return parse_options(parser, {**smoke, "only": ["no", "eager", "stored"]})


@dataclass
class PaddedReviews(SequenceClassification):
    """Reviews padded to the maximum, whatever their lengths."""

    def lengths(self, dataset: Any) -> np.ndarray:
        return np.full(len(dataset), self.max_length, np.int32)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad_to(self.max_length, super().collate(examples), self.text_tokenizer.pad_token_id)


@dataclass
class Round:
    """What one setting did in one round."""

    seconds: float
    tokens: int
    padded: int
    real_flop: float
    padded_flop: float
    peak_bytes: int
    idle: float | None
    compiled: Compilations


def recipe_for(options: argparse.Namespace, setting: Setting, folder: str) -> Recipe:
    precision, compiled, recomputed, batches = setting
    bound = {"micro_batch_size": options.rows} if batches == "padded" else {"micro_batch_tokens": 512 * options.rows}
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
        done = train(options, recipe_for(options, setting, folder))
        print(f"{' '.join(setting)}: {done.tokens / done.seconds:,.0f} tokens/s", file=sys.stderr, flush=True)
        return done
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()  # the model is in cycles
        torch.compiler.reset()
        torch.cuda.empty_cache()


def train(options: argparse.Namespace, recipe: Recipe) -> Round:
    began = time.time()
    datasets = dict(load_datasets(recipe))
    data = datasets["train"]
    chosen = np.random.default_rng(0).integers(len(data), size=options.steps * options.batch_size)
    datasets["train"] = data = data.select(chosen)
    parts = Parts(datasets, plan_batches(recipe, data), build_model(recipe), options.steps)
    strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
    settle_packing(recipe, strategy, parts)
    if recipe.train.packing == "auto" and not parts.plan.packed:
        raise SystemExit(f"benchmarks/gpu.py cannot pack: {' '.join(parts.notices)}")
    strategy.prepare(parts.model, build_optimizer(parts.model, recipe))

    def run(num_steps: int = options.steps) -> None:
        take_steps(strategy, recipe, data, parts.plan, num_steps, options.num_workers)

    run()
    reset_peak()
    started = time.perf_counter()
    run()
    seconds, peak = time.perf_counter() - started, peak_bytes()
    micro_batches = [micro_batch for step in parts.plan.epoch(0) for micro_batch in step]
    real = SequenceClassification.lengths(recipe.task, data)
    padded = real if parts.plan.packed else np.concatenate([[each.length] * len(each.samples) for each in micro_batches])
    tokens, flop = int(real.sum()), parts.arithmetic.flops(real, num_items=0)
    computed = sum(micro_batch.tokens for micro_batch in micro_batches), parts.arithmetic.flops(padded, num_items=0)
    return Round(seconds, tokens, computed[0], flop, computed[1], peak, idle_share(lambda: run(2)), Compilations.since(began))


def take_steps(
    strategy: DataParallel, recipe: Recipe, data: Any, plan: BatchPlan, num_steps: int, num_workers: int = 0
) -> None:
    """Train on the first steps of a plan, loading included, until the GPU has finished."""
    with closing(strategy.batches(data, islice(plan.epoch(0), num_steps), num_workers)) as batches:
        for step, batch in enumerate(batches):
            strategy.forward_backward(batch, recipe.seed, step)
            strategy.report(strategy.clip_grad_norm(recipe.train.clip_norm))
            strategy.optimizer_step(recipe.train.lr)
            strategy.sharding.clear_gradient()
    synchronize()


def report(options: argparse.Namespace, results: dict[Setting, list[Round | None]]) -> None:
    """Print medians over the rounds, headed by what was measured on."""
    name, peak = device_name(), peak_tflops(options)
    rows, rates = [], {}
    for setting, rounds in results.items():
        done = [run for run in rounds if run is not None]
        if not done:
            rows.append((*setting, "out of memory", "", "", "", "", "", ""))
            continue
        rates[setting] = rate = median(run.tokens / run.seconds for run in done)
        useful, computed = (median(getattr(run, field) / run.seconds for run in done) for field in ("real_flop", "padded_flop"))
        shares = [f"{rate_flop / peak / 1e12:.1%}" if peak else "-" for rate_flop in (useful, computed)]
        padding = 1 - done[0].tokens / done[0].padded
        memory = max(run.peak_bytes for run in done) / 2**30
        rows.append((*setting, f"{rate:,.0f}", f"{padding:.1%}", *shares, f"{memory:.2f}", *waits_and_graphs(done)))
    title = (
        f"{name}, torch {torch.__version__}; BERT {options.layers} x {options.width}, global batch {options.batch_size}, "
        f"{options.rounds} rounds of {options.steps} steps; "
        + (f"MFU of {peak:g} TFLOP/s" if peak else "MFU needs --peak-tflops for this GPU")
    )
    header = (
        "precision",
        "compile",
        "activations",
        "batches",
        "tokens/s",
        "padding",
        "MFU",
        "with padding",
        "peak GiB",
        "idle",
    )
    header = (*header, "graphs")
    table = print_table(title, header, rows)
    save(__file__, options, [table], figure(f"BERT {options.layers} x {options.width} on one {name}", rates, table))


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


def figure(what: str, rates: dict[tuple, float], table: dict[str, Any]) -> dict[str, str]:
    """Say how fast the fastest setting is, in the words of its row."""
    if not rates:
        return {}
    fastest = [str(word) for word in max(rates, key=rates.get)]
    row = next(row for row in table["rows"] if row[: len(fastest)] == fastest)
    cells = dict(zip(table["header"], row, strict=True))
    said = f"{cells['tokens/s']} tokens/s, MFU {cells['MFU']}, {cells['peak GiB']} GiB at most"
    return {f"training {what}, {', '.join(fastest)}": said}


if __name__ == "__main__":
    sys.exit(main())
