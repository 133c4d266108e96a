"""A mutation trial: small faults planted one at a time into the core, and whether the tests notice them.

It takes hours of CPU and is no part of the suite. It shows that tests that were merged or cut still hold what they held::

    python -m tests.support.mutants --count 200 --seed 1 --output mutants.jsonl

Each mutant is a copy of the package with one change to one expression or statement. Run against it are the unit tests that
called the changed function when nothing was changed, quickest first; and, if none of them fails, the tests of its area that
start processes. A mutant is killed if a test fails or does not end. Its line in the output says which.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pluggy import HookimplMarker

ROOT = Path(__file__).parents[2]
AREAS = {
    "batch_plan": (["hftune/batch_plan.py"], 30, ["tests/parity/test_float64.py"]),
    "loop": (
        ["hftune/loop.py", "hftune/milestones.py", "hftune/callbacks.py"],
        30,
        ["tests/parity/test_float64.py", "tests/multiprocess/test_resume.py"],
    ),
    "evaluation": (["hftune/evaluation.py"], 15, ["tests/parity/test_float64.py", "tests/parity/test_own_rows.py"]),
    "strategies": (["hftune/strategies"], 55, ["tests/parity/test_float64.py", "tests/parity/test_pipeline.py"]),
    "checkpoints": (["hftune/checkpoints"], 35, ["tests/multiprocess/test_resume.py"]),
    "data": (["hftune/data"], 35, ["tests/parity/test_own_rows.py"]),
}
"""What is changed: files or folders, the share of the mutants (of 200), and the tests that start processes."""
NOT_CHANGED = ("demo", "__init__")
"""Files whose names begin so: demo data decide what a demo learns, and nothing that a user trains."""
MAX_TESTS_S = 60.0
"""Of unit tests for one mutant, by the time that they took when nothing was changed."""
TIMEOUT_S = 150.0
"""Of the unit tests of a mutant; the tests that start processes have three times what they took without a change, and this."""
SWAPPED: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
}


def changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST]]:
    """Yield each change that makes a mutant of a module: the node, what is done to it, and what stands in its place.

    Texts, annotations, imports and what only words an error stay as they are.
    """
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in within(function):
            yield from changes_of(node)


def within(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body but for those of raised errors, texts, annotations and inner functions."""
    left: list[ast.AST] = list(reversed(function.body))
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Assert):
            continue
        yield node
        children = [child for name, child in ast.iter_fields(node) if name not in ("annotation", "returns")]
        flat = [item for child in children for item in (child if isinstance(child, list) else [child])]
        left += [item for item in reversed(flat) if isinstance(item, ast.AST)]


def changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST]]:
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        if not any(isinstance(child, ast.Constant) and isinstance(child.value, str) for child in ast.walk(node)):
            new.op = SWAPPED[type(node.op)]()
            yield node, "operator", new
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        new.ops[0] = SWAPPED[type(node.ops[0])]()
        yield node, "comparison", new
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, "constant", ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node, "nothing returned", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "call left out", ast.Pass()


def mutants(seed: int, count: int) -> list[dict[str, Any]]:
    """Return the mutants of a seed: area, file, line, function, what was done, and the file's new text. In random order, so
    that a trial that is broken off has tried some of each area.
    """
    rng, found = random.Random(seed), []
    for area, (places, share, _) in AREAS.items():
        files = [path for place in places for path in sorted([ROOT / place, *(ROOT / place).glob("*.py")]) if path.is_file()]
        sites = []
        for path in files:
            if not path.name.startswith(NOT_CHANGED):
                tree = ast.parse(path.read_text())
                sites += [(path, tree, *change) for change in changes(tree)]
        for path, tree, node, kind, new in rng.sample(sites, min(len(sites), round(share * count / 200))):
            functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            owner = min(around, key=lambda f: (f.end_lineno or 0) - f.lineno)
            text = ast.unparse(new)
            found.append(
                {
                    **{"area": area, "file": str(path.relative_to(ROOT)), "line": node.lineno, "function": owner.name},
                    **{"kind": kind, "before": ast.unparse(node)[:200], "after": text[:200]},
                    "first": min([owner.lineno, *(decorator.lineno for decorator in owner.decorator_list)]),
                    "text": replaced(path.read_text(), node, f"({text})" if isinstance(node, ast.expr) else text),
                }
            )
    rng.shuffle(found)
    return found


def replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """Return a source with the text of one node replaced."""
    lines = source.encode().splitlines(keepends=True)
    end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[end_line - 1][end_column:] + b"".join(lines[end_line:])
    return (before + text.encode() + after).decode()


