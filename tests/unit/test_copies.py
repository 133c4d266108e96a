"""Copies of an output folder over HTTP, and which of several folders a run goes on from."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
import torch

from hftune.checkpoints.checkpointer import Checkpointer, newest_step, path_of, steps
from hftune.checkpoints.contents import Changed, Contents, Digests, contents
from hftune.checkpoints.mirror import Copies, CopyThread
from hftune.checkpoints.newest import Offer, choose
from hftune.checkpoints.own_folders import is_first_to_create
from hftune.checkpoints.transfer import Receiver, Source
from hftune.config.sections import CheckpointConfig
from hftune.errors import ConfigError

TOKEN = "secret"


def write_checkpoint(folder: Path, step: int, value: float = 0.0, best: int | None = None, writer: Checkpointer | None = None):
    writer = writer or Checkpointer(folder / "checkpoints", CheckpointConfig(keep=1))
    tensors = {"model": {"weight": torch.full((1000,), step + value)}, "optimizer": {}}
    progress = {"state": {"best_step": best}, "values": {}, "digests": {}, "run_ids": {}, "micro_batch_size": {}}
    writer.write(step, tensors, progress, "seed: 1\n", best, [])
    writer.wait()
    assert writer.failure is None


@pytest.fixture
def here(tmp_path) -> Path:
    """An output folder after step 10."""
    folder = tmp_path / "here"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    (folder / "ledger.jsonl").write_text("one\n")
    (folder / ".owner").write_text("me")
    (folder / "notes.txt").write_text("mine")
    write_checkpoint(folder, 10)
    return folder


@pytest.fixture
def source(here):
    source = Source(here, "127.0.0.1", TOKEN)
    yield source
    source.close()


@pytest.fixture
def receiver(source, tmp_path) -> Receiver:
    (tmp_path / "there").mkdir()
    return Receiver(tmp_path / "there", source.address, TOKEN, "there")


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_copy_has_all_that_a_resume_needs_and_nothing_else(here, receiver):
    assert receiver.update().version == 1
    expected = {name: data for name, data in files(here).items() if name not in (".owner", "notes.txt")}
    assert files(receiver.folder) == expected
    assert newest_step(receiver.folder / "checkpoints") == 10


def test_only_what_has_changed_is_sent_and_what_the_source_removed_goes(here, source, receiver, monkeypatch):
    has = receiver.update().version
    (here / "ledger.jsonl").write_text("one\ntwo\n")
    write_checkpoint(here, 20)
    (here / "model/config.json").unlink()
    (here / "model").rmdir()
    source.renew()
    asked, read = [], receiver._read
    monkeypatch.setattr(receiver, "_read", lambda path, **more: asked.append((path, more)) or read(path, **more))
    receiver.update(has)
    assert files(receiver.folder / "checkpoints") == files(here / "checkpoints")
    assert (receiver.folder / "ledger.jsonl").read_text() == "one\ntwo\n" and not (receiver.folder / "model").exists()
    fetched = {more["name"]: more["start"] for path, more in asked if path == "/file"}
    assert fetched.pop("ledger.jsonl") == 4
    assert {name.split("/")[1] for name in fetched} == {"step_00000020"}


def test_of_older_checkpoints_only_the_best_is_copied_and_those_of_an_abandoned_part_go(here, source, receiver):
    keeping = Checkpointer(here / "checkpoints", CheckpointConfig(keep=9))
    for step, best in ((20, 20), (30, 20), (40, 20)):
        write_checkpoint(here, step, best=best, writer=keeping)
    for step in (20, 30, 50):
        write_checkpoint(receiver.folder, step, 0.5, writer=Checkpointer(receiver.folder / "checkpoints", keeping.config))
    receiver.update()
    assert steps(receiver.folder / "checkpoints") == [20, 40]
    assert files(receiver.folder / "checkpoints/step_00000020") == files(here / "checkpoints/step_00000020")


def test_logs_of_another_part_of_the_run_are_replaced(here, receiver):
    (receiver.folder / "ledger.jsonl").write_text("no\n")
    receiver.update()
    assert (receiver.folder / "ledger.jsonl").read_text() == "one\n"


def test_nothing_is_placed_if_a_file_was_replaced_meanwhile(here, receiver, monkeypatch):
    (here / "ledger.jsonl").write_text("one\ntwo\n")
    read = receiver._read

    def replaced(path: str, **more):
        if more.get("name", "").endswith("model.safetensors"):
            write_checkpoint(here, 10, 0.5)
        return read(path, **more)

    monkeypatch.setattr(receiver, "_read", replaced)
    with pytest.raises(Changed):
        receiver.update()
    assert files(receiver.folder) == {}
    monkeypatch.undo()
    receiver.update()
    assert newest_step(receiver.folder / "checkpoints") == 10


@pytest.mark.parametrize(
    "token, path, status",
    [
        ("wrong", "/news?receiver=x&has=0", 403),
        (TOKEN, "/file?receiver=there&name=notes.txt&start=0&size=4", 409),
        (TOKEN, "/file?receiver=there&name=../here/notes.txt&start=0&size=4", 409),
    ],
)
def test_strangers_and_other_files_are_refused(source, receiver, token, path, status):
    receiver.update()
    connection = HTTPConnection(*source.address, timeout=5)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    assert connection.getresponse().status == status


def test_names_that_lead_out_of_the_folder_are_refused():
    for name in ("../x", "/etc/x", "model/../../x"):
        with pytest.raises(Changed, match="leads out"):
            Contents.from_json(json.dumps(asdict(Contents(1, False, {name: (1, "a")}, {}))).encode())


def test_a_checkpoint_that_is_being_copied_stays_until_it_is_there(here, source, receiver):
    writer = Checkpointer(here / "checkpoints", CheckpointConfig(keep=1), is_in_use=source.is_in_use)
    source.news("there", 0)
    write_checkpoint(here, 20, writer=writer)
    assert steps(here / "checkpoints") == [10, 20]
    source.renew()
    receiver.update(receiver.update(1).version)
    write_checkpoint(here, 30, writer=writer)
    assert steps(here / "checkpoints") == [30]


def test_what_was_being_copied_when_the_last_checkpoint_was_written_goes_at_the_end(tmp_path):
    writer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig(keep=1), is_in_use=lambda step: True)
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, best=10, writer=writer)
    assert steps(tmp_path / "checkpoints") == [10, 20, 30]
    Checkpointer(tmp_path / "checkpoints", CheckpointConfig(keep=1), last=30).remove_left()
    assert steps(tmp_path / "checkpoints") == [10, 20, 30]  # who has only resumed knows not which is the best
    writer.remove_left()
    assert steps(tmp_path / "checkpoints") == [10, 30]


def test_the_end_waits_for_the_last_copy_and_for_nobody_who_is_silent(here, source, receiver, monkeypatch):
    thread, marks = CopyThread(receiver), []
    thread.start()
    wait_for(lambda: (receiver.folder / ".behind").exists())
    write_checkpoint(here, 20)
    source.finish(["there"], lambda: marks.append(1))
    assert newest_step(receiver.folder / "checkpoints") == 20
    thread.end(True, lambda: None)
    assert not thread.is_alive() and not (receiver.folder / ".behind").exists()
    monkeypatch.setattr("hftune.checkpoints.transfer.SILENT_S", 0.2)
    began = time.monotonic()
    source.finish(["there", "gone"], lambda: marks.append(1))
    assert time.monotonic() - began < 2 and marks


def test_a_copy_ends_at_once_if_the_main_machine_is_not_awaited(source, receiver):
    thread = CopyThread(receiver)
    thread.start()
    time.sleep(0.05)
    thread.end(False, lambda: None)
    assert not thread.is_alive()
    with pytest.raises((OSError, HTTPException)):
        receiver.update()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("Expecting value"), KeyError("state")])
def test_what_cannot_be_written_is_said_once_and_tried_again(here, source, receiver, monkeypatch, capsys, error):
    """Or what is there and cannot be read, as after a power failure."""
    monkeypatch.setattr("hftune.checkpoints.mirror.PAUSE_S", 0.01)
    blocked = receiver.folder / ".incoming"
    failing = threading.Event()
    fetch = receiver._fetch

    def full(*arguments):
        if not failing.is_set():
            raise error
        return fetch(*arguments)

    monkeypatch.setattr(receiver, "_fetch", full)
    said, thread = [], CopyThread(receiver)
    say = thread._say
    monkeypatch.setattr(thread, "_say", lambda error: (said.append(error), say(error)))
    thread.start()
    wait_for(lambda: len(said) > 2)
    failing.set()
    source.finish(["there"], lambda: None)
    thread.end(True, lambda: None)
    said = capsys.readouterr().err
    assert said.count(str(error)) == 1 and "there could not be renewed" in said and not blocked.exists()
    assert newest_step(receiver.folder / "checkpoints") == 10


def test_a_growing_log_is_listed_as_it_was(tmp_path):
    (tmp_path / "ledger.jsonl").write_text("one\n")
    digests = Digests()
    before = contents(tmp_path, digests)
    (tmp_path / "ledger.jsonl").write_text("one\ntwo\n")
    assert before.files["ledger.jsonl"][0] == 4 and contents(tmp_path, digests).files["ledger.jsonl"][0] == 8


def test_only_one_machine_finds_a_folder_its_own(tmp_path):
    assert is_first_to_create(tmp_path / "new", "x", makes_it=False)  # not there, so nobody else's
    assert not (tmp_path / "new").exists()
    assert is_first_to_create(tmp_path / "new", "x", makes_it=True)
    assert not is_first_to_create(tmp_path / "new", "x", makes_it=True)


A = Offer(rank=0, host="a", run_id="run", job_run_id="run", starts=1, step=10)
B, C = replace(A, rank=1, host="b"), replace(A, rank=2, host="c")


def test_the_run_goes_on_from_where_it_went_on_last():
    assert choose([A, B], False) is A
    assert choose([A, replace(B, step=20)], False).host == "b"
    assert choose([replace(A, step=70), replace(B, starts=2, step=60)], False).host == "b"  # a was cut off, and b went on
    assert choose([replace(A, step=0, run_id="", job_run_id=""), B, C], False) is B
    assert choose([replace(A, step=0), replace(B, step=0)], False) is None


def test_folders_of_other_runs_are_left_alone():
    other = replace(B, run_id="other", starts=9, step=90)
    assert choose([A, other], False) is A
    assert choose([replace(A, run_id="other", step=90), B], may_replace=True) is B
    with pytest.raises(ConfigError, match="on a, which is now the main machine, holds the checkpoints of another run"):
        choose([replace(A, run_id="other"), B], may_replace=False)


def test_a_new_job_resumes_the_run_of_its_main_machine_or_the_only_one():
    new = [replace(offer, job_run_id="") for offer in (A, B, C)]
    assert choose([new[0], replace(new[1], step=20), replace(new[2], run_id="other", step=90)], False).host == "b"
    assert choose([replace(new[0], run_id=""), replace(new[1], run_id="", step=20)], False).host == "a"
    empty = replace(new[0], step=0, run_id="")
    assert choose([empty, new[1]], False).host == "b"
    with pytest.raises(ConfigError, match=r"different runs in output_dir: b \(step 10\), c \(step 10\)"):
        choose([empty, new[1], replace(new[2], run_id="other")], False)


def test_a_machine_with_another_run_in_its_folder_keeps_no_copy(tmp_path):
    write_checkpoint(tmp_path, 10)
    (tmp_path / ".run_id").write_text("other")
    assert "holds another run" in Copies(tmp_path, 1, False, lambda: None)._prepare("run")
    copies = Copies(tmp_path, 1, True, lambda: None)
    assert copies._prepare("run") is None
    assert "in use" in Copies(tmp_path, 1, True, lambda: None)._prepare("run")
    copies.end()
    assert Copies(tmp_path, 1, True, lambda: None)._prepare("other") is None


def test_what_was_being_removed_when_the_machine_died_goes_with_the_next_copy(here):
    path = path_of(here / "checkpoints", 10)
    path.rename(path.with_name(f".{path.name}.removed"))
    assert Copies(here, 1, True, lambda: None)._prepare("run") is None
    assert not [*(here / "checkpoints").iterdir()]


def test_paths_of_checkpoints_are_those_of_the_checkpointer(here):
    listed = contents(here, Digests())
    assert list(listed.checkpoints) == [path_of(here / "checkpoints", 10).relative_to(here).as_posix()]


def test_that_the_main_machine_cannot_be_reached_is_said_in_time(source, receiver, monkeypatch, capsys):
    monkeypatch.setattr("hftune.checkpoints.mirror.PAUSE_S", 0.01)
    source.close()
    thread = CopyThread(receiver)
    thread.start()
    wait_for(lambda: thread._failed_in_a_row > 12)
    thread.end(False, lambda: None)
    said = capsys.readouterr().err
    assert (
        said.count("warning:") == 1 and f"{source.address[0]}:{source.address[1]} on the main machine does not answer" in said
    )
