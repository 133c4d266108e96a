"""An export is whole or not there, whatever kills the writer."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel

from hftune import ConfigError, Task, TrainingError, load_model
from hftune.atomic import restore, write_text
from hftune.checkpoints.export import export, read, readable
from hftune.inference import load_export
from tests.support.predictions import untrained
from tests.support.runs import TINY


class Saver:
    """Saves a text; fails half-way where told to."""

    def __init__(self, text, fail=False):
        self.text, self.fail = text, fail

    def save(self, model, directory):
        (directory / "config.json").write_text(self.text)
        if self.fail:
            raise OSError(28, "No space left on device")
        (directory / "weights").mkdir()
        (directory / "weights" / "part1").write_text(self.text)


def contents(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_export_replaces_the_earlier_one_whole(tmp_path):
    for text in ("first", "second"):
        export(Saver(text), nn.Identity(), tmp_path / "model")
        assert contents(tmp_path) == {"model/config.json": text, "model/weights/part1": text}


def test_failed_export_leaves_the_earlier_one_untouched(tmp_path):
    export(Saver("first"), nn.Identity(), tmp_path / "model")
    with pytest.raises(TrainingError) as caught:
        export(Saver("second", fail=True), nn.Identity(), tmp_path / "model")
    assert str(caught.value) == (
        f"{tmp_path}/model cannot be written: No space left on device. Free disk space or fix permissions; then start again."
    )
    assert contents(tmp_path / "model") == {"config.json": "first", "weights/part1": "first"}


def test_kill_between_the_two_renames_is_undone(tmp_path):
    export(Saver("first"), nn.Identity(), tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.replaced")  # where a kill would have left it
    restore(tmp_path / "model")
    assert contents(tmp_path) == {"model/config.json": "first", "model/weights/part1": "first"}


def test_kill_after_the_second_rename_leaves_no_litter(tmp_path):
    export(Saver("old"), nn.Identity(), tmp_path / ".model.replaced")
    export(Saver("new"), nn.Identity(), tmp_path / "model")
    assert contents(tmp_path) == {"model/config.json": "new", "model/weights/part1": "new"}


def test_text_is_replaced_in_one_go(tmp_path):
    write_text(tmp_path / "a.json", "1")
    write_text(tmp_path / "a.json", "2")
    assert contents(tmp_path) == {"a.json": "2"}


@dataclass
class Counted(Task):
    """A task whose model has as many outputs as its data have classes; or, where it is odd, whatever JSON cannot hold."""

    width: int = 4

    def datasets(self):
        self.num_classes, self.names, self.pair = 3, ["a", "b", "c"], (1, 2)
        return {}

    def build_model(self):
        return nn.Linear(self.width, self.num_classes + self.pair[0] if self.width == 5 else self.num_classes)

    def loss(self, outputs, target):
        return outputs.sum()


def test_default_save_keeps_what_the_data_have_told_the_task(tmp_path):
    task = Counted()
    task.datasets()
    model = task.build_model()
    export(task, model, tmp_path / "model")
    fresh = Counted()
    loaded = load_export(fresh, tmp_path / "model")
    assert torch.equal(loaded.weight, model.weight)
    assert (fresh.num_classes, fresh.names) == (3, ["a", "b", "c"])
    assert not hasattr(fresh, "pair")  # JSON would make a list of it
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_model_that_needs_more_than_json_keeps_is_refused_with_what_is_missing(tmp_path):
    task = Counted(width=5)
    task.datasets()
    export(task, task.build_model(), tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        load_export(Counted(width=5), tmp_path / "model")
    assert str(caught.value) == (
        f"{tmp_path}/model cannot be loaded by {Counted.__module__}.Counted: AttributeError: 'Counted' object has no attribute "
        "'pair'. The model is built without the data here. If build_model needs more than the task's fields, write save and "
        "load methods that keep it."
    )


def test_step_and_score_are_replaced_together_with_the_model(tmp_path, monkeypatch):
    model, rename, seen = tmp_path / "model", Path.rename, set()

    def watched(self, other):
        rename(self, other)
        found = contents(readable(model))
        seen.add((found["config.json"], found["hftune.json"]))

    monkeypatch.setattr(Path, "rename", watched)
    for text in ("first", "second"):
        export(Saver(text), nn.Identity(), model, {"step": text})
    assert seen == {("first", '{"step": "first"}\n'), ("second", '{"step": "second"}\n')}


def test_reader_between_the_two_renames_changes_nothing_and_finds_the_earlier_model(tmp_path, monkeypatch):
    model, rename, found = tmp_path / "model", Path.rename, []
    export(Saver("first"), nn.Identity(), model)

    def interrupted(self, other):
        rename(self, other)
        if other.name == ".model.replaced":
            found.append(read(model, lambda folder: (folder / "config.json").read_text()))

    monkeypatch.setattr(Path, "rename", interrupted)
    export(Saver("second"), nn.Identity(), model)
    assert found == ["first"] and contents(model)["config.json"] == "second"


@pytest.mark.parametrize("fails", (False, True))
def test_reader_whose_model_is_replaced_meanwhile_reads_the_new_one(tmp_path, fails):
    """Also if all files that it asked for were there: it may have read the first from one export and the others from the next."""
    model = tmp_path / "model"
    export(Saver("first"), nn.Identity(), model)

    def load(folder):
        if (text := (folder / "config.json").read_text()) == "first":
            export(Saver("second"), nn.Identity(), model)
            if fails:
                raise FileNotFoundError("a shard that the new model lacks")
        return text

    assert read(model, load) == "second"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", lambda folder: (folder / "config.json").read_text())


def test_what_lies_beside_a_model_does_not_change_the_fields_of_the_task(tmp_path):
    """The recipe's fields were checked; the folder may have come from anyone."""
    task = Counted()
    task.datasets()
    export(task, task.build_model(), tmp_path / "model")
    (tmp_path / "model" / "task.json").write_text('{"width": 9, "num_classes": 3}')
    fresh = Counted()
    load_export(fresh, tmp_path / "model")
    assert (fresh.width, fresh.num_classes) == (4, 3)


@dataclass
class Cached(Counted):
    @cached_property
    def rows(self):
        return [1, 2, 3]


def test_default_save_leaves_out_what_is_computed_from_the_data(tmp_path):
    task = Cached()
    task.datasets()
    assert task.rows
    export(task, task.build_model(), tmp_path / "model")
    assert "rows" not in json.loads((tmp_path / "model" / "task.json").read_text())


def test_a_file_of_a_model_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "model.safetensors")  # root may read everything
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read: permission denied\. Ask its owner"):
        read(tmp_path, Path.iterdir)


def test_a_large_model_is_several_files_that_everybody_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("hftune.models.kinds.FILE_SIZE", "40KB")
    torch.manual_seed(0)
    parts = untrained("yelp_demo", tmp_path / "parts", *TINY)
    monkeypatch.undo()
    torch.manual_seed(0)
    whole = untrained("yelp_demo", tmp_path / "whole", *TINY)
    files = [path.name for path in (parts / "model").glob("*.safetensors*")]
    assert "model.safetensors.index.json" in files and len(files) > 2
    models = [
        load_model(run, device="cpu").predict(["Superb.", "Cold, and late."], probabilities=True) for run in (parts, whole)
    ]
    assert models[0] == models[1]
    loaded = [AutoModel.from_pretrained(run / "model").state_dict() for run in (parts, whole)]
    assert all(map(torch.equal, *(values.values() for values in loaded)))
