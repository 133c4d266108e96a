"""Every process holds a part of each weight, gradient and moment: FSDP2 through Accelerate.

Independent of epochs, metrics and files.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hftune.batch_plan import MicroBatch
from hftune.distributed.collectives import Collectives
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.models.adapters import raise_precision
from hftune.models.kinds import is_linear
from hftune.models.stacks import outermost_lists
from hftune.models.weights import weights_digest
from hftune.optim.muon import Muon
from hftune.strategies.averages import part_here
from hftune.strategies.base import Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.on_demand import OnDemand
from hftune.strategies.optimizer_state import check_optimizer, options_of
from hftune.strategies.packing import told_of_padding
from hftune.strategies.sharding import Piece, Sharding, start_equal
from hftune.strategies.whole_model import absent_model, materialize, meta_copy, tied_parameters
from hftune.task import Task

if TYPE_CHECKING:
    from hftune.models.unread import Unread


class FullySharded(DataParallel):
    """Compute what DataParallel computes, with weights, gradient and optimizer state sharded over the processes.

    The weights of a block are gathered when its forward or backward pass needs them, and freed after it; its gradient is
    reduced and scattered at once. A block is a member of an ``nn.ModuleList``, such as a transformer's layer; a model without
    any is gathered as a whole.

    - Each forward pass of a step is collective. So all processes get equally many micro-batches, dummies included, and of
      similar cost.
    - In an evaluation, processes need not compute equally much, nor generate texts of equal lengths: see ``OnDemand``. A task
      of one's own may also use the model otherwise than by calling it. The first time that it does, the evaluation starts
      again, and this and all later ones run on a full copy: each process then holds all weights (float32) in addition to its
      shards, as under DDP.
    - Weights are gathered in float32, and autocast does what it does under DDP: the losses are the same. With
      ``train.fsdp_gather=bf16``, what autocast would round is rounded before it is sent: see ``gathered_in_bf16``.
    - Of a pretrained model, each process reads its own parts from the files, if ``build.may_leave_weights``. Any other model is
      built as a whole by each process, in host memory.
    """

    computes_alone = False  # it waits for the others at each block

    sharding: ShardedWeights

    def __init__(
        self,
        accelerator: Accelerator,
        task: Task,
        progress: Progress | None = None,
        gather: str = "float32",
        replicas: int = 1,
        context: int = 1,
    ):
        super().__init__(accelerator, task, progress, context)
        # Autocast would keep every weight that it has rounded until the end of a forward pass: 2 bytes of each on each process.
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        self.sharding = ShardedWeights(accelerator, self, gather, replicas)
        self._needs_model = False
        """Whether the task has used the model in an evaluation, on any process, in other ways than calling it."""

    def tried(self, model: nn.Module, trial: Callable[[nn.Module], Any]) -> Any:
        if not vars(model).get("unread"):  # each process has all of it
            return super().tried(model, trial)
        found = trial(self.sharding.copy_for_trial(model))  # by all, for the weights are gathered in it
        gc.collect()  # of the copy, some may still be gathered
        return self.broadcast(found)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().prepare(model, optimizer)
        self.model = self.sharding.meta_model
        self._on_demand = OnDemand(self.sharding.model, self)
        lent = absent_model(lambda: setattr(self._on_demand, "fails", True), self.sharding.model)
        self._lent = self.sharding.model if is_ours(self.task, "predictions", "sample_images") else lent
        """What the task is given in an evaluation. Its author may not know that only calls make weights whole."""

    def notices(self) -> list[str]:
        parameters, blocks = [*self.sharding.model.parameters()], self.sharding.blocks
        own, total = sum(part.to_local().numel() for part in parameters), sum(part.numel() for part in parameters)
        how = f"one {' or '.join(blocks)} at a time" if blocks else "all at once"
        how += ", linear layers in bf16" if self.sharding.gather_precision == "bf16" else ""
        fsdp = [f"FSDP: process {self.process_index} keeps {own:,} of {total:,} weights; they are gathered {how}."]
        return [*super().notices(), *fsdp]

    fits = Strategy.fits  # a process that failed to compute would leave the others waiting

    def share(self, micro_batches: Sequence[MicroBatch], together: int = 1) -> list[MicroBatch]:
        """Share in rounds of similar cost: the processes wait for each other in every block of every forward pass."""
        ordered = sorted(micro_batches, key=lambda micro_batch: -micro_batch.cost)
        return ordered[self.dp_rank // together :: self.dp_size // together]

    def num_dummies(self, step: Sequence[MicroBatch], num_mine: int, num_shares: int) -> int:
        return -(-len(step) // num_shares) - num_mine  # so that all processes have equally many forward passes

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor], float]]:
        def ends() -> bool:
            self._on_demand.stops |= should_stop()
            return self._on_demand.stops or self._on_demand.fails

        if not self._needs_model:
            yield from super().evaluation_batches(dataset, micro_batches, num_workers, ends)
            self._needs_model = self._on_demand.fails
            if self._needs_model:
                self._say(f"FSDP: {type(self.task).__name__} reads the model itself. Evaluations gather it as a whole.")
        if self._needs_model:
            yield from super().evaluation_batches(dataset, micro_batches, num_workers, should_stop)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            if self._needs_model:
                self.sharding.share_statistics()
                self.model = self.sharding.whole_copy().eval()
                yield
            else:
                self.model = self._lent
                with super().evaluating(), self._on_demand.gathering():
                    yield
        finally:
            self.model = self.sharding.meta_model  # frees the weights of a copy

    def _say(self, sentence: str) -> None:
        if self.is_main:
            print(f"note: {sentence}", flush=True)

    @contextmanager
    def predicting(self, model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
        if is_ours(self.task, "predict"):
            self.prepare(model, torch.optim.SGD(model.parameters()))
            self._say(self.notices()[0])
            with self.evaluating():
                yield self.sharding.model, self._on_demand.finish
        else:
            self._say(f"FSDP: {type(self.task).__name__}.predict is your own: each process has the whole model for it.")
            with super().predicting(model) as whole:
                yield whole

    def forward(self, batch: dict[str, Tensor]) -> Any:
        with torch.no_grad(), told_of_padding(self._padding):
            return (self.model if self._needs_model else self.sharding.model)(**self.evaluation_inputs(batch))


def is_ours(task: Task, *methods: str) -> bool:
    """Say whether a task has these methods from a class of hftune's."""
    kinds = type(task).__mro__
    found = (next((kind for kind in kinds if method in vars(kind)), Task) for method in methods)
    return all(kind.__module__.startswith("hftune.") for kind in found)


