"""``hftune bisect --candidates A,B,...``: find where a list of versions turns bad, each tried in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hftune.commands.bisect_runs import check_first, curve_of, line_of
from hftune.errors import ConfigError
from hftune.launchers.local import environment
from hftune.replay.bisection import Judge, Scale, first_bad
from hftune.replay.history import History
from hftune.replay.tolerance import TOLERANCE

DEFAULT_STEPS = 15


def search_candidates(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Try the first and the last candidate, then those between them, and return the result as plain data.

    Raises:
        ConfigError: the arguments cannot be used, or an end cannot be tried.
    """
    candidates = check(options)
    history = History.open(options.runs[0], trust_code=options.trust_code, data=options.data)
    check_first(history, options.first)
    last = options.first + (options.steps or DEFAULT_STEPS) - 1
    last = last if options.steps else min(last, history.last)
    history.check_step(last)
    tries = Candidates(options, last)
    say(f"{len(candidates)} candidates. A try computes steps {options.first} to {last} of {options.runs[0]} in a new process.")
    ends = tries.end(candidates[0]), tries.end(candidates[-1])
    scale = Scale(*ends)
    for name, candidate, losses in zip(("good", "bad"), (candidates[0], candidates[-1]), ends, strict=True):
        say(f"  {name:>6}  {curve_of(scale.curve(losses))}  {candidate}")
    result: dict[str, Any] = {"steps": [options.first, last], "candidates": candidates, "found": [], "tries": []}
    if scale.difference <= TOLERANCE:
        say(f"{candidates[0]} and {candidates[-1]} have the same loss: there is nothing to find. Set --steps or --from.")
        return result
    judge = Judge(lambda chosen: tries.losses(*chosen), scale, lambda made: say(line_of(made)))
    good, bad = first_bad(len(candidates), lambda place: judge.look([candidates[place]]).is_bad)
    say_found(candidates[good : bad + 1], say)
    if options.command:
        say(f"Set up here now: {tries.current}.")
    result |= {"found": candidates[good + 1 : bad + 1], "last_good": candidates[good]}
    return result | {"tries": [asdict(made) for made in judge.tries.values()]}


def check(options: argparse.Namespace) -> list[str]:
    """Return the candidates, or raise ConfigError."""
    candidates = [name.strip() for name in options.candidates.split(",") if name.strip()]
    if len(candidates) < 2 or len(set(candidates)) < len(candidates):
        raise ConfigError(
            f"--candidates {options.candidates} must be two names or more, each once: the first good, the last bad."
        )
    if len(options.runs) != 1:
        raise ConfigError("--candidates are tried on one run: name it alone.")
    if options.good or options.bad:
        raise ConfigError("--good and --bad do not go with --candidates: the first one is good, and the last one bad.")
    words = [text for text in (options.command, *options.keys) if text is not None]
    if not any("{}" in text for text in words):
        raise ConfigError(
            "Say what a candidate is, with {} in its place: --try 'pip install -q transformers=={}', or --set task.model={}"
        )
    return candidates


class Candidates:
    """Computes the same steps with each candidate."""

    def __init__(self, options: argparse.Namespace, last: int):
        self.options, self.last = options, last
        self.current: str | None = None
        """The candidate that was set up last."""

    def end(self, candidate: str) -> list[float]:
        """Return the losses with the first or the last candidate, or raise ConfigError that names it."""
        try:
            return self.losses(candidate)
        except ConfigError as error:
            raise ConfigError(
                f"{candidate} cannot be tried, and the search is between the first and the last. {error}"
            ) from error

    def losses(self, candidate: str) -> list[float]:
        """Set a candidate up and compute the steps in a new process, which has its libraries and code.

        Raises:
            ConfigError: one of both failed.
        """
        if self.options.command:
            self.current = candidate
            command = self.options.command.replace("{}", candidate)
            done = subprocess.run(
                command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
            )  # which can ask nothing: what it prints is not shown
            if done.returncode:
                raise ConfigError(f"{command}: exit code {done.returncode}. {last_words(done)}")
        with tempfile.TemporaryDirectory(prefix="hftune-bisect-") as folder:
            path = Path(folder) / "losses.json"
            done = subprocess.run(
                [*self._command(candidate), "--losses", str(path)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if not path.is_file():
                raise ConfigError(last_words(done))
            return json.loads(path.read_text(encoding="utf-8"))

    def _command(self, candidate: str) -> Sequence[str]:
        options, count = self.options, self.last - self.options.first + 1
        words = [word.replace("{}", candidate) for word in options.keys]
        return [
            *(sys.executable, "-m", "hftune.cli", "bisect-step", str(options.runs[0])),
            *("--step", str(self.last), "--steps", str(count), "--expect", "0"),
            *(["--set", *words] if words else []),
            *(["--data", *options.data] if options.data else []),
            *(["--trust-code"] if options.trust_code else []),
        ]


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a program has printed: of a traceback, the error."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].removeprefix("hftune: ") if lines else f"It ended with exit code {done.returncode} and printed nothing."


def say_found(between: Sequence[str], say: Callable[[str], None]) -> None:
    """Print the last good candidate and the first bad one; and those between them that cannot be tried."""
    good, *untried, bad = between
    if untried:
        say(f"{good} is good and {bad} is bad. Those between them cannot be tried: {', '.join(untried)}.")
    else:
        say(f"{bad} is the first that is bad; {good} is good.")
