"""Runs that are kept at a real server of objects, on this machine: killed, without the network, refused, on other machines."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from hftune.checkpoints.checkpointer import steps
from hftune.replay.audit import audit
from hftune.replay.ledger import read_ledger
from tests.multiprocess.test_elastic import TAGGING, WORDS
from tests.multiprocess.test_own_folders import OwnFolders
from tests.support.machines import NotAllowed, several_machines
from tests.support.runs import Run, environment, train_on, warm_python

JOB = (*WORDS, "train.max_steps=60", "eval.every=20", "task.pause_s=0.03")
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "topsecret", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """moto, which keeps objects in memory; while it is stopped, nobody answers."""

    def __init__(self, log: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", log.open("w")
        words = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self.process = subprocess.Popen(words, env=environment(), stdout=self._log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 60
        while True:
            try:
                self.ask("PUT", "mine")
                return
            except OSError:
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)

    def ask(self, method: str, name: str, data: bytes | None = None) -> None:
        asked = urllib.request.Request(f"{self.url}/{name}", data, {"Content-Type": "text/plain"}, method=method)
        urllib.request.urlopen(asked, timeout=10).close()

    def read(self, name: str) -> bytes:
        from s3fs import S3FileSystem

        options = {"endpoint_url": self.url, "key": KEYS["AWS_ACCESS_KEY_ID"], "secret": KEYS["AWS_SECRET_ACCESS_KEY"]}
        return S3FileSystem(**options).cat_file(name)

    def index(self, run: str) -> dict:
        try:
            return json.loads(self.read(f"mine/{run}/bucket.json"))
        except FileNotFoundError:
            return {"step": 0}

    def wait_for(self, run: str, step: int) -> None:
        until = time.monotonic() + 120
        while self.index(run)["step"] < step:
            assert time.monotonic() < until, f"no step {step} of {run}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server") / "log")
    yield made
    made.process.kill()


@pytest.fixture
def begin(tmp_path, server):
    """Return a function that starts a training; what still runs at the end is killed."""
    (tmp_path / "brake").touch()
    started = []

    def begin(*words: str, processes: int = 1, python: str | None = None, **variables: str) -> subprocess.Popen:
        command = [python or warm_python(), "-m", "hftune.cli", "train", f"--processes={processes}", f"recipe={TAGGING}", *JOB]
        env = environment(**{**KEYS, "AWS_ENDPOINT_URL": server.url, "PYTHONUNBUFFERED": "1", **variables})
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command += [f"task.brake={tmp_path / 'brake'}", *words]
        started.append(subprocess.Popen(command, env=env, cwd=tmp_path, start_new_session=True, **streams))
        return started[-1]

    yield begin
    for process in started:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """kill -9 for the launcher and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*(found := psutil.Process(process.pid)).children(recursive=True), found]:
            one.kill()
    process.wait()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=150)
    return process.returncode, out


def without_speed(run: Run) -> list[dict]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


@pytest.mark.parametrize("size", [1, 2])
def test_killed_without_its_folder_a_run_resumes_bit_equal_from_the_bucket(tmp_path, server, begin, size):
    whole = train_on(size, {"whole": JOB}, tmp_path, TAGGING)["whole"]
    address = f"output_dir=s3://mine/killed-{size}"
    process = begin(address, processes=size, python=sys.executable)  # a fork's children would not be found
    server.wait_for(f"killed-{size}", 24)
    kill(process)
    shutil.rmtree(tmp_path / "outputs")
    (tmp_path / "brake").unlink()
    code, out = ended(begin(address, processes=size))
    run = Run(tmp_path / f"outputs/mine/killed-{size}")
    assert code == 0 and "Fetching" in out and "Resuming from step" in out, out
    assert f"s3://mine/killed-{size} has everything" in out and "topsecret" not in out
    for name in ("model/model.safetensors", "model_last/model.safetensors"):
        expected = (whole.folder / name).read_bytes()
        there = server.index(f"killed-{size}")["files"][name]["at"]
        assert (run.folder / name).read_bytes() == expected == server.read(f"mine/killed-{size}/{there}")
    assert without_speed(run) == without_speed(whole)
    assert run.result["best"] == whole.result["best"]
    found = audit(run.folder)
    assert (found.problems, found.steps, len(found.starts)) == ([], 60, 2) and found.starts[1]["after_step"] >= 24
    assert not [path for path in run.folder.rglob("*") if path.is_file() and b"topsecret" in path.read_bytes()]
    if size > 1:
        return
    shutil.rmtree(tmp_path / "outputs")
    code, out = ended(begin(address))
    assert code == 0 and f"s3://mine/killed-{size} is finished: 60 steps" in out, out


def test_without_the_server_training_goes_on_and_catches_up(tmp_path, server, begin):
    process = begin("output_dir=s3://mine/cut", "train.max_steps=400")
    server.wait_for("cut", 4)
    server.process.send_signal(signal.SIGSTOP)  # it answers no more, as behind a cut cable
    ledger, before = tmp_path / "outputs/mine/cut", read_ledger(tmp_path / "outputs/mine/cut").last
    until = time.monotonic() + 60
    while read_ledger(ledger).last < before + 60:
        assert time.monotonic() < until, "training waits for the server"
        time.sleep(0.1)
    server.process.send_signal(signal.SIGCONT)
    (tmp_path / "brake").unlink()
    code, out = ended(process)
    assert code == 0 and "s3://mine/cut has everything" in out, out
    assert server.index("cut")["step"] == 400


