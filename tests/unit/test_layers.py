"""What may import what: the core knows no wing, files form no circles, and no task knows a rank."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hftune"
FLOORS = """
secrecy
errors
atomic  hooks
task  batch_plan
config
data
metrics
models  distributed
optim
tasks  strategies
build  checkpoints  evaluation
inference  callbacks
tracking
settle
replay  reevaluation
reporting
milestones  planning
loop  finish  opening
training
run
launchers
doctor  elastic
commands  spark
cli
"""
"""The files at the root of hftune and its packages: each imports only what stands on a line above its own."""
FLOOR_OF = {name: floor for floor, line in enumerate(FLOORS.split("\n")) for name in line.split()}
WITHOUT_TRAINING = {"planning", "commands", "doctor", "replay"}
"""They look at a run, and must not be able to change one."""
WINGS = {"elastic", "replay", "reporting", "planning", "launchers", "commands"}
"""They start runs, look at them, or let machines come and go. What a training needs is the core, which imports none of them."""
DOORS = {"__init__", "run", "cli", "doctor", "spark"}
"""What users call; it leads into core and wings alike."""
LAZY = {"", "config"}
"""Packages whose ``__init__`` imports a name only when it is asked for, and so is part of no circle."""
KNOW_NO_RANK = {"task", "augmentation", "tasks", "models", "data", "metrics", "batch_plan", "optim"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module == "hftune":  # its public names would lead anywhere
                assert [alias.name for alias in node.names] in (["__version__"], ["tasks"], ["spark"]), path
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms():
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room != "__init__":
            yield room, path


def test_imports_lead_downwards():
    for room, path in rooms():
        for name in imports(path):
            if name.startswith("hftune.") and (other := name.split(".")[1]) != room:
                assert FLOOR_OF[other] < FLOOR_OF[room], f"{path}: {room} may not import {other}"
                assert not (other == "training" and room in WITHOUT_TRAINING), f"{path} must not be able to train"


def test_every_file_and_package_has_its_floor_and_the_root_is_short():
    names = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names - {"__init__"} == FLOOR_OF.keys()
    assert len(list(ROOT.glob("*.py"))) <= 22


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_pages_print_the_floors(page):
    assert f"{FLOORS}```" in (ROOT.parent / page).read_text()


def test_the_core_imports_no_wing():
    guilty = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for room, path in rooms()
        if room not in WINGS | DOORS
        and any(name.startswith("hftune.") and name.split(".")[1] in WINGS for name in imports(path))
    }
    assert not guilty


@cache
def module_imports():
    """Return which of the package's modules each one imports, wherever in it, but not for type checkers alone."""
    paths = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
    paths = {name.removesuffix("__init__").removesuffix("."): path for name, path in paths.items()}

    def found(path):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hftune":
                module = node.module.removeprefix("hftune").removeprefix(".")
                for alias in node.names:
                    inner = f"{module}.{alias.name}".removeprefix(".")
                    yield inner if inner in paths else module
            elif isinstance(node, ast.Import):
                yield from (alias.name.removeprefix("hftune.") for alias in node.names if alias.name.startswith("hftune."))

    return {name: set() if name in LAZY else {other for other in found(path) if other != name} for name, path in paths.items()}


def test_files_form_no_circles():
    """A file in a circle cannot be read, moved or tested without the others. Put what both need into a third file."""
    try:
        TopologicalSorter(module_imports()).prepare()
    except CycleError as error:
        pytest.fail(f"A circle of imports: {' <- '.join(error.args[1])}")


def test_no_task_and_no_plan_knows_a_rank():
    for room, path in rooms():
        if room in KNOW_NO_RANK:
            ranked = [name for name in imports(path) if name.startswith(("accelerate", "torch.distributed"))]
            assert not ranked, f"{path} must not know about ranks: {ranked}"
            assert "RANK" not in path.read_text(), f"{path} must not read a rank from the environment"