class CalledFunctions:
    """A pytest plugin that records which functions of hftune each test calls, and how long it takes."""

    def __init__(self) -> None:
        self.called: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    @HookimplMarker("pytest")(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Iterator[None]:
        functions: set[tuple[str, int]] = set()
        prefix = f"{ROOT}/hftune/"

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(prefix):
                functions.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.called[item.nodeid] = [f"{Path(name).relative_to(ROOT)}:{line}" for name, line in functions]


def in_fork(work: Callable[[], int], log: Path, timeout_s: float) -> int | None:
    """Run a function in a fork that leads a session of its own, and return what it returns; None if it did not end in time."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        try:
            os._exit(work())
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(99)
    end = time.monotonic() + timeout_s
    code = None
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


def run_tests(root: Path, tests: list[str], plugins: list[Any] | None = None, stop: bool = True) -> int:
    """Run tests of a tree of the repository in this process, and return pytest's exit code."""
    import pytest

    os.chdir(root)
    sys.path[:] = [str(root), *[entry for entry in sys.path if entry not in ("", str(ROOT))]]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hftune", "tests")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(root)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "--no-header"]
    return int(pytest.main([*options, *(["-x"] if stop else []), *tests], plugins=plugins))


def record(folder: Path) -> dict[str, list[tuple[float, str]]]:
    """Return the unit tests that call each function, by file and first line, with their seconds; quickest first."""
    path = folder / "called.json"

    def work() -> int:
        plugin = CalledFunctions()
        code = run_tests(ROOT, ["tests/unit"], [plugin], stop=False)
        called = {test: functions for test, functions in plugin.called.items() if test not in plugin.failed}
        path.write_text(json.dumps([called, plugin.seconds]))
        return code

    if in_fork(work, folder / "record.txt", 3600.0) not in (0, 1):  # 1: a test has failed, and is left out
        sys.exit(f"The unit tests could not be recorded:\n{(folder / 'record.txt').read_text()[-3000:]}")
    called, seconds = json.loads(path.read_text())
    by_function: dict[str, list[tuple[float, str]]] = {}
    for test, functions in called.items():
        for function in functions:
            by_function.setdefault(function, []).append((seconds[test], test))
    return {function: sorted(tests) for function, tests in by_function.items()}


def try_mutant(mutant: dict[str, Any], tests: list[tuple[float, str]], folder: Path, timeout_s: float) -> str | None:
    """Return what killed a mutant, "unit" or "processes"; None if it lives."""
    tree, log = folder / "tree", folder / "mutant.txt"
    (tree / mutant["file"]).write_text(mutant["text"])
    try:
        total, chosen = 0.0, []
        for seconds, test in tests:
            total += seconds
            if total <= MAX_TESTS_S:
                chosen.append(test)
        if chosen and in_fork(lambda: run_tests(tree, chosen), log, TIMEOUT_S) != 0:
            return "unit"
        with_processes = AREAS[mutant["area"]][2]
        return "processes" if in_fork(lambda: run_tests(tree, with_processes), log, timeout_s) != 0 else None
    finally:
        shutil.copyfile(ROOT / mutant["file"], tree / mutant["file"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="a line of JSON for each mutant; one that is there goes on")
    arguments = parser.parse_args()
    import datasets, evaluate, sklearn.metrics, torch, torch._dynamo, transformers.trainer  # noqa: E401, F401, I001  # forks have them

    done = len(arguments.output.read_text().splitlines()) if arguments.output.is_file() else 0
    with tempfile.TemporaryDirectory(prefix="hftune-mutants-") as name, arguments.output.open("a") as output:
        folder = Path(name)
        shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(".git", ".venv", "outputs", "site", "__pycache__"))
        tests, timeouts = record(folder), {}
        for area, (_, _, names) in AREAS.items():
            began = time.monotonic()
            if in_fork(partial(run_tests, folder / "tree", names), folder / "control.txt", 900.0) != 0:
                sys.exit(f"The tests of {area} fail without any change:\n{(folder / 'control.txt').read_text()[-3000:]}")
            timeouts[area] = TIMEOUT_S + 3 * (time.monotonic() - began)
        for mutant in mutants(arguments.seed, arguments.count)[done:]:
            began, called_by = time.monotonic(), tests.get(f"{mutant['file']}:{mutant['first']}", [])
            killed = try_mutant(mutant, called_by, folder, timeouts[mutant["area"]])
            line = {name: value for name, value in mutant.items() if name not in ("text", "first")}
            seconds = round(time.monotonic() - began)
            output.write(json.dumps({**line, "killed": killed, "seconds": seconds}) + "\n")
            output.flush()
            print(f"{mutant['file']}:{mutant['line']} {mutant['kind']}: {killed or 'lives'} ({seconds} s)", flush=True)
    lines = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    print(f"{sum(line['killed'] is not None for line in lines)} of {len(lines)} mutants were killed.")


if __name__ == "__main__":
    main()
