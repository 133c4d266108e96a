"""README's figure is small, is the same for the same curves, and shows every run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import figure

    return figure


def runs(figure, scale):
    """Curves on 1, 2 and 4 processes, logged ``scale(processes)`` times too large."""
    return {
        count: figure.Curve([1.5 * scale(count), 1.25 * scale(count)], [1.5, 1.25 + count / 1e6], 1.2) for count in (1, 2, 4)
    }


def test_same_curves_give_the_same_small_file_with_a_background_of_its_own(figure, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        figure.draw(runs(figure, lambda count: 1), runs(figure, lambda count: count), tmp_path / name)
    svg = (tmp_path / "one.svg").read_bytes()
    assert svg == (tmp_path / "two.svg").read_bytes()
    assert len(svg) < 100_000 and b"fill: #ffffff" in svg


def test_distance_is_relative_to_the_other_run_and_free_of_scale(figure):
    curves = runs(figure, lambda count: count)
    assert curves[4].distance(curves[1]) == pytest.approx([0, 3e-6 / 1.250001])


def test_figure_in_the_readme_is_small():
    (path,) = re.findall(r"\]\((docs/assets/[\w-]+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert (ROOT / path).stat().st_size < 100_000
