"""What the README shows is what happens: its code blocks are taken from the file and run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hftune
from hftune import ConfigError, Recipe, cli
from tests.support.runs import TINY, Run, environment, warm_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language, first_word):
    """The fenced block whose first line starts with a comment that names it, or with a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return next(text for text in blocks if text.lstrip("# ").startswith(first_word))


def python(*arguments, folder, **extra):
    env = environment(**extra)
    env["PYTHONPATH"] = f"{folder}:{ROOT}"
    return subprocess.run([warm_python(), *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_readme_is_a_door_and_no_manual():
    assert len(README.splitlines()) <= 180
    assert any("make demo" in line for line in README.splitlines()[:40])


def test_demo_output_shown_is_that_of_its_first_step(tmp_path, capsys):
    """The whole demo takes minutes; its first step does not depend on how many follow, nor on the number of processes."""
    labels, shown = block("text", "labels").splitlines()[:2]
    hftune.train(Recipe.load("yelp_demo", "train.max_steps=1", "task.max_eval_samples=8", f"output_dir={tmp_path}"))
    printed = capsys.readouterr().out.splitlines()
    step = next(line for line in printed if line.startswith("step 1/1"))
    assert labels in printed
    assert columns(step).items() >= columns(shown.removesuffix(" ...")).items()


def columns(line):
    """A line of the log as a mapping from names to what is printed behind them."""
    return dict(column.split() for column in re.split("  +", line)[1:])


def test_figures_measured_are_those_of_the_result_files():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(\w+)\.py`, (\S+) \|$", README, flags=re.MULTILINE)
    assert len(rows) >= 4
    for what, shown, script, date in rows:
        result = json.loads((ROOT / "benchmarks" / "results" / f"{script}.json").read_text())
        assert result["date"].startswith(date)
        assert ("taken_over" in result) == ("‡" in shown)
        measured = " ".join([*result["measured"], *result["measured"].values()])
        missing = [number for number in re.findall(r"[\d.,]*\d(?:e-\d+)?", f"{what} {shown}") if number not in measured]
        assert missing == [], f"{script}.py did not measure {missing}"


def test_own_task_trains_the_same_on_one_and_on_two_processes(tmp_path, monkeypatch, capsys):
    code, recipe = block("python", "moons.py"), block("yaml", "moons.yaml")
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    (tmp_path / "moons.py").write_text(code)
    (tmp_path / "moons.yaml").write_text(recipe)
    (elsewhere := tmp_path / "elsewhere").mkdir()  # the task is found next to its recipe, wherever a launcher is started
    runs = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
        folder = f"out{len(runs)}"
        words = ["recipe=../moons.yaml", f"output_dir={tmp_path / folder}"]
        said = python(*launcher, "-m", "hftune.run", *words, folder=elsewhere)
        assert said.returncode == 0, said.stderr
        runs.append(Run(tmp_path / folder))
    assert runs[0].result["metrics"]["accuracy"] > 0.9
    assert runs[0].result["metrics"]["accuracy"] == runs[1].result["metrics"]["accuracy"]
    assert [row["prediction"] for row in runs[0].predictions] == [row["prediction"] for row in runs[1].predictions]
    assert (runs[0].folder / "model" / "model.safetensors").is_file()
    check_own_model(runs[0], tmp_path, monkeypatch, capsys)


def check_own_model(run, folder, monkeypatch, capsys):
    """What the own task's run has written is loaded and evaluated again, once its code is trusted."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "moons", raising=False)  # the example of that name may have been imported here
    assert cli.main(["evaluate", "recipe=out0/recipe.yaml"]) == 2
    assert "task.type=moons.Moons (out0/recipe.yaml) is not hftune's own code" in capsys.readouterr().err
    assert cli.main(["evaluate", "recipe=out0/recipe.yaml", "--trust-code", "--output", "again.json"]) == 0
    assert json.loads(Path("again.json").read_text())["metrics"]["accuracy"] == run.result["best"]["value"]
    assert cli.main(["predict", "out0", "--text", "x", "--trust-code"]) == 2
    wanting = "moons.Moons cannot predict from raw inputs. Give it a method predict(model, inputs)."
    assert wanting in capsys.readouterr().err
    loaded = hftune.load_model("out0", "cpu", trust_code=True)
    assert loaded.model(torch.zeros(1, 2)).shape == (1, 2)
    with pytest.raises(ConfigError) as caught:
        loaded.predict([[0.0, 0.0]])
    assert str(caught.value) == wanting


def test_one_file_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, predict = (line.split()[1:] for line in README.splitlines() if line.startswith("    hftune") and ".csv" in line)
    rows = [f"{word} thing,{label}" for word, label in (("good", "praise"), ("bad", "blame")) for _ in range(10)]
    Path("reviews.csv").write_text("\n".join(["text,label", *(f"{number} {row}" for number, row in enumerate(rows)), ""]))
    Path("new.csv").write_text("text\ngood\nbad\n")
    small = ["task.model=null", *TINY, "train.epochs=1", "train.batch_size=6"]
    assert cli.main([*train, *small]) == 0
    assert cli.main(predict) == 0
    header, *predicted = Path("labels.csv").read_text().splitlines()
    assert header.split(",")[:2] == ["text", "label"] and [line.split(",")[0] for line in predicted] == ["good", "bad"]
    assert {line.split(",")[1] for line in predicted} <= {"praise", "blame"}
