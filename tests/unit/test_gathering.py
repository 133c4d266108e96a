"""Rows of an evaluation reach the main process and the disk piece by piece, and the watch sees it."""

import json
import threading
import time

from hftune.distributed.progress import Progress, marked_while_moving
from hftune.tracking import start_facts
from hftune.tracking.jsonl import write_rows


def test_predictions_are_written_line_by_line_with_a_mark_each_thousand(tmp_path):
    progress, asked = Progress(), []

    class Rows(list):
        def __iter__(self):
            for row in super().__iter__():
                asked.append((tmp_path / ".predictions.jsonl.writing").exists())
                yield row

    rows = Rows({"text": "é", "n": n} for n in range(3500))
    write_rows(tmp_path / "predictions.jsonl", rows, progress.tick)
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3500 and json.loads(lines[7]) == {"index": 7, "text": "é", "n": 7}
    assert progress.marks == 4 and all(asked[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]


def test_code_in_plain_python_gives_signs_of_life():
    progress, until = Progress(), time.monotonic() + 60
    with marked_while_moving(progress, every_s=0.02):
        while progress.marks <= 3 and time.monotonic() < until:
            sum(number * number for number in range(100))
    after = progress.marks
    assert after > 3
    time.sleep(0.1)
    assert progress.marks == after


def test_one_call_that_hangs_gives_no_signs_of_life():
    progress = Progress()
    with marked_while_moving(progress, every_s=0.02):
        time.sleep(0.3)
    assert progress.marks <= 2  # on the way into the call


def test_one_pulse_is_enough_while_the_rows_of_the_training_data_are_hashed(tmp_path, monkeypatch):
    pulses = []

    def hashes(dataset, digest):
        pulses.extend(thread for thread in threading.enumerate() if thread.name == "pulse")

    monkeypatch.setattr(start_facts, "cached_row_hashes", hashes)
    with marked_while_moving(progress := Progress()):  # as whatever tells callbacks of the beginning does
        start_facts.keep_rows(tmp_path, [], "digest", progress)
    assert len(pulses) == 1
