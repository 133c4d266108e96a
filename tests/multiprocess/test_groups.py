"""What small groups of processes do together: examine themselves, and gather rows."""

import json
import multiprocessing
from types import SimpleNamespace

import torch

from hftune.distributed.collectives import Collectives
from tests.support.runs import SMALL, Command


def test_a_group_is_examined():
    """That the doctor joins what a launcher has started is seen on two machines."""
    command = Command(2, module="hftune.doctor")
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert "the same code, versions on all 2 processes" in out
    assert out.endswith("This group is fit to train.\n")


def test_a_group_that_a_failed_test_left_behind_does_not_fail_the_next_test(tmp_path):
    endless = Command(1, "recipe=yelp_demo", *SMALL, "train.epochs=100000", f"output_dir={tmp_path}/endless")
    after = Command(1, "doctor", "--help", module="hftune.cli")
    assert after.returncode == 0, after.communicate()
    assert endless.returncode == -9


def gather(rank, rows, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(rows))
    group = Collectives(SimpleNamespace(process_index=rank, num_processes=len(rows), device=torch.device("cpu")))
    found = [group.gather_to_main(some, at_once) for some, at_once in ((rows[rank], 3), (rows[rank], 100), ([], 3))]
    (folder / f"{rank}.json").write_text(json.dumps([found, group.progress.marks]))
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
