"""Digests of data sets cover all that these hold, and nothing of where it lies; hashes of rows name the rows that were changed."""

import time
from hashlib import sha256

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hftune.data import digest
from hftune.data.blocks import Blocks, JoinedBlocks
from hftune.data.digest import cached_row_hashes, content_digest, row_hashes
from hftune.data.images import Images
from hftune.data.restoration_images import checked_images, load_folder
from hftune.data.row_hashes import NAME, read_rows, root, write_rows
from hftune.data.tokenized import Ragged, Texts
from hftune.errors import ConfigError, DataError

ROWS = 2500


def rows_of(**changed):
    columns = {
        "text": [None if n % 7 == 0 else "é" * (n % 5) for n in range(ROWS)],
        "label": [n % 2 for n in range(ROWS)],
        "flag": [n % 3 == 0 for n in range(ROWS)],
        "input_ids": [[n] * (n % 4) for n in range(ROWS)],
        "nested": [{"a": [[n], []], "b": 0.5 * n} for n in range(ROWS)],
        "turns": [[{"role": "user", "content": f"{n}"}] * (n % 3) for n in range(ROWS)],
        "score": [None if n % 11 == 0 else float(n) for n in range(ROWS)],
        "pair": [[n, None] for n in range(ROWS)],
    }
    for name, (place, value) in changed.items():
        columns[name][place] = value
    return datasets.Dataset.from_dict(columns)


def different(one, other):
    """Return the rows whose hashes differ; if there are any, the digests differ, too."""
    rows = np.flatnonzero((row_hashes(one) != row_hashes(other)).any(1)).tolist()
    assert (content_digest(one) != content_digest(other)) == bool(rows)
    return rows


def flipped(values, place):
    return [1 - value if n == place else value for n, value in enumerate(values)]


@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_one_flipped_label_of_a_thousand_changes_the_digest(place):
    labels = [n % 2 for n in range(1000)]
    other = flipped(labels, place)
    tables = [datasets.Dataset.from_dict({"label": each, "input_ids": [[1, 2]] * 1000}) for each in (labels, other)]
    assert different(*tables) == [place]
    pixels = np.zeros((1000, 2, 2, 1), np.uint8)
    assert different(Images(pixels, labels), Images(pixels, other)) == [place]
    assert different(*([{"x": np.ones(3), "label": label} for label in each] for each in (labels, other))) == [place]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("text", "ê"),
        ("label", 7),
        ("flag", None),
        ("input_ids", [1, 2]),
        ("nested", {"a": [[], [1203]], "b": 601.5}),
        ("nested", {"a": [[1203], []], "b": 601.6}),
        ("turns", [{"role": "assistant", "content": "1203"}]),
        ("score", None),
        ("pair", [None, 1203]),
    ],
)
def test_one_changed_value_changes_the_hash_of_its_row_alone(column, value):
    assert different(rows_of(), rows_of(**{column: (1203, value)})) == [1203]


def test_how_arrow_keeps_the_same_rows_does_not_show(tmp_path):
    """In memory, on disk, in other chunks, as a selection of a larger table, with something else between the values."""
    whole = rows_of()
    expected, hashes = content_digest(whole), row_hashes(whole)
    assert hashes.shape == (ROWS, 16) and len({row.tobytes() for row in hashes}) == ROWS
    whole.save_to_disk(tmp_path / "a", num_shards=3)
    pieces = [whole.select(range(7)), whole.select(range(7, 1203)), whole.select(range(1203, ROWS))]
    doubled = datasets.concatenate_datasets([whole, whole]).select([*range(ROWS, ROWS + 10), *range(10, ROWS)])
    for same in (datasets.load_from_disk(tmp_path / "a"), datasets.concatenate_datasets(pieces), doubled):
        assert content_digest(same) == expected and (row_hashes(same) == hashes).all()
    assert content_digest(whole.with_format("numpy", columns=["label"])) == expected
    assert content_digest(whole.select([1, 0, *range(2, ROWS)])) != expected
    chosen = whole.select([2000, 3, 3, 17]).select_columns([*reversed(whole.column_names)])
    assert (row_hashes(chosen) == hashes[[2000, 3, 3, 17]]).all()


