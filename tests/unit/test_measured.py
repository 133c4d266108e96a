"""The table of docs/benchmarks.md is what the result files say, a figure that may be out of date is marked; and README's plot."""

import json
import re
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
    """A folder with a result of the copy of gpu.py, which imports gpu_speed.py, and that bert_on_reviews.py."""
    folder = tmp_path / "results"
    folder.mkdir()
    result = {
        "script": "gpu.py",
        "script_sha256": measured.fingerprint(scripts / "gpu.py"),
        "smoke": False,
        "date": "2026-11-22T12:00:00+00:00",
        "commit": "0123456789",
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "Z80", "cores": 2, "memory_gib": 24.0, "gpu": None},
        "measured": {"a speed": "3 | 4 tokens/s"},
    }
    (folder / "gpu.json").write_text(json.dumps(result))
    return folder


def test_page_says_what_the_result_files_say(measured):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    expected = measured.with_section(page, measured.section(BENCHMARKS / "results", BENCHMARKS))
    assert page == expected, "The table of docs/benchmarks.md is not that of benchmarks/results: run `make measured`."


@pytest.mark.parametrize("changed", ["gpu.py", "gpu_speed.py", "bert_on_reviews.py", "throughput.py", "record.py", None])
def test_figure_is_marked_if_its_script_or_what_it_imports_has_changed(measured, results, scripts, changed):
    assert "| a speed | 3 \\| 4 tokens/s | `gpu.py` | 2026-11-22, 0123456789 |" in measured.section(results, scripts)
    if changed is None:
        (scripts / "gpu.py").unlink()
    else:
        with (scripts / changed).open("a") as file:
            file.write("# changed\n")
    assert ("† The script has changed since." in measured.section(results, scripts)) == (
        changed not in ("throughput.py", "record.py")
    )


def test_a_recipe_that_a_script_names_belongs_to_it(measured, scripts):
    before = measured.fingerprint(scripts / "lctt_titles.py")
    with (scripts / "lctt_pretrain.yaml").open("a") as file:
        file.write("# changed\n")
    assert measured.fingerprint(scripts / "lctt_titles.py") != before


def test_figure_taken_over_from_an_older_readme_is_marked(measured, results, scripts):
    kept = {"date": "2026-11-22T01:05:06+00:00", "commit": "cfcddaf", "measured": {"runs": "100"}}
    (results / "kill.json").write_text(json.dumps({"script": "kill.py", "taken_over": "the README of commit cfcddaf", **kept}))
    said = measured.section(results, scripts)
    assert "| runs | 100 ‡ | `kill.py` | 2026-11-22, cfcddaf |" in said and "\n‡ Taken over from an earlier README" in said


def test_result_of_a_smoke_run_and_page_without_a_place_for_the_table_are_refused(measured, results, scripts):
    path = results / "gpu.json"
    path.write_text(path.read_text().replace('"smoke": false', '"smoke": true'))
    with pytest.raises(ValueError, match=r"gpu\.json was written under --smoke"):
        measured.section(results, scripts)
    with pytest.raises(ValueError, match="once each"):
        measured.with_section("# hftune\n", "| what |")


def test_readmes_figure_is_the_same_for_the_same_curves_small_and_free_of_scale(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHMARKS)
    import figure

    def curves(scale):
        losses = {count: [1.5, 1.25 + count / 1e6] for count in (1, 2, 4)}
        return {count: figure.Curve([scale(count) * loss for loss in (1.5, 1.25)], own, 1.2) for count, own in losses.items()}

    scaled = curves(lambda count: count)
    assert scaled[4].distance(scaled[1]) == pytest.approx([0, 3e-6 / 1.250001])
    for name in ("one.svg", "two.svg"):
        figure.draw(curves(lambda count: 1), scaled, tmp_path / name)
    svg = (tmp_path / "one.svg").read_bytes()
    assert svg == (tmp_path / "two.svg").read_bytes() and b"fill: #ffffff" in svg
    (shipped,) = re.findall(r"\]\((docs/assets/[\w-]+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert max(len(svg), (ROOT / shipped).stat().st_size) < 100_000
