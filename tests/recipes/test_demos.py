"""The promises of the house, for a recipe of each kind, with dropout, augmentation and mixing on.

It learns; losses, evaluations and predictions are those of one process on any number of them; a run that was stopped and resumed
ends with the same bits; its model evaluated again gives the same metrics, and predicts what the evaluation did. What is special
about a recipe is tested in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hftune import Recipe, load_model
from hftune.data.demo import articles
from hftune.reevaluation import evaluate
from hftune.replay.audit import audit
from tests.support.runs import SMALL, TINY, Run, train_on
from tests.support.tasks import few_digits, few_shapes

OFTEN = ("train.log_every=1", "checkpoint.every=3", "checkpoint.keep=9")
FEW = ("task.max_train_samples=60", "task.max_eval_samples=13", "train.batch_size=16", "train.micro_batch_size=4", *OFTEN)
"""Three whole steps and a last one of 12, an epoch."""
TITLES = (
    *("task.vocab_size=700", "task.max_source_length=128", "task.generation.num_beams=2", "train.epochs=3", "train.lr=2e-2"),
    "task.model_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
    "block_size: 8, num_random_blocks: 1, hidden_dropout_prob: 0.1}",
    *(*FEW, "train.micro_batch_size=null", "train.micro_batch_tokens=500", "eval.every=3 epochs"),
)
TEXTS = (
    *("task.model=null", "task.dataset=hftune.data.demo:spoken", "task.vocab_size=400", "task.max_target_length=24"),
    *("task.scores=[rouge, bleu, chrf]", "task.max_source_length=64", "task.generation={num_beams: 2, min_new_tokens: 8}"),
    *(*FEW, "train.micro_batch_size=null", "train.micro_batch_tokens=300", "train.epochs=3", "train.lr=5e-3"),
    "train.warmup_ratio=0",
)
T5 = "{model_type: t5, d_model: 32, d_kv: 8, d_ff: 48, num_layers: 2, num_heads: 4, dropout_rate: 0.1}"
BART = (
    "{model_type: bart, d_model: 32, encoder_layers: 2, decoder_layers: 2, encoder_attention_heads: 4, "
    "decoder_attention_heads: 4, encoder_ffn_dim: 48, decoder_ffn_dim: 48, dropout: 0.1, attention_dropout: 0.1, init_std: 0.2}"
)
VIT = (
    "{model_type: vit, image_size: 32, patch_size: 8, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 64, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}"
)
RESNET = "{model_type: resnet, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic}"
CONDITIONAL_DETR = (
    "{model_type: conditional_detr, d_model: 32, encoder_layers: 1, decoder_layers: 2, encoder_ffn_dim: 32, decoder_ffn_dim: 32, "
    "encoder_attention_heads: 4, decoder_attention_heads: 4, num_queries: 8, auxiliary_loss: true, backbone_config: "
    "{model_type: resnet, embedding_size: 8, hidden_sizes: [8, 16, 16, 32], depths: [1, 1, 1, 1], layer_type: basic, "
    "out_features: [stage4]}}"
)
LM = "{model_type: transformer_lm, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, dropout: 0.2}"
IMAGES = (
    *("replace=[task.model_config]", "task.dataset=tests.support.tasks:few_shapes", *FEW, "train.epochs=3", "train.lr=3e-3"),
    *("train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=5"),
)
FEW_PICTURES = ("task.max_train_samples=12", "task.max_eval_samples=5", "train.epochs=2", "train.batch_size=3")
CLASSES = (*SMALL, *OFTEN, "train.micro_batch_size=4", "train.epochs=2", "train.lr=1e-3")


@dataclass(frozen=True)
class Demo:
    """A recipe, small, and how its predictions are asked for again."""

    recipe: str
    words: tuple[str, ...]
    sizes: tuple[int, ...] = (2,)
    """The numbers of processes to compare with one."""
    inputs: Callable[[list[dict[str, Any]]], list[Any]] | None = None
    """Returns the raw inputs of ``predict`` for rows of predictions.jsonl; None if they cannot be had from there."""
    predicted: tuple[str, str] = ("prediction", "label")
    """The field of predictions.jsonl, and that of a row of ``predict`` that equals it."""
    num_eval: int = 13
    """Samples to evaluate on."""
    counts: bool = True
    """Whether its metrics, but for the loss, count classes, ranks or words, so that they are equal on any number of processes."""
    learns: bool = True
    """Whether its loss falls in these few steps."""


def texts(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["text"] for row in rows]


def pairs(rows: list[dict[str, Any]]) -> list[Any]:
    return [[row["text"], row["text_pair"]] for row in rows]


def images_of(dataset: Callable[[str], Any]) -> Callable[[list[dict[str, Any]]], list[Any]]:
    return lambda rows: [np.asarray(row["image"]) for row in islice(dataset("eval"), len(rows))]


def whole_sources(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["source"] for row in rows]


def sources(rows: list[dict[str, Any]]) -> list[Any]:
    by_start = {row["content"][:60]: row["content"] for row in articles("eval")}
    return [by_start[row["source"]] for row in rows]


GENERATED = ("generated", "generated")
DEMOS = {
    "stars": Demo("yelp_demo", CLASSES, (2, 4), texts, num_eval=37),
    "labels": Demo(
        "multi_label_demo",
        (*CLASSES, "task.class_weights=balanced", "task.focal_gamma=2"),
        (2, 4),
        texts,
        ("prediction", "labels"),
        37,
    ),
    "numbers": Demo("regression_demo", (*CLASSES, "train.packing=off"), num_eval=37, counts=False),
    "pairs": Demo(
        "pairs_demo", (*CLASSES, "task.class_weights={fits: 3}", "task.label_smoothing=0.1"), (2, 4), pairs, num_eval=37
    ),
    "tags": Demo("token_classification_demo", CLASSES, (2, 4), predicted=("predicted", ""), num_eval=37),
    "titles": Demo("bigbird_demo", (*TITLES, "task.architecture=prefix_lm"), (2,), sources, GENERATED),
    "titles of two stacks": Demo("bigbird_demo", (*TITLES, "task.architecture=encoder_decoder"), (2, 4), sources, GENERATED),
    "texts of t5": Demo("seq2seq", (*TEXTS, f"task.model_config={T5}"), (2, 4), whole_sources, GENERATED),
    "texts of bart": Demo("seq2seq", (*TEXTS, f"task.model_config={BART}"), (2,), whole_sources, GENERATED),
    "blocks": Demo(
        "wikitext2_demo",
        (
            f"task.model_config={LM}",
            *FEW,
            *("task.max_test_samples=11", "task.block_length=12", "train.epochs=2", "train.lr=0.5"),
        ),
        (2, 4),
        counts=False,
    ),
    "masks": Demo(
        "masked_lm_demo",
        (
            *(*FEW, "train.micro_batch_tokens=null", "task.masking=spans", "train.epochs=3", "train.warmup_ratio=0"),
            *(*(word for word in TINY if "max_length" not in word), "task.block_length=48"),
        ),
        (2, 4),
        counts=False,
    ),
    "chats": Demo(
        "chats_demo",
        (*FEW, "train.micro_batch_tokens=null", "train.epochs=2", "task.model_config.attention_dropout=0.1"),
        counts=False,
    ),
    "preferences": Demo(
        "dpo_demo",
        (
            *FEW,
            "train.micro_batch_tokens=null",
            "train.epochs=2",
            "task.model_config.attention_dropout=0.1",
            "eval.every=epoch",
        ),
        (2, 4),
        counts=False,
    ),
    "embeddings": Demo(
        "embeddings_demo",
        (
            *(word for word in TINY if "max_length" not in word),
            *("task.dataset=tests.support.tasks:few_questions", *FEW, "train.micro_batch_tokens=null", "train.epochs=2"),
        ),
        (2, 4),
        predicted=("rank", ""),
    ),
    "digits": Demo(
        "mnist_demo",
        (
            *("task.dataset=tests.support.tasks:few_digits", "task.augmentation={shift: 2, rotate: 10}", "train.epochs=2"),
            *(*OFTEN, "train.batch_size=40", "train.micro_batch_size=8", "eval.batch_size=7", "eval.every=epoch"),
        ),
        (2, 3),
        images_of(few_digits),
        num_eval=101,
    ),
    "images": Demo(
        "image_classification_demo",
        (
            *(*IMAGES, f"task.model_config={VIT}", "task.image_size=32", "task.mixup=0.3", "task.cutmix=1.0"),
            "task.augmentation={crop: 0.4, flip: 0.5, rand_augment: 9, color: 0.3, shift: 2, rotate: 10, erase: 0.3}",
            "task.label_smoothing=0.1",
        ),
        (2, 4),
        images_of(few_shapes),
    ),
    "images with batch norm": Demo(
        "image_classification_demo",
        (*IMAGES, "train.lr=1e-3", "task.mixup=0.3", f"task.model_config={RESNET}"),
        inputs=images_of(few_shapes),
    ),
    "segmentation": Demo(
        "segmentation_demo",
        (
            *("task.max_train_samples=24", "task.max_eval_samples=7", "train.epochs=3", "train.batch_size=6", "train.lr=1e-3"),
            *("train.micro_batch_size=2", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=3", *OFTEN),
        ),
        (2, 4),
        predicted=("mean_iou", ""),
        num_eval=7,
    ),
    "detection": Demo(
        "detection_demo",
        (
            *("task.max_train_samples=24", "task.max_eval_samples=7", "train.epochs=3", "train.batch_size=6", "train.lr=1e-3"),
            *("train.micro_batch_size=2", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=3", *OFTEN),
            "replace=[task.model_config]",  # RT-DETR chooses among equally good queries while it knows nothing
            f"task.model_config={CONDITIONAL_DETR}",
        ),
        (2, 4),
        num_eval=7,
        counts=False,
    ),
    "restoration": Demo(
        "restoration_demo",
        (*FEW_PICTURES, "train.micro_batch_size=2", *OFTEN),
        num_eval=5,
        counts=False,
        learns=False,
    ),
}


@pytest.fixture(scope="module", params=DEMOS)
def demo(request):
    return DEMOS[request.param]


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory) -> dict[Any, Run]:
    """Its runs: by the number of processes, and "resumed", which was stopped in its fourth step."""
    folder = tmp_path_factory.mktemp("runs")
    again = (*demo.words, f"output_dir={folder}/again")
    one = train_on(1, {"whole": demo.words, "stopped": again, "resumed": again}, folder, demo.recipe, stops={"stopped": (3, 0)})
    more = {size: train_on(size, {"whole": demo.words}, folder, demo.recipe)["whole"] for size in demo.sizes}
    return {1: one["whole"], "resumed": one["resumed"], **more}


def is_close(value: Any, expected: Any) -> bool:
    """Whether two metrics agree: numbers to 1e-5, as sums in a different order differ in their last bits."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(is_close(value[name], expected[name]) for name in expected)
    return value == (pytest.approx(expected, rel=1e-5, abs=2e-6) if isinstance(expected, float) else expected)


