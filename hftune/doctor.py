"""``python -m hftune.doctor [recipe=NAME ...]``: is this machine, or the whole group, fit to train? Trains nothing.

Alone it looks at the machine. Under ``accelerate launch`` or ``torchrun`` it joins the group as training would, compares the
processes and measures the network between them. Every finding says what, where, and what to do.
Exit codes: 0 fit (there may be notes); 1 something would fail; 2 the recipe cannot be trained.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from hftune import __version__
from hftune.build import load_datasets
from hftune.config import Recipe
from hftune.distributed.consistency import check_same, data_digests, fingerprint
from hftune.distributed.network import outward_interfaces, own_addresses, resolve
from hftune.distributed.preflight import check_writable
from hftune.distributed.process_info import ProcessInfo, check_environment
from hftune.distributed.session import Session
from hftune.errors import ConfigError
from hftune.launchers.rendezvous import PORT, owner_of
from hftune.run import fail, leave, outlive_readers
from hftune.strategies.data_parallel import DataParallel
from hftune.tracking.console import hide_progress_bars, print_any_character
from hftune.tracking.tracker import check_trackers

GIB = 2**30
OK, NOTICE, FAULT = "ok", "note", "FAULT"
HUB_TIMEOUT_S = 3.0
SKEW_S = 5.0
"""Clocks that differ by more than this mislead anyone who compares logs and file times."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    level: str = OK
    todo: str = ""

    def __str__(self) -> str:
        todo = f"\n{'':<25}-> {self.todo}" if self.todo else ""
        return f"  {self.level:<7}{self.what:<16}{self.found}{todo}"


# One machine


def examine_machine(output_dir: Path = Path("outputs")) -> Iterator[Finding]:
    """Check everything that training needs from this machine. A check that raises an error is itself a fault."""
    examinations: dict[str, Callable[[], Finding | Iterable[Finding]]] = {
        "machine": _machine,
        "Python": lambda: Finding("Python", f"{platform.python_version()}, hftune {__version__}"),
        "packages": _packages,
        "GPUs": _gpus,
        "collectives": _backends,
        "launcher": _launcher,
        "disk, outputs": lambda: _disk("disk, outputs", output_dir, "output_dir"),
        "disk, cache": _cache,
        "disk, tmp": lambda: _disk("disk, tmp", Path(tempfile.gettempdir()), "TMPDIR"),
        "shared memory": _shared_memory,
        "open files": _open_files,
        "network": _network,
        "port": _port,
        "Hub": _hub,
        "W&B": _wandb,
    }
    for what, examine in examinations.items():
        try:
            found = examine()
            yield from [found] if isinstance(found, Finding) else list(found)
        except Exception as error:  # the doctor runs because something is wrong, so it has to give an answer
            yield Finding(what, f"cannot be examined: {type(error).__name__}: {error}", FAULT)


def _machine() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB memory free"
    return Finding("machine", f"{socket.gethostname()}, {os.cpu_count()} CPU cores, {free}, {platform.platform(terse=True)}")


def _packages() -> Iterator[Finding]:
    """Compare the installed versions with the ranges that hftune requires."""
    fit, extras = [], []
    for requirement in map(Requirement, requires("hftune") or []):
        if requirement.marker is not None:
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            yield Finding("packages", f"{requirement.name} is missing", FAULT, f'pip install "{requirement}"')
            continue
        if requirement.specifier.contains(here, prereleases=True):
            (fit if requirement.name in SHOWN_PACKAGES else extras).append(f"{requirement.name} {here}")
        else:
            yield Finding("packages", f"{requirement.name} {here}", FAULT, f'pip install "{requirement}"')
    yield Finding("packages", f"{', '.join(fit)}; {len(extras)} more within range")


