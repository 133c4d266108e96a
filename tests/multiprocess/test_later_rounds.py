"""Processes of an elastic job through three rounds: machines leave by word, then without one. The test is their agent.

Under FSDP, where no process has all of the state, so that new ones are started for each round.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hftune.distributed.rounds import FOLDER, JOB, ROUND, AgentFolder, Over
from hftune.replay.audit import audit
from hftune.tracking.ledger import last_step
from tests.support.runs import FSDP, Command

FAULTY = str(Path(__file__).parents[1] / "support" / "faulty.yaml")


def test_rounds_go_on_from_one_another_and_lose_what_they_must(tmp_path):
    out, agent = tmp_path / "out", AgentFolder(tmp_path)
    words = (f"recipe={FAULTY}", f"output_dir={out}", "resume=never", "task.pause_s=0.1")

    def start(number: int, world_size: int, *more: str) -> Command:
        return Command(world_size, *words, *more, **FSDP, **{ROUND: str(number), FOLDER: str(tmp_path), JOB: "job"})

    def wait_for_step(step: int, job: Command) -> None:
        while last_step(out / "ledger.jsonl") < step:
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)

    # A machine leaves by word. The other one hears of it with the sums of a step, and waits for its agent.
    job = start(0, 2, "checkpoint.every=0.01 s")
    wait_for_step(3, job)
    os.kill(job.pids[1], signal.SIGTERM)
    time.sleep(0.5)
    assert job.poll() is None
    agent.note(0, Over("node2 (10.0.0.2) leaves", is_planned=True))
    said, errors = job.communicate()
    reached = last_step(out / "ledger.jsonl")
    assert job.wait() == [75, 75] and f"Round 0 ends after step {reached}, with a checkpoint." in errors, errors
    assert (out / "checkpoints" / f"step_{reached:08d}").exists()

    # A machine is lost. The other one does not wait for a step that cannot be finished.
    job = start(1, 2, "checkpoint.every=never")
    wait_for_step(reached + 2, job)
    os.kill(job.pids[1], signal.SIGSTOP)
    time.sleep(0.3)  # for the other one to stand in a collective
    agent.note(1, Over("Lost node2 (10.0.0.2): no sign of life for 4 s", is_planned=False))
    began = time.monotonic()
    os.kill(job.pids[0], signal.SIGTERM)
    os.kill(job.pids[1], signal.SIGKILL)
    said, errors = job.communicate()
    assert job.wait() == [75, -9] and errors == "" and time.monotonic() - began < 10
    assert f"Round 1, 2 processes on 1 machine: going on from step {reached} of 16" in said and "No step is lost." in said
    lost = last_step(out / "ledger.jsonl")

    # The last machine goes on alone, with the whole model.
    job = start(2, 1, "checkpoint.every=never")
    said, errors = job.communicate()
    assert job.wait() == [0], errors
    again = f"Step {lost} is" if lost == reached + 1 else f"Steps {reached + 1} to {lost} are"
    assert f"Round 2, 1 process on 1 machine: going on from step {reached} of 16" in said and f"{again} computed again." in said
    found = audit(out)
    assert (found.problems, found.steps, found.repeated) == ([], 16, lost - reached)