def test_it_learns(demo, runs):
    if not demo.learns:
        pytest.skip("a few steps are too few; see the recipe's own file")
    losses = runs[1].logged("train/loss")
    assert len(losses) >= 8 and sum(losses[-3:]) < sum(losses[:3])


def test_losses_do_not_depend_on_processes(demo, runs):
    for size in demo.sizes:
        for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("train/lr", 1e-12), ("eval/loss", 1e-5)):
            assert runs[size].logged(name) == pytest.approx(runs[1].logged(name), rel=tolerance), (size, name)


def test_evaluations_do_not_depend_on_processes(demo, runs):
    """Whatever counts classes, ranks or words is equal, and not only close."""
    name = demo.predicted[0]
    for size in demo.sizes:
        metrics, expected = dict(runs[size].result["metrics"]), dict(runs[1].result["metrics"])
        assert is_close(runs[size].result["test"], runs[1].result["test"]), size
        rows, expected_rows = runs[size].predictions, runs[1].predictions
        assert len(rows) == len(expected_rows) == demo.num_eval, size
        if demo.counts:
            assert metrics.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-5), size
            assert metrics == expected, size
            assert [row[name] for row in rows] == [row[name] for row in expected_rows], size
            assert demo.predicted != GENERATED or rows == expected_rows, size
        else:
            assert is_close(metrics, expected) and all(map(is_close, rows, expected_rows)), size


def test_a_run_that_was_stopped_and_resumed_ends_bit_equal(runs):
    whole, resumed = runs[1], runs["resumed"]
    found = audit(resumed.folder)
    assert (found.problems, [start["after_step"] for start in found.starts]) == ([], [0, 4])
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"] and resumed.result["test"] == whole.result["test"]
    one, two = (load_file(run.folder / "model_last" / "model.safetensors") for run in (whole, resumed))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_its_model_evaluated_again_gives_the_metrics_of_the_run_bit_for_bit(runs, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    recipe = Recipe.load(runs[1].folder / "recipe.yaml", trust_code=True)
    assert evaluate(recipe, runs[1].folder / "model_last").metrics == runs[1].result["metrics"]


def test_its_model_predicts_what_the_evaluation_did_in_batches_of_any_size(demo, runs):
    if demo.inputs is None:
        pytest.skip("its raw inputs cannot be had from predictions.jsonl; see the recipe's own file")
    logged, returned = demo.predicted
    rows, model = runs[1].predictions, load_model(runs[1].folder / "model_last", device="cpu", trust_code=True)
    for size in (1, 5):
        answers = model.predict(demo.inputs(rows), batch_size=size)
        assert [answer[returned] for answer in answers] == [row[logged] for row in rows]
