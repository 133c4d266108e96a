"""accelerate launch with 2node.yaml on two machines: the same training; and what each says where it cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hftune import cli
from hftune.checkpoints.checkpointer import newest
from hftune.replay.audit import audit
from hftune.tracking.jsonl import read_lines
from tests.support.hub import Hub
from tests.support.hub_contents import bigbird, xlsum
from tests.support.machines import MAIN, Machine, NotAllowed, two_machines
from tests.support.runs import Command, Run, all_ended, environment, started, train_on, warm_python

TAGGING = str(Path(__file__).parents[1] / "support" / "tagging.yaml")
CONFIG = str(Path(__file__).parents[2] / "accelerate_configs" / "2node.yaml")
FAULTY = str(Path(__file__).parents[1] / "support" / "faulty.yaml")
DIGITS = ("task.dataset=tests.support.tasks:few_digits", "train.epochs=1", "train.log_every=1", "train.batch_size=48")
"""Neither these nor the tasks of the tests import transformers, which is half of the time that a process takes to start."""


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Machine]]:
    try:
        with two_machines() as machines:
            yield machines
    except NotAllowed as error:
        pytest.skip(str(error))


@pytest.fixture
def machines(pair) -> Iterator[list[Machine]]:
    """The same two for each test, without what a test that failed has left running on their ports."""
    yield pair
    for machine in pair:
        machine.kill()


def start(
    machine: Machine, *words: str, launcher: tuple[str, ...] = (), config: str = CONFIG, **variables: str
) -> subprocess.Popen:
    """Start the command of the README there; both machines are given the same."""
    command = [warm_python(), "-m", "accelerate.commands.launch", "--config_file", config, *launcher]
    return started(*machine.prefix, *command, "-m", *words, **{"HFTUNE_JOIN_TIMEOUT_S": "60", **variables})


def trained(machines, folder, recipe, overrides, processes) -> tuple[Run, Run]:
    """Train on both machines, and on one process."""
    words = ("hftune.run", f"recipe={recipe}", *overrides, f"output_dir={folder / 'out'}")
    given = () if processes == 4 else ("--num_processes", str(processes))  # four is what the file says
    for code, _, err in all_ended(*[start(machine, *words, launcher=given) for machine in machines]):
        assert code == 0, err
    run, alone = Run(folder / "out"), train_on(1, {"alone": overrides}, folder, recipe)["alone"]
    assert run.result["world_size"] == processes
    assert {path.name for path in run.folder.iterdir()} == {path.name for path in alone.folder.iterdir()}
    return run, alone


def test_two_machines_train_as_one_process_does(machines, tmp_path):
    run, alone = trained(machines, tmp_path, "mnist_demo", DIGITS, processes=4)
    assert run.logged("train/loss") == pytest.approx(alone.logged("train/loss"), rel=1e-5)
    assert run.logged("train/grad_norm") == pytest.approx(alone.logged("train/grad_norm"), rel=1e-5)
    assert run.logged("eval/loss") == pytest.approx(alone.logged("eval/loss"), rel=1e-5)
    assert [row["prediction"] for row in run.predictions] == [row["prediction"] for row in alone.predictions]


def test_one_process_on_each_of_two_machines_trains_as_one_does_in_float64(machines, tmp_path):
    run, alone = trained(machines, tmp_path, TAGGING, (), processes=2)
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(metric) == pytest.approx(alone.logged(metric), rel=1e-12)


def test_the_bigbird_command_works_as_typed_and_each_machine_fetches_each_file_once(machines, tmp_path, monkeypatch):
    """After `hftune configs 2node --copy`; the address in the file is that of machineA, so that not even it is edited."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "2node", "--copy"]) == 0
    hub = Hub(tmp_path / "hub")
    commits = {"task.model": bigbird(hub), "task.dataset": xlsum(hub)}
    serving = [warm_python(), "-m", "tests.support.hub", str(hub.root), "8000", MAIN]
    server = subprocess.Popen([*machines[0].prefix, *serving], env=environment())
    sizes = ("train.max_steps=2", "train.batch_size=8", "task.max_source_length=100", "task.max_target_length=8")
    try:
        jobs = [
            start(
                machine,
                *("hftune.run", "recipe=bigbird", *sizes, "task.max_eval_samples=4", f"output_dir={tmp_path / 'out'}"),
                launcher=("--num_processes", "2"),
                config="2node.yaml",
                HF_ENDPOINT=f"http://{MAIN}:8000",
                HF_HUB_OFFLINE="0",
                HF_HOME=str(tmp_path / machine.name),
                HF_DATASETS_CACHE=str(tmp_path / machine.name / "datasets"),
            )
            for machine in machines
        ]
        for code, _, err in all_ended(*jobs):
            assert code == 0, err
    finally:
        server.kill()
        server.wait()
    assert Run(tmp_path / "out").result["commits"] == commits and Run(tmp_path / "out").result["world_size"] == 2
    assert set(hub.fetched().values()) == {2} and len(hub.fetched()) == 6


