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
from pathlib import Path

from hftune import Recipe
from hftune.console import table
from hftune.metrics.ngrams import bigram_perplexity, unigram_perplexity

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
# The logits of 350 tokens and 33,278 words are 47 MB, made anew for each micro-batch: glibc would give them back to the system
# each time and have every page of them cleared again, a quarter of the time of a step.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "500000000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output_dir", default="outputs/wikitext2_small")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()

    names = {"train": "train", "eval": "valid", "test": "test"}
    files = [f"task.data_files.{part}={options.data}/{name}.txt" for part, name in names.items()]
    words = [*SETTINGS, *files, f"output_dir={options.output_dir}", *options.words]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.processes)]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **KEEP_MEMORY, **os.environ}
    subprocess.run([sys.executable, *launch, "-m", "hftune.run", "recipe=wikitext2", *words], env=environment, check=True)

    task = Recipe.load("wikitext2", *words).task
    streams = {part: blocks.stream for part, blocks in task.datasets().items()}
    size = len(task.text_tokenizer)
    print(f"{size:,} types; tokens: {', '.join(f'{part} {len(stream):,}' for part, stream in streams.items())}")
    lines = (Path(options.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    rows = {f"eval, epoch {line['epoch']:.2f}": line["eval/perplexity"] for line in logged if "eval/perplexity" in line}
    rows["test, the best model"] = logged[-1]["test/perplexity"]
    for part in ("eval", "test"):
        rows[f"{part}, words counted"] = unigram_perplexity(streams["train"], streams[part], size)
        rows[f"{part}, pairs counted"] = bigram_perplexity(streams["train"], streams[part], size)
    print(table({name: f"{value:.2f}" for name, value in rows.items()}))


if __name__ == "__main__":
    main()
