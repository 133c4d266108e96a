"""Models for title generation with BERT's or BigBird's weights: one stack with a prefix mask, or an encoder and a decoder."""

# Shapes: B rows, Q new tokens, K cached and new tokens, V vocabulary.

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._subclasses import FakeTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BigBirdConfig,
    Cache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedConfig,
)
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithCrossAttentions
from transformers.models.big_bird.modeling_big_bird import BigBirdEmbeddings, BigBirdEncoder, BigBirdPreTrainedModel

from hftune.errors import ConfigError, did_you_mean
from hftune.models.bigbird_attention import KERNELS, NUM_FIXED_BLOCKS, BlockSparseSelfAttention
from hftune.models.kinds import ATTENTION, drawn_parameters
from hftune.models.packing import RealTokens, without_masks
from hftune.models.prefix_attention import Prefix, pack_layers
from hftune.models.pretrained import load_model, refuse_unknown, wrong_value

WARM_STARTS = ("bert", "big_bird")
SECTION = "task.model_config"
MIN_VALUES = {"num_hidden_layers": 1, "num_attention_heads": 1, "block_size": 1, "num_random_blocks": 0}
CHOICES = {"attention_type": ("block_sparse", "original_full"), "block_sparse_kernel": KERNELS, "hidden_act": tuple(ACT2FN)}

Config = TypeVar("Config", bound=PreTrainedConfig)


class PrefixLMConfig(BertConfig):
    """Config of a ``PrefixLM``: BERT's fields, without attention dropout."""

    model_type = "hftune_prefix_lm"
    attention_probs_dropout_prob: float | int = 0.0

    def __post_init__(self, **fields: Any) -> None:
        self.is_decoder, self.add_cross_attention = True, False  # with a cache, but without an encoder to attend to
        super().__post_init__(**fields)

    @classmethod
    def warm_start(cls, config: PreTrainedConfig, **overrides: Any) -> PrefixLMConfig:
        """Return the config of a prefix LM that is initialized from a BERT, a BigBird or a prefix LM with ``config``.

        Attention dropout is 0 unless ``overrides`` set it: with dropout, torch (2.13) has no fused attention on CPUs, and long
        sources are slow. Fields that only a BigBird has, such as the block size, are accepted and ignored.

        Raises:
            ConfigError: the model is of a different kind or cannot be represented by BERT's stack, a field is unknown, or a
                value is invalid.
        """
        _refuse_unknown(overrides, cls, BlockSparseBigBirdConfig)
        if overrides.get("attention_type") == "block_sparse":
            raise ConfigError(
                f"{SECTION}.attention_type=block_sparse: architecture=prefix_lm has full attention only. "
                "Use task.architecture=encoder_decoder, whose encoder is block-sparse."
            )
        if isinstance(config, cls):
            return make_config(cls, _common_fields(config, cls) | overrides)
        _refuse_other_kinds(config, "prefix_lm")
        if not getattr(config, "use_bias", True) or getattr(config, "rescale_embeddings", False):
            raise ConfigError("task.model has use_bias=false or rescale_embeddings=true, which prefix_lm does not support.")
        if config.type_vocab_size < 2:
            raise ConfigError(
                f"task.model has {config.type_vocab_size} token type; architecture=prefix_lm needs two, for source and title."
            )
        return make_config(cls, _common_fields(config, cls) | {"attention_probs_dropout_prob": 0.0} | overrides)


