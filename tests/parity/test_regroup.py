"""Processes that live on when others of their elastic job are lost or come train what an undisturbed run trains."""

import os
import signal
import time

import pytest

from hftune.tracking.jsonl import read_lines
from hftune.tracking.ledger import audit, read_ledger
from tests.support.agents import Agents
from tests.support.runs import SMALL, Run, train_on

WORDS = (
    *(*SMALL, "task.dataset=tests.support.tasks:few_reviews", "train.epochs=15", "train.ema_decay=0.9"),
    *("eval.every=30", "checkpoint.every=1000", "train.dead_after_s=20", "train.num_workers=1"),
)
"""105 steps, and no checkpoint between the evaluations: what goes on goes on from memory."""


def test_three_lose_two_and_others_come_and_all_are_lost_but_one(tmp_path):
    out = tmp_path / "out"
    agents = Agents(5, ("recipe=yelp_demo", *WORDS, f"output_dir={out}"), tmp_path)

    def lines(kind):
        return [line for line in read_lines(out / "ledger.jsonl") if kind in line]

    def go_on(to):
        agents.wait_for(lambda: lines("step")[-1:] and lines("step")[-1]["step"] >= to, f"step {to}")

    def timed(what, deed, *args):
        began, starts = time.monotonic(), len(lines("after_step"))
        deed(*args)
        agents.wait_for(lambda: len(lines("after_step")) > starts and "step" in read_lines(out / "ledger.jsonl")[-1], what)
        print(f"{what}: {time.monotonic() - began:.2f} s to the next step", flush=True)

    def lose_two_one_after_the_other():
        os.kill(agents.group.pids[3], signal.SIGSTOP)
        agents.lose(4, signal.SIGKILL)
        time.sleep(1)  # the others wait for process 3 in the new round
        agents.lose(3, signal.SIGSTOP)

    agents.meet(0, 1, 2)
    go_on(15)
    timed("a process is killed", agents.lose, 2, signal.SIGKILL)
    go_on(30)
    timed("a process comes", agents.take_in, 3)
    go_on(45)
    timed("the main process is killed", agents.lose, 0, signal.SIGKILL)
    go_on(60)
    timed("another one comes", agents.take_in, 4)
    go_on(75)
    timed("one is killed, and one hangs while the others meet", lose_two_one_after_the_other)
    agents.wait_for(lambda: (out / "result.json").is_file(), "end")
    agents.group.kill()

    record, found = read_ledger(out), audit(out)
    assert (found.problems, found.steps, found.repeated) == ([], 105, 0), "a finished step was lost"
    assert [start["world_size"] for start in record.starts] == [3, 2, 3, 2, 3, 1]
    assert all(start.get("from_memory") for start in record.starts[1:])
    run, alone = Run(out), train_on(1, {"alone": WORDS}, tmp_path)["alone"]
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(name) == pytest.approx(alone.logged(name), rel=1e-5)
