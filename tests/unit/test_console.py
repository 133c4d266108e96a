"""What a terminal shows, and what a log file holds."""

import io
import os
import re
import sys
import threading

import pytest

from hftune.tracking.console import Console, duration, fold, one_line, short, table
from tests.support.events import evaluated, logged, step_taken


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def screen(self):
        """Its lines, of which the last one may have been erased and drawn many times."""
        lines = [line.rpartition("\r\x1b[2K")[2] for line in self.getvalue().split("\n")]
        return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]


@pytest.fixture
def open_terminal(monkeypatch):
    """Puts a terminal in place of stdout and stderr. Call it in the test: pytest sets them again after the fixtures."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    # What rich took for the environment when it was imported; some library may have put another one in place by now.
    monkeypatch.setattr("rich.console.Console._environ", os.environ)

    def open_it(columns=100, term="xterm-256color"):
        stream = FakeTerminal()
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", str(columns))
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        return stream

    return open_it


@pytest.fixture
def seconds(monkeypatch):
    """The clock: a list whose only number the test changes."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def step_values(loss, lr=1e-4, speed=123.4):
    return {"train/loss": loss, "train/loss_step": 9.0, "train/lr": lr, "train/grad_norm": 1.5, "perf/samples_per_s": speed}


def train(console, seconds):
    """Twelve steps of two seconds, with evaluations of which the second is worse."""
    for step in range(1, 13):
        seconds[0] += 2
        console.on_step(step_taken(step, loss=2.0 / step))
        if step in (1, 6, 12):
            console.on_log(logged(step, step / 6, step_values(2.0 / step, lr=1e-3 / step**3, speed=1000.0 * step)))
        if step in (6, 12):
            accuracy = {6: 0.30000000000000004, 12: 0.25}[step]
            metrics = {"loss": 2.0 / step, "accuracy": accuracy, "confusion_matrix": [[1, 2]], "psnr": None}
            console.on_evaluation(evaluated(step, step / 6, metrics, best=0.3, best_step=6))


def test_a_log_has_aligned_columns_with_few_digits_and_marks_the_best(capsys, seconds):
    train(Console(True, 12, metric="accuracy"), seconds)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/12   epoch 0.17  loss 2.000  lr 0.00100   grad_norm 1.500  samples/s 1,000",
        "step 6/12   epoch 1.00  loss 0.333  lr 4.63e-06  grad_norm 1.500  samples/s 6,000  0:00:12 left",
        "step 6/12   epoch 1.00  eval  loss 0.333  accuracy 0.300  best so far",
        "step 12/12  epoch 2.00  loss 0.167  lr 5.79e-07  grad_norm 1.500  samples/s 12,000",
        "step 12/12  epoch 2.00  eval  loss 0.167  accuracy 0.250  best 0.300 at step 6",
    ]


def test_time_left_is_that_of_this_process_after_a_resume(capsys, seconds):
    console = Console(True, 100, step=90)
    for step in (91, 92):
        seconds[0] += 60 if step == 91 else 3  # compiling, say
        console.on_step(step_taken(step, loss=1.0))
    console.on_log(logged(92, 1.0, step_values(1.0)))
    assert capsys.readouterr().out.endswith("  0:00:24 left\n")


def test_the_test_split_has_its_own_line_and_no_best(capsys):
    Console(True, 5).on_evaluation(evaluated(5, 1.0, {"loss": 0.5, "accuracy": 1.0}))
    assert capsys.readouterr().out == "step 5/5  epoch 1.00  test  loss 0.500  accuracy 1.000\n"


def test_metrics_of_ones_own_may_have_a_slash_unlike_those_of_eval_sets(capsys):
    Console(True, 5, sets={"short": "x.jsonl"}).on_evaluation(
        evaluated(5, 1.0, {"loss": 0.5, "short/loss": 1.0, "group/recall": 0.25})
    )
    assert capsys.readouterr().out == "step 5/5  epoch 1.00  test  loss 0.500  group/recall 0.250\n"


