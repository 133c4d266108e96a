"""Chats with pictures on 1, 2 and 4 processes, in micro-batches with and without pictures, stopped and resumed."""

import pytest
from safetensors import safe_open

from tests.support.runs import train_on
from tests.support.vision import tiny_model

SMALL = (
    *("task.dataset=tests.support.tasks:few_picture_chats", "train.batch_size=16", "train.log_every=1", "train.epochs=2"),
    *("train.micro_batch_tokens=null", "train.parts=4", "train.lr=1e-3", "eval.every=2 epochs", "eval.batch_size=5"),
    "task.generation.max_new_tokens=4",
    *("task.model_config.vision_config.num_hidden_layers=1", "task.model_config.text_config.num_hidden_layers=1"),
)
DROPOUT = (
    "task.model_config.text_config.attention_dropout=0.2",
    "task.model_config.vision_config.attention_dropout=0.2",
)
JOBS = {"whole": (*SMALL, *DROPOUT, "checkpoint.every=2"), "padded": (*SMALL, "train.packing=off")}
NAMED = (
    *("recipe=vision_chats", "task.dataset=tests.support.tasks:few_picture_chats", "task.eval_split=validation"),
    *("train.batch_size=16", "train.micro_batch_tokens=null", "train.parts=4", "train.max_steps=3", "train.log_every=1"),
    *("train.lr=1e-2", "train.schedule=constant", "train.warmup_ratio=0", "eval.every=never", "task.max_length=256"),
)
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2", "adapter.targets=[q_proj, v_proj]")
CUT = {"packed": SMALL, "single": (*SMALL, "train.parts=null", "train.micro_batch_size=1")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    idefics3, qwen = (f"task.model={tiny_model(family, folder)}" for family in ("idefics3", "qwen2_5_vl"))
    others = {
        "idefics3": (*NAMED, idefics3),
        "qwen": (*NAMED, qwen, "task.type=tests.support.vision.QwenChats", *LORA),
    }
    found = {(name, 1): run for name, run in train_on(1, {**JOBS, **CUT, **others}, folder, "vision_chats_demo").items()}
    again = {"resumed": (*JOBS["whole"], f"output_dir={folder}/resumed")}
    train_on(2, again, folder, "vision_chats_demo", stops={"resumed": (3, 0)})
    many = {**JOBS, **again, **others, "sharded": JOBS["whole"]}
    sharded = {"sharded", "idefics3"}
    found |= {(name, 2): run for name, run in train_on(2, many, folder, "vision_chats_demo", sharded=sharded).items()}
    return found | {("whole", 4): train_on(4, {"whole": JOBS["whole"]}, folder, "vision_chats_demo")["whole"]}


@pytest.mark.parametrize(("name", "like", "size"), [("whole", "whole", 2), ("whole", "whole", 4), ("sharded", "whole", 2)])
def test_losses_and_metrics_do_not_depend_on_processes_with_dropout(runs, name, like, size):
    one, many = runs[like, 1], runs[name, size]
    expected = one.logged("train/loss")
    assert len(expected) == 6
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    assert many.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)
    assert many.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("name", "part"), [("idefics3", "connector"), ("qwen", "lora")])
def test_models_of_other_families_train_the_same_with_a_frozen_tower_sharded_and_by_lora(runs, name, part):
    one, two = runs[name, 1], runs[name, 2]
    assert two.logged("train/loss") == pytest.approx(one.logged("train/loss"), rel=1e-5)
    assert two.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)
    with safe_open(next((one.folder / "checkpoints").glob("*3/model.safetensors")), "pt") as file:
        trained = [*file.keys()]
    assert any(part in key for key in trained)


def test_losses_do_not_depend_on_micro_batches_or_padding(runs):
    expected = runs["packed", 1].logged("train/loss")
    assert runs["single", 1].logged("train/loss") == pytest.approx(expected, rel=1e-5)
    for size in (1, 2):
        assert runs["padded", size].logged("train/loss") == pytest.approx(expected, rel=1e-5)


def test_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["whole", 2], runs["resumed", 2]
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"]
