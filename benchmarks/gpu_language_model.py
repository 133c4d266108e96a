"""Measure the language model of recipe wikitext2 on one NVIDIA GPU: tokens a second, MFU and peak memory.

    python benchmarks/gpu_language_model.py [--micro-batch-sizes 20 80 320] [--peak-tflops 989] [--steps 10] [--rounds 2]

The network of the article (4096 wide, 16 heads, 8 layers, 33,278 words, blocks of 35 tokens) on random tokens, a step of one
micro-batch of each size: the article's 20 blocks, and larger ones, as 700 tokens do not fill a GPU. precision no or bf16,
eager, or layers compiled one by one. All of it goes through hftune's DataParallel, loading included. Every setting runs over
its steps once untimed, then timed, then over two of them under torch.profiler: "idle" is the share of that time in which the
GPU computed nothing, an upper bound, as the profiler slows the host down. "graphs" is how many were compiled, plus those again.

MFU is perf/mfu of a training (docs/speed.md): the matrix products of layers and head, forward and backward, over what the GPU
could have done. The peak is --peak-tflops, by default the GPU's dense bf16 peak from NVIDIA's data sheet where hftune knows it,
for float32 rows as well.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from bert_on_reviews import quiet
from contest import take_turns
from gpu import (
    Compilations,
    device_name,
    figure,
    idle_share,
    missing_gpu,
    peak_bytes,
    peak_tflops,
    reset_peak,
    take_steps,
    waits_and_graphs,
)
from record import parse_options, print_table, save
from torch import nn

from hftune.build import Parts, build_model, plan_batches
from hftune.config import Recipe
from hftune.distributed.accelerator import start_accelerator
from hftune.optim import build_optimizer
from hftune.settle import settle_packing
from hftune.strategies.data_parallel import DataParallel
from hftune.tasks import LanguageModeling

Setting = tuple[str, str, int]  # precision, eager or layers, blocks of a micro-batch


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

    def collate(self, examples: list) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(np.stack([example[name] for example in examples])) for name in ("input_ids", "labels")}


def main() -> int:
    options = parse()
    if (why_not := missing_gpu(options)) is not None:
        print(f"benchmarks/gpu_language_model.py {why_not}", file=sys.stderr)
        return 2
    quiet()
    settings: list[Setting] = list(product(options.precision, options.mode, options.micro_batch_sizes))
    with tempfile.TemporaryDirectory() as folder:
        turns = {setting: lambda turn, setting=setting: measure(options, setting, folder) for setting in settings}
        report(options, take_turns(turns, options.rounds))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[20, 80, 320], help="blocks of 35 tokens")
    parser.add_argument("--precision", nargs="+", choices=("no", "bf16"), default=["no", "bf16"])
    parser.add_argument("--mode", nargs="+", choices=("eager", "layers"), default=["eager", "layers"])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, help="dense, of one GPU; needed for MFU on GPUs not known here")
    smoke = {"micro_batch_sizes": [4], "mode": ["eager"], "width": 64, "layers": 1, "steps": 2, "rounds": 1}
    return parse_options(parser, smoke)


def recipe_for(options: argparse.Namespace, setting: Setting, folder: str) -> Recipe:
    """Build recipe wikitext2 with random tokens."""
    precision, compiled, rows = setting
    recipe = Recipe.load("wikitext2", f"output_dir={folder}", f"train.mixed_precision={precision}")
    config = {**recipe.task.model_config, "hidden_size": options.width, "intermediate_size": options.width}
    config["num_hidden_layers"] = options.layers
    recipe.task = RandomTokens(model_config=config, tokenizer="words", num_blocks=rows * options.steps)
    recipe.train.batch_size = recipe.train.micro_batch_size = rows
    recipe.train.compile = compiled == "layers"
    return recipe


@dataclass
class Round:
    """What one setting did in one round."""

    rate: float
    """Tokens a second."""
    flop_rate: float
    peak_bytes: int
    idle: float | None
    compiled: Compilations


def measure(options: argparse.Namespace, setting: Setting, folder: str) -> Round | None:
    """Train one setting alone on the GPU; None where its memory does not suffice."""
    try:
        done = train(options, recipe_for(options, setting, folder))
        print(f"{setting}: {done.rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        return done
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()  # the model is in cycles
        torch.compiler.reset()
        torch.cuda.empty_cache()


def train(options: argparse.Namespace, recipe: Recipe) -> Round:
    began = time.time()
    datasets = recipe.task.datasets()
    data = datasets["train"]
    parts = Parts(datasets, plan_batches(recipe, data), build_model(recipe), options.steps)
    strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
    settle_packing(recipe, strategy, parts)
    strategy.prepare(parts.model, build_optimizer(parts.model, recipe))

    def run(num_steps: int = options.steps) -> None:
        take_steps(strategy, recipe, data, parts.plan, num_steps)

    run()
    reset_peak()
    started = time.perf_counter()
    run()
    seconds, peak = time.perf_counter() - started, peak_bytes()
    lengths = recipe.task.lengths(data)
    tokens, flop = int(lengths.sum()), parts.arithmetic.flops(lengths, num_items=int(lengths.sum()))
    return Round(tokens / seconds, flop / seconds, peak, idle_share(lambda: run(2)), Compilations.since(began))


def report(options: argparse.Namespace, results: dict[Setting, list[Round | None]]) -> None:
    """Print medians over the rounds, headed by what was measured on."""
    name, peak = device_name(), peak_tflops(options)
    rows, rates = [], {}
    for (precision, compiled, size), rounds in results.items():
        done = [run for run in rounds if run is not None]
        if not done:
            rows.append((precision, compiled, size, "out of memory", "", "", "", ""))
            continue
        rates[precision, compiled, size] = rate = median(run.rate for run in done)
        share = f"{median(run.flop_rate for run in done) / peak / 1e12:.1%}" if peak else "-"
        memory = max(run.peak_bytes for run in done) / 2**30
        rows.append((precision, compiled, size, f"{rate:,.0f}", share, f"{memory:.2f}", *waits_and_graphs(done)))
    title = (
        f"{name}, torch {torch.__version__}; TransformerLM {options.layers} x {options.width}, blocks of 35, {options.rounds} "
        f"rounds of {options.steps} steps; " + (f"MFU of {peak:g} TFLOP/s" if peak else "MFU needs --peak-tflops for this GPU")
    )
    header = ("precision", "compile", "blocks a step", "tokens/s", "MFU", "peak GiB", "idle", "graphs")
    table = print_table(title, header, rows)
    what = f"TransformerLM {options.layers} x {options.width} on one {name}"
    save(__file__, options, [table], figure(what, rates, table))


if __name__ == "__main__":
    sys.exit(main())
