"""The output in the terminal: lines, and below them a progress bar if stderr is a terminal. Independent of tasks."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console as Terminal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hftune.callbacks import Begin, Callback, CheckpointDone, End, EvaluationDone, Failure, Log, Step
from hftune.errors import is_number
from hftune.secrecy import without_secrets

REDRAW_S = 0.25
"""At least between two drawings of the progress bar."""
MIN_BAR, MAX_BAR = 10, 20
"""Columns of the bar alone."""
ERASE_LINE = "\r\x1b[2K"
SHOWN = ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
"""Training values that a line shows; metrics.jsonl has all."""
SAMPLE_WIDTH = 88
"""Columns of a sample's text at most."""


class Console(Callback):
    """Prints on the main process and is silent on the others.

    Every evaluation gets a line. The values of training get lines, too, unless a progress bar shows them.

    Args:
        enabled: whether this is the main process.
        step: after which training starts.
        metric: of an evaluation, to show in the bar.
        sets: names of ``eval.sets``.
    """

    must_not_fail = True

    def __init__(self, enabled: bool, num_steps: int, step: int = 0, metric: str = "loss", sets: Collection[str] = ()):
        self.enabled, self.num_steps, self.step, self.metric, self.sets = enabled, num_steps, step, metric, sets
        self._widths = {"lr": len("1.00e-05")}
        self._timed_from: tuple[int, float] | None = None
        self._scored: tuple[int, int] | None = None
        self._loss, self._speed, self._evaluation = "", "", Text()
        self._bar = Bar(sys.stderr) if enabled and is_terminal(sys.stderr) else None

    def on_begin(self, begin: Begin | None = None) -> None:
        """Draw the bar, which stays below all that is printed until ``close``."""
        if self._bar is not None:
            self._bar.open()
            self._draw(now=True)

    def on_step(self, step: Step) -> None:
        """Note that a step was made, or skipped, without a loss."""
        self.step, self._scored = step.step, None
        if self._timed_from is None:  # the first step may take far longer than those that follow
            self._timed_from = step.step, time.monotonic()
        if self._bar is not None:
            self._loss = self._loss if step.loss is None else f"loss {short(step.loss)}"
            self._draw()

    def scored(self, count: int, total: int) -> None:
        """Note that an evaluation has scored ``count`` of this process's ``total`` micro-batches."""
        self._scored = count, total
        self._draw(now=count in (1, total))

    def on_log(self, log: Log) -> None:
        """Show what was logged at a step of training; not what an evaluation or a callback has logged."""
        if "train/lr" not in log.values:
            return
        numbers = {name.partition("/")[2]: value for name, value in log.values.items() if is_number(value)}
        if "samples_per_s" in numbers:
            self._speed = f"{short(numbers['samples_per_s'])} samples/s"
        if self._bar is None:
            cells = [self._cell(name, numbers[name]) for name in SHOWN if name in numbers]
            self._line(join([*self._position(log.step, log.epoch), *cells, self._time_left()]))

    def on_evaluation(self, evaluation: EvaluationDone) -> None:
        """Print an evaluation, and a few predictions, each as a small table."""
        self._scored, remark = None, ""
        if evaluation.split == "eval" and evaluation.best is not None:
            best, value = short(evaluation.best), short(evaluation.metrics[self.metric])
            remark = "best so far" if evaluation.is_best else f"best {best} at step {evaluation.best_step}"
            found = f"eval {self.metric} {value}"
            self._evaluation = Text(f"{found}, the best", "green") if evaluation.is_best else Text(f"{found}, best {best}")
        numbers = {name: value for name, value in evaluation.metrics.items() if is_number(value)}
        others = tuple(f"{name}/" for name in self.sets)  # they have their own lines
        cells = [self._cell(name, value) for name, value in numbers.items() if not name.startswith(others)]
        position = self._position(evaluation.step, evaluation.epoch)
        self._line(fold([*position, evaluation.split, *cells, remark], self._columns()))
        for sample in filter(None, evaluation.samples):
            width = max(20, min(SAMPLE_WIDTH, self._columns() - max(map(len, sample)) - 4))
            row = {name: short(value) if is_number(value) else one_line(str(value), width) for name, value in sample.items()}
            self._line("  " + table(row).lstrip() + "\n")
        self._draw(now=True)

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        if checkpoint.failure is not None:
            self._line(warning(checkpoint.failure))

    def on_end(self, end: End) -> None:
        self.close()

    def on_failure(self, failure: Failure) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar. Any thread may call it, and more than once."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str) -> None:
        if self.enabled:
            print(text, flush=True)

    def _position(self, step: int, epoch: float) -> list[str]:
        total, last = f"step {self.num_steps}/{self.num_steps}", epoch / max(step, 1) * self.num_steps
        return [f"{f'step {step}/{self.num_steps}':<{len(total)}}", f"epoch {epoch:<{len(f'{last:.2f}')}.2f}"]

    def _cell(self, name: str, value: float) -> str:
        """Return name and value, as wide as any value of that name so far."""
        text = short(value)
        width = self._widths[name] = max(self._widths.get(name, 5), len(text))
        return f"{name.replace('_per_s', '/s')} {text:<{width}}"

    def _time_left(self) -> str:
        """Return the time left at the present speed, evaluations included; empty before the second step."""
        if self._timed_from is None or self.step in (self._timed_from[0], self.num_steps):
            return ""
        step, since = self._timed_from
        seconds = (time.monotonic() - since) / (self.step - step) * (self.num_steps - self.step)
        return f"{duration(seconds)} left"

    def _columns(self) -> int:
        """Return the width of the terminal; without one, lines are as long as they are."""
        return self._bar.width if self._bar is not None else 10_000

    def _draw(self, now: bool = False) -> None:
        if self._bar is not None and (now or self._bar.is_due()):
            cells = [Text(self._loss), Text(self._time_left()), self._evaluation, Text(self._speed)]
            if self._scored is None:
                self._bar.draw(f"step {self.step}/{self.num_steps}", self.step, self.num_steps, cells)
            else:
                count, total = self._scored
                what = "evaluating" if count < total else "computing metrics"
                self._bar.draw(f"{what} after step {self.step}", count, total, cells[1:3])


