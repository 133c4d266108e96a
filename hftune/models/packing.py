"""Training without padding, for transformers models: their layers compute the real tokens of a micro-batch and nothing else.

Embeddings, poolers, heads and losses see the padded batch (B, T) as ever. A hook before the first layer takes the padding out,
a hook after the last one puts it back; in between there is one row (1, N, C) of all texts, one after the other. Attention gets
the lengths of the texts, as the keyword argument ``packing`` that transformers hands on to it, and keeps them apart.

An encoder-decoder has a row of all sources in its encoder and one of all targets in its decoder, whose cross attention reads
the former. Where attention is causal, tokens that several texts begin with can be computed once, see ``Packing.sharing``.

Not every model allows this: some drop the argument, or look at the rows in another way. So ``hftune.strategies.trial``
compares both ways before training.
"""

# Shapes: B texts, T tokens of the longest, N real tokens of all, C width of the layers, H heads, d width of a head, R texts of
# equal length t, S tokens of the longest source, M tokens of all texts, each with the whole of its beginning.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from hftune.errors import ConfigError
from hftune.models.dropout import attention_with_dropout
from hftune.models.groups import SPARE, IntoGroups, IntoRow, group_texts
from hftune.models.kinds import ATTENTION
from hftune.models.scored_head import NO_TARGET

MASK = "attention_mask"
"""Input of a model that says which tokens are real. Without it all are."""
ENCODED, BIAS = "encoder_hidden_states", "position_bias"
"""What layers are given that has no tokens of their own stack: the encoder's output, and a table of distances."""


class NotPackable(Exception):
    """Says why a model cannot be trained without padding; a part of a sentence."""


@dataclass(frozen=True)
class RealTokens:
    """Where the real tokens of a padded batch are. Has no lengths, which would make a compiled layer anew for each batch."""

    shape: tuple[int, int]
    """(B, T)."""
    indices_N: Tensor
    """Of the real tokens in the flattened batch."""

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return len(self.indices_N) == self.shape[0] * self.shape[1]

    def pack(self, x_BT: Tensor) -> Tensor:
        """Take the padding out: (B, T, ...) or (1, T, ...) to (1, N, ...)."""
        if x_BT.shape[0] != self.shape[0]:
            x_BT = x_BT.expand(self.shape[0], *x_BT.shape[1:])
        rows = x_BT.flatten(0, 1)
        return (rows if self.is_full else rows.index_select(0, self.indices_N))[None]

    def unpack(self, x_1N: Tensor) -> Tensor:
        """Put the padding back, as zeros: (1, N, ...) to (B, T, ...)."""
        if self.is_full:
            return x_1N.squeeze(0).unflatten(0, self.shape)  # not x_1N[0], whose gradient is a copy into zeros
        padded = x_1N.new_zeros(self.shape[0] * self.shape[1], *x_1N.shape[2:])
        return padded.index_copy(0, self.indices_N, x_1N.squeeze(0)).unflatten(0, self.shape)


