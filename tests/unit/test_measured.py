"""The table of measurements in docs/benchmarks.md is what the result files say, and a figure that may be out of date is marked."""

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import measured

    return measured


@pytest.fixture
def scripts(tmp_path):
    """A copy of the scripts that may be changed."""
    return Path(shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__")))


@pytest.fixture
def results(tmp_path, measured, scripts):
    """A folder with a result of the copy of gpu_language_model.py, which imports gpu.py and bert_on_reviews.py."""
    folder = tmp_path / "results"
    folder.mkdir()
    result = {
        "script": "gpu_language_model.py",
        "script_sha256": measured.fingerprint(scripts / "gpu_language_model.py"),
        "smoke": False,
        "date": "2026-11-22T12:00:00+00:00",
        "commit": "0123456789",
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "Z80", "cores": 2, "memory_gib": 24.0, "gpu": None},
        "measured": {"a speed": "3 | 4 tokens/s"},
    }
    (folder / "gpu_language_model.json").write_text(json.dumps(result))
    return folder


def test_page_says_what_the_result_files_say(measured):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    expected = measured.with_section(page, measured.section(BENCHMARKS / "results", BENCHMARKS))
    assert page == expected, "The table of docs/benchmarks.md is not that of benchmarks/results: run `make measured`."


def test_figure_of_an_unchanged_script_has_no_mark(measured, results, scripts):
    assert measured.section(results, scripts).splitlines() == [
        "| what | figure | script | measured |",
        "|---|---|---|---|",
        "| a speed | 3 \\| 4 tokens/s | `gpu_language_model.py` | 2026-11-22, 0123456789 |",
        "",
        "- `gpu_language_model.py`: 2 cores of Z80, 24.0 GiB; torch 2.13.0.",
    ]


@pytest.mark.parametrize("name", ["gpu_language_model.py", "gpu.py", "bert_on_reviews.py"])
def test_figure_is_marked_if_its_script_or_what_it_imports_has_changed(measured, results, scripts, name):
    with (scripts / name).open("a") as file:
        file.write("# changed\n")
    said = measured.section(results, scripts)
    assert "| 3 \\| 4 tokens/s † |" in said and "† The script has changed since." in said


@pytest.mark.parametrize("name", ["throughput.py", "record.py"])
def test_figure_is_not_marked_if_something_else_has_changed(measured, results, scripts, name):
    with (scripts / name).open("a") as file:
        file.write("# changed\n")
    assert "†" not in measured.section(results, scripts)


def test_figure_of_a_script_that_is_gone_is_marked(measured, results, scripts):
    (scripts / "gpu_language_model.py").unlink()
    assert "†" in measured.section(results, scripts)


def test_a_recipe_that_a_script_names_belongs_to_it(measured, scripts):
    before = measured.fingerprint(scripts / "lctt_titles.py")
    with (scripts / "lctt_pretrain.yaml").open("a") as file:
        file.write("# changed\n")
    assert measured.fingerprint(scripts / "lctt_titles.py") != before


def test_figure_taken_over_from_an_older_readme_is_marked(measured, results, scripts):
    taken_over = {
        "script": "kill.py",
        "taken_over": "the README of commit cfcddaf",
        "date": "2026-11-22T01:05:06+00:00",
        "commit": "cfcddaf",
        "measured": {"runs": "100"},
    }
    (results / "kill.json").write_text(json.dumps(taken_over))
    said = measured.section(results, scripts)
    assert "| runs | 100 ‡ | `kill.py` | 2026-11-22, cfcddaf |" in said and "\n‡ Taken over from an earlier README" in said


def test_result_of_a_smoke_run_is_refused(measured, results, scripts):
    path = results / "gpu_language_model.json"
    path.write_text(path.read_text().replace('"smoke": false', '"smoke": true'))
    with pytest.raises(ValueError, match=r"gpu_language_model\.json was written under --smoke"):
        measured.section(results, scripts)


def test_page_without_the_comments_is_refused(measured):
    with pytest.raises(ValueError, match="once each"):
        measured.with_section("# hftune\n", "| what |")
