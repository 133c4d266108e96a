"""Mixtures of experts, with the loss that balances them: the same on 1, 2 and 4 processes, sharded, with adapters, and resumed.

A last bit may send a token to a different expert. Where that happened, losses would differ in the third digit, not within the
1e-5 of test_world_size: here no two experts are so close.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import train_on

SIZES = (
    "hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "max_position_embeddings: 128, initializer_range: 0.1, num_experts_per_tok: 2"
)
MIXTRAL = f"task.model_config={{model_type: mixtral, num_local_experts: 4, {SIZES}}}"
QWEN = f"task.model_config={{model_type: qwen3_moe, num_experts: 4, moe_intermediate_size: 32, {SIZES}}}"
FEW = (
    *("task.max_train_samples=88", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=3", "train.log_every=1"),
    *("train.epochs=1", "train.warmup_ratio=0"),
)
BALANCED = ("task.model_config.output_router_logits=true", "task.model_config.router_aux_loss_coef=0.5")
PADDED = ("train.packing=off", "train.parts=null", "train.micro_batch_tokens=null")
LORA = ("adapter.type=lora", "adapter.rank=4")
JOBS = {
    "free": (*FEW, MIXTRAL),
    "mixtral": (*FEW, MIXTRAL, *BALANCED),
    "qwen": (*FEW, QWEN, *BALANCED),
    "lora": (*FEW, MIXTRAL, *BALANCED, *LORA),
}
ON_ONE = {
    "micro3": (*JOBS["mixtral"], *PADDED, "train.micro_batch_size=3"),
    "micro16": (*JOBS["mixtral"], *PADDED, "train.micro_batch_size=16"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    sharded = {f"{name} sharded": words for name, words in JOBS.items()}
    sharded["recomputed sharded"] = (*JOBS["mixtral"], "train.gradient_checkpointing=true")
    jobs = {1: JOBS | ON_ONE, 2: JOBS | sharded, 4: {"mixtral": JOBS["mixtral"]}}
    return {
        (name, size): run
        for size, some in jobs.items()
        for name, run in train_on(size, some, folder, "chats_demo", sharded=sharded if size == 2 else ()).items()
    }


@pytest.mark.parametrize(
    ("name", "size", "reference"),
    [
        *((name, 2, name) for name in JOBS),
        *((f"{name} sharded", 2, name) for name in JOBS),
        ("recomputed sharded", 2, "mixtral"),
        ("mixtral", 4, "mixtral"),
        *((name, 1, "mixtral") for name in ON_ONE),
    ],
)
def test_losses_depend_on_neither_processes_nor_micro_batches_nor_sharding(runs, name, size, reference):
    run, expected = runs[name, size], runs[reference, 1]
    assert len(expected.logged("train/loss")) == 6
    for metric, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("eval/loss", 1e-5)):
        assert run.logged(metric) == pytest.approx(expected.logged(metric), rel=tolerance)


def test_the_loss_of_training_balances_the_experts_and_that_of_evaluations_does_not(runs):
    """With chances of a quarter each, it is 2, as two experts see each token, times 0.5; a new router is not far from that."""
    free, balanced = runs["free", 1], runs["mixtral", 1]
    assert balanced.logged("train/loss_step")[0] - free.logged("train/loss_step")[0] == pytest.approx(1.2, abs=0.1)
    assert balanced.logged("eval/loss")[0] == pytest.approx(free.logged("eval/loss")[0], abs=0.1)


def test_models_of_experts_train_without_padding(runs, folder):
    assert (folder / "chats_demo-1.log").read_text().count("without padding") >= len(JOBS)


def test_resumed_it_ends_bit_equal(runs, folder):
    job = {"again": (*JOBS["mixtral"], "checkpoint.every=2", f"output_dir={folder / 'again'}")}
    train_on(2, job, folder, "chats_demo", stops={"again": (3, 1)})
    run, expected = train_on(2, job, folder, "chats_demo")["again"], runs["mixtral", 2]
    weights, wanted = (load_file(one.folder / "model" / "model.safetensors") for one in (run, expected))
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())
    assert run.logged("train/loss") == expected.logged("train/loss")
