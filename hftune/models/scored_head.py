"""Cross-entropy of a large vocabulary, computed together with the head that predicts the tokens, a few rows at a time.

The logits of a micro-batch are often its largest tensors: 2,048 tokens by 150,000 words are 1.2 GB in float32, and their
softmax and their gradient as much again. Here only rows that have a target meet the head, in chunks. The gradient of a chunk is
computed right after its loss, so that nothing of it is kept for the backward pass, and nothing is computed twice. Where a loss
needs each cross-entropy, as those of preferences do, its gradient is not known by then: chunks are computed again for it.

All of this happens inside the head's own call, where FSDP has gathered its weights and autocast is on. What comes before the
head is the model's own code. What comes behind it, such as soft-capping, is named in ``Head``;
``hftune.strategies.trial`` compares both ways before training, as a model may do something else there.

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2, FusedLinearCrossEntropy.
"""

# Shapes: B rows of T tokens, R of which have a target, C width of the model, V words.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

AT_ONCE = 2**24
"""Logits of a chunk: 64 MiB in float32."""
ROWS = 512
"""Rows of a chunk. On a CPU no more, so that its logits stay in the cache; on a GPU no fewer: reading and writing the gradient
of the head's weights, once a chunk, would take longer than the arithmetic."""
NO_TARGET = -100
"""As cross_entropy's ``ignore_index``."""


def rows_at_once(num_words: int, is_cuda: bool, at_once: int | None = None) -> int:
    """Return the rows of a chunk. Micro-batches of no more tokens are computed as a whole."""
    most = (AT_ONCE if at_once is None else at_once) // num_words
    return max(1, max(most, ROWS) if is_cuda else min(most, ROWS))


@dataclass
class ScoredOutput(ModelOutput):
    """What a model returns if it is given targets and would have too many logits."""

    loss_sum: Tensor | None = None
    """Sum of the cross-entropies, a scalar: float32, or float64 if the logits are."""
    losses: Tensor | None = None
    """Each of them, (B, T), 0 where there is no target; without gradient, as in evaluations, or if each is asked for."""
    past_key_values: Any = None
    encoder_last_hidden_state: Tensor | None = None
    router_logits: Any = None


@dataclass(frozen=True)
class Head:
    """From the hidden states that a model gives its head to the logits that it returns."""

    module: nn.Module
    """A linear layer; or one with an adapter, or in 4 bits."""
    forward: Callable[[Tensor], Tensor]
    """Its own, without hooks."""
    num_words: int
    scale: float = 1.0
    """Cohere multiplies the logits, Granite divides them."""
    cap: float | None = None
    """Gemma's final_logit_softcapping."""
    bias: Tensor | None = None
    """BART's final_logits_bias, (1, V): a buffer beside the head."""

    @classmethod
    def of(cls, model: nn.Module) -> Head | None:
        """Find the head of a transformers model; None if it has none that predicts tokens."""
        if not isinstance(model, PreTrainedModel) or (module := model.get_output_embeddings()) is None:
            return None
        try:
            config = model.config.get_text_config(decoder=True)
        except ValueError:  # it has several text models
            return None
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        cap, bias = getattr(config, "final_logit_softcapping", None), getattr(model, "final_logits_bias", None)
        return cls(module, module.forward, getattr(module, "out_features", config.vocab_size), scale, cap, bias)

    def losses(self, hidden_RC: Tensor, targets_R: Tensor, reduction: str = "sum") -> Tensor:
        """Return the cross-entropies (R,), or their sum, of rows that all have a target."""
        logits_RV = self.forward(hidden_RC)
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.cap is not None:
            logits_RV = torch.tanh(logits_RV / self.cap) * self.cap
        if self.bias is not None:
            logits_RV = logits_RV + self.bias
        if logits_RV.dtype != torch.float64:
            logits_RV = logits_RV.float()
        return cross_entropy(logits_RV, targets_R, reduction=reduction)


