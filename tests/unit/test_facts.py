"""What run.json says of a run, and what it keeps to itself."""

import json
import sys

import pytest

from hftune import cli
from hftune.checkpoints.output_dir import remove_samples
from hftune.launchers.local import environment
from hftune.task import ask
from hftune.tracking import facts
from tests.support.tasks import Tagging

FACTS = dict(  # noqa: C408 - shorter
    recipe="yelp", started="2026-11-22T18:30:00+00:00", command="", processes=1, nodes=1, device="cpu", model="Net", precision="no",
    parameters=1,
    trainable_parameters=1, data={}, labels=None, commits={}, versions={}, git=None, num_steps=1, steps_per_epoch=1, notices=[],
)  # fmt: skip


def command_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", *words])
    monkeypatch.setattr(sys, "argv", [words[0]])
    return facts.command()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-m", "hftune.run", "recipe=yelp", "track.notes=a b"], "python -m hftune.run recipe=yelp 'track.notes=a b'"),
        (["-u", "-m", "hftune.cli", "train"], "python -u -m hftune.cli train"),
        (["/opt/bin/hftune", "train", "recipe=yelp"], "hftune train recipe=yelp"),
        (["-m", "hftune.run", "task.data_files.train=https://me:pw@host/x"], "python -m hftune.run task.data_files.train=https://me:...@host/x"),
        (["/home/me/mine.py", "--api-key", "sk-1"], "python mine.py"),
        (["-c", "key = 'sk-1'; import hftune"], "python -c"),
    ],
)  # fmt: skip
def test_the_command_is_that_of_hftune_without_secrets(monkeypatch, words, shown):
    assert command_of(monkeypatch, *words) == shown


def test_processes_that_hftune_starts_know_what_was_typed(monkeypatch):
    typed = command_of(monkeypatch, "/opt/bin/hftune", "train", "recipe=yelp", "--processes", "2")
    monkeypatch.setenv(facts.COMMAND, environment()[facts.COMMAND])
    assert command_of(monkeypatch, "-m", "hftune.run", "recipe=/tmp/hftune-launch-x/recipe.yaml") == typed


def test_odd_values_and_letters_stop_no_run(tmp_path):
    odd = FACTS | {"labels": ["\udcff"], "notices": [object()]}
    facts.write(odd, tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["labels"] == ["?"]


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert facts.git_state() is None


class Shy(Tagging):
    @property
    def labels(self):
        raise AttributeError("no data yet")

    def describe(self, rows):
        return [{"text": row["texxt"]} for row in rows]


def test_a_mistake_in_what_is_only_shown_is_one_warning(capsys):
    task, rows = Shy(), [{"text": "a"}]
    for _ in range(2):
        assert ask(task, "describe", rows, rows) == rows and ask(task, "labels", None) is None
    assert capsys.readouterr().out.splitlines() == [
        "warning: Shy.describe failed: KeyError: 'texxt'. Training does not need it.",
        "warning: Shy.labels failed: AttributeError: no data yet. Training does not need it.",
    ]
    assert ask(Tagging(), "describe", [], rows) == rows


def test_images_of_steps_that_are_computed_again_are_removed(tmp_path):
    for name in ("step_00000100", "step_00000200", "other"):
        (tmp_path / name).mkdir()
    for name in ("step_00000100.png", "step_00000300.png"):
        (tmp_path / name).write_bytes(b"")
    remove_samples(tmp_path, after=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step_00000100", "step_00000100.png"]


def test_a_recipe_with_a_password_is_not_published(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "recipe.yaml").write_text("base: yelp_demo\ntask:\n  data_files: {train: 'https://me:s3cr3t@host/a.json'}\n")
    assert cli.main(["push", str(tmp_path), "me/yelp"]) == 2
    said = capsys.readouterr().err
    assert "s3cr3t" not in said and "https://me:...@host/a.json" in said
