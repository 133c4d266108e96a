"""What a run's folder says of its past, and what `hftune replay` refuses before anything heavy is imported."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hftune import Recipe, cli
from hftune.commands.replay import job_of, reserved
from hftune.optim import lr_at
from hftune.replay.file_checks import _wrong_rates
from hftune.replay.history import Change, History
from hftune.tracking.ledger import Ledger
from tests.support.events import step_taken

RESULTS = {"num_samples": 8, "digest": "x", "loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "num_items": 8.0}


def recorded(folder, *overrides, starts=(0,), last=6, recipe="yelp_demo", **facts):
    """A run's folder as far as a ledger is concerned: each start has trained to the last step."""
    folder.mkdir(exist_ok=True)
    nested = Recipe.load(recipe, *overrides).to_dict()
    bounds = {"micro_batch_size": None, "micro_batch_tokens": 512, "packed": True}
    plan = {"num_samples": 40, "batch_size": 8, "seed": 0}
    ledger = Ledger(folder / "ledger.jsonl")
    for number, start in enumerate(starts):
        nested["train"]["lr"] = 0.1 / (number + 1)
        ledger.start(start, {"world_size": 1, "precision": "no", **bounds, "plan": plan, "recipe": nested, **facts})
        for step in range(start + 1, last + 1):
            ledger.on_step(step_taken(step, divmod(step - 1, 5), **RESULTS))
    ledger.file.close()
    return folder


@pytest.mark.parametrize(("min_lr", "expected"), [(0, [0, 0, 0, 0, 0, 2, 3, 3]), (0.05, [0, 0, 0, 0, 0, 1, 1, 1])])
def test_falls_of_a_plateau_follow_from_the_rates(tmp_path, min_lr, expected):
    words = ("train.schedule=plateau", "train.gamma=0.5", "train.lr=0.1", "train.warmup_ratio=0", "train.warmup_steps=2")
    words = (*words, f"train.min_lr={min_lr}")
    recipe = Recipe.load("yelp_demo", *words)
    start = {"plan": {"num_samples": 160, "batch_size": 32, "seed": 42}, "num_steps": 8, "steps_per_epoch": 5}
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.start(0, {"world_size": 1, "precision": "no", **start, "recipe": recipe.to_dict()})
    for step, falls in enumerate((0, 0, 0, 0, None, 2, 3), 1):  # step 5 was skipped, with evaluations before and after it
        lr = None if falls is None else lr_at(step - 1, 8, recipe.train, 5, falls)
        report = {} if falls is None else {**RESULTS, "lr": lr}
        ledger.on_step(step_taken(step, divmod(step - 1, 5), **report))
    ledger.file.close()
    history = History.open(tmp_path)
    assert [*history.falls.values()] == expected and [*history.falls] == [*range(1, 9)]
    assert [*_wrong_rates(history)] == []
    history.ledger.steps[7]["lr"] /= 4  # more than one fall after a step, or below the lowest
    assert [text.split(" of ")[0] for text in _wrong_rates(replace(history))] == ["step 7 has a learning rate"]


def checkpoint(folder, step, model="m"):
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"files": {"model.safetensors": {"sha256": model}}}))


def refused(capsys, *words):
    assert cli.main(["replay", *map(str, words)]) == 2
    return capsys.readouterr().err.removeprefix("hftune: ").rstrip("\n")


def test_each_step_has_the_recipe_that_was_in_force(tmp_path):
    history = History.open(recorded(tmp_path / "out", starts=(0, 4)))
    assert [history.recipe_at(step).train.lr for step in (1, 4, 5, 6)] == [0.1, 0.1, 0.05, 0.05]
    assert history.recipe_at(5, "train.lr=1").train.lr == 1


def test_what_training_settled_is_put_in_and_what_is_only_shown_is_off(tmp_path):
    words = ("train.mixed_precision=auto", "train.micro_batch_tokens=auto", "track.with=[tensorboard]", "train.profile=[2,3]")
    words += ("callbacks=[tests.support.callbacks_of_no_module.Watch]",)
    history = History.open(recorded(tmp_path / "out", *words, packed=False, precision="bf16"))
    recipe = history.recipe_at(3)
    assert (recipe.train.mixed_precision, recipe.train.micro_batch_tokens, recipe.train.packing) == ("bf16", 512, "off")
    assert recipe.track.with_ == [] and recipe.train.profile is None
    assert recipe.output_dir == str(tmp_path / "out_replay")
    assert history.recipe_at(3, "train.micro_batch_size=4", "train.micro_batch_tokens=null").train.max_rows == 4


