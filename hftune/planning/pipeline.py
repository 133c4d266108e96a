"""A pipeline before it runs: its stages, the memory of each process, its idle time. Knows neither files nor launchers.

As in ``hftune.planning.memory``, tensors have no values here. The stages are those of ``hftune.strategies.pipeline``; how many
micro-batches are in flight, and how long processes wait, follows from the schedule by a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from hftune.config import Recipe
from hftune.config.sections import ParallelConfig
from hftune.errors import ConfigError
from hftune.planning.memory import NEEDS_VALUES, StepMemory, TensorBytes, average_bytes, set_gradients, without_values
from hftune.planning.record import StagePlan
from hftune.strategies.packing import PACKING, compute, inputs_of, install_packing
from hftune.strategies.pipeline import PipelineMicroBatch, Stage
from hftune.strategies.pipeline_stages import check_stages, cut, layers_of
from hftune.strategies.seeds import LayerSeeds


def idle_share(config: ParallelConfig, num_micro_batches: int) -> float:
    """Return the share of a step's time in which the processes of a pipeline wait for each other, from 0 to 1.

    In an ideal pipeline: stages and micro-batches of equal cost, backward passes twice as long as forward passes, messages
    that take no time.

    Source: GPipe: Huang et al. 2019, section 2.3. 1F1B and interleaved: Narayanan et al. 2021, sections 2.2.1 and 2.2.2.
    ZB-H1: Qi et al. 2023, table 1.
    """
    waiting = config.pipeline_stages - 1
    rounds = {"interleaved": config.num_stages // config.pipeline_stages, "zero_bubble": 3}.get(config.schedule, 1)
    return waiting / (rounds * num_micro_batches + waiting)


def in_flight(config: ParallelConfig, pp_rank: int, num_micro_batches: int) -> list[int]:
    """Return how many micro-batches each stage of a process keeps tensors of, when the process keeps the most.

    As in torch's schedules (2.13): those that are computed before the first backward pass; with zero_bubble also those whose
    gradients of the weights are still to be computed.
    """
    places, per_place = config.pipeline_stages, config.num_stages // config.pipeline_stages
    if config.schedule == "gpipe":
        return [num_micro_batches] * per_place
    if config.schedule == "1f1b":
        return [min(places - pp_rank, num_micro_batches)]
    per_round = num_micro_batches // max(1, num_micro_batches // places)
    behind = places - 1 - pp_rank
    ahead = 2 * behind if config.schedule == "interleaved" else behind + pp_rank
    most = min((per_place - 1) * per_round + ahead + 1, per_place * num_micro_batches)
    counts = Counter(number // per_round % per_place for number in range(most))
    return [counts[index] for index in range(per_place)]


@dataclass(frozen=True)
class StageMemory:
    """What one micro-batch takes in one stage, in bytes."""

    kept: int
    """Between its forward and its backward pass."""
    peak: int
    """The most while it is computed, gradients aside that existed before."""
    gradients: int
    """Part of the peak: gradients of parameters that did not exist before."""
    split: int
    """With zero_bubble, whose backward passes have two halves: what the first half leaves for the second besides ``kept``, the
    gradients of activations. The first stage has no first half."""


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
        names = {module: name for name, module in model.named_modules()}
        part_of = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        part_of |= {parameter: names[layer] for layer in layers_of(model) for parameter in layer.parameters()}
        self.described = []
        for index, module in enumerate(modules):
            own = {*module.parameters()}
            parts = [*dict.fromkeys(part for parameter, part in part_of.items() if parameter in own)]
            place = index % self.config.pipeline_stages
            self.described.append(StagePlan(place, parts, sum(parameter.numel() for parameter in own)))
        self.stages = [Stage(module, index, count, self.task, precision, seeds).train() for index, module in enumerate(modules)]
        self.unused: set[nn.Parameter] = set()
        """Trainable parameters that get no gradient on some process."""
        self._is_packed = False

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Run the stages one after the other. Only values could show whether they return what the model does.

        Raises:
            ConfigError: they cannot.
        """
        plain = {name: value for name, value in batch.items() if name != PACKING}
        inputs = self.task.inputs(without_values(plain, self.device))
        try:
            check_stages(self.model, self.config.num_stages, self.config.split, inputs)
        except NEEDS_VALUES:
            return  # to compare them
        except ConfigError as error:
            if isinstance(error.__cause__, NEEDS_VALUES):
                raise error.__cause__ from None
            raise

    def measure(self, batches: Sequence[Mapping[str, Tensor]]) -> list[StepMemory]:
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
        self.unused.clear()
        return [self._measure_process(pp_rank) for pp_rank in range(self.config.pipeline_stages)]

    def _measure_process(self, pp_rank: int) -> StepMemory:
        """Add up what a process always holds, what micro-batches in flight keep, and what the largest pass takes beside it."""
        stages = self.stages[pp_rank :: self.config.pipeline_stages]
        modules, micro_batches, counter = nn.ModuleList(stages), stages[0].micro_batches, TensorBytes()
        weights = counter.add_all([*modules.parameters(), *modules.buffers()])
        states = (self.optimizer.state.get(parameter, {}).values() for parameter in modules.parameters())
        moments = counter.add_all(value for values in states for value in values if isinstance(value, Tensor))
        batch = counter.add_all(value for item in micro_batches for value in tensors(item))
        directions = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
        hidden = torch.empty(*stages[0].buffer, *stages[0].width, dtype=stages[0].dtype, device="meta")
        receive = directions * len(micro_batches) * hidden.nbytes
        average = average_bytes(nn.ModuleList(stage.stage for stage in stages)) if self.keeps_average else 0
        counts = in_flight(self.config, pp_rank, len(micro_batches))
        later, first = ([self._measure_stage(stage, exist) for stage in stages] for exist in (True, False))
        given = {value for value in modules.parameters() if value.requires_grad and value.grad is not None}
        self.unused |= {value for value in modules.parameters() if value.requires_grad} - given
        gradients = sum(value.nbytes for value in given)
        waiting = pp_rank if self.config.schedule == "zero_bubble" else 0
        peak = gradients_at_peak = 0
        for index in range(len(micro_batches)):  # whose backward pass comes next; the others in flight follow it
            measured, existing = (later, gradients) if index else (first, 0)
            kept = 0
            for count, memories in zip(counts, measured, strict=True):
                held = memories[index : index + count]
                kept += sum(memory.kept for memory in held) + sum(memory.split for memory in held[:waiting])
            now = min(index + waiting, len(micro_batches) - 1)  # those before it wait for their second half
            computed = max((memories[now] for memories in measured), key=lambda memory: memory.peak - memory.kept)
            if (total := existing + kept - computed.kept + computed.peak) > peak:
                peak, gradients_at_peak = total, existing + computed.gradients
        whole = weights + moments + average + receive + batch + peak
        rest = batch + peak - gradients_at_peak
        return StepMemory(whole, weights, gradients_at_peak, moments, average, rest, receive_bytes=receive)

    def _measure_stage(self, stage: Stage, gradients_exist: bool) -> list[StageMemory]:
        """Measure each micro-batch of a step in a stage, once for each shape, as torch's PipelineStage computes it."""
        known: dict[tuple, StageMemory] = {}
        parameters, found = [*stage.parameters()], []
        for index, micro_batch in enumerate(stage.micro_batches):
            shapes = tuple(value.shape for value in tensors(micro_batch))
            if shapes not in known:
                received, gradient = (
                    torch.empty(*stage.buffer, *stage.width, dtype=stage.dtype, device=self.device, requires_grad=needs)
                    for needs in (True, False)
                )
                set_gradients(parameters, gradients_exist)
                counter = TensorBytes()
                counter.add_all([*parameters, *stage.buffers(), received, gradient, *tensors(micro_batch), micro_batch.weight])
                with counter.of_training(parameters):
                    existing = counter.gradients
                    before = counter.live
                    counter.peak = before
                    output = stage(None if stage.is_first else received, index)
                    kept, split = counter.live - before, 0
                    given = None if stage.is_last else [gradient]
                    if self.config.schedule == "zero_bubble" and not stage.is_first:
                        halves = stage_backward_input([output], given, [received], stage.parameters())[1]
                        del output
                        split = counter.live - before - kept
                        stage_backward_weight(stage.parameters(), halves)
                    else:
                        torch.autograd.backward([output], given)
                        del output
                known[shapes] = StageMemory(kept, counter.peak - before, counter.gradients_at_peak - existing, split)
            found.append(known[shapes])
        return found


def tensors(micro_batch: PipelineMicroBatch) -> list[Tensor]:
    return [value for value in (*micro_batch.inputs.values(), micro_batch.target) if isinstance(value, Tensor)]
