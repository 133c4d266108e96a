"""How batches get from a data set to the device: workers that live on, and a thread that is one step ahead.

Independent of steps, processes and what is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from hftune.data.augmentation import Augmented

Item = TypeVar("Item")
CLOSING_S = 10.0
"""How long to wait for a thread that is no longer needed. One that hangs, in a file system, ends with the process."""


class Loader:
    """Collates lists of samples of one data set, as often as it is asked to.

    Workers start at the first ``read``, and wait for the next one: another epoch, or another evaluation.
    """

    def __init__(self, dataset: Any, collate: Callable[[list], dict[str, Tensor]], num_workers: int, pin_memory: bool):
        self.dataset, self.num_workers = dataset, num_workers
        self._lists = _Lists()
        self._loader = DataLoader(
            _ByLists(dataset),
            batch_sampler=self._lists,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # seeds the workers; by default the numbers come from the generator of dropout
        )

    def read(self, lists: Iterable[list[int]], epoch: int = 0) -> Iterator[dict[str, Tensor]]:
        """Return one batch for each list of sample numbers. With workers, this ends the iterator of the last call.

        Args:
            epoch: what the samples are augmented for.
        """
        self._lists.asked = ((epoch, samples) for samples in lists)
        return iter(self._loader)

    def close(self) -> None:
        """End the workers. torch 2.13 has no other way: they may outlive the loader, in the traceback of a failure."""
        if self._loader._iterator is not None:
            self._loader._iterator._shutdown_workers()
            self._loader._iterator = None


class _Lists:
    """What the DataLoader takes for its batch sampler: fed anew for each pass."""

    asked: Iterable[tuple[int, list[int]]] = ()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return iter(self.asked)


class _ByLists:
    """A data set as workers see it. They keep their copy of it, so the epoch comes with each list of samples."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitems__(self, asked: tuple[int, list[int]]) -> list:
        epoch, samples = asked
        if isinstance(self.dataset, Augmented):
            self.dataset.epoch = epoch
        get_many = getattr(self.dataset, "__getitems__", None)
        return get_many(samples) if get_many else [self.dataset[sample] for sample in samples]


def read_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Take items of an iterator in a thread: the next one, and no more, while the caller uses the last one.

    The caller's thread takes the first item. If that draws from torch's generator, it takes all of them: a thread would draw
    in the middle of dropout. An exception is raised where the item is taken, with its traceback. Close the iterator to end the
    thread.
    """
    before = torch.get_rng_state()
    item = [*islice(items, 1)]
    if not torch.equal(before, torch.get_rng_state()):
        yield from chain(item, items)
        return
    asked: SimpleQueue[bool] = SimpleQueue()
    taken: SimpleQueue[tuple[list[Item], BaseException | None]] = SimpleQueue()

    def take_when_asked() -> None:
        while asked.get():
            try:
                taken.put(([*islice(items, 1)], None))
            except BaseException as error:  # it belongs to the thread that waits
                taken.put(([], error))

    # A daemon, so that an iterator that hangs cannot keep the process from ending.
    thread = threading.Thread(target=take_when_asked, name="read ahead", daemon=True)
    thread.start()
    try:
        while item:
            asked.put(True)
            yield item.pop()
            item, error = taken.get()
            if error is not None:
                raise error
    finally:
        asked.put(False)
        thread.join(CLOSING_S)


class SideStream:
    """Copies batches to a GPU while it computes something else."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager:
        """Return a context in which memory is pinned for this GPU, and copied on this stream. Of one thread."""
        torch.cuda.set_device(self.stream.device_index)  # a new thread begins with GPU 0, and would leave a context there
        return torch.cuda.stream(self.stream)

    def copy(self, batches: Sequence[Any]) -> tuple[list[Any], torch.cuda.Event]:
        """Start to copy, in the context; return the copies, and the event after which they are complete."""
        return [send_to_device(batch, self.device, non_blocking=True) for batch in batches], self.stream.record_event()

    def await_copies(self, copied: torch.cuda.Event) -> None:
        """Let what is computed from now on wait for copies."""
        torch.cuda.current_stream(self.device).wait_event(copied)

    def await_computed(self) -> None:
        """Let copies that start from now on wait for what is being computed: they may get the memory of its batch."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
