"""A pipeline run before it starts: its stages, the memory of each process, its idle time. Independent of files and launchers.

As in ``hftune.planning.memory``, tensors have no values here. The stages are those of ``hftune.strategies.pipeline``, the
order of their passes is torch's, and so are the functions that compute backward. Only the messages are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from hftune.batch_plan import BatchPlan, MicroBatch, balance
from hftune.config import Recipe
from hftune.config.sections import ParallelConfig
from hftune.errors import ConfigError
from hftune.planning.memory import (
    NEEDS_VALUES,
    PassMemory,
    StepMemory,
    TensorBytes,
    average_bytes,
    pass_memory,
    without_values,
)
from hftune.strategies.base import dummy_micro_batch
from hftune.strategies.packing import PACKING, compute, inputs_of, install_packing
from hftune.strategies.pipeline import PipelineMicroBatch, Stage
from hftune.strategies.pipeline_schedules import Action, Pass, idle_share, order_of
from hftune.strategies.pipeline_stages import check_stages, cut, layers_of
from hftune.strategies.seeds import LayerSeeds


@dataclass
class StagePlan:
    """One stage of the model."""

    place: int
    """Rank of its process in the pipeline, from 0."""
    modules: list[str]
    """Names of its modules in the model, layers one by one."""
    parameters: int


@dataclass
class PlaceMemory(StepMemory):
    """Of the process with one rank in the pipeline."""

    receive_bytes: int
    """Part of the peak: torch's receive buffers, one per micro-batch and direction, each as large as the step's largest
    micro-batch."""


@dataclass
class PipelinePlan:
    """How a model is spread over the processes of a pipeline."""

    replicas: int
    """Pipelines in parallel. The process with a place in a replica has rank replica * places + place among all."""
    schedule: str
    micro_batches: int
    """Per pipeline in a typical step."""
    idle_share: float
    """Share of such a step in which processes wait for each other, if all stages and micro-batches have equal cost."""
    idle_share_of_twice: float
    """The same with twice as many micro-batches."""
    filled_up: int
    """Dummy micro-batches in the first epoch, of one sample each, that the schedule needs and that do not count."""
    stages: list[StagePlan] = field(default_factory=list)
    """First to last; empty if the model cannot be built without values."""
    places: list[PlaceMemory] = field(default_factory=list)
    """Memory of each process of a pipeline, first to last; empty if it cannot be estimated."""


@dataclass
class PipelineSurvey:
    """Results of one walk through the first epoch, for pipelines."""

    usual: int
    """Micro-batches that a pipeline computes in a typical step: the most frequent number, the larger one of two."""
    filled_up: int
    heaviest: list[list[MicroBatch]]
    """Shares of a step, dummies included, that may need the most memory."""


def survey_pipelines(batches: BatchPlan, num_steps: int, config: ParallelConfig, dp_size: int) -> PipelineSurvey:
    """Walk through the first epoch, or the part of it that is trained, as the pipelines would."""
    order, counts, filled_up = batches.epoch(0), Counter(), 0
    heaviest: dict[str, tuple[int, list[MicroBatch]]] = {}
    for number in range(min(num_steps, batches.num_steps)):
        step = order[number]
        for assigned in balance([micro_batch.cost for micro_batch in step], dp_size):
            num_missing = config.fill_up(len(assigned)) - len(assigned)
            counts[len(assigned)] += 1
            filled_up += num_missing
            share = [*(step[index] for index in assigned), *[dummy_micro_batch(step)] * num_missing]
            for kind, size in sizes(share, config).items():
                if kind not in heaviest or size > heaviest[kind][0]:
                    heaviest[kind] = size, share
    usual = max(counts, key=lambda count: (counts[count], count))
    different = {id(share): share for _, share in heaviest.values()}
    return PipelineSurvey(usual, filled_up, [*different.values()])


def sizes(share: Sequence[MicroBatch], config: ParallelConfig) -> dict[str, int]:
    """Measure a pipeline's share of a step by what may take memory: buffers; and tokens, pairs of tokens and rows in flight."""
    rows = [len(micro_batch.samples) for micro_batch in share]
    lengths = [micro_batch.length for micro_batch in share]
    tokens = sorted((micro_batch.tokens for micro_batch in share), reverse=True)
    pairs = sorted((micro_batch.tokens * micro_batch.length for micro_batch in share), reverse=True)
    in_flight = slice(None if config.schedule == "gpipe" else config.pipeline_stages)
    return {
        "buffers": len(share) * max(rows) * max(lengths),
        "tokens": sum(tokens[in_flight]),
        "pairs": sum(pairs[in_flight]),
        "rows": sum(rows[in_flight]),
    }


