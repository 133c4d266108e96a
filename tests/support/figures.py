"""Reference figures of the demo recipes: what four steps and an evaluation give, to the last bit. They show that a change of code changes no result.

Not part of the suite, as other CPUs and libraries round differently. Before a change, write them, and check them afterwards::

    python -m tests.support.figures --write figures.json
    python -m tests.support.figures --check figures.json [recipe ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEMOS = sorted(path.stem for path in (ROOT / "recipes").glob("*_demo.yaml"))
OVERRIDES = ["train.max_steps=4", "train.log_every=1", "task.max_eval_samples=24", "resume=never"]
NEEDS = {
    "chats_lora_demo": ("chats_demo", "task.model"),
    "distillation_demo": ("language_modeling_demo", "train.teacher"),
}
"""Demos that need the model of another one, with the key that names it."""


def figures_of(demo: str, folder: Path) -> dict[str, Any]:
    """Train a demo for a few steps in a process of its own, and return losses, metrics and digests.

    Raises:
        SystemExit: it did not train.
    """
    words = [f"recipe={demo}", f"output_dir={folder / demo}", *OVERRIDES]
    if demo in NEEDS:
        needed, key = NEEDS[demo]
        if not (folder / needed / "model").is_dir():
            figures_of(needed, folder)
        words.append(f"{key}={folder / needed / 'model'}")
    done = subprocess.run([sys.executable, "-m", "hftune.run", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{demo} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    output = folder / demo
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    return {
        "first_weights": next(line["weights"] for line in ledger if "weights" in line),
        "data": json.loads((output / "run.json").read_text())["data"],
        "samples": [line["digest"] for line in ledger if "digest" in line],
        "logged": [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in logged],
        "model": {path.name: file_digest(path) for path in sorted((output / "model").glob("*.safetensors"))},
        "model_last": {path.name: file_digest(path) for path in sorted((output / "model_last").glob("*.safetensors"))},
        "predictions": file_digest(output / "predictions.jsonl"),
    }


def file_digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def differences(before: Any, now: Any, place: str) -> list[str]:
    """Return where two figures differ, a line for each value."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*before, *now]))
        return [line for name in names for line in differences(before.get(name), now.get(name), f"{place}/{name}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{place}/{index}")]
    return [] if before == now else [f"{place}: {before!r} before, {now!r} now"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("demos", nargs="*", metavar="recipe", help=f"by default all: {', '.join(DEMOS)}")
    arguments = parser.parse_args()
    demos = arguments.demos or DEMOS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hftune-figures-") as folder:
        for demo in demos:
            found[demo] = figures_of(demo, Path(folder))
            print(f"{demo}: trained", flush=True)
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1))
        return
    before = json.loads(arguments.check.read_text())
    lines = [line for demo in demos for line in differences(before[demo], found[demo], demo)]
    sys.exit("\n".join(lines) if lines else print(f"{len(demos)} demos give the same figures, to the last bit."))


if __name__ == "__main__":
    main()
