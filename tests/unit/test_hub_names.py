"""Names on the Hub, files of one's own instead, and commits: what can be told without a network."""

import json

import pytest

from hftune import ConfigError, DataError, Recipe
from hftune.checkpoints.output_dir import check_commits
from hftune.data.files import file_format
from hftune.data.rows import load_split
from hftune.data.sources import Source
from hftune.tasks import SequenceClassification, TitleGeneration


def problems(*words):
    with pytest.raises(ConfigError) as refused:
        Recipe.load("yelp", *words).validate()
    return refused.value.problems


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("task.model=bert-base-cased", "names on the Hub are owner/name, such as google-bert/bert-base-cased."),
        ("task.dataset=jsonl", "names on the Hub are owner/name, such as Yelp/yelp_review_full. Did you mean 'json'?"),
        ("task.dataset=./nowhere", ": there is no such folder."),
    ],
)
def test_a_name_without_its_owner_is_refused(word, hint):
    (said,) = problems(word)
    assert said.startswith(word) and said.endswith(hint)


def test_a_folder_may_be_called_like_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").mkdir()
    Recipe.load("yelp", "task.dataset=imdb").validate()


def test_a_tokenizer_has_an_owner_too():
    with pytest.raises(ConfigError, match=r"task.tokenizer=gpt2 is not .*names on the Hub are owner/name"):
        Recipe.load("wikitext2", "task.tokenizer=gpt2").validate()


def test_the_default_data_of_bigbird_are_the_hubs_and_files_of_ones_own_need_no_other_words(tmp_path):
    task = Recipe.load("bigbird").task
    given = (task.dataset, task.data_dir, task.dataset_revision)
    assert given == ("csebuetnlp/xlsum", "chinese_simplified", "refs/convert/parquet")
    files = [f"task.data_files.{part}={tmp_path}/{part}.jsonl" for part in ("train", "eval")]
    for part in ("train", "eval"):
        (tmp_path / f"{part}.jsonl").write_text(json.dumps({"content": "甲" * 9, "title": "乙"}) + "\n")
    recipe = Recipe.load("bigbird", *files)
    recipe.validate()
    assert recipe.task.source.commit is None
    assert recipe.task.rows["eval"][0] == {"content": "甲" * 9, "title": "乙"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, '{"x": "1\\t2"}\n') for name in ("a.jsonl", "a.JSON")),
        *(("a.csv", "x\n1\t2\n"), ("a.tsv", "x\ty\n1\t2\n"), ("a.dev.txt", "1\t2\n")),
    ],
)
def test_the_format_of_files_is_told_by_their_names(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    rows = load_split(Source("owner/ignored", {"train": str(tmp_path / "a.*")}), "train", "ignored")
    assert rows[0] in ({"x": "1\t2"}, {"x": 1, "y": 2}, {"text": "1\t2"})
    assert rows[0] == {"x": 1, "y": 2} or name != "a.tsv"


def test_what_names_do_not_tell_is_asked_for(tmp_path):
    for name in ("a.jsonl", "b.csv", "c.log", "d.jsonl.gz"):
        (tmp_path / name).write_text("x")
    assert file_format(f"{tmp_path}/d.jsonl.gz") == "json" and file_format(f"{tmp_path}/*") is None

    def said(path):
        return problems(f"task.data_files={{train: {path}, eval: {tmp_path}/a.jsonl}}")

    (tmp_path / "parts").mkdir()
    for path, problem in {
        f"{tmp_path}/c.log": f"={tmp_path}/c.log: its name does not end in one of .json, .jsonl, .csv, .tsv, .parquet, .arrow, .txt, .xlsx, ",
        f"{tmp_path}/parts": f"={tmp_path}/parts is a folder. Name its files, such as {tmp_path}/parts/*.parquet.",
        f"[{tmp_path}/a.jsonl, {tmp_path}/b.csv]": " has files of several formats: csv, json. Use one format.",
    }.items():
        (found,) = said(path)
        assert found.startswith(f"task.data_files.train{problem}")
    words = f"task.data_files={{train: {tmp_path}/c.log, eval: {tmp_path}/a.jsonl}}"
    Recipe.load("yelp", "task.dataset=json", words).validate()


def test_titles_find_the_column_of_their_texts_or_list_those_that_there_are(write_rows):
    def task(row):
        path = str(write_rows("a.jsonl", [row]))
        return TitleGeneration(data_files={"train": path, "eval": path})

    found = task({"id": "1", "text": "x", "title": "y"})
    assert found.find_columns(found.unchecked_rows["train"])["source_column"] == "text"
    for row, columns in (({"id": "1", "body": "x"}, "id, body"), ({"text": "x", "content": "z"}, "text, content")):
        with pytest.raises(DataError, match=rf"task.source_column is not set, and several columns would do: {columns}\."):
            task({**row, "title": "y"}).rows  # noqa: B018 - it is the looking that is tested


def test_a_resume_compares_only_commits_that_the_checkpoint_knows():
    check_commits("out", {}, {"task.model": "b"})  # it was written by an earlier version
    check_commits("out", {"task.model": "a"}, {})  # the data are files now, which their digests tell apart
    with pytest.raises(ConfigError, match=r"commit a of task.model, and commit b was loaded.*task.model_revision=a resumes"):
        check_commits("out", {"task.model": "a"}, {"task.model": "b"})


def test_folders_files_and_functions_have_no_commit(tmp_path):
    assert SequenceClassification(model=str(tmp_path), dataset="hftune.data.demo:reviews").commits() == {}
    assert SequenceClassification(model=None, dataset="json", data_files={"train": "a", "eval": "b"}).commits() == {}
