"""The loss that balances the experts of a mixture: of the whole step, as transformers computes it for one batch of all samples."""

from __future__ import annotations

import re
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from hftune import Recipe, Task
from hftune.batch_plan import BatchPlan
from hftune.build import build, build_model
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.models import scored_head
from hftune.models.balancing import LoadBalancing
from hftune.replay.samples import batch_loss
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.packing import collate_for, seems_packable
from hftune.tasks.text import NO_LABEL, head_loss

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"vocab_size": 40, "max_position_embeddings": 64, "num_experts_per_tok": 2, "initializer_range": 0.3},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 8}
FAMILIES = {
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {**EXPERTS, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 8},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": {"num_local_experts": 5, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "granitemoe": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 5, "head_dim": 8},
}
LENGTHS = (9, 3, 12, 5, 7, 7, 4, 11)


class Texts(Task):
    """Texts of unequal lengths whose next token is to be predicted; the model computes in float64."""

    family = "mixtral"

    def datasets(self) -> dict[str, list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return {"train": [torch.randint(3, 40, (length + 1,), generator=generator) for length in LENGTHS]}

    def build_model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.family, **SIZES, **FAMILIES[self.family])
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()  # the other knows no float64

    def collate(self, examples: list[Tensor]) -> dict[str, Tensor]:
        ids_BT, labels_BT = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
            for rows, padding in (([row[:-1] for row in examples], 0), ([row[1:] for row in examples], NO_LABEL))
        )
        return {"input_ids": ids_BT, "attention_mask": (labels_BT != NO_LABEL).long(), "labels": labels_BT}

    def loss(self, outputs: object, target: Tensor) -> Tensor:
        return head_loss(outputs, target)

    def num_items(self, target: Tensor) -> int:
        return int((target != NO_LABEL).sum())


