"""Contenders that take turns, and scripts on several processes, for the benchmarks. Not run by itself; imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from socket import socket
from typing import Any


def take_turns(contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call every contender once a round with the round's number; another one begins each time. Return what they returned.

    Alternating, because other users of the machine come and go in minutes: a slow minute then hits all contenders alike.
    """
    names, results = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contenders[name](turn))
    return results


class Stopwatch:
    """Times one of two trainings in processes of their own, which take turns after each step.

    What others do on the computer then hits both alike, be it for a second. The first steps are neither timed nor take turns:
    libraries choose kernels, fill caches, and hftune collects garbage once.
    """

    WARM_UP = 2

    def __init__(self, other: Connection, begins: bool) -> None:
        self.other, self.begins = other, begins
        self.steps, self.seconds, self.began = 0, 0.0, 0.0

    def end_step(self) -> None:
        """Add the time since the last turn ended, and wait for the other's step. To be called at the end of each step."""
        self.steps += 1
        if self.steps > self.WARM_UP:
            self.seconds += time.perf_counter() - self.began
        if self.steps >= self.WARM_UP:
            try:
                if self.steps > self.WARM_UP or not self.begins:
                    self.other.send(None)
                self.other.recv()
            except (EOFError, OSError):  # it has ended
                pass
        self.began = time.perf_counter()


def side_by_side(
    contenders: Sequence[Callable[..., Any]], turn: int, *given: Any, processes: int = 1, quick: bool = False
) -> list[Any]:
    """Call two functions of a module, each in new processes, with a Stopwatch and what is given.

    Which of them begins alternates with ``turn``.

    Args:
        processes: of each contender, which find each other by the variables that torchrun sets. Those of one rank take turns.
        quick: fork processes from one that has imported the libraries, for trials: they have read their variables already.

    Returns:
        What the first process of each contender returned.
    """
    context, running, answers = get_context("forkserver" if quick else "spawn"), [], []
    if quick:
        context.set_forkserver_preload(["transformers.trainer", "hftune.training", *{each.__module__ for each in contenders}])
    turns = [Pipe() for _ in range(processes)]
    for place, contender in enumerate(contenders):
        with closing(socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            group = {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{probe.getsockname()[1]}"}
        for rank, ends in enumerate(turns):
            answer, question = context.Pipe(duplex=False)
            variables = {**group, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if processes > 1 else {}
            words = (question, contender, variables, ends[place], place == turn % 2, *given)
            running.append(context.Process(target=_answer, args=words))
            running[-1].start()
            question.close()
            answers.append(answer)
    for ends in turns:
        for end in ends:
            end.close()  # so that one hears of the other's end
    try:
        return [answer.recv() for answer in answers][::processes]
    except EOFError:
        raise SystemExit("a contender failed; see above") from None
    finally:
        for process in running:
            process.join()


def _answer(
    question: Connection, contender: Callable[..., Any], variables: dict[str, str], end: Connection, begins: bool, *given: Any
) -> None:
    os.environ.update(variables)
    question.send(contender(Stopwatch(end, begins), *given))


def start(processes: int, words: Sequence[str]) -> None:
    """Run a Python command on that many processes, and wait for it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
