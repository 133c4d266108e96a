"""Tokenized texts in flat arrays: the same samples and batches as from rows of dictionaries."""

import datasets
import numpy as np
import pytest
import torch

from hftune.data.digest import content_digest
from hftune.data.labels import Classes
from hftune.data.tokenized import Ragged, Texts, column_of, flat_arrays, lengths_of, ragged, values
from hftune.errors import DataError
from hftune.tasks import SequenceClassification, TitleGeneration

ROWS = [
    {"input_ids": [5, 6, 7], "label": 2, "cut": True},
    {"input_ids": [8], "label": 0, "cut": False},
    {"input_ids": [9, 10], "label": 1, "cut": False},
]


@pytest.fixture
def texts():
    pieces = [datasets.Dataset.from_list(ROWS[:1]), datasets.Dataset.from_list(ROWS[1:])]
    arrays = flat_arrays(datasets.concatenate_datasets(pieces))
    made = {name: np.concatenate([*a.chunks]).astype(a.dtype) if hasattr(a, "chunks") else a for name, a in arrays.items()}
    return Texts(made)


def test_samples_are_those_of_the_rows(texts):
    assert len(texts) == 3
    assert [{name: np.asarray(value).tolist() for name, value in sample.items()} for sample in texts] == ROWS
    assert texts[-1]["input_ids"].dtype == np.int64 and texts[-1]["label"] == 1
    with pytest.raises(IndexError):
        texts[3]
    assert texts.to_dataset().to_list() == ROWS
    assert texts.select([2, 0]).to_dataset().to_list() == [ROWS[2], ROWS[0]]


@pytest.mark.parametrize(
    "numbers, dtype", [([0.5, -1.75], np.float32), ([1, 2**40], np.int64), ([1, -2], np.int32), ([True, False], np.int32)]
)
def test_numbers_of_all_kinds_stay_what_they_are(numbers, dtype):
    array = flat_arrays(datasets.Dataset.from_dict({"numbers": [numbers, [numbers[0]]]}))["numbers"]
    assert array.dtype == dtype
    flat = np.concatenate([np.asarray(chunk, array.dtype) for chunk in array.chunks])
    made = Texts({"numbers": flat, "numbers_offsets": np.array([0, 2, 3])})
    assert made[0]["numbers"].tolist() == numbers and made[1]["numbers"].dtype == (
        np.float32 if dtype is np.float32 else np.int64
    )
    assert ragged(made.__getitems__([1, 0]), "numbers").padded(0)[0].tolist() == [[numbers[0], 0], numbers]


def test_lists_of_texts_are_refused():
    with pytest.raises(DataError, match=r"Column 'words' of tokenized rows has lists of string\."):
        flat_arrays(datasets.Dataset.from_dict({"words": [["a"]]}))


@pytest.mark.parametrize("index", [slice(0, 2), "input_ids", [0, 1], 1.0, np.array([0, 1]), torch.tensor([0, 1])])
def test_what_is_no_whole_number_is_refused_with_the_way_to_do_it(texts, index):
    for refuses in (texts, *([] if isinstance(index, slice) else [texts.__getitems__([0, 1])])):
        with pytest.raises(TypeError, match=r"column\(name\).*select\(indices\).*to_dataset\(\)"):
            refuses[index]


@pytest.mark.parametrize("index", [1, np.int64(1), torch.tensor(1), -2])
def test_whole_numbers_of_any_type_are_an_index(texts, index):
    assert texts[index]["input_ids"].tolist() == [8]


@pytest.mark.parametrize("indices", [[2, 0, 1], np.array([2, 0, 1])])
def test_some_samples_can_be_sliced_like_a_list(texts, indices):
    some = texts.__getitems__(indices)[:2]
    assert [sample["label"] for sample in some] == [1, 2] and some[-1]["input_ids"].tolist() == [5, 6, 7]
    assert values(some, "label").tolist() == [1, 2] and ragged(some[1:], "input_ids").lengths.tolist() == [3]


def test_columns_are_read_from_texts_and_from_data_sets_of_ones_own(texts):
    for dataset in (texts, datasets.Dataset.from_list(ROWS)):
        assert lengths_of(dataset, "input_ids").tolist() == [3, 1, 2] and lengths_of(dataset, "input_ids").dtype == np.int32
        assert column_of(dataset, "cut").tolist() == [True, False, False]


def test_batch_from_flat_arrays_is_that_of_the_samples(texts):
    at_once, one_by_one = texts.__getitems__([2, 0]), [texts[2], texts[0]]
    assert len(at_once) == 2 and at_once[0]["label"] == 1
    for examples in (at_once, one_by_one):
        ids, mask = ragged(examples, "input_ids").padded(-1)
        assert ids.tolist() == [[9, 10, -1], [5, 6, 7]] and mask.tolist() == [[1, 1, 0], [1, 1, 1]]
        assert ids.dtype == mask.dtype == values(examples, "label").dtype == torch.int64
        assert values(examples, "label").tolist() == [1, 2]


def test_rows_lose_their_ends():
    rows = Ragged.of([[1, 2, 3], [4, 5]])
    assert rows.without_last().padded(0)[0].tolist() == [[1, 2], [4, 0]]
    assert rows.without_first().padded(0)[0].tolist() == [[2, 3], [5, 0]]


def test_one_token_changes_the_digest_and_where_the_arrays_lie_does_not(texts):
    copy = texts.select(range(3))
    assert content_digest(copy) == content_digest(texts)
    copy.column("input_ids").flat[4] += 1
    assert content_digest(copy) != content_digest(texts)


@pytest.mark.parametrize("architecture", ["prefix_lm", "encoder_decoder"])
def test_titles_are_padded_as_torch_pads_them(architecture):
    task = TitleGeneration(architecture=architecture)
    vars(task)["text_tokenizer"] = type("Tokenizer", (), {"pad_token_id": 0})
    examples = [{"source": [2, 7, 3], "title": [2, 8, 9, 3], "index": 4}, {"source": [2, 3], "title": [2, 3], "index": 1}]
    batch = {name: value.tolist() for name, value in task.collate(examples).items()}
    is_left = architecture == "prefix_lm"
    assert batch == {
        "source": [[2, 7, 3], [0, 2, 3] if is_left else [2, 3, 0]],
        "source_mask": [[1, 1, 1], [0, 1, 1] if is_left else [1, 1, 0]],
        "title": [[2, 8, 9], [2, 0, 0]],
        "labels": [[8, 9, 3], [3, -100, -100]],
        "index": [4, 1],
    }


def test_data_set_of_the_users_own_keeps_working():
    task = SequenceClassification(model=None)
    vars(task)["text_tokenizer"], vars(task)["kind"] = type("Tokenizer", (), {"pad_token_id": 0}), "single_label_classification"
    vars(task)["_classes"] = Classes(["a", "b", "c"], None, are_labels=True)
    dataset = datasets.Dataset.from_list(ROWS).with_format("numpy")
    assert task.lengths(dataset).tolist() == [3, 1, 2]
    assert task.class_counts(dataset) == {"a": 1, "b": 1, "c": 1}
    batch = task.collate(dataset.__getitems__([0, 1]))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]] and batch["labels"].tolist() == [2, 0]
