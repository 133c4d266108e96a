"""Launchers of one process that copy the output folder of the first machine to the others."""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hftune.checkpoints.checkpointer import Checkpointer, steps, verify
from hftune.checkpoints.copying import RUN_ID, inside
from hftune.config.sections import CheckpointConfig
from hftune.distributed.rounds import JOB
from hftune.elastic import copies as module
from hftune.elastic.copies import Channel, Copies
from hftune.elastic.membership import Machine, State


class Launcher:
    """Of one machine, as far as copies are concerned."""

    gone: set[str]

    def __init__(self, folder: Path, copies: int = 1, resume: str = "auto", name: str = ""):
        listener = socket.create_server(("127.0.0.1", 0))
        name, self.gone = name or folder.name, set()
        self.copies = Copies(folder, copies, resume, lambda machine: machine not in self.gone)
        self.me = Machine(name, name, "127.0.0.1", listener.getsockname()[1], secrets.token_hex(8))
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self.copies.accept(listener.accept()[0])

    def begin(self, first: "Launcher", *others: "Launcher", number: int = 0) -> None:
        self.copies.begin(number, self.me, [one.me for one in (first, *others)])


def write_checkpoint(folder: Path, step: int, value: float = 0.0, best: int | None = None, keep: int = 1) -> None:
    writer = Checkpointer(folder / "checkpoints", CheckpointConfig(keep=keep))
    tensors = {"model": {"weight": torch.full((1000,), step + value)}, "optimizer": {}}
    progress = {"state": {"best_step": best}, "values": {}, "digests": {}, "run_ids": {}, "micro_batch_size": {}}
    writer.write(step, tensors, progress, "seed: 1\n", best, [])
    writer.wait()
    assert writer.failure is None


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv(JOB, "42")
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.05)


@pytest.fixture
def make(tmp_path):
    """Return a function that makes launchers; they end with the test."""
    made = []

    def make(name: str, **settings) -> Launcher:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Launcher(tmp_path / name, **settings))
        return made[-1]

    yield make
    for launcher in made:
        launcher.copies.stop()


@pytest.fixture
def here(tmp_path, make) -> Launcher:
    """The first machine, after step 10."""
    folder = tmp_path / "here"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    (folder / "ledger.jsonl").write_text('{"after_step": 0}\n')
    (folder / ".begun").write_text('{"job 42": [0]}')
    (folder / ".owner").write_text("me")
    (folder / "notes.txt").write_text("mine")
    write_checkpoint(folder, 10)
    return make("here")


@pytest.fixture
def there(make) -> Launcher:
    return make("there")


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def files(launcher: Launcher) -> dict[str, bytes]:
    folder, ignored = launcher.copies.folder, (".owner", ".lock", "notes.txt")
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in ignored}


def copy(here: Launcher, *others: Launcher) -> None:
    """Begin a round, and let the copies be made."""
    for launcher in (here, *others):
        launcher.begin(here)
    until(lambda: any(sender.is_chosen for sender in here.copies.senders))
    here.copies.complete()


def test_a_copy_has_all_that_a_resume_needs_and_nothing_else(here, there, capsys):
    copy(here, there)
    assert files(there) == files(here) and not (there.copies.folder / "notes.txt").exists()
    assert there.copies.state() == here.copies.state() == State(here.copies.run(), 1, 10)
    assert "no common file system: there keeps a copy of output_dir (checkpoint.copies=1)" in capsys.readouterr().err


def test_only_what_has_changed_is_sent_and_what_is_removed_goes(here, there, monkeypatch):
    copy(here, there)
    said, say = [], Channel.say
    monkeypatch.setattr(Channel, "say", lambda self, **words: said.append(words) or say(self, **words))
    with (here.copies.folder / "ledger.jsonl").open("a") as ledger:
        ledger.write("two\n")
    (here.copies.folder / "model/config.json").unlink()
    (here.copies.folder / "model").rmdir()
    write_checkpoint(here.copies.folder, 20)
    until(lambda: steps(there.copies.folder / "checkpoints") == [20])  # without being asked, as there is a new checkpoint
    here.copies.complete()
    assert files(there) == files(here)
    sent = {words["file"]: words["start"] for words in said if "file" in words}
    assert sent.pop("ledger.jsonl") == len('{"after_step": 0}\n')
    assert {name.split("/")[1] for name in sent} == {"step_00000020"}


