"""Words and tags: what is read, which tokens count, what entities are, and what is refused."""

import datasets
import pytest
from transformers import BertTokenizer

from hftune import DataError
from hftune.data.tags import bracketed, checked_words, entities_of, first_tokens, read_tags, spans_of, tag_names, word_ids
from hftune.metrics.entities import tag_metrics

NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "new", "del", "##hi", "is", "big"]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


def test_the_first_token_of_a_word_has_its_tag():
    ids, words, cut = word_ids([["new", "delhi", "is"], ["delhi"]], tokenizer(), 512)
    assert words[0] == [None, 0, 1, 1, 2, None] and cut == [False, False]
    assert list(first_tokens(words[0])) == [None, 0, 1, None, 2, None]
    assert len(ids[0]) == 6


@pytest.mark.parametrize(("max_length", "cut"), [(6, False), (5, True), (3, True)])
def test_a_text_is_cut_only_if_a_token_is_lost(max_length, cut):
    ids, words, found = word_ids([["new", "delhi", "is"]], tokenizer(), max_length)
    assert found == [cut] and len(ids[0]) == len(words[0]) == max_length


def test_entities_end_where_their_type_does():
    assert spans_of(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-PER"]) == [
        ("PER", 0, 2),
        ("LOC", 3, 4),
        ("LOC", 4, 5),
        ("PER", 5, 6),
    ]
    assert spans_of(["B-LOC", "E-LOC", "S-LOC", "S-LOC"]) == [("LOC", 0, 2), ("LOC", 2, 3), ("LOC", 3, 4)]


def test_entities_have_their_places_in_the_text():
    text = "In New-Delhi, today"
    words = checked_words(text, 0)
    assert [word.text for word in words] == ["In", "New", "-", "Delhi", ",", "today"]
    (entity,) = entities_of(words, ["O", "B-LOC", "I-LOC", "I-LOC", "O", "O"], [1.0, 0.5, 0.9, 1.0, 1.0, 1.0])
    assert entity == {"type": "LOC", "text": "New-Delhi", "start": 3, "end": 12, "probability": 0.8}
    assert text[3:12] == "New-Delhi"


def test_tags_are_shown_in_brackets_or_behind_words():
    assert bracketed(["Ada", "in", "New", "Delhi"], ["B-PER", "O", "B-LOC", "I-LOC"]) == "[Ada PER] in [New Delhi LOC]"
    assert bracketed(["Ada", "runs"], ["NOUN", "VERB"]) == "Ada/NOUN runs/VERB"


def test_an_entity_counts_only_as_a_whole_and_words_one_by_one():
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "O"]]
    said = [["B-PER", "O", "O", "B-LOC"], ["O", "B-LOC"]]
    found = tag_metrics(true, said, NAMES, of_entities=True)
    assert (found["precision"], found["recall"]) == (pytest.approx(1 / 3), pytest.approx(1 / 2))
    assert found["f1"] == pytest.approx(0.4) and found["accuracy"] == pytest.approx(4 / 6)
    assert found["per_class"]["LOC"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1}
    assert tag_metrics([["O"]], [["O"]], NAMES, of_entities=True)["f1"] == 0.0  # nothing to find


def test_tags_of_words_are_scored_one_by_one():
    found = tag_metrics([["NOUN", "VERB", "NOUN"]], [["NOUN", "NOUN", "NOUN"]], ["NOUN", "VERB"], of_entities=False)
    assert found["f1"] == pytest.approx((0.8 + 0) / 2) and found["accuracy"] == pytest.approx(2 / 3)
    assert found["per_class"]["VERB"]["support"] == 1
    found = tag_metrics([["accuracy", "service"]], [["accuracy", "accuracy"]], ["accuracy", "service"], of_entities=False)
    assert found["per_class"]["accuracy"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1}


def test_tags_are_listed_by_type_and_numbers_need_names():
    assert tag_names([["I-PER", "O", "B-PER"], ["B-LOC"]], "ner_tags") == ["O", "B-LOC", "B-PER", "I-PER"]
    with pytest.raises(
        DataError, match=r"Column 'ner_tags' holds numbers without names, from 0 to 4\. Name them in task.label"
    ):
        tag_names([[0, 4]], "ner_tags")


@pytest.mark.parametrize(
    ("tokens", "tags", "message"),
    [
        ([["a"], ["a", "b"]], [["O"], ["O"]], "Row 1 of the train split has 2 words and 1 tags. Give each word one tag."),
        ([["a"], []], [["O"], []], "Row 1 of the train split has no words in column 'tokens'."),
        ([["a"], ["b", " "]], [["O"], ["O", "O"]], "Row 1 of the train split has an empty word in column 'tokens'."),
        ([["a"], ["b"]], [["O"], [None]], "Row 1 of the train split has a word without a tag in column 'tags'."),
        (["a b"], [["O", "O"]], "Column 'tokens' of the train split holds string, not lists of words."),
    ],
)
def test_bad_rows_are_named(tokens, tags, message):
    rows = datasets.Dataset.from_dict({"tokens": tokens, "tags": tags})
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        read_tags(rows, "tokens", "tags", "train", int)


@pytest.mark.parametrize(
    ("value", "message"), [(3, "Input 2 is neither"), ("  ", "Input 2 is an empty"), ([], "Input 2 is an empty")]
)
def test_bad_inputs_are_named(value, message):
    with pytest.raises(DataError, match=message):
        checked_words(value, 2)
