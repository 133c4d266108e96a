"""Every process keeps a part of each weight, gradient and moment: FSDP2 through Accelerate. Knows no epoch, metric or file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hftune.batch_plan import MicroBatch
from hftune.strategies.base import StepBatch, StepReport
from hftune.strategies.data_parallel import DataParallel, stand_in, start_equal
from hftune.strategies.meta_model import filled_copy, hollow_copy, shared_weights
from hftune.strategies.optimizer_state import check_optimizer, options_of
from hftune.strategies.pipeline_stages import outermost_lists


class FullySharded(DataParallel):
    """Compute what DataParallel computes, with weights, gradients and optimizer dealt out to the processes.

    The weights of a block are gathered when its forward or backward needs them, and let go after it; its gradient is summed
    and dealt out at once. A block is a member of an ``nn.ModuleList``, such as a transformer's layer; a model without is
    gathered as a whole.

    - Each forward pass is collective. So all processes get as many micro-batches of a step as each other, stand-ins included,
      and of like cost. Evaluations, whose passes differ in number and length, run on a whole copy: each process then holds all
      weights (float32) beside its parts, as under DDP.
    - Weights are gathered in float32, and autocast does what it does under DDP: the same losses. FSDP's own
      MixedPrecisionPolicy would send half as much, with embeddings, norms and sums in bfloat16, too (yelp_demo's first loss is
      then off by 8e-5, and by less than 1e-7 so).
    - ``build_model`` still makes a whole model on every process, on the host.
    """

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        start_equal(model, self.device)
        self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, which prepare leaves to FSDP
        self._hollow = self.model = hollow_copy(model)
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False  # torch 2.13 has no fused step of SGD for parts of weights, only one of Adam
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = block_classes(model)
        self._blocks = plugin.transformer_cls_names_to_wrap if plugin.auto_wrap_policy else []
        super().prepare(model, optimizer)
        self.model = self._hollow
        # torch fears that a task changes the outputs in place, and so loses the hook on them that begins the backward pass. The
        # first block begins it as well; without blocks no weight would get a gradient, which is refused.
        name = type(self._inner).__name__
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, is_sharded=True)
        self._options = options_of(optimizer)

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        with tied_weights_together(model):
            return super()._wrap(model, optimizer)

    def notices(self) -> list[str]:
        parameters = list(self._inner.parameters())
        own, all_of_them = sum(part.to_local().numel() for part in parameters), sum(part.numel() for part in parameters)
        how = f"one {' or '.join(self._blocks)} at a time" if self._blocks else "all at once"
        return [f"FSDP: process {self.process_index} keeps {own:,} of {all_of_them:,} weights; they are gathered {how}."]

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        raise NotImplementedError("a process that fails here leaves the others waiting; check_launcher refuses auto under FSDP")

    def _deal(self, step: list[MicroBatch]) -> StepBatch:
        """Deal in rounds of like cost: the processes wait for each other in every block of every forward pass."""
        by_cost = sorted(step, key=lambda micro_batch: -micro_batch.cost)
        mine = by_cost[self.process_index :: self.num_processes]
        num_missing = -(-len(step) // self.num_processes) - len(mine)
        return StepBatch(step, [*mine, *[stand_in(step)] * num_missing], [1] * len(mine) + [0] * num_missing)

    def _between(self) -> AbstractContextManager:
        return nullcontext()  # FSDP's no_sync would keep the whole gradient on every process until the step's last micro-batch

    def forward_backward(self, batch: StepBatch, seed: int, step: int, stop: bool = False) -> StepReport:
        self._share_statistics()  # as DDP does before the first forward pass of a step
        return super().forward_backward(batch, seed, step, stop)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._share_statistics()
        self.model = self._whole_copy(self.device, everywhere=True).eval()
        try:
            yield
        finally:
            self.model = self._hollow  # lets the weights go

    def unwrap(self) -> nn.Module:
        return self._whole_copy(torch.device("cpu"), everywhere=False)

    def _whole_copy(self, device: torch.device, everywhere: bool) -> nn.Module:
        """Return a plain model with the present weights, on all processes or on the main one alone. Collective.

        They are gathered one tensor at a time, so that the other processes never hold more than one.
        """
        live = dict(chain(self._inner.named_parameters(), self._inner.named_buffers()))

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name, _ in chain(self._hollow.named_parameters(), self._hollow.named_buffers()):
                value = self._whole(live[name].detach())
                if everywhere or self.is_main:
                    yield (
                        name,
                        value.to(device, copy=True),
                    )  # what was gathered from unequal parts is a slice of something larger

        return filled_copy(self._hollow, gathered())

    def _whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _receive(self, value: Tensor, saved: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        if not isinstance(value, DTensor):
            super()._receive(value, saved, shape, dtype)
            return
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        super()._receive(whole, saved, shape, dtype)
        value.copy_(distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None))


def block_classes(model: nn.Module) -> list[str]:
    """Return the names of the classes to gather one module at a time: those of the members of outermost ModuleLists.

    Not transformers' ``_no_split_modules``: BigBird has none, and BERT's hold its embeddings, which Accelerate splits.
    Left out are members without parts, and those that share a weight: what is shared has to be gathered together.
    """
    shared, members = shared_weights(model), [member for _, members in outermost_lists(model) for member in members]
    names = {type(member).__name__ for member in members if [*member.children()]}
    return sorted(names - {type(member).__name__ for member in members if not shared.isdisjoint(member.parameters())})


@contextmanager
def tied_weights_together(model: nn.Module) -> Iterator[None]:
    """Keep Accelerate from gathering embeddings and head on their own where weights are tied.

    Accelerate 1.15 (fsdp2_prepare_model) puts the two that a transformers model names into one unit, but not what else shares
    them: the bias of BERT's head, or the embeddings of a decoder. torch refuses that.
    """
    hidden = ("get_input_embeddings", "get_output_embeddings") if shared_weights(model) else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)
