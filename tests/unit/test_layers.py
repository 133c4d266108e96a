"""The plan of the house, as a test: a room imports only rooms below it, and no task knows a rank."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hftune"
MAY_IMPORT = {
    "errors": set(),
    "messages": set(),
    "importing": {"errors"},
    "resources": {"errors", "messages"},
    "hub": {"errors", "messages"},
    "disk": {"errors"},
    "jsonl": {"disk"},
    "pictures": {"disk"},
    "signals": set(),
    "batch_plan": {"errors"},
    "task": set(),
    "augmentation": {"task"},
    "data": {"hub", "errors", "messages", "importing"},
    "models": {"hub", "errors", "messages", "importing"},
    "metrics": set(),
    "tasks": {"task", "data", "models", "metrics", "hub", "errors", "messages"},
    "sections": {"errors", "messages"},
    "config": {"sections", "task", "resources", "importing", "errors", "messages"},
    "progress": set(),
    "pulse": {"progress"},
    "network": {"messages", "errors"},
    "machines": {"network", "errors"},
    "rendezvous": {"machines"},
    "agreement": {"config", "task", "messages", "errors"},
    "launched": {"errors"},
    "heartbeat": {"launched", "rendezvous", "signals", "progress", "errors"},
    "strategies": {"batch_plan", "task", "progress", "sections", "errors"},
    "optim": {"sections"},
    "sum_check": {"task", "strategies", "errors"},
    "checkpoint": {"disk"},
    "export": {"task", "disk"},
    "ledger": {"batch_plan", "strategies", "jsonl", "errors"},
    "resume": {"checkpoint", "config", "disk", "launched", "messages", "errors"},
    "console": set(),
    "mlflow_run": {"config", "console", "mlflow_model", "errors"},
    "mlflow_model": {"inference", "config", "task"},
    "tracking": {"mlflow_run", "config", "console", "jsonl", "errors"},
    "evaluation": {"strategies", "batch_plan", "task", "pulse", "errors"},
    "loop": {
        *("strategies", "evaluation", "checkpoint", "export", "ledger", "optim", "tracking", "console", "signals", "disk"),
        *("batch_plan", "config", "sections", "errors", "augmentation", "pictures", "jsonl", "messages", "progress"),
    },
    "joining": {"strategies", "tracking", "launched", "network", "rendezvous", "config", "sections", "messages", "errors"},
    "training": {
        *("loop", "evaluation", "strategies", "checkpoint", "export", "ledger", "resume", "optim", "tracking", "console"),
        *("signals", "disk", "batch_plan", "config", "sections", "data", "task", "messages", "errors"),
        *("heartbeat", "progress", "agreement", "joining", "augmentation", "jsonl", "sum_check"),
    },
    "doctor": {
        *("training", "joining", "strategies", "agreement", "machines", "network", "heartbeat", "progress", "run", "config"),
        *("sections", "console", "launched", "errors"),
    },
    "memory": set(),
    "pipeline_planning": {"memory", "strategies", "batch_plan", "config", "sections", "errors"},
    "planning": {
        *("training", "joining", "loop", "strategies", "memory", "optim", "batch_plan", "config", "sections", "errors"),
        *("augmentation", "pipeline_planning"),
    },
    "plan_text": {"planning", "pipeline_planning", "console"},
    "inference": {"export", "run_folder", "config", "task", "errors"},
    "launchers": {"training", "joining", "config", "resources", "errors"},
    "answers": {"errors"},
    "run_folder": {"export", "config", "task", "errors"},
    "scoring": {
        "run_folder",
        *("training", "joining", "inference", "evaluation", "strategies", "checkpoint", "agreement", "optim", "heartbeat"),
        *("progress", "config", "sections", "errors"),
    },
    "spark": {"launchers", "training", "joining", "run", "heartbeat", "mlflow_run", "config", "console", "errors"},
    "cli": {
        *("doctor", "planning", "plan_text", "launchers", "inference", "scoring", "run", "ledger", "config", "data", "console"),
        *("answers", "resources", "messages", "errors", "run_folder", "jsonl"),
    },
    "reference": {"sections", "tasks", "messages"},
    "run": {"training", "config", "reference", "resources", "heartbeat", "launched", "progress", "console", "errors"},
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
