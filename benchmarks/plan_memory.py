"""Compare the peak memory that ``hftune plan`` estimates with what training takes, for three models and four pipelines.

    python benchmarks/plan_memory.py [--only bert prefix_lm encoder_decoder gpipe 1f1b interleaved zero_bubble] [--processes 2]

estimate: ``hftune.planning.plan.make_plan``: no weights, no values; the heaviest micro-batches of the first epoch are counted.
measured: a fresh process (two, talking over Gloo, where --processes says 2) trains the steps with these micro-batches through
hftune's strategy: forward, backward, clipping, optimizer. The step before them makes the optimizer's state. Of DataParallel's
processes the one with the most is shown; a pipeline's have unequal parts of the model, and each is shown.

On a CPU that is the highest resident memory the system counted (VmHWM, set back through /proc/self/clear_refs) minus the
resident memory before the model is built. A tiny model of the same kind is trained before that, so that libraries, kernels
and threads, which are loaded at first use, do not count as the model's. glibc is told to give every block of 64 KiB and more
back to the system when it is freed (MALLOC_MMAP_THRESHOLD_, MALLOC_ARENA_MAX=1): only so is resident memory that of the
tensors. The last column is the same without this: what glibc keeps for later, and the holes in its heap, come on top.

On an NVIDIA GPU it is ``torch.cuda.max_memory_allocated``, after ``reset_peak_memory_stats`` before the model is built: tensors
alone, without the CUDA context and what the allocator keeps for later.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from record import parse_options, print_table, save

from hftune.batch_plan import BatchPlan, MicroBatch
from hftune.build import build_model, choose_strategy, load_datasets, plan_batches
from hftune.config import Recipe
from hftune.distributed.accelerator import on_cpu
from hftune.distributed.session import Session
from hftune.optim import build_optimizer
from hftune.planning.plan import make_plan, planned_batches, survey
from hftune.tracking.console import hide_progress_bars

CONFIG = (
    "hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads}, intermediate_size: {inner}, "
    "max_position_embeddings: 640{more}}}"
)
COMMON = ("train.batch_size=32", "train.micro_batch_tokens=2048")
PIPELINE = ("train.batch_size=32", "train.micro_batch_size=4", "train.optimizer=adamw", "task.block_length=128")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MODELS = {  # shipped recipe, its task.model_config, what that says beside the sizes, overrides
    "bert": ("yelp_demo", "task.model_config={{model_type: bert, " + CONFIG, "", *COMMON),
    "prefix_lm": ("bigbird_demo", "task.model_config={{" + CONFIG, "", *COMMON),
    "encoder_decoder": (
        *("bigbird_demo", "task.model_config={{" + CONFIG, ", block_size: 16"),
        *(*COMMON, "task.architecture=encoder_decoder"),
    ),
} | {
    name: (
        *("wikitext2_demo", "task.model_config={{model_type: transformer_lm, dropout: 0.1, " + CONFIG, "", *PIPELINE),
        *("parallel.pipeline_stages=2", f"parallel.schedule={name}"),
    )
    for name in SCHEDULES
}
SIZES = {name: {"width": 384, "layers": 8, "heads": 6, "inner": 1536} for name in SCHEDULES} | {
    "bert": {"width": 768, "layers": 8, "heads": 12, "inner": 3072},
    "prefix_lm": {"width": 512, "layers": 6, "heads": 8, "inner": 2048},
    "encoder_decoder": {"width": 512, "layers": 6, "heads": 8, "inner": 2048},
}
SMOKE_SIZES = {name: {"width": 128, "layers": 2, "heads": 2, "inner": 512} for name in SIZES}
TINY = {"width": 32, "layers": 4, "heads": 2, "inner": 64}
TAMED = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
TOLERANCE = 0.15


def main() -> int:
    options = parse()
    if options.smoke:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sizes = SMOKE_SIZES if options.smoke else SIZES
    if options.measure:
        (options.into / os.environ.get("RANK", "0")).write_text(
            str(measure(options.measure, sizes[options.measure], options.smoke))
        )
        return 0
    rows, ratios = [], []
    device = "cpu" if on_cpu() else "cuda"
    hide_progress_bars()
    for name in options.only:
        for count in options.processes:
            recipe = recipe_of(name, sizes[name], options.smoke)
            if count % recipe.parallel.pipeline_stages:
                continue
            plan = make_plan(recipe, count, device=device)
            measured = run(name, count, options.smoke, TAMED)
            untamed = run(name, count, options.smoke, {}) if device == "cpu" and not options.smoke else [0] * count
            compared = [(count, plan.memory.peak_bytes, max(measured), max(untamed))]
            if plan.pipeline is not None:
                peaks = [place.peak_bytes for place in plan.pipeline.places]
                compared = zip([f"{place} of {count}" for place in range(count)], peaks, measured, untamed, strict=True)
            for which, *peaks in compared:
                ratios.append(peaks[0] / peaks[1])
                size = f"{plan.parameters / 1e6:.1f} M"
                batch = f"{plan.memory.samples} x {plan.memory.longest}"
                spelled = [f"{value / 2**20:.0f}" for value in peaks]
                rows.append((name, size, which, batch, *spelled[:2], f"{ratios[-1]:.3f}", spelled[2]))
    title = f"Peak memory of a process on {device} in MiB (goal: within {TOLERANCE:.0%})"
    heads = ("model", "parameters", "processes", "micro-batch", "estimate", "measured", "ratio", "with glibc's defaults")
    table = print_table(title, heads, rows)
    names = dict.fromkeys(row[0] for row in rows)
    what = f"peak memory of a process as planned, beside the measured peak on {device}: {', '.join(names)}"
    save(__file__, options, [table], {what: f"{min(ratios):.2f} to {max(ratios):.2f} of it, in {len(rows)} settings"})
    return 0 if options.smoke else int(max(abs(ratio - 1) for ratio in ratios) > TOLERANCE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--measure", choices=list(MODELS), help=argparse.SUPPRESS)  # for the processes that it starts
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parse_options(parser, smoke={"only": ["bert"], "processes": [1]})


def recipe_of(name: str, size: dict[str, int], smoke: bool) -> Recipe:
    """Return the recipe of a model of this size."""
    source, config, more, *words = MODELS[name]
    return Recipe.load(source, config.format(**size, more=more), *words, *(["task.max_train_samples=64"] if smoke else []))


def run(name: str, num_processes: int, smoke: bool, environment: dict[str, str]) -> list[int]:
    """Train in fresh processes; return the peak of each, in bytes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "--measure", name, "--into", folder, *(["--smoke"] if smoke else [])]
        command = [sys.executable, *(launcher if num_processes > 1 else []), *script]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return [int((Path(folder) / str(rank)).read_text()) for rank in range(num_processes)]


