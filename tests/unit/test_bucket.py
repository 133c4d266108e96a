"""A run that is kept in a bucket: what is uploaded, what a fresh machine gets, and what is said when it does not work."""

import json
import shutil
import threading
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from hftune import ConfigError, Recipe, TrainingError, train
from hftune.checkpoints import bucket as module
from hftune.checkpoints import objects, output_dir
from hftune.checkpoints.bucket import Bucket
from hftune.checkpoints.checkpointer import open_checkpoint, steps, verify
from hftune.checkpoints.copying import read_id, write_id
from hftune.checkpoints.objects import check_bucket, fetched
from hftune.checkpoints.output_dir import OutputDir
from hftune.checkpoints.resume import Start
from hftune.checkpoints.train_state import TrainState
from hftune.cli import main
from hftune.config import addresses
from hftune.config.addresses import local_folder, what_is_wrong
from hftune.config.sections import CheckpointConfig
from hftune.replay.audit import audit
from tests.support.runs import SMALL
from tests.unit.test_copies import write_checkpoint

NUMBERS = count()
MEMORY = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(addresses, "FIRST_WAIT_S", 0.001)
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(objects, "START_S", 1.0)  # more than a busy machine takes to write a file


@pytest.fixture
def address():
    """One that nobody has used yet."""
    return f"memory://bucket{next(NUMBERS)}/run"


def path_of(address: str) -> str:
    return "/" + address.removeprefix("memory://")


def listed(address: str) -> dict:
    return json.loads(MEMORY.cat(f"{path_of(address)}/bucket.json"))


def index_of(address: str) -> objects.Index:
    return objects.Index(**listed(address))


def object_of(address: str, name: str) -> str:
    return f"{path_of(address)}/{listed(address)['files'][name].get('at', name)}"


def objects_of(address: str) -> set[str]:
    return {name.removeprefix(f"{path_of(address)}/") for name in MEMORY.find(path_of(address))}


class Machine:
    """With a folder of its own, in which nothing trains."""

    def __init__(self, folder: Path, address: str, keep: int = 1):
        folder.mkdir(exist_ok=True)
        self.folder, self.address, self.config = folder, address, CheckpointConfig(keep=keep)
        self.bucket = Bucket(address, folder, lambda: True)

    def claim(self, resume: str = "auto") -> list[str]:
        notices = self.bucket.claim(resume)
        self.bucket.config = self.config
        if not read_id(self.folder):
            write_id(self.folder, f"run of {self.folder.name}")
        return notices

    def train(self, step: int, value: float = 0.0, best: int | None = None) -> None:
        """Leave behind what a training would have at a step."""
        write_checkpoint(self.folder, step, value, best, self.config.keep)
        (self.folder / ".begun").write_text("{}")
        with (self.folder / "ledger.jsonl").open("a") as file:
            file.write('{"after_step": 0}\n' if file.tell() == 0 else f'{{"step": {step}}}\n')
        (self.folder / "model").mkdir(exist_ok=True)
        (self.folder / "model/config.json").write_text(f"{{}} {step} {value}")


@pytest.fixture
def make(tmp_path, address):
    return lambda name, **settings: Machine(tmp_path / name, address, **settings)


@pytest.fixture
def here(make):
    """A machine that has uploaded what it had after step 10."""
    machine = make("here")
    assert machine.claim() == []
    machine.train(10)
    machine.bucket.upload()
    return machine


def test_a_fresh_machine_gets_all_that_a_resume_needs(here, make):
    fresh = make("fresh")
    assert fresh.claim() == []
    assert verify(fresh.folder / "checkpoints/step_00000010")["step"] == 10
    for name in ("ledger.jsonl", "model/config.json", ".begun", "checkpoints/.run_id"):
        assert (fresh.folder / name).read_bytes() == (here.folder / name).read_bytes(), name
    assert not (fresh.folder / ".incoming").exists() and not (here.folder / ".outgoing").exists()


