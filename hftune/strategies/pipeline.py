"""Each process computes one part of the model, or several: pipelines beside each other. Knows no epoch, no metric and no file.

The processes form a grid of (replica, place): a pipeline's places are neighbours, and each pipeline computes its share of a
step's micro-batches. torch.distributed.pipelining moves hidden states forward and their gradients back, in the order of a
schedule; everything else a micro-batch consists of is at hand on each process, by its place in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _PipelineSchedule,
)

from hftune.batch_plan import MicroBatch
from hftune.config.sections import ParallelConfig
from hftune.distributed.progress import Progress
from hftune.errors import TrainingError
from hftune.strategies.base import LayerSeeds, StepBatch
from hftune.strategies.data_parallel import DataParallel, refuse_unused, stand_in, start_equal
from hftune.strategies.meta_model import filled_copy, hollow_copy
from hftune.strategies.optimizer_state import check_optimizer, options_of
from hftune.strategies.pipeline_stages import cut, layers_of
from hftune.strategies.statistics import RunningStatistics, freeze, kinds_of, restored_buffers
from hftune.task import Task

SCHEDULES: dict[str, type[_PipelineSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
BUCKET_BYTES = 25 * 2**20
"""Of gradients that replicas sum in one go, as DDP does by default."""


@dataclass
class Work:
    """One micro-batch, as all stages of a pipeline have it at hand."""

    inputs: dict[str, Tensor]
    """Of the model, on the device."""
    target: Tensor
    key: tuple[int, int, int]
    """Seed, step, and the micro-batch's index: what its dropout is drawn by."""
    weight: Tensor | None = None
    """Of its summed loss in the step's mean; None in evaluations, which keep the outputs."""
    num_samples: int = 0
    """That count; 0 for a stand-in."""

    @property
    def shape(self) -> torch.Size:
        """(rows, length) of the first input."""
        return next(iter(self.inputs.values())).shape[:2]


