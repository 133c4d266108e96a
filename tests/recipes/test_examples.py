"""The examples do what examples/README.md says: they are run, or held to what hftune and torchrun accept."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hftune
from hftune import Recipe, cli, train
from tests.support.pages import hftune_words
from tests.support.runs import Group, Run, environment, warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Copies the examples, so that outputs lie elsewhere, and makes the folder of one the current one."""

    def enter(name: str) -> Path:
        shutil.copytree(EXAMPLES, tmp_path / "examples", dirs_exist_ok=True)
        folder = tmp_path / "examples" / name
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, "moons", raising=False)
        return folder

    return enter


def child_environment() -> dict[str, str]:
    """The environment of a child process that finds the commands of this interpreter, such as hftune."""
    return environment(PATH=f"{Path(warm_python()).parent}{os.pathsep}{os.environ['PATH']}")


def files_of_examples() -> list[Path]:
    return [path for path in EXAMPLES.rglob("*") if path.is_file() and not {"outputs", "__pycache__"} & {*path.parts}]


def test_the_table_names_every_example_and_every_name_exists():
    links = {EXAMPLES / link for link in re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text())}
    assert all(link.exists() for link in links)
    assert [path for path in files_of_examples() if path.name != "README.md" and not {path, *path.parents} & links] == []


def test_the_commands_in_the_table_are_accepted(example):
    commands = re.findall(r"`([^`]+)` \|$", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    assert len(commands) == 9
    trained = [command.split(" && ") for command in commands if "hftune train" in command]
    for place, command in trained:
        example(place.removeprefix("cd examples/"))
        name, words = hftune_words(command.split())
        Recipe.from_argv(cli.parse([name, *words]).words)
    named = {word for command in commands for word in command.split() if word.startswith("examples/")}
    assert len(trained) == 3 and all(
        (EXAMPLES.parent / word).is_file() for word in named - {"examples/own_task"} if "." in word
    )


def test_the_speedrun_tells_its_story(example, tmp_path):
    example(".")
    words = ["sh", "speedrun.sh", str(tmp_path / "runs")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # no warm process, which outlives its command
    done = subprocess.run(words, env=environment(PATH=path, STEPS="8"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The runs do not diverge." in done.stdout and re.search(r"resumed after step [2-7] on 1 process", done.stdout)
    assert "Every step used the samples of its plan, each exactly once per epoch." in done.stdout
    assert re.findall(r"\d stars?\t0\.\d+", done.stdout) and "'score': 0." in done.stdout


def test_own_csv_files_train_a_classifier_of_their_own_labels(example):
    example("own_csv")
    result = train(Recipe.load("tickets.yaml", "train.epochs=3", "eval.every=3 epochs", "train.log_every=1"))
    run = Run(Path(result.output_dir))
    assert run.logged("train/loss")[-1] < run.logged("train/loss")[0]
    config = json.loads((run.folder / "model" / "config.json").read_text())
    assert {*config["id2label"].values()} == {"billing", "returns", "shipping", "technical"}
    assert hftune.load_model(run.folder).predict(["My invoice is wrong."])[0]["label"] in config["id2label"].values()


def test_a_loop_of_ones_own_has_the_same_losses_on_one_process_and_on_two(tmp_path):
    script, losses = EXAMPLES / "own_loop" / "train.py", []
    for world_size in (1, 2):
        group = Group(world_size, [[str(script), [], None, {}]], tmp_path / f"{world_size}.log")
        assert not any(group.wait()), (tmp_path / f"{world_size}.log").read_text()
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", (tmp_path / f"{world_size}.log").read_text())])
    assert len(losses[0]) == 14 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    page = (EXAMPLES.parent / "docs" / "own-loop.md").read_text()
    assert script.read_text() in page


def test_notebook_trains_the_same_on_one_and_two_processes(example):
    folder = example("own_task")
    cells = json.loads((folder / "moons.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(code))), "launch refuses a task of a cell"
    *_, last = ast.parse(code).body
    shown = code.replace(ast.unparse(last), f"print({ast.unparse(last)})")
    assert shown != code
    done = subprocess.run([warm_python(), "-c", shown], env=child_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = Run(folder / "outputs" / "one_process"), Run(folder / "outputs" / "two_processes")
    assert two.result["world_size"] == 2 and two.result["metrics"]["accuracy"] > 0.9
    assert two.logged("train/loss") == pytest.approx(one.logged("train/loss"), rel=1e-5)
    assert [row["label"] for row in ast.literal_eval(done.stdout.splitlines()[-1])] == [0, 1]  # the upper moon, the lower one


def test_a_round_in_miniature_trains_on_answers_that_were_drawn_and_draws_again(example):
    folder = example("rounds")
    for name, words in {
        "rewards.py": {"600": "16"},
        "rounds.sh": {
            "1280": "320",
            "--answers 8": "--answers 2",
            "--threshold 1": "",
            "in 1 2": "in 1",
            "epochs=3": "max_steps=2",
        },
    }.items():
        text = (folder / name).read_text()
        assert all(word in text for word in words)
        for word, small in words.items():
            text = text.replace(word, small)
        (folder / name).write_text(text)
    done = subprocess.run(["sh", "rounds.sh"], env=child_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mean of the best") == 2 and len((folder / "best_1.jsonl").read_text().splitlines()) > 1


def test_notebook_is_kept_without_outputs():
    cells = json.loads((EXAMPLES / "own_task" / "moons.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
