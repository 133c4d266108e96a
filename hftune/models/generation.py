"""Generation settings, draws that depend on keys alone, and generation that continues from a forward pass over its sources.

``generate`` (transformers 5.23, ``GenerationMixin``) repeats the prompt for each beam before it reads it: with 4 beams, each
source is computed four times. To repeat the cache of a forward pass that has read the source costs a copy.
"""

# Shapes: B rows, H heads, K cached tokens, d width of a head, T new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode, LogitsProcessor, logits_process
from transformers.modeling_outputs import BaseModelOutput

from hftune.errors import ConfigError, TrainingError, did_you_mean

CONTINUABLE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
SAMPLING: Mapping[str, tuple[type[LogitsProcessor], float | None]] = {
    "temperature": (logits_process.TemperatureLogitsWarper, 1.0),
    "top_h": (logits_process.TopHLogitsWarper, None),
    "top_k": (logits_process.TopKLogitsWarper, 0),
    "top_p": (logits_process.TopPLogitsWarper, 1.0),
    "min_p": (logits_process.MinPLogitsWarper, None),
    "typical_p": (logits_process.TypicalLogitsWarper, 1.0),
    "epsilon_cutoff": (logits_process.EpsilonLogitsWarper, 0.0),
    "eta_cutoff": (logits_process.EtaLogitsWarper, 0.0),
}
"""Generation settings without effect, unless the next token is drawn at random: what applies each, in the order of
transformers, and the value that is as none."""
BEAMS = ("early_stopping", "length_penalty")
"""Generation settings without effect, unless there are several beams."""
ROOM = 64
"""Tokens for which a cache has room without being copied; when they are used up, it gets room for as many more."""


