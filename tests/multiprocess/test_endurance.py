"""What does not end a run: an upload, C code that holds Python's lock, and an outsider at the launcher's port."""

import json
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.support.runs import Group

TRAPPED = str(Path(__file__).parents[1] / "support" / "trapped.yaml")
FAULTY = str(Path(__file__).parents[1] / "support" / "faulty.yaml")


def said_by(group, log):
    codes = group.wait()
    assert codes == [0, 0], f"{codes}\n{log.read_text()}"
    return log.read_text()


def test_an_upload_longer_than_a_stall_is_waited_for(tmp_path):
    task = ("task.type=tests.support.tasks.SlowUpload", "task.upload_s=6", "train.stall_after_s=3")
    log = tmp_path / "log"
    said = said_by(Group(2, [[TRAPPED, [*task, f"output_dir={tmp_path}/out"], None, {}]], log), log)
    assert "uploaded" in said and "No process has made progress" not in said
    assert said.index("model_last") < said.index("uploading")  # the summary does not wait for it


def test_a_process_that_holds_pythons_lock_for_longer_than_dead_after_s_is_not_dead(tmp_path):
    task = ("task.type=tests.support.tasks.HoldsTheLock", "task.hold_s=8", "train.dead_after_s=3", "train.epochs=1")
    log = tmp_path / "log"
    said = said_by(Group(2, [[TRAPPED, [*task, f"output_dir={tmp_path}/out"], None, {}]], log), log)
    assert "is alive but has not answered for" in said and "C code in it may hold Python's lock" in said


@pytest.fixture
def running(tmp_path):
    """A group of two that trains, slowly; it has taken a step."""
    words = [f"output_dir={tmp_path}/out", "task.pause_s=0.2"]
    group = Group(2, [[FAULTY, words, None, {}]], tmp_path / "log")
    until = time.monotonic() + 60
    while not (tmp_path / "out" / "metrics.jsonl").is_file() or not (tmp_path / "out" / "metrics.jsonl").read_text():
        assert time.monotonic() < until and group.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    return group


def test_outsiders_end_no_run_and_a_process_takes_two_connections_of_its_launcher(running, tmp_path):
    """With three, 320 processes would be more than the 1,024 open files that most shells allow a launcher."""
    for pid in running.pids:
        connections = [
            one for one in psutil.Process(pid).net_connections() if one.raddr and one.raddr.port == running.store.port
        ]
        assert len(connections) == 2
    outsider = TCPStore("127.0.0.1", running.store.port, is_master=False, wait_for_workers=False)
    for folder in {key.partition("/beat/")[0] for key in outsider.list_keys() if "/beat/" in key}:
        for name in ("report", "report/"):
            outsider.set(f"{folder}/{name}", json.dumps({"text": "hftune: ended by an outsider", "code": 0}))
    said = said_by(running, tmp_path / "log")
    assert "by an outsider" not in said and (tmp_path / "out" / "result.json").is_file()