class Bar:
    """One line at the bottom of a terminal, drawn again at most every REDRAW_S by whoever has news.

    Not rich's Live: its thread would hold locks while a data loader forks, its proxy reads brackets in data as markup, and it
    hides the cursor, for good if the process is killed. rich renders the line; whatever else is printed goes above it.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._terminal = stream, Terminal(file=stream, highlight=False)
        self._lock, self._owner = threading.RLock(), os.getpid()
        self._is_open, self._is_within_line, self._shown, self._drawn_at = False, False, "", 0.0

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._terminal.width

    def open(self) -> None:
        self._is_open = True
        for name in ("stdout", "stderr"):
            if is_terminal(stream := getattr(sys, name)):
                setattr(sys, name, _Above(stream, self))

    def close(self) -> None:
        """Remove the bar, and give back sys.stdout and sys.stderr. From here on it passes on what is printed as it is."""
        with self._lock:
            if self._is_open:
                self._write(ERASE_LINE)
            self._is_open = False
        for name in ("stdout", "stderr"):
            if isinstance(stream := getattr(sys, name), _Above) and stream.bar is self:
                setattr(sys, name, stream.stream)

    def is_due(self) -> bool:
        return time.monotonic() - self._drawn_at >= REDRAW_S

    def draw(self, label: str, count: int, total: int, cells: Iterable[Text]) -> None:
        """Draw the line: label, bar, and as many of the cells as the terminal is wide enough for."""
        with self._lock:
            self._shown, self._drawn_at = self._render(label, count, total, cells), time.monotonic()
            if self._is_open and not self._is_within_line:
                self._write(ERASE_LINE + self._shown)

    def _render(self, label: str, count: int, total: int, cells: Iterable[Text]) -> str:
        width = self.width - 1  # a full last column makes some terminals begin a line
        room, kept = width - len(label) - 2 - MIN_BAR, []
        if room < 0:
            return label[:width]
        for cell in filter(None, cells):
            if cell.cell_len + 2 > room:
                break
            room -= cell.cell_len + 2
            kept.append(cell)
        length = min(MIN_BAR + room, MAX_BAR)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(label), ProgressBar(total, count, width=length, complete_style="cyan", finished_style="cyan"), *kept)
        with self._terminal.capture() as capture:
            self._terminal.print(grid, no_wrap=True, crop=True)
        return capture.get().partition("\n")[0]

    @contextmanager
    def lifted(self, text: str) -> Iterator[None]:
        """Within ``with``, nothing is in the way of printing ``text``."""
        if os.getpid() != self._owner:  # a worker of a data loader, which may have been forked while the lock was held
            yield
            return
        with self._lock:
            if self._is_open and not self._is_within_line:
                self._write(ERASE_LINE)
            yield
            if text:
                self._is_within_line = not text.endswith("\n")
            if self._is_open and not self._is_within_line:
                self._write(self._shown)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class _Above:
    """sys.stdout or sys.stderr while there is a bar: whole lines appear above it."""

    def __init__(self, stream: TextIO, bar: Bar):
        self.stream, self.bar = stream, bar

    def write(self, text: str) -> int:
        with self.bar.lifted(text):
            written = self.stream.write(text)
            self.stream.flush()
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that can erase a line."""
    return hasattr(stream, "isatty") and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def note(text: str) -> str:
    """Mark what a user should know."""
    return f"note: {text}"


