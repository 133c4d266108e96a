"""Yelp review classification from the command line to a model that ``pipeline`` loads."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from hftune import Recipe, TrainingError, __version__, train
from hftune.data.demo import reviews
from hftune.tracking.console import short
from tests.support.runs import NO_DROPOUT, TINY, Run, environment, warm_python

ROOT = Path(__file__).parents[2]
QUICK = (
    *(*TINY, "train.micro_batch_size=8", "train.micro_batch_tokens=null", "task.max_train_samples=64"),
    *("task.max_eval_samples=33", "train.epochs=1", "train.batch_size=16"),
)


def run(folder, *overrides):
    """Train yelp_demo, made small, in this process."""
    result = train(Recipe.load("yelp_demo", *QUICK, f"output_dir={folder}", *overrides))
    return Run(result.output_dir)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's own command, cut to an epoch, on two processes."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    launch = [Path(warm_python()).with_name("accelerate"), "launch", "--config_file", "accelerate_configs/2cpu.yaml"]
    command = [*launch, "-m", "hftune.run", "recipe=yelp_demo", "train.max_steps=120", "eval.every=60", f"output_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder), done.stdout


def test_demo_accuracy_rises_clearly_above_chance(demo):
    accuracies = demo[0].logged("eval/accuracy")
    assert len(accuracies) == 2 and accuracies[1] > accuracies[0] > 0.3  # chance is 0.2
    assert accuracies[1] > 0.42


def test_demo_says_in_its_first_lines_what_runs_and_in_its_last_ones_what_came_out(demo):
    run, said = demo
    # On a busy machine the second process may have waited for the data, and said so.
    lines = [line for line in said.splitlines() if not line.startswith("note: Waiting for another process")]
    assert lines[0] == f"hftune {__version__}: recipe yelp_demo, 2 processes; loading libraries ..."
    assert [re.split("  +", line)[1:] for line in lines[1:9]] == [
        ["recipe", f"yelp_demo (hftune {__version__})"],
        ["model", "BertForSequenceClassification, 400,517 parameters"],
        ["labels", "1 star: 897, 2 stars: 745, 3 stars: 788, 4 stars: 711, 5 stars: 859"],
        ["samples", "4,000 train, 800 eval"],
        ["steps", "120, 125 an epoch"],
        ["batch", "32 samples, in micro-batches of at most 1,024 tokens, without padding"],
        ["runs on", "2 processes, cpu, float32"],
        ["output", str(run.folder)],
    ]
    assert not [line for line in lines if line.startswith("warning")]
    evaluations = [line for line in lines if "  eval  " in line]
    assert len(evaluations) == 2 and all(line.endswith("  best so far") for line in evaluations)
    assert [line.split()[0] for line in lines[-11:] if line.strip()] == [
        *("best", "loss", "accuracy", "macro_f1", "mcc", "mae", "best", "steps", "model", "report"),
    ]
    best = run.result["best"]
    assert f"{best['metric']} {short(best['value'])} at step {best['step']}" in said
    assert f"{run.folder}/model" in said and f"{run.folder}/report.html" in said


def test_output_folder_holds_what_the_contract_says(demo):
    run, _ = demo
    assert {path.name for path in run.folder.iterdir() if not path.name.startswith(".")} == {
        *("recipe.yaml", "metrics.jsonl", "ledger.jsonl", "rows.bin", "result.json", "report.html", "run.json"),
        *("predictions.jsonl", "model", "model_last", "checkpoints"),
    }
    assert "Finished</span>" in (run.folder / "report.html").read_text()
    assert set(run.result) == {
        *("metrics", "test", "best", "stopped_early", "commits", "steps", "seconds", "world_size", "versions")
    }
    assert (run.result["steps"], run.result["world_size"]) == (120, 2)
    assert run.result["best"] == {"metric": "accuracy", "value": max(run.logged("eval/accuracy")), "step": 120}
    first = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "epoch", "train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_s"} <= first.keys()
    assert len(run.predictions) == 800


def test_pipeline_loads_the_export_and_gives_the_labels_of_the_evaluation(demo):
    run, _ = demo
    classify = pipeline("text-classification", model=str(run.folder / "model"), device="cpu")
    texts = [row["text"] for row in reviews("eval")][:40]
    said = [answer["label"] for answer in classify(texts, truncation=True, max_length=512)]
    assert said == [row["prediction"] for row in run.predictions[:40]]
    assert len(set(said)) > 1


def test_saved_recipe_runs_again_and_gives_the_same_losses(tmp_path):
    first = run(tmp_path / "out", "train.log_every=1")
    losses, recipe = first.logged("train/loss"), Recipe.load(first.folder / "recipe.yaml")
    assert recipe.recipe == "yelp_demo" and recipe.output_dir == str(tmp_path / "out")
    recipe.resume = "never"
    train(recipe)
    assert first.logged("train/loss") == losses  # in the same folder, replaced and not appended to


def test_files_and_a_model_folder_of_ones_own(tmp_path):
    made = run(tmp_path / "first").folder / "model"
    shutil.copytree(made, tmp_path / "mine")
    for part in ("train", "eval"):
        rows = [{"review": row["text"], "stars": row["label"]} for row in reviews(part)[:48]]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"task.data_files.{part}={tmp_path}/{part}.jsonl" for part in ("train", "eval")]
    columns = ["task.text_column=review", "task.label_column=stars", "task.dataset=json", f"task.model={tmp_path}/mine"]
    recipe = Recipe.load("yelp", *files, *columns, "task.max_length=64", "train.max_steps=2", f"output_dir={tmp_path}/out")
    assert train(recipe).steps == 2
    assert len(Run(tmp_path / "out").predictions) == 48


def test_best_and_last_model_are_both_kept(tmp_path):
    # The learning rate is so high that the second epoch ruins the model.
    result = run(tmp_path / "out", "train.epochs=3", "train.schedule=constant", "train.lr=0.5", "eval.metric=loss")

    losses = result.logged("eval/loss")
    assert result.result["best"]["value"] == min(losses)
    assert result.result["best"]["step"] == 4 * (1 + losses.index(min(losses)))
    best, last = ((result.folder / name / "model.safetensors").read_bytes() for name in ("model", "model_last"))
    assert (best == last) == (losses.index(min(losses)) == 2)


def test_evaluations_come_when_asked_for(tmp_path):
    for every, expected in (("2", 2), ("3", 2), ("epoch", 2), ("'2 epochs'", 1), ("100", 1)):
        overrides = ("train.batch_size=32", "train.epochs=2", f"eval.every={every}", "train.max_steps=4", "resume=never")
        assert len(run(tmp_path / "out", *overrides).logged("eval/loss")) == expected, every


def test_bf16_trains_close_to_float32(tmp_path):
    losses = [
        run(tmp_path / kind, *NO_DROPOUT, f"train.mixed_precision={kind}", "train.log_every=1").logged("train/loss")
        for kind in ("no", "bf16")
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)  # 8 bits of mantissa


def test_gradient_checkpointing_changes_nothing_even_with_dropout(tmp_path):
    losses = [
        run(tmp_path / flag, f"train.gradient_checkpointing={flag}", "train.log_every=1").logged("train/loss")
        for flag in ("false", "true")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_compiled_layers_train_the_same_and_are_exported_under_their_own_names(tmp_path, monkeypatch):
    """All of torch.compile but for its last stage, in which g++ takes half a minute; test_flex_attention has that for a forward pass."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = "task.model_config={model_type: bert, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 16}"
    runs = [
        run(tmp_path / flag, config, *NO_DROPOUT, f"train.compile={flag}", "train.log_every=1", "train.max_steps=2")
        for flag in ("false", "true")
    ]
    assert runs[1].logged("train/loss") == pytest.approx(runs[0].logged("train/loss"), rel=1e-4)
    assert pipeline("text-classification", model=str(runs[1].folder / "model"), device="cpu")("good")