SHOWN_PACKAGES = ("torch", "accelerate", "transformers", "datasets")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if torch.accelerator.is_available():
            yield Finding("GPUs", f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}")
        elif shutil.which("nvidia-smi") and torch.version.cuda is None:
            yield Finding("GPUs", f"torch {torch.__version__} is built without CUDA", FAULT, "install the build for GPUs")
        elif shutil.which("nvidia-smi"):
            yield Finding("GPUs", "torch finds no GPU", FAULT, "check that the driver is running and new enough (nvidia-smi)")
        else:
            yield Finding("GPUs", "none: training runs on CPUs, over Gloo")
        return
    for index in range(torch.cuda.device_count()):
        properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        found = f"{index}: {properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, CUDA {torch.version.cuda}"
        busy = free < 0.8 * total
        yield Finding("GPUs", found, NOTICE if busy else OK, "another program is using its memory (nvidia-smi)" if busy else "")


def _backends() -> Finding:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    found = [name for name, there in (("Gloo", gloo), ("NCCL", nccl)) if there]
    if torch.cuda.is_available() and not nccl:
        return Finding("collectives", "NCCL is missing", FAULT, "install PyTorch's build for GPUs, on Linux")
    if nccl:
        found[-1] += f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_available() else ""
    return Finding("collectives", ", ".join(found) or "none", OK if found else FAULT)


def _launcher() -> Finding:
    if any(point.name == "hftune" for point in entry_points(group="torchrun.handlers")):
        return Finding("launcher", f"accelerate {version('accelerate')} finds rdzv_backend hftune")
    return Finding("launcher", "rdzv_backend hftune is not registered", FAULT, "reinstall hftune (2node.yaml needs it)")


