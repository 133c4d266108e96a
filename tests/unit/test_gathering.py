"""Rows of an evaluation reach the main process and the disk piece by piece, and the watch sees it."""

import json
import multiprocessing
import time

import pytest
import torch

from hftune.distributed.collectives import gather_in_slices, host_group
from hftune.distributed.progress import Progress
from hftune.distributed.pulse import marked_while_moving
from hftune.tracking.jsonl import write_rows


def gather(rank, rows, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(rows))
    progress = Progress()
    found = [gather_in_slices(rows[rank], host_group(), at_once, progress) for at_once in (3, 100)]
    found.append(gather_in_slices([], None, 3, progress))
    (folder / f"{rank}.json").write_text(json.dumps([found, progress.marks]))
    torch.distributed.destroy_process_group()


def test_rows_arrive_in_process_order_in_slices_of_unequal_lists(tmp_path):
    rows = [["a", "b", "c", "d", "e", "f", "g"], ["h", "i"]]
    workers = [multiprocessing.get_context("fork").Process(target=gather, args=(rank, rows, tmp_path)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    whole = [*rows[0], *rows[1]]
    assert json.loads((tmp_path / "0.json").read_text()) == [[whole, whole, []], 4]  # three slices, one, none
    assert json.loads((tmp_path / "1.json").read_text()) == [[None, None, None], 4]


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


def busy(seconds):
    until, total = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        total += sum(number * number for number in range(100))
    return total


@pytest.mark.parametrize(("work", "moves"), [(busy, True), (time.sleep, False)])
def test_code_in_plain_python_gives_signs_of_life_and_one_call_that_hangs_does_not(work, moves):
    progress = Progress()
    with marked_while_moving(progress, every_s=0.02):
        work(0.5)
    assert (progress.marks > 3) == moves
    after = progress.marks
    time.sleep(0.1)
    assert progress.marks == after