def plan_pipeline(config: ParallelConfig, survey: PipelineSurvey, dp_size: int) -> PipelinePlan:
    """Return the part of the plan that needs no model."""
    shares = [idle_share(config, count) for count in (survey.usual, 2 * survey.usual)]
    return PipelinePlan(dp_size, config.schedule, survey.usual, shares[0], shares[1], survey.filled_up)


def describe_stages(model: nn.Module, stages: Sequence[nn.Module], pp_size: int) -> list[StagePlan]:
    """Return which parts of the model its stages hold."""
    names = {module: name for name, module in model.named_modules()}
    part_of = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    part_of |= {parameter: names[layer] for layer in layers_of(model) for parameter in layer.parameters()}
    described = []
    for index, stage in enumerate(stages):
        own = {*stage.parameters()}
        modules = [*dict.fromkeys(part for parameter, part in part_of.items() if parameter in own)]
        described.append(StagePlan(index % pp_size, modules, sum(parameter.numel() for parameter in own)))
    return described


class PipelineMeter:
    """Measures the memory of each process of a pipeline in a step. To be used in FakeTensorMode."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer):
        """Cut a model in training mode whose optimizer has its state.

        Raises:
            ConfigError: the model cannot be cut as the recipe says.
        """
        self.task, self.config, self.optimizer = recipe.task, recipe.parallel, optimizer
        self.keeps_average = recipe.train.ema_decay is not None
        self.device = next(model.parameters()).device
        is_bf16, count = recipe.train.mixed_precision == "bf16", self.config.num_stages
        precision = SimpleNamespace(autocast=partial(torch.autocast, self.device.type, torch.bfloat16, is_bf16))
        self.model, seeds = model, LayerSeeds(self.device)
        modules = cut(model, count, self.config.split)
        self.described = describe_stages(model, modules, self.config.pipeline_stages)
        self.stages = [Stage(module, index, count, self.task, precision, seeds).train() for index, module in enumerate(modules)]
        self._known: dict[tuple, dict[Pass, PassMemory]] = {}
        self._given: dict[int, set[nn.Parameter]] = {}
        self._is_packed = False

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Run the stages one after the other. Only values could show whether they return what the model does.

        Raises:
            ConfigError: they cannot.
        """
        try:
            check_stages(
                self.model,
                self.config.num_stages,
                self.config.split,
                self.task.inputs(
                    without_values({name: value for name, value in batch.items() if name != PACKING}, self.device)
                ),
            )
        except NEEDS_VALUES:
            return  # to compare them
        except ConfigError as error:
            if isinstance(error.__cause__, NEEDS_VALUES):
                raise error.__cause__ from None
            raise

    def measure(self, batches: Sequence[Mapping[str, Tensor]]) -> list[PlaceMemory]:
        """Return the memory of each process of a pipeline that computes these micro-batches in one step."""
        if any(PACKING in batch for batch in batches) and not self._is_packed:
            self._is_packed = True
            for stage in self.stages:
                install_packing(stage.stage)
        weight = torch.ones((), dtype=torch.float64, device=self.device)
        micro_batches = [
            PipelineMicroBatch(inputs_of(self.task, batch), self.task.target(batch), (0, 0, 0), weight)
            for batch in [without_values(batch, self.device) for batch in batches]
        ]
        buffer = torch.Size([max(item.shape[axis] for item in micro_batches) for axis in (0, 1)])
        with torch.no_grad():
            width = compute(self.stages[0].stage, None, **micro_batches[0].inputs).shape[2:]
        for stage in self.stages:
            stage.micro_batches, stage.buffer, stage.width = micro_batches, buffer, tuple(width)
        return [self._fullest(pp_rank, actions) for pp_rank, actions in enumerate(order_of(self.config, len(micro_batches)))]

    def unused(self) -> set[nn.Parameter]:
        """Return the parameters that get no gradient on some process, after ``measure``."""
        unused, pp_size = set(), self.config.pipeline_stages
        for pp_rank in range(pp_size):
            own = range(pp_rank, len(self.stages), pp_size)
            held = {value for index in own for value in self.stages[index].parameters() if value.requires_grad}
            unused |= held - {value for index in own for value in self._given[index]}
        return unused

    def _fullest(self, pp_rank: int, actions: Sequence[Action]) -> PlaceMemory:
        """Follow a process through a step, and return its memory at the peak."""
        own = [*range(pp_rank, len(self.stages), self.config.pipeline_stages)]
        weights, moments, buffers, batch = self._held_always(own)
        given: set[nn.Parameter] = set()  # a gradient
        kept: dict[tuple[int, int], int] = {}  # by stage and micro-batch, for later passes
        gradients, peak, gradients_at_peak = 0, 0, 0
        for stage, what, micro_batch in actions:
            now = self._passes(stage, micro_batch, is_first=micro_batch == 0)[what]
            others = sum(kept.values()) - kept.get((stage, micro_batch), 0)
            if gradients + others + now.peak_bytes > peak:
                peak, gradients_at_peak = gradients + others + now.peak_bytes, gradients + now.gradients_bytes
            kept[stage, micro_batch] = now.left_bytes
            if what in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT):
                given |= {value for value in self.stages[stage].parameters() if value.requires_grad}
                gradients = sum(value.nbytes for value in given)
        average = average_bytes(nn.ModuleList(self.stages[index].stage for index in own)) if self.keeps_average else 0
        whole = weights + moments + average + buffers + batch + peak
        return PlaceMemory(whole, weights, gradients_at_peak, moments, average, batch + peak - gradients_at_peak, buffers)

    def _held_always(self, own: Sequence[int]) -> tuple[int, int, int, int]:
        """Return the bytes of weights, optimizer moments, torch's receive buffers, and the micro-batches of a step."""
        modules, first = nn.ModuleList(self.stages[index] for index in own), self.stages[own[0]]
        counter, micro_batches = TensorBytes(), first.micro_batches
        weights = counter.add_all([*modules.parameters(), *modules.buffers()])
        moments = counter.add_all(
            value
            for parameter in modules.parameters()
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        )
        directions = sum((not self.stages[index].is_first) + (not self.stages[index].is_last) for index in own)
        hidden = torch.empty(*first.buffer, *first.width, dtype=first.dtype, device="meta")
        batch = counter.add_all(value for item in micro_batches for value in tensors(item))
        return weights, moments, directions * len(micro_batches) * hidden.nbytes, batch

    def _passes(self, index: int, micro_batch: int, is_first: bool) -> dict[Pass, PassMemory]:
        """Measure one micro-batch in a stage, forward and backward; once for each shape."""
        stage = self.stages[index]
        key = index, stage.buffer, is_first, *(value.shape for value in tensors(stage.micro_batches[micro_batch]))
        if key not in self._known:
            self._known[key] = self._measure_passes(stage, micro_batch, is_first)
            if is_first:
                self._given[index] = {value for value in stage.parameters() if value.grad is not None}
        return self._known[key]

    def _measure_passes(self, stage: Stage, index: int, is_first: bool) -> dict[Pass, PassMemory]:
        parameters, micro_batch = [*stage.parameters()], stage.micro_batches[index]
        for parameter in parameters:
            parameter.grad = None if is_first else torch.empty_like(parameter)
        sent = [
            torch.empty(*stage.buffer, *stage.width, dtype=stage.dtype, device=self.device, requires_grad=needs_gradient)
            for needs_gradient in (True, False)
        ]
        passes = StagePasses(stage, index, *sent).of(self.config.schedule)
        there = [*stage.buffers(), *sent, *tensors(micro_batch), micro_batch.weight]
        return dict(zip(passes, pass_memory(parameters, there, passes.values()), strict=True))