def test_a_folder_may_take_the_place_of_a_bucket(tmp_path):
    address = f"file://{tmp_path}/disk/run"
    first = Machine(tmp_path / "first", address)
    first.claim()
    for step in (10, 20):
        first.train(step)
        first.bucket.upload()
    fresh = Machine(tmp_path / "fresh", address)
    assert fresh.claim() == [] and steps(fresh.folder / "checkpoints") == [20]
    assert (fresh.folder / "model/config.json").read_text() == "{} 20 0.0"
    kept = {path.parts[-3] for path in (tmp_path / "disk/run/checkpoints").glob("*/*/manifest.json")}
    assert kept == {"step_00000020"}


def test_old_checkpoints_leave_the_bucket_once_the_new_list_is_there(here, address, monkeypatch):
    here.train(20)
    seen = []
    monkeypatch.setattr(here.bucket.place, "remove", lambda name: seen.append((name, listed(address)["step"])))
    here.bucket.upload()
    assert {name.split("/")[1] for name, _ in seen if name.startswith("checkpoints")} == {"step_00000010"}
    assert {step for _, step in seen} == {20}
    assert index_of(address).checkpoints == [20]


def test_the_bucket_keeps_what_the_folder_keeps_also_if_a_fresh_machine_has_fetched_less(make, address):
    first = make("first", keep=2)
    first.claim()
    for step in (10, 20):
        first.train(step, best=10)
        first.bucket.upload()
    second = make("second", keep=2)
    second.claim()
    assert steps(second.folder / "checkpoints") == [10, 20]  # the newest, and that of the best model
    second.train(30, best=10)
    second.bucket.upload()
    assert index_of(address).checkpoints == [10, 20, 30]
    second.train(40, best=40)
    second.bucket.upload()
    assert index_of(address).checkpoints == [30, 40]


@pytest.mark.parametrize("step, value", [(20, 0.0), (10, 1.0)], ids=["the next", "the same step again"])
def test_a_kill_in_the_midst_of_an_upload_leaves_what_was_there_and_no_rubbish(here, make, address, monkeypatch, step, value):
    seen = set()
    here.train(step, value)
    originals = {name: getattr(objects.Place, name) for name in ("put", "write", "remove")}
    for number in range(2, 60):  # the first one is a look whether this process may remove objects
        calls = count(1)

        def cut(name, calls=calls, number=number):
            def call(*arguments):
                if next(calls) == number:
                    raise KeyboardInterrupt
                return originals[name](*arguments)

            return call

        with monkeypatch.context() as patch:
            for name in originals:
                patch.setattr(objects.Place, name, cut(name))
            again = make("here")
            try:
                again.claim()
                again.bucket.upload()
                break
            except KeyboardInterrupt:
                pass
        fresh = make(f"fresh{number}")
        assert fresh.claim() == []
        (found,) = steps(fresh.folder / "checkpoints")
        weight = open_checkpoint(fresh.folder / f"checkpoints/step_{found:08d}").tensors["model"]["weight"]
        seen.add((found, weight[0].item(), (fresh.folder / "model/config.json").read_text()))
    assert seen == {(10, 10.0, "{} 10 0.0"), (step, step + value, f"{{}} {step} {value}")} and 8 < number < 59
    last = make("last")
    last.claim()
    last.bucket.upload()
    assert objects_of(address) == index_of(address).objects | {"bucket.json"} and listed(address)["step"] == step


def test_a_damaged_or_missing_object_costs_one_checkpoint_and_is_said(make, address):
    first = make("first", keep=3)
    first.claim()
    for step in (10, 20, 30):
        first.train(step)
        first.bucket.upload()
    weights = object_of(address, "checkpoints/step_00000030/model.safetensors")
    whole = MEMORY.cat(weights)
    MEMORY.pipe(weights, whole[:-1] + bytes([whole[-1] ^ 1]))
    MEMORY.rm(object_of(address, "checkpoints/step_00000020/progress.json"))
    fresh = make("fresh", keep=3)
    assert fresh.claim() == [
        f"Skipped {address}/checkpoints/step_00000030: model.safetensors has changed since it was written (its SHA-256 differs).",
        f"Skipped {address}/checkpoints/step_00000020: progress.json is missing.",
    ]
    assert steps(fresh.folder / "checkpoints") == [10]
    fresh.bucket.upload()
    assert index_of(address).checkpoints == [10]
    MEMORY.pipe(object_of(address, "checkpoints/step_00000010/progress.json"), b"{}")
    with pytest.raises(
        ConfigError, match=r"step_00000010: progress.json has 2 bytes .* No intact checkpoint is left\. resume=never"
    ):
        make("third").claim()


