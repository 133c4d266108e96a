"""Measure what a second process brings: tokens a second of 1 and of 2, on a core each; and how even the work of 2, 4 and 8 is.

    python benchmarks/scaling.py [--data FOLDER] [--steps 1] [--rounds 3] [--layers 2 --width 256]

The same BERT, reviews of at most 512 tokens and global batch for all, with the bounds of the yelp recipe:

hftune          as hftune.training sets it up: no padding, micro-batches of equal work (train.packing=auto).
hftune padded   the same with train.packing=off: sorted inside the global batch, padded to the longest of a micro-batch.
raw DDP         the plain script: torch's DistributedDataParallel and dropout, equally many samples for each process as they
                come, --rows of them a forward, padded to the longest of these, no_sync until the last of a step.

Each contender trains with 1 process, with 2, and, as a control, with 2 that share nothing: each has all of the samples to
itself, and both cores are busy. Two cores of a virtual machine may be two threads of one core, and all cores share the memory's
bandwidth: what two processes apart do not reach, no way to train can. All take turns, with other samples in each round. The
figures are medians over the rounds:

efficiency      tokens a second of 2 processes / twice those of 1 (goal: 0.97 for hftune)
of two apart    tokens a second of 2 processes / those of two apart
by CPU          CPU time of 1 process / twice that of the busier of 2: what imbalance and messages cost, without the waiting.
                Other users of the machine hardly move it.

The second table needs no second core: the mean work of a process / the most work of one, over the steps of an epoch, by the
plan that training follows, at the width of bert-base (goal: 0.98 for hftune). train.parts is the number of processes, but at
least 4.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bert_on_reviews import Meter, add_model_options, quiet, recipe_of, review_task
from contest import take_turns
from record import parse_options, print_table, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hftune.batch_plan import BatchPlan
from hftune.build import Parts, build_model, load_datasets, plan_batches
from hftune.config import Recipe
from hftune.data.tokenized import Texts
from hftune.distributed.accelerator import start_accelerator
from hftune.optim import build_optimizer
from hftune.planning.plan import survey
from hftune.settle import PARTS, settle_packing, without_padding
from hftune.strategies.data_parallel import DataParallel

BERT_BASE_WIDTH = 768
PROCESSES = (2, 4, 8)
WAYS = ("1 process", "2 processes", "2 apart")


def main() -> None:
    options = parse()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    quiet()
    torch.set_num_threads(1)  # before the fork: threads do not survive it
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"batch_size": options.batch_size, "micro_batch_size": options.rows, "micro_batch_tokens": options.tokens}
        recipe = recipe_of(review_task(options), folder, **sizes)
        datasets = load_datasets(recipe)
        crew = start_workers(recipe, datasets)
        rounds = draw_rounds(datasets["train"], options)
        turns = {(name, way): partial(take_turn, crew[way], name, rounds) for name in CONTENDERS for way in WAYS}
        for name, way in turns:
            take_turn(crew[way], name, [rounds[0][: options.batch_size // 4]], 0)  # to warm up
        results = take_turns(turns, options.rounds)
        for worker in {*crew["2 processes"], *crew["2 apart"]}:
            worker.send(None)
    report(options, recipe, datasets["train"], results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, layers=2, width=256)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each draws other samples (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="global (default %(default)s, as in the yelp recipe)")
    parser.add_argument("--rows", type=int, default=32, help="most rows of a micro-batch (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of one, for hftune (default %(default)s)")
    smoke = {"layers": 1, "width": 64, "vocab_size": 500, "rounds": 1, "batch_size": 16, "rows": 4}
    return parse_options(parser, smoke)


def draw_rounds(data: Texts, options: argparse.Namespace) -> list[np.ndarray]:
    """Draw the samples of every round; a sample may come in several rounds, never twice in one."""
    draw, count = np.random.default_rng(0), options.steps * options.batch_size
    return [draw.permutation(len(data))[:count] for _ in range(options.rounds)]


@dataclass
class Share:
    """What one process did in one turn."""

    seconds: float
    cpu_seconds: float
    tokens: int


class Contender:
    """A model of its own, and a way to train it on samples in the order given; all processes call it together."""

    def __init__(self, recipe: Recipe, datasets: Mapping[str, Any], strategy: DataParallel):
        self.recipe, self.datasets, self.strategy = recipe, datasets, strategy
        self.model = self.build()
        self.meter = Meter(self.model)

    def build(self) -> nn.Module:
        raise NotImplementedError

    def train(self, data: Texts) -> None:
        """Train on all of ``data`` once."""
        raise NotImplementedError

    def time(self, data: Texts) -> Share:
        self.meter.restart()
        if dist.is_initialized():
            dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        self.train(data)
        return Share(time.perf_counter() - began, time.process_time() - began_cpu, self.meter.tokens)


class Hftune(Contender):
    """What hftune.training builds and hftune.loop calls, without its log."""

    def build(self) -> nn.Module:
        parts = Parts(self.datasets, plan_batches(self.recipe, self.datasets["train"]), build_model(self.recipe), num_steps=1)
        settle_packing(self.recipe, self.strategy, parts)
        if parts.plan.packed != (self.recipe.train.packing == "auto"):
            raise RuntimeError(f"train.packing={self.recipe.train.packing}, but: {parts.notices}")
        self.plan = parts.plan
        self.strategy.prepare(parts.model, build_optimizer(parts.model, self.recipe))
        return parts.model

    def train(self, data: Texts) -> None:
        lengths, strategy = self.recipe.task.lengths(data), self.strategy
        plan = replace(self.plan, num_samples=len(data), lengths=lengths, shuffle=False)
        for step, batch in enumerate(strategy.batches(data, plan.epoch(0), num_workers=0)):
            strategy.forward_backward(batch, self.recipe.seed, step)
            strategy.report(strategy.clip_grad_norm(self.recipe.train.clip_norm))
            strategy.optimizer_step(self.recipe.train.lr)
            strategy.sharding.clear_gradient()


class RawDDP(Contender):
    """Equal samples for each process, and a plain loop."""

    def build(self) -> nn.Module:
        torch.manual_seed(self.recipe.seed)
        model = self.recipe.task.build_model().train()
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
        self.optimizer = build_optimizer(model, self.recipe)
        return model

    def train(self, data: Texts) -> None:
        config, rank, count = self.recipe.train, self.strategy.process_index, self.strategy.num_processes
        for start in range(0, len(data), config.batch_size):
            mine = range(start, min(start + config.batch_size, len(data)))[rank::count]
            starts = range(0, len(mine), config.micro_batch_size)
            for first in starts:
                batch = self.recipe.task.collate([data[sample] for sample in mine[first : first + config.micro_batch_size]])
                with nullcontext() if first == starts[-1] or count == 1 else self.wrapped.no_sync():
                    (self.wrapped(**batch).loss / len(starts)).backward()
            nn.utils.clip_grad_norm_(self.wrapped.parameters(), config.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


CONTENDERS: dict[str, tuple[type[Contender], str]] = {
    "hftune": (Hftune, "auto"),
    "hftune padded": (Hftune, "off"),
    "raw DDP": (RawDDP, "off"),
}
"""Their classes, and train.packing."""


def start_workers(recipe: Recipe, datasets: Mapping[str, Any]) -> dict[str, list[Connection]]:
    """Fork two processes that are a group, and two that are alone; return the ends to talk to them, by the way to train.

    Raises:
        SystemExit: there are no two cores.
    """
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else [None, None]  # macOS does not pin
    if len(cores) < 2:
        raise SystemExit("This benchmark needs two cores.")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    together = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    lonely = [fork(recipe, datasets, core, {}) for core in cores]
    pair = [fork(recipe, datasets, core, variables) for core, variables in zip(cores, together, strict=True)]
    return {"1 process": lonely[:1], "2 processes": pair, "2 apart": lonely}


def fork(recipe: Recipe, datasets: Mapping[str, Any], core: int | None, variables: Mapping[str, str]) -> Connection:
    """Start a worker, and return the end to talk to it."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, recipe, datasets, core, variables)
    multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True).start()
    theirs.close()  # so that the end of the worker is the end of what it says
    return ours


