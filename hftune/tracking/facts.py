"""run.json: what is known about a run before its first step, for trackers, the report and the model card."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hftune.atomic import explain_write_errors, write_text
from hftune.secrecy import without_secrets
from hftune.tracking.jsonl import strict_json

NAME = "run.json"
GIT_S = 5.0
"""For git to answer: a repository on a slow network disk must not hold up a job."""


@dataclass(kw_only=True)
class Facts:
    """Where a run comes from and how it is computed. A resumed run writes them anew."""

    recipe: str
    started: str
    """When this attempt began, UTC, in ISO 8601."""
    command: str
    processes: int
    nodes: int
    device: str
    """Name of the GPU, or cpu."""
    precision: str
    """What ``train.mixed_precision`` means here: no, bf16 or fp16."""
    model: str
    """Name of its class."""
    parameters: int
    trainable_parameters: int
    data: Mapping[str, Mapping[str, Any]]
    """Number of samples and digest of each split."""
    labels: Sequence[str] | None
    """Class names, if the task has any."""
    commits: Mapping[str, str]
    """Of what was loaded from the Hub, by the key that names the repository."""
    versions: Mapping[str, str]
    git: Mapping[str, Any] | None
    """Commit of the current folder's repository, and whether files differ from it; None if it is in none."""
    num_steps: int
    steps_per_epoch: int
    notices: Sequence[str]
    code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the user's own files that are computed with, by name."""
    fold_data: str | None = None
    """Of a fold: the digest of the data that all folds are made of."""

    def write(self, output_dir: Path) -> None:
        """Write run.json.

        Raises:
            TrainingError: it cannot be written.
        """
        text = strict_json(asdict(self), indent=2, ensure_ascii=False, default=str) + "\n"
        with explain_write_errors(output_dir / NAME):
            write_text(output_dir / NAME, text.encode("utf-8", "replace").decode("utf-8"))  # a word may be no Unicode


def differing(folders: Iterable[Path], *names: str) -> tuple[str, Path, Path] | None:
    """Return the first of these facts that is known to differ between runs, and two such runs; None if there is none.

    A finished run stays as it is when its data change, so what compares runs of one command has to look.
    """
    first: dict[str, tuple[Path, Any]] = {}
    for folder in folders:
        with suppress(OSError, ValueError):
            facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
            for name in names:
                if (value := facts.get(name)) is not None:
                    other, known = first.setdefault(name, (folder, value))
                    if value != known:
                        return name, other, folder
    return None


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """Return the command of this process, as one would type it; of a program that is not hftune, no more than its name.

    What it shows may be published: secrets are left out, and the words of a stranger may be anything.
    """
    words = sys.orig_argv[1:]
    if not any(word.startswith("hftune.") or Path(word).name == "hftune" for word in words[:3]):
        return shlex.join(["python", Path(sys.argv[0]).name])
    return shlex.join(["python", *map(without_secrets, words)])


def git_state() -> dict[str, Any] | None:
    """Return commit and is_dirty of the repository that the current folder is in; None without git or a commit."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*words: str) -> str | None:
    try:
        ask = ["git", "--no-optional-locks", *words]
        found = subprocess.run(ask, capture_output=True, text=True, errors="replace", timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
