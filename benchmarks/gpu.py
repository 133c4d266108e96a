"""Measure a bert-base-sized BERT on one NVIDIA GPU: tokens a second, MFU and peak memory, setting by setting.

    python benchmarks/gpu.py [--data FOLDER] [--peak-tflops 989] [--steps 10] [--rounds 2]

Settings: precision no or bf16, torch.compile off or on, gradient checkpointing off or on, and the batch padded to 512 tokens in
micro-batches of --rows rows, or cut by hftune's plan into micro-batches of at most as many padded tokens. --only keeps the
settings with these words, such as --only bf16 plan. All of them train through hftune's DataParallel on the same samples.

Tokens are real ones, padding not counted. Batches are collated beforehand, so that the GPU is measured and not the CPU; every
setting runs over the same steps once untimed (kernels are chosen and compiled then), and then timed. Settings take turns in
rounds, each on a fresh model alone on the GPU. Peak memory is what PyTorch's allocator held at most in the timed steps.

MFU is the model's own arithmetic over what the GPU could have done: for a text of t tokens, forward and backward of L layers of
width D with an intermediate width I take 3 L (2 t (4 D^2 + 2 D I) + 4 t^2 D) FLOP. Embeddings, norms, softmax, head,
recomputation and padding are left out; the column after it counts padding as work. The peak is --peak-tflops, by default the
GPU's dense bf16 peak from NVIDIA's data sheet where this script knows it, for float32 rows as well.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from bert_on_reviews import add_model_options, pad_to, quiet, recipe_of, review_task
from contest import take_turns
from record import parse_options, print_table, save
from torch import Tensor

from hftune.build import build_model, load_datasets, plan_batches
from hftune.config import Recipe
from hftune.distributed.accelerator import on_cpu, start_accelerator
from hftune.optim import build_optimizer
from hftune.strategies.data_parallel import DataParallel
from hftune.tasks import SequenceClassification

PEAK_TFLOPS = {"H200": 989, "H100 80GB HBM3": 989, "A100": 312}
WORDS = (("no", "bf16"), ("eager", "compiled"), ("stored", "recomputed"), ("padded", "plan"))
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, layers=12, width=768)
    parser.add_argument("--batch-size", type=int, default=256, help="global")
    parser.add_argument("--rows", type=int, default=32, help="rows of a padded micro-batch; the plan's tokens are 512 x rows")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, help="dense, of one GPU; needed for MFU on GPUs not known here")
    words = sorted({word for pair in WORDS for word in pair})
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


def recipe_for(options: argparse.Namespace, setting: Setting, folder: str) -> Recipe:
    precision, compiled, recomputed, batches = setting
    bound = {"micro_batch_size": options.rows} if batches == "padded" else {"micro_batch_tokens": 512 * options.rows}
    return recipe_of(
        review_task(options, PaddedReviews if batches == "padded" else SequenceClassification),
        folder,
        batch_size=options.batch_size,
        mixed_precision=precision,
        compile=compiled == "compiled",
        gradient_checkpointing=recomputed == "recomputed",
        **bound,
    )


def measure(options: argparse.Namespace, setting: Setting, folder: str) -> Round | None:
    """Train one setting alone on the GPU; None where its memory does not suffice."""
    try:
        return train(options, recipe_for(options, setting, folder))
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()  # the model is in cycles
        torch.compiler.reset()
        torch.cuda.empty_cache()


def train(options: argparse.Namespace, recipe: Recipe) -> Round:
    data = load_datasets(recipe)["train"]
    data = data.select(np.random.default_rng(0).integers(len(data), size=options.steps * options.batch_size))
    model = build_model(recipe)
    strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
    strategy.prepare(model, build_optimizer(model, recipe))
    batches = list(strategy.batches(data, plan_batches(recipe, data).epoch(0), first_step=0, num_workers=0))

    def run() -> None:
        for step, batch in enumerate(batches):
            strategy.forward_backward(batch, recipe.seed, step)
            strategy.clip_grad_norm(recipe.train.clip_norm)
            strategy.optimizer_step(recipe.train.lr)
        synchronize()

    run()
    reset_peak()
    began = time.perf_counter()
    run()
    seconds, peak = time.perf_counter() - began, peak_bytes()
    masks = [loaded["attention_mask"] for batch in batches for loaded in batch.batches]
    real = np.concatenate([mask.sum(1).cpu().numpy() for mask in masks])
    padded = np.concatenate([np.full(len(mask), mask.shape[1]) for mask in masks])
    real_flop, padded_flop = flop(options, real), flop(options, padded)
    return Round(seconds, int(real.sum()), int(padded.sum()), real_flop, padded_flop, peak)


def flop(options: argparse.Namespace, lengths: np.ndarray) -> float:
    """Count forward and backward over texts of these lengths, by the formula above."""
    width, tokens = options.width, lengths.astype(np.float64)
    intermediate = 4 * width
    forward = 2 * tokens * (4 * width**2 + 2 * width * intermediate) + 4 * tokens**2 * width
    return float(3 * options.layers * forward.sum())


def report(options: argparse.Namespace, results: dict[Setting, list[Round | None]]) -> None:
    """Print medians over the rounds, headed by what was measured on."""
    name = device_name()
    peak = options.peak_tflops or next((known for part, known in PEAK_TFLOPS.items() if part in name), None)
    rows, rates = [], {}
    for setting, rounds in results.items():
        done = [run for run in rounds if run is not None]
        if not done:
            rows.append((*setting, "out of memory", "", "", "", ""))
            continue
        rates[setting] = rate = median(run.tokens / run.seconds for run in done)
        useful, computed = (median(getattr(run, field) / run.seconds for run in done) for field in ("real_flop", "padded_flop"))
        shares = [f"{rate_flop / peak / 1e12:.1%}" if peak else "-" for rate_flop in (useful, computed)]
        padding = 1 - done[0].tokens / done[0].padded
        memory = max(run.peak_bytes for run in done) / 2**30
        rows.append((*setting, f"{rate:,.0f}", f"{padding:.1%}", *shares, f"{memory:.2f}"))
    title = (
        f"{name}, torch {torch.__version__}; BERT {options.layers} x {options.width}, global batch {options.batch_size}, "
        f"{options.rounds} rounds of {options.steps} steps; "
        + (f"MFU of {peak:g} TFLOP/s" if peak else "MFU needs --peak-tflops for this GPU")
    )
    header = ("precision", "compile", "activations", "batches", "tokens/s", "padding", "MFU", "with padding", "peak GiB")
    table = print_table(title, header, rows)
    save(__file__, options, [table], figure(f"BERT {options.layers} x {options.width} on one {name}", rates, table))


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