def test_a_damaged_model_is_left_out_and_said(here, make, address):
    MEMORY.pipe(object_of(address, "model/config.json"), b"{}")
    fresh = make("fresh")
    assert fresh.claim() == [f"Skipped {address}/model: config.json is missing or has changed."]
    assert not (fresh.folder / "model").exists() and steps(fresh.folder / "checkpoints") == [10]


def test_the_newer_of_folder_and_bucket_counts(here, make, address):
    fresh = make("fresh")
    fresh.claim()
    fresh.train(20)
    fresh.bucket.upload()
    assert here.claim() == [] and steps(here.folder / "checkpoints") == [20]  # it comes back with an older state
    here.train(30)  # and is lost before it has uploaded that
    assert here.claim() == [] and steps(here.folder / "checkpoints") == [30]
    here.bucket.upload()
    assert listed(address)["step"] == 30


def test_another_run_is_not_mixed_with_the_one_in_the_bucket(here, make, address):
    other = make("other")
    other.train(5)
    write_id(other.folder, "another one")
    with pytest.raises(ConfigError, match=rf"output_dir={address} holds a different run than its working copy .*resume=never"):
        other.claim()
    assert other.claim("never") == [f"{address} holds an earlier run; this run replaces it."]
    other.bucket.upload()
    assert objects_of(address) == index_of(address).objects | {"bucket.json"}
    assert (listed(address)["run"], index_of(address).checkpoints) == ("another one", [5])


def test_who_comes_later_has_the_address_and_the_other_one_says_so(here, make, address, capsys):
    later = make("later")
    later.claim()
    later.bucket.upload()
    before = objects_of(address)
    here.train(20)
    here.bucket.begin(here.config)
    with pytest.raises(TrainingError, match=rf"{address} has not: process \d+ on .* has taken over {address} \(waited .*\)\.$"):
        here.bucket.finish(None)
    assert objects_of(address) == before
    assert f"has taken over {address}. Nothing more is uploaded; training continues in" in capsys.readouterr().out


def test_without_the_network_training_goes_on_and_the_upload_catches_up(here, address, monkeypatch, capsys):
    down = True
    put = type(MEMORY).put_file

    def put_file(self, *arguments, **options):
        if down:
            raise ConnectionError("no route to https://me:topsecret@host/")
        return put(self, *arguments, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", put_file)
    here.train(20)
    here.bucket.begin(here.config)
    here.bucket._ends.wait(0.1)
    assert here.bucket.failure and listed(address)["step"] == 10
    down = False
    here.bucket.finish(None)
    out = capsys.readouterr().out
    assert f"warning: {address} cannot be written: ConnectionError: no route to https://" in out and "topsecret" not in out
    assert f"{address} is up to date again, after 0 s" in out
    assert f"{address} has everything; the last upload took 0." in out and listed(address)["step"] == 20


def test_an_end_without_the_network_waits_no_longer_than_said_and_is_no_success(here, address, monkeypatch, capsys):
    def put_file(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(type(MEMORY), "put_file", put_file)
    here.train(20)
    here.bucket.begin(here.config)
    with pytest.raises(
        TrainingError,
        match=r"has what was saved, but .* has not: ConnectionError: no route \(waited 0\.\d s\)\. The same command",
    ):
        here.bucket.finish(None)
    here.bucket.finish(ValueError)  # which says more than this
    assert "warning:" in capsys.readouterr().out.splitlines()[-1]


def test_a_bucket_that_does_not_answer_is_named_before_training_unless_a_later_round_can_go_on(here, make, monkeypatch, capsys):
    def cat_file(*_, **__):
        raise TimeoutError("nobody is there")

    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "cat_file", cat_file)
        with pytest.raises(
            ConfigError, match=r"output_dir=memory://.* cannot be reached: TimeoutError: nobody is there\. Check the"
        ):
            here.claim()
        assert "nobody is there. Trying again in 0.004 s." in capsys.readouterr().err
        patch.setenv("HFTUNE_ROUND", "3")
        assert "This round goes on from" in here.claim()[0]
    here.train(20)
    here.bucket.upload()
    assert listed(here.address)["step"] == 20


def test_a_round_that_did_not_reach_the_bucket_leaves_it_to_one_that_has_come_further(here, make, monkeypatch):
    def cat_file(*_, **__):
        raise TimeoutError("nobody is there")

    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "cat_file", cat_file)
        patch.setenv("HFTUNE_ROUND", "3")
        again = make("here")
        again.claim()
    other = make("other")
    other.claim()
    other.train(20)
    other.bucket.upload()
    with pytest.raises(module.TakenOver, match="has gone on at memory://"):
        again.bucket.upload()
    assert listed(here.address)["step"] == 20


