"""Workers that live on, and the thread that is one step ahead. That results stay the same with workers is in parity."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import traceback
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hftune import Recipe, train
from hftune.data.augmentation import Augmented
from hftune.distributed.garbage import frozen_garbage
from hftune.distributed.progress import Progress
from hftune.strategies.base import StepReport, Strategy
from hftune.strategies.loading import Loader, read_ahead
from tests.support.runs import Run
from tests.support.tasks import Tagging

TAGGING = str(Path(__file__).parents[1] / "support" / "tagging.yaml")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def note_thread(item: int, names: dict[int, str]) -> int:
    names[item] = threading.current_thread().name
    return item


def test_a_thread_takes_the_next_item_and_no_more():
    names: dict[int, str] = {}
    with closing(read_ahead(note_thread(item, names) for item in range(5))) as items:
        assert next(items) == 0
        assert next(items) == 1  # so 1 was taken, and 2 may have been
        assert {*names} <= {0, 1, 2}
        assert names[0] == threading.current_thread().name and names[1] == "read ahead"
        assert [*items] == [2, 3, 4]
    assert threads() == []


def test_the_thread_ends_where_the_caller_stops_early():
    with closing(read_ahead(iter(range(5)))) as items:
        assert next(items) == 0 and len(threads()) == 1
    assert threads() == []


def test_what_fails_in_the_thread_is_raised_where_the_item_is_taken():
    def items():
        yield 0
        yield 1
        raise KeyError("sample 7")

    with closing(read_ahead(items())) as taken:
        assert [next(taken), next(taken)] == [0, 1]
        with pytest.raises(KeyError, match="sample 7") as caught:
            next(taken)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "items"
    assert threads() == []


def test_items_that_draw_from_the_generator_of_dropout_are_taken_by_the_caller():
    names: dict[int, str] = {}
    items = read_ahead(note_thread(item, names) for item in range(3) if torch.rand(()) >= 0)
    assert [*items] == [0, 1, 2]
    assert {*names.values()} == {threading.current_thread().name}


@dataclass
class Jitter(Tagging):
    """Shifts each sample by a number of its own in each epoch, and says which process did so."""

    def augment(self, example: Any, rng: np.random.RandomState) -> Any:
        return os.getpid(), example + rng.rand()


def test_workers_outlive_an_epoch_and_hear_of_the_next_one():
    dataset = Augmented(range(8), Jitter(), seed=3, epoch=0)
    loader = Loader(dataset, list, num_workers=2, pin_memory=False)
    before = torch.get_rng_state()
    try:
        read = {epoch: [*loader.read([[0, 1], [5], [6, 7]], epoch)] for epoch in (0, 1, 0)}
        next(loader.read([[number] for number in range(8)], epoch=1))  # ended early, as by a stop
        again = [*loader.read([[0, 1]], epoch=1)]
    finally:
        loader.close()
    workers = {pid for batches in [*read.values(), again] for batch in batches for pid, _ in batch}
    assert len(workers) == 2 and os.getpid() not in workers
    assert torch.equal(before, torch.get_rng_state())

    def values(batches):
        return [[value for _, value in batch] for batch in batches]

    for epoch, batches in read.items():
        alone = Augmented(range(8), Jitter(), seed=3, epoch=epoch)
        assert values(batches) == [[alone[sample][1] for sample in samples] for samples in ([0, 1], [5], [6, 7])]
    assert values(read[0]) != values(read[1])
    assert values(again) == values(read[1])[:1]


def trained(folder: Path, *words: str) -> Run:
    recipe = Recipe.load(TAGGING, "task.dropout=0.2", "train.epochs=2", f"output_dir={folder}", *words)
    return Run(train(recipe).output_dir)


@pytest.fixture
def nothing_frozen(monkeypatch):
    """As in a program of a user's; tests/conftest.py freezes, and tests/support/worker.py spares processes to count."""
    monkeypatch.setattr("hftune.distributed.garbage.gc", gc)
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_run_that_reads_ahead_computes_the_same_and_the_collector_is_as_before(tmp_path, monkeypatch, nothing_frozen):
    original, frozen, taken = Strategy.report, [], count(1)

    def report(self: Strategy, grad_norm: torch.Tensor) -> StepReport:
        if next(taken) in (1, 2, 10):  # of ten; counting takes longer than a step
            frozen.append(gc.get_freeze_count() > 0)
        return original(self, grad_norm)

    monkeypatch.setattr(Strategy, "report", report)
    expected = trained(tmp_path / "in-order")
    assert frozen == [False, True, True] and next(taken) == 11
    assert gc.isenabled() and gc.get_freeze_count() == 0
    monkeypatch.setattr(Strategy, "report", original)  # counting takes longer than a step
    monkeypatch.setattr(Strategy, "reads_ahead", True)
    for name, words in {"ahead": (), "workers": ("train.num_workers=1",)}.items():
        run = trained(tmp_path / name, *words)
        assert run.logged("train/loss") == expected.logged("train/loss")
        assert run.logged("train/grad_norm") == expected.logged("train/grad_norm")
        assert threads() == multiprocessing.active_children() == []


