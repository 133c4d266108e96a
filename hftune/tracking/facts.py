"""What is known about a run before its first step: run.json, for trackers, report and card; and what processes compute on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.atomic import explain_write_errors, write_text
from hftune.secrecy import without_secrets
from hftune.tracking.jsonl import read_object, strict_json

if TYPE_CHECKING:
    import torch

NAME = "run.json"
COMMAND = "HFTUNE_COMMAND"
"""Environment variable with what was typed, for processes that hftune starts: their own words name a temporary file."""
VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that choose kernels without torch knowing."""
GIT_S = 5.0
"""For git to answer: a repository on a slow network disk must not hold up a job."""


def write(facts: Mapping[str, Any], output_dir: Path) -> None:
    """Write run.json, or raise TrainingError."""
    text = strict_json(facts, indent=2, ensure_ascii=False, default=str) + "\n"
    with explain_write_errors(output_dir / NAME):
        write_text(output_dir / NAME, text.encode("utf-8", "replace").decode("utf-8"))  # a word may be no Unicode


def differing(folders: Iterable[Path], *names: str) -> tuple[str, Path, Path] | None:
    """Return the first of these facts that is known to differ between runs, and two such runs; None if there is none.

    A finished run stays as it is when its data change, so what compares runs of one command has to look.
    """
    first: dict[str, tuple[Path, Any]] = {}
    for folder in folders:
        facts = read_object(folder / NAME)
        for name in names:
            if (value := facts.get(name)) is not None:
                other, known = first.setdefault(name, (folder, value))
                if value != known:
                    return name, other, folder
    return None


def command() -> str:
    """Return the command of this process, or of hftune's own launcher, as one would type it; of other programs, only the name.

    What it shows may be published: secrets are left out, and the words of a stranger may be anything.
    """
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    words = sys.orig_argv[1:]
    if not any(word.startswith("hftune.") or Path(word).name == "hftune" for word in words[:3]):
        return shlex.join(["python", Path(sys.argv[0]).name])
    typed = ["hftune", *words[1:]] if Path(words[0]).name == "hftune" else ["python", *words]
    return shlex.join(map(without_secrets, typed))


def git_state() -> dict[str, Any] | None:
    """Return commit and is_dirty of the current folder's repository; None without git, a commit or an answer within GIT_S."""
    said = []
    for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            ask = ["git", "--no-optional-locks", *words]
            found = subprocess.run(ask, capture_output=True, text=True, errors="replace", timeout=GIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        said.append(found.stdout.strip())
    return {"commit": said[0], "is_dirty": bool(said[1])}


def hardware(device: torch.device) -> dict[str, Any]:
    """Return what this process computes on, and how: plain values, the same for two processes that compute the same bits."""
    import torch

    information = Path("/proc/cpuinfo")
    lines = information.read_text(errors="replace").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": names[0] if names else platform.processor() or platform.machine(),  # such as "AMD EPYC 9554"
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        found |= {
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def of_all(ranked: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the hardware of all processes: that of the first, and under ``others``, by rank, of those that have another.

    Args:
        ranked: rank and hardware of each process, in order.
    """
    (_, first), *rest = ranked
    others = {str(rank): own for rank, own in rest if own != first}
    return first | ({"others": others} if others else {})