class SourceLayer(DynamicLayer):
    """The keys and values (B, H, K, d) of sources, each repeated for its beams, with room for the titles behind them.

    Writes new tokens in place, where a DynamicLayer copies all keys and values for each token, and again to reorder the beams.
    The beams of a source share its keys and values, so only those of the titles are reordered. With 4 beams and sources of
    1,024 tokens, the copies took most of the time of generation on a CPU.
    """

    def __init__(self, keys_BHKd: Tensor, values_BHKd: Tensor, num_copies: int, room: int = ROOM) -> None:
        super().__init__()
        self.lazy_initialization(keys_BHKd, values_BHKd)
        self.num_source = keys_BHKd.shape[-2]
        self._buffers = [_with_room(states, num_copies, room) for states in (keys_BHKd, values_BHKd)]
        self._show(self.num_source)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return all."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if stop > self._buffers[0].shape[-2]:
            self._buffers = [_with_room(buffer, 1, max(ROOM, stop - start)) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:stop, :] = states
        self._show(stop)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the title of the row ``beam_idx`` (B,), which is a beam of the same source."""
        for states in (self.keys, self.values):
            title = states[..., self.num_source :, :]
            title.copy_(title.index_select(0, beam_idx.to(title.device)))

    def _show(self, num_tokens: int) -> None:
        self.keys, self.values = (buffer[..., :num_tokens, :] for buffer in self._buffers)


def _with_room(states_BHKd: Tensor, num_copies: int, room: int) -> Tensor:
    """Repeat each row, and append ``room`` tokens without values."""
    batch, heads, length, width = states_BHKd.shape
    buffer = states_BHKd.new_empty(batch, num_copies, heads, length + room, width)
    buffer[..., :length, :] = states_BHKd[:, None]
    return buffer.flatten(0, 1)


def continued(outputs: Any, num_title_tokens: int, config: GenerationConfig) -> dict[str, Any]:
    """Return what ``generate`` needs in order not to read the sources again; as little as it can use with these settings.

    The cache is taken from ``outputs`` and changed in place, so that it is never held twice: use it no more.

    Args:
        outputs: of a forward pass with ``use_cache=True``, over sources and the beginnings of titles.
        num_title_tokens: the last positions of the cache, which hold the titles.
    """
    given: dict[str, Any] = {}
    if (hidden_BTC := getattr(outputs, "encoder_last_hidden_state", None)) is not None:
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden_BTC)
    cache = getattr(outputs, "past_key_values", None)
    num_rows = max(config.num_beams or 1, config.num_return_sequences or 1)  # that generate computes for each source
    needs_its_own = (config.cache_implementation, config.prefill_chunk_size)  # some kinds of cache do, and of decoding
    if cache is None or config.use_cache is False or needs_its_own != (None, None):
        return given
    if config.get_generation_mode() not in CONTINUABLE:
        return given
    if isinstance(cache, EncoderDecoderCache):  # keys and values of the source; what the decoder cached itself is all title
        # Both keep all tokens, as an empty DynamicCache will; layers with a sliding window do not.
        both = (cache.self_attention_cache, cache.cross_attention_cache)
        if not all(type(layer) is DynamicLayer for one in both for layer in getattr(one, "layers", [None])):
            return given
        _repeat(cache.cross_attention_cache, num_rows, room=0)
        return {**given, "past_key_values": EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)}
    if given:  # a decoder beside an encoder whose cache is of its own kind
        return given
    cache.crop(-num_title_tokens)
    _repeat(cache, num_rows)
    return {**given, "past_key_values": cache}


def _repeat(cache: DynamicCache, num_copies: int, room: int = ROOM) -> None:
    """Repeat the rows of a cache for the beams, one layer after the other, so that only one layer is there twice."""
    for index, layer in enumerate(cache.layers):
        cache.layers[index] = SourceLayer(layer.keys, layer.values, num_copies, room)


class KeyedDraws(LogitsProcessor):
    """Draws the next token of each row with a number that follows from the row's key and the token's place alone.

    The last of the processors: it leaves one token, which greedy decoding takes. So a text depends neither on the texts beside
    it nor on the process that generates it, but for the last digits of the logits, which differ between shapes of batches: a
    number that is that close to the border between two tokens may fall on either side.

    A token is found by inverting the cumulative distribution, for which one number is enough. Gumbel noise, with which the
    greatest sum is a draw as well, takes as many as the vocabulary has tokens.
    """

    def __init__(self, keys: Sequence[Sequence[int]], config: GenerationConfig, num_prompt_tokens: int):
        """Args:
        keys: of each row, integers from 0, below 2**32.
        config: with ``max_new_tokens``, and values of SAMPLING.

        A call raises TrainingError if the scores are not finite numbers.
        """
        numbers_BT = [np.random.default_rng(key).random(config.max_new_tokens) for key in keys]
        self.numbers_BT = torch.from_numpy(np.stack(numbers_BT))
        self.num_prompt_tokens = num_prompt_tokens
        values = ((kind, getattr(config, name), off) for name, (kind, off) in SAMPLING.items())
        self.warpers = [kind(value) for kind, value, off in values if value is not None and value != off]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        exact = torch.float32 if scores.device.type == "mps" else torch.float64  # Metal has no float64
        shares_BV = scores.to(exact).softmax(-1).cumsum(-1)
        total_B1 = shares_BV[:, -1:].contiguous()
        if not total_B1.isfinite().all():
            raise TrainingError(
                "The model gives the next token no probabilities that are finite numbers: its weights are not, or fp16 is too "
                "narrow for it. See --mixed-precision."
            )
        numbers_B1 = self.numbers_BT[:, input_ids.shape[1] - self.num_prompt_tokens, None].to(shares_BV)
        tokens_B1 = torch.searchsorted(shares_BV, numbers_B1 * total_B1, right=True)  # so none without probability
        last_B1 = torch.searchsorted(shares_BV, total_B1)  # with one; a number may have been rounded to 1
        tokens_B1 = tokens_B1.minimum(last_B1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens_B1, 0.0)


def tidy(config: GenerationConfig, settings: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Unset generation settings of a model, in place, that have no effect once ``settings`` are applied.

    Published models have such settings. transformers loads them, but refuses to save them in settings that were changed.
    """
    settings = settings or {}
    if not settings.get("do_sample", config.do_sample):
        config.update(**dict.fromkeys(SAMPLING))
    if (settings.get("num_beams", config.num_beams) or 1) == 1:
        config.update(**dict.fromkeys(BEAMS))
    return config


def changed(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Change generation settings, in place, as ``task.generation`` says.

    Raises:
        ConfigError: it has an unknown key, values that cannot be used together, or one that has no effect.
    """
    if settings.get("max_length") is not None:
        raise ConfigError(
            f"task.generation.max_length={settings['max_length']} has no effect beside max_new_tokens, which counts what is "
            "generated alone. Set task.generation.max_new_tokens."
        )
    try:
        unknown = config.update(**settings)
        config.validate(strict=True)  # as transformers does when it saves them, which would be after hours of training
    except ValueError as error:
        lines = str(error).removeprefix("GenerationConfig is invalid: \n- ").splitlines()
        raise ConfigError(f"task.generation={dict(settings)} cannot be used: {lines[0]}") from error
    for key in unknown:
        raise ConfigError(
            f"task.generation.{key} is not a key of transformers' GenerationConfig.{did_you_mean(key, config.to_dict())}"
        )
    return config