class ShardedWeights(Sharding):
    """Parameters, gradients and moments are DTensors, of which each process holds a slice; buffers are on every process."""

    meta_model: nn.Module
    """The full model without values."""
    is_spread = True
    blocks: list[str]
    """Names of the classes whose instances are gathered one at a time; empty: the model is gathered as a whole."""

    def __init__(self, accelerator: Accelerator, group: Collectives, gather: str = "float32", replicas: int = 1):
        super().__init__(accelerator, group)
        self.gather_precision = gather
        """``train.fsdp_gather``."""
        self.replicas = replicas
        """``parallel.replicas``: the processes of a replica are neighbours."""
        self._mesh: DeviceMesh | None = None
        self._parts: dict[str, Tensor] = {}
        """What this process has read, until ``prepare`` is done with it."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.accelerator.device, is_sharded=True)
        self.initial_options = options_of(optimizer)
        self.wrapped = self.model = self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast
        unread = vars(model).pop("unread", {})
        self.meta_model = meta_copy(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        named = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:  # the whole parameters are freed one after the other
            group["params"] = []
        del names
        self._shard(model, unread)
        self._parts.clear()
        parts = self.parameters()
        for group, own in zip(optimizer.param_groups, named, strict=True):
            group["params"] = [parts[name] for name in own]
        if isinstance(optimizer, Muon):
            optimizer.whole, optimizer.part = self.whole, part_like
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["fused"] = False  # torch 2.13 has no fused step of SGD for DTensors, only one of Adam
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    def copy_for_trial(self, model: nn.Module) -> nn.Module:
        """Return a sharded copy of a model whose weights are in files, which a failed forward pass may spoil. Collective."""
        unread = model.unread
        copy = deepcopy(model, {id(unread): {}})
        self._shard(copy, unread)
        return copy

    def _shard(self, model: nn.Module, unread: Mapping[str, Unread]) -> None:
        """Keep this process's part of a model, with the main process's weights or those in the files. Collective.

        Raises:
            ConfigError: ``train.fsdp_gather=bf16`` fits no block of the model.
        """
        start_equal(model, self.group)
        if unread and not self._parts:
            self._compare_files(unread)
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.transformer_cls_names_to_wrap is None:
            # The classes of the members of outermost ModuleLists, but for those without submodules, and those that share a
            # weight: tied weights have to be gathered together. Not transformers' ``_no_split_modules``: BigBird has none, and
            # BERT's hold its embeddings.
            tied, members = tied_parameters(model), [member for _, layers in outermost_lists(model) for member in layers]
            sharing = {type(member).__name__ for member in members if not tied.isdisjoint(member.parameters())}
            split = {type(member).__name__ for member in members if [*member.children()]}
            plugin.transformer_cls_names_to_wrap = sorted(split - sharing)
        self.blocks = plugin.transformer_cls_names_to_wrap if plugin.auto_wrap_policy else []
        # torch warns that a task may change the outputs in place, and so lose the hook on them that begins the backward pass.
        # The first block begins it as well; without blocks no weight would get a gradient, which is refused. Blocks return
        # views where training computes no padding; what comes after a block leaves them as they are.
        names = "|".join(f"FSDP{name}" for name in (type(model).__name__, *self.blocks))
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(({names})\) returned a view tensor")
        if self.accelerator.mixed_precision != "no":
            raise_precision(model)  # what a unit trains has one precision
        is_block = fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda module: False)
        blocks = [module for module in [*model.modules()][:0:-1] if is_block(module)]  # inner ones first
        options = {"reshard_after_forward": plugin.reshard_after_forward, "mp_policy": plugin.mixed_precision_policy}
        if self.replicas > 1:
            if self._mesh is None:
                grid = (self.replicas, self.group.num_processes // self.replicas)
                self._mesh = init_device_mesh(self.group.device.type, grid, mesh_dim_names=("replica", "shard"))
            options["mesh"] = self._mesh
        shard_in_units(model, blocks, self.gather_precision == "bf16", **options)
        named = chain(model.named_parameters(), model.named_buffers())
        names_of = {id(value): name for name, value in named if value.is_meta}

        def part(value: Tensor) -> Tensor:
            if not value.is_meta:
                return value
            name = names_of[id(value)]
            if name not in self._parts:
                self._parts[name] = read_part(unread[name], value, self.group.device)
            return self._parts[name]

        if names_of:
            model._apply(part)  # FSDP notices it, and tied weights stay tied

    def _compare_files(self, unread: Mapping[str, Unread]) -> None:
        """Make sure that all processes read the same model, by the first row of each matrix. Collective.

        Raises:
            ConfigError: a folder of the same name holds different weights elsewhere.
        """
        rows = ((name, value.read(slice(1))) for name, value in unread.items() if value.ndim < 3)
        digest = weights_digest((f"{name} of {tuple(unread[name].shape)}", row) for name, row in rows)
        if self.group.any_process(digest != self.group.broadcast(digest)):
            raise ConfigError("task.model: this folder has different weights on different machines. Copy it from one to all.")

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        # FSDP's no_sync would keep the whole gradient on every process until the step's last micro-batch. Only what replicas
        # add up waits for it.
        self.wrapped.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self.wrapped.set_requires_all_reduce(True)

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def pieces(self, group: Mapping[str, Tensor]) -> Iterator[Piece]:
        for name, value in group.items():
            if isinstance(value, DTensor):
                part, place = value.to_local(), place_of(value)
                if (part.numel() and place == self.group.process_index) or self.group.is_main:  # in the first replica
                    yield name, value.shape, first_row(value, place), part
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
            place = rank % part.device_mesh.size(-1)
            rows = whole[first_row(part, place) : first_row(part, place + 1)].to(self.group.device, own.dtype).contiguous()
            if rank == self.group.process_index:
                own.copy_(rows)
            elif rows.numel():
                torch.distributed.send(rows, dst=rank)

    def unwrap(self, folder: Path) -> nn.Module:
        names = dict(chain(self.meta_model.named_parameters(), self.meta_model.named_buffers()))
        live = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        return self.put_together(self.meta_model, {name: live[name].detach() for name in names}, folder)

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


def place_of(value: DTensor) -> int:
    """Return the place of this process among those that have all of a tensor between them."""
    return value.device_mesh.get_local_rank(value.device_mesh.ndim - 1)


def first_row(value: DTensor, place: int) -> int:
    """Return the first row of a tensor that the process at a place has; all have equally many, but for the last ones."""
    return min(-(-value.shape[0] // value.device_mesh.size(-1)) * place, value.shape[0])


def part_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return this process's part of a tensor that every process has, sharded like a different one. Local."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def read_part(source: Unread, like: Tensor, device: torch.device) -> Tensor:
    """Read this process's part of a tensor, sharded like one on the meta device. Local."""
    part, rows = torch.empty_like(part_here(like), device=device), slice(None)
    if isinstance(like, DTensor):
        start = first_row(like, place_of(like))
        rows = slice(start, start + len(part))
    if part.numel():
        part.copy_(source.read(rows))
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def shard_in_units(model: nn.Module, blocks: Sequence[nn.Module], in_bf16: bool, **options: Any) -> None:
    """Shard a model in place, in units that are gathered at once: blocks, embeddings, the head, and all the rest.

    With ``in_bf16``, linear layers of blocks are gathered in bfloat16, all else in float32. Autocast rounds weights and biases
    of linear layers to bfloat16, and their gradients come back in it. This only has it happen before the gather; FSDP adds the
    gradients up in float32, as ever. The other modules of a block, such as norms, get units of their own, as a unit has one
    precision. A block that holds parameters in any other way stays float32.

    Args:
        options: of ``fully_shard``.

    Raises:
        ConfigError: no block can be gathered in bfloat16.
    """
    split = {block: parts for block in blocks if in_bf16 and (parts := float32_parts(block)) is not None}
    if in_bf16 and not split:
        raise ConfigError("train.fsdp_gather=bf16: this model has no blocks with linear layers. Set train.fsdp_gather=float32.")
    # Autocast converts the inputs of the linear layers; other modules may need theirs as they are.
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        for part in split.get(block, ()):
            fully_shard(part, **options)
        fully_shard(block, **options | ({"mp_policy": bf16} if block in split else {}))
    tied = tied_parameters(model)
    for name, kept in (("get_input_embeddings", {}), ("get_output_embeddings", {"reshard_after_forward": False})):
        module = None
        with suppress(NotImplementedError):  # such as those of SegFormer, and of models of speech
            module = getattr(model, name, lambda: None)()
        # Tied weights have to be in one unit with all that shares them. A head's backward pass follows its forward pass.
        if module is not None and not isinstance(module, FSDPModule) and tied.isdisjoint(module.parameters()):
            fully_shard(module, **options | kept)
    fully_shard(model, **{key: value for key, value in options.items() if key != "reshard_after_forward"})


def float32_parts(block: nn.Module) -> list[nn.Module] | None:
    """Return a block's modules with parameters that are not linear layers.

    None if the block has no linear layer, or if one of these modules contains others: they would share its unit.
    """
    owners = [module for module in block.modules() if [*module.parameters(recurse=False)]]
    parts = [module for module in owners if not is_linear(module)]
    if len(parts) == len(owners) or any([*child.parameters()] for part in parts for child in part.children()):
        return None
    return parts
