"""Samples that do not belong in the data, planted into one late step, are found by replaying it; and so is a bad update.

What can be found: a flipped label once the model knows better, here all 6 of 6 texts (24 of 24 with four seeds) and 5 of 5 digits
(4 of 5 with another number of samples). Garbage and overlong texts have ordinary losses (places 7 to 29 of 32), and are found
by their tokens and their length.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hftune import Recipe, train
from hftune.batch_plan import BatchPlan
from hftune.cli import main
from hftune.data.demo import digits as clean_digits

TOPICS = {
    "food": "soup bread rice salad cheese pepper kitchen dinner",
    "money": "bank price loan tax coin budget credit market",
    "sport": "goal team ball match coach score league race",
}
FILLING = "the a of and in to it was is for on with as at by from"


@dataclass(frozen=True)
class Plant:
    """Where bad samples are: in a step of runs with these numbers of samples and with seed 42."""

    count: int
    batch_size: int
    step: int
    flips: int

    @functools.cached_property
    def samples(self) -> list[int]:
        """The samples of the step: the first ones have flipped labels, those after them are garbage."""
        plan = BatchPlan(self.count, self.batch_size, seed=42)
        epoch, place = divmod(self.step - 1, plan.num_steps)
        return sorted(sample for part in plan.epoch(epoch)[place] for sample in part.samples.tolist())

    @property
    def flipped(self) -> list[int]:
        return self.samples[: self.flips]

    @property
    def garbage(self) -> int:
        return self.samples[self.flips]

    @property
    def overlong(self) -> int:
        return self.samples[self.flips + 1]


TEXTS = Plant(count=640, batch_size=32, step=58, flips=6)
DIGITS = Plant(count=600, batch_size=50, step=95, flips=5)


def planted_texts(part: str) -> Iterator[dict[str, Any]]:
    """Yield short texts on three topics; six with another label, one of rare characters, and one twelve times as long."""
    draw, names = random.Random(0), sorted(TOPICS)
    for sample in range(TEXTS.count):
        topic = draw.choice(names)
        text = " ".join(_sentence(topic, draw) for _ in range(12 if sample == TEXTS.overlong else 1))
        if sample == TEXTS.garbage:
            text = "".join(draw.choice("qxzkvwj;#@") + " " * (draw.random() < 0.2) for _ in range(40))
        is_flipped = sample in TEXTS.flipped
        yield {"label": names[names.index(topic) - 1] if is_flipped else topic, "text": text}


def _sentence(topic: str, draw: random.Random) -> str:
    words, filling = TOPICS[topic].split(), FILLING.split()
    return " ".join(draw.choice(words if draw.random() < 0.3 else filling) for _ in range(draw.randrange(10, 20)))


def planted_digits(part: str) -> Iterator[dict[str, Any]]:
    """Yield digits, five with another label, and an image of noise."""
    for sample, row in enumerate(clean_digits("train", DIGITS.count)):
        if sample in DIGITS.flipped:
            row = {**row, "label": (row["label"] + 5) % 10}
        if sample == DIGITS.garbage:
            noise = np.random.default_rng(0).integers(0, 256, np.asarray(row["image"]).shape, np.uint8)
            row = {**row, "image": Image.fromarray(noise)}
        yield row


TINY = (
    "task.model_config={model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64, "
    "hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, initializer_range: 0.1}",
    *("task.vocab_size=200", "task.max_length=100", "task.label_column=null", "train.lr=1e-2"),
)
OFTEN = ("eval.every=never", "checkpoint.every=10", "checkpoint.keep=20")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    data = (
        "task.dataset=tests.recipes.test_planted_rows:planted_texts",
        f"train.batch_size={TEXTS.batch_size}",
        "train.epochs=3",
    )
    folder = tmp_path_factory.mktemp("texts") / "run"
    train(Recipe.load("text_classification_demo", *TINY, *data, *OFTEN, f"output_dir={folder}"))
    return folder


def replay(capsys, folder, *words):
    """What ``hftune replay`` prints after its first line, and the samples that it found."""
    output = folder.with_name(f"found-{len(list(folder.parent.iterdir()))}")
    code = main(["replay", str(folder), *words, "--trust-code", f"--output={output}"])
    printed = capsys.readouterr()
    assert code == 0, printed
    samples = output / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    return printed.out.splitlines(), rows, output


def test_flipped_labels_garbage_and_an_overlong_text_are_named(texts, capsys):
    lines, rows, output = replay(capsys, texts, f"--step={TEXTS.step}", "--worst=6", "--why")
    assert sorted(row["sample"] for row in rows[:6]) == TEXTS.flipped
    assert len(rows) == 32 and rows[0]["text"] and rows[0]["label"] != rows[0]["prediction"]
    assert sum(row["gradient_share"] for row in rows) == pytest.approx(1, abs=1e-4)
    by_sample = {row["sample"]: row for row in rows}
    assert [sample for sample, row in by_sample.items() if row["outlier"]] in [
        [TEXTS.garbage, TEXTS.overlong],
        [TEXTS.overlong, TEXTS.garbage],
    ]
    assert by_sample[TEXTS.garbage]["bits_a_token_rank"] == 1 and by_sample[TEXTS.overlong]["tokens_rank"] == 1
    assert "bit-equal" in lines[1] and " ".join(lines[2].split()) == "loss of it gradient sample label -> predicted text"
    assert any(line.startswith("The worst 6 of the 32 samples of step 58 make 9") for line in lines)
    assert any(line.startswith("The batch makes this loss, no update before it; the steps before it had 0.0") for line in lines)
    without = ",".join(map(str, TEXTS.flipped))
    assert f"Try: hftune replay {texts} --steps 58:60 --without {without}" in lines
    why = json.loads((output / "replay.json").read_text())["why"]
    assert list(why["losses"]) == ["53", "54", "55", "56", "57"]


def test_of_several_steps_the_planted_one_has_the_worst_samples(texts, capsys):
    lines, rows, _ = replay(capsys, texts, f"--steps={TEXTS.step - 2}:{TEXTS.step + 2}", "--worst=7")
    assert {row["sample"] for row in rows[:7]} > {*TEXTS.flipped} and len(rows) == 5 * 32  # one is hard as it is
    assert any(line.startswith(f"The batch of step {TEXTS.step} at the weights after step 53 54 55 56 57: ") for line in lines)


def test_without_them_the_loss_is_an_ordinary_one(texts, capsys):
    without = ",".join(map(str, TEXTS.flipped))
    _, _, output = replay(capsys, texts, f"--step={TEXTS.step}", f"--without={without}")
    (step,) = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()][-1:]
    assert step["loss"] < 0.15 * step["then"]["loss"]


def test_an_update_that_raised_the_loss_is_named(texts, capsys, tmp_path):
    words = [
        "task.dataset=tests.recipes.test_planted_rows:planted_texts",
        "train.batch_size=32",
        "train.schedule=constant",
        "train.warmup_ratio=0",
    ]
    for steps, lr in ((30, "1e-2"), (34, "0.5")):  # resumed with a learning rate that is far too high
        last = (f"train.max_steps={steps}", f"train.lr={lr}", f"output_dir={tmp_path / 'run'}")
        train(Recipe.load("text_classification_demo", *TINY[:-1], *words, *OFTEN, *last))
    lines, _, _ = replay(capsys, tmp_path / "run", "--step=33", "--worst=0", "--why")
    said = [line for line in lines if line.startswith("The weights make this loss, not the batch: the update of step 3")]
    assert len(said) == 1 and not any(line.startswith("Try") for line in lines), lines


def test_flipped_digits_are_ranked_first_and_shown_as_pictures_and_noise_is_an_outlier(tmp_path, capsys):
    data = (
        "task.dataset=tests.recipes.test_planted_rows:planted_digits",
        f"train.batch_size={DIGITS.batch_size}",
        "train.epochs=8",
    )
    train(Recipe.load("mnist_demo", *data, *OFTEN, f"output_dir={tmp_path / 'run'}"))
    lines, rows, output = replay(capsys, tmp_path / "run", f"--step={DIGITS.step}", "--worst=8")
    assert len({row["sample"] for row in rows[:8]} & {*DIGITS.flipped}) >= 4
    assert any(line.startswith(f"Outliers in this step: {DIGITS.garbage} (") for line in lines)
    pictures = [np.asarray(Image.open(output / row["picture"])) for row in rows[:8]]
    assert all(picture.shape == (28, 28, 3) and picture.std() > 0 for picture in pictures) and "picture" not in rows[8]
