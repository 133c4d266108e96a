"""A run that is stopped, anywhere and at any number of processes, ends where it would have ended."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hftune import ConfigError, DataError, Recipe, cli, train
from hftune.checkpoints.checkpointer import newest, open_checkpoint
from hftune.checkpoints.resume import note_begun
from hftune.models.tensor_file import write_tensors
from hftune.optim import lr_at
from hftune.replay.audit import audit
from hftune.replay.ledger import read_ledger
from hftune.run import main as run_main
from hftune.tracking.ledger import NOTHING
from tests.support.runs import NO_DROPOUT, SMALL, Command, Group, Run, environment, train_on

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import kill

STEPS = 14  # two epochs of 7
JOB = (
    *SMALL,
    "task.dataset=tests.support.tasks:few_reviews",
    "task.model_config.num_hidden_layers=1",
    "train.epochs=2",
    "train.micro_batch_size=4",
    "checkpoint.every=3",
    "eval.every=5",
    "eval.metric=accuracy",
)


def weights(run):
    return load_file(run.folder / "model_last" / "model.safetensors")


def assert_bit_equal(one, two):
    one, two = weights(one), weights(two)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def lines(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def without_speed(run):
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines(run)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    plain = {"plain": (*JOB, *NO_DROPOUT)}
    return {size: train_on(size, {"dropout": JOB, **(plain if size == 1 else {})}, folder) for size in (1, 2, 4)}


def stopped_and_resumed(folder, triples, overrides=JOB, extra=()):
    """Stop a run for each (step, processes before, processes after), go on, and return the finished runs."""
    names = {triple: "step-{}-from-{}-to-{}".format(*triple) for triple in triples}
    jobs = {triple: (*overrides, f"output_dir={folder / names[triple]}") for triple in triples}
    for size in (1, 2, 4):
        some = {names[triple]: jobs[triple] for triple in triples if triple[1] == size}
        stops = {names[triple]: (triple[0] - 1, triple[0] % size) for triple in triples if triple[1] == size}
        if some:
            train_on(size, some, folder, stops=stops)
    for triple in triples:  # each one was stopped where it should be; in the evaluation of the step before, where there is one
        due = (triple[0] - 1) % 5 == 0
        assert newest(folder / names[triple] / "checkpoints")[0].step == triple[0] - due
        assert not (folder / names[triple] / "result.json").exists()
    done = {}
    for size in (1, 2, 4):
        some = {names[triple]: (*jobs[triple], *extra) for triple in triples if triple[2] == size}
        if some:
            done |= train_on(size, some, folder)
    return {triple: done[names[triple]] for triple in triples}


def test_resumed_on_as_many_processes_it_ends_bit_equal_with_dropout(tmp_path, unbroken):
    triples = [(2, 1, 1), (7, 1, 1), (9, 1, 1), (5, 2, 2), (12, 2, 2), (10, 4, 4)]
    for (_, size, _), run in stopped_and_resumed(tmp_path, triples).items():
        expected = unbroken[size]["dropout"]
        assert_bit_equal(run, expected)
        assert without_speed(run) == without_speed(expected)
        assert run.predictions == expected.predictions
        assert run.result["best"] == expected.result["best"] and run.result["metrics"] == expected.result["metrics"]
        found = audit(run.folder)
        assert (found.problems, found.steps, found.whole_epochs, len(found.starts)) == ([], STEPS, 2, 2)
        assert recorded(run) == recorded(expected)


def recorded(run):
    """What the ledger says of each step that counts, and the hashes of the last checkpoint."""
    ledger = read_ledger(run.folder)
    chained = [*ledger.steps.values(), ledger.checkpoints[STEPS]]
    return [{key: value for key, value in line.items() if key != "prev"} for line in chained]


TOUR = (1, 2, 4, 1, 4, 2, 1)
"""Numbers of processes, one after the other: each change among 1, 2 and 4 of them."""


def test_resumed_on_other_numbers_of_processes_it_takes_the_same_steps(tmp_path, unbroken):
    """Two runs, each stopped six times: one after every even step, the other after every odd one."""
    assert set(pairwise(TOUR)) == {(before, after) for before in (1, 2, 4) for after in (1, 2, 4) if before != after}
    stops = {name: range(first, STEPS, 2) for first, name in ((2, "even"), (3, "odd"))}
    jobs = {name: (*JOB, f"output_dir={tmp_path / name}") for name in stops}
    starts = {name: [(0, TOUR[0])] for name in stops}
    for leg, (size, following) in enumerate(pairwise(TOUR)):
        taken = {name: steps[leg] - 1 - starts[name][-1][0] for name, steps in stops.items()}
        train_on(size, jobs, tmp_path, stops={name: (count, leg % size) for name, count in taken.items()})
        for name, steps in stops.items():
            reached = steps[leg] - (steps[leg] % 5 == 1)  # in the evaluation of the step before, where there is one
            assert newest(tmp_path / name / "checkpoints")[0].step == reached
            assert not (tmp_path / name / "result.json").exists()
            starts[name].append((reached, following))
    expected = unbroken[1]["dropout"]
    for name, run in train_on(TOUR[-1], jobs, tmp_path).items():
        assert run.logged("train/loss") == pytest.approx(expected.logged("train/loss"), rel=1e-5)
        assert run.logged("train/lr") == expected.logged("train/lr")
        assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(expected)]
        found = audit(run.folder)
        assert (found.problems, found.steps, found.whole_epochs) == ([], STEPS, 2)
        assert [(start["after_step"], start["world_size"]) for start in found.starts] == starts[name]


def test_micro_batch_size_may_change_on_the_way(tmp_path, unbroken):
    triples = [(4, 1, 1), (9, 2, 1)]
    runs = stopped_and_resumed(tmp_path, triples, (*JOB, *NO_DROPOUT), extra=("train.micro_batch_size=7",))
    for run in runs.values():
        assert run.logged("train/loss") == pytest.approx(unbroken[1]["plain"].logged("train/loss"), rel=1e-5)
        assert audit(run.folder).problems == []


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after step 10; its checkpoints are of steps 9 and 10."""
    folder = tmp_path_factory.mktemp("stopped")
    job = (*JOB, f"output_dir={folder / 'out'}")
    train_on(1, {"out": job}, folder, stops={"out": (9, 0)})
    return folder / "out"


