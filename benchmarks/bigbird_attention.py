"""Compare transformers' BigBird encoder with ours, forward and backward: seconds, peak memory, and the longest batch.

    python benchmarks/bigbird_attention.py [--tokens 2048 4096] [--rounds 3] [--device cuda]
    python benchmarks/bigbird_attention.py --architecture prefix_lm [--tokens 1024 2048 4096]
    python benchmarks/bigbird_attention.py --longest [--device cuda]

Goals: twice as fast as transformers' block-sparse attention on a CPU and 3 times on a GPU, with a third of its memory. Each
measurement is a process of its own, because a process's peak memory never goes down again; contenders take turns. "seconds"
are those of the fastest of --steps steps after the first, "CPU s" those of all threads, which say more where the machine is
shared. "layer" is one self-attention alone; "encoder" has feed-forward layers, whose activations neither attention can save.

"prefix LM" is the other architecture of titles: layers of the same size with full attention, over a source and a title of 64
tokens, and the logits of the title. In "prefix LM, masked" each layer gets a T x T mask, as before 0.3. Our models have the
dropout that they are trained with (``hftune.models.dropout``), transformers' encoder torch's.

"peak MiB" on a CPU is the growth of the process's largest resident set (ru_maxrss) from the built model to the last step, so it
holds activations and gradients, but neither Python nor the weights; on a GPU, what PyTorch's allocator held at most, weights
included.

--longest trains an encoder of BigBird's base size (12 layers of 768, AdamW) and says how much fits in 16 GiB, block-sparse:
rows of 4096 tokens, and tokens of a single row. On a GPU both are searched for; a step that ran, with at most that much
allocated, is what fits. On a CPU they are extrapolated from the resident sets of whole processes at 2048, 3072 and 4096 tokens
of one row, by the steeper of the two steps; nothing is said where these differ by more than a quarter of the growth.
The CPU's figures hold for CPUs only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from contest import take_turns
from record import parse_options, print_table, save

CONTENDERS = ("transformers, sparse", "hftune, sparse", "hftune, flex", "transformers, full", "hftune, full")
PREFIX_LMS = ("prefix LM, masked", "prefix LM")
TITLE = 64  # tokens
FIELDS = ("seconds", "cpu_seconds", "peak_mib")
BUDGET_MIB = 16 * 1024
BASE = {"width": 768, "layers": 12, "vocab": 50358}
ON_A_LINE = 0.25  # share of the growth by which its two halves may differ


def main() -> int:
    options = parse()
    if options.device == "cuda" and not gpu_found():
        print("--device cuda needs a machine with an NVIDIA GPU and a CUDA build of PyTorch.", file=sys.stderr)
        return 2
    if options.only:
        print(json.dumps(measure(options)))
    elif options.longest:
        longest(options)
    else:
        contests = [
            compare(part, tokens, options)
            for part in options.parts
            for tokens in options.tokens
            if contenders(options, part)  # a prefix LM has no part "layer"
        ]
        tables, figures = zip(*contests, strict=True)
        save(__file__, options, tables, {what: figure for parts in figures for what, figure in parts.items()})
    return 0


def gpu_found() -> bool:
    import torch

    return torch.cuda.is_available()


def contenders(options: argparse.Namespace, part: str) -> list[str]:
    """FlexAttention has no backward pass on a CPU (torch 2.13)."""
    names = [name for name in CONTENDERS if "encoder_decoder" in options.architecture]
    names += [name for name in PREFIX_LMS if "prefix_lm" in options.architecture and part == "encoder"]
    names = [name for name in names if name in (options.contenders or names)]
    return [name for name in names if options.device == "cuda" or not name.endswith("flex")]


def compare(part: str, tokens: int, options: argparse.Namespace) -> tuple[dict, dict[str, str]]:
    """Let all contenders take turns and print their table; return it, and the rows of README's table."""
    results = take_turns(
        {name: lambda turn, name=name: in_own_process(part, tokens, name) for name in contenders(options, part)},
        options.rounds,
    )
    medians = {name: [median(run[field] for run in runs) for field in FIELDS] for name, runs in results.items()}
    seconds, cpu_seconds, peak = next(iter(medians.values()))
    rows = [
        (name, f"{s:.3f}", f"{cpu:.3f}", f"{mib:.0f}", f"{seconds / s:.2f}", f"{cpu_seconds / cpu:.2f}", f"{mib / peak:.2f}")
        for name, (s, cpu, mib) in medians.items()
    ]
    layers = "one layer" if part == "layer" else f"{options.layers} layers"
    title = (
        f"{part}, {tokens} tokens, batch 1, width {options.width}, {layers}, {where(options)}, training mode; "
        f"median of {options.rounds} rounds"
    )
    table = print_table(title, ("", "seconds", "CPU s", "peak MiB", "times as fast", "by CPU s", "of its memory"), rows)
    figures = {}
    for (theirs, ours), what in (
        (CONTENDERS[:2], f"block-sparse attention of {tokens} tokens against transformers' BigBird"),
        (PREFIX_LMS, f"prefix LM of {tokens} tokens without a mask against one with"),
    ):
        if tokens == max(options.tokens) and {theirs, ours} <= {*medians}:
            (seconds, _, peak), (s, _, mib) = medians[theirs], medians[ours]
            size = "one layer" if part == "layer" else f"{options.layers} layers with feed-forward"
            figures[f"{what}, forward and backward: {size}, {where(options)}"] = (
                f"{seconds / s:.1f} x as fast in {mib / peak:.2f} of the memory"
            )
    return table, figures


