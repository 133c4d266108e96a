"""What FSDP gathers at once and in bfloat16, and what stands for a model that nobody has gathered."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from hftune import ConfigError
from hftune.models.unread import unread_tensors
from hftune.strategies import fully_sharded
from hftune.strategies.on_demand import is_gathered
from hftune.strategies.whole_model import ModelNeeded, absent_model


def sharded(monkeypatch, model, blocks, in_bf16=True):
    """Shard blocks and model; return the units with their precision, and whether they are freed after a forward pass."""
    units = []

    def fully_shard(module, mp_policy, reshard_after_forward=None):
        units.append((module, mp_policy and mp_policy.param_dtype, reshard_after_forward))

    monkeypatch.setattr(fully_sharded, "fully_shard", fully_shard)
    fully_sharded.shard_in_units(model, blocks, in_bf16, mp_policy=None, reshard_after_forward=True)
    return units


def test_linear_layers_of_blocks_are_gathered_in_bf16_and_all_else_in_float32(monkeypatch):
    model = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=4))
    (block,) = model.h
    in_block = [(block.ln_1, None, True), (block.ln_2, None, True), (block, torch.bfloat16, True)]
    assert sharded(monkeypatch, model, [block]) == [*in_block, (model.wte, None, True), (model, None, None)]


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_and_head_are_units_of_their_own_unless_they_share_weights(monkeypatch, is_tied):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=4, tie_word_embeddings=is_tied)
    model = GPT2LMHeadModel(config)
    own = [] if is_tied else [(model.transformer.wte, None, True), (model.lm_head, None, False)]
    (block,) = model.transformer.h
    assert sharded(monkeypatch, model, [block], in_bf16=False) == [(block, None, True), *own, (model, None, None)]


class Scaled(nn.Module):
    """Holds a parameter beside a linear layer, as attention with a learned temperature does."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)


def test_different_weights_in_a_folder_of_the_same_name_are_refused(tmp_path):
    digests = []
    main = SimpleNamespace(broadcast=lambda digest: digests.append(digest) or digest, any_process=bool)
    other = SimpleNamespace(broadcast=lambda digest: digests[0], any_process=bool)
    for name, group in (("here", main), ("copy", other), ("another", other)):
        save_file({"weight": torch.ones(2, 3) + (name == "another"), "scale": torch.tensor(1.0)}, tmp_path / name)
        sharding = fully_sharded.ShardedWeights(None, group)
        with pytest.raises(ConfigError, match=r"^task.model: this folder") if name == "another" else nullcontext():
            sharding._compare_files(unread_tensors([tmp_path / name]))
    assert len(digests) == 1


@pytest.mark.parametrize("block", [nn.Sequential(Scaled()), nn.Sequential(nn.LayerNorm(2))])
def test_models_without_such_blocks_are_refused(monkeypatch, block):
    with pytest.raises(ConfigError, match=r"^train.fsdp_gather=bf16: this model has no blocks"):
        sharded(monkeypatch, block, [block])


USES = {
    "call": lambda model: model(1),
    "attribute": lambda model: getattr(model, "config", None),
    "class": lambda model: isinstance(model, nn.Linear),
    "layer": lambda model: model[0],
    "layers": list,
    "truth": bool,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_an_absent_model_is_noted_and_passes_handlers_of_errors(use):
    noted = []
    with pytest.raises(ModelNeeded):
        try:
            USES[use](absent_model(lambda: noted.append(use)))
        except Exception:
            pytest.fail("the task would go on without a model")
    assert noted == [use]


def test_what_is_called_may_be_asked_for_its_settings_and_for_no_weight():
    noted, config = [], GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=4)
    model = GPT2LMHeadModel(config).eval()
    lent, ids = absent_model(lambda: noted.append("use"), model), torch.ones(1, 2, dtype=torch.long)
    assert torch.equal(lent(ids).logits, model(ids).logits) and lent.config is model.config and lent.device.type == "cpu"
    assert torch.equal(lent.generate(ids, max_new_tokens=1, do_sample=False)[:, :2], ids) and not noted
    for use in (lambda: lent.lm_head, lambda: list(lent.parameters()), lambda: isinstance(lent, nn.Module)):
        with pytest.raises(ModelNeeded):
            use()
    assert len(noted) == 3


@pytest.mark.parametrize(
    ("group", "gathered"),
    [(SimpleNamespace(is_unsharded=True), True), (SimpleNamespace(is_unsharded=False), False), (None, False)],
)
def test_a_unit_is_gathered_if_its_parameters_are_and_torch_2_11_says_so_too(group, gathered):
    state = SimpleNamespace(_fsdp_param_group=group)  # what FSDPState has in 2.11, and still has in 2.13
    assert is_gathered(SimpleNamespace(_get_fsdp_state=lambda: state)) == gathered
