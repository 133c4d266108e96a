"""A BigBird of toy size whose blocks are small, and batches for it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, BigBirdConfig, BigBirdForPreTraining

from hftune.models.bigbird import BlockSparseBigBirdConfig, BlockSparseBigBirdModel

BLOCK, RANDOM = 4, 2
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "block_size": BLOCK,
    "num_random_blocks": RANDOM,
    "initializer_range": 0.2,  # large, so that a small model's tokens matter to each other
}


def save_big_bird(folder: Path) -> str:
    """Save a BigBird that was pretrained, in name; its biases are not the zeros of a fresh one."""
    torch.manual_seed(0)
    model = BigBirdForPreTraining(BigBirdConfig(**SIZES))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return str(folder)


def words(*shape, seed=0):
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def load_encoder(pretrained, **overrides):
    config = BlockSparseBigBirdConfig.warm_start(AutoConfig.from_pretrained(pretrained), hidden_dropout_prob=0.0, **overrides)
    model, info = BlockSparseBigBirdModel.from_pretrained(pretrained, config=config, output_loading_info=True)
    assert not info["missing_keys"]
    return model


def right_padded(lengths, width=None):
    width = width or max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return words(len(lengths), width) * mask, mask