def test_other_processes_say_nothing(capsys, open_terminal, seconds):
    terminal = open_terminal()
    console = Console(False, 12)
    console.on_begin()
    train(console, seconds)
    console.scored(1, 2)
    console.close()
    assert terminal.getvalue() == "" == capsys.readouterr().out


def test_a_terminal_shows_evaluations_above_a_bar_that_shows_the_rest(open_terminal, seconds):
    terminal = open_terminal()
    console = Console(True, 12, metric="accuracy")
    console.on_begin()
    train(console, seconds)
    *lines, bar = terminal.screen
    assert lines == [
        "step 6/12   epoch 1.00  eval  loss 0.333  accuracy 0.300  best so far",
        "step 12/12  epoch 2.00  eval  loss 0.167  accuracy 0.250  best 0.300 at step 6",
    ]
    assert re.fullmatch(r"step 12/12  ━+  loss 0.167  eval accuracy 0.250, best 0.300  12,000 samples/s *", bar)
    console.close()
    assert terminal.screen == [*lines, ""] and sys.stdout is terminal is sys.stderr


def test_bar_shows_time_left_and_what_an_evaluation_has_done(open_terminal, seconds):
    terminal = open_terminal()
    console = Console(True, 10)
    console.on_begin()
    for step in (1, 2, 3):
        seconds[0] += 2
        console.on_step(step_taken(step, loss=1.0))
    assert "  loss 1.000  0:00:14 left" in terminal.screen[-1]
    drawn = []
    for count in range(1, 5):
        seconds[0] += 1
        console.scored(count, 4)
        drawn.append(re.sub(" +", " ", terminal.screen[-1].replace("╸", "━")))
    assert [line.partition(" ━")[0] for line in drawn] == ["evaluating after step 3"] * 3 + ["computing metrics after step 3"]
    assert "0:00:18 left" in drawn[0]
    console.close()


def test_bar_is_drawn_four_times_a_second_at_most(open_terminal, seconds):
    terminal = open_terminal()
    console = Console(True, 1000)
    console.on_begin()
    for step in range(1, 1001):
        seconds[0] += 0.001
        console.on_step(step_taken(step, loss=1.0))
    assert terminal.getvalue().count("\x1b[2K") <= 6
    console.close()


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 80, 120, 300])
def test_bar_fits_into_any_terminal(columns, open_terminal, seconds):
    terminal = open_terminal(columns)
    console = Console(True, 12, metric="accuracy")
    console.on_begin()
    train(console, seconds)
    bar = terminal.screen[-1]
    assert (
        len(bar) <= max(columns - 1, 1) and ("loss 0.167" in bar) == (columns >= 40) and ("samples/s" in bar) == (columns > 100)
    )
    assert all(len(line) <= columns for line in terminal.screen[:-1]) or columns < 60
    console.close()


def test_what_others_print_appears_above_the_bar_as_it_is(open_terminal, seconds):
    terminal = open_terminal()
    console = Console(True, 10)
    console.on_begin()
    print("data with [bold]brackets[/] :smile: 北京")
    print("half a line, ", end="", flush=True)
    seconds[0] += 1
    console.on_step(step_taken(1, loss=1.0))  # would erase the half
    print("the rest", file=sys.stderr)
    sys.stderr.writelines(["one\n", "two\n"])
    assert terminal.screen[:-1] == ["data with [bold]brackets[/] :smile: 北京", "half a line, the rest", "one", "two"]
    assert terminal.screen[-1].startswith("step 1/10  ")
    console.close()


def test_only_a_terminal_is_given_the_bar(open_terminal, seconds, monkeypatch):
    terminal = open_terminal()
    log = io.StringIO()
    monkeypatch.setattr(sys, "stdout", log)  # hftune train ... > log
    console = Console(True, 12, metric="accuracy")
    console.on_begin()
    train(console, seconds)
    console.close()
    assert "\x1b" not in log.getvalue() and log.getvalue().count("eval") == 2
    assert terminal.screen == [""]


