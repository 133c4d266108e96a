"""Measure the memory of each process where no process holds the whole model: under FSDP, on CPUs.

    python benchmarks/large_models.py [--only load checkpoint export generation] [--processes 2 4]

load: from the start of building a pretrained model until the first step could be taken. checkpoint: while one is written, of
the weights alone. export: while the model is written for ``from_pretrained``. generation: while processes continue texts, not
equally many, as in an evaluation. Goal: no process has more anonymous memory than its share of the weights and 1.5 GiB,
interpreter included; when it saves, its share twice, as a CPU trains on while the copy is written. The pages of the model's
files, which the machine can drop, are not counted (RssAnon in /proc, looked at every 5 ms; Linux only). The processes have
MALLOC_MMAP_THRESHOLD_=1048576 in their environment: otherwise glibc keeps much of the weights that FSDP frees after each layer.

The model is a decoder like Llama of 1.2 billion float32 weights, drawn at random and saved in several files. It is trained on
blocks of 35 tokens, so that the memory is the model's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contest import start
from record import parse_options, print_table, save

MODES = {"load": 1, "checkpoint": 2, "export": 2, "generation": 1}
"""What is measured, and how often a process has its share of the weights then."""
ALLOWED_MIB = 1536
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""What ``accelerate launch --config_file accelerate_configs/fsdp.yaml`` puts into the environment, as far as it matters."""
FIELDS = {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 64}
WORDS = ("task.block_length=35", "task.dataset=hftune.data.demo:paragraphs", "task.max_train_samples=200")
WORDS = (*WORDS, "task.generation={max_new_tokens: 4}", "task.max_eval_samples=20", "train.batch_size=16", "train.log_every=1")


def main() -> None:
    options = parse()
    if options.model:
        measure(options)
        return
    os.environ.update({**FSDP, "MALLOC_MMAP_THRESHOLD_": str(2**20)})
    tables, figures = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = multiprocessing.get_context("fork").Process(target=make, args=(folder / "model", options))
        maker.start()  # its memory goes with it
        maker.join()
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")) / 2**20
        for mode in options.only:
            rows = []
            for processes in options.processes:
                words = [__file__, "--model", str(folder / "model"), "--only", mode, "--result", str(folder / "found")]
                start(processes, words)
                found = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*"))]
                for path in folder.glob("found-*"):
                    path.unlink()
                own, seconds = MODES[mode] * size / processes, max(one["seconds"] for one in found)
                peaks = [one["peak"] for one in found]
                cells = (peaks[0], max(peaks[1:]), own, max(peaks) - own)
                rows.append([f"{processes} processes", *(f"{cell:,.0f}" for cell in cells), f"{seconds:.3g}"])
                what = f"its share of {size / 1024:.1f} GiB{'' if MODES[mode] == 1 else ' and the copy of it'}"
                figures[f"anonymous memory of a process on {processes} at {mode}, beyond {what}"] = (
                    f"{max(peaks) - own:,.0f} MiB"
                )
            title = f"{mode}: anonymous memory (goal: at most {ALLOWED_MIB:,} MiB beyond what is a process's own)"
            header = ["", "main MiB", "others MiB", "own MiB", "beyond MiB", "seconds"]
            tables.append(print_table(title, header, rows))
    save(__file__, options, tables, figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=2048, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="of the model (default %(default)s)")
    parser.add_argument("--words", type=int, default=32_000, help="of the vocabulary (default %(default)s)")
    parser.add_argument("--model", help="be one of the processes, with the model of this folder")
    parser.add_argument("--result", help="where they write what they have measured")
    return parse_options(parser, {"processes": [2], "width": 64, "layers": 2, "words": 1000})


def make(folder: Path, options: argparse.Namespace) -> None:
    """Save a model that was drawn at random, and a tokenizer with fewer words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **FIELDS,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        vocab_size=options.words,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")
    with tempfile.TemporaryDirectory() as name:
        task = recipe_of("task.tokenizer=words", "task.model_config={model_type: llama}", f"output_dir={name}").task
        task.text_tokenizer.save_pretrained(folder)


def recipe_of(*words: str) -> Any:
    """Return a recipe of a language model."""
    from hftune import Recipe

    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "large.yaml")
        path.write_text("task: {type: LanguageModeling}\n")
        return Recipe.load(path, *WORDS, *words)


def measure(options: argparse.Namespace) -> None:
    """Be one of the processes: write down peak and seconds."""
    import torch

    from hftune.build import build, choose_strategy
    from hftune.checkpoints.checkpointer import Checkpointer
    from hftune.checkpoints.export import export
    from hftune.config.sections import CheckpointConfig
    from hftune.distributed.session import Session
    from hftune.settle import prepare

    recipe = recipe_of(f"task.model={options.model}", f"output_dir={options.model}-run")
    (mode,), folder = options.only, Path(options.model).parent
    with Session(recipe) as session:
        datasets = recipe.task.datasets()
        with peak_mib() as peaks:
            began = time.perf_counter()
            parts = build(recipe, session.progress, datasets)
            strategy = choose_strategy(session.join(), recipe, session.progress)
            prepare(recipe, strategy, parts)
            sharding = strategy.sharding
            sharding.digest()
            if mode != "load":
                peaks.clear()
                began = time.perf_counter()
            if mode == "checkpoint":
                writer, saved = Checkpointer(folder / "checkpoints", CheckpointConfig()), sharding.snapshot()
                if saved is not None:
                    writer.write(1, saved[0], {}, "", None, [])
                    writer.wait()
                    assert writer.failure is None, writer.failure
                sharding.await_sent()
            elif mode == "export":
                model = sharding.unwrap(folder)
                strategy.on_main(lambda: export(recipe.task, model, folder / "exported"))
            elif mode == "generation":
                with torch.no_grad(), strategy.evaluating():
                    recipe.task.predict(strategy.model, recipe.task.example_inputs()[strategy.process_index % 2 :])
        found = {"peak": max(peaks), "seconds": time.perf_counter() - began}
    Path(f"{options.result}-{os.environ['RANK']}").write_text(json.dumps(found))


@contextmanager
def peak_mib() -> Iterator[list[float]]:
    """Note the anonymous memory of this process, in MiB, every 5 ms."""
    found, ends = [], threading.Event()

    def look() -> None:
        while not ends.wait(0.005):
            status = Path("/proc/self/status").read_text()
            found.append(int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


if __name__ == "__main__":
    main()