def install(model: nn.Module, at_once: int | None = None, each: bool = False) -> Callable[[], None]:
    """Let a model that has a ``Head`` take ``targets`` beside its inputs; return a function that undoes it.

    Given them, it returns a ``ScoredOutput`` instead of logits, unless the micro-batch is no larger than a chunk: then it
    returns what it always does, the same bits. On a CPU it looks whether most tokens have no target, and computes no logits for
    them in vain; on a GPU it would have to wait to see that. ``at_once``: as ``rows_at_once`` takes it. ``each``: of each
    target, with its gradient, no sum.
    """
    original = model.forward.__func__

    @wraps(original)  # transformers reads the names of the arguments
    def forward(self: Any, *args: Any, targets: Tensor | None = None, **inputs: Any) -> Any:
        if targets is None:
            return original(self, *args, **inputs)
        head = Head.of(self)
        size = rows_at_once(head.num_words, targets.is_cuda, at_once)
        has_no_values = targets.is_cuda or isinstance(targets, FakeTensor)  # to look at without waiting
        if targets.numel() <= size and (has_no_values or 2 * (targets != NO_TARGET).count_nonzero() > targets.numel()):
            return original(self, *args, **inputs)
        losses_BT: Tensor | None = None

        def score(hidden_BTC: Tensor) -> Tensor:
            nonlocal losses_BT
            loss_sum, losses_BT = _score(head, hidden_BTC, targets, size, each)
            found = loss_sum.view(1, 1, 1) if losses_BT is None or not each else losses_BT.unsqueeze(-1)
            return found.clone()  # logits, for what the model does behind its head; FSDP wants no view

        # The head's hooks stay: FSDP gathers its weights before it, often in a unit with the last norm, and frees them after
        # it. In the backward pass it gathers them again when the gradient of the output arrives, so the output has to be what
        # is used: it is taken by the last of all hooks.
        sums: list[Tensor] = []
        undo = _set_forward(head.module, score)
        handle = head.module.register_forward_hook(lambda module, args, output: sums.append(output))
        try:
            outputs = original(self, *args, **inputs)
        finally:
            handle.remove()
            undo()
        (scored,) = sums
        others = ("past_key_values", "encoder_last_hidden_state", "router_logits")
        rest = {name: getattr(outputs, name, None) for name in others}
        if each:
            return ScoredOutput(None, scored.squeeze(-1), **rest)
        return ScoredOutput(scored.view(()), losses_BT, **rest)

    return _set_forward(model, MethodType(forward, model))  # deepcopy binds it to the copy


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let a module compute something else; return a function that undoes it."""
    own = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _score(head: Head, hidden_BTC: Tensor, targets_BT: Tensor, size: int, each: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses; and, without gradient or if ``each``, each of them."""
    if hidden_BTC.shape[:2] != targets_BT.shape:
        raise ValueError(
            f"the head is given {tuple(hidden_BTC.shape[:2])} tokens, and the targets are {tuple(targets_BT.shape)}"
        )
    targets = targets_BT.flatten()
    # In a plan, tensors have no values: then all are to be predicted. Otherwise this waits for the device, once.
    is_plan = isinstance(targets, FakeTensor)
    places_R = torch.arange(len(targets), device=targets.device) if is_plan else (targets != NO_TARGET).nonzero().flatten()
    hidden_RC, targets_R = hidden_BTC.flatten(0, 1).index_select(0, places_R), targets[places_R]
    if torch.is_grad_enabled() and not each:
        trained = [parameter for parameter in head.module.parameters() if parameter.requires_grad]
        return _ChunkedLoss.apply(hidden_RC, targets_R, head, size, *trained), None
    chunks = zip(hidden_RC.split(size), targets_R.split(size), strict=True)
    losses_R = torch.cat([checkpoint(head.losses, *chunk, "none", use_reentrant=False) for chunk in chunks])
    return losses_R.sum(), losses_R.new_zeros(len(targets)).index_copy(0, places_R, losses_R).view_as(targets_BT)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses of all chunks. Its gradient is computed in the forward pass, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_RC: Tensor, targets_R: Tensor, head: Head, size: int, *trained: nn.Parameter) -> Tensor:
        """Compute losses and gradients. ``trained``: the parameters of the head that get one."""
        gradient_RC, losses = torch.empty_like(hidden_RC), []
        gradients: list[Tensor | None] = [None] * len(trained)
        for start in range(0, max(1, len(hidden_RC)), size):  # without rows one empty chunk, whose gradients are zeros
            rows = slice(start, start + size)
            with torch.enable_grad():
                hidden = hidden_RC[rows].detach().requires_grad_()
                loss = head.losses(hidden, targets_R[rows])
            gradient_RC[rows], *found = torch.autograd.grad(loss, [hidden, *trained], allow_unused=True)
            # None: the parameter is not used, like those of an adapter that is switched off.
            gradients = [
                new if known is None or new is None else known.add_(new) for known, new in zip(gradients, found, strict=True)
            ]
            del found  # as large as the head
            losses.append(loss.detach())
        ctx.save_for_backward(gradient_RC, *gradients)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        """Scale the gradients in place, as they may be large; torch refuses a second backward pass, which would find that."""
        hidden, *parameters = [None if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors]
        return hidden, None, None, None, *parameters
