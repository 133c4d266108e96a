"""What the README shows is what happens: its code blocks are taken from the file and run."""

import re
import subprocess
import sys
from pathlib import Path

from hftune import Recipe, cli
from tests.support.runs import Run, environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def test_own_task_trains_the_same_on_one_and_on_two_processes(tmp_path):
    code, recipe = block("python", "moons.py"), block("yaml", "moons.yaml")
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    (tmp_path / "moons.py").write_text(code)
    (tmp_path / "moons.yaml").write_text(recipe)
    runs = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
        folder = f"out{len(runs)}"
        said = python(*launcher, "-m", "hftune.run", "recipe=moons.yaml", f"output_dir={folder}", folder=tmp_path)
        assert said.returncode == 0, said.stderr
        runs.append(Run(tmp_path / folder))
    assert runs[0].result["metrics"]["accuracy"] > 0.9
    assert runs[0].result["metrics"]["accuracy"] == runs[1].result["metrics"]["accuracy"]
    assert [row["prediction"] for row in runs[0].predictions] == [row["prediction"] for row in runs[1].predictions]
    assert (runs[0].folder / "model" / "model.safetensors").is_file()


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


def test_overrides_shown_are_keys_that_exist():
    commands = [line.split("hftune.run ")[1] for line in README.splitlines() if "python -m hftune.run recipe=yelp" in line]
    for command in commands:
        words = [word for word in command.split("`")[0].split() if "=" in word and not word.startswith("$")]
        if not any("learning_rate" in word for word in words):
            Recipe.from_argv(words)


def test_commands_of_the_hftune_command_are_understood():
    commands = [re.split("[#>]", line)[0].split() for line in README.splitlines() if line.startswith("    hftune ")]
    assert {command[1] for command in commands} == {"configs", "doctor", "evaluate", "plan", "predict", "slurm", "vocab"}
    for command in commands:
        assert callable(cli.parse(command[1:]).command)


def test_files_named_exist():
    for path in re.findall(r"\]\((?!http)([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
