"""Folders that cannot be used as hftune would use them, each told in one sentence before training."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from hftune import Recipe
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.export import ABOUT
from hftune.checkpoints.lock import only_writer
from hftune.checkpoints.output_dir import OutputDir, start_folder
from hftune.checkpoints.resume import Start
from hftune.checkpoints.train_state import TrainState
from hftune.data.cache import cache_dir
from hftune.distributed.preflight import check_writable
from hftune.errors import ConfigError


def refused(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_checking_that_a_folder_is_writable_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_refused_run_leaves_no_folder_of_its_own_but_everything_of_others(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new/out", "empty", "written"):
        with pytest.raises(ConfigError), only_writer(tmp_path / name):
            if name == "written":
                (tmp_path / name / "metrics.jsonl").touch()
            raise ConfigError("refused")
    assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "empty").exists() and (tmp_path / "written" / "metrics.jsonl").exists()


def test_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert refused(only_writer(tmp_path / "file" / "out").__enter__) == (
        f"output_dir={tmp_path}/file/out cannot be created: Not a directory. Set output_dir=... to a different folder."
    )


def test_folder_that_takes_no_appended_lines_is_refused(tmp_path, monkeypatch):
    real = Path.open

    def opened(path, mode="r", *arguments, **options):
        if "a" in mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert refused(check_writable, tmp_path) == (
        f"output_dir={tmp_path} accepts new files, but not appending to one: Operation not supported. Mounted object storage behaves like that. Set output_dir=... to a folder on a disk, and copy it afterwards."
    )
    assert list(tmp_path.iterdir()) == []


def test_folder_on_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert refused(only_writer(tmp_path).__enter__) == (
        f"output_dir={tmp_path} is on a file system without file locks (No locks available), which keep two runs from "
        "using the same folder. Set output_dir=... to a folder on a different file system, and copy it afterwards."
    )


def test_cache_that_cannot_be_made_names_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    assert refused(cache_dir) == (
        f"{tmp_path}/home/datasets/hftune, the cache of prepared data, cannot be used: Not a directory. Set HF_HOME (for "
        "models and data sets) or HF_DATASETS_CACHE (for data sets only) to a folder that you can write to, with enough space."
    )


def test_a_run_that_starts_over_leaves_no_model_of_the_earlier_one(tmp_path):
    for name in ("model", ".model_last.replaced", "checkpoints/step_00000004"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    start_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def output_of(tmp_path, about, *words):
    """An output folder whose run goes on from step 5, with a model that says this about itself."""
    recipe = Recipe.load("yelp_demo", f"output_dir={tmp_path}", *words)
    output = OutputDir(recipe)
    output.start = Start(Checkpoint(tmp_path / "checkpoints" / "step_00000005", 5, {}, {}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ABOUT).write_text(json.dumps({"metric": recipe.eval.metric, **about}))
    return output


STRATEGY = SimpleNamespace(on_main=lambda call: call())


@pytest.mark.parametrize(("step", "best"), [(4, None), (5, 5), (6, 6)])
def test_a_model_that_was_exported_after_the_checkpoint_is_the_best_one(tmp_path, step, best):
    """Of the checkpoint's own step, too: a request to stop writes one before the evaluation."""
    state = TrainState(step=5, best=0.5, best_step=3, evaluations_since=2, last_improvement=0.4)
    output_of(tmp_path, {"step": step, "value": 0.6}).find_best(STRATEGY, state)
    assert state.best_step == best
    assert (state.evaluations_since, state.last_improvement) == (2, 0.4)  # patience does not depend on where models lie


def test_a_run_that_evaluates_no_more_forgets_the_scores_of_other_weights(tmp_path):
    state = TrainState(step=5, best=0.5, best_step=3, metrics={"accuracy": 0.5})
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    output = output_of(tmp_path, {"step": 3, "value": 0.5}, "eval.every=never")
    output.find_best(STRATEGY, state)
    output.open(state)
    assert (state.best_step, state.metrics) == (None, {}) and not (tmp_path / "predictions.jsonl").exists()