class WithoutMask(Texts):
    """Its model is given no mask, as that of language modeling."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input_ids": batch["input_ids"]}


def expected(task: Texts) -> tuple[float, dict[str, Tensor], float]:
    """Loss and gradient by transformers alone, in one batch; and how much of the loss is that of the experts."""
    model = task.build_model().train()
    batch = task.collate(task.datasets()["train"])
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    balancing = model.router_aux_loss_coef * outputs.aux_loss
    loss = cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=NO_LABEL) + balancing
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters()}, balancing.item()


def prepared(task: Texts, packed: bool) -> DataParallel:
    strategy, model = DataParallel(Accelerator(cpu=True), task), task.build_model()
    model.load_balancing = LoadBalancing(model)
    strategy.collate_packed = collate_for(model, task) if packed else None
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy


def step(strategy: DataParallel, task: Texts, micro_batch_size: int) -> float:
    """Compute the gradient of a step of all samples; return its loss."""
    dataset = task.datasets()["train"]
    plan = BatchPlan(len(dataset), len(dataset), micro_batch_size=micro_batch_size).epoch(0)
    strategy.forward_backward(next(strategy.batches(dataset, plan, num_workers=0)), seed=0, step=0)
    return strategy.report(strategy.clip_grad_norm(None)).loss


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_micro_batches_of_any_size_has_loss_and_gradient_of_transformers(monkeypatch, family, packed):
    monkeypatch.setattr(Texts, "family", family)
    task = Texts()
    if packed and not seems_packable(task.build_model()):
        packed = False
    loss, gradient, balancing = expected(task)
    assert balancing > 0.1 * loss
    for size in (1, 3, 8):
        strategy = prepared(task, packed)
        assert step(strategy, task, size) == pytest.approx(loss, rel=1e-6)  # transformers adds up probabilities in float32
        for name, value in strategy.model.named_parameters():
            torch.testing.assert_close(value.grad, gradient[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [3, 8])
def test_padding_is_no_token_although_the_model_is_given_no_mask(size):
    loss, _, _ = expected(Texts())
    task = WithoutMask()
    assert step(prepared(task, packed=False), task, size) == pytest.approx(loss, rel=1e-6)


def test_language_models_know_their_padding_and_are_given_no_mask():
    task = Recipe.load("language_modeling_demo").task
    task.text_tokenizer = SimpleNamespace(pad_token_id=7)
    batch = task.collate([{"input_ids": np.arange(length), "labels": np.arange(length)} for length in (3, 2)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert task.inputs(batch).keys() == {"input_ids", "use_cache"}


def test_the_loss_in_chunks_is_balanced_too():
    task = Texts()
    loss, _, _ = expected(task)
    model = task.build_model()
    model.load_balancing = LoadBalancing(model)
    scored_head.install(model, at_once=40 * 3)
    strategy = DataParallel(Accelerator(cpu=True), task)
    strategy.scores_head = True
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(strategy, task, 3) == pytest.approx(loss, rel=1e-6)


def test_a_replay_finds_the_loss_of_a_step():
    task = Texts()
    strategy = prepared(task, packed=False)
    dataset = task.datasets()["train"]
    batch = next(strategy.batches(dataset, BatchPlan(8, 8, micro_batch_size=3).epoch(0), num_workers=0))
    replayer = SimpleNamespace(strategy=strategy, task=task, recipe=SimpleNamespace(seed=0))
    assert batch_loss(replayer, batch, 1) == pytest.approx(expected(task)[0], rel=1e-6)


def test_evaluations_and_exports_have_no_router_logits():
    model = Texts().build_model()
    model.load_balancing = LoadBalancing(model)
    ids = torch.tensor([[5, 6, 7]])
    assert len(model.train()(ids).router_logits) == 3 and not model.eval()(ids).router_logits
    assert not model.config.output_router_logits


class TooLarge(Texts):
    def loss(self, outputs: object, target: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory.")


def test_a_trial_that_does_not_fit_leaves_no_graph_in_memory():
    strategy, saved = prepared(TooLarge(), packed=False), list[ref[Tensor]]()

    def kept(value: Tensor) -> Tensor:
        saved.append(ref(own := value.detach()))
        return own

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda value: value):
        assert not strategy.fits(TooLarge().datasets()["train"], np.arange(4))
    assert saved and all(value() is None for value in saved)


# What is refused


OFF = "Set task.model_config.output_router_logits=false."
TINY = "task.model_config={model_type: mixtral, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2"
TINY += ", num_key_value_heads: 2, output_router_logits: true}"


@pytest.mark.parametrize("word", ["parallel.pipeline_stages=2", "train.compile=true"])
def test_pipelines_and_compiled_models_do_not_balance(word):
    with pytest.raises(ConfigError, match=r"neither a pipeline nor a compiled model can balance its experts\. Set parallel\."):
        build_model(Recipe.load("chats_demo", TINY, word))


@pytest.mark.parametrize("asked", [True, False])
def test_experts_are_balanced_and_a_notice_says_so_only_if_the_config_asks_for_it(asked):
    parts = build(Recipe.load("chats_demo", TINY, f"task.model_config.output_router_logits={asked}"), Progress())
    said = [notice for notice in parts.notices if "router_aux_loss_coef=0.001" in notice]
    assert hasattr(parts.model, "load_balancing") == bool(said) == asked


@pytest.mark.parametrize("kind", ["classifier", "switch"])
def test_a_model_without_such_a_loss_or_with_a_different_one_is_refused(kind):
    if kind == "switch":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "num_experts": 2}
        model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes))
    else:
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("mixtral", **SIZES, **FAMILIES["mixtral"]))
    message = f"{type(model).__name__} has no loss that balances its experts, or none that hftune knows. {OFF}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        LoadBalancing(model)


class Wrapped(torch.nn.Module):
    """A network of one's own around a mixture whose config asks for its loss."""

    def __init__(self, inner: PreTrainedModel):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids).logits


def test_a_mixture_inside_a_network_of_ones_own_is_refused_not_left_unbalanced(monkeypatch):
    recipe, build_inner = Recipe.load("chats_demo", TINY), Texts().build_model
    monkeypatch.setattr(type(recipe.task), "build_model", lambda task: Wrapped(build_inner()))
    with pytest.raises(ConfigError, match="but Wrapped has no loss that balances its experts"):
        build_model(recipe)
