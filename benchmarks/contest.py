"""Contenders that take turns, and scripts on several processes, for the benchmarks. Not run by itself; imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
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


def side_by_side(contenders: Sequence[Callable[..., Any]], turn: int, *given: Any) -> list[Any]:
    """Call two functions of a module, each in a new process, with a Stopwatch and what is given; return what they return.

    Which of them begins alternates with ``turn``.
    """
    context, ends = get_context("spawn"), Pipe()
    processes, answers = [], []
    for place, (contender, end) in enumerate(zip(contenders, ends, strict=True)):
        answer, question = context.Pipe(duplex=False)
        words = (question, contender, end, place == turn % 2, *given)
        processes.append(context.Process(target=_answer, args=words))
        processes[-1].start()
        question.close()
        answers.append(answer)
    for end in ends:
        end.close()  # so that one hears of the other's end
    try:
        return [answer.recv() for answer in answers]
    except EOFError:
        raise SystemExit("a contender failed; see above") from None
    finally:
        for process in processes:
            process.join()


def _answer(question: Connection, contender: Callable[..., Any], end: Connection, begins: bool, *given: Any) -> None:
    question.send(contender(Stopwatch(end, begins), *given))


def start(processes: int, words: Sequence[str]) -> None:
    """Run a Python command on that many processes, and wait for it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
