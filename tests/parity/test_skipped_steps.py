"""train.skip leaves steps out: nothing changes in them, on any number of processes, and all others are taken by their numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hftune.checkpoints.checkpointer import path_of, steps
from hftune.data.row_hashes import read_rows, root
from hftune.replay.audit import audit
from hftune.replay.ledger import read_ledger
from tests.support.runs import SMALL, train_on

JOB = (
    *(*SMALL, "task.dataset=tests.support.tasks:few_reviews", "task.max_train_samples=52"),
    *("train.epochs=2", "train.micro_batch_size=4", "train.lr=1e-3", "train.log_every=2", "train.ema_decay=0.9"),
    *("eval.every=4", "checkpoint.every=1", "checkpoint.keep=9"),
)
"""Two epochs of four steps, with dropout and a moving average."""
SKIP = "train.skip=[3, 4, 5, 8]"
"""Steps of both epochs, two of them with an evaluation, and the last one; steps with and without a line in metrics.jsonl."""
LAYERS = (f"recipe={Path(__file__).parents[1] / 'support' / 'next_token.yaml'}", "task.model=chain", "train.skip=[2, 10]")
"""A model that can be cut into stages, and ten steps."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def checkpoint(name, step):
        return f"resume={path_of(folder / f'{name}-on-1' / 'checkpoints', step)}"

    alone = {
        "all": JOB,
        "skipped": (*JOB, SKIP),
        "from a skipped step": (*JOB, SKIP, checkpoint("skipped", 4)),
        "changed on the way": (*JOB, SKIP, checkpoint("all", 2)),
        "stages": LAYERS,
    }
    together = {
        "skipped": (*JOB, SKIP, "train.num_workers=1"),
        "fsdp": (*JOB, SKIP),
        "stages": (*LAYERS, "parallel.pipeline_stages=2"),
    }
    found = {(name, 1): run for name, run in train_on(1, alone, folder).items()}
    return found | {(name, 2): run for name, run in train_on(2, together, folder, sharded=["fsdp"]).items()}


def taken(run):
    """The lines of the steps that were computed."""
    return {step: line for step, line in read_ledger(run.folder).steps.items() if not line.get("skipped")}


def tensors(run, step):
    """Weights, their average and the optimizer's state."""
    files = path_of(run.folder / "checkpoints", step).glob("*.safetensors")
    return {f"{file.stem} {name}": value for file in files for name, value in load_file(file).items()}


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_nothing_changes_in_skipped_steps_and_the_schedule_moves_on(runs):
    every, skipped = taken(runs["all", 1]), taken(runs["skipped", 1])
    assert [*every] == [*range(1, 9)] and [*skipped] == [1, 2, 6, 7]
    results = ("loss", "grad_norm")
    assert all(every[step][name] == skipped[step][name] for step in (1, 2) for name in results)
    assert all(every[step][name] != skipped[step][name] for step in (6, 7) for name in results)
    for name in ("lr", "digest", "num_samples"):
        assert [every[step][name] for step in skipped] == [line[name] for line in skipped.values()]
    assert steps(runs["skipped", 1].folder / "checkpoints") == [*range(1, 9)]
    for before, after in ((2, 3), (2, 5), (7, 8)):
        assert is_same(tensors(runs["skipped", 1], before), tensors(runs["skipped", 1], after))
        assert not is_same(tensors(runs["all", 1], before), tensors(runs["all", 1], after))


def test_logs_and_audit_know_of_them(runs):
    run = runs["skipped", 1]
    found = audit(run.folder)
    assert (found.problems, found.steps, found.skipped, found.whole_epochs) == ([], 8, [3, 4, 5, 8], 0)
    losses = {step: line["loss"] for step, line in taken(run).items()}
    items = {step: line["items"] for step, line in taken(run).items()}
    assert run.logged("train/loss_step") == [losses[1], losses[2], losses[6]]
    last = (losses[7] * items[7]) / items[7]
    assert run.logged("train/loss") == pytest.approx([losses[1], losses[2], losses[6], last])
    assert len(run.logged("eval/loss")) == 2 and run.result["steps"] == 8


@pytest.mark.parametrize("name", ["from a skipped step", "changed on the way"])
def test_a_resumed_run_ends_with_the_same_bits(runs, name):
    run, expected = runs[name, 1], runs["skipped", 1]
    assert is_same(tensors(run, 8), tensors(expected, 8)) and audit(run.folder).problems == []
    assert run.logged("train/loss") == expected.logged("train/loss")
    assert {step: line["loss"] for step, line in taken(run).items()} == {
        step: line["loss"] for step, line in taken(expected).items()
    }


@pytest.mark.parametrize("name", ["skipped", "fsdp", "stages"])
def test_they_do_not_depend_on_processes_or_strategy(runs, name):
    run, expected = runs[name, 2], runs["stages" if name == "stages" else "skipped", 1]
    assert audit(run.folder).problems == []
    assert [*taken(run)] == [*taken(expected)] == ([1, *range(3, 10)] if name == "stages" else [1, 2, 6, 7])
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(metric) == pytest.approx(expected.logged(metric), rel=1e-5)


def test_the_ledger_holds_the_root_of_the_rows(runs):
    for run in runs.values():
        rows = read_rows(run.folder)
        assert read_ledger(run.folder).starts[-1]["data"]["train"]["root"] == root(rows)
    assert len({root(read_rows(run.folder)) for run in runs.values()}) == 2  # two sets of data