def test_values_that_are_told_apart_by_lengths_alone_are_told_apart():
    def table(**columns):
        return datasets.Dataset.from_dict(columns)

    assert different(table(text=["ab", "c"]), table(text=["a", "bc"]))
    assert different(table(ids=[[1, 2], [3]]), table(ids=[[1], [2, 3]]))
    assert different(table(text=[None, "a"]), table(text=["a", None]))
    assert different([["ab", "c"]], [["a", "bc"]])


def test_names_of_classes_are_part_of_the_data():
    rows = datasets.Dataset.from_dict({"label": [0, 1]})
    one, other = (rows.cast_column("label", datasets.ClassLabel(names=names)) for names in (["a", "b"], ["b", "a"]))
    assert content_digest(one) != content_digest(other)


def test_rows_of_every_kind_of_data_set_are_told_apart(monkeypatch):
    """Those that are ours are never read sample by sample, however large they are."""
    monkeypatch.setattr(digest, "MAX_READ", 2)
    tokens = np.arange(100, dtype=np.int32)
    other = tokens.copy()
    other[45] += 1
    assert different(Blocks(tokens, 10), Blocks(other, 10)) == [4]
    assert content_digest(Blocks(tokens, 10)) == content_digest(Blocks(tokens.copy(), 10)) != content_digest(Blocks(tokens, 11))
    joined = [JoinedBlocks([Blocks(tokens, 10), Blocks(stream, 10)]) for stream in (tokens, other)]
    assert different(*joined) == [14]

    def texts(labels):
        return Texts({"input_ids": tokens, "input_ids_offsets": np.array([0, 10, 10, 60, 100]), "label": np.array(labels)})

    assert different(texts([0, 1, 0, 1]), texts([0, 1, 1, 1])) == [2]
    pixels = np.zeros((5, 2, 3, 1), np.uint8)
    spotted = pixels.copy()
    spotted[3, 1, 2] = 255
    assert different(Images(pixels, [0] * 5), Images(spotted, [0, 0, 0, 0, 1])) == [3, 4]
    shapes = np.array([[2, 1, 3], [1, 2, 3], [2, 2, 3]])
    rows = Ragged(tokens[:24], np.array([0, 6, 12, 24]))
    turned = (Images(rows, [0, 1, 2], sizes) for sizes in (shapes, shapes[[1, 0, 2]]))
    assert different(*turned) == [0, 1]
    assert different([{"x": torch.ones(2)}, {"x": torch.ones(3)}], [{"x": torch.ones(2)}, {"x": torch.zeros(3)}]) == [1]


def test_equal_pictures_in_different_folders_agree_and_an_edited_one_is_named(tmp_path):
    loaded = []
    for folder in (tmp_path / "a" / "train", tmp_path / "elsewhere" / "b" / "train"):
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = np.random.RandomState(number).randint(0, 256, (300, 300, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
        loaded.append(checked_images(load_folder(folder, "", ["image"]), "train", None))
    assert different(*loaded) == []
    path = folder / "1.png"
    assert path.stat().st_size > 2 * digest.END_BYTES
    edited = np.asarray(Image.open(path)).copy()
    edited[150, 150, 1] ^= 1
    Image.fromarray(edited).save(path)
    assert different(*loaded) == [1]


class Lazy:
    """A data set of one's own that reads its samples when asked for them."""

    def __init__(self, labels=None, folder="/data"):
        self.files, self.labels, self.asked = [f"{folder}/{n}" for n in range(5000)], labels, 0

    def __len__(self):
        return len(self.files)

    def __getitem__(self, place):
        self.asked += 1
        return {"x": torch.full((2,), float(place)), "label": int(self.labels[place])}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_large_data_set_of_ones_own_is_sampled_but_its_labels_are_all_read(kind):
    labels = [n % 2 for n in range(5000)]
    one, same, other = Lazy(kind(labels)), Lazy(kind(labels), "/mnt"), Lazy(kind(flipped(labels, 4001)))
    assert content_digest(one) == content_digest(same) and one.asked == digest.SPREAD
    assert different(one, other) == [4001]


def test_small_data_set_of_ones_own_is_read_as_a_whole():
    class Hidden:
        def __init__(self, wrong):
            self.wrong = wrong  # differs in one sample, in no attribute that has an entry a sample

        def __len__(self):
            return 1000

        def __getitem__(self, place):
            return {"x": place, "label": int(place == 567) * self.wrong}

    assert different(Hidden(0), Hidden(1)) == [567]


def test_a_gigabyte_takes_about_a_second():
    rows = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2**25)), 64)})
    dataset = datasets.Dataset(rows, fingerprint="given")  # else datasets computes a digest of its own, which takes 2 s
    began = time.process_time()  # of this process: others may be busy on the machine
    content_digest(dataset)
    assert time.process_time() - began < 4  # 268 MB; measured: 0.6, and 1.8 where others are busy