@pytest.mark.parametrize("variable", ["TERM", "NO_COLOR"])
def test_terminals_without_colours_or_cursor_are_respected(variable, open_terminal, seconds, monkeypatch):
    terminal = open_terminal(term="dumb" if variable == "TERM" else "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(True, 12, metric="accuracy")
    console.on_begin()
    train(console, seconds)
    console.close()
    assert "\x1b" not in terminal.getvalue().replace("\x1b[2K", "" if variable == "NO_COLOR" else "?")
    assert ("0:00:12 left" in terminal.getvalue()) and ("samples/s 6,000" in terminal.getvalue()) == (variable == "TERM")


def test_worker_forked_while_the_bar_was_drawn_can_print(open_terminal, monkeypatch):
    terminal = open_terminal()
    console = Console(True, 10)
    console.on_begin()
    locked, done = threading.Event(), threading.Event()

    def hold():
        with console._bar._lock:
            locked.set()
            done.wait(20)

    (thread := threading.Thread(target=hold)).start()
    locked.wait(20)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    (writer := threading.Thread(target=print, args=["from a worker"], daemon=True)).start()
    writer.join(20)
    done.set()
    thread.join()
    assert not writer.is_alive() and "from a worker\n" in terminal.getvalue()
    monkeypatch.undo()


def test_closing_twice_or_from_another_thread_leaves_what_others_have_set(open_terminal):
    terminal = open_terminal()
    console = Console(True, 10)
    console.on_begin()
    kept = sys.stdout
    (thread := threading.Thread(target=console.close)).start()
    thread.join()
    console.close()
    print("through the stream that someone kept", file=kept)
    assert terminal.screen == ["through the stream that someone kept", ""]


def test_samples_fit_into_the_terminal(open_terminal):
    terminal = open_terminal(40)
    console = Console(True, 10)
    console.on_evaluation(evaluated(1, 0.1, {}, samples=[{"title": "北京大学的报告" * 10, "rouge": 0.30000000000000004}, {}]))
    assert terminal.screen[1:] == ["  title  " + "北京大学的报告" * 2 + "北…", "  rouge  0.300", "", ""]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.30000000000000004, "0.300"),
        (0.0, "0"),
        (1.0, "1.000"),
        (-0.5, "-0.500"),
        (33.3149, "33.31"),
        (109.31, "109.3"),
        (1234.5, "1,234"),
        (123456, "123,456"),
        (4.2e7, "4.20e+07"),
        (0.01234567, "0.0123"),
        (0.0012, "0.00120"),
        (2.4e-5, "2.40e-05"),
        (7, "7"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_have_few_digits_and_like_widths(value, shown):
    assert short(value) == shown


def test_times_are_readable():
    assert [duration(seconds) for seconds in (0.4, 133, 3 * 3600, 90000)] == ["0:00:00", "0:02:13", "3:00:00", "1 day, 1:00:00"]


def test_cells_are_folded_between_names_and_values_of_different_metrics():
    cells = ["step 1/2", "eval", "loss 0.500", "", "accuracy 0.300", "best so far"]
    assert fold(cells, 100) == "step 1/2  eval  loss 0.500  accuracy 0.300  best so far"
    assert fold(cells, 30) == "step 1/2  eval  loss 0.500\n    accuracy 0.300\n    best so far"
    assert fold(cells, 5) == "step 1/2\n    eval\n    loss 0.500\n    accuracy 0.300\n    best so far"


def test_second_column_of_a_table_is_wrapped_but_paths_stay_whole():
    path = "outputs/a-long-name-of-a-folder/model"
    assert table({"labels": "bad: 1,500, good: 2,500", "model": path}, 30) == "\n".join(
        ["  labels  bad: 1,500, good:", "          2,500", f"  model   {path}"]
    )
    assert table({"labels": "bad: 1,500, good: 2,500"}) == "  labels  bad: 1,500, good: 2,500"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("", 10, ""),
        ("a title", 10, "a title"),
        ("two\nlines  and\ttabs", 40, "two lines and tabs"),
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghijk", 10, "abcdefghi…"),
        ("北京大学的", 10, "北京大学的"),
        ("北京大学的报告", 10, "北京大学…"),
        ("a北京大学的", 10, "a北京大学…"),
    ],
)
def test_texts_are_fitted_into_columns_of_which_chinese_characters_take_two(text, width, shown):
    assert one_line(text, width) == shown
