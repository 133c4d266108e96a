"""A task whose loss is computed together with the head, though its vocabulary is small."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from hftune.models import scored_head
from hftune.tasks.text import head_loss, head_losses
from tests.support.tasks import NextToken


@dataclass
class ScoredTokens(NextToken):
    """Predict the next of 30 tokens; micro-batches of more than 16 tokens have too many logits, and chunks 16 tokens."""

    scored_head = True
    metric_directions = {"perplexity": "min"}

    def build_model(self) -> nn.Module:
        scored_head.AT_ONCE = 16 * 30
        return super().build_model()

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"], "attention_mask": (batch["labels"] != -100).long(), "use_cache": False}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return head_loss(outputs, target)

    def predictions(self, outputs: Any, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        losses, counts = head_losses(outputs, batch["labels"]).sum(1), (batch["labels"] != -100).sum(1)
        scored = hasattr(outputs, "loss_sum")
        return [
            {"loss": float(loss), "tokens": int(count), "scored": scored} for loss, count in zip(losses, counts, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        mean = sum(row["loss"] for row in rows) / sum(row["tokens"] for row in rows)
        return {"perplexity": float(np.exp(mean))}


@dataclass
class EachToken(ScoredTokens):
    """The same by a loss that could weigh each token."""

    scored_head = "each"

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return head_losses(outputs, target).sum()