@dataclass(frozen=True)
class Packing(RealTokens):
    """The same, and the lengths of the texts, so that attention can keep them apart."""

    lengths: tuple[int, ...]
    """Real tokens of each text, on the host, so that nothing waits for the device."""
    starts: Tensor
    """(B + 1,) int32: where each text starts in the packed row, and the end. Known as cu_seqlens."""
    context: Any = None
    """``hftune.strategies.context.Context`` where processes share the tokens out: ``indices_N`` then has those of this one, and
    unpacking puts zeros elsewhere."""
    shared: tuple[Tensor, Tensor] | None = None
    """If texts share beginnings: which of the N tokens that are computed each of the M is; and which of the M are computed,
    (N,). ``lengths`` and ``starts`` are of the M."""
    source: Packing | None = None
    """Of what the encoder reads, in the same order, if the packing itself is of what a decoder reads. None: both read texts of
    equal lengths."""

    @classmethod
    def of(cls, mask_BT: Tensor, order_B: Tensor | None = None) -> Packing:
        """Read a mask, not 0 for real tokens. Texts are in the order of their lengths: those of equal length lie together.

        Args:
            order_B: another order, that of the texts in a packing which this one belongs to.
        """
        real_BT = mask_BT.numpy() != 0  # numpy starts no threads, which take longer here than the work on many cores
        lengths_B = real_BT.sum(1)
        order = lengths_B.argsort(kind="stable") if order_B is None else order_B.numpy()
        rows_N, columns_N = real_BT[order].nonzero()
        indices_N = torch.from_numpy(order[rows_N] * mask_BT.shape[1] + columns_N)
        return cls.at((mask_BT.shape[0], mask_BT.shape[1]), indices_N, lengths_B[order].tolist())

    @classmethod
    def at(cls, shape: tuple[int, int], indices_N: Tensor, lengths: Sequence[int]) -> Packing:
        """Take ``lengths`` tokens at these places for each text, one text after the other."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=indices_N.device)
        return cls(shape, indices_N, tuple(lengths), starts)

    def sharing(self, sources_B: Tensor, counts_B: Tensor) -> Packing:
        """Compute the beginnings of texts once: the first ``counts_B`` tokens of each are those of the text ``sources_B``.

        Such a text has a count of 0 itself. Unpacking puts zeros where nothing was computed; all else is as it would be, as
        attention is causal.
        """
        texts_M, places_M = self.indices_N // self.shape[1], torch.arange(len(self.indices_N))
        starts_B = places_M.new_zeros(self.shape[0]).scatter_reduce(0, texts_M, places_M, "amin", include_self=False)
        inner_M = places_M - starts_B[texts_M]
        is_shared_M = inner_M < counts_B[texts_M]
        at_M = places_M.where(~is_shared_M, starts_B[sources_B[texts_M]] + inner_M)
        computed_N = (~is_shared_M).nonzero().flatten()
        which_M = ((~is_shared_M).cumsum(0) - 1)[at_M]
        return replace(self, indices_N=self.indices_N[computed_N], shared=(which_M, computed_N))

    @property
    def is_full(self) -> bool:
        """Whether there is no padding, and the texts are in the batch's order, unlike those that follow their sources."""
        return super().is_full and self.source is None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        """Return it on a device."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Packing:
        """Return it in memory that a GPU can copy from while the host goes on; torch's DataLoader calls it."""
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Packing:
        """Return it with what ``move`` makes of each of its tensors."""
        shared = None if self.shared is None else tuple(map(move, self.shared))
        source = None if self.source is None else self.source.moved(move)
        return replace(self, indices_N=move(self.indices_N), starts=move(self.starts), shared=shared, source=source)

    def pack_all(self, value: Any) -> Any:
        """Take the padding out of a tensor that has rows and tokens, or of those in a tuple; leave other values alone."""
        if isinstance(value, tuple):
            return tuple(map(self.pack_all, value))
        has_tokens = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == self.shape[1]
        return self.pack(value) if has_tokens and value.shape[0] in (1, self.shape[0]) else value


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    prefix: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' attention functions do: (1, H, N, d) to (1, N, H, d); texts do not see each other.

    A decoder's attention to its own tokens is causal; that to the source is not, and has as many keys as ``packing.source``.
    Without ``packing``, as in evaluations and in generation, it is transformers' ``sdpa``. A prefix LM packs by itself, with
    or without it, and hands on its ``prefix`` instead (``hftune.models.prefix_attention``).
    """
    if prefix is not None:
        for calls in _watching if prefix.is_asked_for else ():
            calls.append(module)
        return prefix.attend(query, key, value, dropout, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    if packing is None:
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **rest, **kwargs)
    for calls in _watching:
        calls.append(module)
    if torch.is_autocast_enabled(query.device.type):  # rotary positions make float32 of queries and keys, but not of values
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if odd := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
        raise NotPackable(f"its attention uses {odd[0]}")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    keys = packing if causal or packing.source is None else packing.source
    bias_1HTT = None if position_bias is None or position_bias.ndim == 1 else position_bias
    if packing.shared is not None:
        if not causal:
            raise NotPackable("its attention is not causal, and texts share their beginnings")
        query, key, value = (x_1HNd.index_select(2, packing.shared[0]) for x_1HNd in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    has_kernel = query.is_cuda and bias_1HTT is None and (query.dtype != torch.float32 or sliding_window is None)
    is_flash = has_kernel and query.dtype != torch.float32 and packing.context is None  # which takes fewer heads of keys
    if (repeats := query.shape[1] // key.shape[1]) > 1 and not is_flash:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if (context := packing.context) is not None:
        if dropout and query.is_cuda:
            raise ConfigError(
                f"parallel.context={context.size}: on GPUs, attention draws its dropout where it cannot be divided. Set the "
                "model's attention dropout to 0, or parallel.context=1."
            )
        query, key, value = context.by_heads([query, key, value])
    if has_kernel:
        q, k, v = (x_1HNd.squeeze(0).transpose(0, 1) for x_1HNd in (query, key, value))
        output = varlen_attention(q, k, v, packing, keys, causal, dropout, scale, sliding_window)[None]
    elif query.is_cuda and bias_1HTT is not None:
        output = _padded(query, key, value, packing, dropout, causal, scale, bias_1HTT)
    else:
        output = _by_groups(query, key, value, packing, keys, dropout, causal, scale, sliding_window, bias_1HTT)
    if packing.shared is not None:
        output = output.index_select(1, packing.shared[1])
    return output if context is None else context.by_tokens(output), None


def varlen_attention(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    queries: Packing,
    keys: Packing,
    causal: bool,
    dropout: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Call torch's attention for texts of unequal length on GPUs. If causal, the last query sees the last key (since 2.1).

    That is flash attention; or the memory-efficient one, which computes float32, and knows neither windows nor fewer heads of
    keys. Not torch.nn.attention.varlen: it has no dropout and no float32 (2.13).
    """
    texts = (queries.starts, keys.starts, queries.longest, keys.longest)
    if q_NHd.dtype != torch.float32:
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}
        flash = torch.ops.aten._flash_attention_forward
        return flash(q_NHd, k_NHd, v_NHd, *texts, dropout, causal, False, scale=scale, **sides)[0]
    tensors = (q_NHd[None], k_NHd[None], v_NHd[None])
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    mask_type = 2 if causal else 0  # causal from the bottom right, or none
    efficient = torch.ops.aten._efficient_attention_forward
    return efficient(*tensors, None, *texts, dropout, mask_type, needs_gradient, scale=scale)[0].squeeze(0)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float, causal: bool, scale: float, bias_1HTT: Tensor
) -> Tensor:
    """Pad for attention alone: torch's kernels for texts of unequal length take no bias."""
    q_BHTd, k_BHTd, v_BHTd = (packing.unpack(x_1HNd.transpose(1, 2)).transpose(1, 2) for x_1HNd in (query, key, value))
    if causal:
        seen = torch.ones(packing.shape[1], packing.shape[1], dtype=torch.bool, device=query.device).tril()
    else:
        seen = packing.unpack(torch.ones_like(packing.indices_N, dtype=torch.bool)[None])[:, None, None]
    mask = bias_1HTT.to(query.dtype).masked_fill(~seen, -torch.inf)
    output = scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, mask, dropout_p=dropout, scale=scale)
    return packing.pack(output.transpose(1, 2))


