"""Measure what a long sample costs a process in training where several share its tokens out (``parallel.context``), on CPUs.

    python benchmarks/long_context.py [--tokens 32768] [--processes 1 2 4]

Goal: on 4 processes at most 0.35 of one's. It is the anonymous memory of the fullest process at its peak in a step, beyond what
it had before the step (RssAnon in /proc, looked at every 5 ms; Linux only): the activations and what is computed from them. The
model is a small new Llama, so that a step of this length ends within minutes. Three steps; the last two are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import start
from large_models import peak_mib
from record import parse_options, print_table, save

from hftune import Callback, Recipe, train

MOST, SPLITS = 0.35, {"train": 3, "eval": 1}


def main() -> None:
    options = parse()
    if options.result:
        measure(options)
        return
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    rows, figures, alone = [], {}, 0.0
    with tempfile.TemporaryDirectory() as name:
        for split, blocks in SPLITS.items():
            text = " ".join(f"word{index * index % 499}" for index in range(blocks * options.tokens))
            Path(name, f"{split}.jsonl").write_text(json.dumps({"text": text}))
        for processes in options.processes:
            given = ("tokens", "width", "layers")
            words = [word for key in given for word in (f"--{key}", str(getattr(options, key)))]
            start(processes, [__file__, *words, "--result", str(Path(name, "found"))])
            found = [json.loads(path.read_text()) for path in Path(name).glob("found-[0-9]*")]
            peak, seconds, losses = (max(one[key] for one in found) for key in ("peak", "seconds", "losses"))
            shutil.rmtree(Path(name, "found-run"))
            alone = alone or peak
            rows.append([str(processes), f"{peak:,.0f}", f"{peak / alone:.2f}", f"{seconds:.3g}", f"{losses[-1]:.6f}"])
            figures[f"memory of a sample of {options.tokens:,} tokens on {processes} processes, of that on one"] = rows[-1][2]
    header = ["processes", "peak MiB", "of one", "seconds", "loss"]
    title = f"a step of {options.tokens:,} tokens (goal: at most {MOST} of one's memory on 4 processes)"
    save(__file__, options, [print_table(title, header, rows)], figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a sample (default %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=128, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default %(default)s)")
    parser.add_argument("--result", help="be one of the processes, and write there what was measured")
    return parse_options(parser, {"tokens": 2048, "processes": [1, 2], "width": 64, "layers": 2})


def measure(options: argparse.Namespace) -> None:
    """Be one of the processes: train three steps, and write down the peak and the seconds of the last two."""
    steps: list[dict[str, float]] = []

    class Watch(Callback):
        on_all_processes = True

        def on_step_begin(self, begin: Any) -> None:
            steps.append({"began": time.perf_counter(), "first": len(seen)})

        def on_step(self, step: Any) -> None:
            peak = max(seen[steps[-1]["first"] :]) - seen[steps[-1]["first"]]
            steps[-1] |= {"peak": peak, "seconds": time.perf_counter() - steps[-1]["began"], "loss": step.loss}

    with peak_mib() as seen:
        shape = f"hidden_size: {options.width}, intermediate_size: {4 * options.width}, num_hidden_layers: {options.layers}"
        shape += f", num_attention_heads: 4, max_position_embeddings: {options.tokens}"
        files = [f"task.data_files.{split}={Path(options.result).parent}/{split}.jsonl" for split in SPLITS]
        words = (
            *(f"task.model_config={{model_type: llama, {shape}}}", "task.model=null", "task.tokenizer=words"),
            *("task.dataset=json", *files, f"task.block_length={options.tokens}", "task.generation=null"),
            *("train.batch_size=1", "train.micro_batch_size=1", "train.max_steps=3", "train.log_every=1"),
            *(f"parallel.context={os.environ.get('WORLD_SIZE', 1)}", "checkpoint.every=never", "eval.every=never"),
            f"output_dir={options.result}-run",
        )
        train(Recipe.load("language_modeling", *words), callbacks=[Watch()])
    last = steps[1:]
    found = {"peak": max(step["peak"] for step in last), "seconds": min(step["seconds"] for step in last)}
    Path(f"{options.result}-{os.environ.get('RANK', 0)}").write_text(
        json.dumps(found | {"losses": [step["loss"] for step in last]})
    )


if __name__ == "__main__":
    main()
