"""Keys random draws, such as dropout, by what is computed instead of who computes it. Independent of processes and models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn


def seed_forward(seed: int, step: int, micro_batch_index: int, device: torch.device, layer: int = 0) -> None:
    """Seed the random draws of one forward pass by what it computes.

    So dropout does not depend on the number of processes, and resuming needs no generator states.

    Args:
        layer: keys the part of the pass that begins with this layer, counted from 1. 0: the whole pass.

    Source: numpy.random.SeedSequence, whose hash is fixed across numpy's versions.
    """
    what = [seed, step, micro_batch_index, layer] if layer else [seed, step, micro_batch_index]
    key = int(np.random.SeedSequence(what).generate_state(1, np.uint64)[0]) >> 1
    # torch.manual_seed seeds both, too, but visits every possible backend: half a millisecond for each forward pass.
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)  # transformers' speech models mask and drop layers by it, and some others by random
    random.seed(key)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(key)


class LayerSeeds:
    """Keys the draws of each layer separately, so that they do not depend on who computed the layers before it.

    Used for models that can be cut into stages, whether they are cut or not. A hook at the end of each layer seeds the next
    one. A hook at the beginning would run a second time, with another micro-batch's key, when gradient checkpointing
    recomputes a layer.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._forward = (0, 0, 0)
        self.noise: Any = None
        """The ``hftune.models.neftune.Noise`` of the model, if it has one."""

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Seed after each layer but the last, in training mode."""
        for number, layer in enumerate(layers[:-1], start=1):
            layer.register_forward_hook(partial(self._seed_next, number))

    def begin(self, seed: int, step: int, micro_batch_index: int, layer: int = 0) -> None:
        """Seed one forward pass, or the part of it from ``layer`` on."""
        self._forward = seed, step, micro_batch_index
        if self.noise is not None:
            self.noise.key = seed, step
        seed_forward(*self._forward, self.device, layer)

    def _seed_next(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:  # sampled generation calls the layers for each token, and is seeded once
            seed_forward(*self._forward, self.device, layer)

    def __deepcopy__(self, memo: Any) -> LayerSeeds:
        return self  # the stages of a cut model are copies of it, hooks included
