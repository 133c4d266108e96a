"""Adapters keep the promise: the same training on 1, 2 and 4 processes and under FSDP, and bit-equal when resumed."""

import json
from pathlib import Path

import pytest
import torch

from hftune.checkpoints.checkpointer import newest
from tests.support.runs import NO_DROPOUT, SMALL, train_on

RECIPE = str(Path(__file__).parents[1] / "support" / "adapters.yaml")
REVIEWS = ("recipe=yelp_demo", *SMALL, "task.dataset=tests.support.tasks:few_reviews", "train.max_steps=3", "adapter.type=lora")
KEYS = (
    *("train.ema_decay=0.9", "train.layer_decay=0.7", "train.groups=[{match: lora_B, lr: 1e-2}]"),
    *("train.gradient_checkpointing=true", "adapter.type=dora", "adapter.targets=[q_proj,v_proj,down_proj]"),
)
JOBS = {
    "head": ("adapter.train_also=[lm_head]",),
    "keys": KEYS,
    "bf16": (*REVIEWS, "train.mixed_precision=bf16", "adapter.base_dtype=bf16"),
    "reviews": (*REVIEWS, "adapter.dropout=0.1"),
}
ON_ONE = {
    **JOBS,
    "recomputed": (*JOBS["head"], "train.gradient_checkpointing=true"),
    "packed": (*REVIEWS, *NO_DROPOUT),
    "padded": (*REVIEWS, *NO_DROPOUT, "train.packing=off", "train.micro_batch_size=4"),
    "small": ("adapter.rank=1", "adapter.targets=[q_proj]", "train.max_steps=3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """By name and number of processes; "keys resumed" was stopped after 2 steps, on 1 process, and on 2 under FSDP."""
    resumed = {size: (*KEYS, "resume=auto", f"output_dir={folder / f'keys-again-{size}'}") for size in (1, 2)}
    pairs = {size: {"keys stopped": words, "keys resumed": words} for size, words in resumed.items()}
    stops = {"keys stopped": (2, 0)}
    sharded = {f"{name} sharded": words for name, words in JOBS.items()}
    jobs = {
        1: {**ON_ONE, **pairs[1]},
        2: {"head": JOBS["head"], "bf16": JOBS["bf16"], **sharded, **pairs[2]},
        4: {"head": JOBS["head"]},
    }
    under_fsdp = [*sharded, *pairs[2]]
    return {
        (name, size): run
        for size, some in jobs.items()
        for name, run in train_on(
            size,
            some,
            folder,
            recipe=RECIPE,
            stops={name: stop for name, stop in stops.items() if name in some},
            sharded=under_fsdp if size == 2 else (),
        ).items()
    }


def same(run, expected, rel=1e-5):
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = expected.logged(metric)
        assert values and run.logged(metric) == pytest.approx(values, rel=rel)


@pytest.mark.parametrize(
    ("name", "size"),
    [("head", 2), ("head", 4), ("bf16", 2), *((f"{name} sharded", 2) for name in JOBS)],
)
def test_losses_and_norms_do_not_depend_on_processes_or_sharding(runs, name, size):
    expected = runs[name.removesuffix(" sharded"), 1]
    same(runs[name, size], expected, rel=1e-3 if "bf16" in name else 1e-5)


def test_adapters_learn_and_their_dropout_is_on(runs):
    losses = runs["head", 1].logged("train/loss")
    assert losses[-1] < losses[0] - 0.1
    assert runs["reviews", 1].logged("train/loss") != pytest.approx(runs["packed", 1].logged("train/loss"), rel=1e-5)


def test_recomputing_activations_changes_nothing(runs):
    same(runs["recomputed", 1], runs["head", 1], rel=1e-6)


def test_training_without_padding_computes_the_same(runs):
    same(runs["packed", 1], runs["padded", 1])
    for name in ("reviews", "bf16"):
        notices = json.loads((runs[name, 1].folder / "run.json").read_text())["notices"]
        assert not any("padding" in notice for notice in notices), notices


@pytest.mark.parametrize("size", [1, 2])
def test_resumed_run_ends_bit_equal(runs, size):
    run, expected = runs["keys resumed", size], runs["keys" if size == 1 else "keys sharded", size]
    steps = [newest(each.folder / "checkpoints")[0] for each in (run, expected)]
    for group in ("model", "optimizer", "ema"):
        one, other = (step.tensors[group] for step in steps)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert run.result["metrics"] == expected.result["metrics"] and run.result["test"] == expected.result["test"] != {}


def test_checkpoint_is_a_twentieth_of_the_model(runs):
    checkpoint = newest(runs["small", 1].folder / "checkpoints")[0]
    assert len(checkpoint.tensors["model"]) == 4 and all("lora_" in name for name in checkpoint.tensors["model"])
    weights = sum(path.stat().st_size for path in checkpoint.path.glob("*.safetensors"))
    facts = json.loads((runs["small", 1].folder / "run.json").read_text())
    assert weights < 0.05 * 4 * facts["parameters"]
