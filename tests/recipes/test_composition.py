"""docs/composition.md says what is so: some of its cells are tried again here, and all of them with COMPOSITION=all."""

import os
import random
from pathlib import Path

import pytest

from tests.support.composition import FEATURES, OF_TASKS, TASKS, Cell, Tried, cells_of_features, cells_of_tasks, page, verdicts

PAGE = (Path(__file__).parents[2] / "docs" / "composition.md").read_text()
PAIRS = [cell for cell in cells_of_features() if len(cell.features) == 2]
OF_TASK = [cell for cell in cells_of_tasks() if cell.features]


def test_every_pair_and_every_task_has_a_cell():
    assert verdicts(PAGE).keys() == {str(cell) for cell in (*PAIRS, *OF_TASK)}


def test_cells_say_what_comes_of_trying(tmp_path):
    tried, known, draws = Tried(tmp_path), verdicts(PAGE), random.Random(len(PAIRS))
    quick = [cell for cell in PAIRS if FEATURES["compile"] not in cell.features]  # which takes as long as all others together
    some = [*draws.sample(quick, 8), *draws.sample(OF_TASK, 3)]
    if os.environ.get("COMPOSITION") == "all":
        some = [*PAIRS, *OF_TASK]
    tried.try_all([part for cell in some for part in (cell, *map(cell.without, cell.features))])
    assert {str(cell): tried.verdict(cell) for cell in some} == {str(cell): known[str(cell)] for cell in some}


BOTH = Cell((FEATURES["DDP"], FEATURES["EMA"]))
FOUND = {
    "DDP": {"losses": [1.0, 0.5, 0.9]},
    "EMA": {"losses": [1.0, 0.5, 0.7]},
    str(BOTH): {"on": ["DDP", "EMA"], "losses": [1.0, 0.5, 0.7], "notices": []},
}
FAULTS = {
    "boom": {str(BOTH): {"crashed": "Traceback: boom"}},
    "EMA is not on, and nothing was said": {str(BOTH): {**FOUND[str(BOTH)], "on": ["DDP"]}},
    "DDP changes losses by 0.17": {"EMA": {"losses": [1.0, 0.6, 0.7]}},
    "EMA changes nothing": {"DDP": {"losses": [1.0, 0.5, 0.7]}},
}


@pytest.mark.parametrize("what", FAULTS)
def test_crashes_silence_and_wrong_losses_are_no_verdict(what, tmp_path):
    assert Tried(tmp_path, FOUND).verdict(BOTH) == "yes"
    with pytest.raises(AssertionError, match=what):
        Tried(tmp_path, {**FOUND, **FAULTS[what]}).verdict(BOTH)


def test_a_page_is_read_as_it_was_written():
    kinds = ["yes", "no: It does not work.", "off: Nothing to do."]
    given = {str(cell): kinds[place % 3] for place, cell in enumerate([*PAIRS, *OF_TASK])}
    assert verdicts(page(lambda cell: given[str(cell)])) == given
    assert len(given) == len(PAIRS) + len(TASKS) * len(OF_TASKS)
