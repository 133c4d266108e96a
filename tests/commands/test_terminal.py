"""A real terminal: what it shows, and that training outlives it."""

import os
import pty
import subprocess
import sys

from tests.support.runs import environment

TRAIN = """
import sys, time
from pathlib import Path
from hftune import run
from hftune.tracking.console import Console
from tests.support.events import evaluated, step_taken

run.outlive_readers()
console = Console(True, 40, metric="accuracy")
console.on_begin()
for step in range(1, 41):
    console.on_step(step_taken(step, loss=1.0 / step))
    if step == 20:
        console.scored(1, 2)
        console.on_evaluation(evaluated(20, 0.5, {"loss": 0.1, "accuracy": 0.75}, best=0.75, best_step=20))
        print("from a library")
    time.sleep(0.03)
console.close()
print("the end")
Path(sys.argv[1]).touch()
"""


def start(done):
    """Start a training of a second or two in a terminal; return its process, and the file descriptor of the terminal."""
    terminal, inner = pty.openpty()
    command, env = [sys.executable, "-c", TRAIN, str(done)], environment(TERM="xterm", COLUMNS="90")
    process = subprocess.Popen(command, env=env, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    return process, terminal


def read(terminal, until=b"\0"):
    """Return what is written to a terminal, up to some words or its end."""
    shown = b""
    while until not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux: all processes in it have ended
            break
    return shown


def test_a_terminal_shows_lines_above_a_bar_and_no_bar_in_the_end(tmp_path):
    process, terminal = start(tmp_path / "trained")
    shown = read(terminal).decode()
    assert process.wait(60) == 0
    lines = [line.rpartition("\x1b[2K")[2] for line in shown.split("\r\n")]
    assert lines == [
        "step 20/40  epoch 0.50  eval  loss 0.100  accuracy 0.750  best so far",
        "from a library",
        "the end",
        "",
    ]
    assert "evaluating after step 20" in shown and "eval accuracy 0.750, the best" in shown and "left" in shown
    assert "\x1b[?25l" not in shown, "a hidden cursor would stay hidden if the process were killed"


def test_training_outlives_its_terminal(tmp_path):
    process, terminal = start(tmp_path / "trained")
    read(terminal, until=b"loss")
    os.close(terminal)  # from here on, writing to it fails with EIO
    assert process.wait(60) == 0 and (tmp_path / "trained").exists()
