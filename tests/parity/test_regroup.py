"""Processes that live on when others of their elastic job are lost or come train what an undisturbed run trains."""

import signal
import time

import pytest

from hftune.tracking.jsonl import read_lines
from hftune.tracking.ledger import audit, read_ledger
from tests.support.agents import Agents
from tests.support.runs import SMALL, Run, train_on

WORDS = (
    *(*SMALL, "task.dataset=tests.support.tasks:few_reviews", "train.epochs=20", "train.ema_decay=0.9"),
    *("eval.every=30", "checkpoint.every=1000"),
)
"""140 steps, and no checkpoint between the evaluations: what goes on goes on from memory."""


def test_three_lose_one_and_another_comes_and_all_are_lost_but_one(tmp_path):
    out = tmp_path / "out"
    agents = Agents(4, ("recipe=yelp_demo", *WORDS, f"output_dir={out}"), tmp_path)

    def taken():
        return max((line["step"] for line in read_lines(out / "ledger.jsonl") if "step" in line), default=0)

    def go_on(to):
        agents.wait_for(lambda: taken() >= to, f"step {to}")

    def starts():
        return sum("after_step" in line for line in read_lines(out / "ledger.jsonl"))

    def timed(deed, *args):
        began, before, count = time.monotonic(), taken(), starts()
        deed(*args)
        agents.wait_for(lambda: starts() > count and taken() > before, "regroup")
        print(f"{deed.__name__}{args}: {time.monotonic() - began:.2f} s to the next step", flush=True)

    agents.meet(0, 1, 2)
    go_on(20)
    timed(agents.lose, 2, signal.SIGKILL)
    go_on(45)
    timed(agents.take_in, 3)
    go_on(70)
    timed(agents.lose, 0, signal.SIGKILL)
    go_on(95)
    timed(agents.lose, 3, signal.SIGSTOP)
    agents.wait_for(lambda: (out / "result.json").is_file(), "end")
    agents.group.kill()

    record, found = read_ledger(out), audit(out)
    assert (found.problems, found.steps, found.repeated) == ([], 140, 0), "a finished step was lost"
    assert [start["world_size"] for start in record.starts] == [3, 2, 3, 2, 1]
    assert all(start.get("from_memory") for start in record.starts[1:])
    run, alone = Run(out), train_on(1, {"alone": WORDS}, tmp_path)["alone"]
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(name) == pytest.approx(alone.logged(name), rel=1e-5)