def test_a_command_that_is_refused_or_only_looks_takes_nothing_from_the_job_that_runs(here, make, address):
    other = make("other")
    other.train(5)
    write_id(other.folder, "another one")
    with pytest.raises(ConfigError, match="holds a different run"):
        other.claim()
    make("fresh").claim()  # a key is mistyped, say
    here.train(20)
    here.bucket.upload()
    assert listed(address)["step"] == 20


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_one_job_lists_while_another_takes_over_is_not_lost(here, make, address, monkeypatch, when):
    fresh = make("fresh")
    fresh.claim()
    here.train(20)
    write, taken = fresh.bucket.place.write, []

    def cross(index):
        """Let the other one write after this one has read; or just after this one has written."""
        write(index)
        if not taken:
            monkeypatch.setattr(here.bucket, "_check_writer", lambda: None)
            taken.append(here.bucket.upload())

    if when == "before":
        here.bucket.upload()
    else:
        monkeypatch.setattr(fresh.bucket.place, "write", cross)
    fresh.bucket._take()
    assert fresh.bucket.index == index_of(address) and fresh.bucket.index.checkpoints == [20]
    assert index_of(address).writer == fresh.bucket._word and index_of(address).objects <= objects_of(address)


def test_a_fetch_that_the_writer_overtakes_begins_again(here, make, address, monkeypatch):
    fresh = make("fresh")
    probe = fresh.bucket.place.probe

    def slow():
        if here.bucket.index.step == 10:
            here.train(20)
            here.bucket.upload()
        return probe()

    monkeypatch.setattr(fresh.bucket.place, "probe", slow)
    assert fresh.claim() == [] and steps(fresh.folder / "checkpoints") == [20]


def test_a_job_that_was_replaced_writes_over_nothing_of_the_new_one(here, make, address, monkeypatch):
    fresh, put, done = make("fresh"), here.bucket.place.put, []

    def late(file, name, sha256):
        if not done and file.name == "model.safetensors":
            done.append(fresh.claim("never"))
            fresh.train(20, 7.0)
            fresh.bucket.upload()
        put(file, name, sha256)

    monkeypatch.setattr(here.bucket.place, "put", late)
    here.train(20, 5.0)
    with pytest.raises(module.TakenOver):
        here.bucket.upload()
    third = make("third")
    assert third.claim() == [] and read_id(third.folder) == "run of fresh"
    assert open_checkpoint(third.folder / "checkpoints/step_00000020").tensors["model"]["weight"][0] == 27
    MEMORY.pipe(object_of(address, "checkpoints/step_00000020/manifest.json"), b"{}")
    with pytest.raises(ConfigError, match="No intact checkpoint"):
        make("fourth").claim()


def test_a_checkpoint_with_another_manifest_than_the_list_names_is_skipped(here, make, address):
    other = Machine(here.folder.with_name("other"), f"{address}2")
    other.claim()
    other.train(10, 5.0)
    other.bucket.upload()
    for file in listed(address)["files"]:
        if file.startswith("checkpoints"):
            MEMORY.pipe(object_of(address, file), MEMORY.cat(object_of(f"{address}2", file)))
    with pytest.raises(ConfigError, match=r"step_00000010: manifest.json is of another checkpoint\."):
        make("fresh").claim()


