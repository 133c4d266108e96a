"""Measure how fast Chinese texts become ids: the script's way, hftune's tokenizer, and the same on two processes.

    python benchmarks/jieba_speed.py [--data FOLDER] [--texts 5000] [--rounds 3]

"script" is the class that Lowin's models were trained with, on transformers' Python-backed BertTokenizer, with jieba, one
process; it gets every tenth text only, as it would take minutes, and characters per second are compared. All give the same ids,
which is checked. Tokenizers are made and loaded outside the time taken, but their memory of words begins empty in each
round; a map's time holds starting its processes and writing the ids to disk. The vocabulary is trained on the texts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import jieba
from contest import take_turns
from record import parse_options, print_table, save
from transformers import BertTokenizerLegacy

from hftune.data.jieba_tokenizer import JiebaTokenizer
from hftune.data.tokenized import to_ids
from hftune.data.vocabulary import train_vocabulary

EVERY = 10
LONGEST = 100_000  # tokens: none of the texts is cut


class ScriptTokenizer(BertTokenizerLegacy):
    """Lowin's class, and the lowering that transformers 4 did before it.

    Source: the readme of Lowin/chinese-bigbird-base-4096; transformers 4.57, PreTrainedTokenizer.tokenize.
    """

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        special = "|".join(map(re.escape, self.all_special_tokens))
        text = re.sub(rf"({special})|(.+?)", lambda match: match[1] or match[2].lower(), text)
        return super().tokenize(text, **kwargs)

    def _tokenize(self, text: str, *args: Any, **kwargs: Any) -> list[str]:
        tokens = []
        for word in jieba.lcut(text, HMM=False):
            tokens.extend([word] if word in self.vocab else super()._tokenize(word))
        return tokens


def main() -> None:
    options = parse()
    jieba.setLogLevel("ERROR")
    datasets.disable_progress_bars()
    jieba.initialize()
    texts = read(options.data, options.texts) if options.data else generate(options.texts)
    with tempfile.TemporaryDirectory() as folder:
        vocab_file = Path(folder) / "vocab.txt"
        vocab_file.write_text("\n".join(train_vocabulary(texts, options.size)) + "\n", encoding="utf-8")
        few, rows = texts[::EVERY], datasets.Dataset.from_dict({"text": texts})
        expected = in_one(ScriptTokenizer(str(vocab_file)), few)
        ways: dict[str, tuple[Callable, Any, type]] = {
            "script": (in_one, few, ScriptTokenizer),
            "hftune": (in_one, texts, JiebaTokenizer),
            "hftune, map on 2 processes": (in_two, rows, JiebaTokenizer),
        }
        contenders = {name: lambda turn, way=way: speed(*way, str(vocab_file), texts, expected) for name, way in ways.items()}
        results = take_turns(contenders, options.rounds)
    rates = {name: median(runs) for name, runs in results.items()}
    title = (
        f"{len(texts):,} {'articles' if options.data else 'generated texts'} of {sum(map(len, texts)) / len(texts):,.0f} "
        f"characters; median of {options.rounds} rounds (goal: at least 10 times the script on 2 cores)"
    )
    rows = [(name, f"{rate / 1000:,.0f}", f"{rate / rates['script']:.1f}x") for name, rate in rates.items()]
    table = print_table(title, ("", "thousand characters/s", "to the script"), rows)
    what = f"Chinese words of {len(texts):,} {'articles' if options.data else 'generated texts'} to ids"
    faster = max(rates.values()) / rates["script"]
    save(__file__, options, [table], {what: f"{faster:.0f} x jieba with transformers' BertTokenizer"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of *.jsonl with a content each (default: generated texts)")
    parser.add_argument("--texts", type=int, default=5000, help="at most (default %(default)s)")
    parser.add_argument("--size", type=int, default=20_000, help="of the vocabulary (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    return parse_options(parser, smoke={"texts": 50, "size": 1000, "rounds": 1})


def read(folder: Path, count: int) -> list[str]:
    """Read articles, in the order of the files' names, shuffled."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    return [json.loads(line)["content"] for line in lines[:count]]


def generate(count: int) -> list[str]:
    """Draw words as often as jieba's dictionary says they are, and Latin words between them."""
    draw = random.Random(0)
    words = [word for word, often in jieba.dt.FREQ.items() if often]
    sums = list(accumulate(jieba.dt.FREQ[word] for word in words))
    names = ["".join(draw.choices("aeioubcdfgklmnprst", k=draw.randrange(3, 11))).capitalize() for _ in range(3000)]
    texts = []
    for _ in range(count):
        drawn = draw.choices(words, cum_weights=sums, k=draw.randrange(100, 2000))
        texts.append("".join(f" {draw.choice(names)} " if draw.random() < 0.03 else word for word in drawn))
    return texts


def tokenize(rows: dict[str, list], tokenizer: Any) -> dict[str, list]:
    return {"input_ids": to_ids(rows["text"], tokenizer, LONGEST)[0]}


def in_one(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise in this process, in batches of a thousand as a map does."""
    return [ids for start in range(0, len(texts), 1000) for ids in to_ids(texts[start : start + 1000], tokenizer, LONGEST)[0]]


def in_two(tokenizer: Any, rows: datasets.Dataset) -> datasets.Dataset:
    """Tokenise on two processes, into a fresh file, under a name of its own as hftune.data.cache does."""
    with tempfile.TemporaryDirectory() as folder:
        return rows.map(
            tokenize,
            batched=True,
            fn_kwargs={"tokenizer": tokenizer},
            num_proc=2,
            remove_columns=["text"],
            cache_file_name=str(Path(folder) / "ids.arrow"),
            new_fingerprint=Path(folder).name,
        )


def speed(way: Callable, given: Any, kind: type, vocab_file: str, texts: list[str], expected: list[list[int]]) -> float:
    """Return characters per second, once the ids are found to be the expected ones."""
    tokenizer = kind(vocab_file)
    in_one(tokenizer, texts[:1])  # loads the dictionary; one text's words are nothing
    began = time.perf_counter()
    found = way(tokenizer, given)
    seconds = time.perf_counter() - began
    every = 1 if len(found) == len(expected) else EVERY
    ids = found if isinstance(found, list) else found["input_ids"][:]
    if ids[::every] != expected:
        raise RuntimeError(f"{kind.__name__} gives other ids than the script.")
    return sum(map(len, texts if every > 1 else texts[::EVERY])) / seconds


if __name__ == "__main__":
    main()
