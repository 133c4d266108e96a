"""The losses of transformers' detectors, of each image alone, as sums over its boxes. Independent of tasks and data.

Transformers divides a loss by the boxes of a micro-batch, averaged over all processes, and so makes each loss a collective.
Shape suffixes: N images, Q queries, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss import loss_for_object_detection as shared
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher
from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher

from hftune.errors import ConfigError

PLACES = {
    **dict.fromkeys(("RTDetrForObjectDetection", "RTDetrV2ForObjectDetection"), 0),
    **dict.fromkeys(("DeformableDetrForObjectDetection", "ConditionalDetrForObjectDetection", "ForObjectDetection"), 1),
}
"""Kinds of losses, with the dimension of the images in what their layers return."""
INSTEAD = "Use RT-DETR, RT-DETRv2, DETR, Conditional DETR, Deformable DETR or YOLOS."
OVER_QUERIES = "ForObjectDetection"
"""The kind of DETR and YOLOS: the loss of classes is a weighted mean over the queries, not divided by boxes."""
MATCHERS = (shared.HungarianMatcher, DeformableDetrHungarianMatcher, RTDetrHungarianMatcher)


def sum_over_boxes(model: PreTrainedModel, boxes_per_image: float, key: str) -> None:
    """Let a detector, given labels, return the loss of each image times its boxes, ``weight_of`` it, as ``loss`` (N,) float32.

    It has no denoising queries in training: their number depends on the other images of a micro-batch.

    Args:
        boxes_per_image: mean over the training images, by which the loss of classes is divided where transformers divides it
            by the class weights of all queries: by as many as there are for a box on average.

    Raises:
        ConfigError: beginning with ``key``, the loss of this model is not among PLACES.
    """
    kind = str(model.loss_type)
    if kind not in PLACES:
        raise ConfigError(f"{key}: the loss of {type(model).__name__} is not known to be a sum over boxes. {INSTEAD}")
    model.loss_function = partial(losses_of_images, model.loss_function, PLACES[kind], kind == OVER_QUERIES, boxes_per_image)


def weight_of(num_boxes: int) -> int:
    """Return the weight of an image in the loss: its number of boxes, as the loss of transformers has it; without any 1."""
    return max(1, num_boxes)


def losses_of_images(
    loss_function: Callable[..., Any],
    place: int,
    is_over_queries: bool,
    boxes_per_image: float,
    logits: Tensor,
    labels: Sequence[Mapping[str, Tensor]],
    device: Any,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, dict[str, Tensor], None]:
    """Return what a model's forward expects of its ``loss_function``: the loss of each image, times ``weight_of`` it."""
    losses = []
    for index, label in enumerate(labels):
        num_boxes = len(label["class_labels"])

        def own(value: Any, dim: int, index: int = index) -> Any:
            return value.narrow(dim, index, 1).float() if isinstance(value, Tensor) else value

        with alone(num_boxes > 0):
            loss, parts, _ = loss_function(
                own(logits, 0),
                [label],
                device,
                own(pred_boxes, 0),
                config,
                own(outputs_class, place),
                own(outputs_coord, place),
                **{name: own(value, 0) for name, value in others.items()},
            )
        loss = loss * weight_of(num_boxes)
        if is_over_queries:
            weights = query_weights(num_boxes, logits.shape[1], config.eos_coefficient)
            per_box = query_weights(boxes_per_image, logits.shape[1], config.eos_coefficient) / boxes_per_image
            of_classes = sum(value for name, value in parts.items() if name.startswith("loss_ce"))
            loss = loss + of_classes * (weights / per_box - weight_of(num_boxes))
        losses.append(loss)
    return torch.stack(losses), {}, None


def query_weights(num_boxes: float, num_queries: int, of_nothing: float) -> float:
    """Return the sum of the weights of an image's queries: 1 for each that is matched, ``of_nothing`` for the others."""
    matched = min(num_boxes, num_queries)
    return matched + of_nothing * (num_queries - matched)


@contextmanager
def alone(has_boxes: bool) -> Iterator[None]:
    """Let transformers compute the loss of one image, on this process alone.

    Its loss would otherwise add up the boxes of all processes, in a collective that they call at different times; and its
    matchers (5.23) fail without a box.
    """

    def nothing(self: Any, outputs: Mapping[str, Tensor], targets: Any) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) for _ in targets]

    before: list[tuple[Any, str, Any]] = [(shared, "is_accelerate_available", shared.is_accelerate_available)]
    shared.is_accelerate_available = lambda: False
    for matcher in () if has_boxes else MATCHERS:
        before.append((matcher, "forward", matcher.forward))
        matcher.forward = nothing
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
