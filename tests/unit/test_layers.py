"""The plan of the house, as a test: a room imports only rooms below it, and no task knows a rank."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hftune"
MAY_IMPORT = {
    "errors": set(),
    "metrics": set(),
    "task": set(),
    "batch_plan": {"errors"},
    "config": {"errors", "task"},
    "data": {"errors", "task", "config"},
    "distributed": {"errors", "task", "config"},
    "optim": {"config"},
    "checkpoints": {"errors", "task", "config", "distributed"},
    "models": {"errors", "config", "data"},
    "strategies": {"errors", "task", "batch_plan", "config", "distributed"},
    "evaluation": {"errors", "batch_plan", "distributed", "strategies"},
    "inference": {"errors", "task", "config", "checkpoints"},
    "tasks": {"errors", "metrics", "task", "data", "models"},
    "tracking": {"errors", "task", "batch_plan", "config", "checkpoints", "strategies", "inference"},
    "loop": {
        "errors",
        "batch_plan",
        "config",
        "data",
        "distributed",
        "optim",
        "checkpoints",
        "strategies",
        "evaluation",
        "tracking",
    },
    "training": {
        "errors",
        "task",
        "batch_plan",
        "config",
        "data",
        "distributed",
        "optim",
        "checkpoints",
        "strategies",
        "evaluation",
        "tracking",
        "loop",
    },
    "commands": {
        "errors",
        "config",
        "distributed",
        "optim",
        "checkpoints",
        "strategies",
        "evaluation",
        "inference",
        "training",
    },
    "launchers": {"errors", "config", "distributed", "training"},
    "planning": {
        "errors",
        "batch_plan",
        "config",
        "data",
        "distributed",
        "optim",
        "strategies",
        "tracking",
        "loop",
        "training",
    },
    "run": {"errors", "config", "distributed", "tracking", "training"},
    "doctor": {"errors", "config", "distributed", "strategies", "tracking", "training", "run"},
    "spark": {"errors", "config", "distributed", "tracking", "training", "launchers", "run"},
    "cli": {
        "errors",
        "config",
        "data",
        "checkpoints",
        "inference",
        "tracking",
        "commands",
        "launchers",
        "planning",
        "run",
        "doctor",
    },
}
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


def test_every_room_imports_only_rooms_below_it():
    for room, path in rooms():
        for name in imports(path):
            if name.startswith("hftune.") and (other := name.split(".")[1]) != room:
                assert other in MAY_IMPORT[room], f"{path}: {room} may not import {other}"


def test_the_plan_of_the_house_has_no_circle():
    remaining = dict(MAY_IMPORT)
    while remaining:
        ground = [room for room, below in remaining.items() if not below & remaining.keys()]
        assert ground, f"these import each other: {sorted(remaining)}"
        for room in ground:
            del remaining[room]


def test_no_task_and_no_plan_knows_a_rank():
    for room, path in rooms():
        if room in KNOW_NO_RANK:
            ranked = [name for name in imports(path) if name.startswith(("accelerate", "torch.distributed"))]
            assert not ranked, f"{path} must not know about ranks: {ranked}"
            assert "RANK" not in path.read_text(), f"{path} must not read a rank from the environment"