def where(options: argparse.Namespace) -> str:
    precision = "bf16" if options.bf16 else "float32"
    return f"{options.threads} threads, {precision}" if options.device == "cpu" else f"GPU, {precision}"


def longest(options: argparse.Namespace) -> None:
    """Print how many rows of 4096 tokens, and how many tokens of one row, each block-sparse contender can train on."""
    find = longest_on_gpu if options.device == "cuda" else longest_on_cpu
    rows = [(name, *find(name)) for name in contenders(options, "training") if not name.endswith("full")]
    title = f"base-size encoder in {BUDGET_MIB // 1024} GiB with AdamW, {where(options)}; "
    title += "measured" if options.device == "cuda" else "EXTRAPOLATED from 2048, 3072, 4096 tokens of one row"
    table = print_table(title, ("", "rows of 4096", "tokens of one row", "MiB measured"), rows)
    if options.output:  # not into the file of the tables that the script makes by default
        save(__file__, options, [table], {})


def longest_on_gpu(name: str) -> tuple[str, str, str]:
    """Double what fits until it does not, then halve the gap."""

    def peak(rows: int, tokens: int) -> float:
        return in_own_process("training", tokens, name, rows)["peak_mib"]

    def most(fits: Callable[[int], bool]) -> int:
        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 32):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    rows = most(lambda rows: peak(rows, 4096) <= BUDGET_MIB)
    tokens = 1024 * most(lambda thousands: peak(1, 1024 * thousands) <= BUDGET_MIB)
    return f"{rows}", f"{tokens}", f"{peak(rows, 4096):.0f}" if rows else "-"