def test_of_older_checkpoints_only_the_best_is_copied_and_those_of_an_abandoned_part_go(here, there):
    for step, best in ((20, 20), (30, 20), (40, 20)):
        write_checkpoint(here.copies.folder, step, best=best, keep=9)
    for step in (20, 50):
        write_checkpoint(there.copies.folder, step, 0.5, keep=9)
    for launcher in (here, there):
        (launcher.copies.folder / RUN_ID).write_text("run")
    copy(here, there)
    assert steps(there.copies.folder / "checkpoints") == [20, 40]
    weights = "checkpoints/step_00000020/model.safetensors"
    assert files(there)[weights] == files(here)[weights]


def test_a_new_round_may_have_cut_the_logs(here, there):
    copy(here, there)
    (here.copies.folder / "ledger.jsonl").write_text("an earlier line, written anew and longer than before\n")
    copy(here, there)
    here.begin(here, number=1)
    here.copies.complete()
    assert files(there) == files(here)


def test_a_checkpoint_that_is_removed_while_it_is_sent_arrives_whole(here, there, monkeypatch):
    send = Channel.send

    def slow(self, file, start, size):
        if file.name.endswith("step_00000010/model.safetensors"):
            write_checkpoint(here.copies.folder, 20)
        send(self, file, start, size)

    monkeypatch.setattr(Channel, "send", slow)
    seen: set[int] = set()
    place = module.Receiver._place

    def note(self, *arguments):
        place(self, *arguments)
        seen.update(steps(self.folder / "checkpoints"))

    monkeypatch.setattr(module.Receiver, "_place", note)
    copy(here, there)
    assert seen == {10, 20} and steps(there.copies.folder / "checkpoints") == [20]


def test_nothing_is_placed_that_has_not_arrived_whole(here, there, monkeypatch):
    write_checkpoint(there.copies.folder, 5)
    (there.copies.folder / RUN_ID).write_text("run")
    (here.copies.folder / RUN_ID).write_text("run")
    receive = Channel.receive

    def broken(self, file, count):
        if file.name.endswith("optimizer.safetensors"):
            raise ConnectionError
        receive(self, file, count)

    monkeypatch.setattr(Channel, "receive", broken)
    here.begin(here)
    there.begin(here)
    until(lambda: here.copies.senders and not here.copies.senders[0].is_alive())
    assert steps(there.copies.folder / "checkpoints") == [5] and not (there.copies.folder / "ledger.jsonl").exists()

    def changed(self, file, count):
        receive(self, file, count)
        if file.name.endswith("model.safetensors"):
            file.seek(0)
            file.truncate()
            file.write(bytes(count))

    monkeypatch.setattr(Channel, "receive", changed)
    time.sleep(0.3)
    assert steps(there.copies.folder / "checkpoints") == [5]
    monkeypatch.undo()
    monkeypatch.setenv(JOB, "42")
    until(lambda: steps(there.copies.folder / "checkpoints") == [10])
    verify(there.copies.folder / "checkpoints/step_00000010")


