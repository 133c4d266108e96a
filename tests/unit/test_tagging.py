"""Token classification: tags keep their meaning in all splits, and every word of a text is tagged."""

import datasets
import pytest
import torch
from datasets import ClassLabel, Features, Value

from hftune import DataError
from hftune.tasks import TokenClassification

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS, TAGS = ["In", "Rome", "Ada", "sits"], ["O", "B-LOC", "B-PER", "O"]


def parquet(path, names):
    """Write sentences whose tags are numbers of ``names``; names if there are none."""
    tag = ClassLabel(names=names) if names else Value("string")
    features = Features({"tokens": datasets.List(Value("string")), "ner_tags": datasets.List(tag)})
    datasets.Dataset.from_list([{"tokens": WORDS, "ner_tags": TAGS}] * 4, features=features).to_parquet(str(path))
    return str(path)


def task_of(tmp_path, train=None, evaluation=None, **fields):
    files = {"train": parquet(tmp_path / "train.parquet", train), "eval": parquet(tmp_path / "eval.parquet", evaluation)}
    given = {"data_files": files, "vocab_size": 200, "max_length": 64, **fields}
    return TokenClassification(model=None, model_config=BERT, **given)


def tags_of(task, split):
    return [task.labels[number] for number in task.datasets()[split][0]["labels"].tolist() if number >= 0]


@pytest.mark.parametrize("train", [["O", "B-PER", "B-LOC"], None])
def test_tags_of_a_split_are_read_by_its_own_names(tmp_path, train):
    task = task_of(tmp_path, train, ["B-PER", "B-LOC", "O"])
    assert tags_of(task, "train") == tags_of(task, "eval") == TAGS


def test_numbers_are_no_places_among_the_tags_that_were_found(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"tokens": ["Rome"], "ner_tags": [1]}\n')
    rows = {"train": parquet(tmp_path / "train.parquet", None), "eval": f"{tmp_path}/eval.jsonl"}
    with pytest.raises(DataError, match=r"Row 0 of the eval split has the label 1; there are 3 labels \(O, B-LOC, B-PER\)\."):
        task_of(tmp_path, data_files=rows).datasets()


def test_tags_of_a_csv_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "rows.csv").write_text("tokens,ner_tags\nIn Rome,O B-LOC\n")
    files = dict.fromkeys(("train", "eval"), f"{tmp_path}/rows.csv")
    with pytest.raises(DataError, match=r"Column 'tokens' of the train split holds (large_)?string, not lists of words\."):
        task_of(tmp_path, data_files=files, words_column="tokens", tags_column="ner_tags").datasets()


def tagger(task):
    """A model that tags each token by its number: 0, 1, 2, 0, 1 and so on."""
    torch.manual_seed(3)
    model = task.build_model().eval()
    words, classes = model.bert.embeddings.word_embeddings.weight, model.classifier.weight
    with torch.no_grad():
        words.copy_(50 * torch.eye(3, words.shape[1]).repeat(len(words) // 3 + 1, 1)[: len(words)])
        classes.copy_(50 * torch.eye(*classes.shape))
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight.zero_()
    return model


@torch.no_grad()
def test_padding_does_not_move_the_tags(tmp_path):
    task = task_of(tmp_path, label_names=["N", "V", "X"], data_files=words_of(tmp_path))
    model, short, long = tagger(task), "a b c", "a b c d a b c d a b c d"
    alone = task.predict(model, [short])
    assert len(set(alone[0]["tags"])) == 3
    task.text_tokenizer.padding_side = "left"
    assert task.predict(model, [short, long])[:1] == alone


@torch.no_grad()
def test_words_beyond_the_maximum_length_are_tagged_too(tmp_path):
    files = words_of(tmp_path)
    task, whole = (task_of(tmp_path, label_names=["N", "V", "X"], data_files=files, max_length=n) for n in (10, 64))
    model, text = tagger(whole), ["abc", "b", "dab", "c", "a"] * 8
    assert len(whole.text_tokenizer(text, is_split_into_words=True)["input_ids"]) > 64
    (found,) = task.predict(model, [text])
    (each,) = zip(*(task.predict(model, [[word]]) for word in text), strict=True)
    assert found == {"words": text, "tags": [row["tags"][0] for row in each]}


def words_of(folder):
    rows = [{"tokens": ["a", "b", "c", "d"], "tags": ["N", "V", "X", "N"]}] * 4
    datasets.Dataset.from_list(rows).to_json(str(folder / "words.jsonl"))
    return dict.fromkeys(("train", "eval"), str(folder / "words.jsonl"))


def test_sentences_are_tokenized_once_to_be_shown(tmp_path, monkeypatch):
    task = task_of(tmp_path)
    task.datasets()
    rows = [{"label": [0], "prediction": [0]}] * 4
    shown = task.describe([{**row, "label": row["label"] * 4, "prediction": row["prediction"] * 4} for row in rows])
    monkeypatch.setattr("hftune.data.tags.word_ids", None)
    assert task.describe([{**row, "label": row["label"] * 4, "prediction": row["prediction"] * 4} for row in rows]) == shown


def test_a_run_without_evaluation_has_examples(tmp_path):
    task = task_of(tmp_path)
    task.data_files = {"train": task.data_files["train"]}
    task.evaluates = False
    assert task.example_inputs() == ["In Rome Ada sits"] * 2
