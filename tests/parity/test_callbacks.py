"""Callbacks of a recipe: what they log and ask for is equal on any number of processes and across a kill, and changes no loss."""

import json

import pytest

from hftune.checkpoints.checkpointer import path_of, steps
from tests.support.runs import Command, Run, train_on

RECIPE = "tests/support/tagging.yaml"
JOB = ("train.max_steps=8", "eval.every=100", "checkpoint.every=2", "checkpoint.keep=9")


def named(name, **arguments):
    return (
        "callbacks=[{type: " + f"tests.support.callbacks.{name}" + "".join(f", {k}: {v}" for k, v in arguments.items()) + "}]"
    )


ASKS = (*JOB, named("Asks", evaluation=2, checkpoint=6))
ENDS = (*JOB, named("Asks", evaluation=4, checkpoint=4, end=4))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    before = f"resume={path_of(folder / 'asks-on-1' / 'checkpoints', 2)}"  # in which the evaluation is asked for, but not made
    alone = {"plain": JOB, "asks": ASKS, "from step 2": (*ASKS, before), "ends": ENDS}
    found = {(name, 1): run for name, run in train_on(1, alone, folder, RECIPE).items()}
    together = {
        "asks": ASKS,
        "stopped": ASKS,
        "elsewhere": (*JOB, named("EndsElsewhere")),
        "fails": (*JOB, named("FailsElsewhere")),
        "elsewhere, stopped": (*JOB, named("EndsElsewhere")),
    }
    stops = {"stopped": (2, 1), "elsewhere, stopped": (1, 1)}  # asked for in the step that is finished then
    found |= {(name, 2): run for name, run in train_on(2, together, folder, RECIPE, stops=stops).items()}
    again = {name: together[name] for name in stops}
    found |= {(name, 2): run for name, run in train_on(2, again, folder, RECIPE).items()}
    return found | {(name, 4): run for name, run in train_on(4, {"asks": ASKS}, folder, RECIPE).items()}


def evaluated(run: Run) -> list[int]:
    return [line["step"] for line in lines(run) if "eval/loss" in line]


def lines(run: Run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("which", [("asks", 1), ("asks", 2), ("asks", 4), ("stopped", 2), ("from step 2", 1)])
def test_what_is_asked_for_is_done_alike_on_any_number_of_processes_and_after_a_resume(runs, which):
    run, plain = runs[which], runs["plain", 1]
    for name in ("train/loss", "train/grad_norm"):
        assert run.logged(name) == pytest.approx(plain.logged(name), rel=1e-10)
    assert run.logged("own/loss") == run.logged("train/loss_step")
    assert evaluated(run) == [3, 8] and evaluated(plain) == [8]
    assert run.logged("eval/loss")[-1] == pytest.approx(plain.logged("eval/loss")[-1], rel=1e-10)
    assert 7 in steps(run.folder / "checkpoints") and 7 not in steps(plain.folder / "checkpoints")


def test_one_that_only_looks_changes_no_bit_of_a_loss(runs):
    assert runs["asks", 1].logged("train/loss") == runs["plain", 1].logged("train/loss")


@pytest.mark.parametrize(
    ("which", "step", "why"),
    [
        (("ends", 1), 5, "the test says so"),
        (("elsewhere", 2), 3, "the last process has seen enough"),
        (("elsewhere, stopped", 2), 3, "the last process has seen enough"),
    ],
)
def test_an_end_is_everybodys_whoever_asks_for_it(runs, which, step, why):
    run = runs[which]
    assert run.result["steps"] == step and run.result["best"]["step"] == step and evaluated(run) == [step]
    assert run.result["stopped_early"] == f"Stopped after step {step} of 8, as a callback asked for: {why}."


def test_training_that_a_callback_has_ended_goes_on_without_it(runs, tmp_path):
    ended, plain = runs["ends", 1], runs["plain", 1]
    again = train_on(
        1, {"same": (*ENDS, f"output_dir={ended.folder}"), "other": (*JOB, f"output_dir={ended.folder}")}, tmp_path, RECIPE
    )
    assert again["other"].result["steps"] == 8 and again["other"].result["stopped_early"] is None
    assert again["other"].logged("train/loss") == plain.logged("train/loss")


def test_one_that_fails_on_one_process_is_left_alone(runs):
    run = runs["fails", 2]
    assert run.logged("train/loss") == runs["asks", 2].logged("train/loss") and run.result["steps"] == 8
    said = (run.folder.parent / "tagging-2.log").read_text()
    assert said.count("tests.support.callbacks.FailsElsewhere.on_step failed: RuntimeError: no luck in step 1.") == 1


@pytest.mark.parametrize(
    ("name", "said"), [("MustNotFail", "no luck in step 1"), ("MustNotFailAtTheEnd", "no luck at the end")]
)
def test_one_that_must_not_fail_ends_all_processes_and_leaves_no_result(name, said, tmp_path):
    job = Command(2, f"recipe={RECIPE}", *JOB, "train.max_steps=2", named(name), f"output_dir={tmp_path}/out")
    _, errors = job.communicate()
    assert job.returncode == 1 and said in errors and not (tmp_path / "out" / "result.json").exists()