class Rows(torch.utils.data.Dataset):
    """A data set as most people write one."""

    def __init__(self, labels):
        self.rows = [{"x": n % 5, "label": label} for n, label in enumerate(labels)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


@pytest.mark.parametrize(
    "made", [Rows, lambda labels: torch.utils.data.TensorDataset(torch.zeros(5000, 2), torch.tensor(labels))]
)
def test_labels_inside_of_a_large_data_set_of_ones_own_change_its_digest(made):
    labels = [n % 2 for n in range(5000)]
    assert content_digest(made(labels)) == content_digest(made([*labels]))
    assert content_digest(made(labels)) != content_digest(made(flipped(labels, 2501)))


def test_rows_that_only_reading_them_all_would_tell_are_not_hashed(tmp_path, monkeypatch):
    assert row_hashes(Lazy()) is None
    (tmp_path / NAME).write_bytes(b"of an earlier run")
    write_rows(tmp_path, None)
    assert read_rows(tmp_path) is None
    pixels = np.zeros((4, 100), np.uint8)
    spotted = pixels.copy()
    spotted[1, 5] = spotted[2, 50] = spotted[3, 95] = 1
    monkeypatch.setattr(digest, "ARRAY_BYTES", 80)  # of larger arrays, the ends of each row
    assert np.flatnonzero((row_hashes(pixels) != row_hashes(spotted)).any(1)).tolist() == [1, 3]


def test_what_is_written_is_read_back(tmp_path):
    hashes = row_hashes(rows_of())
    write_rows(tmp_path, hashes)
    assert (read_rows(tmp_path) == hashes).all()
    assert root(hashes) == sha256((tmp_path / NAME).read_bytes()).hexdigest()
    (tmp_path / NAME).write_bytes(b"0" * 17)
    with pytest.raises(ConfigError, match="17 bytes, which is no multiple of 16: it is cut off"):
        read_rows(tmp_path)


def test_hashes_of_many_rows_are_kept_in_the_cache_unless_the_user_says_what_belongs_to_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "MIN_CACHED_ROWS", 3)
    monkeypatch.setattr("hftune.data.cache.cache_dir", lambda: tmp_path)

    class Named(Lazy):
        def __len__(self):
            return 5000

        def contents_by_row(self):
            return {"name": self.files, "label": self.labels}

    renamed = Named([0] * 5000)
    renamed.files[4321] += ".png"  # which a digest of 64 samples does not see
    one, other = (cached_row_hashes(dataset, "all:5") for dataset in (Named([0] * 5000), renamed))
    assert np.flatnonzero((one != other).any(1)).tolist() == [4321]
    renamed.files.pop(), renamed.labels.pop()
    with pytest.raises(DataError, match=r"contents_by_row\(\) of Named has 4,999 entries for 5,000 samples"):
        row_hashes(renamed)
    expected = cached_row_hashes([[1], [2], [3]], "all:2")
    monkeypatch.setattr(digest, "row_hashes", lambda dataset: None)
    assert (cached_row_hashes([[1], [2], [3]], "all:2") == expected).all()
    assert cached_row_hashes([[1], [2], [3]], "all:3") is None
