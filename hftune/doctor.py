"""``python -m hftune.doctor [recipe=NAME ...]``: is this machine, or the whole group, fit to train? Trains nothing.

Alone it looks at the machine. Under ``accelerate launch`` or ``torchrun`` it joins the group as training would, and compares
the processes. Every finding says what, where, and what to do.
Exit codes: 0 fit (there may be notes); 1 something would fail; 2 the recipe cannot be trained.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from hftune import __version__
from hftune.build import load_datasets
from hftune.checkpoints.objects import check_bucket
from hftune.config import Recipe
from hftune.distributed.consistency import check_same, data_digests, fingerprint
from hftune.distributed.network import PORT, outward_interfaces, own_addresses, resolve
from hftune.distributed.preflight import check_writable
from hftune.distributed.process_info import ProcessInfo, check_environment
from hftune.distributed.session import Session
from hftune.errors import ConfigError, first_line
from hftune.launchers.rendezvous import owner_of
from hftune.run import fail, leave, outlive_readers
from hftune.strategies.data_parallel import DataParallel
from hftune.tracking.console import hide_progress_bars, print_any_character
from hftune.tracking.tracker import check_trackers

GIB = 2**30
OK, NOTICE, FAULT = "ok", "note", "FAULT"
HUB_TIMEOUT_S = 3.0
SHOWN_PACKAGES = ("torch", "accelerate", "transformers", "datasets")


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


# One machine: each examination yields what it found, the level unless it is OK, and what to do.

Found = Iterator[tuple[str, ...]]


def examine_machine(output_dir: Path = Path("outputs")) -> Iterator[Finding]:
    """Check everything that training needs from this machine. A check that raises an error is itself a fault."""
    examinations: dict[str, Callable[[], Found]] = {  # in the order in which they are shown
        "machine": _machine,
        "Python": lambda: iter([(f"{platform.python_version()}, hftune {__version__}",)]),
        "packages": _packages,
        "GPUs": _gpus,
        "collectives": _backends,
        "launcher": _launcher,
        "disk, outputs": lambda: _disk(output_dir, "output_dir"),
        "disk, cache": _cache,
        "disk, tmp": lambda: _disk(Path(tempfile.gettempdir()), "TMPDIR"),
        "shared memory": _shared_memory,
        "open files": _open_files,
        "network": _network,
        "port": _port,
        "Hub": _hub,
        "W&B": _wandb,
    }
    for what, examine in examinations.items():
        try:
            yield from [Finding(what, *found) for found in examine()]
        except Exception as error:  # the doctor runs because something is wrong, so it has to give an answer
            yield Finding(what, f"cannot be examined: {first_line(error)}", FAULT)


def _machine() -> Found:
    import psutil

    memory = psutil.virtual_memory()
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB memory free"
    yield (f"{socket.gethostname()}, {os.cpu_count()} CPU cores, {free}, {platform.platform(terse=True)}",)


def _packages() -> Found:
    """Compare the installed versions with the ranges that hftune requires."""
    fit, extras = [], []
    for requirement in map(Requirement, requires("hftune") or []):
        if requirement.marker is not None:
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name} is missing", FAULT, f'pip install "{requirement}"'
            continue
        if requirement.specifier.contains(here, prereleases=True):
            (fit if requirement.name in SHOWN_PACKAGES else extras).append(f"{requirement.name} {here}")
        else:
            yield f"{requirement.name} {here}", FAULT, f'pip install "{requirement}"'
    yield (f"{', '.join(fit)}; {len(extras)} more within range",)


def _gpus() -> Found:
    if not torch.cuda.is_available():
        if torch.accelerator.is_available():
            yield (f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}",)
        elif shutil.which("nvidia-smi") and torch.version.cuda is None:
            yield f"torch {torch.__version__} is built without CUDA", FAULT, "install the build for GPUs"
        elif shutil.which("nvidia-smi"):
            yield "torch finds no GPU", FAULT, "check that the driver is running and new enough (nvidia-smi)"
        else:
            yield ("none: training runs on CPUs, over Gloo",)
        return
    for index in range(torch.cuda.device_count()):
        properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        busy = (NOTICE, "another program is using its memory (nvidia-smi)") if free < 0.8 * total else ()
        yield (
            f"{index}: {properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, CUDA {torch.version.cuda}",
            *busy,
        )


def _backends() -> Found:
    found = [name for name, there in (("Gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if there]
    if torch.cuda.is_available() and "NCCL" not in found:
        yield "NCCL is missing", FAULT, "install PyTorch's build for GPUs, on Linux"
        return
    if torch.cuda.is_available():
        found[-1] += f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
    yield ", ".join(found) or "none", OK if found else FAULT


def _launcher() -> Found:
    if any(point.name == "hftune" for point in entry_points(group="torchrun.handlers")):
        yield (f"accelerate {version('accelerate')} finds rdzv_backend hftune",)
    else:
        yield "rdzv_backend hftune is not registered", FAULT, "reinstall hftune (2node.yaml needs it)"


def _cache() -> Found:
    """Look at the folders of models and of prepared data, as the libraries choose them from HF_HOME and HOME."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [finding for folder in (HF_DATASETS_CACHE, HF_HUB_CACHE) for finding in _disk(Path(folder), "HF_HOME")]
    yield from {finding[1:]: finding for finding in found}.values()  # usually one finding covers both


def _disk(folder: Path, setting: str) -> Found:
    there = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/"))
    if not os.access(there, os.W_OK | os.X_OK):
        yield f"{folder} cannot be written ({there})", FAULT, f"set {setting} to a different folder"
        return
    free = shutil.disk_usage(there).free / GIB
    small = (NOTICE, "a checkpoint is three times the model's size, and two are kept") if free < 10 else ()
    yield (f"{folder}: {free:.0f} GiB free", *small)