@pytest.fixture
def copy(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "out"))


def recipe(folder, *overrides):
    return Recipe.load("yelp_demo", *JOB, f"output_dir={folder}", *overrides)


def test_any_file_cut_or_flipped_makes_resume_fall_back_to_the_checkpoint_before(copy, capsys, unbroken):
    newest_one = copy / "checkpoints" / "step_00000010"
    for file in sorted(newest_one.iterdir()):
        whole = file.read_bytes()
        middle = len(whole) // 2
        for broken in (whole[:-1], whole[:middle], b"", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            file.write_bytes(broken)
            found, skipped = newest(copy / "checkpoints")
            assert found.step == 9
            assert len(skipped) == 1 and skipped[0].startswith(f"Skipped {newest_one}: {file.name} ")
        file.unlink()
        assert newest(copy / "checkpoints")[1] == [f"Skipped {newest_one}: {file.name} is missing."]
        file.write_bytes(whole)
    assert newest(copy / "checkpoints")[0].step == 10
    (newest_one / "optimizer.safetensors").write_bytes(b"")
    run = Run(train(recipe(copy)).output_dir)
    said = capsys.readouterr().out
    assert (
        f"Skipped {newest_one}: optimizer.safetensors has 0 bytes instead of the " in said
        and "Resuming from step 9 of 14" in said
    )
    assert_bit_equal(run, unbroken[1]["dropout"])
    assert without_speed(run) == without_speed(unbroken[1]["dropout"])


def test_broken_checkpoints_of_later_steps_go_before_whole_ones(copy):
    """They would count among the newest, and only they be left."""
    for step in (11, 12, 13):
        shutil.copytree(copy / "checkpoints" / "step_00000010", copy / "checkpoints" / f"step_000000{step}")
        (copy / "checkpoints" / f"step_000000{step}" / "model.safetensors").write_bytes(b"")
    Run(train(recipe(copy, "train.max_steps=11", "checkpoint.keep=1")).output_dir)
    left = sorted(int(path.name[-8:]) for path in (copy / "checkpoints").iterdir())
    found, skipped = newest(copy / "checkpoints")
    assert left[-1] == found.step == 11 and skipped == []


def test_folder_without_a_whole_checkpoint_is_refused_and_left_alone(copy):
    for path in (copy / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    count = len(list((copy / "checkpoints").iterdir()))
    said = refused(copy)
    assert said.startswith(f"Skipped {copy}/checkpoints/step_00000010: manifest.json is missing. Skipped ")
    assert said.endswith(" No intact checkpoint is left. resume=never removes them and starts over.")
    assert len(list((copy / "checkpoints").iterdir())) == count


def test_run_that_was_killed_after_its_last_step_is_only_finished(copy, unbroken):
    """The last checkpoint is there, the result is not; or the last model is not."""
    run = Run(train(recipe(copy)).output_dir)
    for lost in ("result.json", "model"):
        shutil.rmtree(copy / lost) if lost == "model" else (copy / lost).unlink()
        assert train(recipe(copy)).steps == 14
        assert without_speed(run) == without_speed(unbroken[1]["dropout"])
        assert (copy / "model" / "model.safetensors").is_file() and run.result["best"]["value"] is not None


def better_model(folder):
    """As a kill leaves it that comes after an evaluation at step 12 wrote model/ and before its checkpoint was whole."""
    (folder / "model" / "hftune.json").write_text('{"step": 12, "metric": "accuracy", "value": 0.99}')
    return (folder / "model" / "model.safetensors").stat().st_ino


def test_better_model_that_was_written_after_the_checkpoint_stays_the_best_with_its_score(copy):
    file = better_model(copy)
    run = Run(train(recipe(copy, "eval.every=1000", "train.max_steps=11")).output_dir)
    assert run.result["best"] == {"metric": "accuracy", "value": 0.99, "step": 12}
    assert (copy / "model" / "model.safetensors").stat().st_ino == file


def test_better_model_that_was_written_after_the_checkpoint_is_not_taken_for_the_best_of_another_history(copy):
    """Killed between an evaluation that wrote model/ and its checkpoint, then gone on at another learning rate."""
    better_model(copy)
    run = Run(train(recipe(copy, "train.lr=1e-6")).output_dir)
    assert run.result["best"]["step"] >= 10 and run.result["best"]["value"] < 0.99
    about = json.loads((copy / "model" / "hftune.json").read_text())
    assert {name: about[name] for name in ("step", "metric", "value")} == run.result["best"]


def test_evaluation_that_was_logged_after_the_checkpoint_is_not_logged_twice(copy, unbroken):
    line = {**lines(unbroken[1]["dropout"])[-1], "step": 10}
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + "\0" * 50)
    run = Run(train(recipe(copy)).output_dir)
    assert without_speed(run) == without_speed(unbroken[1]["dropout"])


def test_planted_pickle_is_refused_and_never_executed(copy, tmp_path):
    """Even with a manifest made to fit: tensors are safetensors, the rest is JSON, nothing else is read."""
    import hashlib
    import pickle

    from hftune.checkpoints.checkpointer import _digest

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = copy / "checkpoints" / "step_00000010"
    manifest = json.loads((path / "manifest.json").read_text())
    planted = pickle.dumps(Planted())
    (path / "model.safetensors").write_bytes(planted)
    manifest["files"]["model.safetensors"] = {"bytes": len(planted), "sha256": hashlib.sha256(planted).hexdigest()}
    manifest.pop("sha256")
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
    found, skipped = newest(copy / "checkpoints")
    assert found.step == 9 and skipped[0].startswith(f"Skipped {path}: model.safetensors is not a safetensors file")
    assert not (tmp_path / "executed").exists()


def test_finished_run_says_so_and_trains_nothing(copy, capsys):
    first = train(recipe(copy))
    before = (copy / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    again = train(recipe(copy))
    assert again == first and (copy / "metrics.jsonl").read_bytes() == before
    accuracy = f"{first.best['value']:.3f}"
    assert capsys.readouterr().out == (
        f"{copy} is finished: 14 steps, accuracy {accuracy} at step {first.best['step']}. Nothing was trained. To train longer, raise train.epochs; to start over, "
        "set resume=never or a different output_dir.\n"
    )


def test_finished_run_with_another_rate_is_refused_and_left_as_it_is(copy, capsys):
    result = train(recipe(copy)).output_dir / "result.json"
    before = result.read_bytes()
    expected = (
        f"{copy} holds a finished run of 14 steps, and this recipe differs from it: train.lr=0.0001 (it was 5e-05), "
        "train.weight_decay=0.1 (it was 0.0). Nothing would be trained. Set output_dir=... to a new folder, or resume=never "
        "to replace that run."
    )
    assert refused(copy, "train.weight_decay=0.1", "train.lr=1e-4", "train.log_every=7") == expected
    capsys.readouterr()
    words = [word for word in command(copy, "train.lr=1e-4")[3:] if not word.startswith("output_dir=")]
    assert run_main([*words, f"output_dir={copy}"]) == 2
    assert "differs from it: train.lr=0.0001" in capsys.readouterr().err
    assert result.read_bytes() == before


def test_finished_run_asked_again_in_another_way_of_computing_is_still_finished(copy, capsys):
    first = train(recipe(copy))
    capsys.readouterr()
    words = (
        "train.log_every=3",
        "checkpoint.keep=7",
        "train.stall_after_s=99",
        "eval.batch_size=5",
        "train.micro_batch_size=2",
    )
    assert train(recipe(copy, *words, "track.run_name=again", "train.epochs=5", "train.max_steps=14")) == first
    assert "Nothing was trained." in capsys.readouterr().out


def test_more_epochs_another_rate_and_another_metric_are_applied_and_said(copy, capsys):
    run = Run(train(recipe(copy, "train.epochs=3", "train.lr=1e-4", "eval.metric=loss")).output_dir)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("note: Changed")] == [
        "note: Changed: train.epochs=3 (it was 2).",
        "note: Changed: train.lr=0.0001 (it was 5e-05).",
        "note: Changed: eval.metric=loss (it was accuracy).",
    ]
    assert run.result["steps"] == 21 and run.result["best"]["step"] > 10 and audit(run.folder).whole_epochs == 3
    assert run.logged("train/lr")[10] == lr_at(10, 21, recipe(copy, "train.epochs=3", "train.lr=1e-4").train, 7)


def refused(folder, *overrides):
    with pytest.raises(ConfigError) as caught:
        train(recipe(folder, *overrides))
    return str(caught.value)


def test_what_cannot_change_is_refused_with_both_values_and_nothing_is_touched(copy):
    before = sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*") if path.name not in (".lock", ".owner"))
    at = f"{copy}/checkpoints/step_00000010"
    said = refused(copy, "seed=7", "train.batch_size=32", "task.max_length=32", "train.lr=1")
    changes = "seed=7 (it was 42), task.max_length=32 (it was 64), train.batch_size=32 (it was 16)"
    assert said.startswith(f"{at} cannot resume with {changes}. Restore the earlier values; or start over with resume=never")
    said = refused(copy, "train.epochs=1")
    assert said.startswith(
        "The checkpoint is of step 10, and train.epochs=1 with train.max_steps=null ends after step 7. Raise"
    )
    after = sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*") if path.name not in (".lock", ".owner"))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert [time for path, time in after if path.is_file()] == [time for path, time in before if path.is_file()]


def test_paths_that_are_no_checkpoints_are_refused(copy, tmp_path):
    checkpoints = copy / "checkpoints"
    name = f"Name a {{}} such as {checkpoints}/step_00000500, or use "
    said = refused(copy, "resume=nevr")
    assert (
        said.startswith("resume=nevr: there is no such folder. Did you mean 'never'? ") and name.format("checkpoint,") in said
    )
    said = refused(copy, f"resume={copy}")
    assert said.startswith(f"resume={copy} is not a usable checkpoint: manifest.json is missing. {name.format('folder')}")
    said = refused(copy, f"resume={checkpoints}/step_00000009")
    assert said.startswith(
        f"resume={checkpoints}/step_00000009: {checkpoints} already holds a later checkpoint, of step 10. Set"
    )


@pytest.mark.parametrize("version", [99, 1, "2", None])
def test_checkpoint_of_another_format_is_refused(copy, version):
    from hftune.checkpoints.checkpointer import _digest

    path = copy / "checkpoints" / "step_00000010" / "manifest.json"
    manifest = {**json.loads(path.read_text()), "format": version}
    manifest.pop("sha256")
    path.write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
    expected = f"resume={path.parent} is not a usable checkpoint: its format is {version!r}, "
    expected += "and this hftune reads format 2: a different version wrote it."
    assert refused(copy, f"resume={path.parent}").startswith(expected)


def test_checkpoint_of_another_model_is_refused(copy, tmp_path):
    """Its recipe says the same, so that only the tensors tell."""
    from hftune.checkpoints.checkpointer import Checkpointer
    from hftune.config.sections import CheckpointConfig

    source = open_checkpoint(copy / "checkpoints" / "step_00000010")
    name = "bert.pooler.dense.weight"
    writer = Checkpointer(tmp_path, CheckpointConfig(keep=9))
    text = (source.path / "recipe.yaml").read_text()
    changes = {
        f"{name} is (5, 5) there and (32, 32) here": {**source.tensors["model"], name: torch.zeros(5, 5)},
        "it has extra, which this model lacks": {**source.tensors["model"], "extra": torch.zeros(5)},
        f"it has no {name}": {key: value for key, value in source.tensors["model"].items() if key != name},
    }
    for step, (problem, model) in enumerate(changes.items(), start=1):
        writer.write(step, {**source.tensors, "model": model}, source.progress, text, None, [])
        writer.wait()
        path = tmp_path / f"step_0000000{step}"
        assert refused(tmp_path / "new", f"resume={path}") == f"{path} belongs to a different model: {problem}."


def test_other_data_is_refused(copy, tmp_path):
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(40)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    files = ("task.dataset=json", f"task.data_files.train={tmp_path}/rows.json", f"task.data_files.eval={tmp_path}/rows.json")
    train(recipe(tmp_path / "run", *files))
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows[1:])))
    assert refused(tmp_path / "run", *files, "train.epochs=3") == (
        f"{tmp_path}/run/checkpoints/step_00000006 was trained on different train data and different eval data. resume=never starts over."
    )


