"""The digest of a data set covers all that it holds, and nothing of where it lies."""

import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hftune.data import digest
from hftune.data.blocks import Blocks
from hftune.data.digest import content_digest
from hftune.data.images import Images
from hftune.data.pictures import load_pictures


def table(rows=1000, **columns):
    made = {"label": [n % 2 for n in range(rows)], "input_ids": [[n, n + 1] for n in range(rows)]}
    return datasets.Dataset.from_dict({**made, **columns})


def flipped(values, place):
    return [1 - value if n == place else value for n, value in enumerate(values)]


@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_one_flipped_label_of_a_thousand_changes_the_digest(place):
    labels = [n % 2 for n in range(1000)]
    assert content_digest(table(label=labels)) != content_digest(table(label=flipped(labels, place)))
    pixels = np.zeros((1000, 2, 2, 1), np.uint8)
    assert content_digest(Images(pixels, labels)) != content_digest(Images(pixels, flipped(labels, place)))
    rows = [{"x": np.ones(3), "label": label} for label in labels]
    other = [{**row, "label": label} for row, label in zip(rows, flipped(labels, place), strict=True)]
    assert content_digest(rows) != content_digest(other)


def test_how_arrow_keeps_the_same_rows_does_not_show(tmp_path):
    """In memory, on disk, in other chunks, as a selection of a larger table, with something else between the values."""
    rows = 2500
    whole = table(
        rows,
        text=[None if n % 7 == 0 else "é" * (n % 5) for n in range(rows)],
        flag=[n % 3 == 0 for n in range(rows)],
        nested=[{"a": [[n], []], "b": 0.5 * n} for n in range(rows)],
        score=[None if n % 11 == 0 else float(n) for n in range(rows)],
    )
    expected = content_digest(whole)
    whole.save_to_disk(tmp_path / "a", num_shards=3)
    assert content_digest(datasets.load_from_disk(tmp_path / "a")) == expected
    pieces = datasets.concatenate_datasets(
        [whole.select(range(7)), whole.select(range(7, 1203)), whole.select(range(1203, rows))]
    )
    assert content_digest(pieces) == expected
    doubled = datasets.concatenate_datasets([whole, whole])
    assert content_digest(doubled.select([*range(rows, rows + 10), *range(10, rows)])) == expected
    assert content_digest(whole.with_format("numpy", columns=["label"])) == expected
    assert content_digest(whole.select([1, 0, *range(2, rows)])) != expected


def test_values_that_are_told_apart_by_lengths_alone_are_told_apart():
    assert content_digest(table(2, text=["ab", "c"])) != content_digest(table(2, text=["a", "bc"]))
    assert content_digest(table(2, input_ids=[[1, 2], [3]])) != content_digest(table(2, input_ids=[[1], [2, 3]]))
    assert content_digest([["ab", "c"]]) != content_digest([["a", "bc"]])
    assert content_digest(table(2, text=[None, "a"])) != content_digest(table(2, text=["a", None]))


def test_names_of_classes_are_part_of_the_data():
    def named(*names):
        return table(4).cast_column("label", datasets.ClassLabel(names=list(names)))

    assert content_digest(named("bad", "good")) != content_digest(named("good", "bad"))


def test_one_token_of_a_stream_changes_the_digest():
    stream = np.arange(10_000, dtype=np.int32)
    other = stream.copy()
    other[4321] += 1
    assert content_digest(Blocks(stream, 35)) == content_digest(Blocks(stream.copy(), 35))
    assert len({content_digest(Blocks(tokens, length)) for tokens in (stream, other) for length in (35, 36)}) == 4


def pictures(folder, size=300):
    draw = np.random.RandomState(0)
    for number in range(3):
        (folder / "train").mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.randint(0, 256, (size, size, 3), np.uint8)).save(folder / "train" / f"{number}.png")
    return folder


def loaded(folder):
    return load_pictures("imagefolder", str(folder), None, "train", "train", None, {"image": "image"}, None)


def test_equal_pictures_in_different_folders_agree_and_an_edited_pixel_does_not(tmp_path):
    first, second = pictures(tmp_path / "a"), pictures(tmp_path / "elsewhere" / "b")
    assert (first / "train" / "1.png").stat().st_size > 2 * digest.END_BYTES
    expected = content_digest(loaded(first))
    assert content_digest(loaded(second)) == expected
    image = Image.open(second / "train" / "1.png")
    pixels = np.asarray(image).copy()
    pixels[150, 150, 1] ^= 1
    Image.fromarray(pixels).save(second / "train" / "1.png")
    assert content_digest(loaded(second)) != expected


class Lazy:
    """A data set of one's own that reads its samples when asked for them."""

    def __init__(self, count, labels, folder="/data"):
        self.files, self.labels, self.asked = [f"{folder}/{n}" for n in range(count)], labels, 0

    def __len__(self):
        return len(self.files)

    def __getitem__(self, place):
        self.asked += 1
        return {"x": torch.full((2,), float(place)), "label": int(self.labels[place])}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_large_data_set_of_ones_own_is_sampled_but_its_labels_are_all_read(kind):
    labels = [n % 2 for n in range(5000)]
    one, same, other = Lazy(5000, kind(labels)), Lazy(5000, kind(labels), "/mnt"), Lazy(5000, kind(flipped(labels, 4001)))
    assert content_digest(one) == content_digest(same) != content_digest(other)
    assert one.asked == digest.SPREAD


def test_small_data_set_of_ones_own_is_read_as_a_whole():
    hidden = iter(range(2))

    class Hidden(Lazy):
        def __init__(self):
            super().__init__(1000, [])
            self.wrong = next(hidden)  # differs in one sample, in no attribute that has an entry a sample

        def __getitem__(self, place):
            return {"x": place, "label": int(place == 567) * self.wrong}

    assert content_digest(Hidden()) != content_digest(Hidden())


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