def tensors(micro_batch: PipelineMicroBatch) -> list[Tensor]:
    """Return the tensors of a micro-batch."""
    return [value for value in (*micro_batch.inputs.values(), micro_batch.target) if isinstance(value, Tensor)]


class StagePasses:
    """The passes of one micro-batch through a stage, as torch's PipelineStage computes them, and the tensors it keeps."""

    def __init__(self, stage: Stage, index: int, received: Tensor, gradient: Tensor):
        self.stage, self.index = stage, index
        self.received = [] if stage.is_first else [received]
        self.gradients = None if stage.is_last else [gradient]
        self.outputs: list[Tensor] = []
        self.groups: list[dict[str, Any]] = []

    def of(self, schedule: str) -> dict[Pass, Callable[[], None]]:
        """Return them in order."""
        if schedule == "zero_bubble":
            halves = {Pass.BACKWARD_INPUT: self.backward_input, Pass.BACKWARD_WEIGHT: self.backward_weight}
            return {Pass.FORWARD: self.forward, **halves}
        return {Pass.FORWARD: self.forward, Pass.BACKWARD: self.backward}

    def forward(self) -> None:
        """Compute and keep the outputs, with all that the backward pass needs."""
        output = self.stage(self.received[0] if self.received else None, self.index)
        self.outputs = [output.sum() if self.stage.is_last else output]

    def backward(self) -> None:
        """Compute the gradients of the weights and of the received tensor."""
        stage_backward(self.outputs, self.gradients or [None], self.received)
        self.outputs = []

    def backward_input(self) -> None:
        """Compute the gradient of the received tensor; the first stage has none, and does nothing."""
        if self.received:
            _, self.groups = stage_backward_input(self.outputs, self.gradients, self.received, self.stage.parameters())

    def backward_weight(self) -> None:
        """Compute the gradients of the weights."""
        if self.received:
            stage_backward_weight(self.stage.parameters(), self.groups)
            self.outputs, self.groups = [], []
        else:
            self.backward()
