"""tests/PROMISES.md names tests and pages that exist, and the promises that no test holds become fewer."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WITHOUT_A_TEST = 15
LINES = (ROOT / "tests" / "PROMISES.md").read_text(encoding="utf-8").splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
ROWS = [row for row in CELLS if row[0] != "promise" and set("".join(row)) != {"-"}]


def names_in(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    inside = [*tree.body, *(node for part in tree.body if isinstance(part, ast.ClassDef) for node in part.body)]
    return {f"{file}::{node.name}" for node in inside if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_is_a_promise_with_its_pages_and_up_to_three_tests():
    name = r"tests/\w+/test_\w+\.py::test_\w+"
    wrong = [row[0] for row in ROWS if len(row) != 3 or not re.fullmatch(rf"none|{name}(, {name}){{0,2}}", row[2])]
    assert not wrong, f"write a promise, its pages, and one to three tests or none: {wrong}"
    assert len(ROWS) > 100, "the tables are not read as they should be"


def test_tests_that_are_named_exist():
    named = {test for row in ROWS if row[2] != "none" for test in row[2].split(", ")}
    files = {file for file in (test.partition("::")[0] for test in named) if (ROOT / file).is_file()}
    gone = sorted(named - {test for file in files for test in names_in(file)})
    assert not gone, f"no such test any more; name the one that holds the promise now: {gone}"


def test_pages_that_are_named_exist():
    named = {page for row in ROWS for page in row[1].split(", ")}
    missing = sorted(page for page in named if not re.fullmatch(r"README\.md|docs/.+\.md", page) or not (ROOT / page).is_file())
    assert not missing, f"no such page: {missing}"


def test_no_promise_is_made_twice():
    twice = [promise for promise, count in Counter(row[0].lower() for row in ROWS).items() if count > 1]
    assert not twice, f"two rows are the same promise: {twice}"


def test_no_more_promises_are_without_a_test():
    without = [row[0] for row in ROWS if row[2] == "none"]
    assert len(without) <= MAX_WITHOUT_A_TEST, f"write a test for each new promise; these have none: {without}"
