"""What training uses of its machines: processor, memory, GPUs, disk. Shown, never acted on; independent of who shows it.

A thread of its own samples once a second, because a driver or a file system that hangs must not hold up the signs of life.
These carry the last sample to the main process, which thus knows all machines without a message more.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from hftune.distributed.process_info import ProcessInfo

FIRST_S, EVERY_S = 0.1, 1.0
"""Until the first sample, and between two."""
GIB = 2**30

Sample = dict[str, float]
"""Numbers by name, such as ``memory_gib``."""


class Usage:
    """A context in which this process's use of its machine is sampled.

    The first process of a machine samples what concerns the whole machine.

    Args:
        device: of this process, a torch.device.
        folder: whose file system's free space the main process samples.
    """

    def __init__(self, here: ProcessInfo, device: Any, folder: Path):
        self.last: Sample = {}
        self._over = threading.Event()
        process, gpu = psutil.Process(), f"gpu{here.local_rank}"
        self._sources: list[Callable[[], Sample]] = [
            lambda: {"process_memory_gib": process.memory_info().rss / GIB}  # without that of its data loader's
        ]
        if here.local_rank == 0:
            self._sources += [
                lambda: {"cpu_percent": psutil.cpu_percent()},  # of the whole machine, since the last call
                lambda: {"memory_gib": ((memory := psutil.virtual_memory()).total - memory.available) / GIB},
            ]
        if here.is_main:
            self._sources.append(lambda: {"disk_free_gib": shutil.disk_usage(folder).free / GIB})
        if device.type == "cuda":
            import torch

            cuda = torch.cuda  # its load and power fail without nvidia-ml-py
            self._sources += [
                lambda: {f"{gpu}_memory_gib": cuda.memory_reserved(device) / GIB},
                lambda: {f"{gpu}_peak_gib": cuda.max_memory_allocated(device) / GIB},  # since StepTimes.take
                lambda: {f"{gpu}_percent": cuda.utilization(device)},
                lambda: {f"{gpu}_power_w": cuda.power_draw(device) / 1000},
            ]

    def __enter__(self) -> Usage:
        threading.Thread(target=self._run, name="hftune usage", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()  # without waiting for it: it may hang

    def _run(self) -> None:
        psutil.cpu_percent()  # from here on it tells the mean since its last call
        pause_s = FIRST_S
        while not self._over.wait(pause_s):
            self.last, pause_s = self.sample(), EVERY_S

    def sample(self) -> Sample:
        """Ask all sources; one that fails is never asked again."""
        sample: Sample = {}
        for source in [*self._sources]:
            try:
                found = source()
                sample |= {
                    name: max(value, self.last.get(name, 0)) if "_peak_" in name else value for name, value in found.items()
                }
            except Exception:  # of any driver; training has nothing to do with it
                self._sources.remove(source)
        return sample


def by_host(samples: Mapping[int, Sample], first_ranks: Mapping[int, int]) -> dict[str, float]:
    """Return what is logged of all machines, numbered in the order of their ranks: ``perf/host0/memory_gib``.

    Args:
        samples: by rank.
        first_ranks: the first rank on the machine of each rank.
    """
    numbers: dict[str, float] = {}
    hosts = {first: host for host, first in enumerate(sorted({*first_ranks.values()}))}
    for rank, sample in sorted(samples.items()):
        for name, value in sample.items():
            key = f"perf/host{hosts[first_ranks[rank]]}/{name}"
            numbers[key] = numbers.get(key, 0.0) + value  # only process_memory_gib comes from several processes
    return numbers
