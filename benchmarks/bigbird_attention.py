"""Compare transformers' BigBird encoder with ours, forward and backward on the CPU: seconds and peak memory.

    python benchmarks/bigbird_attention.py [--tokens 2048 4096] [--rounds 3]

Goals: 1.5 times as fast as transformers' block-sparse attention, with a third of its memory. Each measurement is a process of
its own, because a process's peak memory never goes down again; contenders take turns. "peak MiB" is the growth of the
process's largest resident set (ru_maxrss) from the built model to the last step, so it holds activations and gradients, but
neither Python nor the weights. "seconds" are those of the fastest of --steps steps after the first, "CPU s" those of all
threads, which say more where the machine is shared.
"layer" is one self-attention alone; "encoder" has feed-forward layers, whose activations neither attention can save.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from contest import print_table, take_turns

CONTENDERS = ("transformers, sparse", "hftune, sparse", "transformers, full", "hftune, full")
FIELDS = ("seconds", "cpu_seconds", "peak_mib")


def main() -> None:
    options = parse()
    if options.only:
        print(json.dumps(measure(options)))
        return
    for part in ("layer", "encoder"):
        for tokens in options.tokens:
            compare(part, tokens, options)


def compare(part: str, tokens: int, options: argparse.Namespace) -> None:
    """Let all contenders take turns and print their table."""
    results = take_turns(
        {name: lambda turn, name=name: in_own_process(part, tokens, name) for name in CONTENDERS}, options.rounds
    )
    medians = {name: [median(run[field] for run in runs) for field in FIELDS] for name, runs in results.items()}
    seconds, cpu_seconds, peak = medians[CONTENDERS[0]]
    rows = [
        (name, f"{s:.2f}", f"{cpu:.2f}", f"{mib:.0f}", f"{seconds / s:.2f}", f"{cpu_seconds / cpu:.2f}", f"{mib / peak:.2f}")
        for name, (s, cpu, mib) in medians.items()
    ]
    layers = "one layer" if part == "layer" else f"{options.layers} layers"
    title = (
        f"{part}, {tokens} tokens, batch 1, width {options.width}, {layers}, {options.threads} threads, training mode; "
        f"median of {options.rounds} rounds"
    )
    print_table(title, ("", "seconds", "CPU s", "peak MiB", "times as fast", "by CPU s", "of its memory"), rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--width", type=int, default=256, help="of the model; a head has 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTENDERS, help="measure one in this process and print it as JSON")
    parser.add_argument("--part", choices=("layer", "encoder"), default="encoder", help="for --only")
    return parser.parse_args()


def in_own_process(part: str, tokens: int, name: str) -> dict[str, float]:
    """Run this script for one contender and read its line. Later options win, so the caller's own stay in force."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--tokens", str(tokens), "--only", name]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    return json.loads(said.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time forward and backward of one contender."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    step = build(options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, cpu_seconds = [], []
    for _ in range(options.steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(seconds[1:]), "cpu_seconds": min(cpu_seconds[1:]), "peak_mib": (peak - before) / 1024}


def build(options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that does one forward and backward pass of ``options.only``."""
    import torch
    from transformers import BigBirdConfig, BigBirdModel

    from hftune.models.bigbird import BlockSparseBigBirdConfig, BlockSparseBigBirdModel

    whose, kind = options.only.split(", ")
    config = BigBirdConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_hidden_layers=1 if options.part == "layer" else options.layers,
        num_attention_heads=options.width // 64,
        intermediate_size=4 * options.width,
        attention_type={"sparse": "block_sparse", "full": "original_full"}[kind],
    )
    if whose == "transformers":
        model = BigBirdModel(config, add_pooling_layer=False)
    else:
        model = BlockSparseBigBirdModel(BlockSparseBigBirdConfig.warm_start(config))
    model.train()
    (tokens,) = options.tokens
    if options.part == "encoder":
        ids = torch.randint(0, 1000, (1, tokens))
        return lambda: one_step(model, lambda: model(ids).last_hidden_state)
    hidden = torch.randn(1, tokens, options.width, requires_grad=True)
    attention = model.encoder.layer[0].attention.self
    extra = {}
    if options.only == CONTENDERS[0]:
        names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
        masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, tokens), config.block_size)
        extra = dict(zip(names, masks, strict=True))
        extra["to_blocked_mask"] = extra["from_blocked_mask"]
    return lambda: one_step(attention, lambda: attention(hidden, **extra)[0])


def one_step(model, forward) -> None:
    """Forward and backward, with fresh gradients."""
    model.zero_grad()
    forward().square().mean().backward()


if __name__ == "__main__":
    main()