def test_one_flipped_label_of_a_thousand_is_refused(tmp_path):
    rows = [{"text": f"one two three {n % 3}", "label": n % 2} for n in range(1000)]
    file = tmp_path / "rows.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    files = (
        "task.dataset=json",
        f"task.data_files.train={file}",
        f"task.data_files.eval={file}",
        "task.max_train_samples=null",
    )
    train(recipe(tmp_path / "run", *files, "train.max_steps=1"))
    rows[321]["label"] = 1 - rows[321]["label"]
    file.write_text("\n".join(map(json.dumps, rows)))
    said = refused(tmp_path / "run", *files, "train.max_steps=2")
    assert "was trained on different train data" in said


def test_named_checkpoint_goes_on_in_another_folder(stopped, tmp_path, unbroken):
    """An export of its own is written there, though the best model so far stays where it was."""
    path = stopped / "checkpoints" / "step_00000009"
    run = Run(train(recipe(tmp_path / "branch", f"resume={path}")).output_dir)
    assert_bit_equal(run, unbroken[1]["dropout"])
    assert (run.folder / "model" / "model.safetensors").is_file() and run.result["best"]["step"] >= 10
    assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(unbroken[1]["dropout"])]
    assert audit(run.folder).problems == []  # the history goes with it


def test_never_starts_anew_and_removes_what_was_there(copy, capsys):
    run = Run(train(recipe(copy, "resume=never", "train.max_steps=2")).output_dir)
    assert f"{copy} holds an earlier run; this run replaces it." in capsys.readouterr().out
    assert [line["step"] for line in lines(run)] == [1, 2, 2]
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["step_00000002"]


