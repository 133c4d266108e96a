"""What the benchmarks train: a fresh BERT on reviews, its recipe, and a meter at its door. Not run by itself."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hftune.config.recipe import EvalConfig, Recipe, TrainConfig
from hftune.data.demo import reviews
from hftune.tasks import SequenceClassification


def add_model_options(parser: argparse.ArgumentParser, layers: int, width: int) -> None:
    """Add --data, --layers, --width and --vocab-size, with the given sizes as defaults."""
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl (text, label); default: generated")
    parser.add_argument("--layers", type=int, default=layers, help="of the BERT (default %(default)s)")
    parser.add_argument("--width", type=int, default=width, help="of the BERT, a multiple of 64 (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the WordPiece trained on the texts")


def bert_config(layers: int, width: int, **fields: Any) -> dict[str, Any]:
    """Return the config of a BERT with heads 64 wide and an intermediate layer of 4 times the width, as bert-base has."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    return {"model_type": "bert", **sizes, "intermediate_size": 4 * width, **fields}


def review_task(
    options: argparse.Namespace,
    kind: type[SequenceClassification] = SequenceClassification,
    generated: str = "bert_on_reviews:long_reviews",
) -> SequenceClassification:
    """Build the task from the options of ``add_model_options``: five stars, a fresh BERT, 512 tokens at most."""
    files = None
    if options.data is not None:
        files = {"train": str(options.data / "train.jsonl"), "eval": str(options.data / "test.jsonl")}
    return kind(
        model=None,
        model_config=bert_config(options.layers, options.width),
        vocab_size=options.vocab_size,
        dataset="json" if files else generated,
        data_files=files,
        label_names=[f"{stars} stars" for stars in range(1, 6)],
    )


def long_reviews(part: str, count: int = 2000) -> Iterator[dict[str, Any]]:
    """Yield three generated reviews in one: 150 tokens on average, as Yelp's have, and the stars of the first."""
    rows, draw = reviews(part), random.Random(0)
    for _ in range(count):
        three = draw.sample(rows, 3)
        yield {"text": " ".join(row["text"] for row in three), "label": three[0]["label"]}


def recipe_of(task: SequenceClassification, output_dir: str | None = None, seed: int = 42, **train: Any) -> Recipe:
    """Build the recipe that trains ``task``; ``train`` holds fields of its ``train:`` section."""
    evaluation = EvalConfig(metric="accuracy")
    return Recipe(task=task, train=TrainConfig(**train), eval=evaluation, recipe="benchmark", seed=seed, output_dir=output_dir)


def pad_to(length: int, batch: dict[str, Tensor], pad_token_id: int) -> dict[str, Tensor]:
    """Widen a collated batch to ``length`` tokens a row."""
    missing = length - batch["input_ids"].shape[1]
    ids_NT = nn.functional.pad(batch["input_ids"], (0, missing), value=pad_token_id)
    return {**batch, "input_ids": ids_NT, "attention_mask": nn.functional.pad(batch["attention_mask"], (0, missing))}


class Meter:
    """Counts what enters a model's forward, whoever calls it: no contender's own word is taken."""

    def __init__(self, model: nn.Module):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.restart()
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def restart(self) -> None:
        self.samples, self.tokens, self.padded, self.largest, self.num_forwards = 0, 0, 0, (0, 0), 0
        self.saved: dict[int, int] = {}
        self.activation_bytes = 0

    def _enter(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        rows, longest = kwargs["input_ids"].shape
        self.num_forwards += 1
        self.samples += rows
        self.tokens += int(kwargs["attention_mask"].sum())
        self.padded += rows * longest if "packing" not in kwargs else int(kwargs["attention_mask"].sum())
        self.largest = max(self.largest, (rows, longest), key=lambda shape: shape[0] * shape[1])
        self.saved = {}

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.padded

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """Weigh what autograd keeps for the backward of one forward; ``activation_bytes`` is the most of any."""

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.parameters:
                self.saved[storage.data_ptr()] = storage.nbytes()
                self.activation_bytes = max(self.activation_bytes, sum(self.saved.values()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield


def quiet() -> None:
    """Silence bars and advice of the libraries, so that the table is all there is to read. Call it first."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
