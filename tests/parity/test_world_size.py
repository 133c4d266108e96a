"""The promise of the house: the same training on 1, 2 and 4 processes and for every micro-batch size.

The tolerance of losses is 1e-5 relative in float32: sums in another order differ in the last bits, and AdamW lets that grow.
"""

import pytest

from tests.support.runs import NO_DROPOUT, SMALL, train_on

FEW = (*SMALL, "task.dataset=tests.support.tasks:few_reviews", "task.max_train_samples=52")
"""An epoch has three whole steps and a last one of 4 samples."""
WORLD_SIZES = (1, 2, 4)
MICRO_BATCH_SIZES = (2, 4, 16)
EPOCH = (*FEW, *NO_DROPOUT, "train.epochs=1")
TWO_EPOCHS = (*FEW, "train.epochs=2", "train.micro_batch_size=4")
JOBS = {
    **{f"micro{size}": (*EPOCH, f"train.micro_batch_size={size}") for size in MICRO_BATCH_SIZES},
    "tokens": (*EPOCH, "train.micro_batch_size=null", "train.micro_batch_tokens=128"),
    "dropout": TWO_EPOCHS,
    "workers": (*TWO_EPOCHS, "train.num_workers=1"),
    "sgd": (*EPOCH, "train.micro_batch_size=4", "train.optimizer=sgd", "train.lr=0.1"),
    "eval5": (*EPOCH, "train.micro_batch_size=4", "eval.batch_size=5"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {(name, size): run for size in WORLD_SIZES for name, run in train_on(size, JOBS, folder).items()}


def same(run, reference, num_steps=4):
    assert len(reference.logged("train/loss")) == num_steps
    assert run.logged("train/loss") == pytest.approx(reference.logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", [f"micro{size}" for size in MICRO_BATCH_SIZES] + ["tokens"])
def test_losses_do_not_depend_on_processes_or_micro_batches(runs, name, world_size):
    same(runs[name, world_size], runs["micro16", 1])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_norm_is_that_of_the_global_batch(runs, world_size):
    norms = runs["micro2", world_size].logged("train/grad_norm")
    assert norms == pytest.approx(runs["micro16", 1].logged("train/grad_norm"), rel=1e-4)  # a norm feels AdamW's drift more


@pytest.mark.parametrize("world_size", (2, 4))
def test_dropout_does_not_depend_on_processes(runs, world_size):
    same(runs["dropout", world_size], runs["dropout", 1], num_steps=8)


def test_dropout_is_really_on(runs):
    """The first loss, before any update: the runs are of unequal length, and so is their learning rate."""
    first, without = (runs[name, 1].logged("train/loss")[0] for name in ("dropout", "micro4"))
    assert first != pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_loading_in_workers_changes_nothing(runs, world_size):
    same(runs["workers", world_size], runs["dropout", 1], num_steps=8)


@pytest.mark.parametrize("world_size", (2, 4))
def test_sgd_does_not_depend_on_processes(runs, world_size):
    same(runs["sgd", world_size], runs["sgd", 1])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["micro4", "eval5"])
def test_evaluation_does_not_depend_on_processes_or_batch_size(runs, name, world_size):
    metrics, expected = runs[name, world_size].result["metrics"], runs["micro4", 1].result["metrics"]
    assert metrics.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert metrics == expected
    assert sum(map(sum, metrics["confusion_matrix"])) == 37


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_predictions_are_one_row_a_sample_in_dataset_order(runs, world_size):
    rows, expected = runs["eval5", world_size].predictions, runs["micro4", 1].predictions
    assert [row["index"] for row in rows] == list(range(37))
    assert [(row["label"], row["prediction"]) for row in rows] == [(row["label"], row["prediction"]) for row in expected]


def test_learning_rate_falls_to_zero_at_the_last_step_on_any_number_of_processes(runs):
    rates = [runs["micro4", size].logged("train/lr") for size in WORLD_SIZES]
    assert rates[0] == rates[1] == rates[2]
    assert len(rates[0]) == 4 and 0 < rates[0][-1] < rates[0][-2]