def longest_on_cpu(name: str) -> tuple[str, str, str]:
    """Go on with the steeper of two steps between three measurements; say nothing where the steps are too unlike."""
    peaks = [in_own_process("training", tokens, name)["peak_mib"] for tokens in (2048, 3072, 4096)]
    measured = ", ".join(f"{peak:.0f}" for peak in peaks)
    steps = [peaks[1] - peaks[0], peaks[2] - peaks[1]]
    if abs(steps[1] - steps[0]) > ON_A_LINE * sum(steps):
        return "not linear", "not linear", measured
    tokens = 4096 + int((BUDGET_MIB - peaks[2]) / max(steps) * 1024)
    return f"{tokens // 4096}", f"{tokens // 64 * 64}", measured


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--width", type=int, default=256, help="of the model; a head has 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="in autocast; default float32")
    parser.add_argument("--longest", action="store_true", help="what fits in 16 GiB, instead of the tables")
    parser.add_argument("--parts", nargs="+", choices=("layer", "encoder"), default=["layer", "encoder"])
    both = ("encoder_decoder", "prefix_lm")
    parser.add_argument("--architecture", nargs="+", choices=both, default=both, help="whose stacks are measured (both)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS + PREFIX_LMS, help="to leave some out")
    parser.add_argument("--only", choices=CONTENDERS + PREFIX_LMS, help="measure one in this process and print it as JSON")
    parser.add_argument("--part", choices=("layer", "encoder", "training"), default="encoder", help="for --only")
    parser.add_argument("--rows", type=int, default=1, help="for --only --part training")
    smoke = {
        "tokens": [512],
        "width": 64,
        "layers": 1,
        "steps": 1,
        "rounds": 1,
        "parts": ["encoder"],
        "contenders": (*CONTENDERS[:2], PREFIX_LMS[1]),
    }
    return parse_options(parser, smoke)


def in_own_process(part: str, tokens: int, name: str, rows: int = 1) -> dict[str, float]:
    """Run this script for one contender and read its line. Later options win, so the caller's own stay in force."""
    case = ["--part", part, "--tokens", str(tokens), "--only", name, "--rows", str(rows)]
    command = [sys.executable, __file__, *sys.argv[1:], *case]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    return json.loads(said.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time one contender's steps and take its peak memory; a GPU that is too small makes the latter infinite."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    on_gpu, training = options.device == "cuda", options.part == "training"
    with torch.device(options.device):
        step = build_training(options) if training else build(options)
    before = 0.0 if training else resident_mib()
    seconds, cpu_seconds = [], []
    try:
        for _ in range(2 if training else options.steps + 1):
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    except torch.OutOfMemoryError:
        return {"seconds": math.inf, "cpu_seconds": math.inf, "peak_mib": math.inf}
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else resident_mib() - before
    return {"seconds": min(seconds[1:]), "cpu_seconds": min(cpu_seconds[1:]), "peak_mib": peak}


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build_model(options: argparse.Namespace, width: int, layers: int, vocab: int):
    """Return the encoder or the prefix LM of ``options.only``, in training mode."""
    from transformers import BigBirdConfig, BigBirdModel

    from hftune.models.bigbird import BlockSparseBigBirdConfig, BlockSparseBigBirdModel, PrefixLM, PrefixLMConfig
    from hftune.models.dropout import replace_dropout

    whose, _, kind = options.only.partition(", ")
    config = BigBirdConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=max(4096, *options.tokens),
        attention_type="original_full" if kind == "full" else "block_sparse",
    )
    if whose == "transformers":
        return BigBirdModel(config, add_pooling_layer=False).train()
    if whose == "prefix LM":
        model = PrefixLM(PrefixLMConfig.warm_start(config))
        if kind == "masked":
            model.set_attn_implementation("sdpa")
    else:
        kernel = "flex" if kind == "flex" else "gathered"
        model = BlockSparseBigBirdModel(BlockSparseBigBirdConfig.warm_start(config, block_sparse_kernel=kernel))
    replace_dropout(model)
    return model.train()


def build_training(options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that trains a base-size encoder for one step."""
    import torch

    model = build_model(options, **BASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, BASE["vocab"], (options.rows, *options.tokens))

    def step() -> None:
        one_step(options, model, lambda: model(ids).last_hidden_state)
        optimizer.step()

    return step


def build(options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that does one forward and backward pass of ``options.only``."""
    import torch
    from transformers import BigBirdModel

    model = build_model(options, options.width, 1 if options.part == "layer" else options.layers, vocab=1000)
    (tokens,) = options.tokens
    if options.only in PREFIX_LMS:
        ids, types = torch.randint(0, 1000, (1, tokens)), (torch.arange(tokens) >= tokens - TITLE).long()[None]
        return lambda: one_step(options, model, lambda: model(ids, token_type_ids=types, logits_to_keep=TITLE).logits)
    if options.part == "encoder":
        ids = torch.randint(0, 1000, (1, tokens))
        return lambda: one_step(options, model, lambda: model(ids).last_hidden_state)
    hidden = torch.randn(1, tokens, options.width, requires_grad=True)
    attention = model.encoder.layer[0].attention.self
    extra = {}
    if options.only == CONTENDERS[0]:
        names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
        masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, tokens), model.config.block_size)
        extra = dict(zip(names, masks, strict=True))
        extra["to_blocked_mask"] = extra["from_blocked_mask"]
    return lambda: one_step(options, attention, lambda: attention(hidden, **extra)[0])


def one_step(options: argparse.Namespace, model, forward) -> None:
    """Forward and backward, with fresh gradients."""
    import torch

    model.zero_grad()
    with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
        loss = forward().float().square().mean()
    loss.backward()


if __name__ == "__main__":
    sys.exit(main())
