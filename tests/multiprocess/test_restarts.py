"""Groups that torchrun restarts over two agents, which count their restarts each for itself."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from hftune.replay.audit import audit
from tests.support.runs import all_ended, started, warm_python

FAULTY = str(Path(__file__).parents[1] / "support" / "faulty.yaml")


def on_two_agents(*words: str) -> list[tuple[int, str]]:
    """Run a command on two agents of this machine, with one process each; return the exit code and all that each one said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--max-restarts", "2")
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1", *meeting)
    command = (warm_python(), "-m", "torch.distributed.run", *options, "-m", "hftune.run", *words)
    return [(code, out + err) for code, out, err in all_ended(started(*command), started(*command), timeout_s=180)]


def test_a_restarted_run_resumes_although_resume_never_started_it(tmp_path):
    """The process that is killed is not the main one, whose own agent counts no restart."""
    out = tmp_path / "out"
    fault = ("task.fault=kill", "task.rank=1", "task.sample=17")  # in step 15
    ended = on_two_agents(
        f"recipe={FAULTY}", f"output_dir={out}", "resume=never", *fault, "checkpoint.every=2", "train.dead_after_s=4"
    )
    said = "\n".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0], said
    assert re.search(r"Resuming from step 1\d of 16", said), said
    found = audit(out)
    assert (found.problems, found.steps) == ([], 16)
    assert found.starts[0]["after_step"] == 0 and found.starts[1]["after_step"] >= 10
