"""Each process computes one stage of the model, or several. Independent of epochs, metrics and files.

torch.distributed.pipelining moves hidden states forward and their gradients back, in the order of a schedule. Everything else
a micro-batch consists of is on each process already, by its index in the step. Processes that are left over form further
pipelines, each of which computes its share of a step's micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from hftune.batch_plan import MicroBatch
from hftune.config.sections import ParallelConfig
from hftune.distributed.progress import Progress
from hftune.models.trial import restored_buffers
from hftune.strategies.base import StepBatch, Strategy
from hftune.strategies.packing import compute, inputs_of, install_packing
from hftune.strategies.pipeline_sharding import Grid, StagedWeights
from hftune.strategies.pipeline_stages import layers_of, refuse_model
from hftune.strategies.seeds import LayerSeeds
from hftune.strategies.sharding import refuse_unused, without_gradient
from hftune.strategies.statistics import RunningStatistics, class_names, freeze
from hftune.strategies.whole_model import absent_model
from hftune.task import Task

TorchSchedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti
NO_STATISTICS = RunningStatistics([], torch.float64)
SCHEDULES: dict[str, type[TorchSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


@dataclass
class PipelineMicroBatch:
    """One micro-batch, as all stages of a pipeline have it."""

    inputs: dict[str, Tensor]
    """Of the model, on the device."""
    target: Tensor
    key: tuple[int, int, int]
    """Seed, step, and the micro-batch's index: what its dropout is seeded by."""
    weight: Tensor | None = None
    """Factor of its summed loss in the step's mean; None in evaluations, which keep the outputs."""
    num_samples: int = 0
    """Samples that count; 0 for a dummy."""

    @property
    def shape(self) -> torch.Size:
        return next(iter(self.inputs.values())).shape[:2]


