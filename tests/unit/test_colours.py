"""Colours of the report and of the documentation's pictures can be read, light and dark; pictures are those of their script."""

import re
import runpy

import pytest

from tests.support.pages import ROOT

PICTURES = runpy.run_path(str(ROOT / "docs/assets/draw.py"))
REPORT = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", (ROOT / "hftune/reporting/assets/report.css").read_text()
    )
}


def contrast(first, second):
    """WCAG's ratio of two colours such as #1a1f25, from 1 to 21."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_report_can_be_read(theme):
    colours = {name: pair[theme] for name, pair in REPORT.items()}
    for words in ("text", "muted", "accent", "good"):
        for ground in ("page", "card", "raised"):
            assert contrast(colours[words], colours[ground]) >= 4.5, (words, ground)
    assert contrast(colours["text"], colours["warn"]) >= 4.5
    for number in range(7):  # a line needs 3
        assert contrast(colours[f"curve-{number}"], colours["card"]) >= 3, number


@pytest.mark.parametrize("palette", ["LIGHT", "DARK"])
def test_pictures_can_be_read(palette):
    colours = PICTURES[palette]
    for ground in ("page", "empty", "a", "b", "c", "d"):
        assert contrast(colours["text"], colours[ground]) >= 4.5, ground
    assert contrast(colours["muted"], colours["page"]) >= 4.5


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_picture_is_that_of_its_script(name):
    drawn = PICTURES["PICTURES"][name]()
    assert (ROOT / f"docs/assets/{name}.svg").read_text() == drawn, "run python docs/assets/draw.py"