def test_group_that_a_launcher_restarts_goes_on_whatever_resume_said(copy, monkeypatch, capsys):
    note_begun(copy, [("launcher", 1)])
    monkeypatch.setattr("hftune.checkpoints.resume.member", lambda: [("launcher", 2)])
    train(recipe(copy, "resume=never"))
    assert "Resuming from step 10 of 14" in capsys.readouterr().out


def test_restart_is_noticed_by_a_process_whose_launcher_knows_the_run_although_the_main_ones_does_not(
    copy, monkeypatch, capsys
):
    """As where a machine has joined that the main process is now on."""
    note_begun(copy, [("launcher", 1)])
    monkeypatch.setattr("hftune.checkpoints.output_dir.member", lambda: [("newcomer", 2), ("launcher", 3)])
    train(recipe(copy, "resume=never"))
    assert "Resuming from step 10 of 14" in capsys.readouterr().out


def test_restart_before_the_first_step_does_not_take_an_earlier_run_for_its_own(copy, monkeypatch, capsys):
    """resume=never was asked for, and the first attempt failed before it had replaced anything."""
    with pytest.raises(DataError):
        train(recipe(copy, "resume=never", "task.dataset=tests.support.tasks:no_reviews"))
    assert newest(copy / "checkpoints")[0].step == 10  # nothing is lost yet
    for module in ("checkpoints.resume", "checkpoints.output_dir"):
        monkeypatch.setattr(f"hftune.{module}.member", lambda: [("launcher", 2)])
    run = Run(train(recipe(copy, "resume=never", "train.max_steps=2")).output_dir)
    assert "Going on" not in capsys.readouterr().out and lines(run)[0]["step"] == 1