class Stage(nn.Module):
    """What torch's schedule calls: a stage of the model that accepts micro-batches of any shape.

    The buffers between stages have the shape of the largest one. Each stage slices its input to the shape of the micro-batch,
    so that it computes, and draws, exactly what one process would; then it pads its output.
    """

    def __init__(self, stage: nn.Module, index: int, count: int, task: Task, accelerator: Accelerator, seeds: LayerSeeds):
        super().__init__()
        self.stage, self.is_first, self.is_last = stage, index == 0, index == count - 1
        self.task, self.accelerator, self.seeds, self.first_layer = task, accelerator, seeds, 0
        self.micro_batches: Sequence[PipelineMicroBatch] = ()
        self.width: tuple[int, ...] = ()
        """Of hidden states: their shape without (rows, length)."""
        self.buffer = torch.Size()
        """(rows, length) of the buffers."""
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.statistics = NO_STATISTICS
        """Of no layer until ``Pipeline`` sets it: then it does nothing."""

    def forward(self, received: Tensor, index: Tensor) -> Tensor:
        micro_batch = self.micro_batches[int(index)]
        rows, length = micro_batch.shape
        self.seeds.begin(*micro_batch.key, layer=self.first_layer)
        # Contiguous, as on one process: CUDA's dropout assigns its random numbers to different elements if the strides differ.
        hidden = None if self.is_first else received[:rows, :length].contiguous()
        num_samples, is_evaluation = micro_batch.num_samples, micro_batch.weight is None
        statistics = NO_STATISTICS if is_evaluation else self.statistics
        with statistics.at_rest(num_samples == 0), statistics.micro_batch(num_samples), self.accelerator.autocast():
            outputs = compute(self.stage, hidden, **micro_batch.inputs)
        if self.is_last:
            return self._finish(int(index), micro_batch, convert_to_fp32(outputs))
        hidden = outputs.to(self.dtype)
        missing = [0, 0] * len(self.width) + [0, self.buffer[1] - length, 0, self.buffer[0] - rows]
        padded = nn.functional.pad(hidden, missing) if any(missing) else hidden
        return padded.clone() if padded._is_view() else padded  # zero-bubble schedules detach it in place

    def _finish(self, index: int, micro_batch: PipelineMicroBatch, outputs: Any) -> Tensor:
        if micro_batch.weight is None:
            self.outputs[index] = outputs
            return torch.zeros(1, device=next(self.stage.parameters()).device)
        loss = self.task.loss(outputs, micro_batch.target)
        self.losses[index] = loss.detach()
        # As _schedule_for declares it, which torch 2.11 insists on. Gradients are as exact: that of the cast is 1.
        return (loss * micro_batch.weight.to(loss.dtype)).reshape(1).float().clone()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of hidden states."""
        return next(value.dtype for value in self.parameters() if value.is_floating_point())


class Pipeline(Strategy):
    """Compute what DataParallel computes, with the model cut into stages; see ``hftune.strategies.pipeline_stages``.

    - No process has the whole model, nor its gradient or its optimizer: each has its stages'.
    - Gradients are summed over the replicas once a step. Those of parameters that several stages have, such as tied
      embeddings, are also summed over these stages, so that the copies stay equal. The norm is that of the whole gradient, each
      parameter counted once.
    - A schedule needs a minimum of micro-batches, or a multiple of some number; short steps are filled up with dummies of one
      sample that do not count.
    - Evaluations go through the stages. The outputs are on the process of the last stage, which scores them.
    """

    sharding: StagedWeights

    def __init__(self, accelerator: Accelerator, task: Task, config: ParallelConfig, progress: Progress | None = None):
        super().__init__(accelerator, task, progress)
        self.config = config
        self.grid = Grid.create(self.device, self.num_processes, config.pipeline_stages)
        self.dp_rank, self.dp_size, self.pp_rank = self.grid.dp_rank, self.grid.dp_size, self.grid.pp_rank
        self.counts_samples = self.pp_rank == 0  # all processes of a pipeline have the same micro-batches
        self.sharding = StagedWeights(accelerator, self, config, self.grid)
        self._seeds = LayerSeeds(self.device)
        logging.getLogger(ScheduleGPipe.__module__).setLevel(logging.CRITICAL)  # if a stage fails, it prints all actions
        self._schedule: tuple[Any, TorchSchedule] | None = None
        self._outputs: Any = None
        self._unused: list[str] = []
        """Parameters that the last backward pass gave no gradient."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        layers = layers_of(model)
        self._seeds.watch(layers)
        self.sharding.prepare(model, optimizer)
        self.model = absent_model(refuse_model)
        self._stages: dict[int, Stage] = {}
        for index, module in self.sharding.modules.items():
            if self.collate_packed is not None:
                install_packing(module)
            stage = Stage(module, index, self.config.num_stages, self.task, self.accelerator, self._seeds).train()
            own = {*stage.parameters()}
            stage.first_layer = next((n for n, layer in enumerate(layers) if not own.isdisjoint(layer.parameters())), 0)
            self._stages[index] = stage

    def notices(self) -> list[str]:
        sizes, total = self.sharding.stage_sizes, sum(value.numel() for value in self.sharding.meta_model.parameters())
        stages = ", ".join(f"{size:,}" for size in sizes)
        parallel = f", {self.dp_size} pipelines in parallel" if self.dp_size > 1 else ""
        return [
            f"Pipeline ({self.config.schedule}): {len(sizes)} stages on {self.config.pipeline_stages} processes{parallel}; of "
            f"{total:,} weights they have {stages}."
        ]

    def warm_up(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        # Besides what the contract asks for, this connects the processes before the first step is timed and watched.
        (batch,) = self.batches(dataset, [[micro_batch] * self.dp_size], num_workers=0)
        with restored_buffers(self.sharding.model) as changed:
            try:
                self.backward(batch, 0, 0, lambda: torch.ones((), device=self.device))
                unused = self.broadcast(self.gather_to_main(self._unused))
            finally:
                self.sharding.optimizer.zero_grad()
                self.times.discard()
        refuse_unused([*dict.fromkeys(unused)])
        for index, stage in self._stages.items():
            places = [place for name, place in changed.items() if name.startswith(f"{index}.")]
            if frozen:
                freeze({module: None for module, _ in places})
            elif places:
                stage.statistics = RunningStatistics(places, self.exact)
        return sorted({*self.broadcast(self.gather_to_main(class_names(changed.values())))})

    def num_dummies(self, step: Sequence[MicroBatch], num_mine: int, num_shares: int) -> int:
        return self.config.fill_up(num_mine) - num_mine

    def backward(self, batch: StepBatch, seed: int, step: int, items: Callable[[], Tensor]) -> list[Tensor]:
        micro_batches, total = [], items()
        for micro_batch, weight, loaded in zip(batch.mine, batch.weights, batch.batches, strict=True):
            self.progress.samples(micro_batch.samples)
            on_device = send_to_device(loaded, self.device, non_blocking=True)
            micro_batches.append(self._micro_batch(on_device, (seed, step, micro_batch.index), weight / total))
            micro_batches[-1].num_samples = weight * len(micro_batch.samples)
        statistics = [stage.statistics for stage in self._stages.values() if stage.statistics.places]
        for one in statistics:
            one.begin()
        with self.explained_memory_errors(batch.batches[0], step):
            self._run(micro_batches, backward=True)
        for one in statistics:
            one.finish(self.sharding.sum_over_replicas(torch.cat(one.own())))
        self._unused = without_gradient(self.sharding.parameters())
        self.sharding.sum_gradients()
        last = self._last_stage
        zero = torch.zeros((), device=self.device)
        return [last.losses[index] * weight if last else zero for index, weight in enumerate(batch.weights)]

    @property
    def _last_stage(self) -> Stage | None:
        return self._stages.get(self.config.num_stages - 1)

    def _micro_batch(
        self, batch: dict[str, Tensor], key: tuple[int, int, int], weight: Tensor | None = None
    ) -> PipelineMicroBatch:
        return PipelineMicroBatch(inputs_of(self.task, batch), self.task.target(batch), key, weight)

    def _run(self, micro_batches: Sequence[PipelineMicroBatch], backward: bool) -> None:
        """Send micro-batches through the stages, forward and backward or forward only. Collective over the pipeline."""
        rows, length = (max(item.shape[axis] for item in micro_batches) for axis in (0, 1))
        schedule = self._schedule_for(len(micro_batches), torch.Size([rows, length]), micro_batches[0], backward)
        for stage in self._stages.values():
            stage.micro_batches, stage.losses, stage.outputs = micro_batches, {}, {}
        indices = torch.arange(len(micro_batches))
        arguments = [indices] if self.pp_rank == 0 else []
        try:
            if backward:
                schedule.step(*arguments, index=indices, target=indices, return_outputs=False)
            else:
                schedule.eval(*arguments, index=indices, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises into one that prints all its tensors
            raise error.__cause__ or error from None

    def _schedule_for(
        self, num_micro_batches: int, buffer: torch.Size, example: PipelineMicroBatch, backward: bool
    ) -> TorchSchedule:
        """Return torch's schedule for this number of micro-batches; the previous one, if it fits.

        torch keeps the buffers of the first step, and would receive tensors of a different shape into them.
        """
        wanted = num_micro_batches, buffer, backward
        if self._schedule is not None and self._schedule[0] == wanted:
            return self._schedule[1]
        self._schedule = None  # and its buffers
        count, kind = self.config.num_stages, SCHEDULES[self.config.schedule]
        stages = []
        for index, stage in self._stages.items():
            stage.buffer, stage.width = buffer, stage.width or self._find_width(example)
            shape = (*buffer, *stage.width)
            hidden = torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)
            micro_batch_index = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty(1, device="meta", requires_grad=True)
            given, returned = micro_batch_index if stage.is_first else hidden, loss if stage.is_last else hidden
            stages.append(PipelineStage(stage, index, count, self.device, given, returned, group=self.grid.pipeline))
        schedule = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=num_micro_batches,
            loss_fn=(lambda output, target: output.sum()) if backward else None,
            scale_grads=False,  # the micro-batches are weighted
        )
        self._schedule = wanted, schedule
        return schedule

    def _find_width(self, example: PipelineMicroBatch) -> tuple[int, ...]:
        """Let the first stage compute once, and tell the others of its pipeline how wide hidden states are."""
        width: list[Any] = [next((stage.width for stage in self._stages.values() if stage.width), None)]
        if width[0]:
            return width[0]
        if self.pp_rank == 0:
            first = self._stages[0].stage
            with torch.no_grad(), self.accelerator.autocast():
                width = [tuple(compute(first, None, **example.inputs).shape[2:])]
        source = self.grid.rank_of(self.dp_rank, pp_rank=0)
        torch.distributed.broadcast_object_list(width, src=source, group=self.grid.pipeline, device=self.device)
        return width[0]

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        own = nn.utils.get_total_norm(
            [
                value.grad
                for name, value in self.sharding.parameters().items()
                if value.grad is not None and self.sharding.is_first_owner(name)  # so that each parameter is counted once
            ]
        )
        squared = own.to(self.device, self.exact) ** 2
        torch.distributed.all_reduce(squared, group=self.grid.pipeline)
        norm = squared.sqrt()
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.sharding.parameters().values(), max_norm, norm.to(own.dtype))
        return norm

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor], float]]:
        mine = self.share(micro_batches)
        loaded = self.evaluated(dataset, mine, num_workers)
        size = self.config.fill_up(2 * self.config.pipeline_stages)
        with self.evaluating(), torch.no_grad():
            for start in range(0, len(mine), size):
                stops = torch.tensor(float(should_stop()), device=self.device)
                torch.distributed.all_reduce(stops, group=self.grid.pipeline)
                if stops:
                    return
                some, batches, items, parts = mine[start : start + size], [], [], []
                for micro_batch in some:
                    self.progress.samples(micro_batch.samples)
                    on_host = next(loaded)
                    items.append(float(self.task.num_items(self.task.target(on_host))))
                    batches.append(send_to_device(on_host, self.device, non_blocking=True))
                    parts.append(self._micro_batch(batches[-1], (0, 0, micro_batch.index)))
                self._run(parts + parts[-1:] * (size - len(some)), backward=False)
                last = self._last_stage
                for index, each in enumerate(zip(some, batches, items, strict=True) if last else ()):
                    self._outputs = last.outputs.pop(index)
                    self._seeds.begin(0, 0, each[0].index)
                    yield each

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self._outputs
