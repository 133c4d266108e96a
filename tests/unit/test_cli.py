"""The hftune command: what it refuses, and how."""

import subprocess
import sys
from pathlib import Path

import pytest

from hftune import __version__, cli
from tests.support.runs import environment


def refused(capsys, *arguments):
    assert cli.main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.removeprefix("hftune: ").rstrip("\n")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"content": "北京大学的报告。", "title": "报告"}\n' * 3, encoding="utf-8")
    return path


def test_help_is_shown_and_needs_no_torch():
    code = "import sys; from hftune.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"hftune {__version__}\n"


def test_nothing_to_answer(capsys, tmp_path):
    assert refused(capsys, "predict", tmp_path) == "Nothing to answer: give --text, --text-file or --input."


def test_file_that_is_not_there_or_not_utf8(capsys, tmp_path):
    path = tmp_path / "article.txt"
    assert refused(capsys, "predict", tmp_path, "--text-file", path) == f"--text-file {path}: No such file or directory."
    path.write_bytes("文章".encode("gb18030"))
    assert refused(capsys, "predict", tmp_path, "--text-file", path) == (
        f"--text-file {path} is not UTF-8: 'utf-8' codec can't decode byte 0xce in position 0: invalid continuation byte. "
        "Convert it."
    )


def test_folder_that_holds_no_run(capsys, tmp_path):
    assert refused(capsys, "predict", tmp_path / "none", "--text", "x") == (
        f"{tmp_path}/none: there is no such folder. Name the output folder of a run, such as outputs/bigbird."
    )
    assert refused(capsys, "predict", tmp_path, "--text", "x") == (
        f"{tmp_path} holds no recipe.yaml, nor does the folder above. Name the output folder of a run."
    )
    (tmp_path / "recipe.yaml").write_text("base: yelp_demo\n")
    assert refused(capsys, "predict", tmp_path, "--text", "x") == (
        f"{tmp_path} holds no model yet: the first evaluation of its run writes it."
    )


def test_task_that_answers_nothing(capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: {type: tests.support.tasks.Tagging}\n")
    (tmp_path / "model").mkdir()
    assert refused(capsys, "predict", tmp_path, "--text", "x") == (
        "tests.support.tasks.Tagging does not answer inputs. Give it a method answer(model, inputs)."
    )


def test_corpus_that_cannot_be_read(capsys, tmp_path, corpus):
    output = ("--output", tmp_path / "words")
    none = tmp_path / "none.txt"
    assert refused(capsys, "vocab", none, *output) == f"{none}: there is no such file."
    none.with_suffix(".md").write_text("x")
    assert refused(capsys, "vocab", none.with_suffix(".md"), *output) == (
        f"{none.with_suffix('.md')} is of no known type. Known: .txt, .json, .jsonl, .csv, .parquet."
    )
    assert refused(capsys, "vocab", corpus, "--columns", "text", *output) == (
        f"{corpus} has no column 'text', but content, title. Name them: --columns ..."
    )
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    assert refused(capsys, "vocab", blank, *output) == f"{blank}: no text in there."


def test_folder_with_something_else_is_not_written_into(capsys, tmp_path, corpus):
    assert refused(capsys, "vocab", corpus, "--output", tmp_path) == (
        f"{tmp_path} holds something else than a vocabulary. Name another folder, or empty it."
    )


def test_vocabulary_is_written_from_lines_of_text_and_over_an_earlier_one(capsys, tmp_path):
    (tmp_path / "corpus.txt").write_text("北京大学的报告。\n上海的地铁 Linux\n" * 5, encoding="utf-8")
    for size in (60, 50):
        words = Path(tmp_path / "words")
        assert cli.main(["vocab", str(tmp_path / "corpus.txt"), "--size", str(size), "--output", str(words)]) == 0
        listed = (words / "vocab.txt").read_text(encoding="utf-8").splitlines()
        assert len(listed) <= size and "的" in listed


def test_vocabulary_that_loading_would_refuse_is_not_written(capsys, tmp_path):
    (tmp_path / "corpus.txt").write_text("an English text\n" * 5, encoding="utf-8")
    said = refused(capsys, "vocab", tmp_path / "corpus.txt", "--size", "60", "--output", tmp_path / "words")
    assert said.startswith("60 tokens are too few for these texts, or they are not Chinese. The vocabulary of ")
    assert not (tmp_path / "words").exists()