def test_frozen_weights_of_adapters_keep_their_precision_on_another_device(tmp_path):
    words = ("adapter.type=lora", "adapter.base_dtype=auto", "train.mixed_precision=auto")
    facts = {"precision": "bf16", "hardware": {"device": "NVIDIA H200"}}
    assert History.open(recorded(tmp_path / "gpu", *words, **facts)).recipe_at(3).adapter.base_dtype == "bf16"
    assert History.open(recorded(tmp_path / "cpu", *words)).recipe_at(3).adapter.base_dtype == "auto"


def test_pipeline_is_replayed_without_its_stages_on_another_number_of_processes(tmp_path, monkeypatch):
    words = ("parallel.pipeline_stages=2", "parallel.schedule=gpipe")
    history = History.open(recorded(tmp_path / "out", *words, world_size=2, recipe="wikitext2_demo"))
    assert history.recipe_at(3).parallel.pipeline_stages == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert history.recipe_at(3).parallel.pipeline_stages == 2


def test_checkpoint_of_steps_that_were_taken_back_is_not_used(tmp_path):
    folder = recorded(tmp_path / "out")
    for step in (2, 4):
        checkpoint(folder, step)
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"checkpoint": 4, "model": "another"}\n')
    history = History.open(folder)
    assert history.checkpoint_steps() == [2] and [history.nearest(step) for step in (2, 3, 6)] == [0, 2, 2]


def test_checkpoint_of_a_replay_belongs_to_the_very_steps_that_it_replayed(tmp_path):
    folder = recorded(tmp_path / "out")
    history = History.open(folder)
    checkpoint(history.aside, 3)
    about = history.aside / "checkpoints" / "step_00000003" / "progress.json"
    about.write_text(json.dumps({"replayed": history.line_digest(3)}))
    assert history.checkpoint_steps() == [3] and history.checkpoint_path(3).is_relative_to(history.aside)
    (folder / "ledger.jsonl").unlink()
    assert History.open(recorded(folder, starts=(0, 1))).checkpoint_steps() == []  # the run was started over


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--step 99", "HERE has no step 99: it has 1 to 6."),
        ("--steps 5:7", "HERE has no step 7: it has 1 to 6."),
        ("--steps 5:3", "--steps 5:3: the last step comes before the first one."),
        ("--steps five", "--steps five: give steps as FIRST:LAST, such as 130:140."),
        ("--steps 4:5 --from 3", "--from says from which step on something is changed: give --set, --without or --skip, too."),
        ("--steps 4:5 --without 40", "--without 40: the training data have rows 0 to 39."),
        ("--steps 4:5 --without a", "--without a: give numbers, such as 35,17 or 130:140."),
        ("--steps 4:5 --skip 3", "--skip 3: the steps that are replayed and changed are 4 to 5."),
        ("--steps 4:5 --skip 4 --from 6", "--from 6 comes after the last step, 5: nothing would be changed."),
        ("--steps 4:5 --save-every 0", "--save-every 0 must be at least 1."),
        ("--steps 4:5 --worst -1", "--worst -1: give a number of samples."),
        ("--steps 4:5 --why --skip 4", "--why looks into steps as they were. Leave it out beside --set, --without and --skip."),
        ("--step 3 --output HERE/found", "--output HERE/found is in the run's own folder, into which a replay never writes."),
        ("--step 3 --output HERE/../other", "is there already. Name a new folder, or leave the option out."),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(tmp_path, capsys, words, said):
    folder = recorded(tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "replay.json").write_text("{}")
    assert said in refused(capsys, folder, *words.replace("HERE", str(folder)).split()).replace(str(folder), "HERE")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ledger.jsonl", "other", "out", "replay.json"]
    assert (tmp_path / "other" / "replay.json").read_text() == "{}"


def test_step_at_which_a_run_stopped_is_the_last_that_can_be_asked_for(tmp_path, capsys):
    history = History.open(recorded(tmp_path / "out", num_steps=7))
    history.check_step(7)
    assert history.recipe_at(7) == history.recipe_at(6)
    assert refused(capsys, history.folder, "--step", 8) == f"{history.folder} has no step 8: it has 1 to 6."


def test_checkpoint_that_training_removes_while_it_is_read_is_passed_over_and_named(tmp_path, monkeypatch):
    history, skipped = History.open(recorded(tmp_path / "out")), []
    checkpoint(history.folder, 2)
    read_text = Path.read_text

    def read_and_remove(path, **options):
        text = read_text(path, **options)
        if len(calls := [*calls_of, path]) == 2:  # it is listed, and then read
            shutil.rmtree(history.folder / "checkpoints")
        calls_of[:] = calls
        return text

    calls_of = []
    monkeypatch.setattr(Path, "read_text", read_and_remove)
    assert history.checkpoint_before(4, skipped) == (0, None)
    assert len(skipped) == 1 and "step_00000002" in skipped[0]


