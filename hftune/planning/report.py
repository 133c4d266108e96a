"""Formats a plan for a terminal. Independent of everything but the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from hftune.errors import first_few
from hftune.planning.record import Disk, PipelinePlan, Plan
from hftune.tracking.console import data_size

HEADING = 15
"""Columns that the headings take."""
LINE = 96
"""Columns of a line of text behind the heading."""
BAR = 20
"""Columns of a full bar."""


def plan_text(plan: Plan) -> str:
    parts = {
        "data": data(plan),
        "steps": steps(plan),
        "learning rate": learning_rate(plan),
        "evaluation": [f"after {listed(plan.evaluations)}" if plan.evaluations else "never"],
        "checkpoint": [
            f"after {listed(plan.checkpoints)}" + (", and after each new best evaluation" if plan.evaluations else "")
        ],
        "model": model(plan),
        "groups": groups(plan),
        "pipeline": pipeline(plan.pipeline) if plan.pipeline else [],
        "memory": memory(plan) if plan.memory else [],
        "disk": disk(plan.disk) if plan.disk else [],
        "notices": [line for notice in plan.notices for line in wrap(notice, LINE)],
    }
    each = "es" if plan.processes > 1 else ""
    fsdp = " under FSDP" if plan.fsdp else ""
    blocks = [f"{plan.recipe} on {plan.processes} process{each}{fsdp}: a plan, nothing is trained."]
    for heading, content in parts.items():
        lines = [f"  {'' if number else heading:<{HEADING}}{line}".rstrip() for number, line in enumerate(content)]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks)


def data(plan: Plan) -> Iterator[str]:
    """Samples and tokens."""
    found = plan.data
    evaluated = f"{found.eval_samples:,} to evaluate on" if plan.evaluations else "none to evaluate on"
    yield f"{found.train_samples:,} samples to train on, {evaluated}"
    if found.tokens is not None:
        padding = (
            "computed without padding" if plan.work.packed else f"{found.padding_share:.1%} of what is computed is padding"
        )
        yield (
            f"{found.tokens:,} tokens {'an epoch' if plan.steps.epochs >= 1 else 'in all'}, the longest sample has "
            f"{found.longest:,}; {padding}"
        )


def steps(plan: Plan) -> Iterator[str]:
    """Steps, and how they are spread over the processes."""
    found, work = plan.steps, plan.work
    yield f"{found.total:,} of {found.batch_size:,} samples each: {found.epochs:.4g} epochs of {found.per_epoch:,} steps"
    each = f"{work.fewest_per_step:,}" + (f" to {work.most_per_step:,}" if work.most_per_step > work.fewest_per_step else "")
    one, many, count = "process", "processes", plan.processes
    if plan.pipeline:
        one, many, count = "pipeline", "pipelines", plan.pipeline.replicas
    yield f"{each} micro-batches a step" + (f", at most {work.most_per_process:,} on a {one}" if count > 1 else "")
    if work.mean_tokens is not None:
        padding = "without padding" if work.packed else "padding included"
        yield f"{work.mean_tokens:,.0f} tokens a micro-batch on average, at most {work.most_tokens:,}, {padding}"
    if count > 1:
        balance = 100 * work.evenness
        yield f"load balance {balance:.1f}% ({many} idle {100 - balance:.1f}% of the time, waiting for the slowest)"
    others = ", ".join(f"{value:.1%} on {number}" for number, value in work.evenness_by_processes.items())
    yield f"the same micro-batches: load balance {others} {many}"


def learning_rate(plan: Plan) -> Iterator[str]:
    rates, peak = plan.learning_rate, max(rate.lr for rate in plan.learning_rate)
    width = len(f"{plan.steps.total:,}")
    for rate in rates:
        yield f"step {rate.step:>{width},}  {rate.lr:<9.3g} {bar(rate.lr, peak)} {rate.when}"


def model(plan: Plan) -> Iterator[str]:
    """Parameters, and those without a gradient, which training would refuse."""
    if plan.parameters is None:
        return
    frozen = plan.parameters - plan.trainable_parameters
    trained = f"{plan.trainable_parameters:,} of them trained, {frozen:,} frozen" if frozen else "all trained"
    yield f"{plan.parameters:,} parameters, {trained}"
    if unused := plan.unused_parameters:
        yield f"{len(unused)} of its tensors get no gradient; training would stop at the first step:"
        yield from (f"  {name}" for name in unused)
        yield "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."


def groups(plan: Plan) -> Iterator[str]:
    """The optimizer's parameter groups, if their learning rates differ or there are more than the usual two."""
    found = plan.groups or []
    if len(found) <= 2 and len({group.lr for group in found}) <= 1:
        return
    for group in sorted(found, key=lambda group: -group.lr):
        decay = "" if group.weight_decay is None else f"weight decay {group.weight_decay:<6.3g} "
        yield f"lr {group.lr:<9.3g} {decay}{group.parameters:>13,} parameters  {first_few(group.names, 1)}"