class PrefixLM(BertLMHeadModel):
    """Generate titles with a single stack: source tokens see the source, title tokens also the title so far.

    ``token_type_ids`` tell them apart: 0 source, 1 title (with the token that starts it). A row may be padded anywhere
    (attention_mask 0): positions count real tokens only, so neither padding nor other rows change its result. A prompt for
    ``generate`` ends with the token that starts the title, so sources of different lengths are padded on the left. The logits
    at a position predict the next token; ``logits_to_keep`` leaves out those of the source, most of the memory.

    Loads the weights of BERT and BigBird models under their own names, and uses torch's fused attention. BigBird applies
    dropout to its embeddings before their norm, BERT after it; otherwise, the function is the same.

    Source: Dong et al., Unified Language Model Pre-training for Natural Language Understanding and Generation, 2019,
    section 2.3 (the sequence-to-sequence mask).
    """

    config_class = PrefixLMConfig
    config: PrefixLMConfig
    _supports_flash_attn = False  # its kernels do not support this mask
    _supports_flex_attn = False

    def __init__(self, config: PrefixLMConfig) -> None:
        super().__init__(config)
        pack_layers(self.bert.encoder)
        if self.config._attn_implementation == "sdpa":
            self.set_attn_implementation(ATTENTION)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        packing: Prefix | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Return logits (B, Q, V), or those of the last ``logits_to_keep`` positions.

        ``input_ids``, ``token_type_ids`` (B, Q) int64; ``attention_mask`` (B, K), the cached tokens first. With a cache, all
        new tokens are title tokens, so a source cannot be processed in pieces (no ``prefill_chunk_size``). ``position_ids``,
        which ``generate`` passes, are ignored: they follow from the mask. The model shifts ``labels``, as in transformers.

        Layers compute real tokens only, unless they fill a cache. ``packing``, from ``find_packing``, saves reading the lengths
        from the device. With the attention implementations "sdpa" and "eager", layers compute padding, too, with
        ``prefix_mask``; also where there are cached tokens, and where the model is compiled as a whole.

        Raises:
            ValueError: there are no ``token_type_ids``, which distinguish source and title.
        """
        if token_type_ids is None:
            raise ValueError("PrefixLM needs token_type_ids: 0 for the source, 1 for the title.")
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        if attention_mask is None:
            valid_BK = input_ids.new_ones((len(input_ids), num_cached + input_ids.shape[1]), dtype=torch.bool)
        else:
            valid_BK = attention_mask.bool()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        given = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "position_ids": (valid_BK.long().cumsum(-1) - 1).clamp(min=0)[:, num_cached:],
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            **kwargs,
        }
        if self.config._attn_implementation == ATTENTION and not num_cached and not torch.compiler.is_compiling():
            shows_layers = kwargs.get("output_hidden_states")  # which have rows then
            shows_layers = self.config.output_hidden_states if shows_layers is None else shows_layers
            is_padded = use_cache or past_key_values is not None or shows_layers
            prefix = Prefix.of(token_type_ids == 1, valid_BK, not is_padded) if packing is None else packing
            with without_masks():
                return super().forward(prefix=prefix, **given)
        mask_B1QK = prefix_mask(token_type_ids, valid_BK, num_cached)
        if self.config._attn_implementation == "eager":  # it adds the mask, true as 1
            mask_B1QK = torch.zeros_like(mask_B1QK, dtype=self.dtype).masked_fill(~mask_B1QK, torch.finfo(self.dtype).min)
        return super().forward(attention_mask=mask_B1QK, **given)

    @staticmethod
    def find_packing(inputs: Mapping[str, Tensor]) -> Prefix:
        """Return where sources and titles of a batch on the host are, for ``forward``."""
        is_title_BT, valid_BT = inputs["token_type_ids"] == 1, inputs["attention_mask"].bool()
        return Prefix.of(is_title_BT, valid_BT, packs_layers=True, is_asked_for=True)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, but apply ``no_repeat_ngram_size`` to the title only.

        transformers (5.23, NoRepeatNGramLogitsProcessor) includes the prompt: a title could then never take three consecutive
        words from its source. ``repetition_penalty`` still includes the source.
        """
        settings = copy.deepcopy(self.generation_config if generation_config is None else generation_config)
        size = kwargs.pop("no_repeat_ngram_size", settings.no_repeat_ngram_size)
        if size is None:
            size = self.generation_config.no_repeat_ngram_size
        if size:
            prompt_BK = kwargs.get("input_ids") if inputs is None else inputs
            no_repeat = _NoRepeatInTitle(size, prompt_BK.shape[1])
            logits_processor = LogitsProcessorList([*(logits_processor or []), no_repeat])
        if generation_config is None:
            kwargs["no_repeat_ngram_size"] = 0
        else:
            generation_config = settings
            generation_config.no_repeat_ngram_size = 0
        return super().generate(inputs, generation_config, logits_processor, **kwargs)


