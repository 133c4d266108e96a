"""A secret of the environment is used in addresses, and stands in no file, page, tracker or message."""

import json
import subprocess
import sys

import pytest

from hftune import cli

PLANTED = "Pl4nted5ecret"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Files in a folder whose name looks like a signed address; the tests' processes may not reach real ones."""
    folder = tmp_path / f"files?sig={PLANTED}"
    folder.mkdir()
    for name, count in {"train": 24, "eval": 8}.items():
        rows = [{"text": ("good " if index % 2 else "bad ") * (1 + index % 3), "label": index % 2} for index in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        monkeypatch.setenv(name.upper(), str(folder / f"{name}.jsonl"))
    monkeypatch.setenv("NONE", str(folder / "none.jsonl"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)


def words(output, **files):
    names = {"train": "TRAIN", "eval": "EVAL"} | files
    return [
        "recipe=text_classification_demo",
        "task.dataset=json",
        "task.label_column=label",
        *(f"task.data_files.{split}=${{oc.env:{name}}}" for split, name in names.items()),
        "train.max_steps=2",
        "track.with=[wandb,mlflow]",
        "track.upload=all",
        f"output_dir={output}",
    ]


def holding_the_secret(folder):
    return [path for path in folder.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]


def test_a_secret_of_the_environment_stands_nowhere(data, tmp_path, capfd):
    train = [sys.executable, "-m", "hftune.run"]  # inside a worker of pytest, pyspark takes itself for a doctest and exits
    assert subprocess.run([*train, *words("out")]).returncode == 0
    assert subprocess.run([*train, *words("missing", eval="NONE")]).returncode == 2
    for command in ("show", "plan", "report", "receipt", "audit", "evaluate"):
        cli.main([command, "out"])
    assert PLANTED not in "".join(capfd.readouterr())
    written = {path.name for path in tmp_path.rglob("*")}
    assert {"report.html", "receipt.json", "mlflow.db"} <= written and list(tmp_path.rglob("*.wandb"))
    assert holding_the_secret(tmp_path) == []
