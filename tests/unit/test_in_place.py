"""Rows that are read from their files when they are asked for: those that datasets converts, wherever they are."""

import io
import json
import os
import pickle
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hftune import DataError
from hftune.batch_plan import BatchPlan
from hftune.config import addresses
from hftune.data import as_needed, fetching, in_place
from hftune.data.as_needed import Sizes, TextsAsNeeded
from hftune.data.digest import content_digest, entry_hashes
from hftune.data.fetching import Blocks, File, SourceError, downloaded
from hftune.data.in_place import Column, ReadRows, RowsInPlace, joined, open_in_place
from hftune.data.rows import load_files, row_numbers, select
from tests.support.runs import write_jsonl
from tests.support.servers import Web

KINDS = ("json", "parquet")


def rows_of(count=500):
    return [
        {"text": f"row {number} {'ä' * (number % 7)}", "label": number % 3, "tags": ["a"] * (number % 3)}
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    for name, value in {"PIECE": 2**10, "REMOTE_PIECE": 2**11, "LOOKED_AT": 2**13, "AT_ONCE": 2**12}.items():
        monkeypatch.setattr(in_place, name, value)
    monkeypatch.setattr(addresses, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def written(folder, kind, rows):
    if kind == "json":
        return str(write_jsonl(folder / "rows.jsonl", rows))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=40)
    return str(folder / "rows.parquet")


def opened(kind, *paths, options=None, least=0, most_bytes=1e9):
    return open_in_place(kind, paths, options or {}, least, Blocks(most_bytes))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_that_datasets_converts(tmp_path, kind):
    path = written(tmp_path, kind, rows_of())
    rows, converted = opened(kind, path), load_files(kind, "files", [path], "train")
    assert isinstance(rows, RowsInPlace) and len(rows) == 500 and rows.features == converted.features
    assert rows[[499, 0, 77, 77]] == converted[[499, 0, 77, 77]] and rows[-1] == converted[-1] and rows[3:90] == converted[3:90]
    assert rows["label"][:] == [*rows["label"]] == converted["label"][:] and isinstance(rows["tags"], Column)
    assert rows["text"][5] == converted["text"][5] and rows["text"][490:] == converted["text"][490:]
    assert content_digest(rows) == content_digest(converted) and (entry_hashes(rows) == entry_hashes(converted)).all()
    assert pickle.loads(pickle.dumps(rows))[[4, 2]] == converted[[4, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_selected_rows_know_their_numbers(tmp_path, kind):
    rows = opened(kind, written(tmp_path, kind, rows_of()))
    half = select(rows, np.arange(1, 500, 2))
    some = half.select([5, 2])
    assert (
        len(half) == 250
        and some["label"][:] == [11 % 3, 5 % 3]
        and row_numbers(half, [5, 2]) == row_numbers(some, [0, 1]) == [11, 5]
    )
    read = some.read()
    assert (
        isinstance(read, ReadRows) and row_numbers(read.select_columns(["label"]), [1]) == [5] and row_numbers(rows, [7]) == [7]
    )
    assert half.data.num_rows == 500 and half.data.nbytes == pytest.approx(rows.data.nbytes / 2, abs=1)
    assert len({rows._fingerprint, half._fingerprint, some._fingerprint, some.select_columns(["text"])._fingerprint}) == 4


def test_columns_are_renamed_and_data_sets_joined(tmp_path):
    rows = opened("json", written(tmp_path, "json", rows_of(90))).rename_columns({"text": "review"}).remove_columns(["tags"])
    others = (
        opened("parquet", written(tmp_path, "parquet", rows_of(50)))
        .select_columns(["text", "label"])
        .rename_columns({"text": "review"})
    )
    kept = datasets.Dataset.from_list([{"review": "kept", "label": 2}], features=rows.features)
    together = joined([rows, others.cast(rows.features), kept])
    assert together.column_names == ["review", "label"] and len(together) == 141
    assert together[[140, 100, 89]] == {"review": ["kept", "row 10 äää", "row 89 äääää"], "label": [2, 1, 2]}
    assert isinstance(joined([kept, kept]), datasets.Dataset)


def test_last_line_needs_no_end_and_large_files_alone_are_read_in_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows_of(100)))
    rows = opened("json", str(path))
    assert len(rows) == 100 and rows[99]["text"].startswith("row 99") and rows[98]["text"].startswith("row 98")
    assert opened("json", str(path), least=path.stat().st_size + 1) is None and opened("csv", str(path)) is None


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(rows_of(100), indent=1),  # one list
        "".join(json.dumps(row) + "\n\n" for row in rows_of(9)),  # blank lines, which do not count
        json.dumps({"text": "a", "label": 1}, indent=1),
        '{"text": "a",\n "label": 1}\n' * 50,  # two lines each
        "\n" + json.dumps({"text": "a", "label": 1}) + "\n",
        "not json\n",
    ],
)
def test_rows_that_are_not_lines_are_left_to_datasets(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert opened("json", str(path)) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a", "label": ', "Invalid value."),
        (b'{"text": 7, "label": 1}', "Column(/text) changed from string to number"),
        (b'{"text": "\xff", "label": 1}', "Invalid UTF8 sequence at string index 0"),
        (b"", "it is no JSON object on a line of its own"),
        (b'{"text": "a", "label": 1}{"text": "b", "label": 1}', "it is no JSON object on a line of its own"),
    ],
)
def test_bad_line_is_named(tmp_path, monkeypatch, line, problem):
    monkeypatch.setattr(in_place, "SEEN", 1)
    lines = [json.dumps(row).encode() for row in rows_of(300)]
    lines[211] = line if line else b" "
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    if not line:  # a line of white space alone
        path.write_bytes(path.read_bytes().replace(b"\n \n", b"\n    \n"))
    rows = opened("json", str(path))
    assert rows[[210, 212]]["label"] == [0, 2]
    with pytest.raises(DataError, match=r"^Row 211 of .*rows\.jsonl cannot be read: ") as caught:
        rows.select([3, 212, 211, 280]).read()
    assert problem in str(caught.value) and not isinstance(caught.value, SourceError)


