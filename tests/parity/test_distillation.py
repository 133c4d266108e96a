"""Students of a teacher on 1, 2 and 4 processes, stopped and resumed, and against a plain loop: the same losses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from hftune import ConfigError, Recipe, cli, train
from hftune.build import build_model, load_datasets
from tests.support.runs import NO_DROPOUT, SMALL, train_on
from tests.support.trainer import STEPS, planned_batches

CLASSES = (*SMALL, "train.epochs=1")
CHATS = (
    *("recipe=chats_demo", "task.max_train_samples=80", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=4"),
    *("train.micro_batch_tokens=200", "train.epochs=2", "train.warmup_ratio=0", "train.log_every=1", "eval.every=never"),
)
STUDENT = (*CHATS, "task.model_config.num_hidden_layers=1", "task.model_config.attention_dropout=0.2")
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2")
ALONE = (*CHATS, "train.parts=null", "train.micro_batch_tokens=null", "train.micro_batch_size=16", "train.epochs=4")
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    teachers = train_on(1, {"classes_teacher": (*CLASSES, "train.lr=1e-3"), "chats_teacher": CHATS}, folder)
    classes, chats = (f"train.teacher={teachers[f'{name}_teacher'].folder}" for name in ("classes", "chats"))
    one_layer = "task.model_config.num_hidden_layers=1"
    cut = (*CLASSES, *NO_DROPOUT, "train.parts=null", "train.packing=off", one_layer, classes)
    jobs = {
        "classes": (*CLASSES, one_layer, classes, "checkpoint.every=2"),
        "chats": (*STUDENT, chats),
        "lora": (*STUDENT, *LORA, chats, "train.teacher_weight=1"),
    }
    cuts = {f"cut{size}": (*cut, f"train.micro_batch_size={size}") for size in (3, 16)}
    alone = (*ALONE, chats, "train.teacher_temperature=3", "train.teacher_weight=0.3")
    resumed = {"resumed": (*jobs["classes"], f"output_dir={folder}/resumed")}
    of_size = {
        1: {**jobs, **cuts, "alone": alone},
        2: {**jobs, **resumed, "cut3": cuts["cut3"], "sharded": jobs["chats"]},
        4: {name: jobs[name] for name in ("classes", "chats")},
    }
    stops = {2: {"resumed": (3, 0)}}
    found = {
        (name, size): run
        for size in SIZES
        for name, run in train_on(size, of_size[size], folder, stops=stops.get(size), sharded={"sharded"}).items()
    }
    return found | {("resumed", 2): train_on(2, resumed, folder)["resumed"]}


@pytest.mark.parametrize(
    ("name", "size"), [("classes", 2), ("classes", 4), ("chats", 2), ("chats", 4), ("lora", 2), ("sharded", 2)]
)
def test_losses_do_not_depend_on_processes_with_dropout(runs, name, size):
    one, many = runs["chats" if name == "sharded" else name, 1], runs[name, size]
    for value, tolerance in (("train/loss", 1e-5), ("train/teacher_kl", 1e-5), ("train/grad_norm", 1e-4)):
        expected = one.logged(value)
        assert len(expected) >= 7 and len({*expected}) > 5
        assert many.logged(value) == pytest.approx(expected, rel=tolerance)
    kl = one.logged("train/teacher_kl")
    assert name == "classes" or kl[-1] < kl[0]  # whose steps are too small to learn much


@pytest.mark.parametrize(("name", "size"), [("cut3", 1), ("cut3", 2)])
def test_losses_do_not_depend_on_micro_batches(runs, name, size):
    for value in ("train/loss", "train/teacher_kl"):
        assert runs[name, size].logged(value) == pytest.approx(runs["cut16", 1].logged(value), rel=1e-5)


def test_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["classes", 2], runs["resumed", 2]
    for value in ("train/loss", "train/teacher_kl"):
        assert resumed.logged(value) == whole.logged(value)
    assert resumed.result["metrics"] == whole.result["metrics"]


def test_losses_are_those_of_a_plain_loop_with_a_frozen_model(runs):
    run = runs["alone", 1]
    recipe = Recipe.load(run.folder / "recipe.yaml")
    samples, model, config = load_datasets(recipe)["train"], build_model(recipe), recipe.train
    teacher = AutoModelForCausalLM.from_pretrained(f"{config.teacher}/model").eval()
    optimizer = torch.optim.AdamW(recipe.task.parameter_groups(model, config), config.lr, tuple(config.betas))
    losses, kls = [], []
    for step, batch in enumerate(planned_batches(recipe, samples)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / STEPS)
        labels, inputs = batch["labels"], {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            theirs = teacher(**inputs).logits[labels != -100]
        own = model(**inputs).logits[labels != -100]
        kl = kl_div((own / 3).log_softmax(-1), (theirs / 3).softmax(-1), reduction="batchmean")
        loss = 0.7 * cross_entropy(own, labels[labels != -100]) + 0.3 * 3**2 * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
        kls.append(kl.item())
    assert len(losses) == STEPS and torch.tensor(losses).std() > 0.05
    assert run.logged("train/loss") == pytest.approx(losses, rel=1e-5)
    assert run.logged("train/teacher_kl") == pytest.approx(kls, rel=1e-4)


def test_a_replayed_step_is_the_one_that_was_and_its_samples_are_not_looked_at(runs, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = ["replay", str(runs["classes", 1].folder), "--step", "5"]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bit_equal"]
    assert cli.main([*words, "--worst", "2"]) == 2
    assert "cannot be looked at with train.teacher" in capsys.readouterr().err


def test_a_teacher_that_has_changed_is_refused_on_resume_and_told_in_a_replay(runs, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = runs["classes", 1]
    recipe = Recipe.load(run.folder / "recipe.yaml", "train.epochs=3", f"output_dir={run.folder}")
    folder = f"{recipe.train.teacher}/model/model.safetensors"
    kept = load_file(folder)
    try:
        save_file({**kept, "classifier.weight": 2 * kept["classifier.weight"]}, folder, {"format": "pt"})
        with pytest.raises(ConfigError, match="was trained on different weights of the teacher"):
            train(recipe)
        cli.main(["replay", str(run.folder), "--step", "2"])
        said = capsys.readouterr().out
        assert "The weights of the teacher differ from those of the run." in said and "NOT equal" in said
    finally:
        save_file(kept, folder, {"format": "pt"})
