"""The order in which a pipeline's processes compute, and how long they wait. Independent of models and processes.

The order is torch's own, so that the plan matches the run. Times are those of an ideal pipeline: all stages take equally long,
and messages take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import NamedTuple

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from hftune.config.sections import ParallelConfig


class Pass(StrEnum):
    """What a process does to one micro-batch in one stage. The letters are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """The half of the backward pass that the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """The other half, which no stage waits for."""


DURATION = {Pass.FORWARD: 1, Pass.BACKWARD: 2, Pass.BACKWARD_INPUT: 1, Pass.BACKWARD_WEIGHT: 1}
"""In forward passes of a stage: a backward pass multiplies twice, once for the inputs and once for the weights."""


class Action(NamedTuple):
    """One pass."""

    stage: int
    what: Pass
    micro_batch: int


def order_of(config: ParallelConfig, num_micro_batches: int) -> list[list[Action]]:
    """Return what each process of a pipeline computes in one step, in order.

    Args:
        num_micro_batches: such that ``config.fill_up`` adds none.
    """
    pp_size = config.pipeline_stages
    if config.schedule in ("gpipe", "1f1b"):
        ahead = {"gpipe": [num_micro_batches] * pp_size, "1f1b": [pp_size - pp_rank for pp_rank in range(pp_size)]}
        return [_ahead_then_in_turns(*one, num_micro_batches) for one in enumerate(ahead[config.schedule])]
    kind = ScheduleInterleaved1F1B if config.schedule == "interleaved" else ScheduleInterleavedZeroBubble
    # All that torch asks of stages before they compute.
    stage = SimpleNamespace(num_stages=config.num_stages, group_size=pp_size, group_rank=0, submod=None)
    order = kind([stage] * (config.num_stages // pp_size), num_micro_batches).pipeline_order
    return [
        [
            Action(action.stage_index, Pass(action.computation_type.value), action.microbatch_index)
            for action in order[pp_rank]
            if action
        ]
        for pp_rank in range(pp_size)
    ]


def _ahead_then_in_turns(stage: int, num_ahead: int, num_micro_batches: int) -> list[Action]:
    """Compute ``num_ahead`` forward passes, then alternate backward and forward passes, then the remaining backward passes.

    torch lists these two schedules only for drawing, not as it computes them (2.13: its last stage of 1f1b never computes
    micro-batch 0). This is the order in its ``_step_microbatches``.
    """
    forwards = [Action(stage, Pass.FORWARD, index) for index in range(num_micro_batches)]
    backwards = [Action(stage, Pass.BACKWARD, index) for index in range(num_micro_batches)]
    num_ahead = min(num_ahead, num_micro_batches)
    turns = zip(backwards, forwards[num_ahead:], strict=False)
    rest = backwards[num_micro_batches - num_ahead :]
    return [*forwards[:num_ahead], *(action for turn in turns for action in turn), *rest]


def idle_share(config: ParallelConfig, num_micro_batches: int) -> float:
    """Return the share of a step's time in which the processes of a pipeline wait for each other, from 0 to 1.

    For micro-batches of equal cost. Dummies cost nothing.
    """
    order = order_of(config, config.fill_up(num_micro_batches))
    worked = [sum(_duration(action, num_micro_batches) for action in actions) for actions in order]
    return 1 - sum(worked) / (len(order) * _makespan(order, config.num_stages, num_micro_batches))


def _makespan(order: Sequence[Sequence[Action]], num_stages: int, num_micro_batches: int) -> int:
    """Let each process compute its next pass as soon as its inputs are there; return when the last one is done."""
    left, free = [deque(actions) for actions in order], [0] * len(order)
    ended: dict[tuple[int, bool, int] | None, int] = {None: 0}
    while ready := [rank for rank, actions in enumerate(left) if actions and _needed(actions[0], num_stages) in ended]:
        for rank in ready:
            action = left[rank].popleft()
            free[rank] = max(free[rank], ended[_needed(action, num_stages)]) + _duration(action, num_micro_batches)
            if action.what != Pass.BACKWARD_WEIGHT:
                ended[action.stage, action.what == Pass.FORWARD, action.micro_batch] = free[rank]
    return max(free)


def _needed(action: Action, num_stages: int) -> tuple[int, bool, int] | None:
    """Return the stage, direction (True: forward) and micro-batch that must be done before; None if there is none."""
    stage, what, micro_batch = action
    if what == Pass.FORWARD:
        return (stage - 1, True, micro_batch) if stage else None
    if what == Pass.BACKWARD_WEIGHT or stage == num_stages - 1:
        return None  # except for a pass of the same process, which comes earlier in its order
    return stage + 1, False, micro_batch


def _duration(action: Action, num_micro_batches: int) -> int:
    return DURATION[action.what] if action.micro_batch < num_micro_batches else 0
