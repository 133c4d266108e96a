"""Gathers the units of a sharded model as processes need them, so that each computes what it likes, and as often as it likes.

A unit is what FSDP gathers at once, which takes all processes. So they agree on each: of the units that they need, the first
one in the order of the model. A process that needs a later unit, or none, only takes part in the gather. Those that are behind
thus catch up, and processes that generate texts token by token soon compute the same blocks at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hftune.distributed.collectives import Collectives

NONE = 2**31
"""What a process needs that has computed everything: greater than the index of any unit."""


class OnDemand:
    """The units of a model that ``fully_shard`` has sharded, and the processes that compute with it."""

    def __init__(self, model: nn.Module, group: Collectives):
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.group = group
        self.stops = self.fails = False
        """Whether this process wants all of them to end early, and to compute again without this; after a round, whether any
        does. Equal on all after ``gathering``."""

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within ``with``: gather units as they are needed. Enter and leave it on all processes.

        It ends when all have computed everything. If there is an error, it ends at once: the others have to be told otherwise.
        """
        self.stops = self.fails = False
        root = self.units[0]
        root._get_fsdp_state()._lazy_init()  # or the first call of a part, such as an encoder, would make that the root
        self.release()
        root.unshard()  # its weights belong to no part that is called by itself
        root._is_fsdp_managed_module = False  # or transformers would have all processes generate equally many tokens
        hooks = [
            unit.register_forward_pre_hook(partial(self._before, index), prepend=True) for index, unit in enumerate(self.units)
        ]
        try:
            yield
            self.finish()
        finally:
            for hook in hooks:
                hook.remove()
            root._is_fsdp_managed_module = True
            self.release()

    def finish(self) -> None:
        """Take part in what the others need, until all have computed everything. Collective."""
        self._meet(NONE)

    def release(self) -> None:
        """Free what has been gathered. Local.

        FSDP keeps the weights of no block after a forward pass, for a backward pass. They would be used again after the shards
        have changed.
        """
        for unit in self.units:
            unit.reshard()

    def _before(self, index: int, unit: FSDPModule, args: Any) -> None:
        if not is_gathered(unit):
            self._meet(index)  # FSDP's own hook, which is next, takes part in the gather

    def _meet(self, needed: int) -> None:
        """Take part in what others need, until this process's turn has come."""
        while True:
            first, stops, fails = self.group.least([needed, -self.stops, -self.fails])
            self.stops, self.fails = bool(stops), bool(fails)
            self.group.progress.tick()
            if first == needed:
                return
            unit = self.units[first]
            in_use = is_gathered(unit)  # by a part of it, which waits for its own weights
            if (group := group_of(unit)) is not None:
                group._to_sharded()  # not reshard(), which may leave it gathered during a forward pass
            unit.unshard()
            if not in_use:
                unit.reshard()


def is_gathered(unit: FSDPModule) -> bool:
    return (group := group_of(unit)) is not None and group.is_unsharded


def group_of(unit: FSDPModule) -> Any:
    """Return FSDP's group of a unit's parameters; None if it has none of its own."""
    return unit._get_fsdp_state()._fsdp_param_group  # torch 2.11 has no _fsdp_param_groups; several need a shard_placement_fn
