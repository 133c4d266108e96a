"""The batch script that `hftune slurm` writes does what it says, under stand-ins for SLURM's commands.

The nodes are this machine's loopback, each with one process. What the stand-ins do with signals is what SLURM does: srun ends
its tasks with SIGKILL if it gets a SIGTERM itself, scancel --signal reaches the tasks and not the batch script. If SLURM is
installed, test_slurm_cluster.py does the same on a real one.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hftune import cli
from hftune.replay.audit import audit
from tests.support.runs import Run, environment, warm_python

ROOT = Path(__file__).parents[2]
FAULTY = f"recipe={ROOT}/tests/support/faulty.yaml"
STAND_INS = {
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        trap 'kill -KILL "${tasks[@]}"' TERM
        for ((node = 0; node < STAND_IN_NODES; node++)); do
            # Both nodes are this machine, where accelerate would find the port of node 0 taken.
            setsid "${@/#--machine_rank=0/--machine_rank=$node}" &
            tasks+=($!)
            # And the first one has to hold the port of the job before the second one looks.
            until ((node > 0 || STAND_IN_NODES == 1)) || : < "/dev/tcp/127.0.0.1/$((10000 + SLURM_JOB_ID))"; do
                kill -0 "$!" || break
                sleep 0.1
            done 2> /dev/null
        done
        echo "${tasks[@]}" > "$STAND_IN/tasks"
        for task in "${tasks[@]}"; do wait "$task" || code=$?; done
        exit "${code:-0}"
    """,
    "scancel": """
        [[ $* == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(< "$STAND_IN/tasks")
    """,
    "scontrol": """
        case "$*" in
            "show hostnames node[1-2]") printf '127.0.0.1\\n127.0.0.2\\n' ;;
            *) echo "$*" >> "$STAND_IN/scontrol" ;;
        esac
    """,
}


@pytest.fixture
def sbatch(tmp_path, capsys, monkeypatch):
    """Return a function that writes a job's script with `hftune slurm`, starts it as SLURM would, and returns the process."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "it's here").mkdir()
    monkeypatch.chdir(tmp_path / "it's here")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "executable", warm_python())
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    jobs = []

    def start(*words, nodes):
        assert cli.main(["slurm", *words, "--nodes", str(nodes), "--gpus", str(2 // nodes)]) == 0
        script = tmp_path / "job.sbatch"
        script.write_text(capsys.readouterr().out)
        subprocess.run(["bash", "-n", script], check=True)
        slurm = {"SLURM_JOB_ID": start.job_id, "SLURM_JOB_NODELIST": "node[1-2]", "STAND_IN_NODES": str(nodes)}
        slurm |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "4"}
        env = environment(PATH=path, STAND_IN=str(tmp_path), **slurm)
        with (tmp_path / "job.log").open("a") as log:  # --open-mode=append
            jobs.append(subprocess.Popen(["bash", script], cwd="/", env=env, stdout=log, stderr=log))
        return jobs[-1]

    start.job_id = str(next(port for port in random.sample(range(10_000, 30_000), 100) if is_free(port)) - 10_000)
    yield start
    for job in jobs:
        job.kill()
        job.wait()


def is_free(port):
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) != 0


def said(tmp_path):
    return (tmp_path / "job.log").read_text()


def requeued(tmp_path):
    return (tmp_path / "scontrol").read_text().splitlines() if (tmp_path / "scontrol").is_file() else []


def wait_until(words, tmp_path, job):
    until = time.monotonic() + 120
    while words not in said(tmp_path):
        assert job.poll() is None and time.monotonic() < until, said(tmp_path)
        time.sleep(0.05)


def test_job_saves_at_the_grace_signal_is_requeued_and_goes_on_to_the_end(sbatch, tmp_path):
    words = (FAULTY, "task.pause_s=0.2", "output_dir=a folder's name")
    job = sbatch(*words, nodes=2)
    wait_until("step 4/16", tmp_path, job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == 0, said(tmp_path)
    assert requeued(tmp_path) == [f"requeue {sbatch.job_id}"]
    assert said(tmp_path).endswith(
        f"hftune: job {sbatch.job_id} stopped at the time limit: back into the queue, to resume from the newest checkpoint.\n"
    )
    assert "Traceback" not in said(tmp_path)
    folder = tmp_path / "it's here" / "a folder's name"
    (checkpoint,) = [path.name for path in (folder / "checkpoints").iterdir()]
    stopped = int(checkpoint.removeprefix("step_"))
    assert 4 <= stopped < 16 and not (folder / "result.json").exists()

    assert sbatch(*words, nodes=2).wait(timeout=120) == 0, said(tmp_path)
    assert requeued(tmp_path) == [f"requeue {sbatch.job_id}"]  # that of before
    assert f"Resuming from step {stopped} of 16" in said(tmp_path)
    assert Run(folder).result["world_size"] == 2
    found = audit(folder)
    assert (found.problems, found.steps, found.whole_epochs) == ([], 16, 1)
    assert [start["after_step"] for start in found.starts] == [0, stopped]


def test_job_whose_training_fails_is_not_requeued(sbatch, tmp_path):
    """On one node, with a process for each of its two GPUs."""
    assert sbatch(FAULTY, "task.fault=raise", "task.sample=17", nodes=1).wait(timeout=120) != 0
    assert "[process 1 of 2 on host " in said(tmp_path) and "ValueError: bad sample 17" in said(tmp_path)
    assert not re.search('File "[^"]*site-packages', said(tmp_path))  # no call stack of the launcher's own
    assert requeued(tmp_path) == []
    assert said(tmp_path).splitlines()[-1].startswith(f"hftune: job {sbatch.job_id} failed: the message is above. ")