def test_a_run_that_replaces_another_one_is_not_taken_for_it_after_a_kill(here, make, address, monkeypatch):
    fresh = make("fresh")
    assert "this run replaces it" in fresh.claim("never")[0]
    (fresh.folder / "ledger.jsonl").write_text("")

    def put(*_):
        raise ConnectionError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(fresh.bucket.place, "put", put)
        with pytest.raises(ConnectionError):
            fresh.bucket.upload()
    assert (listed(address)["run"], listed(address)["files"]) == ("run of fresh", {})
    fresh.bucket.upload()
    assert objects_of(address) == index_of(address).objects | {"bucket.json"}


def test_what_could_not_be_removed_is_removed_by_the_next_upload(here, address, monkeypatch):
    here.train(20)
    rm_file = type(MEMORY).rm_file

    def lost(self, path):
        rm_file(self, path)
        raise ConnectionError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "rm_file", lost)
        with pytest.raises(ConnectionError):
            here.bucket.upload()
    (here.folder / ".begun").unlink()
    here.train(30)
    here.bucket.upload()
    assert objects_of(address) == index_of(address).objects | {"bucket.json"} and listed(address)["step"] == 30
    (here.folder / ".begun").unlink()  # which holds up nothing
    here.bucket.upload()


def test_a_job_that_goes_on_with_another_main_process_fetches_its_run_although_it_is_to_start_over(
    tmp_path, address, monkeypatch
):
    recipe = Recipe.load("yelp_demo", f"output_dir={address}", "resume=never")
    before = Machine(tmp_path / "before", address)
    before.claim()
    before.train(10)
    (before.folder / ".begun").write_text('{"agent of b": [22]}')
    before.bucket.upload()
    monkeypatch.setattr(output_dir, "find_start", lambda *_, **__: Start())
    where = OutputDir(recipe)
    with where:
        where.claim()
        assert not steps(where.path / "checkpoints")
        group = [("agent of c", 33), ("agent of b", 44)]
        where.confirm(SimpleNamespace(gather_to_main=lambda _: group, on_main=lambda action: action()))
        assert steps(where.path / "checkpoints") == [10]


def test_a_later_checkpoint_that_a_resume_has_skipped_is_not_uploaded(here):
    write_checkpoint(here.folder, 20, keep=3)
    assert steps(here.folder / "checkpoints") == [10, 20]
    out = OutputDir(Recipe.load("yelp_demo", f"output_dir={here.folder}"))
    out.start = Start(SimpleNamespace(path=here.folder / "checkpoints/step_00000010", step=10))
    out.open(TrainState(step=10))
    assert steps(here.folder / "checkpoints") == [10]


def test_two_addresses_with_one_working_copy_are_not_mixed(here, make, address):
    here.bucket.begin(here.config)
    here.bucket.finish(None)
    other = Machine(here.folder, f"{address}2")
    with pytest.raises(ConfigError, match=rf"output_dir={address}2 has the same working copy on this machine as {address}, "):
        other.claim()
    assert other.claim("never") == []
    assert Machine(here.folder, f"{address}/").claim() == []


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt])
def test_after_the_end_nothing_more_is_uploaded(here, address, monkeypatch, kind):
    reached, goes_on, put = threading.Event(), threading.Event(), here.bucket.place.put

    def slow(*arguments):
        reached.set()
        goes_on.wait()
        put(*arguments)

    monkeypatch.setattr(here.bucket.place, "put", slow)
    here.train(20)
    here.bucket.begin(here.config)
    reached.wait()
    with pytest.raises(TrainingError, match="did not come to an end") if kind is None else nullcontext():
        here.bucket.finish(kind)
    goes_on.set()
    here.bucket._thread.join(5)
    assert not here.bucket._thread.is_alive() and listed(address)["step"] == 10


