"""Every process holds some stages of a model: which tensors these are, and how they are moved. Independent of steps and files.

The processes form a grid of (dp_rank, pp_rank): the processes of one pipeline are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from hftune.config.sections import ParallelConfig
from hftune.distributed.collectives import Collectives
from hftune.strategies.optimizer_state import check_optimizer, options_of
from hftune.strategies.pipeline_stages import cut
from hftune.strategies.sharding import Piece, Sharding, Tensors, fill_gradients, moments, start_equal
from hftune.strategies.whole_model import meta_copy

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of gradients that replicas sum in one all-reduce, as DDP does by default."""


@dataclass(frozen=True)
class Grid:
    """Where this process is among pipelines that train beside each other."""

    dp_rank: int
    """Of its pipeline."""
    dp_size: int
    pp_rank: int
    """Of this process in its pipeline."""
    pp_size: int
    replicas: ProcessGroup
    """The processes that hold the same stages."""
    pipeline: ProcessGroup

    @classmethod
    def create(cls, device: torch.device, num_processes: int, pp_size: int) -> Grid:
        """Arrange all processes in pipelines of ``pp_size``. Collective."""
        dp_size = num_processes // pp_size
        mesh = init_device_mesh(device.type, (dp_size, pp_size), mesh_dim_names=("dp", "pp"))
        dp_rank, pp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        return cls(dp_rank, dp_size, pp_rank, pp_size, mesh.get_group("dp"), mesh.get_group("pp"))

    def rank_of(self, dp_rank: int, pp_rank: int) -> int:
        return dp_rank * self.pp_size + pp_rank


