"""The reference says what the code does, and every key is explained."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from hftune.config import reference
from hftune.config.keys import effects
from hftune.config.sections import SECTIONS
from hftune.run import main

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference.markdown(), "run: make docs"


def test_every_row_of_the_page_has_three_cells():
    rows = [line for line in reference.markdown().splitlines() if line.startswith("|")]
    assert len(rows) == sum(map(len, reference.all_keys().values())) + 2 * (1 + len(SECTIONS) + len(reference.task_types()))
    assert all(row.endswith(" |") or set(row) == {"|", "-"} for row in rows)
    assert all(len(row.replace(r"\|", "").strip("|").split("|")) == 3 for row in rows)


@dataclass
class Odd:
    """Below <here>."""

    key: int = 0
    """Over <two>
    lines, 2**32 | `a*b<c`."""


def test_what_markdown_would_read_as_its_own_is_escaped():
    page = reference._page("Odd", "odd", Odd)
    assert "Below &lt;here>." in page
    assert page.splitlines()[-1] == r"| `odd.key` | `0` | Over &lt;two> lines, 2\*\*32 \| `a*b<c`. |"


def test_every_key_has_a_sentence_and_says_what_it_changes():
    for name, definitions in reference.all_keys().items():
        for described in definitions:
            assert described.text.endswith("."), name
            assert name.startswith("task.") or described.rule.changes != effects("unknown"), name


@pytest.mark.parametrize("section", ["task", *SECTIONS])
def test_help_of_a_section_lists_its_keys(section, capsys):
    assert main(["--help", section]) == 0
    said = capsys.readouterr().out
    assert f"  {section}." in said and all(len(line) <= 160 for line in said.splitlines())


def test_help_of_what_is_no_section_says_what_is(capsys):
    assert main(["--help", "trian"]) == 0
    assert capsys.readouterr().out == (
        "trian is not a section. Sections: task, train, eval, checkpoint, parallel, track. Did you mean 'train'?\n"
    )