def test_a_disk_that_is_slow_has_moved(tmp_path, monkeypatch):
    place = Bucket(f"file://{tmp_path}/disk/run", tmp_path / "here", lambda: True).place
    big, moved, has_moved = tmp_path / "big", [], place.moved
    big.write_bytes(bytes(3 * place.fs.blocksize))
    monkeypatch.setattr(place, "moved", lambda **given: moved.append(1) or has_moved(**given))
    place._meter.call = place.moved
    place.put(big, "model/x", "")
    assert len(moved) > 3
    moved.clear()
    assert place.get("model/x", {}, tmp_path / "back") and len(moved) > 3
    assert (tmp_path / "back").read_bytes() == big.read_bytes()


def test_a_list_on_a_disk_is_replaced_as_a_whole(tmp_path, monkeypatch):
    machine = Machine(tmp_path / "here", f"file://{tmp_path}/disk/run")
    machine.claim()
    machine.train(10)
    machine.bucket.upload()
    place, index = machine.bucket.place, tmp_path / "disk/run/bucket.json"
    before, pipe_file = index.read_bytes(), type(place.fs).pipe_file

    def half(self, path, value):
        pipe_file(self, path, value[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(type(place.fs), "pipe_file", half)
    with pytest.raises(KeyboardInterrupt):
        place.write(machine.bucket.index)
    assert index.read_bytes() == before
    index.write_bytes(before[:50])
    with pytest.raises(ConfigError, match=r"bucket.json is damaged\. Remove it"):
        place.read()


def test_long_logs_are_uploaded_more_rarely(here, monkeypatch):
    took = []
    monkeypatch.setattr(module, "LOGS_S", 0.01)
    monkeypatch.setattr(here.bucket, "upload", lambda: took.append(time.sleep(0.1)))
    here.bucket.begin(here.config)
    time.sleep(0.8)
    assert len(took) == 2
    here.bucket.finish(None)


def test_evaluation_by_a_recipe_scores_the_model_in_the_bucket(tmp_path, monkeypatch):
    recipe, scored = Recipe.load("yelp_demo", f"output_dir=file://{tmp_path}/disk/run"), []
    machine = Machine(tmp_path / "here", recipe.output_dir)
    machine.claim()
    machine.train(10)
    (machine.folder / "recipe.yaml").write_text(recipe.to_yaml())
    machine.bucket.upload()
    (recipe.folder / "model").mkdir(parents=True)  # of long ago

    def evaluate(_, model, *__):
        scored.append((model / "config.json").read_text())
        raise ConfigError("seen")

    monkeypatch.setattr("hftune.reevaluation.evaluate", evaluate)
    for words in ([f"recipe={recipe.output_dir}/recipe.yaml"], ["recipe=yelp_demo", f"output_dir={recipe.output_dir}"]):
        assert main(["evaluate", *words]) == 2
    assert scored == ["{} 10 0.0"] * 2


@pytest.mark.parametrize("command", ["receipt", "verify", "merge"])
def test_a_command_that_needs_a_folder_says_so(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "s3://mine/run"])
    assert "s3://mine/run is an address, and this command needs a folder." in capsys.readouterr().err


def test_of_two_jobs_that_begin_at_once_at_a_new_address_the_later_one_leaves_it_alone(make, address):
    first, second = make("first"), make("second")
    for one in (first, second):
        one.claim()
        one.train(10)
    first.bucket.upload()
    with pytest.raises(module.TakenOver, match="has gone on at"):
        second.bucket.upload()
    assert listed(address)["run"] == "run of first"


def test_a_library_that_waits_for_ever_is_not_waited_for(here, monkeypatch):
    monkeypatch.setattr(type(MEMORY), "cat_file", lambda *_, **__: threading.Event().wait(60))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"output_dir={here.address} does not answer\. Check the network and the endpoint\."):
        here.claim()
    assert time.monotonic() < began + 10


def test_why_attempts_failed_is_said_although_there_is_no_time_for_all(here, monkeypatch):
    def refused(*_, **__):
        raise ConnectionError("Could not connect")

    monkeypatch.setattr(type(MEMORY), "cat_file", refused)
    monkeypatch.setattr(addresses, "FIRST_WAIT_S", 60.0)
    with pytest.raises(ConfigError, match=r"cannot be reached: ConnectionError: Could not connect\. Check the network"):
        here.claim()


