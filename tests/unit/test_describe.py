"""Evaluation rows as a person reads them: in predictions.jsonl, reports and trackers."""

import numpy as np
import pytest
import torch

from hftune.metrics.restoration import psnr
from hftune.metrics.rouge import rouge, rouge_l_of_each
from hftune.tasks.image_classification import ImageClassification
from hftune.tasks.image_restoration import ImageRestoration
from hftune.tasks.language_modeling import LanguageModeling
from hftune.tasks.problems import SingleLabel
from hftune.tasks.text import MAX_SHOWN, beginning
from hftune.tasks.title_generation import TitleGeneration


def test_classes_get_their_names_and_the_error_is_what_the_label_did_not_get():
    logits_NK = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    problem = SingleLabel(["bad", "fair", "good"])
    rows = problem.describe(problem.rows(logits_NK, torch.tensor([2, 0])))
    probabilities_NK = logits_NK.softmax(-1)
    assert [(row["label"], row["prediction"]) for row in rows] == [("good", "fair"), ("bad", "bad")]
    for row, prediction, label in zip(rows, probabilities_NK[[0, 1], [1, 0]], probabilities_NK[[0, 1], [2, 0]], strict=True):
        assert row["probability"] == pytest.approx(float(prediction), abs=1e-6)
        assert row["label_probability"] == pytest.approx(float(label), abs=1e-6)
        assert row["error"] == pytest.approx(1 - float(label), abs=2e-6)
        assert row["loss"] == pytest.approx(-float(label.log()), abs=1e-6)
    (sure,) = problem.rows(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
    assert str(sure["loss"]) == "0.0"  # not -0.0


def test_long_texts_are_cut_and_say_so():
    assert beginning("a" * MAX_SHOWN) == "a" * MAX_SHOWN
    assert beginning("a" * (MAX_SHOWN + 1)) == "a" * (MAX_SHOWN - 1) + "…"


def test_a_title_has_its_own_rouge_whose_mean_is_the_metric():
    rows = [{"title": "今天天气很好", "generated": "今天天气好"}, {"title": "股市上涨", "generated": "球赛"}]
    described = TitleGeneration.describe(None, rows)
    assert described[1]["error"] == 1.0 and 0 < described[0]["error"] < 0.2
    texts = {"predictions": [row["generated"] for row in rows], "references": [row["title"] for row in rows]}
    name, scores = rouge_l_of_each(**texts, language="zh")
    assert np.mean(scores) == rouge(**texts, language="zh")[name] and name == "rouge_l_char"


def test_a_blocks_error_is_its_mean_loss_whatever_its_length():
    rows = [{"text": "a", "tokens": 4, "loss": 8.0}, {"text": "b", "tokens": 0, "loss": 0.0}]
    assert [row["error"] for row in LanguageModeling.describe(None, rows)] == [2.0, 0.0]


def test_a_restored_images_error_is_that_of_its_damaged_pixels_if_there_are_any():
    rows = [{"mse": 0.1, "mse_inside": 0.4, "ssim": 0.5}, {"mse": 0.1, "mse_inside": None, "ssim": 0.5}]
    described = ImageRestoration.describe(None, rows)
    assert [row["error"] for row in described] == [0.4, 0.1]
    assert ImageRestoration.caption(None, described[0]) == f"PSNR {psnr(0.4):.2f} dB inside the mask; SSIM 0.500"
    assert ImageRestoration.caption(None, described[1]) == "PSNR 10.00 dB; SSIM 0.500"


def test_sample_images_are_the_pixels_that_the_model_was_given_in_three_channels():
    task = ImageClassification()
    pixels_HW1 = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28, 1)
    batch = task.collate([{"image": np.zeros_like(pixels_HW1), "label": 0}, {"image": pixels_HW1, "label": 7}])
    (image_HW3,) = task.sample_images(None, None, batch, [1])
    assert image_HW3.dtype == np.uint8 and (image_HW3 == pixels_HW1).all() and image_HW3.shape == (28, 28, 3)
    assert task.caption({"label": "7", "prediction": "1", "probability": 0.8312}) == "7, predicted 1 (0.83)"
