"""What a model or a layer is, asked without importing transformers, which takes seconds and which many networks do not need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "hftune_packed"
"""Name of hftune's attention function, where transformers keeps its own; see ``hftune.models.packing``."""
FILE_SIZE = "5GB"
"""Of the largest file of an exported model; ``from_pretrained`` reads one after the other."""
TARGETS = "targets"
"""The keyword argument of a model that computes its loss with its head: (B, T) int64; see ``hftune.models.scored_head``."""


def is_of_transformers(model: Any) -> TypeGuard[PreTrainedModel]:
    """Say whether a model is one of transformers, which whoever built such a model has imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def is_linear(module: nn.Module) -> bool:
    """Say whether a layer is linear. GPT-2 calls its linear layers Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Say whether a layer is transformers' Conv1D, whose weights are those of a linear layer, transposed."""
    layers = sys.modules.get("transformers.pytorch_utils")
    return layers is not None and isinstance(module, layers.Conv1D)


def compute_padding(model: nn.Module) -> None:
    """Let a model that leaves out padding by itself compute it."""
    if is_of_transformers(model) and model.config._attn_implementation == ATTENTION:
        model.set_attn_implementation("sdpa")


def drawn_parameters(model: nn.Module) -> Sequence[str]:
    """Return the names of the parameters that the files of a model lack, and that were therefore drawn at random.

    Empty for a model that was built from a config: all of it is drawn.
    """
    return getattr(model, "drawn_parameters", ())
