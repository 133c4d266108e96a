"""What every benchmark shares: --smoke and --output, the table on the terminal, and the result file for docs/benchmarks.md.

Not run by itself; knows no benchmark, and imports no torch before a result is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def parse_options(parser: argparse.ArgumentParser, smoke: Mapping[str, Any]) -> argparse.Namespace:
    """Add --smoke and --output, and parse the command line; ``smoke`` holds the defaults of options under --smoke."""
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, for seconds: shows that the script works")
    parser.add_argument(
        "--output", type=Path, help="file for the result (default: benchmarks/results/NAME.json; none under --smoke)"
    )
    if parser.parse_known_intermixed_args()[0].smoke:
        parser.set_defaults(**smoke)
    return parser.parse_intermixed_args()  # words of a recipe may stand before and after options


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Print aligned columns below a title, the first to the left and the others to the right; return them for ``save``."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]])
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    print("\n".join([f"\n{title}", *[line.rstrip() for line in lines]]), flush=True)
    return {"title": title, "header": cells[0], "rows": cells[1:]}


def save(script: str, options: argparse.Namespace, tables: Sequence[Mapping[str, Any]], measured: Mapping[str, str]) -> None:
    """Write the result of a script to ``options.output``, by default to results/NAME.json, under --smoke nowhere.

    Args:
        script: the script's ``__file__``.
        options: what ``parse_options`` returned. Paths are written without their folders.
        tables: what ``print_table`` returned.
        measured: rows of the table in docs/benchmarks.md: what was measured, and its figure.
    """
    path = options.output or (None if options.smoke else RESULTS / f"{Path(script).stem}.json")
    if path is None:
        return
    given = {name: _spell(value) for name, value in vars(options).items() if name not in ("output", "smoke")}
    result = {
        "script": Path(script).name,
        "script_sha256": fingerprint(Path(script)),
        "smoke": options.smoke,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(_seconds_since_start()),
        "commit": commit(),
        "options": given,
        "versions": versions(),
        "machine": machine(),
        "measured": dict(measured),
        "tables": list(tables),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nWritten: {os.path.relpath(path)}", flush=True)


def fingerprint(script: Path) -> str:
    """Hash a script with the files beside it that it imports or names, but not this module, which measures nothing."""
    found, waiting = {Path(__file__).name}, [script]
    digest = sha256()
    while waiting:
        path = waiting.pop()
        if path.name in found:
            continue
        found.add(path.name)
        content = path.read_bytes()
        digest.update(content)
        text = content.decode()
        imported = [other for other in path.parent.glob("*.py") if re.search(rf"^\s*(from|import) {other.stem}\b", text, re.M)]
        waiting += sorted([*imported, *(other for other in path.parent.glob("*.yaml") if other.name in text)])
    return digest.hexdigest()


def commit() -> str | None:
    """Return git's commit, marked if hftune, its recipes or the benchmarks differ from it; None outside of a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "hftune", "recipes", "benchmarks", ":!benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that figures depend on."""
    from hftune import __version__

    packages = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    return {"python": platform.python_version(), **packages, "hftune": __version__}


def machine() -> dict[str, Any]:
    """Describe the machine: CPU, the cores that this process may use, memory, GPUs."""
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": " + ".join(gpus) or None,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text(), re.M) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def _seconds_since_start() -> float:
    """Return how long ago this process was started."""
    import psutil

    return time.time() - psutil.Process().create_time()


def _spell(value: Any) -> Any:
    """Make an option fit for JSON; of a path only the name, as its folders are those of one machine."""
    if isinstance(value, (list, tuple)):
        return [_spell(item) for item in value]
    return value.name if isinstance(value, Path) else value