def test_files_with_different_columns_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [written(tmp_path, "parquet", rows_of(9)), written(tmp_path / "other", "parquet", [{"text": "a"}])]
    with pytest.raises(DataError, match=r"other/rows\.parquet has no column 'label', which .*rows\.parquet has\. Files of one"):
        opened("parquet", *paths)
    others = [written(tmp_path, "json", rows_of(9)), written(tmp_path / "other", "json", [{"text": "a"}, {"text": "b"}])]
    assert opened("json", *others)[[8, 10]]["label"] == [2, None]  # the task names the row
    written(tmp_path / "other", "json", [{"text": 7}])
    with pytest.raises(DataError, match=r"The columns of .*other/rows\.jsonl and .*rows\.jsonl do not fit together: .*string"):
        opened("json", *others)


# Elsewhere


@pytest.fixture
def web():
    made = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows_of()), made, row_group_size=40)
    lines = "".join(json.dumps(row) + "\n" for row in rows_of()).encode()
    with Web({"rows.jsonl": lines, "rows.parquet": made.getvalue()}) as server:
        yield server


@pytest.mark.parametrize(("kind", "name"), [("json", "rows.jsonl"), ("parquet", "rows.parquet")])
def test_connections_that_are_cut_cost_time_only(web, kind, name):
    web.cut_every = 2
    rows = opened(kind, f"{web.address}/{name}")
    assert rows.read()[:] == datasets.Dataset.from_list(rows_of())[:]
    asked = len(web.asked)
    assert rows[[3, 490]]["label"] == [0, 1] and len(web.asked) == asked  # everything is kept
    assert opened(kind, f"{web.address}/{name}")[[3, 490]]["label"] == [0, 1]
    assert not any(body for *_, body in web.asked[asked:])  # also for other processes, under the version of the file


def test_what_is_wrong_with_an_address_is_said(web):
    def refused(address, **options):
        with pytest.raises(SourceError) as caught:
            opened("json", address, options=options)
        return str(caught.value)

    assert refused(f"{web.address}/none.jsonl") == (
        f"{web.address}/none.jsonl: there is no such file or bucket. Correct the name, or create the bucket."
    )
    missing = "gs://bucket/rows.jsonl needs a package that is not installed: pip install gcsfs."
    assert refused("gs://bucket/rows.jsonl") == missing
    web.status = 403
    said = refused(f"{web.address}/rows.jsonl?token=abcdefgh")
    assert (
        "access is denied (403" in said
        and said.endswith("those of the environment, or task.storage_options.")
        and "abcdefgh" not in said
    )
    web.status = 500
    assert "cannot be reached: ClientResponseError: 500" in refused(f"{web.address}/rows.jsonl")