def test_a_server_that_refuses_connections_costs_a_warning_and_time(tmp_path, server, begin):
    """Behind a port that is closed for a while."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forward = ["-c", FORWARD, str(port), str(server.port)]
    relay = subprocess.Popen([sys.executable, *forward])
    process = begin("output_dir=s3://mine/refused", "train.max_steps=400", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    server.wait_for("refused", 4)
    relay.kill()
    relay.wait()
    said = ""
    while "cannot be written" not in said:
        said += (line := process.stdout.readline())
        assert line, said
    (tmp_path / "brake").unlink()
    relay = subprocess.Popen([sys.executable, *forward])
    code, out = ended(process)
    relay.kill()
    assert code == 0 and "s3://mine/refused is up to date again, after" in out, said + out
    assert server.index("refused")["step"] == 400


FORWARD = """
import socket, sys, threading
def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        pass
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    one = listener.accept()[0]
    other = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for pair in ((one, other), (other, one)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def test_no_bucket_and_wrong_keys_are_one_sentence_before_a_model_is_loaded(server, begin):
    code, out = ended(begin("output_dir=s3://yours/run"))
    assert code == 2 and "hftune: output_dir=s3://yours/run: there is no such file or bucket. Correct the name," in out
    assert "Traceback" not in out and "recipe   " not in out
    server.ask("POST", "moto-api/reset-auth", b"0")  # from here on, keys are checked
    try:
        code, out = ended(begin("output_dir=s3://mine/denied", processes=2))
    finally:
        server.ask("POST", "moto-api/reset-auth", b"1000000")
    assert code == 2 and out.count("output_dir=s3://mine/denied: access is denied (") == 1, out
    assert "Traceback" not in out and "recipe   " not in out and "topsecret" not in out


def test_commands_read_a_run_from_the_server(tmp_path, server, begin):
    (tmp_path / "brake").unlink()
    code, out = ended(begin("output_dir=s3://mine/read", "train.max_steps=8", "eval.every=4"))
    assert code == 0, out
    env = environment(**KEYS, AWS_ENDPOINT_URL=server.url)
    here, there = tmp_path / "outputs/mine/read", "s3://mine/read"
    for words in (
        ("audit", there),
        ("report", there),
        ("compare", there, str(here)),
        ("evaluate", there, "--trust-code"),
        ("replay", there, "--step", "7", "--trust-code"),
    ):
        done = subprocess.run(
            [warm_python(), "-m", "hftune.cli", *words], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)


class InTheBucket(OwnFolders):
    """Machines with nothing in common but a server of objects, at the machine that does not train."""

    def come(self, machine):
        return self.start(machine, "output_dir=s3://mine/run", "checkpoint.copies=0")

    def out(self, machine):
        return self.names[machine.name] / "outputs/mine/run"


def test_the_first_machine_of_an_elastic_job_is_lost_and_a_fresh_one_has_the_run(tmp_path):
    try:
        with several_machines(3) as (a, b, stays):
            job = InTheBucket(tmp_path, [a, b, stays])
            job.variables = {**KEYS, "AWS_ENDPOINT_URL": f"http://{stays.address}:5555"}
            job.run(stays, "-m", "moto.server", "-H", stays.address, "-p", "5555")
            job.run(stays, "-c", MAKE_BUCKET)
            try:
                first = job.come(a)
                job.wait_for(lambda: job.newest(a) >= 4, "step 4 on machineA")
                second = job.come(b)
                job.wait_for_words(second, r"Round 1: 2 machines, machineA .*, machineB")
                reached = job.newest(a)
                job.wait_for(lambda: job.newest(a) >= reached + 8, "eight steps more")
                time.sleep(3)  # for the upload
                a.power_off()
                job.wait_for_words(second, r"Fetching .* from s3://mine/run")
                job.wait_for_words(second, r"1 process on 1 machine: going on from step \d+")
                assert steps(job.out(b) / "checkpoints")[0] >= reached
                job.brake.unlink()
                assert job.wait_for_end(second) == [0], job.words_of_all()
                assert "s3://mine/run has everything" in second.said and "Traceback" not in first.said + second.said
                reference = train_on(1, {"alone": WORDS}, tmp_path, TAGGING)["alone"]
                found = audit(job.out(b))
                assert not found.problems and found.steps == 400
                assert Run(job.out(b)).logged("train/loss") == pytest.approx(reference.logged("train/loss"), rel=1e-9)
                ours = load_file(job.out(b) / "model_last/model.safetensors")
                alone = load_file(reference.folder / "model_last/model.safetensors")
                assert all((ours[key] - alone[key]).abs().max() < 1e-9 * alone[key].abs().max() for key in alone)
            finally:
                job.end()
    except NotAllowed as error:
        pytest.skip(str(error))


MAKE_BUCKET = """
import os, time, urllib.request
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + "/mine", method="PUT"))
        break
    except OSError:
        time.sleep(0.1)
"""
