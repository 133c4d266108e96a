"""The plan of the house, as a test: a room imports only rooms below it, and no task knows a rank."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hftune"
FLOORS = """
secrecy
errors  atomic
task  batch_plan
config
data  metrics
models  distributed
optim
tasks  strategies
build  checkpoints  evaluation
inference
tracking
replay
reporting
loop  planning
training
run
launchers  doctor
commands  spark
cli
"""
"""The files at the root of hftune and its packages: each imports only what stands on a line above its own."""
FLOOR_OF = {name: floor for floor, line in enumerate(FLOORS.split("\n")) for name in line.split()}
WITHOUT_TRAINING = {"planning", "commands", "doctor", "replay"}
"""They look at a run, and must not be able to change one."""
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
    assert len(list(ROOT.glob("*.py"))) <= 15


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_pages_print_the_floors(page):
    assert f"{FLOORS}```" in (ROOT.parent / page).read_text()


def test_no_task_and_no_plan_knows_a_rank():
    for room, path in rooms():
        if room in KNOW_NO_RANK:
            ranked = [name for name in imports(path) if name.startswith(("accelerate", "torch.distributed"))]
            assert not ranked, f"{path} must not know about ranks: {ranked}"
            assert "RANK" not in path.read_text(), f"{path} must not read a rank from the environment"