def test_both_machines_stop_when_the_cable_is_pulled_and_one_process_goes_on_from_there(machines, tmp_path):
    out = tmp_path / "out"
    words = (f"recipe={FAULTY}", f"output_dir={out}", "task.pause_s=0.05", "train.epochs=300", "checkpoint.every=5")
    launcher = ("--num_processes", "2")
    jobs = [start(machine, "hftune.run", *words, "train.dead_after_s=4", launcher=launcher) for machine in machines]
    usage = {"perf/host0/cpu_percent", "perf/host0/disk_free_gib", "perf/host1/cpu_percent", "perf/host1/memory_gib"}

    def with_usage() -> list[dict]:
        return [line for line in read_lines(out / "metrics.jsonl") if usage | {"perf/slowest_rank"} <= line.keys()]

    wait_for(lambda: len(list((out / "checkpoints").glob("step_*"))) >= 2 and with_usage(), *jobs)
    assert not {"perf/host1/disk_free_gib", "perf/host2/memory_gib"} & with_usage()[0].keys()
    machines[1].cut()
    try:
        here, there = all_ended(*jobs, timeout_s=60.0)
    finally:
        machines[1].mend()
    assert here[0] != 0 and there[0] != 0
    assert re.search(r"hftune: Process 1 \(host machineB, pid \d+\) has given no sign of life for \d+ s", here[2])
    assert re.search(r"It was killed, or its machine is down or cut off\..* Last seen \d+ s ago in ", here[2])
    assert re.search(
        r"hftune: The launcher's store at 10\.77\.0\.1:29500 does not answer in (step|the evaluation after step) \d+: ",
        there[2],
    )

    reached = newest(out / "checkpoints")[0].step
    steps = f"train.max_steps={reached + 3}"
    done = Command(1, *words, steps)
    assert done.returncode == 0, done.communicate()
    assert f"Resuming from step {reached} of {reached + 3}" in done.communicate()[0]
    found = audit(out)
    assert found.problems == [] and found.steps == reached + 3
    assert [begin["world_size"] for begin in found.starts] == [2, 1]


def wait_for(is_so, *processes: subprocess.Popen) -> None:
    until = time.monotonic() + 90
    while not is_so():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            pytest.fail(str([process.communicate() for process in processes]))
        time.sleep(0.05)


def test_the_doctor_knows_who_is_in_the_group(machines):
    (code, out, err), (other_code, other_out, _) = all_ended(
        *[start(machine, "hftune.doctor", f"recipe={TAGGING}", launcher=("--num_processes", "2")) for machine in machines]
    )
    assert (code, other_code) == (0, 0), err
    for process, (name, machine) in enumerate([("machineA", machines[0]), ("machineB", machines[1])]):
        assert re.search(rf"ok     process {process}       {name}, pid \d+, cpu, network {machine.interface}\n", out)
    assert "the same code, versions, recipe and data on all 2 processes, compared in 0." in out
    assert out.endswith("This group is fit to train.\n") and "doctor" not in other_out


def test_a_machine_that_does_not_come_is_named_before_a_process_is_started(machines):
    """Who came says who; who finds nobody says where it looked. The missing one is known by name where the scheduler told."""
    code, out, err = all_ended(
        start(machines[0], "hftune.doctor", HFTUNE_JOIN_TIMEOUT_S="1", HFTUNE_MACHINES="machineA machineB")
    )[0]
    assert code == 1 and out == ""
    here = f"hftune: 1 of 2 machines is here: machineA (10.77.0.1 on {machines[0].interface}). Missing: machineB."
    assert err.startswith(here) and "reach 10.77.0.1:29500" in err and "HFTUNE_JOIN_TIMEOUT_S=2 waits longer" in err
    code, out, err = all_ended(start(machines[1], "hftune.doctor", HFTUNE_JOIN_TIMEOUT_S="1"))[0]
    assert code == 1 and out == ""
    there = f"this machine is machineB (10.77.0.2 on {machines[1].interface})"
    assert err.startswith(f"hftune: Nothing answers at 10.77.0.1:29500 (Connection refused); {there}.")
    assert "correct main_process_ip. Waited 1 s; HFTUNE_JOIN_TIMEOUT_S=2 waits longer." in err


