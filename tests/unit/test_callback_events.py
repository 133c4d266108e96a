"""hftune.Callback: what is told, to whom and in which order, and what becomes of one that fails."""

import json
import os
import random
import signal
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from hftune import Callback, ConfigError, Interrupted, Recipe, TrackerBackend, TrainingError, train
from hftune.callbacks import EVENTS, Callbacks, EvaluationDone, Wishes, make_callbacks
from hftune.models.tensor_file import write_tensors
from tests.support.events import step_taken
from tests.support.runs import Run

JOB = ("train.max_steps=5", "train.log_every=2", "eval.every=4", "checkpoint.every=100", "train.skip=[3]")


class Diary(Callback):
    """Writes down all that it hears of."""

    def __init__(self):
        self.heard = []


def note(event):
    return lambda diary, record: diary.heard.append((event, record))


for event in EVENTS:
    setattr(Diary, event, note(event))


class Meddler(Callback):
    """Draws random numbers, looks at the gradient and logs it; asks for an evaluation after step 1."""

    def on_begin(self, begin):
        self.parameters = dict(begin.model.named_parameters())

    def on_step(self, step):
        torch.rand(10), random.random()
        if not step.is_skipped:
            gradient = torch.stack([value.grad.square().sum() for value in self.parameters.values()]).sum().sqrt()
            step.log("grads/all", gradient)
            step.log("grads/told", min(step.grad_norm, 0.5))
        if step.step == 1:
            step.ask_for_evaluation()

    def on_evaluation(self, evaluation):
        evaluation.log("own/rows", len(evaluation.rows))