def _cache() -> Iterable[Finding]:
    """Look at the folders of models and of prepared data, as the libraries choose them from HF_HOME and HOME."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [_disk("disk, cache", Path(folder), "HF_HOME") for folder in (HF_DATASETS_CACHE, HF_HUB_CACHE)]
    return {finding.level: finding for finding in found}.values()  # usually one finding covers both


def _disk(what: str, folder: Path, setting: str) -> Finding:
    there = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/"))
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(what, f"{folder} cannot be written ({there})", FAULT, f"set {setting} to a different folder")
    free = shutil.disk_usage(there).free / GIB
    todo = "a checkpoint is three times the model's size, and two are kept" if free < 10 else ""
    return Finding(what, f"{folder}: {free:.0f} GiB free", NOTICE if todo else OK, todo)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding("shared memory", "no /dev/shm here")
    size = shutil.disk_usage(folder).total / GIB
    todo = "train.num_workers and NCCL need it; in a container: --shm-size=8g" if size < 1 else ""
    return Finding("shared memory", f"/dev/shm of {size:.1f} GiB", NOTICE if todo else OK, todo)


def _open_files() -> Finding:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = math.inf if limit == resource.RLIM_INFINITY else limit
    found = "unlimited" if soft == math.inf else f"at most {soft:,}"
    world_size = ProcessInfo.from_environment().world_size
    if soft < (needed := files_needed(world_size)):
        what = f"{found}, and {world_size} processes need {needed:,} in the main machine's launcher"
        return Finding("open files", what, FAULT, "run ulimit -n 65536 before you start the launcher")
    return Finding("open files", found, NOTICE if soft < 1024 else OK, "ulimit -n 65536" if soft < 1024 else "")


def files_needed(num_processes: int) -> int:
    """Return how many open files the launcher that holds the store needs: two connections a process, and some of its own.

    A process that talks to all others over Gloo needs no more.
    """
    return 2 * num_processes + 64 if num_processes > 1 else 0


def _network() -> Finding:
    host, addresses = socket.gethostname(), own_addresses()
    try:
        means = resolve(host)
    except ConfigError:
        means = None
    if not outward_interfaces():
        return Finding("network", addresses, NOTICE, "no interface except loopback: this machine can only train alone")
    said = f"{addresses}; the name {host} resolves to {means or 'nothing'}"
    return Finding("network", said)


def _port() -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", PORT))
        except OSError as error:
            taken = f"{PORT}: {error.strerror}{owner_of(PORT)}"
            return Finding("port", taken, NOTICE, "the shipped configs use it; choose a different one with --main_process_port")
    return Finding("port", f"{PORT} is free; it has no password: open it, and ports above 32768, to the job's machines only")


def _hub() -> Finding:
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE

    address = urlsplit(ENDPOINT)
    port = address.port or {"http": 80}.get(address.scheme, 443)
    folder = Path(HF_HUB_CACHE)
    cached = len([*folder.glob("models--*"), *folder.glob("datasets--*")])
    here = f"{cached} models and data sets in the cache"
    if HF_HUB_OFFLINE:
        return Finding("Hub", f"offline (HF_HUB_OFFLINE); {here}")
    try:
        socket.create_connection((address.hostname, port), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        return Finding(
            "Hub",
            f"{address.hostname} cannot be reached ({why}); {here}",
            NOTICE,
            "only cached and local models can be used; set HF_HUB_OFFLINE=1",
        )
    return Finding("Hub", f"{address.hostname} can be reached; {here}")


def _wandb() -> Finding:
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled"):
        return Finding("W&B", mode)
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # noqa: PTH111 - Path's raises where there is no HOME
    has_key = "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
    todo = "" if has_key else "track.with=[wandb] needs `wandb login`, or WANDB_MODE=offline"
    return Finding("W&B", "key found" if has_key else "no key", OK if has_key else NOTICE, todo)


# The group


def examine_group(strategy: DataParallel, recipe: Recipe | None, datasets: Any, faults: Sequence[Finding]) -> list[Finding]:
    """Compare the processes and measure the network between them (collective); findings on the main process.

    Raises:
        ConfigError: on all processes, if one has different code, versions, recipe or data than the main process.
    """
    began = time.monotonic()
    own = fingerprint(recipe)
    if datasets is not None:
        own["data"] = data_digests(recipe.task, datasets)
    check_same(strategy, own)
    compared_s = time.monotonic() - began
    name = torch.cuda.get_device_name(strategy.device) if strategy.device.type == "cuda" else strategy.device.type
    me = {
        "rank": strategy.process_index,
        "machine": own["host"],
        "pid": os.getpid(),
        "device": name,
        "interface": os.environ.get("NCCL_SOCKET_IFNAME" if name != "cpu" else "GLOO_SOCKET_IFNAME", "its own choice"),
        "skew_s": clock_skew_s(strategy),
        "faults": [asdict(fault) for fault in faults],
    }
    rows = strategy.gather_to_main([me])
    latency_s, bandwidth = measure_all_reduce(strategy.device)
    if rows is None:
        return []
    found = [
        Finding(f"process {row['rank']}", f"{row['machine']}, pid {row['pid']}, {row['device']}, network {row['interface']}")
        for row in rows
    ]
    what = "code, versions" + (", recipe and data" if recipe is not None else "")
    found.append(Finding("consistency", f"the same {what} on all {len(rows)} processes, compared in {compared_s:.2f} s"))
    size = f"all-reduce: {1e6 * latency_s:,.0f} us for 4 bytes, {bandwidth / 1e9:.2f} GB/s for {BYTES // 2**20} MiB"
    found.append(Finding("network", f"{size} over {'NCCL' if name != 'cpu' else 'Gloo'}"))
    worst = max(rows, key=lambda row: abs(row["skew_s"]))
    skewed = abs(worst["skew_s"]) > SKEW_S
    clock = f"{worst['machine']} differs from {rows[0]['machine']} by {abs(worst['skew_s']):.3f} s"
    found.append(Finding("clocks", clock, NOTICE if skewed else OK, "start chrony or ntpd there" if skewed else ""))
    for row in rows:
        found += [Finding(**{**fault, "what": f"{row['machine']}: {fault['what']}"}) for fault in row["faults"]]
    return list({str(finding): finding for finding in found}.values())  # those of one machine once


BYTES = 16 * 2**20


def measure_all_reduce(device: torch.device, num_rounds: int = 20) -> tuple[float, float]:
    """Return the median latency of a small all-reduce (s) and the bus bandwidth of a large one (bytes/s). Collective.

    Source: NCCL tests, PERFORMANCE.md: bus bandwidth = 2 (n - 1) / n x bytes / time, the same for any number of processes.
    """

    def median_s(numbers: int) -> float:
        value, times = torch.zeros(numbers, device=device), []
        for _ in range(num_rounds + 2):
            began = time.perf_counter()
            dist.all_reduce(value)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])  # the first ones set up connections

    count = dist.get_world_size()
    return median_s(1), 2 * (count - 1) / count * BYTES / median_s(BYTES // 4)


def clock_skew_s(strategy: DataParallel, num_rounds: int = 5) -> float:
    """Return how far this process's clock is ahead of the main one's, to within half a round trip. Collective.

    Measured by the first process of each machine, one after the other; 0 for the others. Under NCCL each pair makes a
    communicator of its own, which takes a moment.

    Source: Cristian (1989), "Probabilistic clock synchronization": the fastest round trip counts.
    """
    best = (float("inf"), 0.0)
    first = [strategy.process_index] if ProcessInfo.from_environment().local_rank == 0 else []
    for rank in strategy.broadcast(strategy.gather_to_main(first)):
        if rank == 0:
            continue
        strategy.progress.stage(f"comparing the clocks with process {rank}")
        for _ in range(num_rounds):
            if strategy.process_index not in (0, rank):
                continue
            stamp = torch.zeros(1, dtype=torch.float64, device=strategy.device)
            if strategy.process_index == rank:
                sent = time.time()
                dist.send(stamp, 0)
                dist.recv(stamp, 0)
                back = time.time()
                best = min(best, (back - sent, (sent + back) / 2 - stamp.item()))
            else:
                dist.recv(stamp, rank)
                dist.send(stamp.fill_(time.time()), rank)
    return best[1] if strategy.process_index else 0.0


# The command


def main(argv: list[str] | None = None) -> int:
    """Examine, print, and return the exit code. Under a launcher every process calls it."""
    print_any_character()
    outlive_readers()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("--help", "-h"):
        print(__doc__)
        return 0
    hide_progress_bars()
    try:
        recipe = Recipe.from_argv(argv) if argv else None
        if recipe is not None:
            recipe.validate()
        check_environment()
        found = [*examine_machine(Path(recipe.output_dir) if recipe else Path("outputs"))]
        if ProcessInfo.from_environment().world_size > 1:
            return _join(recipe, found)
        if recipe is not None:
            with Session(recipe) as session:
                _check_output(recipe, session.info)
                load_datasets(recipe)
        return _report(found, "This machine")
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)


def _join(recipe: Recipe | None, findings: list[Finding]) -> int:
    with Session(recipe, dead_after_s=20.0, stall_after_s=60.0, compares_early=False) as session:
        _check_output(recipe, session.info)
        datasets = None if recipe is None else load_datasets(recipe)
        strategy = DataParallel(session.join(), None if recipe is None else recipe.task, session.progress)
        session.progress.stage("comparing with the other processes")
        faults = [finding for finding in findings if finding.level == FAULT]
        group = examine_group(strategy, recipe, datasets, faults)
        code = _report(group, "This group") if strategy.is_main else 0
        return strategy.broadcast(code)


def _check_output(recipe: Recipe | None, info: ProcessInfo) -> None:
    """On the main process: refuse an output folder that cannot be written, and trackers that cannot be reached."""
    if recipe is not None and info.is_main:
        check_writable(Path(recipe.output_dir))
        check_trackers(recipe)


def _report(found: Sequence[Finding], who: str) -> int:
    print(f"hftune doctor {__version__}", *found, sep="\n")
    num_faults = sum(finding.level == FAULT for finding in found)
    num_notices = sum(finding.level == NOTICE for finding in found)
    notes = f" ({num_notices} note{'s' if num_notices > 1 else ''})" if num_notices else ""
    faults = f"{num_faults} fault{'s' if num_faults > 1 else ''}"
    print(f"{who} {f'has {faults}' if num_faults else 'is fit to train'}{notes}.", flush=True)
    return 1 if num_faults else 0


if __name__ == "__main__":
    leave(main())
