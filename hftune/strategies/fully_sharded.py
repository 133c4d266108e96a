"""Every process holds a part of each weight, gradient and moment: FSDP2 through Accelerate.

Independent of epochs, metrics and files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from hftune.batch_plan import MicroBatch
from hftune.distributed.collectives import Collectives
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.models.kinds import is_linear
from hftune.models.stacks import outermost_lists
from hftune.optim.muon import Muon
from hftune.strategies.base import NOTHING_ASKED, Asks, StepBatch, Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.optimizer_state import check_optimizer
from hftune.strategies.seeds import seed_forward
from hftune.strategies.sharding import Piece, Sharding, put_together, start_equal
from hftune.strategies.whole_model import absent_model, materialize, meta_copy, tied_parameters
from hftune.task import Task


class FullySharded(DataParallel):
    """Compute what DataParallel computes, with weights, gradient and optimizer state sharded over the processes.

    The weights of a block are gathered when its forward or backward pass needs them, and freed after it; its gradient is
    reduced and scattered at once. A block is a member of an ``nn.ModuleList``, such as a transformer's layer; a model without
    any is gathered as a whole.

    - Each forward pass is collective. So all processes get equally many micro-batches of a step or an evaluation, dummies
      included, and of similar cost.
    - A task's ``predictions`` may use the model, as generation does, and not equally often on all processes. The first time
      that one does, the evaluation starts again, and this and all later ones run on a full copy: each process then holds all
      weights (float32) in addition to its shards, as under DDP.
    - Weights are gathered in float32, and autocast does what it does under DDP: the losses are the same. With
      ``train.fsdp_gather=bf16``, what autocast would round is rounded before it is sent: see ``gathered_in_bf16``.
    - ``build_model`` still builds the full model on every process, in host memory.
    """

    computes_alone = False  # it waits for the others at each block

    sharding: ShardedWeights

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None, gather: str = "float32"):
        super().__init__(accelerator, task, progress)
        # Autocast would keep every weight that it has rounded until the end of a forward pass: 2 bytes of each on each process.
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        self.sharding = ShardedWeights(accelerator, self, gather)
        self._absent = absent_model(lambda: setattr(self, "_asked_for_model", True))
        self._asked_for_model = self._needs_model = False
        """Whether the task has used the model in an evaluation: on this process, and on any."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().prepare(model, optimizer)
        self.model = self.sharding.meta_model

    def notices(self) -> list[str]:
        parameters, blocks = [*self.sharding.model.parameters()], self.sharding.blocks
        own, total = sum(part.to_local().numel() for part in parameters), sum(part.numel() for part in parameters)
        how = f"one {' or '.join(blocks)} at a time" if blocks else "all at once"
        how += ", linear layers in bf16" if self.sharding.gather_precision == "bf16" else ""
        return [f"FSDP: process {self.process_index} keeps {own:,} of {total:,} weights; they are gathered {how}."]

    fits = Strategy.fits  # a process that failed to compute would leave the others waiting

    def share(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Share in rounds of similar cost: the processes wait for each other in every block of every forward pass."""
        return sorted(micro_batches, key=lambda micro_batch: -micro_batch.cost)[self.process_index :: self.num_processes]

    def num_dummies(self, step: Sequence[MicroBatch], num_mine: int) -> int:
        return -(-len(step) // self.num_processes) - num_mine  # so that all processes have equally many forward passes

    def forward_backward(self, batch: StepBatch, seed: int, step: int, asks: Asks = NOTHING_ASKED) -> None:
        if self._statistics.places:
            self.sharding.share_statistics()  # as DDP does before the first forward pass of a step
        super().forward_backward(batch, seed, step, asks)

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        if not self._needs_model:
            part = self.assign(micro_batches)
            loaded = self.evaluated(dataset, part.mine, num_workers)
            with self._evaluating_shards():
                for micro_batch, weight in zip(part.mine, part.weights, strict=True):
                    if not self._all_go_on(should_stop()):
                        break
                    self.progress.samples(micro_batch.samples)
                    batch = send_to_device(next(loaded), self.device, non_blocking=True)
                    if weight:
                        seed_forward(0, 0, micro_batch.index, self.device)
                        yield micro_batch, batch
                    else:
                        self.forward(batch)
                else:
                    self._all_go_on(should_stop())
            if self._needs_model and self.is_main:
                name = type(self.task).__name__
                print(f"note: FSDP: {name} uses the model for its predictions. Evaluations gather it as a whole.", flush=True)
        if self._needs_model:
            yield from super().evaluation_batches(dataset, micro_batches, num_workers, should_stop)

    def _all_go_on(self, stop: bool) -> bool:
        """Return whether no process was asked to stop or needs the model, equal on all. Collective."""
        flags = torch.tensor([float(stop), float(self._asked_for_model)], device=self.device)
        num_stopped, num_asking = self.sum(flags).tolist()
        self._needs_model = num_asking > 0
        return num_stopped == num_asking == 0

    @contextmanager
    def _evaluating_shards(self) -> Iterator[None]:
        self.model = self._absent
        try:
            with super().evaluating():
                yield
        finally:
            # FSDP keeps the weights of no block after a forward pass, for a backward pass. They would be used again after the
            # shards have changed.
            for module in self.sharding.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            self.model = self.sharding.meta_model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.sharding.share_statistics()
        self.model = self.sharding.whole_copy().eval()
        try:
            yield
        finally:
            self.model = self.sharding.meta_model  # frees the weights

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if self.model is not self._absent:
            return super().forward(batch)
        with torch.no_grad():
            return self.sharding.wrapped(**self.evaluation_inputs(batch))


class ShardedWeights(Sharding):
    """Parameters, gradients and moments are DTensors, of which each process holds a slice; buffers are on every process."""

    meta_model: nn.Module
    """The full model without values."""
    is_spread = True
    blocks: list[str]
    """Names of the classes whose instances are gathered one at a time; empty: the model is gathered as a whole."""

    def __init__(self, accelerator: Accelerator, group: Collectives, gather: str = "float32"):
        super().__init__(accelerator, group)
        self.gather_precision = gather
        """``train.fsdp_gather``."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.accelerator.device, is_sharded=True)
        start_equal(model, self.group)
        self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, which prepare leaves to FSDP
        self.meta_model = meta_copy(model)
        if isinstance(optimizer, Muon):
            optimizer.whole, optimizer.part = self.whole, part_like
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False  # torch 2.13 has no fused step of SGD for DTensors, only one of Adam
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            # The classes of the members of outermost ModuleLists, but for those without submodules, and those that share a
            # weight: tied weights have to be gathered together. Not transformers' ``_no_split_modules``: BigBird has none, and
            # BERT's hold its embeddings, which Accelerate splits.
            tied, members = tied_parameters(model), [member for _, layers in outermost_lists(model) for member in layers]
            sharing = {type(member).__name__ for member in members if not tied.isdisjoint(member.parameters())}
            split = {type(member).__name__ for member in members if [*member.children()]}
            plugin.transformer_cls_names_to_wrap = sorted(split - sharing)
        self.blocks = plugin.transformer_cls_names_to_wrap if plugin.auto_wrap_policy else []
        blocks = [module for module in model.modules() if type(module).__name__ in self.blocks]
        in_bf16 = gathered_in_bf16(blocks) if self.gather_precision == "bf16" else nullcontext()
        with tied_weights_together(model), in_bf16:
            super().prepare(model, optimizer)
        # torch warns that a task may change the outputs in place, and so lose the hook on them that begins the backward pass.
        # The first block begins it as well; without blocks no weight would get a gradient, which is refused. Blocks return
        # views where training computes no padding; what comes after a block leaves them as they are.
        names = "|".join([type(self.model).__name__, *(f"FSDP{name}" for name in self.blocks)])
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(({names})\) returned a view tensor")

    def accumulating(self) -> AbstractContextManager:
        return nullcontext()  # FSDP's no_sync would keep the whole gradient on every process until the step's last micro-batch

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def pieces(self, group: Mapping[str, Tensor]) -> Iterator[Piece]:
        for name, value in group.items():
            if isinstance(value, DTensor):
                part = value.to_local()
                if part.numel() or self.group.is_main:
                    yield name, value.shape, first_row(value, value.device_mesh.get_local_rank()), part
            elif self.group.is_main:
                yield name, value.shape, 0, value

    def scatter(self, part: Tensor | None, whole: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        if not isinstance(part, DTensor):
            super().scatter(part, whole, shape, dtype)
            return
        own = part.to_local()
        if whole is None:
            if own.numel():
                received = torch.empty(own.shape, dtype=own.dtype, device=self.group.device)
                torch.distributed.recv(received, src=0)
                own.copy_(received)
            return
        for rank in range(self.group.num_processes):
            rows = whole[first_row(part, rank) : first_row(part, rank + 1)].to(self.group.device, own.dtype).contiguous()
            if rank == self.group.process_index:
                own.copy_(rows)
            elif rows.numel():
                torch.distributed.send(rows, dst=rank)

    def unwrap(self, folder: Path) -> nn.Module:
        names = dict(chain(self.meta_model.named_parameters(), self.meta_model.named_buffers()))
        live = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        return put_together(self, self.meta_model, {name: live[name].detach() for name in names}, folder)

    def whole_copy(self) -> nn.Module:
        """Return a plain model with the current weights on the device, on all processes. Collective.

        They are gathered one tensor at a time.
        """
        live = dict(chain(self.model.named_parameters(), self.model.named_buffers()))

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name, _ in chain(self.meta_model.named_parameters(), self.meta_model.named_buffers()):
                # A copy, as what was gathered from unequal slices is a view of something larger.
                yield name, self.whole(live[name].detach()).to(self.group.device, copy=True)

        return materialize(self.meta_model, gathered())


def first_row(value: DTensor, place: int) -> int:
    """Return the first row of a tensor that the process at a place has; all have equally many, but for the last ones."""
    return min(-(-value.shape[0] // value.device_mesh.size()) * place, value.shape[0])


def part_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return this process's part of a tensor that every process has, sharded like a different one. Local."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def gathered_in_bf16(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let Accelerate shard these blocks so that their linear layers are gathered in bfloat16, all else in float32.

    Autocast rounds weights and biases of linear layers to bfloat16, and their gradients come back in it. This only has it
    happen before the gather; FSDP adds the gradients up in float32, as ever. The other modules of a block, such as norms, get
    units of their own, as a unit has one precision. A block that holds parameters in any other way stays float32.

    Raises:
        ConfigError: no block can be gathered like this.
    """
    split = {block: parts for block in blocks if (parts := float32_parts(block)) is not None}
    if not split:
        raise ConfigError("train.fsdp_gather=bf16: this model has no blocks with linear layers. Set train.fsdp_gather=float32.")
    shard = torch.distributed.fsdp.fully_shard
    # Autocast converts the inputs of the linear layers; other modules may need theirs as they are.
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def shard_in_parts(module: Any, **options: Any) -> Any:
        if isinstance(module, nn.Module) and module in split:
            for part in split[module]:
                shard(part, **options)
            options["mp_policy"] = policy
        return shard(module, **options)

    torch.distributed.fsdp.fully_shard = shard_in_parts  # Accelerate 1.15 has one policy for all units
    try:
        yield
    finally:
        torch.distributed.fsdp.fully_shard = shard


def float32_parts(block: nn.Module) -> list[nn.Module] | None:
    """Return a block's modules with parameters that are not linear layers.

    None if the block has no linear layer, or if one of these modules contains others: they would share its unit.
    """
    owners = [module for module in block.modules() if [*module.parameters(recurse=False)]]
    parts = [module for module in owners if not is_linear(module)]
    if len(parts) == len(owners) or any([*child.parameters()] for part in parts for child in part.children()):
        return None
    return parts


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