def _shared_memory() -> Found:
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total / GIB if folder.exists() else 0
    small = (NOTICE, "train.num_workers and NCCL need it; in a container: --shm-size=8g") if 0 < size < 1 else ()
    yield (f"/dev/shm of {size:.1f} GiB" if folder.exists() else "no /dev/shm here", *small)


def _open_files() -> Found:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    world_size = ProcessInfo.from_environment().world_size
    needed = 2 * world_size + 64 if world_size > 1 else 0  # the store takes two connections a process
    if limit == resource.RLIM_INFINITY:
        yield ("unlimited",)
    elif limit < needed:
        what = f"at most {limit:,}, and {world_size} processes need {needed:,} in the main machine's launcher"
        yield what, FAULT, "run ulimit -n 65536 before you start the launcher"
    else:
        yield (f"at most {limit:,}", *((NOTICE, "ulimit -n 65536") if limit < 1024 else ()))


def _network() -> Found:
    host, addresses = socket.gethostname(), own_addresses()
    if not outward_interfaces():
        yield addresses, NOTICE, "no interface except loopback: this machine can only train alone"
        return
    try:
        means = resolve(host)
    except ConfigError:
        means = "nothing"
    yield (f"{addresses}; the name {host} resolves to {means}",)


def _port() -> Found:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", PORT))
        except OSError as error:
            todo = "the shipped configs use it; choose a different one with --main_process_port"
            yield f"{PORT}: {error.strerror}{owner_of(PORT)}", NOTICE, todo
            return
    yield (f"{PORT} is free; it has no password: open it, and ports above 32768, to the job's machines only",)


def _hub() -> Found:
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE

    address, folder = urlsplit(ENDPOINT), Path(HF_HUB_CACHE)
    here = f"{len([*folder.glob('models--*'), *folder.glob('datasets--*')])} models and data sets in the cache"
    if HF_HUB_OFFLINE:
        yield (f"offline (HF_HUB_OFFLINE); {here}",)
        return
    try:
        port = address.port or {"http": 80}.get(address.scheme, 443)
        socket.create_connection((address.hostname, port), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        what = f"{address.hostname} cannot be reached ({error.strerror or error}); {here}"
        yield what, NOTICE, "only cached and local models can be used; set HF_HUB_OFFLINE=1"
    else:
        yield (f"{address.hostname} can be reached; {here}",)


def _wandb() -> Found:
    mode = os.environ.get("WANDB_MODE")
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # noqa: PTH111 - Path's raises where there is no HOME
    if mode in ("offline", "disabled"):
        yield (mode,)
    elif "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        yield ("key found",)
    else:
        yield "no key", NOTICE, "track.with=[wandb] needs `wandb login`, or WANDB_MODE=offline"


# The group


def examine_group(strategy: DataParallel, recipe: Recipe | None, datasets: Any, faults: Sequence[Finding]) -> list[Finding]:
    """Compare the processes (collective); return what the main process says of them.

    Raises:
        ConfigError: on all processes, if one has different code, versions, recipe or data than the main process.
    """
    began, own = time.monotonic(), fingerprint(recipe)
    if datasets is not None:
        own["data"] = data_digests(recipe.task, datasets)
    check_same(strategy, own)
    seconds = time.monotonic() - began
    is_gpu = strategy.device.type == "cuda"
    device = torch.cuda.get_device_name(strategy.device) if is_gpu else strategy.device.type
    interface = os.environ.get("NCCL_SOCKET_IFNAME" if is_gpu else "GLOO_SOCKET_IFNAME", "its own choice")
    what, here = f"process {strategy.process_index}", own["host"]
    mine = [Finding(what, f"{here}, pid {os.getpid()}, {device}, network {interface}")]
    mine += [replace(fault, what=f"{here}: {fault.what}") for fault in faults]
    rows = strategy.gather_to_main([asdict(finding) for finding in mine])
    found = {str(finding): finding for finding in (Finding(**row) for row in rows or ())}  # a machine's faults once
    compared = "code, versions" + (", recipe and data" if recipe is not None else "")
    same = f"the same {compared} on all {strategy.num_processes} processes, compared in {seconds:.2f} s"
    return [*found.values(), Finding("consistency", same)]


# The command


def main(argv: list[str] | None = None) -> int:
    """Examine, print, and return the exit code. Under a launcher, every process calls it."""
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
        found = [*examine_machine(recipe.folder if recipe else Path("outputs"))]
        if ProcessInfo.from_environment().world_size == 1:
            if recipe is not None:
                with Session(recipe) as session:
                    _load(recipe, session.here)
            return _report(found, "This machine")
        with Session(recipe, dead_after_s=20.0, stall_after_s=60.0, compares_early=False) as session:
            datasets = None if recipe is None else _load(recipe, session.here)
            strategy = DataParallel(session.join(), None if recipe is None else recipe.task, session.progress)
            session.progress.stage("comparing with the other processes")
            faults = [finding for finding in found if finding.level == FAULT]
            group = examine_group(strategy, recipe, datasets, faults)
            return strategy.broadcast(_report(group, "This group") if strategy.is_main else 0)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)


def _load(recipe: Recipe, info: ProcessInfo) -> Mapping[str, Any]:
    """Load the data; on the main process, refuse an output folder or trackers that cannot be used."""
    if info.is_main:
        check_writable(recipe.folder)
        check_bucket(str(recipe.output_dir))
        check_trackers(recipe)
    return load_datasets(recipe)


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
