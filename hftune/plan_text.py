"""Lays a plan out for a terminal. Knows nothing but the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from hftune.console import data_size
from hftune.planning import Disk, Memory, Plan

HEADING = 15
"""Columns that the headings take."""
LINE = 96
"""Columns of a line of text behind the heading."""
BAR = 20
"""Columns of a full bar."""


def plan_text(plan: Plan) -> str:
    """Lay out a plan."""
    each = plan.processes // plan.machines
    where = f"{plan.machines} machines x " if plan.machines > 1 else ""
    where += f"{each} process{'es' if each > 1 else ''}"
    parts = {
        "data": data(plan),
        "steps": steps(plan),
        "learning rate": learning_rate(plan),
        "evaluation": [f"after {listed(plan.evaluations)}"],
        "checkpoint": [f"after {listed(plan.checkpoints)}, and after each evaluation that is the best so far"],
        "model": model(plan),
        "memory": memory(plan.memory) if plan.memory else [],
        "disk": disk(plan.disk) if plan.disk else [],
        "remarks": [line for remark in plan.remarks for line in wrap(remark, LINE)],
    }
    blocks = [f"{plan.recipe} on {where}, as planned; nothing is trained."]
    for heading, said in parts.items():
        lines = [f"  {'' if place else heading:<{HEADING}}{line}".rstrip() for place, line in enumerate(said)]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks)


def data(plan: Plan) -> Iterator[str]:
    """Samples and tokens."""
    found = plan.data
    yield f"{found.train_samples:,} samples to train on, {found.eval_samples:,} to evaluate on"
    if found.tokens is not None:
        yield (
            f"{found.tokens:,} tokens {'an epoch' if plan.steps.epochs >= 1 else 'in all'}, the longest sample has "
            f"{found.longest:,}; {found.padding_share:.1%} of what is computed is padding"
        )


def steps(plan: Plan) -> Iterator[str]:
    """Steps, and how they fall on the processes."""
    found, work = plan.steps, plan.work
    yield f"{found.total:,} of {found.batch_size:,} samples each: {found.epochs:.4g} epochs of {found.per_epoch:,} steps"
    each = f"{work.fewest_per_step:,}" + (f" to {work.most_per_step:,}" if work.most_per_step > work.fewest_per_step else "")
    yield f"{each} micro-batches a step" + (f", at most {work.most_per_process:,} on a process" if plan.processes > 1 else "")
    if plan.processes > 1:
        yield f"the work is {work.evenness:.1%} even: the rest of the time processes wait for the busiest one"


def learning_rate(plan: Plan) -> Iterator[str]:
    """A table with bars."""
    rates, peak = plan.learning_rate, max(rate.lr for rate in plan.learning_rate)
    width = len(f"{plan.steps.total:,}")
    for rate in rates:
        yield f"step {rate.step:>{width},}  {rate.lr:<9.3g} {bar(rate.lr, peak)} {rate.when}"


def model(plan: Plan) -> Iterator[str]:
    """Parameters, and those that training would refuse."""
    if plan.parameters is None:
        return
    same = plan.parameters == plan.trainable_parameters
    yield f"{plan.parameters:,} parameters, {'all' if same else f'{plan.trainable_parameters:,} of them'} trained"
    if unused := plan.unused_parameters:
        yield f"{len(unused)} of its tensors get no gradient, and training would stop at its first step:"
        yield from (f"  {name}" for name in unused)
        yield "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."


def memory(found: Memory) -> Iterator[str]:
    """The peak with its parts."""
    longest = "" if found.longest is None else f" of at most {found.longest:,} tokens"
    samples = f"{found.samples:,} sample{'s' if found.samples > 1 else ''}{longest}"
    yield f"{data_size(found.peak_bytes)} on each process ({found.device}), in a micro-batch of {samples}"
    parts = {
        "weights": found.weights_bytes,
        "gradients": found.gradients_bytes,
        "DDP's buckets of gradients": found.ddp_buckets_bytes,
        "optimizer": found.optimizer_bytes,
        "activations": found.activations_bytes,
    }
    for name, size in parts.items():
        if size:
            yield f"  {data_size(size):>8}  {bar(size, found.peak_bytes)} {name}"
    yield f"and {data_size(found.host_copy_bytes)} in the main process's host memory, from which checkpoints are written"


def disk(found: Disk) -> Iterator[str]:
    """What the output folder holds at most."""
    yield f"{data_size(found.total_bytes)} at most, while another one of each is being written"
    for name in ("checkpoint", "model"):
        count, size = getattr(found, f"{name}s"), getattr(found, f"{name}_bytes")
        yield f"  {data_size(count * size):>8}  {count} {name}s of {data_size(size)}"


def listed(steps: Sequence[int], most: int = 6) -> str:
    """Spell steps, those in the middle left out where they are many."""
    spelled = [f"{step:,}" for step in steps]
    if len(steps) > most:
        spelled = [*spelled[: most - 2], "\N{HORIZONTAL ELLIPSIS}", f"{spelled[-1]} ({len(steps):,} in all)"]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(spelled)}"


def bar(value: float, full: float) -> str:
    """Draw a share of ``full``."""
    length = round(BAR * value / full) if full else 0
    return f"{chr(0x2588) * length:<{BAR}}"