def test_what_is_forbidden_is_found_before_training_and_by_the_doctor(address, monkeypatch):
    check_bucket("outputs/a_folder")
    check_bucket(address)
    assert not objects_of(address)

    def forbidden(*_, **__):
        raise PermissionError("Forbidden")

    for name in ("pipe_file", "rm_file", "find"):
        with monkeypatch.context() as patch:
            patch.setattr(type(MEMORY), name, forbidden)
            with pytest.raises(ConfigError, match=r"access is denied"):
                Bucket(address, Path("folder"), lambda: True).claim("auto")
    monkeypatch.setattr(type(MEMORY), "pipe_file", forbidden)
    with pytest.raises(
        ConfigError, match=rf"output_dir={address}: access is denied \(Forbidden\)\. Check the credentials, those"
    ):
        check_bucket(address)


@pytest.mark.parametrize(
    "error, said",
    [
        (ModuleNotFoundError("Install s3fs"), "needs a package that is not installed: pip install s3fs."),
        (FileNotFoundError("x"), ": there is no such file or bucket. Correct the name, or create the bucket."),
        (
            OSError(28, "No space left on device"),
            "cannot be brought to this machine: No space left on device. Make room for it.",
        ),
        (PermissionError("Forbidden"), "access is denied (Forbidden). Check the credentials, those of the environment."),
        (
            type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"),
            "access is denied (Unable to locate credentials). Check",
        ),
        (OSError("Forbidden: b/mine/o\nno access"), "access is denied (Forbidden: b/mine/o). Check"),  # as gcsfs says it
        (type("HttpError", (OSError,), {"code": 401})("Anonymous caller"), "access is denied (Anonymous caller). Check"),
        (type("HttpError", (OSError,), {"code": 503})("busy"), "cannot be reached: HttpError: busy. Check the network"),
    ],
)
def test_what_is_wrong_is_one_sentence(error, said):
    text = str(what_is_wrong("output_dir=s3://mine/run", error))
    assert text.startswith("output_dir=s3://mine/run") and said in text and "\n" not in text
    assert addresses.is_for_good(error) == ("the network" not in said)