class Stage(nn.Module):
    """What torch's schedule calls: a stage of the model that works on micro-batches of any shape.

    The buffers between stages have the shape of the largest one. Each stage cuts its input to the shape of the micro-batch, so
    that it computes, and draws, exactly what one process would; and pads its output.
    """

    def __init__(self, stage: nn.Module, index: int, count: int, task: Task, accelerator: Accelerator, seeds: LayerSeeds):
        super().__init__()
        self.stage, self.is_first, self.is_last = stage, index == 0, index == count - 1
        self.task, self.accelerator, self.seeds, self.first_layer = task, accelerator, seeds, 0
        self.work: Sequence[Work] = ()
        self.width: tuple[int, ...] = ()
        """Of hidden states: their shape without (rows, length)."""
        self.buffer = torch.Size()
        """(rows, length) of the buffers."""
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.statistics: RunningStatistics | None = None

    def forward(self, carried: Tensor, place: Tensor) -> Tensor:
        work = self.work[int(place)]
        rows, length = work.shape
        self.seeds.begin(*work.key, layer=self.first_layer)
        # Contiguous, as on one process: CUDA's dropout gives other elements the same random numbers where the strides differ.
        hidden = None if self.is_first else carried[:rows, :length].contiguous()
        with self._statistics_of(work), self.accelerator.autocast():
            outputs = self.stage(hidden, **work.inputs)
        if self.is_last:
            return self._finish(int(place), work, convert_to_fp32(outputs))
        hidden = outputs.to(self.dtype)
        missing = [0, 0] * len(self.width) + [0, self.buffer[1] - length, 0, self.buffer[0] - rows]
        padded = nn.functional.pad(hidden, missing) if any(missing) else hidden
        return padded.clone() if padded._is_view() else padded  # zero-bubble schedules detach it in place

    @contextmanager
    def _statistics_of(self, work: Work) -> Iterator[None]:
        if self.statistics is None or work.weight is None:
            yield
            return
        with self.statistics.at_rest(work.num_samples == 0), self.statistics.micro_batch(work.num_samples):
            yield

    def _finish(self, place: int, work: Work, outputs: Any) -> Tensor:
        if work.weight is None:
            self.outputs[place] = outputs
            return torch.zeros(1, device=work.target.device)
        loss = self.task.loss(outputs, work.target)
        self.losses[place] = loss.detach()
        return (loss * work.weight.to(loss.dtype)).reshape(1).clone()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of hidden states."""
        return next(value.dtype for value in self.parameters() if value.is_floating_point())


class Pipeline(DataParallel):
    """Compute what DataParallel computes, with the model cut into stages; see ``hftune.strategies.pipeline_stages``.

    - No process has the whole model, nor its gradient or its optimizer: each has its stages'.
    - Gradients are summed over the replicas once a step, and parameters that several stages have, such as tied embeddings, over
      these, so that the copies stay equal. The norm is that of the whole gradient, each parameter counted once.
    - A schedule needs a minimum of micro-batches, or a multiple of some number; what a short step lacks is filled up with
      micro-batches of one sample that do not count.
    - Evaluations go through the stages; outputs are on the last one, whose process scores them.
    """

    def __init__(self, accelerator: Accelerator, task: Task, config: ParallelConfig, progress: Progress | None = None):
        super().__init__(accelerator, task, progress)
        self.config, self._num_places = config, config.pipeline_stages
        self._num_replicas = self.num_processes // self._num_places
        mesh = init_device_mesh(self.device.type, (self._num_replicas, self._num_places), mesh_dim_names=("replica", "place"))
        self._replica, self._place = mesh.get_local_rank("replica"), mesh.get_local_rank("place")
        self._replicas, self._pipeline = mesh.get_group("replica"), mesh.get_group("place")
        logging.getLogger(_PipelineSchedule.__module__).setLevel(logging.CRITICAL)  # where a stage fails, it prints all actions
        self._schedule: tuple[Any, _PipelineSchedule] | None = None
        self._outputs: Any = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, is_staged=True)
        start_equal(model, self.device)
        layers = layers_of(model)
        self._seeds.watch(layers)
        self._hollow = hollow_copy(model)
        count = self.config.num_stages
        stages = cut(model, count, self.config.split)
        self._describe(model, stages)
        self._keep_own(model, optimizer)
        self._stages = {}
        for index in range(self._place, count, self._num_places):
            stage = self._stages[index] = Stage(stages[index], index, count, self.task, self.accelerator, self._seeds)
            own = {*stage.parameters()}
            stage.first_layer = next((n for n, layer in enumerate(layers) if not own.isdisjoint(layer.parameters())), 0)
            stage.to(self.device).train()
        self.optimizer, self.model = optimizer, NotHere()
        self._tied = self._groups_of_ties()

    def _describe(self, model: nn.Module, stages: Sequence[nn.Module]) -> None:
        """Note where the parameters and buffers of the whole model are: by name, the places and the tensors of this process."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kept = model.state_dict(keep_vars=True)
        names |= {id(buffer): name for name, buffer in model.named_buffers() if name in kept}
        self._sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
        self._owners: dict[str, list[int]] = {}
        self._own: dict[str, tuple[nn.Module, str]] = {}  # where a tensor is, as moving a module may replace its buffers
        for index, stage in enumerate(stages):
            for module in stage.modules():
                for key, value in (*module._parameters.items(), *module._buffers.items()):
                    if value is None or (name := names.get(id(value))) is None:
                        continue
                    place = index % self._num_places
                    owners = self._owners.setdefault(name, [])
                    if place not in owners:
                        owners.append(place)
                    if place == self._place:
                        self._own[name] = module, key

    def _keep_own(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let go of the parameters of other processes' stages, in model and optimizer."""
        own = {*self._parameters().values()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for parameter in [parameter for parameter in optimizer.state if parameter not in own]:  # made when it was built
            del optimizer.state[parameter]
        self._options = options_of(optimizer)
        for parameter in model.parameters():
            if parameter not in own:
                parameter.data = parameter.new_empty(0)

    def _groups_of_ties(self) -> dict[str, torch.distributed.ProcessGroup]:
        """Make a group of the processes of each pipeline that share a parameter; return this process's, by parameter."""
        groups = {}
        for places in sorted({tuple(owners) for owners in self._owners.values() if len(owners) > 1}):
            for replica in range(self._num_replicas):
                group = torch.distributed.new_group([replica * self._num_places + place for place in places])
                if replica == self._replica and self._place in places:
                    groups[places] = group
        shared = {name: groups.get(tuple(owners)) for name, owners in sorted(self._owners.items()) if len(owners) > 1}
        return {name: group for name, group in shared.items() if group is not None and name in self._parameters()}

    def notices(self) -> list[str]:
        sizes, whole = self._sizes, sum(parameter.numel() for parameter in self._hollow.parameters())
        stages = ", ".join(f"{size:,}" for size in sizes)
        beside = f", {self._num_replicas} pipelines beside each other" if self._num_replicas > 1 else ""
        return [
            f"Pipeline ({self.config.schedule}): {len(sizes)} stages on {self._num_places} processes{beside}; of {whole:,} "
            f"weights they have {stages}."
        ]

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        raise NotImplementedError("stages differ in what they need; check_parallel refuses auto")

    def rehearse(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        """Compute a gradient and throw it away: processes connect, and parameters without a gradient are refused on all."""
        (batch,) = self.batches(dataset, [[micro_batch] * self._num_replicas], 0, 0)
        stages = nn.ModuleDict({str(index): stage for index, stage in self._stages.items()})
        with restored_buffers(stages) as changed:
            try:
                self._backward(batch, 0, 0, torch.ones((), device=self.device))
                unused = [
                    name for name, parameter in self._parameters().items() if parameter.requires_grad and parameter.grad is None
                ]
                found = self.broadcast(self.gather_to_main(unused))
            finally:
                self.optimizer.zero_grad()
        refuse_unused([*dict.fromkeys(found)])
        for index, stage in self._stages.items():
            own = [place for name, place in changed.items() if name.startswith(f"{index}.")]
            if frozen:
                freeze({module: None for module, _ in own})
            elif own:
                stage.statistics = RunningStatistics(own, self._exact)
        return sorted({*self.broadcast(self.gather_to_main(kinds_of(changed.values())))})

    def _deal(self, step: list[MicroBatch]) -> StepBatch:
        mine = self._share(step)
        num_missing = self.config.fill_up(len(mine)) - len(mine)
        return StepBatch(step, [*mine, *[stand_in(step)] * num_missing], [1] * len(mine) + [0] * num_missing)

    def _counts(self, batch: StepBatch) -> list[float]:
        counts = super()._counts(batch)
        return counts if self._place == 0 else [0] * len(counts)  # all places of a pipeline have the same micro-batches

    def _backward(self, batch: StepBatch, seed: int, step: int, items: Tensor) -> list[Tensor]:
        work = []
        for micro_batch, weight, loaded in zip(batch.mine, batch.weights, batch.batches, strict=True):
            self.progress.samples(micro_batch.samples)
            on_device = send_to_device(loaded, self.device, non_blocking=True)
            work.append(self._work(on_device, (seed, step, micro_batch.index), weight / items))
            work[-1].num_samples = weight * len(micro_batch.samples)
        keeping = [stage.statistics for stage in self._stages.values() if stage.statistics is not None]
        for statistics in keeping:
            statistics.begin()
        with self._naming_memory(batch.batches[0], step):
            self._run(work, backward=True)
        for statistics in keeping:
            statistics.finish(self._sum_of_replicas)
        self._sum_gradients()
        last = self._last
        zero = torch.zeros((), device=self.device)
        return [last.losses[place] * weight if last else zero for place, weight in enumerate(batch.weights)]

    @property
    def _last(self) -> Stage | None:
        """The last stage, on the processes that have it."""
        return self._stages.get(self.config.num_stages - 1)

    def _work(self, batch: dict[str, Tensor], key: tuple[int, int, int], weight: Tensor | None = None) -> Work:
        return Work(self.task.inputs(batch), self.task.target(batch), key, weight)

    def _run(self, work: Sequence[Work], backward: bool) -> None:
        """Send micro-batches through the stages, forward and backward or forward only. Collective over the pipeline."""
        rows, length = (max(item.shape[axis] for item in work) for axis in (0, 1))
        schedule = self._schedule_for(len(work), torch.Size([rows, length]), work[0], backward)
        for stage in self._stages.values():
            stage.work, stage.losses, stage.outputs = work, {}, {}
        places = torch.arange(len(work))
        arguments = [places] if self._place == 0 else []
        try:
            if backward:
                schedule.step(*arguments, place=places, target=places, return_outputs=False)
            else:
                schedule.eval(*arguments, place=places, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises into one that prints all its tensors
            raise error.__cause__ or error from None

    def _schedule_for(self, num_micro_batches: int, buffer: torch.Size, example: Work, backward: bool) -> _PipelineSchedule:
        """Return torch's schedule for so many micro-batches, the one before where it fits.

        torch keeps the buffers of the first step, and would receive into them what is of another shape.
        """
        wanted = num_micro_batches, buffer, backward
        if self._schedule is not None and self._schedule[0] == wanted:
            return self._schedule[1]
        self._schedule = None  # and its buffers
        count, kind = self.config.num_stages, SCHEDULES[self.config.schedule]
        stages = []
        for index, stage in self._stages.items():
            stage.buffer, stage.width = buffer, stage.width or self._find_width(example)
            stages.append(self._torch_stage(stage, index, count))
        several = kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
        schedule = kind(
            stages if several else stages[0],
            n_microbatches=num_micro_batches,
            loss_fn=(lambda output, target: output.sum()) if backward else None,
            scale_grads=False,  # the micro-batches are weighted
        )
        self._schedule = wanted, schedule
        return schedule

    def _torch_stage(self, stage: Stage, index: int, count: int) -> PipelineStage:
        shape = (*stage.buffer, *stage.width)
        hidden = torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)
        place = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            index,
            count,
            self.device,
            input_args=place if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self._pipeline,
        )

    def _find_width(self, example: Work) -> tuple[int, ...]:
        """Let the first stage compute once, and tell the others of its pipeline how wide hidden states are."""
        told: list[Any] = [next((stage.width for stage in self._stages.values() if stage.width), None)]
        if told[0]:
            return told[0]
        if self._place == 0:
            first = self._stages[0].stage
            with torch.no_grad(), self.accelerator.autocast():
                told = [tuple(first(None, **example.inputs).shape[2:])]
        source = self._replica * self._num_places
        torch.distributed.broadcast_object_list(told, src=source, group=self._pipeline, device=self.device)
        return told[0]

    def _sum_of_replicas(self, value: Tensor) -> Tensor:
        torch.distributed.all_reduce(value, group=self._replicas)
        return value

    def _sum_gradients(self) -> None:
        """Sum gradients over the replicas; then those of shared parameters over the stages that have them."""
        parameters = self._parameters()
        if self._num_replicas > 1:
            for bucket in buckets([value.grad for value in parameters.values() if value.grad is not None], BUCKET_BYTES):
                flat = torch._utils._flatten_dense_tensors(bucket)
                torch.distributed.all_reduce(flat, group=self._replicas)
                for gradient, summed in zip(bucket, torch._utils._unflatten_dense_tensors(flat, bucket), strict=True):
                    gradient.copy_(summed)
        for name, group in self._tied.items():
            if parameters[name].grad is not None:
                torch.distributed.all_reduce(parameters[name].grad, group=group)

    def clip_grad_norm(self, max_norm: float | None) -> float:
        parameters = self._parameters()
        counted = [
            value.grad for name, value in parameters.items() if value.grad is not None and self._owners[name][0] == self._place
        ]
        own = nn.utils.get_total_norm(counted)
        squared = own.to(self.device, self._exact) ** 2
        torch.distributed.all_reduce(squared, group=self._pipeline)
        norm = squared.sqrt()
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm.to(own.dtype))
        return norm.item()

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        mine = self._share(micro_batches)
        loaded = iter(self._loader(dataset, [micro_batch.samples.tolist() for micro_batch in mine], num_workers))
        size = self.config.fill_up(2 * self._num_places)
        with self._evaluating(), torch.no_grad():
            for start in range(0, len(mine), size):
                if self._any_in_pipeline(should_stop()):
                    return
                yield from self._evaluated(mine[start : start + size], loaded, size)

    def _evaluated(
        self, micro_batches: Sequence[MicroBatch], loaded: Iterator[dict[str, Tensor]], size: int
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        batches, work = [], []
        for micro_batch in micro_batches:
            self.progress.samples(micro_batch.samples)
            batches.append(send_to_device(next(loaded), self.device))
            work.append(self._work(batches[-1], (0, 0, micro_batch.index)))
        self._run(work + work[-1:] * (size - len(work)), backward=False)
        last = self._last
        for place, (micro_batch, batch) in enumerate(zip(micro_batches, batches, strict=True) if last else ()):
            self._outputs = last.outputs.pop(place)
            self._seeds.begin(0, 0, micro_batch.index)
            yield micro_batch, batch

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self._outputs

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._share_statistics()
        for stage in self._stages.values():
            stage.eval()
        try:
            yield
        finally:
            for stage in self._stages.values():
                stage.train()

    def _share_statistics(self) -> None:
        for module, key in self._own.values():
            if key in module._buffers and module._buffers[key].is_floating_point():
                torch.distributed.broadcast(module._buffers[key], src=self._place, group=self._replicas)

    def _any_in_pipeline(self, flag: bool) -> bool:
        found = torch.tensor(float(flag), device=self.device)
        torch.distributed.all_reduce(found, group=self._pipeline)
        return bool(found)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: module._parameters[key] for name, (module, key) in self._own.items() if key in module._parameters}

    def _expected(self) -> Mapping[str, Tensor]:
        whole = dict(self._hollow.named_parameters()) | dict(self._hollow.named_buffers())
        return {name: whole[name] for name in self._owners}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        names = {parameter: name for name, parameter in self._parameters().items()}
        moments = {
            f"{names[parameter]}/{key}": value
            for parameter, state in self._bare_optimizer().state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        return {
            "model": {name: getattr(module, key).detach() for name, (module, key) in self._own.items()},
            "optimizer": moments,
        }

    def _plain_state(self) -> dict[str, Any]:
        own = {
            key: value
            for key, value in super()._plain_state().items()
            if self._owners[key.rpartition("/")[0]][0] == self._place
        }
        listed = self.gather_to_main([own] if self._replica == 0 else [])
        return {key: value for part in listed or [] for key, value in part.items()}

    def _gathered(self, group: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self._replica != 0:
            return
        mine = {key: value for key, value in group.items() if self._owners[key.rpartition("/")[0] or key][0] == self._place}
        listed: list[Any] | None = [None] * self._num_places if self.is_main else None
        own = [(key, value.shape, value.dtype) for key, value in mine.items()]
        torch.distributed.gather_object(own, listed, dst=0, group=self._pipeline)
        if not self.is_main:
            for value in mine.values():
                torch.distributed.send(value.to(self.device).contiguous(), dst=0, group=self._pipeline)
            return
        yield from mine.items()
        for place in range(1, self._num_places):
            for key, shape, dtype in listed[place]:
                value = torch.empty(shape, dtype=dtype, device=self.device)
                torch.distributed.recv(value, src=place, group=self._pipeline)
                yield key, value

    def _receive(self, value: Tensor | None, saved: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        super()._receive(whole, saved, shape, dtype)
        if value is not None:
            value.copy_(whole)

    def unwrap(self) -> nn.Module:
        values = ((name, value.to("cpu", copy=True)) for name, value in self._gathered(self._tensors()["model"]))
        return filled_copy(self._hollow, values)


class NotHere(nn.Module):
    """Stands for the whole model, which no process has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "training":
            return super().__getattr__(name)
        raise TrainingError(
            f"task.predictions asks for the model's {name}, and in a pipeline no process has the whole model: only what it "
            "returned, the outputs. Set parallel.pipeline_stages=1, or leave the model alone in predict."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TrainingError(
            "task.predictions calls the model, and in a pipeline no process has the whole one: only what it returned, the "
            "outputs. Set parallel.pipeline_stages=1, or do not use the model in predictions."
        )


def buckets(tensors: Sequence[Tensor], size_bytes: int) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into lists of one type and of about so many bytes."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or sum(value.nbytes for value in bucket) + tensor.nbytes > size_bytes):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