def test_keys_that_a_bucket_refuses_are_said_at_once(monkeypatch):
    asked = []

    def info(self, path, **_):
        asked.append(path)
        raise PermissionError("Forbidden") from RuntimeError("ClientError")  # as s3fs does

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", info)
    with pytest.raises(
        SourceError, match=r"memory://a/b\.jsonl: access is denied \(Forbidden\)\. Check the credentials, those of"
    ):
        File.found("memory://a/b.jsonl", {})
    assert len(asked) == 1


def test_file_that_changes_or_is_gone_is_named_and_none_of_its_rows_is_bad(web, tmp_path):
    rows = opened("parquet", f"{web.address}/rows.parquet")
    web.change("rows.parquet", web.files["rows.parquet"] + b" ")
    with pytest.raises(SourceError, match=r"rows\.parquet has changed since its rows were counted\. Restore it"):
        rows.select([1]).read()
    del web.files["rows.parquet"]
    with pytest.raises(SourceError, match=r"rows\.parquet: there is no such file"):
        rows.select([1]).read()
    path = written(tmp_path, "json", rows_of(9))
    rows = opened("json", path)
    write_jsonl(tmp_path / "rows.jsonl", rows_of(8))
    with pytest.raises(SourceError, match="has changed"):
        rows.select([1]).read()


def test_options_and_patterns_are_for_fsspec(tmp_path):
    fs = fsspec.filesystem("memory")
    for number in (2, 1):
        fs.pipe(f"/there/{number}.jsonl", (json.dumps({"text": str(number)}) + "\n").encode() * number)
    assert opened("json", "memory://there/*.jsonl")["text"][:] == ["1", "2", "2"]
    with pytest.raises(SourceError, match=r"memory://there/\*\.parquet: there is no such file\."):
        opened("parquet", "memory://there/*.parquet")
    secret = {"headers": {"Authorization": "Bearer abc"}}
    assert "abc" not in repr(File.found("memory://there/1.jsonl", secret))


# What is kept


def test_a_server_of_ssh_is_given_the_options_that_it_knows(monkeypatch):
    asked = []

    class SSHClient:
        def set_missing_host_key_policy(self, policy):
            pass

        def connect(self, host, port=22, username=None, password=None):
            asked.append((host, username, password))

        def open_sftp(self):
            pass

    known = {"SSHClient": SSHClient, "MissingHostKeyPolicy": type("MissingHostKeyPolicy", (), {})}
    policies = dict.fromkeys(("AutoAddPolicy", "WarningPolicy", "RejectPolicy"), object)
    monkeypatch.setitem(sys.modules, "paramiko", SimpleNamespace(**known, **policies))
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    _, path = addresses.file_system("sftp://me@host/data/rows.jsonl", password="x")
    assert path == "/data/rows.jsonl" and asked == [("host", "me", "x")]


def test_parts_that_are_needed_last_make_room(tmp_path):
    blocks = Blocks(100)
    blocks.folder.mkdir(parents=True)
    made = []

    def make(name):
        made.append(name)
        return name[:1].encode() * 40

    def get(name):
        with blocks.get(f"{name}.block", partial(make, name)) as file:
            return file.read()

    def kept():
        return sorted(path.stem for path in blocks.folder.glob("*.block"))

    blocks._next = {"a.block": 3, "b.block": 1, "c.block": 2}
    assert get("a") == b"a" * 40 and get("b") == b"b" * 40 and get("b") == b"b" * 40 and made == ["a", "b"]
    get("c")
    assert kept() == ["b", "c"] and made == ["a", "b", "c"]  # a was needed last
    get("d")
    assert kept() == ["b", "d"]
    blocks._next = {"d.block": 0}
    get("a")
    assert kept() == ["a", "d"]  # b is not needed any more


def test_downloads_that_nobody_asks_for_any_more_make_room(web):
    files = [File.found(f"{web.address}/{name}", {}) for name in web.files]
    one, other = (Path(downloaded(file)) for file in files)
    os.utime(one.parent, (0, 0))
    asked = len(web.asked)
    assert downloaded(files[1]) == str(other) and not one.parent.exists() and other.is_file() and len(web.asked) == asked
    os.utime(other.parent, (0, 0))
    assert downloaded(files[1]) == str(other) and len(web.asked) == asked  # it is asked for
    assert downloaded(files[0]) == str(one) and one.is_file() and other.is_file()


