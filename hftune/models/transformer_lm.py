"""A causal language model in plain torch, from PyTorch's tutorial on pipelines, as a transformers model."""

# Shapes: B rows, T new tokens, K cached and new tokens, D width, H heads, V vocabulary.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hftune.models.dropout import attention_with_dropout


class TransformerLMConfig(PreTrainedConfig):
    """Config of a ``TransformerLM``. Defaults are those of the tutorial, whose names are in brackets.

    Source: "Training Transformer models using Distributed Data Parallel and Pipeline Parallelism", PyTorch's tutorials, with
    1,041,453,167 weights. One difference: layers here begin with their norms (pre-norm); the tutorial's end with them. With its
    SGD and 6 layers (width 128, WikiText-2's 10,000 most frequent words) the perplexity after 800 steps was 215 with pre-norm
    and 563 with post-norm; with 2 layers, 201 and 196 after 1,000 steps.

    Raises:
        ValueError: the sizes do not fit together.
    """

    model_type = "transformer_lm"

    vocab_size: int = 33278
    """[ntokens] Number of tokens in the vocabulary."""
    hidden_size: int = 4096
    """[emsize] Width D of the embeddings and of every layer's output."""
    intermediate_size: int = 4096
    """[nhid] Width inside a layer's feed-forward block."""
    num_hidden_layers: int = 8
    """[nlayers] Number of layers."""
    num_attention_heads: int = 16
    """[nhead] Number of attention heads in each layer."""
    dropout: float | int = 0.2
    """[dropout] Dropout probability of embeddings, attention weights and the outputs of both blocks of a layer."""
    max_position_embeddings: int = 512
    """Maximum number of tokens in a row. Positions are sinusoids and need no weights."""
    initializer_range: float | int = 0.1
    """Bound of the uniform initialization of embeddings and head; other layers use torch's default."""
    tie_word_embeddings: bool = False
    """Whether the head shares the weights of the embeddings."""
    bos_token_id: int | None = None
    """Token that starts a text."""
    eos_token_id: int | None = None
    """Token that ends a text."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of 2 * num_attention_heads={2 * self.num_attention_heads}."
            )


class PositionalEncoding(nn.Module):
    """Scale embeddings by the square root of their width, add sinusoidal positions, apply dropout.

    Source: Vaswani et al., Attention Is All You Need, 2017, sections 3.4 and 3.5.
    """

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        self.max_length, self.width = config.max_position_embeddings, config.hidden_size
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("sinusoids_TD", self.compute(), persistent=False)

    def compute(self) -> Tensor:
        """Return the sinusoids (T, D): sines in the even columns, cosines in the odd ones."""
        position_T1 = torch.arange(self.max_length).float()[:, None]
        speed = torch.exp(torch.arange(0, self.width, 2) * (-math.log(10000.0) / self.width))
        return torch.stack([(position_T1 * speed).sin(), (position_T1 * speed).cos()], -1).flatten(1)

    def forward(self, x_BTD: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``position_ids`` (B, T); by default 0, 1, 2, ... in every row."""
        sinusoids = self.sinusoids_TD[: x_BTD.shape[1]] if position_ids is None else self.sinusoids_TD[position_ids]
        return self.dropout(x_BTD * math.sqrt(self.width) + sinusoids.to(x_BTD.dtype))


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention, with torch's fused kernels."""

    def __init__(self, config: TransformerLMConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.index = config.num_attention_heads, config.dropout, index
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, mask_B1TK: Tensor | None = None, past_key_values: Cache | None = None) -> Tensor:
        """``mask_B1TK``: true where a token may attend, causality included; None for causality alone."""
        q_BHTd, k_BHKd, v_BHKd = self.in_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            k_BHKd, v_BHKd = past_key_values.update(k_BHKd, v_BHKd, self.index)
        dropout = self.dropout if self.training else 0.0
        if dropout and mask_B1TK is None and x_BTD.device.type == "cpu":  # torch has no fused kernel with dropout there
            later_TT = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).triu(1)
            y_BHTd = attention_with_dropout(q_BHTd, k_BHKd, v_BHKd, dropout, q_BHTd.shape[-1] ** -0.5, later_TT)
        else:
            y_BHTd = scaled_dot_product_attention(q_BHTd, k_BHKd, v_BHKd, mask_B1TK, dropout, is_causal=mask_B1TK is None)
        return self.out_proj(y_BHTd.transpose(1, 2).flatten(2))


