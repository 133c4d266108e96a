"""Samples are taken from the cache only for the rows, split, columns and model that they were made for."""

import importlib
import json
import sys

import pytest

from hftune.tasks import Embeddings, Seq2Seq, SequenceClassification, TokenClassification

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DISTILBERT = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def task_of(kind, files, config=BERT, **fields):
    return kind(model=None, model_config=config, data_files=files, vocab_size=300, **fields)


@pytest.mark.parametrize("fold", [0, 1])  # in this order: the rows that fold 0 evaluates are trained on in fold 1
def test_references_of_a_fold_are_its_own_rows(tmp_path_factory, fold):
    path = tmp_path_factory.getbasetemp() / "pairs.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"source": f"say {i}", "target": f"word {i}"}) + "\n" for i in range(20)))
    task = task_of(Seq2Seq, {"train": str(path)}, T5, eval_fold=[fold, 2])
    samples = task.datasets()["eval"]
    batch = task.collate([samples[index] for index in range(3)])
    assert (batch["split"].tolist(), task.rows["eval"][batch["index"].tolist()]) == ([1, 1, 1], task.rows["eval"][:3])


def test_rows_have_scores_in_the_fold_that_evaluates_them(write_rows):
    rows = [{"anchor": f"a text {i}", "positive": f"the text {i}", "score": i / 10} for i in range(10)]
    files = {"train": str(write_rows("rows.jsonl", rows))}
    tasks = [task_of(Embeddings, files, score_column="score", max_length=32, eval_fold=[fold, 2]) for fold in (0, 1)]
    tasks[1].text_tokenizer = tasks[0].text_tokenizer  # as that of a pretrained model is
    for task in tasks:
        samples = task.datasets()
        assert ("score" in samples["train"][0], "score" in samples["eval"][0]) == (False, True)


def test_pairs_have_token_types_if_the_model_has_them(write_rows):
    path = str(
        write_rows("rows.jsonl", [{"a": f"one {i}", "b": f"other {i}", "label": ["no", "yes"][i % 2]} for i in range(10)])
    )
    found = []
    for config in (DISTILBERT, BERT):
        task = task_of(SequenceClassification, {"train": path, "eval": path}, config, text_columns=["a", "b"], max_length=32)
        found.append("token_type_ids" in task.datasets()["train"][0])
    assert found == [False, True]


def test_tokenizer_is_trained_on_the_words_of_the_column_that_is_read(write_rows):
    row = {"tokens": ["running", "dogs"], "lemmas": ["zzz", "qqq"], "ner_tags": ["O", "B-X"]}
    path = str(write_rows("rows.jsonl", [row] * 10))
    tasks = [task_of(TokenClassification, {"train": path, "eval": path}, words_column=name) for name in ("tokens", "lemmas")]
    letters = [set("".join(task.text_tokenizer.get_vocab())) for task in tasks]
    assert "g" in letters[0] and "g" not in letters[1] and "q" in letters[1]


OWN_TASK = """
from dataclasses import dataclass
from hftune.tasks import SequenceClassification

@dataclass
class Mine(SequenceClassification):
    def encode(self, rows):
        from cleaned_words.words import clean
        return super().encode({**rows, "text": [clean(text) for text in rows["text"]]})
"""


def test_rows_are_tokenized_again_if_a_module_that_the_task_imports_changes(tmp_path, monkeypatch, write_rows):
    rows = write_rows("rows.jsonl", [{"text": f"good {i}", "label": i % 2} for i in range(6)])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "task_that_cleans.py").write_text(OWN_TASK)
    (tmp_path / "cleaned_words").mkdir()
    (tmp_path / "cleaned_words" / "__init__.py").touch()
    lengths = []
    for body in ("return text", "return text + ' and more of it'"):
        (tmp_path / "cleaned_words" / "words.py").write_text(f"def clean(text):\n    {body}\n")
        for name in ("task_that_cleans", "cleaned_words.words"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        task = task_of(importlib.import_module("task_that_cleans").Mine, {"train": str(rows)}, eval_share=0.5)
        lengths.append(len(task.datasets()["train"][0]["input_ids"]))
    assert lengths[0] < lengths[1]