def test_parts_are_fetched_in_the_order_in_which_they_are_needed(web):
    web.wait_s = 0.0
    rows = opened("parquet", f"{web.address}/rows.parquet", most_bytes=1e6)
    order = np.array([485, 486, 3, 444, 45, 44])
    rows.expect(order)
    names = [rows._block(part)[0] for part in (12, 0, 11, 1)]
    for _ in range(500):
        if all((rows.blocks.folder / name).is_file() for name in names):
            break
        fetching.time.sleep(0.01)
    stamps = [(rows.blocks.folder / name).stat().st_mtime_ns for name in names]
    assert stamps == sorted(stamps) and len([*rows.blocks.folder.glob("*.block")]) == 4
    asked = len(web.asked)
    assert rows[order]["label"] == [485 % 3, 486 % 3, 0, 0, 0, 44 % 3] and len(web.asked) == asked


def test_groups_are_parts_of_the_rows_that_are_used(tmp_path):
    rows = opened("parquet", written(tmp_path, "parquet", rows_of()))
    assert rows.groups(1) == [40] * 12 + [20] and rows.groups(100) == [120] * 4 + [20]
    assert rows.select(np.arange(10, 95, 2)).groups(1) == [15, 20, 8]


def test_blank_line_at_the_seam_of_what_is_looked_through_is_seen(tmp_path):
    line = json.dumps({"text": "a" * 200, "label": 1}) + "\n"
    lines = line * (in_place.LOOKED_AT // len(line))
    padding = in_place.LOOKED_AT - len(lines) - len(line) + 200
    path = tmp_path / "rows.jsonl"
    whole = lines + json.dumps({"text": "a" * padding, "label": 1}) + "\n"
    assert len(whole) == in_place.LOOKED_AT
    path.write_text(whole + "\n" + line)
    assert opened("json", str(path)) is None


def test_numbers_of_another_form_and_columns_that_are_missing_are_read_as_datasets_does(tmp_path, monkeypatch):
    monkeypatch.setattr(in_place, "SEEN", 1)
    rows = rows_of(300)
    rows[200]["label"] = 1.0
    rows[250] = {"text": "no label"}
    path = written(tmp_path, "json", rows)
    assert opened("json", path)[[0, 200, 250]]["label"] == [0, 1, None]
    assert opened("json", path).select_columns(["label"])[[200]] == {"label": [1]}


def test_files_without_rows_are_left_out(tmp_path):
    written(tmp_path, "json", rows_of(9))
    for number in (0, 9):
        (tmp_path / f"{number}.jsonl").write_text("")
    parquet.write_table(pa.table({"text": pa.array([], "string")}), tmp_path / "0.parquet")
    assert len(opened("json", str(tmp_path / "*.jsonl"))) == 9 and opened("json", str(tmp_path / "0.jsonl")) is None
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "1.parquet")
    rows = opened("parquet", str(tmp_path / "*.parquet"))
    assert rows[[0]] == {"text": ["a"]} and rows.blocks
    write_jsonl(tmp_path / "z.jsonl", [{"text": 7}])
    with pytest.raises(DataError, match=r"The columns of .*/z\.jsonl and .*/rows\.jsonl do not fit"):
        opened("json", str(tmp_path / "*.jsonl"))


def test_values_that_do_not_fit_to_other_data_sets_are_refused_with_their_file(tmp_path):
    rows = opened("parquet", written(tmp_path, "parquet", [{"label": 2**40}]))
    with pytest.raises(DataError, match=r"Rows of .*rows\.parquet do not fit to the others: Integer value"):
        rows.cast(datasets.Features(label=datasets.Value("int32"))).read()


