"""What is said of a loss: outliers, whether batch or update is to blame, and the lines in the terminal."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hftune.replay.history import History
from hftune.replay.inspection import Inspection, answer_of, text_of
from hftune.replay.outliers import find_outliers
from hftune.replay.samples import SampleRecord
from hftune.replay.spikes import Usual, judge_spike, losses_of, suspect_of, usual_loss
from hftune.task import Task

# Outliers


def texts(count: int = 200) -> list[dict]:
    """Texts of 20 to 40 frequent tokens."""
    draw = random.Random(0)
    lengths = [draw.randrange(20, 41) for _ in range(count)]
    return [{"input_ids": [draw.randrange(50) for _ in range(length)], "cut": False, "labels": 1} for length in lengths]


def outliers(rows, samples):
    return {sample: found for sample, found in find_outliers(rows, samples).items() if found.reasons}


def test_garbage_overlong_and_repeated_texts_are_outliers_and_nothing_else():
    rows = texts()
    rows[3] = {"input_ids": list(range(1000, 1030)), "cut": False}  # tokens that no other text has
    rows[5] = {"input_ids": [token % 50 for token in range(400)], "cut": True}
    rows[7] = {"input_ids": [49] * 30, "cut": False}
    found = outliers(rows, range(40))
    assert [*found] == [3, 5]
    assert found[3].reasons == [f"{found[3].row['bits_a_token']:.1f} bits a token, usually 5.6"]
    assert found[5].reasons == ["400 tokens, usually 30", "cut"]
    assert found[5].row["tokens_rank"] == found[3].row["bits_a_token_rank"] == 1


def test_where_many_texts_are_cut_that_makes_no_outlier():
    assert not outliers([{**row, "cut": index % 10 == 0} for index, row in enumerate(texts())], range(50))


def test_noise_and_an_empty_image_are_outliers():
    draw = np.random.default_rng(0)
    ramp = np.linspace(40, 200, 32)[:, None] * np.ones((1, 32))
    rows = [{"image": np.uint8(ramp + draw.normal(0, 5, (32, 32)).clip(-20, 20)), "label": 0} for _ in range(60)]
    rows[4] = {"image": draw.integers(0, 256, (32, 32), np.uint8), "label": 0}
    rows[9] = {"image": np.zeros((32, 32), np.uint8), "label": 0}
    found = outliers(rows, range(20))
    assert [*found] == [4, 9]
    assert "roughness" in found[4].reasons[-1] and found[9].reasons[0].startswith("0 brightness")


def test_samples_that_are_neither_texts_nor_images_are_not_judged():
    assert find_outliers([{"input": np.ones(3), "labels": 1}] * 5, [1, 2]) == {}


# Batch or update


@pytest.mark.parametrize(
    ("losses", "usual", "said"),
    [
        ([0.5147, 0.5169, 0.5178, 0.5179, 0.5184], Usual(0.33, 0.05),
         "The batch makes this loss, no update before it; the steps before it had 0.33 +- 0.05."),
        ([0.31, 0.32, 0.33, 1.9, 2.1], Usual(0.33, 0.05),
         "The weights make this loss, not the batch: the update of step 9 raised it by 1.57."),
        ([1.794, 1.941, 1.738, 1.958], Usual(1.6, 0.1),
         "The weights make this loss, not the batch: the update of step 10 raised it by 0.22."),
        ([1.794, 1.941, 1.738, 1.958], Usual(1.85, 0.1),
         "Step 11 is no spike: the steps before it had 1.85 +- 0.1. But the updates before it move this loss up and down: the learning "
         "rate may be too high."),
        ([0.90, 1.2, 0.8, 1.0, 0.81], Usual(0.6, 0.05),
         "The updates before it move this loss up and down: the learning rate may be too high."),
        ([0.95, 0.92, 0.88, 0.85, 0.82], Usual(0.8, 0.1), "Step 11 is no spike: the steps before it had 0.8 +- 0.1."),
        ([2.4, 2.3, 2.2], None,
         "No update before it makes this loss. The steps before it are too few to say if step 11 is a spike."),
        ([0.005505, 0.0058, 0.005306, 0.005234, 0.005192], Usual(0.0048, 0.0001),  # a fine run on its way down
         "The batch makes this loss, no update before it; the steps before it had 0.0048 +- 0.0001."),
        ([1.0, 1.2, 1.0, 0.9, 0.85], Usual(0.6, 0.05),
         "The batch makes this loss, no update before it; the steps before it had 0.6 +- 0.05."),
    ],
)  # fmt: skip
def test_batch_or_update(losses, usual, said):
    by_step = dict(zip(range(11 - len(losses), 11), losses, strict=True))
    (first, last), blames_batch = judge_spike(11, by_step, usual)
    assert last == said and blames_batch == last.startswith("The batch makes this loss")
    row = " ".join(f"{loss:g}" for loss in losses)
    assert first == f"The batch of step 11 at the weights after step {' '.join(map(str, by_step))}: {row}."


def test_the_first_step_has_no_update_before_it():
    sentences, _ = judge_spike(1, {0: 2.3}, None)
    assert sentences == ["Nothing was computed before step 1, so its batch has no loss at earlier weights."]


def test_what_is_usual_is_the_middle_of_the_steps_before():
    losses = {step: 1.0 + step / 100 for step in range(1, 30)} | {30: 9.0}
    assert usual_loss(losses, 30).loss == pytest.approx(1.195)  # steps 10 to 29
    assert usual_loss(losses, 3) is None


def test_of_several_steps_the_one_with_the_greatest_loss_is_judged():
    steps = {step: {"step": step, "loss": loss} for step, loss in enumerate([2.0, 1.9, 1.8, 3.0, 1.7, 1.6], start=1)}
    steps[5] = {"step": 5, "skipped": True}
    assert suspect_of(losses_of(steps), 3, 6) == 4
    assert suspect_of(losses_of({5: {"step": 5}, 6: {"step": 6}}), 5, 6) == 5


# The terminal


class Reviews(Task):
    labels = ("1 star", "5 stars")

    def datasets(self):
        return {}

    def build_model(self):
        raise NotImplementedError

    def loss(self, outputs, target):
        raise NotImplementedError


def inspected(losses: dict[int, list[float]], worst: int) -> Inspection:
    """Of samples numbered through all steps, with a picture each."""
    rows = [{"text": f"text {index} \N{CJK UNIFIED IDEOGRAPH-4E2D}" + " and on" * 30} for index in range(10)]
    steps = {step: {"step": step, "loss": math.fsum(values)} for step, values in losses.items()}
    inspection = Inspection(History(None, SimpleNamespace(steps=steps)), min(steps), max(steps), worst)
    numbers, answer, picture = iter(range(10)), {"label": 0, "prediction": 1}, np.full((2, 2, 3), 9, np.uint8)
    for step, values in losses.items():
        shares = [value / math.fsum(values) for value in values]
        pairs = zip(values, shares, strict=True)
        inspection.records[step] = [
            SampleRecord(next(numbers), 0, 1, value, share, 0.5, share, answer, picture) for value, share in pairs
        ]
    inspection.losses |= {6: 0.5, 7: 0.6}
    inspection.finish(SimpleNamespace(task=Reviews(), datasets={"train": rows}))
    return inspection


def test_the_worst_samples_are_lines_that_fit_the_terminal():
    found = inspected({7: [0.1, 0.1, 4.0, 0.1, 0.1], 8: [0.2, 3.0, 0.2, 0.2, 0.2]}, worst=2)
    lines = found.lines(100)
    assert lines[0] == "   loss  of it  gradient  step  sample  label -> predicted  picture              text"
    assert lines[1].startswith("  4.000   91 %      91 %     7       2  1 star -> 5 stars   step_7_sample_2.png  text 2")
    assert lines[3] == "One of the 5 samples of step 7 makes 91 % of its loss."
    assert lines[4].startswith("The batch of step 7 at the weights after step 6 7: 0.5 0.6.")
    assert lines[1].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert found.outstanding == [2, 6]


def test_where_all_samples_share_the_loss_none_is_named():
    found = inspected({7: [1.0, 1.1, 0.9, 1.2]}, worst=2)
    assert "No sample stands out: the worst of the 4 of step 7 makes 29 % of its loss." in found.lines()


def test_all_samples_go_into_a_file_and_the_pictures_of_the_worst_beside_it(tmp_path):
    found = inspected({7: [0.1, math.nan, 4.0]}, worst=1)
    found.write(tmp_path / "new")
    rows = [json.loads(line) for line in (tmp_path / "new" / "samples.jsonl").read_text().splitlines()]
    assert [(row["sample"], row["loss"]) for row in rows] == [(1, None), (2, 4.0), (0, 0.1)]  # NaN is the worst
    assert rows[0]["picture"] == "pictures/step_7_sample_1.png" and (tmp_path / "new" / rows[0]["picture"]).is_file()
    assert (rows[0]["label"], rows[0]["prediction"], "picture" in rows[1]) == ("1 star", "5 stars", False)
    assert found.summary()["why"]["losses"] == {"6": 0.5, "7": 0.6}


def test_answers_are_named_as_the_task_names_them():
    several = SimpleNamespace(labels=["a", "b", "c"], kind="multi_label_classification")
    assert answer_of(several, {"label": [1, 0, 1], "prediction": [0, 0, 0]}) == "a, c -> none"
    assert answer_of(SimpleNamespace(labels=None), {"label": 1.5, "prediction": 1.23456}) == "1.5 -> 1.2346"
    tags = SimpleNamespace(labels=["O", "B"])
    assert answer_of(tags, {"label": [0, 1, 1], "prediction": [0, 1, 0]}) == "1 of 3 wrong"
    assert text_of(Reviews(), {"words": 3}) == ""


def test_loss_that_is_not_finite_is_due_to_the_update_since_which_it_is_not():
    nan = float("nan")
    sentences, blames_batch = judge_spike(7, {4: 1.5, 5: nan, 6: nan}, None)
    assert (
        sentences[1] == "The weights make this loss, not the batch: not finite since the update of step 5." and not blames_batch
    )
    sentences, blames_batch = judge_spike(7, {5: nan, 6: nan}, None)
    assert sentences[1] == "The batch has no finite loss at any of these weights: look at its samples." and blames_batch
