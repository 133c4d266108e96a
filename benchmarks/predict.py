"""Predict the classes of Yelp reviews by hftune predict --data and by transformers' pipeline, with the same model and cores.

    python benchmarks/predict.py --data test.jsonl [--rows 10000] [--layers 4 --width 256] [--rounds 3]

The model is a new BERT: what its weights are changes no time. Contenders take turns; each is a command of its own, timed from
start to end, from which the time to predict a single row is taken off: imports and loading count for neither. The pipeline is
given a list of texts at batch sizes of 1, its default, and more; hftune has one process with all threads, or a process a core,
and a process a core in bf16, which only some processors compute. The labels of all contenders are compared with those of the
first pipeline. Goal: twice the rows per second of the best pipeline.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from contest import take_turns
from record import parse_options, print_table, save

PIPELINE = """
import csv, sys
from transformers import pipeline
from transformers.utils import logging

model, data, output, batch_size = sys.argv[1:]
logging.set_verbosity_error()
with open(data, newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]
classify = pipeline("text-classification", model=model, device="cpu", truncation=True, max_length=512)
with open(output, "w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([["label"], *([row["label"]] for row in classify(texts, batch_size=int(batch_size)))])
"""
DEFAULT_BATCH_SIZE = 1
"""Of transformers' pipeline."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "run", options)
        texts = read_texts(options)
        write_csv(folder / "one.csv", texts[:1])
        write_csv(folder / "all.csv", texts)
        pipelines = {size: f"pipeline, batches of {size}" for size in options.batch_sizes}
        contenders = {
            **{label: pipeline(folder, label, size, options) for size, label in pipelines.items()},
            "hftune": hftune(folder, "hftune", 1, options),
        }
        if options.threads > 1:
            label = f"hftune, {options.threads} processes"
            contenders[label] = hftune(folder, label, options.threads, options)
        contenders["hftune, bf16"] = hftune(folder, "hftune, bf16", options.threads, options, "bf16")
        seconds = take_turns(contenders, options.rounds)
        labels = {label: read_labels(folder / f"{label}.csv") for label in contenders}
    rates = {label: options.rows / median(wall for wall, _ in times) for label, times in seconds.items()}
    cpu_ms = {label: 1000 * median(cpu for _, cpu in times) / options.rows for label, times in seconds.items()}
    references = {"best pipeline": max(rates[label] for label in pipelines.values())}
    if DEFAULT_BATCH_SIZE in pipelines:
        references["default pipeline"] = rates[pipelines[DEFAULT_BATCH_SIZE]]
    if batched := [rates[label] for size, label in pipelines.items() if size > 1]:
        references["best pipeline in batches"] = max(batched)
    expected = labels[pipelines[options.batch_sizes[0]]]
    rows = [
        [
            *(label, f"{rate:,.1f}", *(f"{rate / reference:.2f}x" for reference in references.values())),
            *(f"{cpu_ms[label]:.1f}", sum(own != other for own, other in zip(labels[label], expected, strict=True))),
        ]
        for label, rate in rates.items()
    ]
    title = f"{options.rows:,} rows, BERT of {options.layers} layers of {options.width}, {options.threads} cores"
    result = print_table(title, ["", "rows/s", *references, "CPU ms a row", "other labels"], rows)
    ours = max(rate for label, rate in rates.items() if label.startswith("hftune") and "bf16" not in label)
    times = ", ".join(f"{ours / reference:.1f} x the {name}" for name, reference in references.items())
    measured = {
        f"hftune predict --data, {title}": times,
        f"the same in bf16, {title}": f"{rates['hftune, bf16'] / references['best pipeline']:.1f} x the best pipeline",
    }
    save(__file__, options, [result], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="jsonl file with a column text; default: hftune's demo reviews")
    parser.add_argument("--rows", type=int, default=10_000, help="of the file, over and over if it has fewer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="of the pipeline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    smoke = {"rows": 40, "layers": 1, "width": 32, "batch_sizes": [1, 8], "rounds": 1, "threads": 1}
    return parse_options(parser, smoke)


def read_texts(options: argparse.Namespace) -> list[str]:
    if options.data is None:
        from hftune.data.demo import reviews

        texts = [row["text"] for row in reviews("train")]
    else:
        texts = [json.loads(line)["text"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    return list(islice(cycle(texts), options.rows))


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])


def write_run(folder: Path, options: argparse.Namespace) -> None:
    """Write the folder of a run whose model has learned nothing, with a tokenizer trained on these texts."""
    from hftune import Recipe

    data = folder.parent / "texts.jsonl"
    texts = read_texts(options)
    data.write_text(
        "".join(json.dumps({"text": text, "label": i % 5}) + "\n" for i, text in enumerate(texts)), encoding="utf-8"
    )
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers, "intermediate_size": 4 * options.width}
    config = {"model_type": "bert", **sizes, "num_attention_heads": max(1, options.width // 64)}
    recipe = Recipe.load(
        "yelp",
        "task.model=null",
        f"task.model_config={json.dumps(config)}",
        "task.vocab_size=8000",
        f"task.data_files={json.dumps({'train': str(data), 'eval': str(data)})}",
        f"output_dir={folder}",
    )
    (folder / "model").mkdir(parents=True)
    recipe.task.save(recipe.task.build_model(), folder / "model")
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")


def read_labels(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["label"] for row in csv.DictReader(file)]


def pipeline(folder: Path, label: str, batch_size: int, options: argparse.Namespace) -> Callable[[int], tuple[float, float]]:
    def command(data: str) -> list[str]:
        output = str(folder / f"{label}.csv")
        return ["-c", PIPELINE, str(folder / "run" / "model"), str(folder / data), output, str(batch_size)]

    return lambda turn: seconds(command, options.threads)


def hftune(
    folder: Path, label: str, processes: int, options: argparse.Namespace, precision: str = "no"
) -> Callable[[int], tuple[float, float]]:
    def command(data: str) -> list[str]:
        words = ["predict", str(folder / "run"), "--data", str(folder / data), "--output", str(folder / f"{label}.csv")]
        started = ["--processes", str(processes)] if processes > 1 else []
        return ["-m", "hftune.cli", *words, "--columns", "label", "--mixed-precision", precision, *started]

    return lambda turn: seconds(command, options.threads // processes)


def seconds(command: Callable[[str], list[str]], threads: int) -> tuple[float, float]:
    """Return how much longer a command takes for all rows than for one: seconds, and CPU seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    times = {}
    for data in ("one.csv", "all.csv"):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *command(data)], env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times[data] = time.perf_counter() - began, cpu
    wall, cpu = (max(more - less, 1e-3) for more, less in zip(times["all.csv"], times["one.csv"], strict=True))
    return wall, cpu


if __name__ == "__main__":
    main()