def test_a_column_of_a_type_that_datasets_does_not_know_is_refused_with_its_file(tmp_path):
    table = pa.table({"text": ["a"], "counts": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    parquet.write_table(table, tmp_path / "spark.parquet")
    with pytest.raises(
        DataError, match=r"spark\.parquet cannot be read: Arrow type map<.*\. Leave this column out, or convert"
    ):
        opened("parquet", str(tmp_path / "spark.parquet"))


def test_files_of_one_name_in_two_folders_are_two(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = write_jsonl(tmp_path / name / "rows.jsonl", [{"text": name}])
        os.utime(path, (0, 0))
    found = []
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        rows = opened("json", "rows.jsonl")
        found.append(rows._fingerprint)
        assert rows["text"][0] == name
    assert found[0] != found[1]


def test_server_without_etags_is_asked_for_the_time(web):
    web.tags = "Last-Modified"
    address = f"{web.address}/rows.jsonl"
    old = opened("json", address)
    web.change("rows.jsonl", web.files["rows.jsonl"].replace(b"row 0", b"ROW 0"))
    assert opened("json", address)["text"][0].startswith("ROW 0") and opened("json", address).versions != old.versions
    assert old["text"][0].startswith("row 0")  # of which everything is kept
    for block in old.blocks.folder.glob("*.block"):
        block.unlink()
    with pytest.raises(SourceError, match="has changed"):
        old.select([0]).read()
    web.has_ranges = False
    with pytest.raises(SourceError, match=r"is sent as a whole each time\. task\.prepare=all downloads it once\."):
        opened("json", f"{web.address}/rows.jsonl?again")


def test_wrong_options_are_said_at_once(web):
    with pytest.raises(SourceError, match=r"cannot be reached: TypeError: .*Check the address and its options\."):
        opened("json", f"{web.address}/rows.jsonl", options={"client_kwargs": {"nonsense": 1}})


def test_evaluation_between_steps_does_not_end_what_is_fetched_for_training(web):
    rows, order = opened("parquet", f"{web.address}/rows.parquet", most_bytes=1e6), np.arange(100, 200)
    train = TextsAsNeeded(["train"], rows, 9, lambda indices: [{"input_ids": [1]} for _ in indices], dict)
    evaluated = TextsAsNeeded(["eval"], rows.select(range(400, 500)), 9, train._make, dict)
    train.expect(order, 0)
    expected = dict(rows.blocks._next)
    evaluated.expect(np.arange(100), 0)
    assert rows.blocks._next != expected
    train.expect(order, 10)
    assert rows.blocks._next == expected


def test_each_part_is_fetched_once_in_an_epoch_that_is_shuffled_in_windows(web, monkeypatch):
    monkeypatch.setattr(as_needed, "AGAIN", 40)
    monkeypatch.setattr(Blocks, "_fetch", lambda self: None)  # a thread that is ahead by chance, or behind
    most = len(web.files["rows.parquet"])  # less than its parts take that are decompressed
    rows = opened("parquet", f"{web.address}/rows.parquet", most_bytes=most)
    texts = TextsAsNeeded(["once"], rows, 9, lambda indices: [{"input_ids": [1]} for _ in rows.select(indices).read()], dict)
    plan = BatchPlan(500, 20, lengths=Sizes(texts, ["input_ids"]).sum(), window=80, groups=rows.groups(1))
    sizes, real = [], rows.readers[0][0]._read_group

    def read(group, names):
        sizes.append((group, len(part := real(group, names))))
        return part

    monkeypatch.setattr(rows.readers[0][0], "_read_group", read)
    assert sum(len(batch.samples) for step in plan.epoch(0) for batch in step) == 500
    assert sorted(group for group, _ in sizes) == [*range(13)]
    kept = sum(path.stat().st_size for path in rows.blocks.folder.glob("*.block"))
    assert kept <= most < sum(size for _, size in sizes)


def test_a_part_that_was_read_and_made_room_is_not_fetched_again_by_a_thread_that_lags_behind():
    blocks, made, goes_on = Blocks(2**30), [], threading.Event()

    def make(name):
        made.append(name)
        assert name != "a.block" or goes_on.wait(30)
        return b"data"

    blocks.expect([(name, partial(make, name), 4) for name in ("a.block", "b.block", "c.block", "d.block")])
    until = time.monotonic() + 30
    while not made and time.monotonic() < until:
        time.sleep(0.01)
    for name in ("b.block", "c.block"):
        blocks.get(name, partial(make, name)).close()
    (blocks.folder / "b.block").unlink()
    goes_on.set()
    while "d.block" not in made and time.monotonic() < until:
        time.sleep(0.01)
    assert made == ["a.block", "b.block", "c.block", "d.block"]


def test_a_row_group_of_more_text_than_one_array_of_arrow_can_hold(tmp_path, monkeypatch):
    rows = opened("parquet", written(tmp_path, "parquet", rows_of(6))).select_columns(["text"])
    bytes_N = np.zeros(2**30 + 1, np.uint8)  # takes no memory before it is written to
    bounds = pa.py_buffer(np.array([0, 1, len(bytes_N) - 1, len(bytes_N)], np.int32))
    text = pa.StringArray.from_buffers(3, bounds, pa.py_buffer(bytes_N))
    table = pa.table({"text": pa.chunked_array([text, text])})
    monkeypatch.setattr(in_place.ipc, "open_file", lambda _: SimpleNamespace(read_all=lambda: table))
    assert rows[[5, 0, 3, 2]]["text"] == ["\0"] * 4
