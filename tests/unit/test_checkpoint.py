"""Checkpoints that hftune did not write, or a different version of it."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from hftune.checkpoints.checkpointer import (
    BrokenCheckpoint,
    Checkpoint,
    Checkpointer,
    _digest,
    newest,
    open_checkpoint,
    path_of,
)
from hftune.checkpoints.output_dir import read_state
from hftune.checkpoints.resume import _changes
from hftune.checkpoints.train_state import TrainState
from hftune.config import Recipe
from hftune.config.sections import CheckpointConfig
from hftune.errors import ConfigError

PROGRESS = {"state": {}, "values": {}, "digests": {}, "run_ids": {}, "micro_batch_size": [1, 8]}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a checkpoint with this progress, and lets a change be made to its manifest."""

    def write(progress, change=lambda manifest: None):
        writer = Checkpointer(tmp_path, CheckpointConfig(keep=2))
        writer.write(5, {"model": {"weight": torch.zeros(2)}}, progress, "recipe: a", None, [])
        writer.wait()
        assert writer.failure is None
        path = path_of(tmp_path, 5)
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["sha256"]
        change(manifest)
        manifest["sha256"] = _digest(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    return write


def test_checkpoint_of_this_version_opens(checkpoint):
    assert open_checkpoint(checkpoint(PROGRESS)).step == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.pop("files"), "manifest.json lists no files or no step: hftune did not write it"),
        (lambda manifest: manifest.pop("step"), "manifest.json lists no files or no step: hftune did not write it"),
        (lambda manifest: manifest["files"].update({"more/x": {}}), "names more/x, which is no file of this folder"),
        (lambda manifest: manifest["files"].update({"recipe.yaml": 3}), "gives no size and SHA-256 for recipe.yaml"),
        (lambda manifest: manifest["files"]["recipe.yaml"].update(bytes="1"), "gives no size and SHA-256 for recipe.yaml"),
        (lambda manifest: manifest.update(format="2"), "its format is '2', and this hftune reads format 2: a different ver"),
    ],
)
def test_manifest_that_hftune_did_not_write_is_refused(checkpoint, change, message):
    with pytest.raises(BrokenCheckpoint, match=message):
        open_checkpoint(checkpoint(PROGRESS, change))


def test_manifest_that_is_nested_too_deep_is_refused(checkpoint):
    path = checkpoint(PROGRESS)
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(BrokenCheckpoint, match=r"manifest.json cannot be read \(RecursionError\)"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["manifest.json", "progress.json", "model.safetensors"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_checkpoint_that_cannot_be_read_is_skipped_with_the_reason(checkpoint, monkeypatch, file, number):
    path, opened = checkpoint(PROGRESS), Path.open

    def refuse(self, *arguments, **options):
        if self.name == file:
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert newest(path.parent) == (None, [f"Skipped {path}: {file} cannot be read: {os.strerror(number)}."])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_checkpoint_follow_the_umask(checkpoint, umask, mode):
    before = os.umask(umask)
    try:
        path = checkpoint(PROGRESS)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {mode}


@pytest.mark.parametrize("progress", [{}, []])
def test_progress_that_lacks_what_training_needs_is_skipped_with_the_reason(checkpoint, progress):
    path = checkpoint(progress)
    found, (said,) = newest(path.parent)
    assert found is None and said.startswith(f"Skipped {path}: progress.json lacks state, values, digests, run_ids, micro_")


def test_resuming_compares_what_a_recipe_says_and_not_a_secret(tmp_path, monkeypatch):
    for token in ("old", "new"):
        monkeypatch.setenv("A_TOKEN", token)
        recipe = Recipe.load("yelp_demo", "track.run_name=${oc.env:A_TOKEN}", "task.text_column=${oc.env:A_TOKEN}")
        if token == "old":
            (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert _changes(Checkpoint(tmp_path, 0, {}, {}), recipe) == {}
    changed = Recipe.load("yelp_demo", "track.run_name=mine", "task.text_column=${oc.env:A_TOKEN}")
    said = {"track.run_name": "track.run_name=mine (it was ${oc.env:A_TOKEN})"}
    assert _changes(Checkpoint(tmp_path, 0, {}, {}), changed) == said


def test_weights_to_start_from_need_not_be_there_any_more_on_resume(tmp_path):
    (tmp_path / "recipe.yaml").write_text(Recipe.load("yelp_demo", "task.weights=gone.safetensors").to_yaml())
    assert [*_changes(Checkpoint(tmp_path, 0, {}, {}), Recipe.load("yelp_demo"))] == ["task.weights"]


def test_keys_that_an_older_version_wrote_otherwise_without_effect_are_no_changes(tmp_path):
    recipe = Recipe.load("mnist_best")
    text = recipe.to_yaml()
    older = text.replace("  metrics: []\n", "").replace("  momentum: 0.0\n", "  momentum: 0.5\n")
    assert len(older.splitlines()) == len(text.splitlines()) - 1
    assert "momentum: 0.5" in older
    (tmp_path / "recipe.yaml").write_text(older)
    assert _changes(Checkpoint(tmp_path, 0, {}, {}), recipe) == {}


def test_state_of_another_version_is_refused():
    values = vars(TrainState())
    assert read_state("x", values) == TrainState()
    for odd in ({**values, "swa": 1}, {name: value for name, value in values.items() if name != "seconds"}):
        name = "swa" if "swa" in odd else "seconds"
        with pytest.raises(
            ConfigError, match=rf"^step_5 was written by a different version .* differs in {name}\. Resume with"
        ):
            read_state("step_5", odd)