def warning(text: str) -> str:
    """Mark what went wrong without ending the run."""
    return f"warning: {without_secrets(text)}"


def print_any_character() -> None:
    """Make output that is not UTF-8 print other characters as \\u4e2d: printing a sample must not end a training.

    Nor must output that was closed by whoever started this process, as in ``hftune train ... >&-``; it is discarded.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook, which shows everything
            stream.reconfigure(errors="backslashreplace")


def hide_progress_bars() -> None:
    """Hide the progress bars of datasets and transformers, of which a log would keep every redraw."""
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import disable_progress_bars

    datasets_logging.disable_progress_bar()
    disable_progress_bars()  # which transformers takes over when imported; importing it here would take half a second
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()


def hide_reports() -> None:
    """Hide what datasets and transformers report while they load, and warnings of models: the same on every process."""
    from datasets.utils import logging as datasets_logging

    hide_progress_bars()
    datasets_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"hftune\.models\.")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # transformers reads it when it is imported, which not all tasks need
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.set_verbosity_error()


def short(value: float) -> str:
    """Format a number for reading, mostly in five columns: 0.831, 1.650, 33.31, 109.3, 1,234, 0.0123, 2.40e-05."""
    size = abs(value)
    if size == 0 or (isinstance(value, int) and size < 1e6):
        return f"{value:,.0f}"
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if 0 < size < 0.1:
        return f"{value:#.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Format a time for reading: 0:02:13, 1 day, 4:05:00."""
    return str(timedelta(seconds=round(seconds)))


def data_size(num_bytes: float) -> str:
    """Format a number of bytes for reading: 512 B, 3.1 MiB, 1.25 TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} TiB"


def fitted(line: str, width: int) -> str:
    """Cut a line to ``width`` columns of a terminal, of which Chinese characters take two each."""
    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 1).rstrip()}\N{HORIZONTAL ELLIPSIS}"


def one_line(text: str, width: int = SAMPLE_WIDTH) -> str:
    """Fit a text into one line of ``width`` columns."""
    return fitted(" ".join(text.split()), width)


def join(cells: Iterable[str]) -> str:
    """Join the cells of a line."""
    return "  ".join(filter(None, cells)).rstrip()


def fold(cells: Iterable[str], width: int) -> str:
    """Join the cells of a line, and start an indented one wherever the next cell would not fit."""
    lines: list[list[str]] = [[]]
    for cell in filter(None, cells):
        if lines[-1] and len(join([*lines[-1], cell])) > width:
            lines.append(["  "])
        lines[-1].append(cell)
    return "\n".join(map(join, lines))


def table(rows: Mapping[str, Any], total_width: int | None = None) -> str:
    """Format two columns; the second one is wrapped if there is a ``total_width``."""
    width = max(map(len, rows))
    between = "\n" + " " * (2 + width + 2)

    def wrapped(value: Any) -> str:
        if total_width is None:
            return str(value)
        return between.join(
            textwrap.wrap(str(value), max(20, total_width - len(between)), break_long_words=False, break_on_hyphens=False)
        )

    return "\n".join(f"  {name:<{width}}  {wrapped(value)}" for name, value in rows.items())


def aligned(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Return a line for each row, with its cells in columns two spaces apart, the first ``right`` of them set to the right."""
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(cell_len, column))
        spaces = (" " * (width - cell_len(text)) for text in column)
        columns.append([space + text if index < right else text + space for text, space in zip(column, spaces, strict=True)])
    return ["  " + "  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def printed_width() -> int | None:
    """Return the width of the terminal that stdout is; None if it is none."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