class PretendStream:
    """Notes what a GPU would be told, and in which order. A thread tells it to copy while the main one tells it to wait."""

    def __init__(self):
        self.told: list[str] = []
        self._lock = threading.Lock()

    def current(self) -> AbstractContextManager:
        return nullcontext()

    def copy(self, batches: list[Any]) -> tuple[list[Any], int]:
        return [{name: value.clone() for name, value in batch.items()} for batch in batches], self._note("copy")

    def await_copies(self, copied: int) -> None:
        assert self.told[copied - 1] == "copy"
        self._note("await copies")

    def await_computed(self) -> None:
        self._note("await computed")

    def _note(self, what: str) -> int:
        with self._lock:
            self.told.append(what)
            return len(self.told)


def test_each_step_awaits_its_copies_and_each_copy_the_memory_it_may_get(tmp_path, monkeypatch):
    expected, stream = trained(tmp_path / "in-order", "train.epochs=1"), PretendStream()
    monkeypatch.setattr(Strategy, "reads_ahead", True)
    monkeypatch.setattr(Strategy, "_side_stream", lambda self: stream)
    run = trained(tmp_path / "ahead", "train.epochs=1")
    assert run.logged("train/loss") == expected.logged("train/loss")
    steps = len(run.logged("train/loss"))
    assert [stream.told.count(what) for what in ("copy", "await copies")] == [steps, steps]
    assert stream.told[:2] == ["await computed", "copy"]  # the first step; from here on the thread may come in between
    for number, place in enumerate([place for place, what in enumerate(stream.told) if what == "copy"]):
        # A step's copies begin after the step before the last one: that one's memory may be free.
        assert stream.told[:place].count("await computed") >= max(number, 1)


class Unreadable(list):
    """Samples of which one cannot be read any more once training has begun."""

    is_training = False

    def __getitem__(self, sample: int) -> Any:
        if sample == 11 and self.is_training:
            raise OSError("sample 11 is gone")
        return super().__getitem__(sample)


@pytest.mark.parametrize("ahead", (False, True))
def test_a_sample_that_cannot_be_read_fails_in_its_own_step_and_is_named(tmp_path, monkeypatch, ahead):
    taken: list[Progress] = []
    original, datasets = Strategy.forward_backward, Tagging.datasets

    def forward_backward(self: Strategy, *arguments: Any, **options: Any) -> None:
        taken.append(self.progress)
        Unreadable.is_training = True
        original(self, *arguments, **options)

    monkeypatch.setattr(Unreadable, "is_training", False)
    monkeypatch.setattr(Strategy, "reads_ahead", ahead)
    monkeypatch.setattr(Strategy, "forward_backward", forward_backward)
    monkeypatch.setattr(Tagging, "datasets", lambda self: {**datasets(self), "train": Unreadable(datasets(self)["train"])})
    with pytest.raises(OSError, match="sample 11 is gone"):
        trained(tmp_path / "out")
    assert len(taken) > 1
    assert taken[-1].current_stage == f"step {len(taken) + 1}"
    assert 11 in taken[-1].current_samples
    assert threads() == []


def test_objects_that_a_program_has_frozen_stay_so_and_are_counted_once(monkeypatch):
    """Counting goes from object to object: 0.1 s for a million, which each step would take."""
    monkeypatch.setattr("hftune.distributed.garbage.gc", gc)
    counted = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 10**6)
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("froze"))
    with frozen_garbage() as freeze:
        freeze()
        freeze()
    assert len(counted) == 1
