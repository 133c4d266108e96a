"""rows.bin has a hash of each row's content, which names the rows that were changed."""

from hashlib import sha256

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hftune.data import digest
from hftune.data.blocks import Blocks, JoinedBlocks
from hftune.data.digest import cached_row_hashes, row_hashes
from hftune.data.images import Images, SeveralSizes
from hftune.data.pictures import load_pictures
from hftune.data.row_hashes import NAME, read_rows, root, write_rows
from hftune.data.tokenized import Texts
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
    """Return the rows whose hashes differ."""
    return np.flatnonzero((row_hashes(one) != row_hashes(other)).any(1)).tolist()


@pytest.fixture(scope="module")
def unchanged():
    return row_hashes(rows_of())


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
def test_one_changed_value_changes_the_hash_of_its_row_alone(unchanged, column, value):
    changed = row_hashes(rows_of(**{column: (1203, value)}))
    assert np.flatnonzero((unchanged != changed).any(1)).tolist() == [1203]


def test_how_arrow_keeps_the_same_rows_does_not_show(tmp_path):
    whole = rows_of()
    expected = row_hashes(whole)
    assert expected.shape == (ROWS, 16) and len({row.tobytes() for row in expected}) == ROWS
    whole.save_to_disk(tmp_path / "a", num_shards=3)
    assert (row_hashes(datasets.load_from_disk(tmp_path / "a")) == expected).all()
    pieces = datasets.concatenate_datasets([whole.select(range(7)), whole.select(range(7, 1203)), whole.select([1, 5])])
    assert (row_hashes(pieces) == expected[[*range(1203), 1, 5]]).all()
    chosen = whole.select([2000, 3, 3, 17]).select_columns([*reversed(whole.column_names)])
    assert (row_hashes(chosen) == expected[[2000, 3, 3, 17]]).all()


def test_rows_of_every_kind_of_data_set_are_told_apart(monkeypatch):
    """Those that are ours are never read sample by sample, however large they are."""
    monkeypatch.setattr(digest, "MAX_READ", 2)
    tokens = np.arange(100, dtype=np.int32)
    other = tokens.copy()
    other[45] += 1
    assert different(Blocks(tokens, 10), Blocks(other, 10)) == [4]
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
    assert different(SeveralSizes(tokens[:24], shapes, [0, 1, 2]), SeveralSizes(tokens[:24], shapes[[1, 0, 2]], [0, 1, 2])) == [
        0,
        1,
    ]
    assert different([{"x": torch.ones(2)}, {"x": torch.ones(3)}], [{"x": torch.ones(2)}, {"x": torch.zeros(3)}]) == [1]


def test_equal_pictures_in_different_folders_agree_and_an_edited_one_is_named(tmp_path):
    draw = np.random.RandomState(0)
    loaded = []
    for folder in (tmp_path / "a", tmp_path / "elsewhere" / "b"):
        (folder / "train").mkdir(parents=True)
        for number in range(3):
            pixels = np.random.RandomState(number).randint(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "train" / f"{number}.png")
        loaded.append(load_pictures("imagefolder", str(folder), None, "train", "train", None, {"image": "image"}, None))
    assert different(*loaded) == []
    Image.fromarray(draw.randint(0, 256, (40, 40, 3), np.uint8)).save(tmp_path / "a" / "train" / "1.png")
    assert different(*loaded) == [1]


class Lazy:
    """A large data set of one's own that reads its samples when asked for them."""

    def __init__(self, labels=None):
        self.files = [f"/data/{n}" for n in range(5000)]
        self.labels = labels

    def __len__(self):
        return 5000

    def __getitem__(self, place):
        raise AssertionError("Reading it may take hours.")


def test_large_data_sets_of_ones_own_are_not_read(tmp_path):
    labels = [n % 3 for n in range(5000)]
    changed = [*labels[:77], 5, *labels[78:]]
    assert different(Lazy(labels), Lazy(changed)) == different(Lazy(np.array(labels)), Lazy(torch.tensor(changed))) == [77]
    assert row_hashes(Lazy()) is None
    (tmp_path / NAME).write_bytes(b"of an earlier run")
    write_rows(tmp_path, None)
    assert read_rows(tmp_path) is None


def test_of_arrays_too_large_to_be_read_the_ends_of_each_row_count(monkeypatch):
    pixels = np.zeros((4, 100), np.uint8)
    spotted = pixels.copy()
    spotted[1, 5] = spotted[2, 50] = spotted[3, 95] = 1
    monkeypatch.setattr(digest, "ARRAY_BYTES", 80)
    assert different(pixels, spotted) == [1, 3]


def test_what_is_written_is_read_back(tmp_path):
    hashes = row_hashes(rows_of())
    write_rows(tmp_path, hashes)
    assert (read_rows(tmp_path) == hashes).all()
    assert root(hashes) == sha256((tmp_path / NAME).read_bytes()).hexdigest()
    (tmp_path / NAME).write_bytes(b"0" * 17)
    with pytest.raises(ConfigError, match="17 bytes, which is no multiple of 16: it is cut off"):
        read_rows(tmp_path)


def test_hashes_of_many_rows_are_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("hftune.data.digest.MIN_CACHED_ROWS", 3)
    monkeypatch.setattr("hftune.data.cache.cache_dir", lambda: tmp_path)
    expected = cached_row_hashes([[1], [2], [3]], "all:2")
    monkeypatch.setattr("hftune.data.digest.row_hashes", lambda dataset: None)
    assert (cached_row_hashes([[1], [2], [3]], "all:2") == expected).all()
    assert cached_row_hashes([[1], [2], [3]], "all:3") is None


def test_a_data_set_of_ones_own_can_say_what_belongs_to_a_row(tmp_path, monkeypatch):
    class Named(Lazy):
        def contents_by_row(self):
            return {"name": self.files, "label": self.labels}

    renamed = Named([0] * 5000)
    renamed.files[4321] += ".png"
    assert different(Named([0] * 5000), renamed) == [4321]
    monkeypatch.setattr("hftune.data.digest.MIN_CACHED_ROWS", 3)
    monkeypatch.setattr("hftune.data.cache.cache_dir", lambda: tmp_path)
    one, other = (cached_row_hashes(dataset, "all:5") for dataset in (Named([0] * 5000), renamed))  # which reads 64 samples
    assert np.flatnonzero((one != other).any(1)).tolist() == [4321]
    renamed.files.pop(), renamed.labels.pop()
    with pytest.raises(DataError, match=r"contents_by_row\(\) of Named has 4,999 entries for 5,000 samples"):
        row_hashes(renamed)