def test_loss_that_is_not_finite_stops_with_step_process_and_samples_and_no_update(tmp_path, monkeypatch):
    from dataclasses import dataclass

    from hftune.strategies.data_parallel import DataParallel
    from hftune.tasks import SequenceClassification

    taken = []
    monkeypatch.setattr(DataParallel, "optimizer_step", lambda self, lr: taken.append(lr))

    @dataclass
    class Spoilt(SequenceClassification):
        """Its fifth micro-batch, the first one of the second step, has an infinite loss."""

        def loss(self, outputs, target):
            self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
            return super().loss(outputs, target) * (float("nan") if self.calls == 5 else 1.0)

    recipe = Recipe.load("yelp_demo", *QUICK, f"output_dir={tmp_path}/out", "train.micro_batch_size=8", "train.parts=4")
    recipe.task = Spoilt(**vars(recipe.task))
    with pytest.raises(TrainingError) as caught:
        train(recipe)
    said = str(caught.value)
    assert said.startswith("The loss of step 2 is nan (process 0: samples [")
    assert said.endswith("]). Lower train.lr, set train.clip_norm, or look at these samples.")
    assert len(json.loads(said[said.index("[") : said.index("]") + 1])) == 3  # of 16, in four parts of equal work
    assert len(taken) == 1


def test_shared_yelp_reviews_train(tmp_path):
    folder = Path(os.environ.get("HFTUNE_TEST_DATA", ROOT.parent / "shared" / "data")) / "yelp"
    if not folder.is_dir():
        pytest.skip("the Yelp sample is not on this machine (set HFTUNE_TEST_DATA to the folder that holds yelp/)")
    files = [f"task.data_files.train={folder}/train.jsonl", f"task.data_files.eval={folder}/test.jsonl", "task.dataset=json"]
    small = ["task.max_train_samples=256", "task.max_eval_samples=100", "train.batch_size=32", "train.lr=1e-3"]
    made = Run(train(Recipe.load("yelp", *files, *TINY, "task.model=null", *small, f"output_dir={tmp_path}/out")).output_dir)
    assert made.result["steps"] == 24 and sum(map(sum, made.result["metrics"]["confusion_matrix"])) == 100