def work(
    connection: Connection, recipe: Recipe, datasets: Mapping[str, Any], core: int | None, variables: Mapping[str, str]
) -> None:
    """Train what is asked for: pairs of a contender's name and samples, until None comes."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    os.environ.update(variables)
    accelerator = start_accelerator(recipe.train)
    contenders = {}
    for name, (kind, packing) in CONTENDERS.items():
        own = replace(recipe, train=replace(recipe.train, packing=packing))
        contenders[name] = kind(own, datasets, DataParallel(accelerator, recipe.task))
    while (asked := connection.recv()) is not None:
        name, samples = asked
        connection.send(contenders[name].time(datasets["train"].select(samples)))


def take_turn(workers: Sequence[Connection], name: str, rounds: Sequence[np.ndarray], turn: int) -> list[Share]:
    """Let workers train at the same time."""
    for worker in workers:
        worker.send((name, rounds[turn]))
    return [worker.recv() for worker in workers]


def report(options: argparse.Namespace, recipe: Recipe, data: Texts, results: Mapping[tuple[str, str], list]) -> None:
    """Print and save both tables."""
    check_tokens(results)
    rows, figures = [], []
    for name in CONTENDERS:
        one, two, apart = (results[name, way] for way in WAYS)
        speeds = [[speed(shares) for shares in turns] for turns in (one, two, apart)]
        ratios = {
            "efficiency": median(both / (2 * alone) for alone, both, _ in zip(*speeds, strict=True)),
            "of two apart": median(both / most for _, both, most in zip(*speeds, strict=True)),
            "by CPU": median(busiest(alone) / (2 * busiest(both)) for alone, both in zip(one, two, strict=True)),
        }
        rows.append((name, *[f"{median(of_way):,.0f}" for of_way in speeds], *[f"{ratio:.3f}" for ratio in ratios.values()]))
        figures.append(f"{name} {ratios['efficiency']:.2f} ({ratios['of two apart']:.2f} of two apart)")
    what = f"reviews of {options.data.name}" if options.data else "generated reviews"
    title = (
        f"BERT {options.layers} x {options.width}, global batch {options.batch_size}, {what}, {options.rounds} rounds of "
        f"{options.steps} steps; real tokens a second"
    )
    header = ("", *WAYS, "efficiency", "of two apart", "by CPU")
    tables = [print_table(title, header, rows), print_balance(recipe, data, what)]
    balances = [f"{row[0]}, batch {row[1]}: {', '.join(row[2:])}" for row in tables[1]["rows"] if row[0] == "hftune"]
    measured = {
        f"speed of 2 processes / twice that of 1, a core each, {what}, BERT {options.layers} x {options.width}": "; ".join(
            figures
        ),
        f"mean / most work of 2, 4 and 8 processes, {what}": "; ".join(balances),
    }
    save(__file__, options, tables, measured)


def check_tokens(results: Mapping[tuple[str, str], list]) -> None:
    """Make sure that all contenders trained on the same tokens in each round."""
    for turn in range(len(next(iter(results.values())))):
        seen = {sum(share.tokens for share in shares[turn]) // (1 + (way == "2 apart")) for (_, way), shares in results.items()}
        if len(seen) != 1:
            raise RuntimeError(f"The contenders saw other samples: {seen} tokens.")


def speed(shares: Sequence[Share]) -> float:
    """Return real tokens a second of processes that began together."""
    return sum(share.tokens for share in shares) / max(share.seconds for share in shares)


def busiest(shares: Sequence[Share]) -> float:
    """Return the most CPU time of a process."""
    return max(share.cpu_seconds for share in shares)


def print_balance(recipe: Recipe, data: Texts, what: str) -> dict[str, Any]:
    """Print how even the work of an epoch is, with the sizes of the yelp recipe and with a batch of 32."""
    rows = []
    for batch_size in (128, 32):
        config = replace(recipe.train, batch_size=batch_size, micro_batch_size=32, micro_batch_tokens=4096)
        plan = replace(plan_batches(replace(recipe, train=config), data), width=BERT_BASE_WIDTH)
        parts = {count: max(PARTS[0], count) for count in PROCESSES}
        balances = {
            "hftune": [evenness(without_padding(replace(config, parts=parts[count]), plan), count) for count in PROCESSES],
            "hftune padded": [evenness(replace(plan, parts=parts[count]), count) for count in PROCESSES],
            "raw DDP": [raw_evenness(plan, count) for count in PROCESSES],
        }
        rows += [(name, batch_size, *[f"{value:.3f}" for value in values]) for name, values in balances.items()]
    title = f"Mean / most work of a process, {what}, at most 32 rows or 4,096 tokens a micro-batch"
    return print_table(title, ("", "batch", *[f"{count} processes" for count in PROCESSES]), rows)


def evenness(plan: BatchPlan, processes: int) -> float:
    """Return what ``hftune plan`` says of a plan's first epoch."""
    return survey(plan, plan.num_steps, processes).work.evenness


def raw_evenness(plan: BatchPlan, processes: int) -> float:
    """Return the same where each process has equally many samples, padded to the longest of as many as fit a micro-batch."""
    loads = [[work_of(plan, part[rank::processes]) for rank in range(processes)] for part in whole_batches(plan)]
    return sum(map(sum, loads)) / (processes * sum(map(max, loads)))


def whole_batches(plan: BatchPlan) -> Iterator[np.ndarray]:
    """Yield the samples of the global batches of a shuffled epoch, but for a short last one."""
    order_N = np.random.default_rng(0).permutation(plan.num_samples)
    for start in range(0, max(plan.num_samples - plan.batch_size, 0) + 1, plan.batch_size):
        yield order_N[start : start + plan.batch_size]


def work_of(plan: BatchPlan, samples: np.ndarray) -> int:
    """Return the cost of samples, padded to the longest of ``micro_batch_size`` at a time."""
    parts = [
        plan.lengths[samples[first : first + plan.micro_batch_size]] for first in range(0, len(samples), plan.micro_batch_size)
    ]
    return sum(len(lengths) * int(plan.row_costs(int(lengths.max()))) for lengths in parts)


if __name__ == "__main__":
    main()
