"""The loss that balances the experts of a mixture, exact over a step. Knows no processes.

It is E * sum over experts of f * P: f is how many choices of a token go to an expert, on average, and P the mean probability
that the routers give it. transformers takes both of a micro-batch, and the mean of such losses is not the loss of the step. But
f has no gradient: once the choices of the whole step are counted, the loss is a sum over tokens.

Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6, for all layers together as transformers' (5.23)
``load_balancing_loss_func`` computes it.
"""

# Shapes: B texts, T tokens of the longest, N rows of a router (B * T, or the real tokens alone without padding), E experts.

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hftune.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Of the ``load_balancing_loss_func`` that is meant here; Switch Transformers, NLLB and Doge have others."""


class LoadBalancing:
    """What a model's routers did in a forward pass in training mode, as its outputs say, and the loss that follows."""

    def __init__(self, model: PreTrainedModel):
        """Let hftune balance the experts of a model, and not the model itself any more.

        Raises:
            ConfigError: the model has no such loss, or a different one.
        """
        function = getattr(sys.modules[type(model).forward.__module__], "load_balancing_loss_func", None)
        is_known = function is not None and (*signature(function).parameters,) == ARGUMENTS
        if not is_known or not hasattr(model, "router_aux_loss_coef") or not hasattr(model, "num_experts_per_tok"):
            raise ConfigError(
                f"task.model_config.output_router_logits is true, but {type(model).__name__} has no loss that balances its "
                "experts, or none that hftune knows. Set task.model_config.output_router_logits=false."
            )
        self.coefficient, self.top_k = float(model.router_aux_loss_coef), int(model.num_experts_per_tok)
        model.config.output_router_logits = False
        model.base_model.register_forward_pre_hook(self._ask, with_kwargs=True)

    def _ask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "output_router_logits": module.training}

    @torch.no_grad()
    def choices(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        """Return how often real tokens chose each expert, and, as the last number, how many rows they were: (E + 1,)."""
        counts = []
        for probabilities_NE, real_N1 in _routed(outputs, batch):
            chosen_NE = torch.zeros_like(probabilities_NE).scatter_(1, probabilities_NE.topk(self.top_k).indices, 1.0)
            counts.append(torch.cat([(chosen_NE * real_N1).sum(0), real_N1.sum(0)]))
        return torch.stack(counts).sum(0)

    def loss(self, outputs: Any, batch: dict[str, Any], choices: Tensor) -> Tensor:
        """Return what these tokens add to the step's loss, times the coefficient: a scalar. ``choices``: of the whole step."""
        sums = [(probabilities_NE * real_N1).sum(0) for probabilities_NE, real_N1 in _routed(outputs, batch)]
        sums_E = torch.stack(sums).sum(0)
        return self.coefficient * len(sums_E) * ((choices[:-1] / choices[-1] ** 2).to(sums_E.dtype) @ sums_E)


def _routed(outputs: Any, batch: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the probabilities of each layer, (N, E), and 1 for real tokens and 0 for padding, (N, 1).

    The mask of a batch tells, whether or not the model is given it; without one all tokens are real.
    """
    mask_BT = batch.get("attention_mask")
    for logits_NE in outputs.router_logits:
        probabilities_NE = (logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()).softmax(-1)
        real_N1 = probabilities_NE.new_ones(len(probabilities_NE), 1)
        if mask_BT is not None and mask_BT.numel() == len(real_N1):
            real_N1 = mask_BT.reshape(-1, 1).to(real_N1.dtype)
        yield probabilities_NE, real_N1