def pipeline(found: PipelinePlan) -> Iterator[str]:
    pp_size = max((stage.place for stage in found.stages), default=0) + 1
    if found.stages:
        yield f"{len(found.stages)} stages on {pp_size} processes" + (
            f", {found.replicas} pipelines in parallel" if found.replicas > 1 else ""
        )
    rows = [
        (f"stage {number}", processes(found, stage.place, pp_size), f"{stage.parameters:,}", names(stage.modules))
        for number, stage in enumerate(found.stages, start=1)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for stage, where, size, modules in rows:
        yield f"{stage:<{widths[0]}}  {where:<{widths[1]}}  {size:>{widths[2]}} parameters  {modules}"
    yield (
        f"{found.schedule} with {found.micro_batches:,} micro-batch{'es' if found.micro_batches > 1 else ''} a pipeline: "
        f"{found.idle_share:.0%} of the time idle; with {2 * found.micro_batches:,}, {found.idle_share_of_twice:.0%}"
    )
    if found.filled_up:
        yield f"short steps are filled up with dummies of one sample: {found.filled_up:,} in the first epoch"


def processes(found: PipelinePlan, pp_rank: int, pp_size: int) -> str:
    """List the processes with the same rank in their pipelines."""
    numbers = [str(dp_rank * pp_size + pp_rank) for dp_rank in range(found.replicas)]
    if len(numbers) > 3:
        numbers = [*numbers[:2], "\N{HORIZONTAL ELLIPSIS}", numbers[-1]]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def names(modules: Sequence[str]) -> str:
    """Shorten the names of modules; a range of numbered ones, such as layers, is shown by its first and last number."""
    shown: list[str] = []
    rows = groupby(modules, key=lambda name: name.rpartition(".")[0] if name.rpartition(".")[2].isdecimal() else name)
    for parent, row in rows:
        ends = [name.rpartition(".")[2] for name in row]
        short = parent.rpartition(".")[2]
        if ends[0].isdecimal():
            short += f".{ends[0]}" + (f" to {ends[-1]}" if len(ends) > 1 else "")
        shown.append(short)
    if len(shown) > 6:
        shown = [*shown[:3], "\N{HORIZONTAL ELLIPSIS}", *shown[-2:]]
    return ", ".join(shown)


def memory(plan: Plan) -> Iterator[str]:
    """The peak and its parts; in a pipeline, those of the process that needs the most, and the peaks of the others."""
    found, ranks = plan.memory, plan.pipeline.places if plan.pipeline else []
    longest = "" if found.longest is None else f" of at most {found.longest:,} tokens"
    samples = f"{found.samples:,} sample{'s' if found.samples > 1 else ''}{longest}"
    peaks = [rank.peak_bytes for rank in ranks]
    where = processes(plan.pipeline, peaks.index(found.peak_bytes), len(peaks)) if peaks else "each process"
    step = "a step with micro-batches" if peaks else "a micro-batch"
    yield f"{data_size(found.peak_bytes)} on {where} ({found.device}), in {step} of {samples}"
    parts = {
        "weights": found.weights_bytes if not found.frozen_bytes else 0,
        "weights that stay frozen": found.frozen_bytes,
        "weights that are trained": found.weights_bytes - found.frozen_bytes if found.frozen_bytes else 0,
        "gradients": found.gradients_bytes,
        "DDP gradient buckets": found.ddp_buckets_bytes,
        "optimizer": found.optimizer_bytes,
        "average of the weights": found.average_bytes,
        "activations": found.activations_bytes,
        "receive buffers": found.receive_bytes,
        "whole blocks, gathered": found.gathered_bytes,
    }
    for name, size in parts.items():
        if size:
            yield f"  {data_size(size):>8}  {bar(size, found.peak_bytes)} {name}"
    for pp_rank, size in enumerate(peaks):
        if size != found.peak_bytes:
            yield f"{data_size(size)} on {processes(plan.pipeline, pp_rank, len(peaks))}"
    where = "each process" if plan.fsdp or plan.pipeline else "the main process"
    yield f"plus {data_size(found.host_copy_bytes)} of host memory on {where}, from which checkpoints are written"
    if found.load_bytes is not None and found.export_bytes is not None:
        load, export = data_size(found.load_bytes), data_size(found.export_bytes)
        yield f"host memory of a process: {load} to load it from files, {export} to export"


def disk(found: Disk) -> Iterator[str]:
    """What the output folder holds at most."""
    yield f"{data_size(found.total_bytes)} at most, including the checkpoint and model being written"
    for name in ("checkpoint", "model"):
        count, size = getattr(found, f"{name}s"), getattr(found, f"{name}_bytes")
        yield f"  {data_size(count * size):>8}  {count} {name}s of {data_size(size)}"


def listed(steps: Sequence[int], most: int = 6) -> str:
    """List steps; if there are many, leave out those in the middle."""
    formatted = [f"{step:,}" for step in steps]
    if len(steps) > most:
        formatted = [*formatted[: most - 2], "\N{HORIZONTAL ELLIPSIS}", f"{formatted[-1]} ({len(steps):,} in all)"]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(formatted)}"


def bar(value: float, full: float) -> str:
    length = round(BAR * value / full) if full else 0
    return f"{chr(0x2588) * length:<{BAR}}"