class _NoRepeatInTitle(LogitsProcessor):
    def __init__(self, size: int, prompt_length: int) -> None:
        self.within_title, self.prompt_length = NoRepeatNGramLogitsProcessor(size), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.within_title(input_ids[:, self.prompt_length :], scores)


def prefix_mask(token_type_ids: Tensor, valid_BK: Tensor, num_cached: int = 0) -> Tensor:
    """Return the attention mask (B, 1, Q, K) bool: source tokens see the source, title tokens also the title up to themselves.

    ``token_type_ids`` (B, Q) of the new tokens: 0 source, 1 title. ``valid_BK`` is true for real tokens, cached ones first.
    All new tokens see the cached ones, and are then title tokens. Padding sees itself, to avoid NaN.
    """
    k_K = torch.arange(valid_BK.shape[1], device=valid_BK.device)
    q_Q1 = k_K[num_cached:, None]
    before_QK = k_K <= q_Q1
    if num_cached:
        seen_BQK = before_QK[None]
    else:
        is_title_BQ = token_type_ids == 1
        seen_BQK = ~is_title_BQ[:, None, :] | (is_title_BQ[:, :, None] & before_QK)
    return ((seen_BQK & valid_BK[:, None]) | (k_K == q_Q1))[:, None]


class BlockSparseBigBirdConfig(BigBirdConfig):
    """Config of a ``BlockSparseBigBirdModel``: BigBird's fields, and the seed of its random blocks."""

    model_type = "hftune_block_sparse_big_bird"
    attention_probs_dropout_prob: float | int = 0.0
    """Not used: there is no attention dropout."""
    random_blocks_seed: int = 0
    """Seed of the random blocks, together with the layer. Part of the model: a different seed is a different function."""
    hidden_act: str = "gelu_pytorch_tanh"
    """BigBird's "gelu_new" by the name of torch's faster implementation."""
    block_sparse_kernel: str = "auto"
    """gathered, flex (FlexAttention; no gradients on CPUs, untested on GPUs), or auto: flex on GPUs where it can be compiled,
    gathered elsewhere. Affects the speed, not the function."""

    @property
    def max_full_length(self) -> int:
        """Number of (padded) tokens up to which all rows have full attention."""
        return (NUM_FIXED_BLOCKS + self.num_random_blocks) * self.block_size

    def padded_length(self, length: int) -> int:
        """Return the padded length of a batch whose longest row has ``length``: whole blocks if attention is sparse."""
        if self.attention_type != "block_sparse" or length <= self.max_full_length:
            return length
        return -(-length // self.block_size) * self.block_size

    @classmethod
    def warm_start(cls, config: PreTrainedConfig, **overrides: Any) -> BlockSparseBigBirdConfig:
        """Return the config of an encoder that is initialized from a BERT or BigBird with ``config``.

        Raises:
            ConfigError: the model is of a different kind, a field is unknown, or a value is invalid.
        """
        _refuse_unknown(overrides, cls)
        if not isinstance(config, cls):
            _refuse_other_kinds(config, "encoder_decoder")
        encoder = {"is_decoder": False, "add_cross_attention": False, "attention_probs_dropout_prob": 0.0}
        return make_config(cls, _common_fields(config, cls) | overrides | encoder)


class BlockSparseBigBirdModel(BigBirdPreTrainedModel):
    """BigBird's encoder with its weights and names, without a pooler, with the attention of ``BlockSparseSelfAttention``.

    With ``config.attention_type`` "original_full", attention is full at any length. "block_sparse" is the same function for
    rows of at most 5 + ``num_random_blocks`` blocks. A short batch does not switch to full attention for good.
    """

    config_class = BlockSparseBigBirdConfig
    config: BlockSparseBigBirdConfig
    _supports_sdpa = True

    def __init__(self, config: BlockSparseBigBirdConfig, add_pooling_layer: bool = False) -> None:
        if add_pooling_layer:
            raise ValueError("BlockSparseBigBirdModel has no pooler.")
        super().__init__(config)
        full = copy.deepcopy(config)
        full.attention_type = "original_full"  # so that the layers pass the mask on unchanged
        self.embeddings = BigBirdEmbeddings(config)
        self.encoder = BigBirdEncoder(full)
        for index, layer in enumerate(self.encoder.layer):
            layer.attention.self = BlockSparseSelfAttention(config, index)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return ``last_hidden_state`` (B, T, C) of ``input_ids`` (B, T), padded on the right where ``attention_mask`` is 0.

        Long batches are padded to a multiple of the block size, and the output is cut to the original length. Linear layers
        compute real tokens only.

        Raises:
            ValueError: hidden states or attentions are requested, which are not kept.
        """
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError("BlockSparseBigBirdModel does not return attentions or hidden states.")
        hidden_BTC = self.embeddings(
            input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        length = hidden_BTC.shape[1]
        if missing := self.config.padded_length(length) - length:
            if attention_mask is None:
                attention_mask = hidden_BTC.new_ones(hidden_BTC.shape[:2], dtype=torch.bool)
            hidden_BTC = torch.nn.functional.pad(hidden_BTC, (0, 0, 0, missing))
            attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
        # Without values, as in a plan or while compiled, and where nothing is padded, layers compute all tokens.
        has_values = not isinstance(attention_mask, FakeTensor) and not torch.compiler.is_compiling()
        if attention_mask is None or not has_values or bool(attention_mask.all()):
            hidden_BTC = self.encoder(hidden_BTC, attention_mask=attention_mask).last_hidden_state
        else:
            tokens = RealTokens((len(attention_mask), attention_mask.shape[1]), attention_mask.flatten().nonzero().flatten())
            hidden_1NC = self.encoder(tokens.pack(hidden_BTC), attention_mask=attention_mask, tokens=tokens).last_hidden_state
            hidden_BTC = tokens.unpack(hidden_1NC)
        return BaseModelOutput(last_hidden_state=hidden_BTC[:, :length])


def build_encoder_decoder(
    model: str | None,
    config: PreTrainedConfig,
    *,
    start_token_id: int,
    end_token_id: int,
    pad_token_id: int,
    decoder: dict[str, Any] | None = None,
    commit: str | None = None,
    **encoder: Any,
) -> EncoderDecoderModel:
    """Build a block-sparse BigBird encoder with a BERT decoder, both with the weights of ``model``, or new ones if it is None.

    ``config`` is that of the BERT or BigBird ``model``. ``encoder`` and ``decoder`` override fields of the two. If ``model``
    already is an encoder-decoder, it is loaded unchanged. Cross-attention, which encoders lack, is initialized from torch's
    global generator, as in the source. The decoder is BERT's because BigBird's cannot generate with a cache (transformers 5.23:
    ``'EncoderDecoderCache' object has no attribute 'layer_class_to_replicate'``).

    Source: Rothe et al., Leveraging Pre-trained Checkpoints for Sequence Generation Tasks, 2020 (BERT2BERT).

    Raises:
        ConfigError: there is no such model, it is of a different kind, a field is unknown, or a value is invalid.
    """
    decoder = decoder or {}
    if isinstance(config, EncoderDecoderConfig):
        if encoder or decoder:
            raise ConfigError(f"task.model is already an encoder-decoder, which is loaded unchanged. Leave {SECTION} empty.")
        return load_model(EncoderDecoderModel, model, config, commit)
    encoder_config = BlockSparseBigBirdConfig.warm_start(config, **encoder)
    if not encoder_config.use_bias or encoder_config.rescale_embeddings:
        raise ConfigError("task.model has use_bias=false or rescale_embeddings=true, which BERT's decoder does not support.")
    if decoder.get("attention_type") == "block_sparse":
        raise ConfigError(
            f"{SECTION}.decoder.attention_type=block_sparse: a decoder cannot be block-sparse. "
            f"Leave it out; {SECTION}.attention_type is the encoder's."
        )
    _refuse_unknown(decoder, BertConfig, section=f"{SECTION}.decoder")
    as_decoder = {"is_decoder": True, "add_cross_attention": True, "attention_probs_dropout_prob": 0.0}
    decoder_fields = _common_fields(config, BertConfig) | as_decoder | decoder
    decoder_config = make_config(BertConfig, decoder_fields, f"{SECTION}.decoder")
    halves = {
        "encoder": load_model(BlockSparseBigBirdModel, model, encoder_config, commit),
        "decoder": load_model(BertLMHeadModel, model, decoder_config, commit),
    }
    joined_config = EncoderDecoderConfig(
        **{name: half.config.to_dict() for name, half in halves.items()},
        pad_token_id=pad_token_id,
        decoder_start_token_id=start_token_id,
    )
    joined = EncoderDecoderModel(joined_config, **halves)
    joined.drawn_parameters = [f"{part}.{name}" for part, half in halves.items() for name in drawn_parameters(half)]
    joined.generation_config = GenerationConfig(
        decoder_start_token_id=start_token_id, bos_token_id=start_token_id, eos_token_id=end_token_id, pad_token_id=pad_token_id
    )
    return joined


def make_config(kind: type[Config], values: Mapping[str, Any], section: str = SECTION) -> Config:
    """Create a config of a model of this module.

    "gelu_new", BigBird's activation, is replaced by torch's name of the same function: transformers (5.23, NewGELUActivation)
    computes it step by step and keeps several tensors of the intermediate layer's size for the backward pass instead of one.

    Raises:
        ConfigError: a value is invalid; the message names it as a key of ``section``.
    """
    try:
        config = kind(**values)
    except StrictDataclassError as error:
        raise ConfigError(f"{section} cannot be used: {wrong_value(error)}.") from error
    if getattr(config, "hidden_act", None) == "gelu_new":
        config.hidden_act = "gelu_pytorch_tanh"
    for name, bound in MIN_VALUES.items():
        if (value := getattr(config, name, bound)) < bound:
            raise ConfigError(f"{section}.{name}={value} must be at least {bound}.")
    for name, choices in CHOICES.items():
        if (value := getattr(config, name, choices[0])) not in choices:
            known = "known to transformers" if name == "hidden_act" else f"one of {', '.join(choices)}"
            raise ConfigError(f"{section}.{name}={value!r} is not {known}.{did_you_mean(value, choices)}")
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"{section}.hidden_size={config.hidden_size} is not a multiple of "
            f"{section}.num_attention_heads={config.num_attention_heads}."
        )
    return config


def _refuse_unknown(given: Iterable[str], *kinds: type[PreTrainedConfig], section: str = SECTION) -> None:
    refuse_unknown(given, [field.name for kind in kinds for field in fields(kind)], kinds[0].__name__, section)


def _refuse_other_kinds(config: PreTrainedConfig, architecture: str) -> None:
    if config.model_type not in WARM_STARTS:
        kinds = " or ".join(WARM_STARTS)
        raise ConfigError(f"task.model is a {config.model_type!r}; architecture={architecture} takes the weights of {kinds}.")


def _common_fields(config: PreTrainedConfig, kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields of ``config`` that ``kind`` also has, except those that identify the class."""
    identity = {"model_type", "architectures", "transformers_version", "dtype", "is_decoder", "add_cross_attention"}
    known = {field.name for field in fields(kind) if field.init} - identity
    return {name: value for name, value in config.to_dict().items() if name in known}


AutoConfig.register(PrefixLMConfig.model_type, PrefixLMConfig, exist_ok=True)
AutoModelForCausalLM.register(PrefixLMConfig, PrefixLM, exist_ok=True)
AutoConfig.register(BlockSparseBigBirdConfig.model_type, BlockSparseBigBirdConfig, exist_ok=True)
AutoModel.register(BlockSparseBigBirdConfig, BlockSparseBigBirdModel, exist_ok=True)
