"""Compare the loss over a large vocabulary from whole logits with the one in chunks: seconds and peak memory of a step.

    python benchmarks/scored_head.py [--words 150000] [--tokens 2048] [--rounds 3]

Goal: a quarter of the memory at most, in no more time. The model is a small Llama: embeddings, one layer and a head of its own,
so nearly all is the head's. "all trained" trains all weights on every token; "answers only" has embeddings and head frozen, as
an adapter on the layers has, and trains on 30 % of the tokens, as chats do.

Each measurement is a process of its own with one thread; the contenders take turns. A step is a forward and a backward pass, of
which the second is timed. "peak MiB" is the growth of the process's largest resident set (ru_maxrss) from the built model on,
gradients included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

from contest import take_turns
from record import parse_options, print_table, save

CONTENDERS = ("whole logits", "chunks")
CASES = ("all trained", "answers only")
ANSWERS = 0.3
FIELDS = ("seconds", "cpu_seconds", "peak_mib", "loss")


def main() -> int:
    options = parse()
    if options.only:
        print(json.dumps(measure(options)))
        return 0
    tables, figures = zip(*(compare(case, options) for case in CASES), strict=True)
    save(__file__, options, tables, dict(figures))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=150_000, help="of the vocabulary (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTENDERS, help="measure one in this process and print it as JSON")
    parser.add_argument("--case", choices=CASES, default=CASES[0], help="for --only")
    return parse_options(parser, {"words": 70_000, "tokens": 256, "width": 16, "rounds": 1})


def compare(case: str, options: argparse.Namespace) -> tuple[dict, tuple[str, str]]:
    """Let the contenders take turns and print their table; return it, and the row of docs/benchmarks.md."""
    runs = take_turns({name: lambda turn, name=name: in_own_process(case, name) for name in CONTENDERS}, options.rounds)
    medians = {name: [median(run[field] for run in found) for field in FIELDS] for name, found in runs.items()}
    (_, cpu, peak, _), (_, chunked_cpu, chunked_peak, _) = medians.values()
    rows = [
        (name, f"{loss:.7f}", f"{seconds:.2f}", f"{cpu_s:.2f}", f"{mib:.0f}", f"{mib / peak:.2f}", f"{cpu_s / cpu:.2f}")
        for name, (seconds, cpu_s, mib, loss) in medians.items()
    ]
    title = f"{case}: {options.tokens} tokens, {options.words:,} words, width {options.width}, float32, one thread"
    table = print_table(title, ("", "loss", "seconds", "CPU s", "peak MiB", "of the memory", "of the CPU s"), rows)
    what = f"loss over {options.words:,} words in chunks against whole logits, {options.tokens} tokens on a CPU, {case}"
    return table, (what, f"{chunked_peak / peak:.2f} of the memory in {chunked_cpu / cpu:.2f} of the time")


def in_own_process(case: str, name: str) -> dict[str, float]:
    """Run this script for one contender and read its line. Later options win, so the caller's own stay in force."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--only", name]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    return json.loads(said.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time one contender's second step, and take its peak memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hftune.models.scored_head import install
    from hftune.tasks.text import head_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 2 * options.width, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=options.words, num_attention_heads=4, initializer_range=0.1, **sizes))
    tokens, labels = torch.randint(0, options.words, (2, 1, options.tokens))
    if options.case == "answers only":
        labels[torch.rand(labels.shape) > ANSWERS] = -100
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    inputs = {"input_ids": tokens, "use_cache": False}
    if options.only == "chunks":
        install(model)
        inputs["targets"] = labels
    before = resident_mib()
    for _ in range(2):
        model.zero_grad()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = head_loss(model(**inputs), labels)
        loss.backward()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    mean = loss.item() / int((labels != -100).sum())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": resident_mib() - before, "loss": mean}


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
