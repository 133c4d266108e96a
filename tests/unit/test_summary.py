"""What is printed before the first and after the last step."""

from types import SimpleNamespace

import numpy as np
import pytest

import hftune
from hftune import Recipe
from hftune.batch_plan import BatchPlan
from hftune.tracking.summary import Summary, best_and_last, describe_classes, metric_table

LINES = [
    {"step": 1, "train/loss": 2.0},
    {"step": 4, "eval/loss": 0.75, "eval/accuracy": 0.30000000000000004, "eval/confusion_matrix": [[1]]},
    {"step": 8, "train/loss": 1.0},
    {"step": 8, "eval/loss": 0.7, "eval/accuracy": 0.25, "eval/psnr": 12.3456},
    {"step": 8, "test/loss": 0.7},
]


def started(recipe, plan, counts, **facts):
    """What is printed at the start of a run with these facts."""
    defaults = {"parameters": 12000, "trainable_parameters": 12000, "num_steps": 2, "steps_per_epoch": 2, "notices": []}
    facts = {"model": "Net", "device": "cpu", "precision": "no", "processes": 1, "data": {}, **defaults, **facts}
    recipe.task.class_counts = lambda dataset: counts
    Summary().on_begin(SimpleNamespace(recipe=recipe, plan=plan, facts=facts, datasets={"train": []}))


def test_start_names_model_labels_sizes_and_folder(capsys):
    recipe = Recipe.load("yelp_demo", "output_dir=out", "train.mixed_precision=bf16")
    plan = BatchPlan(4000, 32, micro_batch_tokens=1024, lengths=np.full(4000, 10))
    sizes = {"train": {"samples": 4000}, "eval": {"samples": 800}}
    facts = {"data": sizes, "precision": "bf16", "processes": 2, "num_steps": 500, "steps_per_epoch": 125}
    started(recipe, plan, {"bad": 1500, "good": 2500}, **facts, notices=["Texts are cut."])
    assert capsys.readouterr().out.splitlines() == [
        f"  recipe   yelp_demo (hftune {hftune.__version__})",
        "  model    Net, 12,000 parameters",
        "  labels   bad: 1,500, good: 2,500",
        "  samples  4,000 train, 800 eval",
        "  steps    500, 125 an epoch",
        "  batch    32 samples, in micro-batches of at most 1,024 tokens",
        "  runs on  2 processes, cpu, bf16 and float32",
        "  output   out",
        "note: Texts are cut.",
    ]


def test_start_tells_parameters_that_are_not_trained_apart_and_has_no_labels_without_classes(capsys):
    recipe = Recipe.load("yelp_demo", "output_dir=out", "train.micro_batch_tokens=null", "train.micro_batch_size=8")
    started(recipe, BatchPlan(64, 32, micro_batch_size=8), {}, trainable_parameters=300)
    said = capsys.readouterr().out
    assert "labels" not in said and "32 samples, in micro-batches of at most 8 samples\n" in said
    assert "Net, 12,000 parameters, 300 of them trained\n" in said and "1 process, cpu, float32\n" in said


def test_many_classes_are_summed_up_by_the_rarest_and_the_most_frequent():
    counts = {f"class {number}": 100 + number for number in range(77)} | {"a class with a long name indeed": 3}
    assert describe_classes(counts) == "78, with 3 (a class with a long nam…) to 176 (class 76) samples"


def test_end_is_a_table_of_the_best_the_last_and_the_test():
    evaluations = best_and_last(LINES, 4, 8) | {"test": {"loss": 0.8, "accuracy": 0.28, "psnr": None}}
    assert metric_table(evaluations).splitlines() == [
        "            best (step 4)  last (step 8)  test",
        "  loss      0.750          0.700          0.800",
        "  accuracy  0.300          0.250          0.280",
        "  psnr                     12.35",
    ]


@pytest.mark.parametrize(
    ("best", "last", "names"),
    [(8, 8, ["best and last (step 8)"]), (4, 8, ["best (step 4)", "last (step 8)"]), (4, 9, ["best (step 4)"]), (5, 9, [])],
)
def test_best_and_last_are_one_column_if_they_are_one(best, last, names):
    """The last step has an evaluation of its own, but its line may be missing from a file that was edited."""
    assert list(best_and_last(LINES, best, last)) == names
