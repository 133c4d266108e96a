"""The launcher that forks: what it makes of signals and of processes that end, and how it replaces those that are lost.

The processes are forks that do next to nothing.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hftune.distributed.rounds import AgentFolder
from hftune.errors import ConfigError, Interrupted, TrainingError
from hftune.launchers import forks
from hftune.launchers.forks import Forks, Signals, Wanted
from hftune.launchers.local import check_range, read_failure


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def fork(work):
    """Return the process id of a fork that does this, and ends with what it returns."""
    if (child := os.fork()) == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os._exit(work())
    return child


def sleep():
    time.sleep(30)
    return 0


@pytest.fixture
def wait(signals, tmp_path):
    """Return a function that waits for forks whose processes are not replaced, and that do this."""

    def wait(*works, pids=()):
        made = Forks(Wanted(1, 1), tmp_path, signals, lambda variables: None)
        made._error_files = [tmp_path / "none"] * 2
        made.running.update({pid: rank for rank, pid in enumerate([*pids, *map(fork, works)])})
        return made._await_end()

    return wait


def test_processes_that_end_well_are_a_success(wait):
    assert wait(lambda: 0, lambda: 0) == 0


def test_one_that_fails_ends_the_others_and_is_named(wait, capsys):
    began = time.monotonic()
    assert wait(sleep, lambda: 3) == 1
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert said.startswith("Process 1 (pid ") and said.endswith(") ended with exit code 3.\n") and said.count("Process") == 1


def test_a_process_that_a_library_has_started_is_none_of_its_business(wait):
    stray = fork(lambda: 7)
    assert wait(lambda: time.sleep(0.3) or 0) == 0
    with pytest.raises(ChildProcessError):
        os.waitpid(stray, 0)


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_signal_is_passed_on_and_is_the_exit_code_unless_all_end_well(wait, ends_well):
    ready, is_ready = os.pipe()

    def finish():
        got = []
        if ends_well:
            signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        os.write(is_ready, b"-")
        while not got:
            time.sleep(0.01)
        return 0

    child = fork(finish)
    os.read(ready, 1)  # it has its own handlers
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert wait(pids=[child]) == (0 if ends_well else 128 + signal.SIGTERM)


def test_a_signal_after_the_end_of_a_process_harms_nobody(signals):
    child = fork(lambda: 0)
    os.waitpid(child, 0)
    signals.children = {child: 0}
    signals.send(signal.SIGTERM)


def test_patience_that_is_no_number_is_the_default(monkeypatch, signals):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30s")
    assert Signals()._patience == forks.SHUTDOWN_S


def test_a_module_that_cannot_be_imported_is_named_with_its_reason(tmp_path, capsys, monkeypatch, signals):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert forks.main([json.dumps({"least": 2, "most": 2}), str(tmp_path), "no_such_library", "hftune.run", "recipe=x"]) == 2
    said = "Task.libraries names no_such_library, which cannot be imported: ModuleNotFoundError: No module named 'no_such_library'."
    assert capsys.readouterr().err == f"hftune: {said}\n"
    error = read_failure(tmp_path)
    assert isinstance(error, ConfigError) and str(error) == said


# Processes that are replaced


@pytest.fixture
def run(tmp_path, signals, monkeypatch):
    """Return a function that runs an agent whose processes are calls of ``work(rank, round, AgentFolder)``, which return exit codes."""
    monkeypatch.setattr(forks, "serve_store", lambda listener: time.sleep(60))
    monkeypatch.setattr(forks, "SAME_S", 0.0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # the agent sets it to say its last word

    def run(work, least, most, gpus=()):
        def be_process(variables):
            os.environ.update(variables)
            try:
                folder = AgentFolder(Path(os.environ["HFTUNE_AGENT_FOLDER"]))
                os._exit(work(int(os.environ["RANK"]), int(os.environ["HFTUNE_ROUND"]), folder))
            finally:
                os._exit(99)

        (tmp_path / "files").mkdir()
        made = Forks(Wanted(least, most, 1, str(tmp_path)), tmp_path / "files", signals, be_process, gpus)
        try:
            return made.run(), made
        finally:
            signals.send(signal.SIGKILL)
            made.end_store()

    return run


def killed():
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def until_asked():
    time.sleep(30)
    return 0


def until(there):
    """Wait until it is there: the other processes may begin later than this one."""
    until_s = time.monotonic() + 30
    while not there():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def report(text):
    message = {"message": text, "extraInfo": {"timestamp": 1, "kind": "TrainingError"}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))


def train(folder, step):
    """Finish a step, as far as the agent can see."""
    with (Path(folder) / "ledger.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def test_one_that_is_killed_is_replaced_and_the_others_start_anew(run, tmp_path, capfd):
    def work(rank, number, folder):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        (tmp_path / f"{number}-{rank}-of-{os.environ['WORLD_SIZE']}").touch()
        if number == 1:
            return 0
        if rank == 1:
            until(lambda: len(list(tmp_path.glob("0-*"))) == 3)
            train(tmp_path, 7)
            return killed()
        return until_asked()

    code, _ = run(work, 1, 3)
    assert code == 0
    begun = {path.name for path in tmp_path.glob("*-of-*")}
    assert begun == {f"{number}-{rank}-of-3" for number in (0, 1) for rank in range(3)}
    assert not AgentFolder(tmp_path / "files" / "agent").over(0).is_planned
    said = capfd.readouterr().err
    assert said.startswith("hftune: Process 1 (pid ")
    assert said.endswith(") was killed by SIGKILL after step 7. Round 1: 3 processes.\n")


def test_three_losses_without_a_further_step_end_the_job_with_one_process_fewer_for_the_last(run, tmp_path, capfd):
    def work(rank, number, folder):
        (tmp_path / f"{number}-of-{os.environ['WORLD_SIZE']}").touch()
        return killed() if rank == 0 else until_asked()

    code, _ = run(work, 1, 3)
    assert code == 1 and {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-3", "1-of-3", "2-of-2"}
    error = read_failure(tmp_path / "files")
    assert isinstance(error, TrainingError) and "killed by SIGKILL before the first step. It was loss 3 without" in str(error)
    assert "Round 2: 2 processes, fewer than before: this was loss 2 without a further step." in capfd.readouterr().err


def test_losses_with_steps_between_them_never_end_the_job(run, tmp_path):
    def work(rank, number, folder):
        train(tmp_path, number + 1)
        return 0 if number == 4 else killed()

    assert run(work, 1, 1)[0] == 0


def test_the_least_number_stays(run):
    code, made = run(lambda rank, number, folder: killed() if rank == 0 else until_asked(), 2, 2)
    assert code == 1 and made.count == 2


def test_the_number_stays_a_multiple_of_the_stages_of_a_pipeline(signals, tmp_path):
    made = Forks(Wanted(2, 5, 2, str(tmp_path)), tmp_path, signals, lambda variables: None)
    counts = [made.count, made._lower({0: "lost"}), made.count, made._lower({0: "lost"}), made.count]
    assert counts == [4, True, 2, False, 2]


@pytest.mark.parametrize(("exit_code", "reports", "rounds"), [(1, True, 1), (2, True, 1), (75, False, 1), (1, False, 3)])
def test_one_that_says_why_it_fails_ends_the_job_at_once(run, exit_code, reports, rounds):
    def work(rank, number, folder):
        if rank == 1:
            return until_asked()
        if reports:
            report("hftune: Sample 17 has no label.")
        return exit_code

    code, made = run(work, 2, 2)
    assert (code, made.round) == (1, rounds - 1)


def test_a_lost_gpu_is_a_loss_and_left_out_at_the_second_time(run, tmp_path, capfd):
    said = [
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
    ]

    def work(rank, number, folder):
        (tmp_path / f"{number}-on-{os.environ.get('CUDA_VISIBLE_DEVICES')}").touch()
        if number == 2:
            return 0
        if rank != 1:
            return until_asked()
        report(f"Traceback ...\n{said[number]}\nCompile with ...")
        return 1

    code, _ = run(work, 1, 8, gpus=["0", "1", "2"])
    assert code == 0 and {path.name for path in tmp_path.glob("*-on-*")} >= {"2-on-0,2"}
    assert read_failure(tmp_path / "files") is None
    shown = capfd.readouterr().err
    assert ") ended with CUDA error: uncorrectable ECC error encountered before the first step. Round 1: 3 processes." in shown
    assert "(pid 7) is killed by signal: Killed before the first step. Round 2: 2 processes, fewer" in shown


def test_a_store_that_ends_is_a_loss(run, tmp_path, monkeypatch):
    def serve(listener):
        if not (tmp_path / "first").exists():
            (tmp_path / "first").touch()
            os._exit(1)
        time.sleep(60)

    monkeypatch.setattr(forks, "serve_store", serve)
    code, made = run(lambda rank, number, folder: 0 if number else until_asked(), 1, 2)
    assert code == 0 and made.round == 1


def test_a_signal_between_two_rounds_stops_the_job(run, tmp_path):
    def work(rank, number, folder):
        if rank == 0:
            until((tmp_path / "listens").exists)
            train(tmp_path, 3)
            return killed()
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT) or os._exit(75))
        (tmp_path / "listens").touch()
        return until_asked()

    code, _ = run(work, 1, 2)
    assert code == 128 + signal.SIGINT
    error = read_failure(tmp_path / "files")
    assert isinstance(error, Interrupted)
    assert str(error).startswith("SIGINT: stopped after step 3, while processes were being replaced. The same command")


def refused(*bounds):
    with pytest.raises(ConfigError) as caught:
        check_range(f"--processes {bounds[0]}-{bounds[1]}", *bounds)
    return str(caught.value)


def test_bounds_that_nothing_fits_are_refused():
    assert refused(0, 4, 1) == "--processes 0-4: the least number must be at least 1."
    assert refused(4, 1, 1) == "--processes 4-1: the least number exceeds the most, 1. Write the smaller number first."
    assert refused(5, 7, 4) == "--processes 5-7 contains no multiple of parallel.pipeline_stages=4. Raise the most."