def test_newest_and_best_checkpoints_stay(unbroken):
    run = unbroken[1]["dropout"]
    steps = sorted(int(path.name[-8:]) for path in (run.folder / "checkpoints").iterdir())
    best = run.result["best"]["step"]
    assert steps[-2:] == [12, 14] and set(steps) - {best} == {12, 14}


def test_second_run_in_the_same_folder_is_refused(tmp_path):
    """Both were started by hand; the first is held in its data set until the second has been refused."""
    code = "import os, sys, time; from hftune.checkpoints.lock import only_writer; from pathlib import Path\n"
    code += "with only_writer(Path(sys.argv[1])): print(os.getpid(), flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        process = holder.stdout.readline().strip()
        said = refused(tmp_path)
        assert said.startswith(f"output_dir={tmp_path} is in use by process {process} on ")
    finally:
        holder.kill()
        holder.wait()
    assert train(recipe(tmp_path, "train.max_steps=1")).steps == 1  # a dead process holds nothing


def test_sgd_momentum_and_an_unchanging_model_resume(tmp_path):
    """Optimizers without or with other state than Adam's."""
    ways = {"sgd": ("train.optimizer=sgd",), "momentum": ("train.optimizer=sgd", "train.momentum=0.9")}
    jobs = {name: (*JOB, *words, f"output_dir={tmp_path}/{name}") for name, words in ways.items()}
    whole = {f"{name} whole": (*words, f"output_dir={tmp_path}/{name} whole") for name, words in jobs.items()}
    expected = train_on(1, {**whole, **jobs}, tmp_path, stops=dict.fromkeys(jobs, (7, 0)))
    for name, run in train_on(1, jobs, tmp_path).items():
        assert len(audit(run.folder).starts) == 2
        assert_bit_equal(run, expected[f"{name} whole"])