@pytest.mark.parametrize(
    "given, said",
    [
        (
            "s4://mine/run",
            "output_dir=s4://mine/run: there is no protocol s4. Write it as in s3://bucket/run.",
        ),
        (
            "S3://mine/run",
            "output_dir=S3://mine/run: there is no protocol S3. Did you mean 's3'? Write it as in s3://bucket/run.",
        ),
        (
            "https://mine/run",
            "output_dir=https://mine/run: files cannot be written there. Name a bucket, such as s3://bucket/run.",
        ),
        (
            "s3://mine/../run",
            "output_dir=s3://mine/../run: write it as in s3://bucket/run, without parameters. Keys and endpoints are",
        ),
        ("s3:/mine/run", "output_dir=s3:/mine/run: write it as in s3://bucket/run, without parameters."),
        ("simplecache::s3://mine/run", "output_dir=simplecache::s3://mine/run: write it as in s3://bucket/run"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_imported(given, said):
    with pytest.raises(ConfigError) as refused:
        Recipe.load("yelp_demo", f"output_dir={given}").validate()
    assert str(refused.value).startswith(said)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(ConfigError) as refused:
        Recipe.load("yelp_demo", "output_dir=s3://me:topsecret@mine/run").validate()
    assert "topsecret" not in str(refused.value)


def test_the_working_copy_is_named_after_bucket_and_run():
    assert Recipe.load("yelp_demo", "output_dir=s3://mine/some/run/").folder == Path("outputs/mine/some/run")
    assert local_folder("outputs/a") == Path("outputs/a")


@pytest.mark.parametrize(
    "name, at", [("../../evil.json", {}), ("../../evil.json", {"at": "x"}), ("a.json", {"at": "../x"})], ids=str
)
def test_a_name_in_the_list_that_leads_out_of_the_folder_is_refused(here, make, address, name, at):
    found = listed(address)
    found["files"][name] = {"bytes": 1, "sha256": "x", **at}
    MEMORY.pipe(f"{path_of(address)}/bucket.json", json.dumps(found).encode())
    with pytest.raises(ConfigError, match="leads out of the output folder"):
        make("fresh").claim()


def test_commands_read_a_run_in_a_bucket_and_follow_it(here, address, tmp_path):
    folder = fetched(address)
    assert (folder / "ledger.jsonl").is_file() and not (folder / "model").exists() and not (folder / "checkpoints").exists()
    model = fetched(f"{address}/model")
    assert model == folder / "model" and (model / "config.json").read_text() == "{} 10 0.0"
    assert verify(fetched(f"{address}/checkpoints/step_00000010"))["step"] == 10
    here.train(20)
    here.bucket.upload()
    assert (fetched(address, "model", "checkpoints") / "model/config.json").read_text() == "{} 20 0.0"
    assert steps(folder / "checkpoints") == [20]
    with pytest.raises(ConfigError, match=r"memory://nothing/run holds no run: there is no bucket\.json\. Name the output_dir"):
        fetched("memory://nothing/run")


def test_a_command_that_may_not_read_a_bucket_says_so(here, address, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(MEMORY), "cat_file", forbidden)
    with pytest.raises(ConfigError, match=rf"^{address}: access is denied \(Forbidden\)\. Check the credentials"):
        fetched(address)


def test_a_run_may_be_called_model(tmp_path):
    address = f"memory://bucket{next(NUMBERS)}/model"
    machine = Machine(tmp_path / "here", address)
    machine.claim()
    machine.train(10)
    machine.bucket.upload()
    assert (fetched(address, "model") / "model/config.json").is_file() and (
        fetched(f"{address}/model") / "config.json"
    ).is_file()


WORDS = (
    *SMALL,
    "train.schedule=constant",
    "train.warmup_ratio=0",
    "train.epochs=1",
    "checkpoint.every=2",
    "eval.every=3",
    "eval.metric=accuracy",
)


def test_a_run_whose_folder_is_gone_is_resumed_or_found_finished(address, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 10.0)  # a busy machine may stand still for a while

    def go(*words: str):
        return train(Recipe.load("yelp_demo", *WORDS, f"output_dir={address}", *words))

    go("train.max_steps=4")
    shutil.rmtree("outputs")
    result = go()
    assert result.steps == 7 and "Resuming from step 4 of 7" in capsys.readouterr().out
    weights = (result.output_dir / "model_last/model.safetensors").read_bytes()
    assert MEMORY.cat(object_of(address, "model_last/model.safetensors")) == weights
    assert [start["after_step"] for start in audit(address).starts] == [0, 4] and not audit(address).problems
    alone = train(Recipe.load("yelp_demo", *WORDS, f"output_dir={tmp_path / 'alone'}"))
    assert (alone.output_dir / "model_last/model.safetensors").read_bytes() == weights
    shutil.rmtree("outputs")
    assert go().steps == 7 and f"{address} is finished: 7 steps" in capsys.readouterr().out
    again = train(Recipe.load(f"{address}/recipe.yaml", f"output_dir={tmp_path / 'again'}", "train.max_steps=1"))
    assert again.steps == 1 and again.output_dir == tmp_path / "again"
    step = index_of(address).checkpoints[0]
    words = (f"resume={address}/checkpoints/step_{step:08d}", f"output_dir={tmp_path / 'branch'}", "train.lr=1e-5")
    branch = train(Recipe.load("yelp_demo", *WORDS, *words))
    assert branch.steps == 7 and audit(branch.output_dir).starts[-1]["after_step"] == step


def test_the_same_command_uploads_what_a_lost_network_left_behind(address, monkeypatch, capsys):
    def put_file(*_, **__):
        raise ConnectionError("no route")

    recipe = Recipe.load("yelp_demo", *WORDS, "train.max_steps=2", f"output_dir={address}")
    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "put_file", put_file)
        with pytest.raises(TrainingError, match=r"has what was saved, but memory://.* has not: ConnectionError: no route"):
            train(recipe)
    assert (recipe.folder / "result.json").is_file() and not listed(address)["files"]
    assert train(recipe).steps == 2 and "is finished: 2 steps" in capsys.readouterr().out
    assert {"result.json", "model/model.safetensors", "report.html"} <= listed(address)["files"].keys()