def test_folder_without_a_ledger(tmp_path, capsys):
    assert refused(capsys, tmp_path, "--step", 1) == f"{tmp_path} holds no ledger.jsonl: name the output folder of a run."
    folder = recorded(tmp_path / "out", last=0)
    assert refused(capsys, folder, "--step", 1) == f"{folder} has not finished a step yet: there is nothing to replay."


def test_step_that_was_skipped(tmp_path, capsys):
    folder = recorded(tmp_path / "out", last=2)
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"step": 3, "epoch": 0, "step_in_epoch": 2, "skipped": true}\n')
    said = refused(capsys, folder, "--step", 3)
    assert said.startswith("Step 3 was skipped by the run (train.skip). ") and said.endswith(": --set train.skip=[]")


def test_change_that_would_be_another_run(tmp_path, capsys):
    folder = recorded(tmp_path / "out")
    for key in ("seed", "task.max_length", "train.batch_size"):
        said = refused(capsys, folder, "--step", 3, "--set", f"{key}=4")
        assert said.startswith(f"{key} decides which samples form a step") and "--from 1" in said
    History.open(folder).check_change(Change(("seed=4",), from_step=1))
    assert "did you mean 'train.lr'" in refused(capsys, folder, "--step", 3, "--set", "train.lrr=1").lower()


def test_samples_left_out_that_would_change_nothing_or_leave_nothing(tmp_path, capsys):
    folder = recorded(tmp_path / "out")
    (third, fourth) = (",".join(map(str, History.open(folder).samples_of(step).tolist())) for step in (3, 4))
    said = refused(capsys, folder, "--step", 4, "--without", third)
    assert said == "--without: step 4 uses none of these samples, so nothing would be changed."
    said = refused(capsys, folder, "--steps", "3:4", "--without", fourth)
    assert said == "--without: these are all samples of step 4. To skip the whole step: --skip 4"


def test_data_that_have_moved(tmp_path, capsys):
    rows = {name: tmp_path / "old" / f"{name}.jsonl" for name in ("train", "eval")}
    rows["train"].parent.mkdir()
    for path in rows.values():
        path.write_text('{"text": "a", "label": 0}\n')
    words = [f"task.data_files.{name}={path}" for name, path in rows.items()]
    folder = recorded(tmp_path / "out", *words, recipe="text_classification")
    rows["train"].parent.rename(new := tmp_path / "new #1, a: b")
    said = refused(capsys, folder, "--step", 3)
    assert f"task.data_files.train={rows['train']}: there is no such file." in said
    assert "say where they are: --data FOLDER, or --data SPLIT=FILE for one file" in said
    none = tmp_path / "none"
    assert refused(capsys, folder, "--step", 3, "--data", none) == f"--data {none}: there is no {none}."
    found = History.open(folder, data=[str(new)]).recipe_at(3).task.data_files
    assert found == {name: str(new / f"{name}.jsonl") for name in rows}
    one = History.open(folder, data=[f"train={new}/train.jsonl", f"eval={new}/eval.jsonl"])
    assert one.recipe_at(3).task.data_files == found


def test_code_of_others_is_not_imported_unasked(tmp_path, capsys):
    folder = recorded(tmp_path / "out", "task.dataset=tests.support.tasks:few_reviews")
    said = refused(capsys, folder, "--step", 3)
    assert said.startswith(f"task.dataset=tests.support.tasks:few_reviews ({folder}) is not hftune's own code")
    History.open(folder, trust_code=True).recipe_at(3)
    assert str(folder.parent) not in sys.path


def test_two_replays_of_one_step_have_folders_of_their_own(tmp_path):
    options = cli.parser().parse_args(["replay", str(recorded(tmp_path / "out")), "--step", "3"])
    first = job_of(options)
    with reserved(first):
        second = job_of(options)
        with reserved(second):
            (second.output / "replay.json").write_text("{}")
    assert (first.output.name, second.output.name) == ("step_3", "step_3_2")
    assert [path.name for path in first.history.aside.iterdir()] == ["step_3_2"]  # nothing was written into the other


def test_gradient_norm_that_overflowed_in_fp16_is_null_in_the_ledger_and_equals_one_that_does_here():
    from hftune.replay.engine import ReplayedStep
    from hftune.replay.tolerance import difference

    line = {**RESULTS, "step": 3, "grad_norm": None}
    step = ReplayedStep(3, 0, 2, 1.0, math.inf, 0.1, 8.0, 8, "x", np.arange(8))
    assert difference(step, line).is_bit_equal
    assert not difference(replace(step, grad_norm=2.0), line).is_equal