class TransformerLayer(GradientCheckpointingLayer):
    """Attention, then a feed-forward block, both with pre-norm and a residual path."""

    def __init__(self, config: TransformerLMConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config, index)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.hidden_size, config.intermediate_size),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.intermediate_size, config.hidden_size),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, mask_B1TK: Tensor | None = None, past_key_values: Cache | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), mask_B1TK, past_key_values))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class TransformerLMPreTrainedModel(PreTrainedModel):
    """What base model and language model share: names and the initialization of weights."""

    config_class = TransformerLMConfig
    config: TransformerLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerLayer"]
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module's weights as the tutorial does; transformers calls it also for weights missing in a checkpoint.

        Linear layers: torch's default, uniform within 1 / sqrt(inputs).
        """
        if isinstance(module, PositionalEncoding):
            initialization.copy_(module.sinusoids_TD, module.compute())
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            at_the_ends = (self.get_input_embeddings(), self.get_output_embeddings())
            bound = self.config.initializer_range if module in at_the_ends else 1 / math.sqrt(module.weight.shape[1])
            initialization.uniform_(module.weight, -bound, bound)
            if getattr(module, "bias", None) is not None:
                initialization.zeros_(module.bias)


class TransformerLMModel(TransformerLMPreTrainedModel):
    """The network without its head. Its children are called in order, so it can be split into stages between any two layers."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = PositionalEncoding(config)
        self.layers = nn.ModuleList(TransformerLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return ``last_hidden_state`` (B, T, D) of ``input_ids`` (B, T), or of their embeddings (B, T, D).

        Without ``attention_mask`` (B, K), 0 on padding, all tokens count and attention uses its fastest kernel. Rows padded on
        the right do not need the mask, because no token sees later ones. With ``past_key_values`` of K - T tokens, only the T
        tokens after them are given. A cache is kept if there is one, or with ``use_cache=True``.

        Raises:
            ValueError: there are more tokens than positions.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        num_tokens = num_cached + x_BTD.shape[1]
        if num_tokens > self.config.max_position_embeddings:
            raise ValueError(f"{num_tokens} tokens exceed the model's {self.config.max_position_embeddings} positions.")
        if attention_mask is None and num_cached:
            attention_mask = x_BTD.new_ones((len(x_BTD), num_tokens), dtype=torch.bool)
        if attention_mask is None:
            mask_B1TK, x_BTD = None, self.embed_positions(x_BTD)
        else:
            # The real tokens up to each new one. Padding sees itself, to avoid NaN.
            k_K = torch.arange(num_tokens, device=x_BTD.device)
            q_T1 = k_K[num_cached:, None]
            mask_B1TK = (((k_K <= q_T1) & attention_mask.bool()[:, None]) | (k_K == q_T1))[:, None]
            x_BTD = self.embed_positions(x_BTD, (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, num_cached:])
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_B1TK, past_key_values=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), past_key_values=past_key_values)


class TransformerLM(TransformerLMPreTrainedModel, GenerationMixin):
    """Predict each token from those before it. ``generate`` keeps a cache, so that a token costs one token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__(config)
        self.model = TransformerLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, V) of the next token, or those of the last ``logits_to_keep`` positions.

        Other arguments are those of ``TransformerLMModel``.
        """
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        logits = self.lm_head(hidden.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=hidden.past_key_values)


AutoConfig.register(TransformerLMConfig.model_type, TransformerLMConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerLMConfig, TransformerLM, exist_ok=True)