def _by_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    keys: Packing,
    dropout: float,
    causal: bool,
    scale: float,
    window: int | None,
    bias_1HTT: Tensor | None,
) -> Tensor:
    """Compute one group of texts after the other, with torch's fused kernel, or with our own on CPUs."""
    heads = (0, query.shape[1]) if packing.context is None else packing.context.heads(query.shape[1])
    has_spare = dropout or bias_1HTT is not None or keys is not packing
    groups, of_keys = group_texts(packing.lengths, keys.lengths, SPARE // heads[1] if has_spare else 0)
    outputs, count = [], len(groups.shapes)
    parts = IntoGroups.apply((groups, of_keys, of_keys), query, key, value)
    for index, ((_, length), real_R11S) in enumerate(zip(groups.shapes, of_keys.real, strict=True)):
        q_RHTd, k_RHSd, v_RHSd = parts[index::count]
        seen = _seen(length, causal, window, query.device)
        if real_R11S is not None and not causal:
            real_R11S = torch.as_tensor(real_R11S, device=query.device)
            seen = real_R11S if seen is None else seen & real_R11S | torch.eye(length, dtype=torch.bool, device=query.device)
        bias = None if bias_1HTT is None else bias_1HTT[..., :length, :length]
        outputs.append(attention(q_RHTd, k_RHSd, v_RHSd, seen, causal and seen is None, dropout, scale, heads, bias))
    return IntoRow.apply(groups, *outputs)[None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
    heads: tuple[int, int] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention (R, H, t, d) of texts of equal length, which see ``seen``, or earlier tokens if ``causal``.

    Args:
        seen: as ``attention_with_dropout`` takes ``hidden``, but true where a token is seen.
        heads: as ``attention_with_dropout`` takes it.
        bias: likewise; on CPUs only.
    """
    if bias is None and (not dropout or q.device.type != "cpu"):
        return scaled_dot_product_attention(q, k, v, seen, dropout, is_causal=causal, scale=scale)
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if bias is not None:  # far smaller than the scores
            bias, seen = bias.masked_fill(~seen, -torch.inf), None
    return attention_with_dropout(q, k, v, dropout, scale, None if seen is None else ~seen, heads, bias)


def _seen(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens (columns) each one (rows) sees through a sliding window; None if it is no smaller than the text."""
    if window is None or length <= window:
        return None
    index_t = torch.arange(length, device=device)
    distance_tt = index_t[:, None] - index_t
    return (distance_tt >= 0) & (distance_tt < window) if causal else distance_tt.abs() < window


AttentionInterface.register(ATTENTION, packed_attention)
# While packed, there is no mask: one over N x N tokens would be made otherwise.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None if _is_packed else _mask(*args, **kwargs))
AttentionMaskInterface.register("sdpa", lambda *args, **kwargs: _mask(*args, **kwargs))
_is_packed: list[bool] = []
_padding: list[Mapping[tuple[int, ...], bool]] = []
"""What ``told_of_padding`` was told."""
_watching: list[list[nn.Module]] = []
"""What ``attention_calls`` has yielded."""


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Make the mask that transformers' ``sdpa_mask`` makes, which looks for padding, and so waits for a GPU."""
    known = None  # in a graph, which looks at no values, and would be compiled again for each batch
    if not torch.compiler.is_compiling() and _padding and attention_mask is not None:
        known = _padding[-1].get(tuple(attention_mask.shape))
    if known is True:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    elif known is False:
        attention_mask = None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def _look_at_nothing(*args: Any) -> None:
    """Stand for a function that looks at a tensor; always the same one, as what is compiled is guarded by it."""


@contextmanager
def without_masks() -> Iterator[None]:
    """Let the models called inside make no attention masks. For calls with ``packing``."""
    _is_packed.append(True)
    try:
        with told_of_padding({}):
            yield
    finally:
        _is_packed.pop()


@contextmanager
def told_of_padding(padding: Mapping[tuple[int, ...], bool]) -> Iterator[None]:
    """Let the models called inside look at no tensor on a GPU for padding: somebody has looked on the host.

    Nor do they look for texts that positions tell apart within a row, or for padding to warn of; transformers 5.23 has no
    settings for these.

    Args:
        padding: whether masks hide anything, by their shape. At others they look.
    """
    find, warn = masking_utils.find_packed_sequence_indices, PreTrainedModel.warn_if_padding_and_no_attention_mask
    masking_utils.find_packed_sequence_indices = PreTrainedModel.warn_if_padding_and_no_attention_mask = _look_at_nothing
    _padding.append(padding)
    try:
        yield
    finally:
        _padding.pop()
        masking_utils.find_packed_sequence_indices = find
        PreTrainedModel.warn_if_padding_and_no_attention_mask = warn


@contextmanager
def attention_calls() -> Iterator[list[nn.Module]]:
    """Yield a list that the attention modules which compute packed are added to."""
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def find_packing(inputs: Mapping[str, Tensor]) -> Packing:
    """Return where the real tokens of a model's inputs are, by their mask; without one, all are.

    A model whose attention knows more than one kind of tokens has a ``find_packing`` of its own.
    """
    mask_BT = inputs.get(MASK)
    if mask_BT is None:
        mask_BT = torch.ones(next(iter(inputs.values())).shape[:2], dtype=torch.bool)
    return Packing.of(mask_BT.flatten(0, -2))  # models for multiple choice are given the choices of each sample, (B, 1, T)


def find_decoded(inputs: Mapping[str, Tensor], labels_BT: Tensor, source: Packing) -> Packing:
    """Return where the real tokens of a decoder's inputs are: those up to the last one with a label, unless a mask says more.

    What comes after it changes no loss, as decoders are causal.

    Args:
        source: of the encoder's inputs.
    """
    mask_BT = inputs.get("decoder_attention_mask")
    if mask_BT is None:
        mask_BT = (labels_BT != NO_TARGET).flip(1).cummax(1).values.flip(1)
        mask_BT[:, 0] = True  # attention needs a token of each
    order_B = torch.unique_consecutive(source.indices_N // source.shape[1])
    if len(order_B) < len(mask_BT):
        raise NotPackable("a source has no tokens")
    return replace(Packing.of(mask_BT, order_B), source=source)


def reader_of(model: nn.Module) -> nn.Module:
    """Return the part of a model whose layers read its tokens: all of it; or, beside a vision tower, its language model."""
    parts = getattr(getattr(model, "config", None), "sub_configs", {})
    return model.get_decoder() if {"text_config", "vision_config"} <= parts.keys() else model


def stacks_of(model: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of a model that read its tokens, in order: one stack, or those of encoder and decoder.

    Raises:
        NotPackable: it has none, or other stacks of them; or they mix tokens by more than attention, which comparing numbers
            may not show: a new Falcon-H1 carries next to nothing from one text to another.
    """
    stacks = [
        [*module]
        for module in reader_of(model).modules()
        if isinstance(module, nn.ModuleList) and any(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    reads_tokens = getattr(model, "main_input_name", None) == "input_ids"  # unlike Whisper's encoder
    has_both = len(stacks) == 2 and reads_tokens and model.config.is_encoder_decoder
    if len(stacks) != 1 and not has_both:
        raise NotPackable(f"it has {len(stacks)} stacks of layers" if stacks else "it has no stack of transformers' layers")
    parts = [part for layers in stacks for layer in layers for part in layer.modules()]
    if any(isinstance(part, nn.Conv1d) and part.kernel_size != (1,) for part in parts):
        raise NotPackable("its layers have convolutions, which would reach from text to text")
    return [[layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)] for layers in stacks]


def install(model: nn.Module) -> Callable[[], None]:
    """Let a transformers model, or a stage of one, take ``packing`` beside its inputs; return a function that undoes it.

    Raises:
        NotPackable: as ``stacks_of``; or its attention is not called by transformers' attention interface.
    """
    stacks, names, biased = stacks_of(model), dict[PreTrainedModel, str](), list[nn.Module]()
    for module in reader_of(model).modules():
        if isinstance(module, PreTrainedModel):
            names[module] = module.config._attn_implementation
            if names[module] not in ("sdpa", ATTENTION):
                raise NotPackable(f"its attention is {names[module]}, not sdpa")
            if not module._can_set_attn_implementation():
                raise NotPackable("its attention does not go through transformers' attention interface")
        if hasattr(module, "compute_bias"):
            if BIAS not in signature(module.forward).parameters:
                raise NotPackable("each of its layers computes a position bias of its own")
            biased.append(module)
    for module in names:
        module.set_attn_implementation(ATTENTION)
    handles: list[RemovableHandle] = [module.register_forward_pre_hook(_give_bias, with_kwargs=True) for module in biased]
    for layers in stacks:
        is_encoder = layers is not stacks[-1]
        for layer in layers:
            whole = {at for at, name in enumerate(signature(type(layer).forward).parameters, -1) if name in (ENCODED, BIAS)}
            take_out = partial(_take_out, layer is layers[0], is_encoder, whole)
            handles.append(layer.register_forward_pre_hook(take_out, with_kwargs=True))
        handles.append(layers[-1].register_forward_hook(partial(_leave, is_encoder), with_kwargs=True))
    if len(stacks) == 2:
        handles.append(model.get_decoder().register_forward_pre_hook(_pack_encoded, with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, name in names.items():
            module.set_attn_implementation(name)

    return undo


def _packing_for(is_encoder: bool, kwargs: Mapping[str, Any]) -> Packing | None:
    """Return the packing of a stack of layers that is given these arguments."""
    packing = kwargs.get("packing")
    return packing.source if is_encoder and packing is not None and packing.source is not None else packing


def _take_out(
    is_first: bool, is_encoder: bool, whole: set[int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Take the padding out of what a layer is given, such as positions; only the first one's hidden states have some.

    Args:
        is_encoder: the layer is of the first of two stacks.
        whole: the places of arguments that stay as they are.
    """
    packing = _packing_for(is_encoder, kwargs)
    if packing is None:
        return None
    packed = {name: value if name in (ENCODED, BIAS) else packing.pack_all(value) for name, value in kwargs.items()}
    packed["packing"] = packing
    if not is_first and not args and "hidden_states" in kwargs:
        packed["hidden_states"] = kwargs["hidden_states"]
    kept = whole if is_first else {0, *whole}
    return tuple(value if at in kept else packing.pack_all(value) for at, value in enumerate(args)), packed


def _leave(is_encoder: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Put the padding back after the last layer."""
    packing = _packing_for(is_encoder, kwargs)
    if packing is None:
        return None
    hidden = packing.unpack(output[0] if isinstance(output, tuple) else output)
    if packing.context is not None and packing.context.gathers:
        hidden = packing.context.whole(hidden)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _pack_encoded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the padding out of the encoder's output, for all layers of a decoder."""
    packing = kwargs.get("packing")
    if packing is None:
        return None
    return args, {**kwargs, ENCODED: (packing.source or packing).pack(kwargs[ENCODED])}


def _give_bias(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give attention its bias by distance, (1, H, T, T), for the longest text rather than for a row of all of them.

    Attention to a source has none, which a single zero stands for, so that none is made of zeros.
    """
    packing = kwargs.get("packing")
    if packing is None or kwargs.get(BIAS) is not None:
        return None
    if module.has_relative_attention_bias:
        return args, {**kwargs, BIAS: module.compute_bias(packing.shape[1], packing.shape[1])}
    return args, {**kwargs, BIAS: args[0].new_zeros(1)}