def lines_of(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three trainings: without callbacks, with two that only look, and with one that stops it."""
    folder, diary = tmp_path_factory.mktemp("runs"), Diary()

    def trained(name, *callbacks):
        return train(recipe(folder / name), callbacks=callbacks)

    results = {"plain": trained("plain"), "seen": trained("seen", diary, Meddler()), "stopped": trained("stopped", Stopper())}
    return results, {name: Run(folder / name) for name in results}, diary.heard


def test_events_come_in_the_order_of_the_story(runs):
    *_, heard = runs
    names = [
        *("on_begin", "on_step_begin", "on_step", "on_log"),
        *("on_step_begin", "on_step", "on_log", "on_log", "on_evaluation", "on_log"),
        *("on_step_begin", "on_step"),  # skipped
        *("on_step_begin", "on_step", "on_log", "on_log", "on_evaluation", "on_log"),
        *("on_step_begin", "on_step", "on_log", "on_log", "on_evaluation", "on_log"),
        "on_end",
    ]
    assert [name for name, _ in heard if name != "on_checkpoint"] == names
    taken = [record for name, record in heard if name == "on_step"]
    assert [step.step for step in taken] == [1, 2, 3, 4, 5] and [step.is_skipped for step in taken] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert [step.is_last for step in taken] == [False] * 4 + [True] and [step.is_logged for step in taken] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert {record.step for name, record in heard if name == "on_checkpoint"} >= {5}
    evaluations = [record for name, record in heard if name == "on_evaluation"]
    assert [evaluation.step for evaluation in evaluations] == [2, 4, 5]  # asked for after step 1, so with the sums of step 2
    assert all(isinstance(evaluation, EvaluationDone) and len(evaluation.rows) for evaluation in evaluations)


def test_a_callback_changes_nothing(runs):
    _, made, *_ = runs
    assert made["plain"].logged("train/loss") == made["seen"].logged("train/loss")
    assert made["plain"].logged("eval/loss") == made["seen"].logged("eval/loss")[1:]
    plain, seen = (load_file(made[name].folder / "model_last" / "model.safetensors") for name in ("plain", "seen"))
    assert all(torch.equal(value, seen[name]) for name, value in plain.items())


def test_what_a_callback_logs_is_in_the_line_of_its_step(runs):
    _, made, *_ = runs
    lines = lines_of(made["seen"])
    of_steps = [line for line in lines if "grads/all" in line]
    assert [line["step"] for line in of_steps] == [1, 2, 4, 5] and all("train/loss" in line for line in of_steps)
    assert [line["grads/all"] for line in of_steps] == pytest.approx([line["grads/told"] for line in of_steps], rel=1e-5)
    assert [(line["step"], line["own/rows"]) for line in lines if "own/rows" in line] == [(step, 23) for step in (2, 4, 5)]


def test_training_that_a_callback_stops_is_finished(runs):
    results, made, _ = runs
    stopped = results["stopped"]
    assert stopped.steps == 2 and stopped.stopped_early == "Stopped after step 2 of 5, as a callback asked for: it is enough."
    assert made["stopped"].logged("train/loss") == made["plain"].logged("train/loss")[:2]
    assert len(made["stopped"].logged("eval/loss")) == 1 and stopped.model_dir.is_dir()


def test_one_that_fails_is_left_alone_after_a_warning_unless_it_must_not_fail(capsys):
    class Broken(Callback):
        calls = 0

        def on_step(self, step):
            self.calls += 1
            raise ValueError("no such file\nat all.")

    class Vital(Broken):
        must_not_fail = True

    broken, diary = Broken(), Diary()
    callbacks = Callbacks([broken, diary], is_main=True)
    for step in (1, 2):
        callbacks.tell("on_step", step_taken(step))
    assert broken.calls == 1 and len(diary.heard) == 2
    assert capsys.readouterr().out == (
        f"warning: {Broken.__module__}.{Broken.__qualname__}.on_step failed: ValueError: no such file. It is not called again; "
        "training continues.\n"
    )
    with pytest.raises(ValueError, match="no such file"):
        Callbacks([Vital()], is_main=True).tell("on_step", step_taken(1))


class Stopper(Callback):
    """Stops after the step that follows ``after``."""

    def __init__(self, after=1):
        self.after = after

    def on_step(self, step):
        if step.step == self.after:
            step.ask_to_stop("it is enough")


def recipe(folder, *words):
    return Recipe.load("tests/support/tagging.yaml", *JOB, f"output_dir={folder}", *words)


def test_training_that_a_callback_given_from_python_has_ended_goes_on_if_it_changes(tmp_path, capsys):
    assert [train(recipe(tmp_path), callbacks=[Stopper()]).steps for _ in range(2)] == [2, 2]  # there is nothing left to train
    assert "change the callbacks" in capsys.readouterr().out
    assert train(recipe(tmp_path), callbacks=[Stopper(after=3)]).steps == 4
    assert train(recipe(tmp_path)).steps == 5


def test_one_that_must_not_fail_ends_the_run_also_when_it_hears_of_a_checkpoint(tmp_path):
    class Vital(Callback):
        must_not_fail = True

        def on_checkpoint(self, checkpoint):
            raise ValueError(f"no luck with step {checkpoint.step}")

    with pytest.raises(ValueError, match="no luck with step 4"):  # that of the first evaluation
        train(recipe(tmp_path), callbacks=[Vital()])
    with pytest.raises(ValueError, match="no luck with step 5"):
        train(recipe(tmp_path), callbacks=[Vital()])
    assert not (tmp_path / "result.json").exists()


def test_result_is_written_last_and_a_last_checkpoint_that_fails_costs_nothing_else(tmp_path, monkeypatch):
    def full(path, tensors):
        if "step_00000005" in str(path):
            raise OSError(28, "No space left on device")
        write_tensors(path, tensors)

    class Looks(Diary):
        def on_end(self, end):
            self.was_there = (tmp_path / "result.json").exists()
            self.heard.append(("on_end", end))

    monkeypatch.setattr("hftune.checkpoints.checkpointer.write_tensors", full)
    diary = Looks()
    with pytest.raises(TrainingError, match=r"Everything is saved except the last checkpoint: .* No space left on device"):
        train(recipe(tmp_path), callbacks=[diary])
    assert not diary.was_there and json.loads((tmp_path / "result.json").read_text())["steps"] == 5
    assert (tmp_path / "model" / "README.md").is_file() and "Finished" in (tmp_path / "report.html").read_text()
    (*_, (checkpoint, failed), (end, _), (failure, why)) = diary.heard
    assert (checkpoint, end, failure) == ("on_checkpoint", "on_end", "on_failure")
    assert failed.step == 5 and "No space left on device. The last intact one is of step 4." in failed.failure
    assert "except the last checkpoint" in why.reason and not why.is_interruption


class Awaits(TrackerBackend):
    told = []

    def start(self, config, earlier):
        self.told.append(earlier.awaits_evaluation)

    def log(self, step, values):
        pass


def test_stop_within_an_evaluation_keeps_the_profile_and_leaves_the_evaluation_to_the_next_start(tmp_path):
    class Kills(Meddler):
        def on_step(self, step):
            super().on_step(step)
            if step.step == 2:  # and then comes the evaluation that Meddler asks for, as eval.every does not
                os.kill(os.getpid(), signal.SIGTERM)

    words = "train.profile=[1,4]", f"track.with=[{__name__}.Awaits]"
    with pytest.raises(Interrupted, match="stopped after step 2"):
        train(recipe(tmp_path, *words), callbacks=[Kills()])
    assert [path.name for path in (tmp_path / "profile").glob("*.txt")] == ["steps_1-2_process0.txt"]
    train(recipe(tmp_path, *words))
    assert Awaits.told == [False, True]
    assert [line["step"] for line in lines_of(Run(tmp_path)) if "eval/loss" in line] == [2, 4, 5]


def test_of_a_failure_trackers_hear_last_as_they_may_wait_for_a_network():
    heard = []

    class First(Callback):
        def on_failure(self, failure):
            heard.append(type(self).__name__)

    class Second(First):
        pass

    Callbacks([First(), Second()], is_main=True).tell("on_failure", None)
    assert heard == ["Second", "First"]


def test_other_processes_call_those_that_ask_for_it():
    class Everywhere(Diary):
        on_all_processes = True

    here, there = Diary(), Everywhere()
    Callbacks([here, there], is_main=False).tell("on_step", step_taken(1))
    assert (len(here.heard), len(there.heard)) == (0, 1)


def test_values_have_a_section_of_their_own():
    wishes = Wishes({})
    step = step_taken(1, wishes=wishes, loss=1.0)
    for name in ("loss", "train/loss", "eval/own"):
        with pytest.raises(ValueError, match="choose a name such as my_values/"):
            step.log(name, 1.0)
    step.log("own/tensor", torch.tensor([2.5]))
    assert wishes.take_values() == {"own/tensor": 2.5} and wishes.take_values() == {}


def test_how_a_callback_was_made_is_told_alike_by_each_process():
    @dataclass(frozen=True)
    class Frozen(Callback):
        names: set

    one, other = {0, 8}, {8, 0}  # equal, and in another order, as sets of texts are in each process
    assert [*one] != [*other] and Frozen(one).made_as == Frozen(other).made_as != Frozen({0}).made_as


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("tests.unit.test_callback_events.Missing", "has no attribute 'Missing'"),
        ("tests.unit.test_callback_events.Run", "is not a subclass of hftune.Callback"),
        ({"type": "tests.unit.test_callback_events.Meddler", "every": 3}, r"cannot be made from \{'every': 3\}"),
    ],
)
def test_names_that_lead_to_no_callback_are_refused(named, said):
    with pytest.raises(ConfigError, match=f"callbacks.*{said}"):
        make_callbacks([named])
