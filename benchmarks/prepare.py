"""How long tokenizing a file of texts before training takes, beside ``datasets.map(batched=True, num_proc=2)``.

    python benchmarks/prepare.py [--megabytes 100] [--rounds 3]

The rows are in a data set that is on disk already; nothing else is in a cache. There are two kinds: the reviews of start.py,
of few different words, and docstrings of the installed packages, of very many, with lines and indented code; each row with a
number in front, the docstrings again and again where there are too few. hftune is what task.prepare=all does between loading
the rows and training: tokenize, write, and map what is written. The tokenizer is a WordPiece trained on the reviews. "CPU s" is
the processor time of all processes, and "MiB" the largest resident set of one, with the pages of mapped files.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import transformers
from contest import take_turns
from record import HERE, parse_options, print_table, save

CONTENDERS = ("hftune", "datasets.map, 2 processes")


def main() -> None:
    options = parse()
    if options.contender:
        print(json.dumps(prepare(*options.contender)))
        return
    from start import build_model, write_rows

    table, measured = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(folder, options)
        for texts in ("reviews", "docstrings"):
            given = docstrings(folder / "docstrings.jsonl", options.megabytes) if texts == "docstrings" else None
            file = write_rows(folder / "rows.jsonl", options.megabytes, given)
            found = take_turns({name: partial(alone, name, file, model) for name in CONTENDERS}, options.rounds)
            medians = {name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()}
            table += [(texts, name, *(f"{value:.1f}" for value in own.values())) for name, own in medians.items()]
            ours, theirs = (medians[name] for name in CONTENDERS)
            measured[f"tokenizing {options.megabytes} MB of {texts} before training"] = (
                f"{ours['seconds']:.0f} s, {ours['cpu_seconds']:.0f} s of CPU time; datasets.map with 2 processes "
                f"{theirs['seconds'] / ours['seconds']:.1f} and {theirs['cpu_seconds'] / ours['cpu_seconds']:.1f} times as long"
            )
    title = f"tokenizing {options.megabytes} MB of text, median of {options.rounds}"
    save(__file__, options, [print_table(title, ("texts", "", "seconds", "CPU s", "MiB"), table)], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)  # which, file, model
    return parse_options(parser, smoke={"megabytes": 1, "rounds": 1})


def docstrings(path: Path, megabytes: int) -> Path:
    """Write rows of the docstrings of the packages that are installed, up to so many megabytes."""
    found: set[str] = set()
    with path.open("w") as file:
        for source in sorted(Path(transformers.__file__).parents[1].rglob("*.py")):
            with suppress(SyntaxError, ValueError):
                nodes = ast.walk(ast.parse(source.read_bytes()))
                texts = {
                    ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                }
                for text in sorted({text for text in texts if text and len(text) > 150} - found):
                    file.write(json.dumps({"text": text, "label": len(text) % 5}) + "\n")
                found |= texts
            if file.tell() > megabytes * 1e6:
                break
    return path


def alone(contender: str, file: Path, model: Path, turn: int) -> dict[str, float]:
    """Let a contender prepare the rows in a process of its own, with an empty cache."""
    cache = file.parent / "cache"
    env = {**os.environ, "HF_DATASETS_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, __file__, "--contender", contender, str(file), str(model)]
    try:
        return json.loads(
            subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def prepare(contender: str, file: str, model: str) -> dict[str, float]:
    from hftune import Recipe

    words = (f"task.model={model}", "task.label_names=[a,b,c,d,e]", f"task.data_files={{train: {file}}}", "eval.every=never")
    task = Recipe.load("text_classification", *words, "task.prepare=all").task
    rows, tokenizer = task.rows["train"], task.text_tokenizer

    def encode(some: dict) -> dict:
        return tokenizer(some["text"], truncation=True, max_length=512)

    began, used = time.perf_counter(), cpu_seconds()
    if contender == "hftune":
        task.tokenized("train")
    else:
        rows.map(encode, batched=True, num_proc=2, remove_columns=["text"])
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": most / 1024}


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
