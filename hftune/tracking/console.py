"""The output in the terminal: a progress bar if stderr is a terminal, plain lines otherwise. Independent of tasks."""

from __future__ import annotations

import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tqdm import tqdm


class Console:
    """Prints on the main process and is silent on the others."""

    def __init__(self, enabled: bool, num_steps: int, step: int = 0):
        self.enabled = enabled
        self.num_steps = num_steps
        wanted = enabled and sys.stderr.isatty()
        self.bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True) if wanted else None

    def line(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def advance(self, step: int, loss: float) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self.bar.update(step - self.bar.n)

    def logged(self, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        """Print what was logged at a step; training values only without a progress bar, which shows them itself."""
        part = next(iter(values)).partition("/")[0]
        if self.bar is None or part in ("eval", "test"):
            numbers = [f"{name.partition('/')[2]} {short(value)}" for name, value in values.items() if is_number(value)]
            what = f"{part} " if part in ("eval", "test") else ""
            self.line(f"step {step}/{self.num_steps}  epoch {epoch:.2f}  {what}{'  '.join(numbers)}")

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print a few predictions, each as a small table."""
        for sample in samples:
            if sample:
                row = {name: short(value) if is_number(value) else one_line(str(value)) for name, value in sample.items()}
                self.line("  " + table(row).lstrip() + "\n")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def print_any_character() -> None:
    """Make output that is not UTF-8 print other characters as \\u4e2d: printing a sample must not end a training."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook, which shows everything
            stream.reconfigure(errors="backslashreplace")


def hide_progress_bars() -> None:
    """Hide the progress bars of datasets and transformers, of which a log would keep every redraw."""
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import disable_progress_bars

    datasets_logging.disable_progress_bar()
    disable_progress_bars()  # transformers takes this over when it is imported, which takes half a second and not all tasks need
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()


def is_number(value: Any) -> bool:
    """Return whether a metric is a single number, as trackers want it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short(value: float) -> str:
    """Format a number for reading: 0.8312, 2.4e-05, 1,234."""
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def data_size(num_bytes: float) -> str:
    """Format a number of bytes for reading: 512 B, 3.1 MiB, 1.25 TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} TiB"


def one_line(text: str, width: int = 88) -> str:
    """Fit a text into ``width`` columns of a terminal, in which Chinese characters take two."""
    text = " ".join(text.split())
    ends = list(accumulate(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text))
    if not ends or ends[-1] <= width:
        return text
    return text[: bisect_right(ends, width - 1)] + "\N{HORIZONTAL ELLIPSIS}"


def table(rows: Mapping[str, Any]) -> str:
    """Format two columns."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