def test_a_program_that_holds_the_port_is_not_waited_for(machines):
    script = "import socket, time; s = socket.create_server(('', 29500)); print('here', flush=True); time.sleep(100)"
    foreign = subprocess.Popen([*machines[0].prefix, sys.executable, "-c", script], stdout=subprocess.PIPE)
    foreign.stdout.readline()
    try:
        # --machine_rank 1 only keeps accelerate from looking at the port itself.
        jobs = [start(machine, "hftune.doctor", launcher=("--machine_rank", "1")) for machine in machines]
        (code, _, err), (other_code, _, other_err) = all_ended(*jobs, timeout_s=60.0)
    finally:
        foreign.kill()
        foreign.wait()
    assert (code, other_code) == (1, 1)
    who = f"({Path(sys.executable).name}, pid {foreign.pid})"
    for said, where in (
        (err, f"on this machine is taken by another program {who}: "),
        (other_err, "on 10.77.0.1 is taken by "),
    ):
        last = said.splitlines()[-1]  # below torchrun's, that it does not need the rank
        assert last.startswith(f"hftune: Port 29500 {where}") and "a different --main_process_port" in last


def test_machines_that_were_told_of_different_numbers_of_machines_are_told_so(machines):
    three = ("--num_machines", "3", "--num_processes", "3")
    jobs = [start(machines[0], "hftune.doctor"), start(machines[1], "hftune.doctor", launcher=three)]
    for code, _, err in all_ended(*jobs):
        assert code == 1 and err.count("\n") == 1
        assert re.match(r"hftune: machineB \(.*\) was started for 3 machines, and machineA \(.*\) for 2\. .*num_machines", err)


def test_a_machine_with_other_code_and_another_recipe_is_named_before_the_data_are_read(machines, tmp_path):
    """The file of the user's own task counts as code."""
    for name, width in (("A", 32), ("B", 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            f"from dataclasses import dataclass\nfrom tests.support.tasks import Tagging\n\n\n@dataclass\nclass Mine(Tagging):\n    width: int = {width}\n"
        )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("task: {type: mine.Mine}\ntrain: {batch_size: 8}\n")
    jobs = [
        start(
            machine,
            *("hftune.run", f"recipe={recipe}", f"output_dir={tmp_path / 'out'}", f"train.lr={lr}"),
            launcher=("--num_processes", "2"),
            PYTHONPATH=f"{tmp_path / name}{os.pathsep}{environment()['PYTHONPATH']}",
        )
        for machine, name, lr in zip(machines, "AB", ("0.1", "0.2"), strict=True)
    ]
    expected = (
        "hftune: Compared with process 0 on machineA, process 1 on machineB has different code: mine.py; a different "
        "recipe: task.width 64 instead of 32, train.lr 0.2 instead of 0.1. Install the same version of hftune on all machines, "
        "and use the same task file. Start all processes with the same recipe and the same overrides."
    )
    for code, out, err in all_ended(*jobs):
        assert code == 1 and len(out.splitlines()) <= 1, out  # the main process has greeted
        assert err.splitlines()[0] == expected
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_pipeline_reaches_over_both_machines(machines, tmp_path):
    """Four stages on 2 x 2 processes, the cable in the middle."""
    recipe = str(Path(__file__).parents[1] / "support" / "next_token.yaml")
    words = ("task.model=chain", "task.dropout=0.1", "parallel.pipeline_stages=4", f"output_dir={tmp_path}/cut")
    launcher = ("--num_processes", "4")
    ended = all_ended(*[start(machine, "hftune.run", f"recipe={recipe}", *words, launcher=launcher) for machine in machines])
    assert [code for code, *_ in ended] == [0, 0], ended
    expected = train_on(1, {"alone": words[:2]}, tmp_path, recipe)["alone"]
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert Run(tmp_path / "cut").logged(metric) == pytest.approx(expected.logged(metric), rel=1e-5)
