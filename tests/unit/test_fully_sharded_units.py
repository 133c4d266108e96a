"""What FSDP gathers in bfloat16, and what stands for a model that nobody has gathered."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from hftune import ConfigError
from hftune.strategies.fully_sharded import gathered_in_bf16
from hftune.strategies.whole_model import ModelNeeded, absent_model


def sharded(monkeypatch, model, blocks):
    """Shard blocks and model as Accelerate does; return the units with their precision, in order."""
    units = []
    monkeypatch.setattr(
        torch.distributed.fsdp,
        "fully_shard",
        lambda module, mp_policy: units.append((module, mp_policy and mp_policy.param_dtype)),
    )
    with gathered_in_bf16(blocks):
        for module in (*blocks, model):
            torch.distributed.fsdp.fully_shard(module, mp_policy=None)
    torch.distributed.fsdp.fully_shard(model, mp_policy=None)  # as before
    return units


def test_linear_layers_of_blocks_are_gathered_in_bf16_and_all_else_in_float32(monkeypatch):
    model = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=4))
    (block,) = model.h
    units = sharded(monkeypatch, model, [block])
    assert units == [(block.ln_1, None), (block.ln_2, None), (block, torch.bfloat16), (model, None), (model, None)]


class Scaled(nn.Module):
    """Holds a parameter beside a linear layer, as attention with a learned temperature does."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)


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
