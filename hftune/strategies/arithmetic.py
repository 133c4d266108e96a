"""How much arithmetic a model needs for its samples: what ``perf/mfu``, the model FLOPs utilisation, is computed from.

Independent of processes and devices.

Only matrix products of transformers are counted, forward and backward: padding, recomputed activations, embeddings, norms and
the like are no useful work. Source: "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al., 2022), appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from hftune.models.adapters import has_adapter
from hftune.models.stacks import outermost_lists

MAX_UNKNOWN = 0.05
"""Share of the layers' trained weights that may be in other modules than linear ones, such as norms: else the layers are of a
kind that is not counted here, such as convolutions, or experts of which a token visits a few."""


@dataclass(frozen=True)
class Arithmetic:
    """Floating-point operations of a forward and a backward pass: per token, per square of a text's length, per item."""

    per_token: int
    """6 for each weight of the layers' matrices: a multiplication and an addition forward, and twice as many backward. 4 for
    the frozen weights beside adapters, which need no gradient of their own."""
    per_square: int
    """12 for each layer and its width: queries by keys, and their scores by values. Causal attention counts as if it were not
    causal."""
    per_item: int
    """6 for each weight of a head that predicts tokens, which is needed where there is a label."""

    @classmethod
    def of(cls, model: nn.Module) -> Arithmetic | None:
        """Count a transformers model; None if it is anything else than one stack of trained layers that every token visits."""
        config, lists = getattr(model, "config", None), [layers for _, layers in outermost_lists(model)]
        num_layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
        if config is None or getattr(config, "is_encoder_decoder", False) or not width:
            return None
        if getattr(config, "attention_type", "") == "block_sparse" or hasattr(config, "attention_window"):
            return None
        if [len(layers) for layers in lists] != [num_layers]:
            return None
        modules, adapted = [*lists[0].modules()], has_adapter(model)
        in_matrices = sum(map(num_weights, modules))
        counted = sum(parameter.numel() for parameter in lists[0].parameters() if adapted or parameter.requires_grad)
        if not (1 - MAX_UNKNOWN) * counted < in_matrices <= counted:
            return None
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        head = next(iter(getattr(head, "modules_to_save", {}).values()), head)  # the copy that is trained
        head = getattr(head, "original_module", head)  # beside a copy that is trained
        per_token = sum(flops_per_weight(module, adapted) * num_weights(module) for module in modules)
        per_item = 0 if head is None else flops_per_weight(head, adapted) * num_weights(head)
        return cls(per_token, 12 * num_layers * width, per_item)

    def flops(self, lengths: np.ndarray, num_items: float) -> float:
        """Return the operations for texts of these lengths with ``num_items`` labels in all."""
        tokens_N = lengths.astype(np.float64)
        return float(self.per_token * tokens_N.sum() + self.per_square * (tokens_N**2).sum() + self.per_item * num_items)


def num_weights(module: nn.Module) -> int:
    """Return the size of a module's matrix; 0 for a module that is not linear. GPT-2 calls its linear modules Conv1D."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features  # of its 4-bit form, the weight has half as many elements
    return module.weight.numel() if type(module).__name__ == "Conv1D" else 0


def flops_per_weight(module: nn.Module, adapted: bool) -> int:
    """Return the operations for each weight of a module: 4 for one that is frozen beside adapters, otherwise 6."""
    is_frozen = adapted and not any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return 4 if is_frozen else 6