def command(folder, *overrides):
    return [sys.executable, "-m", "hftune.run", "recipe=yelp_demo", *JOB, f"output_dir={folder}", *overrides]


def started(folder, *overrides, step=4):
    """Start a long run and wait until it has taken some steps."""
    words = command(folder, "train.epochs=2000", *overrides)[3:]
    process = Command(1, *words)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").read_text().count("step_in_epoch") >= step:
            return process
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, number):
    process = started(tmp_path)
    process.send_signal(number)
    said = process.communicate()[1]
    step = newest(tmp_path / "checkpoints")[0].step
    assert process.returncode == 75
    assert said.splitlines()[-1] == (
        f"hftune: {number.name}: stopped after step {step}. The same command resumes from {tmp_path}/checkpoints/step_{step:08d}."
    )
    assert audit(tmp_path).steps == step


def test_second_interrupt_stops_at_once_and_loses_nothing_saved(tmp_path):
    slow = ("task.type=tests.support.tasks.SlowReviews", "task.model_config.num_hidden_layers=2")
    process = started(tmp_path, *slow, step=3)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and said.splitlines()[-1] == (
        "hftune: Training was interrupted from the keyboard in step 4."
    )
    assert newest(tmp_path / "checkpoints")[0].step == 3


def test_signal_in_an_evaluation_leaves_it_to_the_next_run(tmp_path, unbroken):
    """Going on begins with the evaluation that was cut short."""
    from hftune import Interrupted, milestones

    original = milestones.evaluate

    def evaluate(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    milestones.evaluate = evaluate
    try:
        with pytest.raises(Interrupted) as caught:
            train(recipe(tmp_path))
    finally:
        milestones.evaluate = original
    assert str(caught.value).startswith("SIGTERM: stopped after step 5. The same command resumes from ")
    assert not any("eval/loss" in line for line in lines(Run(tmp_path)))
    run = Run(train(recipe(tmp_path)).output_dir)
    assert without_speed(run) == without_speed(unbroken[1]["dropout"])
    assert_bit_equal(run, unbroken[1]["dropout"])


def test_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(tmp_path, capsys, monkeypatch):
    from hftune.checkpoints import checkpointer as checkpoint

    def full(path, tensors):
        if "step_00000006" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write_tensors(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    run = Run(train(recipe(tmp_path)).output_dir)
    said = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
    assert said == [
        "warning: A checkpoint could not be written: [Errno 28] No space left on device. The last intact one is of step 5. Training "
        "continues; the next one is due later."
    ]
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert "step_00000006" not in names and names[-1] == "step_00000014" and not any("writing" in name for name in names)
    assert run.result["steps"] == 14


class Forked(Group):
    """Stands in for the launcher that benchmarks/kill.py starts: seventeen of them would take minutes to import."""

    pid = None

    def __init__(self, folder, count):
        recipe, *words = kill.RECIPE
        job = [recipe.removeprefix("recipe="), [*words, f"output_dir={folder}"], None, {}]
        self.log = folder.parent / f"{folder.name}.log"
        self.starts = self.said()
        super().__init__(count, [job], self.log)
        Forked.last = self

    def said(self):
        """Count the starts of training in the log, which all launches of a run share."""
        return self.log.read_text().count("  runs on  ") if self.log.exists() else 0

    def wait(self):
        return max(map(abs, super().wait()))


def after_joining(moment, process, folder, kind, draw):
    """Wait for the moment to kill one process until all have joined: before that, only a launcher would end the others."""
    while kind == "one process" and process.poll() is None and process.said() == process.starts:
        time.sleep(0.01)
    return moment(process, folder, kind, draw)


def test_ten_seeded_kills_leave_no_trace(monkeypatch, capsys, tmp_path):
    """Of one and of two processes, and while a checkpoint is written: five runs, each killed twice.

    A step has two micro-batches here, not four: a run then takes half the time, and is killed as often.
    """
    monkeypatch.setattr(kill, "start", Forked)
    monkeypatch.setattr(kill, "wait_for_moment", partial(after_joining, kill.wait_for_moment))
    monkeypatch.setattr(kill, "processes_of", lambda pid: set(Forked.last.pids))
    monkeypatch.setattr(kill, "RECIPE", (*kill.RECIPE, "train.micro_batch_size=8"))
    words = ["5", "--kills", "2", "--seed", "7", "--output", str(tmp_path / "kill.json")]
    monkeypatch.setattr(sys, "argv", ["kill.py", *words])
    code, said = kill.main(), capsys.readouterr().out
    assert code == 0, said
    assert said.count(": bit-equal") == 5


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk):
    """Leave no room on a disk; return the file to remove."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return disk / "filler"


def test_training_goes_on_while_the_disk_is_full_and_its_lines_are_written_when_there_is_room(small_disk):
    folder = small_disk / "out"
    process = started(folder, "eval.every=never")
    filler = fill(small_disk)
    size = (folder / "ledger.jsonl").stat().st_size
    time.sleep(2)
    assert process.poll() is None, process.communicate()[1][-300:]
    assert (folder / "ledger.jsonl").stat().st_size <= size + 4096
    filler.unlink()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said = "".join(process.communicate())
    assert process.returncode == 75 and "A checkpoint could not be written" in said
    steps = newest(folder / "checkpoints")[0].step
    found = audit(folder)
    assert found.problems == [] and found.steps == steps
    assert [line["step"] for line in lines(Run(folder)) if "train/loss" in line] == list(range(1, steps + 1))


def test_disk_that_stays_full_ends_the_run_with_its_checkpoints_whole(small_disk):
    folder = small_disk / "out"
    process = started(folder, "train.max_steps=120")
    filler = fill(small_disk)
    said = process.communicate()[1]
    assert process.returncode == 1
    assert re.fullmatch(
        rf"hftune: {folder}/\S+ cannot be written: (No space left on device|.*os error 28.*)\. Earlier checkpoints are intact\. "
        "Free disk space or fix permissions; then resume=auto continues from the newest checkpoint\\.",
        said.splitlines()[-1],
    )
    kept = newest(folder / "checkpoints")[0].step
    assert kept < 120
    filler.unlink()
    done = Command(1, *command(folder, "train.epochs=2000", f"train.max_steps={kept + 3}")[3:])
    assert done.returncode == 0 and f"Resuming from step {kept} of {kept + 3}" in done.communicate()[0]
    assert audit(folder).problems == []


def test_audit_command_says_what_it_proves(unbroken, tmp_path, capsys):
    folder = unbroken[2]["dropout"].folder
    whole = (folder / "ledger.jsonl").read_text().splitlines()
    assert cli.main(["audit", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  started on 2 processes",
        f"{folder}: 14 steps, 200 samples, 2 complete epochs.",
        "Every step used the samples of its plan, each exactly once per epoch.",
        f"The chain of {len(whole)} lines is unbroken and ends in {sha256(whole[-1].encode()).hexdigest()}.",
    ]
    (tmp_path / "ledger.jsonl").write_text("\n".join(whole[:5] + whole[6:]) + "\n")
    assert cli.main(["audit", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Not proven."
    assert cli.main(["audit", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"hftune: {tmp_path}/none holds no ledger.jsonl: name the output folder of a run.\n"


def test_audit_finds_what_was_left_out_used_twice_or_exchanged(unbroken, tmp_path):
    """Even if every hash was made anew, so that the chain tells nothing."""
    lines = (unbroken[1]["dropout"].folder / "ledger.jsonl").read_text().splitlines()
    whole = [line for line in lines if '"step_in_epoch"' in line or '"after_step"' in line]

    def problems(changed):
        chained, end = [], NOTHING
        for line in changed:
            chained.append(json.dumps({**json.loads(line), "prev": end}))
            end = sha256(chained[-1].encode()).hexdigest()
        (tmp_path / "ledger.jsonl").write_text("".join(line + "\n" for line in chained))
        return audit(tmp_path).problems

    assert problems(whole) == []
    assert problems([*whole[:5], *whole[6:]]) == [
        "Line 5 of the steps is step 6 (epoch 0, step 5 of it); step 5 should follow here."
    ]
    assert problems([*whole[:5], whole[4], *whole[5:]]) == [
        "Line 5 of the steps is step 4 (epoch 0, step 3 of it); step 5 should follow here."
    ]
    other = json.loads(whole[5])
    exchanged = {**other, "digest": json.loads(whole[6])["digest"]}
    assert problems([*whole[:5], json.dumps(exchanged), *whole[6:]]) == [
        "Step 5 was computed from other samples than its plan says."
    ]
    fewer = {**other, "num_samples": 15}
    assert problems([*whole[:5], json.dumps(fewer), *whole[6:]]) == [
        "Step 5 was computed from other samples than its plan says."
    ]