def measure(name: str, size: dict[str, int], smoke: bool) -> int:
    """Train a tiny model and then one of this size; return the bytes that the second took at most."""
    hide_progress_bars()
    tiny, recipe = recipe_of(name, TINY, smoke), recipe_of(name, size, smoke)
    datasets = {id(one): load_datasets(one)["train"] for one in (tiny, recipe)}
    with Session(recipe) as session:
        accelerator = session.join()
        for one in (tiny, recipe):
            gc.collect()
            before = reset_peak()
            strategy = choose_strategy(accelerator, one, session.progress)
            model = build_model(one)
            batches, collate = planned_batches(one, plan_batches(one, datasets[id(one)]), model)
            strategy.collate_packed = collate if batches.packed else None
            steps = heavy_steps(one, batches, accelerator.num_processes)
            strategy.prepare(model, build_optimizer(model, one))
            strategy.warm_up(datasets[id(one)], steps[0][0])
            for step, batch in enumerate(strategy.batches(datasets[id(one)], steps, num_workers=0)):
                strategy.forward_backward(batch, one.seed, step)
                strategy.clip_grad_norm(1.0)
                strategy.optimizer_step(1e-5)
                strategy.sharding.clear_gradient()
            peak = read_peak() - before
            del strategy, model, batch
            accelerator.free_memory()
        return peak


def heavy_steps(recipe: Recipe, batches: BatchPlan, num_processes: int) -> list[list[MicroBatch]]:
    """Return the first step of the epoch, and the steps with the micro-batches that the plan takes for the heaviest."""
    order, parallel = batches.epoch(0), recipe.parallel
    found = survey(batches, batches.num_steps, num_processes // parallel.pipeline_stages, parallel)
    first = {int(candidate.parts[0].samples[0]) for candidate in found.heaviest}
    return [order[0], *(step for step in order if first & {int(micro_batch.samples[0]) for micro_batch in step})]


def reset_peak() -> int:
    """Begin to look for the peak; return the bytes taken now."""
    if not on_cpu():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def read_peak() -> int:
    """Return the most bytes that were taken at once since ``reset_peak``."""
    return resident("VmHWM") if on_cpu() else torch.cuda.max_memory_allocated()


def resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
