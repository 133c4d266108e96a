"""Digits from the command line to a model that reads them, and what `hftune evaluate` does."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import hftune
from hftune import Recipe, cli, train
from hftune.data.demo import digits
from hftune.data.files import IMAGES
from tests.support.runs import Command, Run, environment, train_on, warm_python

ROOT = Path(__file__).parents[2]
SMALL = (
    "task.dataset=tests.support.tasks:few_digits",
    "task.augmentation={shift: 2, rotate: 10}",
    *("train.batch_size=40", "train.micro_batch_size=8", "train.epochs=2", "train.log_every=1", "checkpoint.every=3"),
    *("eval.batch_size=7", "eval.every=epoch", "checkpoint.keep=9"),
)
"""300 digits in batches of 40: seven whole steps and a last one of 20, an epoch; 101 to evaluate on."""
STILL = ("train.lr=1e-12", "train.max_steps=1")
JOBS = {"digits": SMALL, "moved": (*SMALL, *STILL), "unmoved": (*SMALL, *STILL, "task.augmentation=null")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_on(1, JOBS, tmp_path_factory.mktemp("runs"), "mnist_demo")


def test_evaluation_counts_every_digit_once_in_the_order_of_the_data(runs):
    run = runs["digits"]
    assert sum(map(sum, run.result["metrics"]["confusion_matrix"])) == 101 == len(run.predictions)
    assert [row["label"] for row in run.predictions] == [str(row["label"]) for row in digits("eval", 101)]


def test_augmentation_moves_training_images_and_no_others(runs):
    moved, unmoved = runs["moved"], runs["unmoved"]
    assert moved.logged("train/loss") != pytest.approx(unmoved.logged("train/loss"), rel=1e-4)
    assert moved.logged("eval/loss") == pytest.approx(unmoved.logged("eval/loss"), rel=1e-6)


def test_demo_learns_its_digits(tmp_path):
    """The demo's own command, cut to half its epochs, on two processes."""
    launch = [Path(warm_python()).with_name("accelerate"), "launch", "--config_file", "accelerate_configs/2cpu.yaml"]
    command = [*launch, "-m", "hftune.run", "recipe=mnist_demo", "train.epochs=3", f"output_dir={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert Run(tmp_path / "out").result["metrics"]["accuracy"] > 0.9
    rows = list(digits("eval", 30))
    told = hftune.load_model(tmp_path / "out", device="cpu").predict([row["image"] for row in rows])
    assert sum(answer["label"] == str(row["label"]) for row, answer in zip(rows, told, strict=True)) >= 25


# Evaluating again

TRUST = "--trust-code"
"""The data of these runs come from a function that is not hftune's."""


def evaluated(folder, capsys, *words):
    """Run ``hftune evaluate`` in this process and return what it writes."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    output = folder.with_suffix(".json")
    assert cli.main(["evaluate", f"recipe={folder}/recipe.yaml", *words, TRUST, "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "it wrote into the run's folder"
    return json.loads(output.read_text()), said.out


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def lines(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def metrics_at(run, step):
    """What the run itself logged of its evaluation after a step."""
    (line,) = [line for line in lines(run) if line["step"] == step and "eval/loss" in line]
    return {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}


def test_model_evaluated_again_gives_the_metrics_of_its_run_bit_for_bit(runs, capsys, on_cpu):
    run = runs["digits"]
    found, said = evaluated(run.folder, capsys)
    assert found == {
        "metrics": metrics_at(run, run.result["best"]["step"]),
        "model": f"{run.folder}/model",
        "num_samples": 101,
        "world_size": 1,
    }
    assert [line.split()[0] for line in said.splitlines()] == ["loss", "accuracy", "macro_f1", "mcc", "samples", "model"]


@pytest.mark.parametrize("step", [8, 16])
def test_checkpoint_evaluated_again_gives_the_metrics_of_its_step(runs, capsys, on_cpu, step):
    folder = runs["digits"].folder
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    found, _ = evaluated(folder, capsys, "--checkpoint", str(checkpoint))
    assert (found["metrics"], found["model"]) == (metrics_at(runs["digits"], step), str(checkpoint))


def test_two_processes_evaluate_to_the_same_metrics_and_print_them_once(runs, tmp_path):
    run = runs["digits"]
    words = ["evaluate", f"recipe={run.folder}/recipe.yaml", "eval.batch_size=9", TRUST, "--output", str(tmp_path / "out.json")]
    done = Command(2, *words, module="hftune.cli")
    out, err = done.communicate()
    assert done.returncode == 0, err
    found, expected = json.loads((tmp_path / "out.json").read_text()), metrics_at(run, run.result["best"]["step"])
    assert found["world_size"] == 2 and found["metrics"].pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6)
    assert found["metrics"] == expected
    assert out.count("accuracy") == 1


def test_other_data_are_evaluated_where_a_key_says_so(runs, capsys, on_cpu):
    found, _ = evaluated(runs["digits"].folder, capsys, "task.max_eval_samples=40")
    assert found["num_samples"] == 40 == sum(map(sum, found["metrics"]["confusion_matrix"]))


def refused(capsys, *words):
    assert cli.main(["evaluate", TRUST, *map(str, words)]) == 2
    return capsys.readouterr().err.removeprefix("hftune: ").rstrip("\n")


def test_what_cannot_be_evaluated_is_refused(runs, capsys, on_cpu, tmp_path):
    folder = runs["digits"].folder
    recipe, checkpoint = f"recipe={folder}/recipe.yaml", folder / "checkpoints" / "step_00000016"
    for words, said in {
        ("recipe=mnist_demo", f"output_dir={tmp_path}/none"): f"{tmp_path}/none/model: there is no model yet. Its run's first",
        (recipe, "--checkpoint", folder / "checkpoints/step_17"): "checkpoints/step_17: there is no such folder. Name one such",
        (recipe, "--checkpoint", folder): f"--checkpoint {folder} is not a readable checkpoint: manifest.json is missing.",
        (
            recipe,
            "task.width=2",
            "--checkpoint",
            checkpoint,
        ): f"{checkpoint} belongs to a different model: conv1.bias is (10,) there and (20,) here.",
        (
            recipe,
            "task.max_train_samples=100",
            "--checkpoint",
            checkpoint,
        ): f"{checkpoint} was trained on different training data. Give",
        (recipe, "task.widht=2"): "task.widht is not a key of a recipe. Did you mean 'task.width'?",
    }.items():
        assert said in refused(capsys, *words)


# Answering


def test_predict_names_each_file_of_a_folder_with_label_and_probability(runs, capsys, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for place, row in enumerate(digits("eval", 3)):
        row["image"].save(images / f"{place}.png")
    folder = runs["digits"].folder
    assert cli.main(["predict", str(folder), TRUST, "--input", str(images), "--batch-size", "2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [f"{images}/{place}.png" for place in range(3)]
    assert all(row[1] in "0123456789" and 0.1 <= float(row[2]) <= 1 for row in rows)
    assert cli.main(["predict", str(folder), TRUST, "--json", "--input", f"{images}/0.png", f"{images}/1.png"]) == 0
    assert [list(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == [["input", "label", "probability"]] * 2


def test_input_that_cannot_be_answered_is_named(runs, capsys, tmp_path):
    folder = str(runs["digits"].folder)

    def said(*inputs):
        assert cli.main(["predict", folder, TRUST, "--input", *map(str, inputs)]) == 2
        return capsys.readouterr().err.removeprefix("hftune: ").rstrip("\n")

    assert said(tmp_path / "none") == f"--input {tmp_path}/none: there is no such file or folder."
    (tmp_path / "empty").mkdir()
    assert said(tmp_path / "empty") == f"--input {tmp_path}/empty: {tmp_path}/empty has no images ({', '.join(IMAGES)})."
    (tmp_path / "notes.txt").write_text("no image")
    assert said(tmp_path / "notes.txt") == f"Input 0 ({tmp_path}/notes.txt) is not an image that can be read."
    Image.new("L", (20, 10)).save(tmp_path / "wide.png")
    wide = said(tmp_path / "wide.png")
    assert wide.startswith(f"Input 0 ({tmp_path}/wide.png) is 20 x 10 pixels, but") and "task.resize=true" in wide


def test_shared_mnist_trains_from_its_own_files(tmp_path):
    folder = Path(os.environ.get("HFTUNE_TEST_DATA", ROOT.parent / "shared" / "data")) / "mnist"
    if not folder.is_dir():
        pytest.skip("MNIST is not on this machine (set HFTUNE_TEST_DATA to the folder that holds mnist/)")
    words = ["task.dataset=idx", f"task.data_dir={folder}", "task.max_eval_samples=2000", "train.max_steps=60"]
    made = Run(train(Recipe.load("mnist_best", *words, f"output_dir={tmp_path}/out")).output_dir)
    assert made.result["metrics"]["accuracy"] > 0.8 and made.result["test"]["accuracy"] > 0.8
    data = json.loads((made.folder / "run.json").read_text())["data"]
    assert {split: found["samples"] for split, found in data.items()} == {"train": 54_000, "eval": 2_000, "test": 10_000}