class StagedWeights(Sharding):
    """Each process holds the parameters, gradients, moments and buffers of its stages, and no others."""

    meta_model: nn.Module
    """The full model without values."""
    modules: dict[int, nn.Module]
    """The stages of this process, by index."""
    stage_sizes: list[int]
    """Parameters of each stage."""
    is_spread = True

    def __init__(self, accelerator: Accelerator, group: Collectives, config: ParallelConfig, grid: Grid):
        super().__init__(accelerator, group)
        self.config, self.grid = config, grid

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.accelerator.device, is_staged=True)
        start_equal(model, self.group)
        self.meta_model = meta_copy(model)
        stages = cut(model, self.config.num_stages, self.config.split)
        self._locate(model, stages)
        # Free the parameters of other processes' stages, in model and optimizer.
        own = {*self.parameters().values()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for parameter in [parameter for parameter in optimizer.state if parameter not in own]:  # made when it was built
            del optimizer.state[parameter]
        self.initial_options = options_of(optimizer)
        for parameter in model.parameters():
            if parameter not in own:
                parameter.data = parameter.new_empty(0)
        self.modules = {index: stages[index] for index in range(self.grid.pp_rank, len(stages), self.grid.pp_size)}
        for stage in self.modules.values():
            stage.to(self.group.device)
        self.model = self.wrapped = nn.ModuleDict({str(index): stage for index, stage in self.modules.items()})
        self.optimizer = optimizer
        self._tied = self._groups_of_ties()

    def _locate(self, model: nn.Module, stages: Sequence[nn.Module]) -> None:
        """Note who holds the parameters and buffers of the whole model, and where those of this process are."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        persistent = model.state_dict(keep_vars=True)
        names |= {id(buffer): name for name, buffer in model.named_buffers() if name in persistent}
        self.stage_sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
        self._owners: dict[str, list[int]] = {}  # pp_ranks
        self._own: dict[str, tuple[nn.Module, str]] = {}  # module and key, as moving a module may replace its buffers
        for index, stage in enumerate(stages):
            for module in stage.modules():
                own = {"recurse": False, "remove_duplicate": False}
                for key, value in chain(module.named_parameters(**own), module.named_buffers(**own)):
                    if (name := names.get(id(value))) is None:
                        continue
                    pp_rank = index % self.grid.pp_size
                    owners = self._owners.setdefault(name, [])
                    if pp_rank not in owners:
                        owners.append(pp_rank)
                    if pp_rank == self.grid.pp_rank:
                        self._own[name] = module, key

    def _groups_of_ties(self) -> dict[str, ProcessGroup]:
        """Create a group of the processes of each pipeline that share a parameter; return this process's, by parameter."""
        groups = {}
        for pp_ranks in sorted({tuple(owners) for owners in self._owners.values() if len(owners) > 1}):
            for dp_rank in range(self.grid.dp_size):
                group = torch.distributed.new_group([self.grid.rank_of(dp_rank, pp_rank) for pp_rank in pp_ranks])
                if dp_rank == self.grid.dp_rank and self.grid.pp_rank in pp_ranks:
                    groups[pp_ranks] = group
        tied = {name: groups.get(tuple(owners)) for name, owners in sorted(self._owners.items()) if len(owners) > 1}
        return {name: group for name, group in tied.items() if group is not None and name in self.parameters()}

    def parameters(self) -> dict[str, nn.Parameter]:
        held = {name: getattr(*place) for name, place in self._own.items()}
        return {name: value for name, value in held.items() if isinstance(value, nn.Parameter)}

    def tensors(self) -> Tensors:
        return {
            "model": {name: getattr(*place).detach() for name, place in self._own.items()},
            "optimizer": moments(self.parameters(), self.bare_optimizer),
        }

    def plain_state(self) -> dict[str, Any]:
        own = {key: value for key, value in super().plain_state().items() if self.is_first_owner(key.rpartition("/")[0])}
        listed = self.group.gather_to_main([own] if self.grid.dp_rank == 0 else [])
        return {key: value for part in listed or [] for key, value in part.items()}

    def expected(self) -> Mapping[str, Tensor]:
        whole = dict(self.meta_model.named_parameters()) | dict(self.meta_model.named_buffers())
        return {name: whole[name] for name in self._owners}

    def pieces(self, group: Mapping[str, Tensor]) -> Iterator[Piece]:
        if self.grid.dp_rank == 0:
            for name, value in group.items():
                if self.is_first_owner(name.rpartition("/")[0] or name):
                    yield name, value.shape, 0, value

    def scatter(self, part: Tensor | None, whole: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        value = torch.empty(shape, dtype=dtype, device=self.group.device)
        if whole is not None:
            value.copy_(whole)
        self.group.broadcast_tensor(value)
        if part is not None:
            part.copy_(value)

    def share_statistics(self) -> None:
        for place in self._own.values():
            value = getattr(*place)
            if not isinstance(value, nn.Parameter) and value.is_floating_point():
                # From the process of the first pipeline, whose rank among all is its pp_rank.
                torch.distributed.broadcast(value, src=self.grid.pp_rank, group=self.grid.replicas)

    def unwrap(self, folder: Path) -> nn.Module:
        return self.put_together(self.meta_model, self.tensors()["model"], folder)

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        """Add up a tensor in place over the processes that hold the same stages; return it. Collective over these."""
        torch.distributed.all_reduce(value, group=self.grid.replicas)
        return value

    def sum_gradients(self) -> None:
        """Sum the gradients over the replicas; then those of tied parameters over the stages that have them. Collective."""
        parameters = self.parameters()
        fill_gradients(parameters.values())
        if self.grid.dp_size > 1:
            for bucket in buckets([value.grad for value in parameters.values() if value.grad is not None], BUCKET_BYTES):
                summed = self.sum_over_replicas(torch.cat([gradient.flatten() for gradient in bucket]))
                for gradient, part in zip(bucket, summed.split([value.numel() for value in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        for name, group in self._tied.items():
            if parameters[name].grad is not None:
                torch.distributed.all_reduce(parameters[name].grad, group=group)

    def is_first_owner(self, name: str) -> bool:
        """Say whether this process counts a tensor that several stages of its pipeline may have. Local."""
        return self._owners[name][0] == self.grid.pp_rank


def buckets(tensors: Sequence[Tensor], size_bytes: int) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into lists of one type and at most ``size_bytes``, or of a single larger tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or sum(value.nbytes for value in bucket) + tensor.nbytes > size_bytes):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
