"""Every process holds a part of each weight, gradient and moment: FSDP2 through Accelerate.

Independent of epochs, metrics and files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hftune.batch_plan import MicroBatch
from hftune.distributed.progress import Progress
from hftune.strategies.base import StepBatch, dummy_micro_batch
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.meta_model import materialize, meta_copy, tied_parameters
from hftune.strategies.optimizer_state import check_optimizer
from hftune.strategies.pipeline_stages import outermost_lists
from hftune.strategies.sharding import Replicated, start_equal
from hftune.task import Task


class FullySharded(DataParallel):
    """Compute what DataParallel computes, with weights, gradient and optimizer state sharded over the processes.

    The weights of a block are gathered when its forward or backward pass needs them, and freed after it; its gradient is
    reduced and scattered at once. A block is a member of an ``nn.ModuleList``, such as a transformer's layer; a model without
    any is gathered as a whole.

    - Each forward pass is collective. So all processes get equally many micro-batches of a step, dummies included, and of
      similar cost. Evaluations, whose passes differ in number and length, run on a full copy: each process then holds all
      weights (float32) in addition to its shards, as under DDP.
    - Weights are gathered in float32, and autocast does what it does under DDP: the losses are the same. FSDP's own
      MixedPrecisionPolicy would send half as much, but also keep embeddings, norms and sums in bfloat16 (yelp_demo's first
      loss is then off by 8e-5; this way by less than 1e-7).
    - ``build_model`` still builds the full model on every process, in host memory.
    """

    computes_alone = False  # it waits for the others at each block

    sharding: ShardedWeights

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None):
        super().__init__(accelerator, task, progress)
        self.sharding = ShardedWeights(accelerator, self)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().prepare(model, optimizer)
        self.model = self.sharding.meta_model

    def notices(self) -> list[str]:
        parameters, blocks = [*self.sharding.model.parameters()], self.sharding.blocks
        own, total = sum(part.to_local().numel() for part in parameters), sum(part.numel() for part in parameters)
        how = f"one {' or '.join(blocks)} at a time" if blocks else "all at once"
        return [f"FSDP: process {self.process_index} keeps {own:,} of {total:,} weights; they are gathered {how}."]

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        raise NotImplementedError("a process that fails here leaves the others waiting; check_launcher refuses auto under FSDP")

    def assign(self, step: list[MicroBatch]) -> StepBatch:
        """Assign in rounds of similar cost: the processes wait for each other in every block of every forward pass."""
        by_cost = sorted(step, key=lambda micro_batch: -micro_batch.cost)
        mine = by_cost[self.process_index :: self.num_processes]
        num_missing = -(-len(step) // self.num_processes) - len(mine)
        return StepBatch(step, [*mine, *[dummy_micro_batch(step)] * num_missing], [1] * len(mine) + [0] * num_missing)

    def forward_backward(self, batch: StepBatch, seed: int, step: int, stop: bool = False) -> None:
        if self._statistics.places:
            self.sharding.share_statistics()  # as DDP does before the first forward pass of a step
        super().forward_backward(batch, seed, step, stop)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.sharding.share_statistics()
        self.model = self.sharding.whole_copy(self.device, everywhere=True).eval()
        try:
            yield
        finally:
            self.model = self.sharding.meta_model  # frees the weights


class ShardedWeights(Replicated):
    """Parameters, gradients and moments are DTensors, of which each process holds a slice; buffers are on every process."""

    meta_model: nn.Module
    """The full model without values."""
    blocks: list[str]
    """Names of the classes whose instances are gathered one at a time; empty: the model is gathered as a whole."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.accelerator.device, is_sharded=True)
        start_equal(model, self.group)
        self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, which prepare leaves to FSDP
        self.meta_model = meta_copy(model)
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False  # torch 2.13 has no fused step of SGD for DTensors, only one of Adam
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = block_classes(model)
        self.blocks = plugin.transformer_cls_names_to_wrap if plugin.auto_wrap_policy else []
        with tied_weights_together(model):
            super().prepare(model, optimizer)
        # torch warns that a task may change the outputs in place, and so lose the hook on them that begins the backward pass.
        # The first block begins it as well; without blocks no weight would get a gradient, which is refused.
        name = type(self.model).__name__
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")

    def accumulating(self) -> AbstractContextManager:
        return nullcontext()  # FSDP's no_sync would keep the whole gradient on every process until the step's last micro-batch

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def scatter(self, part: Tensor | None, whole: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        if not isinstance(part, DTensor):
            super().scatter(part, whole, shape, dtype)
            return
        everything = torch.empty(shape, dtype=dtype, device=self.group.device)
        super().scatter(everything, whole, shape, dtype)
        part.copy_(distribute_tensor(everything, part.device_mesh, part.placements, src_data_rank=None))

    def unwrap(self) -> nn.Module:
        return self.whole_copy(torch.device("cpu"), everywhere=False)

    def whole_copy(self, device: torch.device, everywhere: bool) -> nn.Module:
        """Return a plain model with the current weights, on all processes or on the main one alone. Collective.

        They are gathered one tensor at a time, so that the other processes never hold more than one.
        """
        live = dict(chain(self.model.named_parameters(), self.model.named_buffers()))

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name, _ in chain(self.meta_model.named_parameters(), self.meta_model.named_buffers()):
                value = self.whole(live[name].detach())
                if everywhere or self.group.is_main:
                    # A copy, as what was gathered from unequal slices is a view of something larger.
                    yield name, value.to(device, copy=True)

        return materialize(self.meta_model, gathered())


def block_classes(model: nn.Module) -> list[str]:
    """Return the names of the classes to gather one module at a time: those of the members of outermost ModuleLists.

    Not transformers' ``_no_split_modules``: BigBird has none, and BERT's hold its embeddings, which Accelerate splits.
    Members without submodules are left out, and those that share a weight: tied weights have to be gathered together.
    """
    tied, members = tied_parameters(model), [member for _, members in outermost_lists(model) for member in members]
    names = {type(member).__name__ for member in members if [*member.children()]}
    return sorted(names - {type(member).__name__ for member in members if not tied.isdisjoint(member.parameters())})


@contextmanager
def tied_weights_together(model: nn.Module) -> Iterator[None]:
    """Keep Accelerate from gathering embeddings and head separately if weights are tied.

    Accelerate 1.15 (fsdp2_prepare_model) puts the two that a transformers model names into one unit, but not what else shares
    them: the bias of BERT's head, or the embeddings of a decoder. torch refuses that.
    """
    hidden = ("get_input_embeddings", "get_output_embeddings") if tied_parameters(model) else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)
