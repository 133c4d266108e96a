"""Why a run ended: the report that all processes agree on, the exit code, and who prints it. Independent of training."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from hftune.config.shipped_files import PACKAGE
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, DataError, ElsewhereError, Interrupted, TrainingError
from hftune.secrecy import without_secrets

INTERRUPTED = 130  # a shell's exit code for Ctrl-C
STOPPED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": a signal asked to stop, and a checkpoint was written
PATIENCE_S = 15.0  # for the process that prints the report to do so; its launcher ends the silent ones meanwhile

GOT_SIGTERM = threading.Event()
"""Set when a launcher sends SIGTERM to those who outlive a failed process: it knows of the failure, and nobody has to wait."""

SECOND_HAND = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket Timeout"),
    *("Timed out waiting", "gloo", "Gloo", "NCCL", "ncclRemoteError", "Watchdog"),
)
"""What the error of a healthy process contains if its connection to a dead process is gone."""


@dataclass(frozen=True)
class Report:
    """Why a run ended, ready to be printed."""

    text: str
    code: int = 1
    """The exit code: 2 if the recipe or the data are wrong."""
    rank: int = 0
    """The process that failed."""
    can_print: bool = True
    """The failed process prints it on its own machine; if it cannot, and on other machines, the first process that can does."""
    is_stall: bool = False
    """No process has ended, so each prints its stack first."""
    is_printed_here: bool = True
    """This process prints it."""
    kind: str = "TrainingError"
    """The name of the exception, one of hftune.errors or KeyboardInterrupt."""

    def __post_init__(self):
        if isinstance(self.text, str):  # trackers send its last line on, and a library's error may name any address
            object.__setattr__(self, "text", without_secrets(self.text))

    @classmethod
    def parse(cls, text: str | bytes) -> Report:
        """Read a report from the launcher's store. Anyone who reaches its port can write there, so no report means success."""
        default = cls(
            "hftune: The launcher's store holds a report that no process of this job has written. Check who can reach its port."
        )
        try:
            report = cls(**json.loads(text))
        except (ValueError, TypeError):
            return default
        if any(type(value) is not type(getattr(default, name)) for name, value in vars(report).items()):
            return default
        return report if report.code in (1, 2, STOPPED, INTERRUPTED) else replace(report, code=1)

    @property
    def is_interruption(self) -> bool:
        """Whether the run was asked to stop and can be resumed; else it failed."""
        return self.code in (STOPPED, INTERRUPTED)

    @property
    def sentence(self) -> str:
        """The reason in one line: hftune's own message, or the last line of a traceback."""
        return self.text.rpartition("\n")[2].removeprefix("hftune: ")

    def is_printed_by(self, process: ProcessInfo) -> bool:
        """Return whether this process prints the report: exactly one process of each machine does."""
        if self.can_print and self.rank in process.node_ranks:
            return process.rank == self.rank
        return process.rank == next((rank for rank in process.node_ranks if self.can_print or rank != self.rank), None)


def is_known(error: BaseException) -> bool:
    """Say whether the error is one of hftune's own, whose message needs no traceback."""
    return isinstance(error, (ConfigError, DataError, TrainingError, Interrupted))


def is_second_hand(error: BaseException) -> bool:
    """Say whether a failure elsewhere caused the error: one that torch raised, with words of a lost connection.

    OSError is left out: it is about files and other networks.
    """
    if isinstance(error, ElsewhereError):
        return True
    if not isinstance(error, RuntimeError) or is_known(error) or not any(sign in str(error) for sign in SECOND_HAND):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    place = Path(frame.f_code.co_filename)  # hftune's, where it waits for torch's C++
    return "torch" in place.parts or place.is_relative_to(PACKAGE)


def exit_code(error: BaseException) -> int:
    """Return 2 if the recipe or the data cannot be used, 1 if training failed; INTERRUPTED or STOPPED."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Interrupted):
        return STOPPED
    return 2 if isinstance(error, (ConfigError, DataError)) else 1


def with_report(error: BaseException, report: Report) -> BaseException:
    """Attach a report to an exception; return the exception."""
    error.report = report  # type: ignore[attr-defined]
    return error


def say_last(text: str, kind: str) -> None:
    """Print why this process ends, and write it to torchrun's error file; torchrun repeats it in its table of failures.

    Args:
        kind: name of the exception, which ``hftune.launch`` raises again.
    """
    below = "\n" if sys.stderr.isatty() else ""  # the main process may have a progress bar there
    print(f"{below}{text}", file=sys.stderr, flush=True)
    if path := ProcessInfo.from_environment().error_file:
        message = {"message": text, "extraInfo": {"timestamp": int(time.time()), "kind": kind}}
        Path(path).write_text(json.dumps({"message": message}))


def code_location(frame: FrameType, line: int) -> str:
    """Name a line of code: function, file and line number."""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"


def stack_location(frame: FrameType | None) -> str:
    """Name the innermost frame, and the innermost one that is hftune's or the user's, not a library's."""
    if frame is None:
        return "no code"
    libraries = (str(Path(os.__file__).parent), "site-packages", "<frozen")
    innermost, location = frame, code_location(frame, frame.f_lineno)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)) or not any(library in name for library in libraries):
            return location if frame is innermost else f"{location}, called from {code_location(frame, frame.f_lineno)}"
        frame = frame.f_back
    return location
