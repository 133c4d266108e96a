"""How long training on a large file takes to the end of its first step, and how much memory, beside Trainer and streaming.

    python benchmarks/start.py [--megabytes 30 300 3000] [--rounds 1] [--data FILE]

A file of so many megabytes of reviews (generated, or the rows of FILE again and again, each with a number in front) is trained
on, one process, one thread, with a BERT of 4 layers of 256 that has its tokenizer, as one from the Hub would. Nothing is in a
cache. Contenders: hftune, which by default prepares large files as it needs them; hftune with task.prepare=all; transformers'
Trainer after ``datasets.map(batched=True, num_proc=2)``; and Trainer on an ``IterableDataset`` that is tokenized as it is read,
shuffled in a buffer of 10,000 rows. "GiB" is the private memory of the largest process at the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import count, cycle
from pathlib import Path
from statistics import median

from contest import take_turns
from record import HERE, parse_options, print_table, save
from startup import Start, until_first_step

BATCH = 32
LONGEST_S = 3600.0
HFTUNE = {"hftune": "auto", "hftune, all first": "all"}
TRAINER = {"Trainer, map": "map", "Trainer, streaming": "stream"}


def main() -> None:
    options = parse()
    if options.trainer:
        train_with_trainer(*options.trainer)
        return
    rows = []
    measured = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(folder, options)
        for size in options.megabytes:
            file = write_rows(folder / f"{size}.jsonl", size, options.data)
            contenders = {
                contender: partial(first_step, contender, file, model)
                for contender in (*HFTUNE, *TRAINER)
                if size <= options.most or contender not in ("hftune, all first", "Trainer, map")
            }
            for contender, starts in take_turns(contenders, options.rounds).items():
                seconds, mib = (median(getattr(one, field) for one in starts) for field in ("seconds", "private_mib"))
                rows.append((f"{size} MB", contender, f"{seconds:.1f}", f"{mib / 1024:.2f}"))
                if contender in ("hftune", "Trainer, map"):
                    measured[f"first step of {contender} on {size} MB of text, nothing cached"] = (
                        f"{seconds:.1f} s, {mib / 1024:.2f} GiB"
                    )
            file.unlink()
    title = f"to the end of the first step, median of {options.rounds}"
    table = print_table(title, ("file", "contender", "seconds", "GiB"), rows)
    save(__file__, options, [table], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[30, 300, 3000])
    parser.add_argument("--most", type=int, default=300, help="megabytes up to which all is prepared first, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", type=Path, help="a jsonl file with text and label, 0 to 4 (default: generated)")
    parser.add_argument("--trainer", nargs=4, help=argparse.SUPPRESS)  # map or stream, file, model, and where to say "step"
    return parse_options(parser, smoke={"megabytes": [1]})


def write_rows(path: Path, megabytes: int, data: Path | None) -> Path:
    """Write a file of reviews, no two alike."""
    from bert_on_reviews import long_reviews

    found = map(json.loads, data.read_text().splitlines()) if data else long_reviews("train")
    with path.open("w") as file:
        for number, row in zip(count(), cycle(found), strict=False):
            file.write(json.dumps({"text": f"{number} {row['text']}", "label": row["label"]}) + "\n")
            if file.tell() > megabytes * 1e6:
                return path
    raise SystemExit(f"{data} has no rows.")


def build_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write a new BERT and a tokenizer trained on reviews, as a model from the Hub would lie in its cache."""
    from bert_on_reviews import bert_config, long_reviews
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer

    tokenizer = wordpiece_tokenizer(
        train_wordpiece([row["text"] for row in long_reviews("train")], 500 if options.smoke else 8192)
    )
    config = bert_config(1, 64) if options.smoke else bert_config(4, 256)
    config = AutoConfig.for_model(**config, vocab_size=len(tokenizer), num_labels=5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def first_step(contender: str, file: Path, model: Path, turn: int) -> Start:
    """Train until the first step, with an empty cache."""
    folder = file.parent / "run"
    folder.mkdir()
    if contender in HFTUNE:
        words: Sequence[str] = (
            *("-m", "hftune.cli", "train", "recipe=text_classification", f"task.model={model}", "task.label_names=[a,b,c,d,e]"),
            *(f"task.data_files={{train: {file}}}", "eval.every=never", f"train.batch_size={BATCH}", "train.max_steps=20"),
            *(f"output_dir={folder / 'output'}", f"task.prepare={HFTUNE[contender]}", "train.mixed_precision=no"),
        )
        ledger = folder / "output" / "ledger.jsonl"
    else:
        ledger = folder / "step"
        words = (__file__, "--trainer", TRAINER[contender], str(file), str(model), str(ledger))
    try:
        return until_first_step(words, folder, ledger, LONGEST_S, HERE.parent)
    finally:
        shutil.rmtree(folder)


def train_with_trainer(how: str, file: str, model: str, said: str) -> None:
    """Do what the example of text classification does: tokenize, pad to the longest of a batch, train."""
    import datasets
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Said(TrainerCallback):
        def on_step_end(self, arguments, state, control, **others):
            Path(said).write_text('{"step": 1,')

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=512)

    rows = datasets.load_dataset("json", data_files=file, split="train", streaming=how == "stream")
    if how == "stream":
        rows = rows.shuffle(seed=0, buffer_size=10_000).map(encode, batched=True, remove_columns=["text"])
    else:
        rows = rows.map(encode, batched=True, num_proc=2, remove_columns=["text"])
    arguments = TrainingArguments(
        output_dir=str(Path(said).parent / "output"),
        per_device_train_batch_size=BATCH,
        max_steps=20,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    Trainer(
        AutoModelForSequenceClassification.from_pretrained(model),
        arguments,
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Said()],
    ).train()


if __name__ == "__main__":
    sys.exit(main())
