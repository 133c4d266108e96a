"""The loss over all pairs of a global batch, and its gradient, on 1, 2 and 4 processes and in micro-batches of any size.

The tolerances are those of test_world_size.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import NO_DROPOUT, SMALL, TINY, train_on

JOB = (
    *(word for word in SMALL if word not in TINY),
    *(word for word in TINY if "max_length" not in word),
    *("recipe=embeddings_demo", "task.dataset=tests.support.tasks:few_questions", "task.vocab_size=300"),
    *("train.epochs=1", "train.lr=1e-3", "train.clip_norm=0.5", "eval.every=5"),
)
PADDED = (*JOB, *NO_DROPOUT, "train.packing=off")
HARD = (*JOB, "task.negative_columns=[negative]", "task.symmetric=true", "train.micro_batch_size=3", "eval.batch_size=7")
JOBS = {
    "micro2": (*PADDED, "train.micro_batch_size=2"),
    "micro16": (*PADDED, "train.micro_batch_size=16", "eval.batch_size=5"),
    "hard": (*HARD, "checkpoint.every=2"),
}
WORLD_SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    more = {"sharded": HARD, "recomputed": (*HARD, "train.gradient_checkpointing=true")}
    found = {}
    for size in WORLD_SIZES:
        jobs = JOBS | (more if size == 2 else {})
        found |= {(name, size): run for name, run in train_on(size, jobs, folder, sharded=["sharded"]).items()}
    return found


def same(run, reference):
    assert len(reference.logged("train/loss")) == 7
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("eval/loss", 1e-5)):
        assert run.logged(name) == pytest.approx(reference.logged(name), rel=tolerance)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["micro2", "micro16"])
def test_loss_and_gradient_depend_on_neither_processes_nor_micro_batches(runs, name, world_size):
    same(runs[name, world_size], runs["micro16", 1])


@pytest.mark.parametrize(("name", "world_size"), [("hard", 2), ("hard", 4), ("sharded", 2), ("recomputed", 2)])
def test_with_dropout_hard_negatives_and_no_padding_they_depend_on_no_processes(runs, name, world_size):
    same(runs[name, world_size], runs["hard", 1])


def test_a_last_batch_of_four_has_three_negatives_a_loss_below_that_of_sixteen(runs):
    losses = runs["micro16", 1].logged("train/loss_step")
    assert losses[-1] < min(losses[:-1])  # log 4 and log 16 for embeddings that know nothing


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_evaluation_depends_on_neither_processes_nor_batch_size(runs, world_size):
    for name in ("micro2", "micro16"):
        metrics, expected = runs[name, world_size].result["metrics"], runs["micro16", 1].result["metrics"]
        assert metrics == pytest.approx(expected, rel=1e-5)
    rows = runs["hard", world_size].predictions
    assert [row["index"] for row in rows] == list(range(37))
    assert [row["rank"] for row in rows] == [row["rank"] for row in runs["hard", 1].predictions]


def test_resumed_it_ends_bit_equal(runs, folder):
    job = {"again": (*HARD, "checkpoint.every=2", f"output_dir={folder / 'again'}")}
    train_on(2, job, folder, stops={"again": (2, 1)})
    assert not (folder / "again" / "result.json").exists()
    run, expected = train_on(2, job, folder)["again"], runs["hard", 2]
    weights, wanted = (load_file(one.folder / "model_last" / "model.safetensors") for one in (run, expected))
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())
    assert run.logged("train/loss") == expected.logged("train/loss")
    assert run.result["metrics"] == expected.result["metrics"]
