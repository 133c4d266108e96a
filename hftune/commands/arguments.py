"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hftune.config.addresses import is_address
from hftune.data.table import SOURCES
from hftune.errors import ConfigError


def run_path(text: str) -> str | Path:
    """Return a run's folder as a path, or its address, for ``here``."""
    return text if is_address(text) else Path(text)


def local_path(text: str) -> Path:
    """Return a folder as a path, and refuse an address; for a command that writes beside the run, or checks its files."""
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text} is an address, and this command needs a folder. Copy the run into one first.")
    return Path(text)


def add_recipe(parser: argparse.ArgumentParser, is_required: bool = False) -> None:
    """Add the recipe with its overrides, as ``options.words``."""
    parser.add_argument(
        "words",
        nargs="+" if is_required else "*",
        metavar="KEY=VALUE",
        help="recipe=NAME or recipe=PATH.yaml, and overrides of its keys, such as train.lr=3e-5",
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add what ``hftune.launchers.jobs.Job`` is made of, under the names of its fields, and --output."""
    parser.add_argument(
        *("--nodes", "--machines"),
        required=True,
        help="number of machines, or a range: 1-4 takes up to four free ones and goes on without lost ones",
    )
    hardware = parser.add_mutually_exclusive_group(required=True)
    hardware.add_argument("--gpus", type=int, help="number of GPUs per machine; each gets one process")
    hardware.add_argument("--cpu", action="store_true", help="training on CPUs, for a cluster without GPUs")
    parser.add_argument("--processes", type=int, help="number of processes per machine with --cpu (default 1)")
    parser.add_argument(
        *("--cpus-per-gpu", "--cpus-per-process"),
        type=int,
        dest="cores",
        help="number of CPU cores per process (default: 2, or 1 with --cpu, plus train.num_workers)",
    )
    parser.add_argument("--job-name", dest="name", help="name of the job (default: the recipe's)")
    parser.add_argument(
        "--config", help="launch configuration: a name such as fsdp_2node, or a .yaml file (default: plain DDP)"
    )
    parser.add_argument(
        "--grace-s",
        type=int,
        default=120,
        help="seconds before the end to finish a step and write a checkpoint (default %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="file to write (default: standard output)")


def write_job(options: argparse.Namespace, kind: type, write: Callable[..., tuple[str, list[str]]]) -> int:
    """Print what a job is written as, or write it to --output; notices about it go to stderr. Return the exit code.

    Args:
        kind: of job, a dataclass whose fields are options.
        write: takes the words of the recipe and a job; returns the text and the notices.
    """
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}
    text, notices = write(options.words, kind(**fields))
    for notice in notices:
        print(f"hftune: {notice}", file=sys.stderr)
    if options.output is None:
        print(text, end="")
        return 0
    with writing(f"--output {options.output}"):
        options.output.write_text(text, encoding="utf-8")
    return 0


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add ``options.trust_code``."""
    parser.add_argument(
        "--trust-code", action="store_true", help="import code outside hftune that the recipe names, such as a task of your own"
    )


def add_table(parser: argparse.ArgumentParser, what: str, is_required: bool = False) -> None:
    """Add ``options.data``, with ``what`` as its help, and what goes with it: map, mixed_precision and processes."""
    parser.add_argument("--data", required=is_required, metavar="TABLE", help=f"{what}: a {SOURCES}")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="column of --data to read, if it is not called as in training, such as text=review; may be repeated",
    )
    parser.add_argument(
        "--mixed-precision",
        choices=("no", "bf16", "fp16"),
        help="precision for --data (default: that of the run's evaluations)",
    )
    parser.add_argument("--processes", type=int, help="number of processes to start on this machine for --data")


def check_at_least_1(options: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of these options is a number below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")


def argv_of_one(options: argparse.Namespace) -> list[str]:
    """Return the command line as it was typed, without ``--processes``: that of each process that it starts."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--processes")
    return parser.parse_known_args(options.argv)[1]


def check_single(command: str) -> None:
    """Raise ConfigError if a launcher has started several processes for a command that works in one."""
    from hftune.distributed.process_info import ProcessInfo

    if (count := ProcessInfo.from_environment().world_size) > 1:
        raise ConfigError(f"{command} computes in one process, and {count} were started. Call it without a launcher.")


@contextmanager
def writing(what: object, advice: str = "") -> Iterator[None]:
    """Raise ConfigError if the block cannot write; ``what``: as messages name it, such as "--output x.json"."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be written: {error.strerror or error}.{advice}") from error


def check_output(path: Path) -> None:
    """Raise ConfigError if the file of ``--output`` cannot be written, before hours are spent on its contents."""
    is_new = not path.exists()
    with writing(f"--output {path}"):
        path.open("a").close()
        if is_new:
            path.unlink()


def read_text(path: str, option: str = "--text-file") -> str:
    """Read a UTF-8 file, or standard input if ``path`` is "-".

    Raises:
        ConfigError: there is no such file, or it is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8: {error}. Convert it.") from error
