"""Generation that continues from a forward pass over the same sources, such as the one that computed the loss.

``generate`` (transformers 5.23, ``GenerationMixin``) repeats the prompt for each beam before it reads it: with 4 beams, each
source is computed four times. To repeat the cache of a forward pass that has read the source costs a copy.
"""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput

CONTINUABLE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def can_continue(config: GenerationConfig) -> bool:
    """Return whether ``generate`` can start from a given cache: not with a kind of cache or of decoding that needs its own."""
    needs_its_own = (config.cache_implementation, config.prefill_chunk_size)
    return config.use_cache is not False and needs_its_own == (None, None) and config.get_generation_mode() in CONTINUABLE


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
    if cache is None or not can_continue(config):
        return given
    if isinstance(cache, EncoderDecoderCache):  # keys and values of the source; what the decoder cached itself is all title
        cache = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    else:
        cache.crop(-num_title_tokens)
    cache.batch_repeat_interleave(rows_per_source(config))
    return {**given, "past_key_values": cache}


def rows_per_source(config: GenerationConfig) -> int:
    """Return how many rows ``generate`` computes for each source: one a beam."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)
