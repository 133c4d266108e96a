"""Trains a small language model on WikiText-2 with the recipe's SGD, and sets it beside counting words and pairs of words.

    python benchmarks/wikitext2.py --data FOLDER [--processes 2] [--output_dir outputs/wikitext2_small] [section.key=value ...]

FOLDER has train.txt, valid.txt and test.txt: a line a paragraph, words between spaces, with <unk>. An epoch, the default, took
half an hour on two busy cores, and gave a test perplexity of 240; counting words gives 914, counting pairs 268. A second call
goes on where the first was stopped, or only counts; more train.epochs train longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ngrams import bigram_perplexity, unigram_perplexity
from record import parse_options, print_table, save

from hftune import Recipe

# No dropout: an epoch or two of so small a model do not overfit. After 1,000 steps on the 10,000 most frequent words the
# perplexity is 183 so and 201 with the recipe's 0.2.
SIZES = "{hidden_size: 128, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, dropout: 0}"
SETTINGS = (
    f"task.model_config={SIZES}",
    "task.dataset=text",
    "train.epochs=1",
    "train.micro_batch_size=10",
    "train.log_every=100",
    "eval.every=1000",
    "eval.show_samples=0",
)
FILES = {"train": "train", "eval": "valid", "test": "test"}
# The logits of 350 tokens and 33,278 words are 47 MB, made anew for each micro-batch: glibc would give them back to the system
# each time and have every page of them cleared again, a quarter of the time of a step.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "500000000"}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.data, options.output_dir = write_paragraphs(Path(folder, "paragraphs")), Path(folder, "out")
        measure(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/wikitext2_small"))
    parser.add_argument("words", nargs="*", default=[], help="of the recipe: section.key=value")
    small = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, dropout: 0}"
    words = [f"task.model_config={small}", "train.max_steps=4", "train.log_every=2"]
    options = parse_options(parser, smoke={"processes": 1, "words": words})
    if options.data is None and not options.smoke:
        parser.error("--data FOLDER is needed")
    return options


def write_paragraphs(folder: Path) -> Path:
    """Write a few generated paragraphs where WikiText-2 would be, and return the folder."""
    from hftune.data.demo import paragraphs

    folder.mkdir()
    for part, count in (("train", 40), ("eval", 10), ("test", 10)):
        lines = [row["text"] for row in paragraphs(part)[: 3 * count]]
        (folder / f"{FILES[part]}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def measure(options: argparse.Namespace) -> None:
    """Train, and set the perplexities beside those of counting."""
    files = [f"task.data_files.{part}={options.data}/{name}.txt" for part, name in FILES.items()]
    words = [*SETTINGS, *files, f"output_dir={options.output_dir}", *options.words]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.processes)]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **KEEP_MEMORY, **os.environ}
    command = [sys.executable, *(launch if options.processes > 1 else []), "-m", "hftune.run", "recipe=wikitext2", *words]
    subprocess.run(command, env=environment, check=True)

    task = Recipe.load("wikitext2", *words).task
    streams = {part: blocks.stream for part, blocks in task.datasets().items()}
    size = len(task.text_tokenizer)
    logged = [json.loads(line) for line in (options.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = {line["epoch"]: line["eval/perplexity"] for line in logged if "eval/perplexity" in line}
    test = logged[-1]["test/perplexity"]
    counted = {
        (part, name): count(streams["train"], streams[part], size)
        for part in ("eval", "test")
        for name, count in (("words", unigram_perplexity), ("pairs", bigram_perplexity))
    }
    rows = [(f"eval, epoch {epoch:.2f}", f"{value:.2f}") for epoch, value in evaluations.items()]
    rows.append(("test, the best model", f"{test:.2f}"))
    rows += [(f"{part}, {name} counted", f"{value:.2f}") for (part, name), value in counted.items()]
    tokens = ", ".join(f"{part} {len(stream):,}" for part, stream in streams.items())
    table = print_table(f"{size:,} types; tokens: {tokens}", ("", "perplexity"), rows)
    trained, seconds = max(evaluations), json.loads((options.output_dir / "result.json").read_text())["seconds"]
    what = (
        f"perplexity on {options.data.name} ({size:,} words), a small Transformer after {trained:.2g} epochs with SGD, "
        f"{seconds / 60:.0f} minutes on {options.processes} processes"
    )
    figure = (
        f"validation {', '.join(f'{value:.0f}' for value in evaluations.values())}; test {test:.0f}. Counting words gives "
        f"{counted['test', 'words']:.0f}, counting pairs (Kneser-Ney) {counted['test', 'pairs']:.0f}"
    )
    save(__file__, options, [table], {what: figure})


if __name__ == "__main__":
    main()