def test_strangers_are_hung_up_on_and_names_that_lead_out_are_refused(here):
    here.begin(here)
    with socket.create_connection((here.me.address, here.me.port), timeout=5) as stranger:
        stranger.sendall(b"guess there there\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    for name in ("../x", "/etc/x", "model/../../x"):
        with pytest.raises(ValueError, match="leads out"):
            inside(name)


def test_the_end_waits_for_the_last_copy_and_for_nobody_who_is_gone(here, there, monkeypatch):
    copy(here, there)
    write_checkpoint(here.copies.folder, 20)
    here.copies.complete()
    assert steps(there.copies.folder / "checkpoints") == [20]
    monkeypatch.setattr(module.Receiver, "_place", lambda *arguments: time.sleep(5))
    write_checkpoint(here.copies.folder, 30)
    ends = threading.Thread(target=here.copies.complete)
    ends.start()
    ends.join(0.5)
    assert ends.is_alive()
    here.gone.add("there")
    ends.join(2)
    assert not ends.is_alive()


def test_the_end_waits_for_a_machine_whose_connection_has_just_broken(here, there):
    copy(here, there)
    here.begin(here, there, number=1)
    (sender,) = here.copies.senders
    write_checkpoint(here.copies.folder, 20)
    sender.stop()
    sender.join()
    here.copies.complete()
    assert steps(there.copies.folder / "checkpoints") == [20]


def test_the_end_waits_for_a_machine_that_has_just_come_and_not_for_one_that_shares_the_folder(here, there):
    here.begin(here, there)
    connects = threading.Timer(0.3, there.begin, (here, there))
    connects.start()
    here.copies.complete()
    assert steps(there.copies.folder / "checkpoints") == [10]
    same = Launcher(here.copies.folder, name="same")
    for launcher in (here, same):
        launcher.begin(here, there, same, number=1)
    until(lambda: "same" in here.copies.agreed)
    began = time.monotonic()
    here.copies.complete()
    assert time.monotonic() - began < module.COME_S / 2


def test_as_many_machines_keep_a_copy_as_are_asked_for_and_others_take_their_place(here, make):
    one, two = make("one"), make("two")
    copy(here, one, two)
    kept, other = (one, two) if steps(one.copies.folder / "checkpoints") else (two, one)
    assert not steps(other.copies.folder / "checkpoints")
    here.gone.add(kept.me.id)
    other.begin(here, number=1)
    until(lambda: steps(other.copies.folder / "checkpoints") == [10])


def test_a_machine_with_another_run_in_its_folder_keeps_no_copy_unless_it_may_be_replaced(here, make, capsys):
    for name in ("left", "replaced"):
        launcher = make(name, resume="never" if name == "replaced" else "auto")
        write_checkpoint(launcher.copies.folder, 90)
        (launcher.copies.folder / RUN_ID).write_text("another")
        here.begin(here)
        launcher.begin(here)
        until(lambda name=name: name in capsys.readouterr().err)
        here.copies.complete()
        assert steps(launcher.copies.folder / "checkpoints") == [90 if name == "left" else 10]
        assert (launcher.copies.run() == here.copies.run()) == (name == "replaced")


def test_machines_that_share_the_folder_do_not_copy_it(here):
    other = Launcher(here.copies.folder, name="there")
    before = files(here)
    here.begin(here)
    other.begin(here)
    until(lambda: other.copies._receiver is not None and not other.copies._receiver.is_alive())
    assert {**files(here), RUN_ID: b""} == {**before, RUN_ID: b""}


def test_nothing_is_copied_before_the_job_has_begun_in_the_folder(here, there):
    """With resume=never, an earlier run is there until then."""
    (here.copies.folder / ".begun").write_text('{"job 41": [0]}')
    here.begin(here)
    there.begin(here)
    time.sleep(0.3)
    assert not steps(there.copies.folder / "checkpoints") and here.copies.run() == ""
    (here.copies.folder / ".begun").write_text('{"job 42": [0]}')
    until(lambda: steps(there.copies.folder / "checkpoints") == [10])


def test_what_cannot_be_written_is_said_once_and_tried_again(here, there, monkeypatch, capsys):
    place, failed = module.Receiver._place, []

    def full(self, *arguments):
        if len(failed) < 3:
            failed.append(1)
            raise OSError(28, "No space left on device")
        place(self, *arguments)

    monkeypatch.setattr(module.Receiver, "_place", full)
    here.begin(here)
    there.begin(here)
    until(lambda: steps(there.copies.folder / "checkpoints") == [10])
    there.copies.stop()
    assert capsys.readouterr().err.count("No space left on device. Training goes on, and it is tried again.") == 1
    assert not (there.copies.folder / ".incoming").exists()


def test_a_broken_checkpoint_is_no_state_to_go_on_from(here):
    (here.copies.folder / "checkpoints/step_00000010/manifest.json").write_text(json.dumps({}))
    assert here.copies.state() == State("", 1, 0)
