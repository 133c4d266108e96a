"""What the README shows is what happens: its code blocks are taken from the file and run."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import hftune
from hftune import ConfigError, Recipe, cli, spark
from hftune.config import reference
from hftune.config.shipped_files import config_names
from tests.support.commands import commands, hftune_words, launch_config, prepare
from tests.support.runs import Run, environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
COMMANDS = [*{tuple(command): command for page in PAGES.values() for command in commands(page)}.values()]


def block(language, first_word):
    """The fenced block whose first line starts with a comment that names it, or with a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return next(text for text in blocks if text.lstrip("# ").startswith(first_word))


def python(*arguments, folder, **extra):
    env = environment(**extra)
    env["PYTHONPATH"] = f"{folder}:{ROOT}"
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_first_command_stands_in_the_first_twenty_lines():
    assert any("make demo" in line for line in README.splitlines()[:20])
    assert any("accelerate launch" in line for line in README.splitlines()[:20])


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


def test_python_example_runs(tmp_path):
    said = python("-c", block("python", "from hftune import Recipe, train"), folder=tmp_path)
    assert said.returncode == 0, said.stderr
    accuracy, steps, folder = said.stdout.splitlines()[-1].split()
    assert 0 <= float(accuracy) <= 1 and (steps, folder) == ("20", "outputs/from_python/model")
    assert (tmp_path / folder / "model.safetensors").is_file()


def test_python_example_of_several_processes_runs(tmp_path):
    code = block("python", "from hftune import Recipe, launch") + "\nprint(result.steps, result.world_size, result.model_dir)"
    said = python("-c", code, folder=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "20 2 outputs/launched/model"


def test_own_recipe_loads(tmp_path):
    (tmp_path / "mine.yaml").write_text(block("yaml", "mine.yaml"))
    recipe = Recipe.load(tmp_path / "mine.yaml")
    assert (recipe.task.model, recipe.task.max_train_samples, recipe.train.mixed_precision) == (
        "distilbert/distilbert-base-uncased",
        None,
        "bf16",
    )
    assert recipe.track.with_ == ["wandb"] and recipe.train.batch_size == 128 and recipe.output_dir == "outputs/mine"


def test_refusal_is_the_one_shown(tmp_path):
    shown = README[README.index("    $ python") :].split("\n\n")[0].splitlines()
    said = python("-m", *shown[0].split("python -m ")[1].split(), folder=tmp_path)
    assert said.returncode == 2
    for line, expected in zip(said.stderr.splitlines(), shown[1:], strict=True):
        assert line.startswith(expected.strip("\n")[4:].removesuffix("..."))


def test_many_commands_are_found():
    """The tests below take what they find; this one would miss a page that is read wrongly."""
    found = {name for page in PAGES.values() for command in commands(page) if (name := (hftune_words(command) or [""])[0])}
    assert {"train", "doctor", "configs", "predict", "evaluate", "plan", "slurm", "vocab", "audit", "spark"} <= found
    assert sum(len(list(commands(page))) for page in PAGES.values()) > 40


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(command)[:100] for command in COMMANDS])
def test_command_is_understood_and_its_recipe_is_accepted(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    if (config := launch_config(command)) is not None:
        assert config in config_names()
    found = hftune_words(command)
    if found is None:
        return check_other(command)
    name, words = found
    if not words:  # spoken of, not given
        return None
    words = prepare(words, README)
    if name in ("evaluate", "plan") and not any(word.startswith("recipe=") for word in words):
        words.insert(0, "recipe=yelp_demo")
    if name == "train" and words[0] in ("--help", "-h"):
        assert all(reference.section_text(section) for section in words[1:])
        return None
    if name == "spark":
        words = spark.parser().parse_known_args(words)[1]
    elif name != "reference":
        options = cli.parse([name, *words])
        words = getattr(options, "words", [])
    if words:
        Recipe.from_argv(words).validate()
    return None


def check_other(command):
    """What is no command of hftune: a target of make, or what pip installs."""
    if command[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in command[1:])
    elif command[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in command for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")]
        assert set(asked) <= {*extras}


CHEAP = {"configs", "recipes", "show", "slurm"}


def test_commands_that_take_no_time_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in COMMANDS:
        name, words = hftune_words(command) or ("", [])
        if name in CHEAP:
            assert cli.main([name, *prepare(words, README)]) == 0, capsys.readouterr().err
            ran.append(name)
    assert {"configs", "slurm"} <= {*ran}


def test_plan_shown_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = next(command for command in COMMANDS if command[:2] == ["hftune", "plan"])
    assert cli.main(command[1:]) == 0
    assert "steps" in capsys.readouterr().out


def test_files_named_exist():
    for path in re.findall(r"\]\((?!http)([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
