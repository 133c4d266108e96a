"""The cache of prepared data: written once, never half, never after an error, and made again if it is damaged."""

import errno
import json
import os
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from hftune import ConfigError, DataError
from hftune.data import cache, restoration_images
from hftune.data import rows as data_rows
from hftune.data.cache import Stream, cached_arrays, cached_value, mapped, one_at_a_time
from hftune.data.jieba_tokenizer import SPECIAL_TOKENS
from hftune.data.restoration_images import checked_images, load_folder
from hftune.data.rows import check_texts
from hftune.data.vocabulary import save_tokenizer

VOCABULARY = [*SPECIAL_TOKENS, "我们", "讨论"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "hftune"


class Maker:
    """Makes two arrays, and counts how often."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self):
        self.calls += 1
        if self.error:
            raise self.error
        chunks = (np.arange(start, start + 5) for start in (0, 5))
        return {"ids": Stream(np.int32, (10,), chunks), "none": np.empty((0, 2), np.float32)}


def test_arrays_are_made_once_and_mapped_from_then_on():
    maker = Maker()
    for _ in range(2):
        arrays = cached_arrays("key", maker)
        assert isinstance(arrays["ids"], np.memmap) and arrays["ids"].dtype == np.int32
        assert arrays["ids"].tolist() == [*range(10)] and arrays["none"].shape == (0, 2)
    cached_arrays("other key", maker)
    assert maker.calls == 2


def test_mapped_arrays_are_pickled_as_their_path_and_their_slices_as_numbers():
    array = cached_arrays("numbers", lambda: {"numbers": np.arange(100_000)})["numbers"]
    whole, part = pickle.dumps(array), pickle.dumps(array[10:20])
    assert len(whole) < 1000 and np.array_equal(pickle.loads(whole), array)
    assert np.array_equal(pickle.loads(part), np.arange(10, 20))


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no index", "odd index"])
def test_damaged_files_are_noticed_and_made_again(folder, damage):
    maker = Maker()
    cached_arrays("key", maker)
    (array,), (index,) = folder.glob("*.ids.npy"), folder.glob("*.json")
    if damage == "cut":
        array.write_bytes(array.read_bytes()[:-4])
    elif damage == "changed":
        array.write_bytes(array.read_bytes()[:-4] + b"\1\2\3\4")
    elif damage == "gone":
        array.unlink()
    else:
        index.write_text("[1" if damage == "no index" else json.dumps([1]))
    assert cached_arrays("key", maker)["ids"].tolist() == [*range(10)]
    assert maker.calls == 2


def test_error_leaves_nothing_that_looks_like_success(folder):
    for _ in range(2):
        with pytest.raises(DataError, match="wrong"):
            cached_arrays("key", broken := Maker(DataError("wrong")))
        assert broken.calls == 1
    with pytest.raises(PermissionError, match="photo"):  # of reading the data, which is not the cache's fault
        cached_arrays("key", Maker(PermissionError(errno.EACCES, "Permission denied", "/photo.png")))
    with pytest.raises(DataError), one_at_a_time("task"):
        raise DataError("no rows")
    assert not [*folder.glob("*.json"), *folder.glob("*.npy"), *folder.glob("*.done")]


def test_full_disk_is_said_in_a_sentence_and_leaves_no_half_file(folder, monkeypatch):
    def write(file, header):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", write)
    with pytest.raises(ConfigError, match=f"{folder}, the cache .* cannot be written: No space left on device. Set HF_HOME"):
        cached_arrays("key", Maker())
    assert {path.suffix for path in folder.iterdir()} == {".lock"}


def test_entry_that_cannot_be_read_is_said_in_a_sentence_and_kept(folder, monkeypatch):
    cached_arrays("key", Maker())

    def open_npy(path, mmap_mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(np, "load", open_npy)
    with pytest.raises(ConfigError, match=r"ids\.npy, in the cache .* cannot be read: Permission denied\. Make it readable"):
        cached_arrays("key", maker := Maker())
    assert maker.calls == 0
    monkeypatch.setattr(cache, "_read", lambda path: None)
    with pytest.raises(ConfigError, match="cannot be read back as it was written"):
        cached_arrays("key", Maker())


def test_vocabulary_is_written_once_and_failure_is_said_in_a_sentence(folder, monkeypatch):
    save_tokenizer(VOCABULARY)
    (path,) = folder.glob("vocabulary-*/vocab.txt")
    before = path.stat().st_ino
    save_tokenizer(VOCABULARY)
    assert path.stat().st_ino == before
    path.write_text("damaged")
    save_tokenizer(VOCABULARY)
    assert path.read_text(encoding="utf-8").split() == VOCABULARY

    def write_bytes(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(ConfigError, match="cache of prepared data, cannot be written: No space left on device"):
        save_tokenizer([*VOCABULARY, "new"])


@pytest.mark.parametrize("processes", [1, 2])
def test_mapped_rows_outlive_their_file(folder, processes):
    rows = datasets.Dataset.from_list([{"a": number} for number in range(4)])
    doubled = mapped(rows, double, "Doubling", processes)
    assert doubled["b"][:] == [0, 2, 4, 6] and not [*folder.iterdir()]
    with pytest.raises(ZeroDivisionError):
        mapped(rows, lambda batch: 1 / 0, "Failing")
    assert not [*folder.iterdir()]


def double(batch):
    return {"b": [2 * value for value in batch["a"]]}


def test_progress_is_said_where_there_is_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(cache, "SAY_S", -1.0)
    rows = datasets.Dataset.from_dict({"number": [*range(2500)]})
    monkeypatch.setattr(datasets, "are_progress_bars_disabled", lambda: True)
    assert mapped(rows, lambda batch: {"twice": [2 * number for number in batch["number"]]}, "Doubling")["twice"][-1] == 4998
    lines = [f"Doubling: {done} of 2,500 rows" for done in ("1,000", "2,000", "2,500")]
    assert capsys.readouterr().out.splitlines() == lines


def test_bar_moves_by_what_is_done(monkeypatch, capsys):
    bars, are_hidden = [], datasets.are_progress_bars_disabled()  # as a test before this one may have left it

    class Bar(datasets.utils.tqdm):
        def __init__(self, **options):
            super().__init__(**{**options, "delay": 0, "mininterval": 0})
            bars.append(self)

    monkeypatch.setattr(datasets.utils, "tqdm", Bar)
    datasets.enable_progress_bars()
    try:
        say = cache.saying("Tokenizing train", 2500)
        say(1000)
        say(2500)
    finally:
        if are_hidden:
            datasets.disable_progress_bars()
    assert bars[0].n == 2500 and "Tokenizing train: 100%" in capsys.readouterr().err


def test_length_of_an_array_may_be_known_only_once_it_is_written(folder):
    for sizes in ((), (3, 0, 100_000)):
        chunks = [np.full(size, place) for place, size in enumerate(sizes)]
        array = cached_arrays([sizes], lambda chunks=chunks: {"ids": Stream(np.int32, None, iter(chunks))})["ids"]
        assert array.dtype == np.int32 and array.tolist() == [number for chunk in chunks for number in chunk.tolist()]


def test_what_killed_processes_left_is_removed_after_a_day(folder):
    folder.mkdir(parents=True)
    names = {".mapped-1.arrow", ".x.npy.1.writing", "tmp12345678"}
    for name in names:
        (folder / name).touch()
    cached_arrays("new", Maker())
    assert names <= {path.name for path in folder.iterdir()}
    for name in names:
        os.utime(folder / name, (0, 0))
    cached_arrays("newer", Maker())
    assert not names & {path.name for path in folder.iterdir()}


def test_readers_of_what_is_there_take_no_lock(monkeypatch):
    cached_value("key", lambda: {"a": [1, None]})
    with one_at_a_time("task"):
        pass
    monkeypatch.setattr(cache, "FileLock", None)
    with one_at_a_time("task"):
        assert cached_value("key", lambda: 1 / 0) == {"a": [1, None]}


def test_who_waited_while_another_process_succeeded_holds_nobody_up(monkeypatch, folder):
    class Late(FileLock):
        def acquire(self, timeout=-1):
            taken = super().acquire(timeout)
            Path(self.lock_file).with_suffix(".done").touch()  # the process that had the lock until now
            return taken

    monkeypatch.setattr(cache, "FileLock", Late)
    with one_at_a_time("task"):
        (lock,) = folder.glob("*.lock")
        FileLock(lock).acquire(timeout=0).lock.release()


@pytest.mark.parametrize("is_done", [False, True])
def test_waiting_for_another_process_is_said_once(monkeypatch, is_done):
    class Held(FileLock):
        def acquire(self, timeout=-1):
            if timeout > 0:
                raise Timeout(self.lock_file)
            return super().acquire()

    if is_done:
        with one_at_a_time("task"):
            pass
    monkeypatch.setattr(cache, "FileLock", Held)
    said = []
    with one_at_a_time("task", lambda: said.append("waiting")):
        for key in ("a", "b"):
            cached_arrays(key, Maker())
    assert said == ["waiting"]
    cached_arrays("c", Maker())
    assert said == ["waiting"]


def test_many_texts_are_checked_once_and_bad_ones_every_time(monkeypatch):
    monkeypatch.setattr(data_rows, "MIN_CACHED_ROWS", 2)
    good = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    bad = datasets.Dataset.from_list([{"text": "a"}, {"text": " "}])
    check_texts(good, "text", "train")
    for _ in range(2):
        with pytest.raises(DataError, match="empty text in column 'text' at row 1"):
            check_texts(bad, "text", "train")
    monkeypatch.setattr(data_rows, "_read_all", None)
    check_texts(good, "text", "train")


def test_pictures_are_checked_again_only_if_a_file_has_changed(monkeypatch, tmp_path):
    (tmp_path / "train").mkdir()
    for number in range(2):
        Image.new("RGB", (20, 30)).save(tmp_path / "train" / f"{number}.png")
    checked, check = [], restoration_images._check_row
    monkeypatch.setattr(restoration_images, "_check_row", lambda row, *rest: checked.append(row) or check(row, *rest))

    def sizes():
        checked.clear()
        return checked_images(load_folder(tmp_path / "train", "", ["image"]), "train", None).sizes

    assert sizes().tolist() == [[30, 20], [30, 20]] and len(checked) == 2
    assert sizes().dtype == np.int32 and not checked
    Image.new("RGB", (40, 30)).save(tmp_path / "train" / "1.png")
    assert sizes().tolist() == [[30, 20], [30, 40]] and len(checked) == 2
