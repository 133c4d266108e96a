"""How models are cut into stages, and what is refused."""

import logging
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers import AutoConfig, AutoModelForCausalLM

from hftune import ConfigError, Recipe
from hftune.build import check_pipeline, plan_batches
from hftune.distributed.preflight import check_launcher
from hftune.strategies.pipeline import PipelineMicroBatch, Stage
from hftune.strategies.pipeline_stages import balanced, check_stages, cut, layers_of
from hftune.strategies.seeds import LayerSeeds
from tests.support.runs import FSDP
from tests.support.tasks import Chain, NextToken

RECIPE = "tests/support/next_token.yaml"
IDS = {"input_ids": torch.arange(1, 19).reshape(2, 9)}
SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def decoder(kind, **fields):
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **fields))


def sizes(stages):
    return [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox"])
def test_decoders_are_cut_without_any_change(kind):
    model = decoder(kind, **({} if kind in ("gpt2", "gpt_neox") else {"num_key_value_heads": 2, "head_dim": 8}))
    for count in (1, 2, 3, 4):
        check_stages(model, count, None, IDS)
    stages = cut(model, 2)
    assert {parameter for stage in stages for parameter in stage.parameters()} == {*model.parameters()}
    assert max(sizes(stages)) < 0.6 * sum(sizes(stages)) and len(layers_of(model)) == 4


def test_a_given_split_is_kept():
    model = decoder("llama")
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    first, last = sizes(cut(model, 2, [1, 3]))
    assert (first, last) == (layer + 30 * 16, 3 * layer + 30 * 16 + 16)


@pytest.mark.parametrize(
    ("costs", "count", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 3, [1, 2, 1]),
        ([5, 1, 1, 1, 1, 5], 2, [3, 3]),
        ([1, 2], 2, [1, 1]),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(costs, count, expected):
    found = balanced(costs, count)

    def largest(counts):
        stops = [sum(counts[:place]) for place in range(len(counts) + 1)]
        return max(sum(costs[start:stop]) for start, stop in pairwise(stops))

    assert largest(found) == largest(expected) and len(found) == count and min(found) >= 1 and sum(found) == len(costs)


def test_a_stage_holds_no_weights_of_others_and_no_copies():
    model = decoder("gpt2")
    first, last = cut(model, 2)
    table = model.transformer.wte.weight
    assert any(parameter is table for parameter in first.parameters())
    assert any(parameter is table for parameter in last.parameters()), "the head is tied to the embeddings"
    assert sum(sizes([first, last])) == sum(parameter.numel() for parameter in model.parameters()) + table.numel()


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_decoder_whose_stages_would_compute_something_else_is_refused(monkeypatch, scale):
    model = decoder("llama")
    model.lm_head.weight.data *= scale  # of a new head, outputs may be far below 1
    check_stages(model, 2, None, IDS)
    plain = type(model.model).forward

    def doubling(self, input_ids=None, inputs_embeds=None, **kwargs):
        return plain(
            self, inputs_embeds=2 * (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds), **kwargs
        )

    monkeypatch.setattr(type(model.model), "forward", doubling)
    with pytest.raises(
        ConfigError, match=r"^LlamaForCausalLM cannot be cut .* do not return what the whole model returns\. .*"
    ):
        check_stages(model, 2, None, IDS)


class Copying(Chain):
    def stage(self, index, count):
        return deepcopy(super().stage(index, count))


class Forgetful(Chain):
    def stage(self, index, count):
        stage = super().stage(index, count)
        stage.head = None
        return stage


FIVE = [1, 1, 1, 1, 1]
REFUSED = {
    "no decoder": (lambda: nn.Linear(2, 2), None, "Linear cannot be cut", "no method stage. A pipeline cuts models that"),
    "too few layers": (lambda: decoder("gpt2"), None, "has 4 layers, too few for 5 stages", "lower parallel.pipeline_stages"),
    "other split": (lambda: decoder("gpt2"), FIVE, "parallel.split=[1, 1, 1, 1, 1] adds up to 5", "GPT2LMHeadModel has 4."),
    "split of its own": (lambda: Chain(5, 0.0), FIVE, "parallel.split=[1, 1, 1, 1, 1]: Chain", "Set it to null."),
    "copies": (lambda: Copying(5, 0.0), None, "The stages of Copying have parameters that the model does not", "not copies."),
    "forgotten": (lambda: Forgetful(5, 0.0), None, "The stages of Forgetful leave out head.weight, head.bias", "in a stage."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name):
    build, split, what, hint = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        cut(build(), 5, split)
    assert what in str(caught.value) and hint in str(caught.value)


def test_a_last_stage_returns_its_loss_as_declared_with_the_gradients_of_float64():
    """torch 2.11 refuses float64 there; in float32 the loss itself would have lost digits, and so would its gradients."""
    task = NextToken(model="chain", float64=True)
    batch = task.collate(task.datasets()["train"][:3])
    last = cut(task.build_model(), 2)[1]
    stage = Stage(last, 1, 2, task, SimpleNamespace(autocast=nullcontext), LayerSeeds(torch.device("cpu")))
    micro_batch = PipelineMicroBatch({"input_ids": batch["input_ids"]}, batch["labels"], (0, 0, 0), torch.tensor(1 / 3), 3)
    stage.micro_batches, hidden = [micro_batch], torch.randn(*batch["input_ids"].shape, 16, dtype=torch.float64)
    expected = task.loss(last(hidden, batch["input_ids"]), batch["labels"])
    gradients = torch.autograd.grad(expected * micro_batch.weight.double(), [*last.parameters()])
    returned = stage(hidden, torch.tensor(0))
    assert returned.dtype == torch.float32 and torch.equal(stage.losses[0], expected)
    assert all(map(torch.equal, torch.autograd.grad(returned.sum(), [*last.parameters()]), gradients))


STAGES = "parallel.pipeline_stages=2"
ASKED = {
    "world": ("4", ("parallel.pipeline_stages=3",), "pipeline_stages=3 does not divide the 4 processes", "one of 1, 2, 4."),
    "one process": ("1", (), "does not divide the 1 process", "one of 1."),
    "FSDP": ("4", (), "does not work under FSDP", "parallel.pipeline_stages=1."),
    "auto": ("4", ("train.micro_batch_size=auto",), "train.micro_batch_size=auto does not work", "train.micro_batch_size=4"),
    "fp16": ("4", ("train.mixed_precision=fp16",), "train.mixed_precision=fp16 does not work", "Use bf16 or no."),
    "compile": ("4", ("train.compile=true",), "train.compile=true does not work", "Set it to false."),
    "old torch": (
        "4",
        ("parallel.schedule=zero_bubble",),
        "zero_bubble needs torch 2.13 or newer, not 2.12.1+cu130",
        "=1f1b or",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_does_not_go_with_a_pipeline_is_refused_before_anything_is_loaded(name, monkeypatch):
    world_size, words, what, hint = ASKED[name]
    for variable, value in {"WORLD_SIZE": world_size, **(FSDP if name == "FSDP" else {})}.items():
        monkeypatch.setenv(variable, value)
    if name == "old torch":
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu130"))
    with pytest.raises(ConfigError) as caught:
        check_launcher(Recipe.load(RECIPE, STAGES, *words))
    assert what in str(caught.value) and hint in str(caught.value)


def test_too_few_micro_batches_for_the_schedule_are_counted(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    recipe = Recipe.load(RECIPE, "parallel.pipeline_stages=4", "task.model=chain")
    task = NextToken(model="chain")
    dataset = task.datasets()["train"]
    needed = r"1f1b .* at least 4 micro-batches in a step for each of 2 pipelines, 8 in all; .* has 4\."
    with pytest.raises(ConfigError, match=needed):
        check_pipeline(recipe, plan_batches(recipe, dataset), dataset, task.build_model())
    enough = Recipe.load(RECIPE, "parallel.pipeline_stages=4", "task.model=chain", "train.micro_batch_size=2")
    check_pipeline(enough, plan_batches(enough, dataset), dataset, task.build_model())


@dataclass
class Asking(NextToken):
    def predictions(self, outputs, model, batch):
        return [{"weight": float(next(model.parameters()).sum())} for _ in self.target(batch)]


def test_evaluations_that_use_the_model_are_refused_before_training():
    words = ("parallel.pipeline_stages=2", "task.model=chain", "train.micro_batch_size=2")
    recipe = Recipe.load(RECIPE, *words, "task.type=tests.unit.test_stages.Asking")
    dataset = recipe.task.datasets()["train"]
    given = recipe, plan_batches(recipe, dataset), dataset, recipe.task.build_model()
    with pytest.raises(ConfigError, match=r"task\.predictions uses the model, .* Set parallel\.pipeline_stages=1"):
        check_pipeline(*given)
    recipe.eval.every = "never"
    check_pipeline(*given)


SPELLED = {
    "parallel.schedule=interleavd": "is not one of gpipe, 1f1b, interleaved, zero_bubble. Did you mean 'interleaved'?",
    "parallel.virtual_stages=2": "parallel.virtual_stages=2 needs parallel.schedule=interleaved or zero_bubble, not 1f1b.",
    "parallel.pipeline_stages=0": "parallel.pipeline_stages=0 must be at least 1.",
    "parallel.split=[2,2]": "parallel.split=[2, 2] must have a number of layers for each of the 1 stages.",
}


@pytest.mark.parametrize("word", SPELLED)
def test_values_that_make_no_sense_are_refused(word):
    with pytest.raises(ConfigError) as caught:
        Recipe.load(RECIPE, word)
    assert SPELLED[word] in str(caught.value)


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (("parallel.schedule=gpipe",), (0, 1, 5), (1, 1, 5)),
        ((), (0, 1, 5), (4, 4, 5)),
        (("parallel.schedule=interleaved",), (0, 5, 9, 10, 13), (4, 5, 10, 10, 15)),
    ],
)
def test_schedules_are_filled_up_to_what_they_take(words, given, expected):
    config = Recipe.load(RECIPE, "parallel.pipeline_stages=4", *words).parallel
    assert tuple(map(config.fill_up, given)) == expected


def test_a_stage_with_nothing_to_train_is_refused():
    model = decoder("llama")
    model.model.embed_tokens.requires_grad_(False)
    check_stages(model, 2, None, IDS)
    model.model.layers[:2].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"^Stage 1 of 2 has no parameter to train: .* with parallel\.split\."):
        check_stages(model, 2, None, IDS)


class Transposed(Chain):
    def stage(self, index, count):
        stage = super().stage(index, count)
        if index == 0:
            stage.register_forward_hook(lambda module, args, output: output.transpose(0, 1))
        return stage


def test_hidden_states_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"ValueError: stage 1 returns \(9, 2, 16\) and should return \(rows, length, w"):
        check_stages(Transposed(4, 0.0), 2, None, IDS)
