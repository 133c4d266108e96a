"""A pytest plugin that notes the CPU seconds of each test, with those of the processes that it starts; and a table of them.

    CPU_SECONDS=/tmp/cpu.tsv python -m pytest -p tests.support.cpu_seconds -n 2 --dist loadfile
    python -m tests.support.cpu_seconds /tmp/cpu.tsv

CPU seconds and not durations, because they hardly change when the machine is busy. Where control groups may be made (as root),
each pytest process gets one: that counts every process started in it, whatever became of its parent. Elsewhere killed
launchers and their processes are missing. The time to start and to import test modules is the row "collection".
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

CONTROLLER = Path("/sys/fs/cgroup/cpuacct")


@cache
def control_group() -> Path | None:
    """Enter a control group of our own, and return it; None where that is not allowed."""
    group = CONTROLLER / f"hftune-tests-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


def tree_seconds() -> float:
    """Return the CPU seconds of this process, its living descendants, and all those that these have waited for."""
    if (group := control_group()) is not None:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    total = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of its children
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


def pytest_configure() -> None:
    tree_seconds()


def note(cpu_s: float, wall_s: float, test: str) -> None:
    with Path(os.environ["CPU_SECONDS"]).open("a") as file:
        file.write(f"{cpu_s:.2f}\t{wall_s:.2f}\t{test}\n")


def pytest_collection_finish() -> None:
    note(tree_seconds(), 0.0, "collection")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    cpu_s, wall_s = tree_seconds(), time.monotonic()
    try:
        return (yield)
    finally:
        note(tree_seconds() - cpu_s, time.monotonic() - wall_s, item.nodeid)


def main(path: str) -> None:
    """Print the sums of each file, the largest first."""
    cpu_s, wall_s = Counter[str](), Counter[str]()
    for line in Path(path).read_text().splitlines():
        cpu, wall, test = line.split("\t")
        file = test.partition("::")[0]
        cpu_s[file] += float(cpu)
        wall_s[file] += float(wall)
    for file, seconds in cpu_s.most_common():
        print(f"{seconds:7.1f} s CPU {wall_s[file]:7.1f} s   {file}")
    print(f"{sum(cpu_s.values()):7.1f} s CPU {sum(wall_s.values()):7.1f} s   in all")


if __name__ == "__main__":
    main(sys.argv[1])
