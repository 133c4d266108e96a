"""Which models train without padding: tried on a few samples, with a reason where they cannot."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from hftune import Recipe
from hftune.batch_plan import BatchPlan
from hftune.build import build
from hftune.distributed.progress import Progress
from hftune.errors import DataError
from hftune.models.packing import Packing, install
from hftune.settle import default_parts, first_steps, idle_notices, padding_share, settle_packing, width_of
from hftune.strategies.packing import collate_for, compute, inputs_of
from hftune.strategies.trial import packing_problem, trial_samples

SMALL = ("task.max_train_samples=60", "task.max_eval_samples=10", "train.batch_size=16", "train.micro_batch_size=null")


class Alone:
    """A strategy of one process, as far as ``settle_packing`` sees it."""

    def __init__(self):
        self.device, self.progress, self.num_processes, self.collate_packed = torch.device("cpu"), Progress(), 1, None
        self.accelerator = type("Accelerator", (), {"mixed_precision": "no"})()
        self.precision, self.together = "no", 1

    def tried(self, model, trial):
        return trial(model)


@pytest.fixture(scope="module")
def parts():
    recipe = Recipe.load("yelp_demo", *SMALL)
    return recipe, build(recipe, Progress())


def settled(recipe, parts):
    strategy, plan = Alone(), parts.plan
    parts.notices.clear()
    try:
        settle_packing(recipe, strategy, parts)
        return strategy, parts.plan
    finally:
        parts.plan = plan


def test_a_model_that_computes_the_same_is_packed(parts):
    recipe, built = parts
    strategy, plan = settled(recipe, built)
    assert strategy.collate_packed is not None and not built.notices
    assert plan.packed and plan.parts == 1 and plan.width == built.model.config.hidden_size
    assert plan.micro_batch_size is None and plan.micro_batch_tokens == recipe.train.micro_batch_tokens
    assert built.model.config._attn_implementation == "sdpa"  # the trial leaves no trace
    assert not any(module._forward_pre_hooks for module in built.model.modules())


def test_without_bounds_eight_of_the_longest_samples_bound_a_packed_micro_batch(parts):
    _, built = parts
    recipe = Recipe.load("yelp_demo", *SMALL, "train.micro_batch_tokens=null", "train.parts=2")
    _, plan = settled(recipe, built)
    assert (plan.parts, plan.micro_batch_tokens) == (2, 8 * int(plan.lengths.max()))


def test_off_is_off(parts):
    _, built = parts
    strategy, plan = settled(Recipe.load("yelp_demo", *SMALL, "train.packing=off"), built)
    assert strategy.collate_packed is None and not plan.packed and not built.notices


def spoiled(model, how):
    """Let the attention of a model's last layer do something else than transformers'."""
    attention = model.bert.encoder.layer[-1].attention.self
    if how == "drops":
        attention.forward = lambda hidden, *args, **kwargs: (hidden, None)
    else:
        attention.is_causal = True
        attention.forward = lambda hidden, *args, packing=None, _forward=attention.forward, **kwargs: _forward(
            hidden if packing is None else hidden.flip(1), *args, packing=packing, **kwargs
        )
    return model


@pytest.mark.parametrize(
    ("how", "reason"), [("drops", "1 of its 2 attention layers can"), ("differs", "it computes something else then")]
)
def test_attention_of_ones_own_is_padded_with_a_reason(parts, how, reason):
    recipe, built = parts
    task, data = recipe.task, built.datasets["train"]
    torch.manual_seed(0)
    model = spoiled(bert(), how)
    state = torch.random.get_rng_state()
    samples = trial_samples(built.plan.lengths)
    assert packing_problem(model, task, data, samples, torch.device("cpu"), None) == reason
    assert model.training and torch.equal(torch.random.get_rng_state(), state)


def test_what_the_task_refuses_is_no_reason_to_pad(parts, monkeypatch):
    recipe, built = parts

    def loss(outputs, target):
        raise DataError("task.class_weights.nobody names no class.")

    monkeypatch.setattr(recipe.task, "loss", loss)
    with pytest.raises(DataError, match="names no class"):
        packing_problem(
            built.model, recipe.task, built.datasets["train"], trial_samples(built.plan.lengths), torch.device("cpu")
        )


def test_the_reason_is_a_notice_with_the_share_of_padding(parts, monkeypatch):
    recipe, built = parts
    monkeypatch.setattr(built.model.config, "_attn_implementation_internal", "eager")
    strategy, plan = settled(recipe, built)
    assert strategy.collate_packed is None and not plan.packed
    share = padding_share(plan)
    assert share > 0.01 and built.notices == [
        f"{share:.0%} of what training computes is padding: BertForSequenceClassification cannot leave it out, because its "
        "attention is eager, not sdpa."
    ]


def test_models_of_ones_own_are_left_alone(parts):
    _, built = parts
    recipe = Recipe.load("yelp_demo", *SMALL)
    model, built.model = built.model, nn.Linear(2, 2)
    try:
        strategy, plan = settled(recipe, built)
    finally:
        built.model = model
    assert strategy.collate_packed is None and not plan.packed and plan.width is None and not built.notices


def test_batches_carry_their_packing_to_the_model_and_nowhere_else(parts):
    recipe, built = parts
    batch = collate_for(built.model, recipe.task)([built.datasets["train"][index] for index in range(4)])
    assert batch["packing"].lengths == tuple(sorted(batch["attention_mask"].sum(1).tolist()))
    given = []

    class Model(nn.Module):
        def forward(self, **inputs):
            given.extend(inputs)

    compute(Model(), **inputs_of(recipe.task, batch))
    assert given == ["input_ids", "attention_mask", "packing"]


def bert(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 5000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=5, **fields))


T5_AND_BART = (
    "{model_type: t5, d_model: 32, d_kv: 8, d_ff: 48, num_layers: 2, num_heads: 4}",
    "{model_type: bart, d_model: 32, encoder_layers: 2, decoder_layers: 2, encoder_attention_heads: 4, "
    "decoder_attention_heads: 4, encoder_ffn_dim: 48, decoder_ffn_dim: 48, init_std: 0.3}",
)


@pytest.mark.parametrize("config", T5_AND_BART)
def test_encoder_decoders_are_packed_unless_they_compute_something_else(config):
    recipe = Recipe.load("seq2seq_demo", "replace=[task.model_config]", f"task.model_config={config}", *SMALL[:2])
    built = build(recipe, Progress())
    task, data, samples = recipe.task, built.datasets["train"], trial_samples(built.plan.lengths)
    given = (built.model.train(), task, data, samples, torch.device("cpu"))
    assert packing_problem(*given) is None
    batch = collate_for(built.model, task)([data[sample] for sample in samples])
    sources, targets = batch["attention_mask"].sum(1), (batch["labels"] != -100).sum(1)
    order = sources.argsort(stable=True)
    assert batch["packing"].source.lengths == tuple(sources[order].tolist())
    assert batch["packing"].lengths == tuple(targets[order].tolist())
    encoder, name = built.model.get_encoder(), "block" if "t5" in config else "layers"
    last = getattr(encoder, name)[-1]
    last.forward = lambda hidden, *args, _forward=last.forward, **kwargs: _forward(
        hidden.flip(1) if hidden.shape[0] == 1 else hidden, *args, **kwargs
    )
    assert packing_problem(*given) == "it computes something else then"


def test_outputs_of_other_shapes_are_something_else(parts):
    """The hidden states of inner layers have no rows without padding."""
    recipe, built = parts
    samples = trial_samples(built.plan.lengths)
    model = bert(output_hidden_states=True)
    reason = packing_problem(model, recipe.task, built.datasets["train"], samples, torch.device("cpu"))
    assert reason == "it computes something else then"


def test_unequal_texts_without_a_mask_are_padded(parts, monkeypatch):
    recipe, built = parts
    task, samples = recipe.task, trial_samples(built.plan.lengths)
    monkeypatch.setattr(type(task), "inputs", lambda self, batch: {"input_ids": batch["input_ids"]})
    given = (bert(), task, built.datasets["train"], samples, torch.device("cpu"))
    assert packing_problem(*given) == "its inputs have no attention_mask"
    assert packing_problem(*given, needs_mask=False) is None  # as blocks of equal length


def test_width_is_read_from_transformers_configs_only():
    class Own(nn.Module):
        config = {"hidden_size": 3}

    assert width_of(Own()) is None and width_of(bert()) == 32


def test_rotary_layers_compute_the_same_packed_in_bf16_and_drop_attention_out():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        attention_dropout=0.5, use_cache=False, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    inputs = {"input_ids": torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]]), "attention_mask": mask_BT}
    packing, is_text_BT = Packing.of(mask_BT), mask_BT.bool()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).logits[is_text_BT].detach()
        install(model)
        logits = compute(model, **inputs, packing=packing).logits[is_text_BT]
        dropped = compute(model.train(), **inputs, packing=packing).logits[is_text_BT]
    assert torch.allclose(logits, expected, rtol=0, atol=2**-6 * float(expected.abs().max()))  # a few roundings to 8 bits
    assert not torch.allclose(dropped, expected, rtol=0, atol=2**-3 * float(expected.abs().max()))
    dropped.float().square().sum().backward()
    assert all(torch.isfinite(value.grad).all() and value.grad.any() for value in model.parameters())


@pytest.mark.parametrize(("length", "samples", "parts"), [(128, 32, 4), (127, 32, 2), (63, 32, 1), (10, 32, 1), (4000, 3, 2)])
def test_steps_of_few_tokens_are_not_split(length, samples, parts):
    plan = BatchPlan(1000, samples, lengths=np.full(1000, length), packed=True)
    assert default_parts(plan) == parts
    assert default_parts(plan, least=4) == min(4, 2 if samples == 3 else 4)  # a pipeline


@pytest.mark.parametrize(("samples", "steps"), [(1, 20), (3, 20), (32, 2), (1000, 1)])
def test_few_rows_are_read_for_a_look_at_the_first_steps(samples, steps):
    assert len([*first_steps(BatchPlan(10_000, samples, lengths=np.full(10_000, 10)))]) == steps


def test_rows_that_an_epoch_draws_several_times_make_whole_steps():
    plan = BatchPlan(10, 32, lengths=np.full(10, 128), packed=True, mixture=[(10, 5.0)])
    assert default_parts(plan) == 4


@pytest.mark.parametrize(
    ("processes", "samples", "said", "hint"),
    [(4, 32, "has 1 micro-batch, so 3 of 4", "train.parts=4."), (4, 2, "has 1 micro-batch, so 3 of 4", "batch_size.")],
)
def test_processes_without_work_are_said(processes, samples, said, hint):
    plan = BatchPlan(100, samples, lengths=np.full(100, 10), packed=True, parts=1)
    (notice,) = idle_notices(plan, processes)
    assert said in notice and notice.endswith(hint) and idle_notices(plan, 1) == []
