"""Addresses of places that fsspec reaches, such as s3://bucket/run: their names, and what is wrong with one in a sentence.

Credentials and endpoints are never part of an address or a recipe: the libraries read them from the environment.
"""

from __future__ import annotations

import errno
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from hftune.errors import ConfigError, DataError, did_you_mean, first_line, message_of
from hftune.secrecy import without_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""What to install for a protocol."""
FRESH: dict[str, Any] = {"use_listings_cache": False}
AT_ONCE: dict[str, Any] = {**FRESH, "max_concurrency": 2}
"""Parts of 50 MB. By default there are ten at a time, and an upload takes a gigabyte of memory (s3fs 2026.9, measured)."""
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "local": {"auto_mkdir": True},
    "s3": AT_ONCE,
    "s3a": AT_ONCE,
    "sftp": {},
    "ssh": {},
}
"""What a file system is given, if not FRESH: sftp passes it on to what does not know it."""
FOR_GOOD = (FileNotFoundError, PermissionError, ImportError, ValueError, TypeError)
"""Errors that no second attempt mends; the network is none of them."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the disk of this machine says."""
DENIED = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
"""What PermissionError says, too, by their names, as their package may not be there."""
TRIES = 8
"""Of what a network may interrupt: FIRST_WAIT_S after the first one, then after twice as long each time, a minute in all."""
FIRST_WAIT_S = 0.4


def is_address(text: str) -> bool:
    """Whether a text is an address and not a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+]*://", text) is not None


def is_like_address(text: str) -> bool:
    """Whether a text may have been meant as one, such as s3:/bucket/run or simplecache::s3://bucket/run."""
    return re.match(r"[\w+.:-]{2,}:/", text) is not None


def local_name(address: str) -> PurePosixPath:
    """Return the name of the folder that stands for an address on this machine: bucket/run."""
    return PurePosixPath(re.sub(r"^[a-zA-Z0-9+]+:/*", "", address))


def local_folder(output_dir: str) -> Path:
    """Return the folder that ``output_dir`` is, or the working copy of what is at that address."""
    return Path("outputs") / local_name(output_dir) if is_address(output_dir) else Path(output_dir)


def address_problem(address: str) -> str | None:
    """Say what is wrong with the form of an address, as a part of a sentence; None if nothing is."""
    from fsspec.registry import available_protocols

    protocol, parts = address.partition(":")[0], local_name(address).parts
    if protocol not in available_protocols():
        return f"there is no protocol {protocol}.{did_you_mean(protocol, [*PACKAGES, 'hf'])} Write it as in s3://bucket/run."
    if protocol in ("http", "https"):
        return "files cannot be written there. Name a bucket, such as s3://bucket/run."
    if not is_address(address) or not parts or {".", ".."} & {*parts} or re.search(r"[?#*]", address):
        return (
            "write it as in s3://bucket/run, without parameters. Keys and endpoints are read from the environment, such as "
            "AWS_ACCESS_KEY_ID."
        )
    return None


def refuse_address(output_dir: str | None, who: str) -> None:
    """Raise ConfigError for what has no results in a bucket."""
    if is_address(str(output_dir)):
        raise ConfigError(f"output_dir={output_dir}: {who} needs a folder. Set output_dir=... to one, and copy it afterwards.")


def file_system(address: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address, and the path of the address in it. Does not connect.

    Args:
        options: what fsspec is given, such as credentials.

    Raises:
        ImportError: its package is missing. See ``what_is_wrong``.
    """
    from fsspec.core import url_to_fs

    return url_to_fs(address, **{**OPTIONS.get(address.partition(":")[0], FRESH), **options})


def get_file(address: str, file: Path, **options: Any) -> None:
    """Download a file; see ``file_system``."""
    fs, path = file_system(address, **options)
    fs.get_file(path, str(file))


@contextmanager
def copied_here(source: str | Path, key: str) -> Iterator[str | Path]:
    """Yield a path of this machine: of a file at an address for as long as the block lasts; anything else as it is.

    Raises:
        ConfigError: there is no such file, or it cannot be reached.
    """
    if not is_address(str(source)):
        yield source
        return

    with TemporaryDirectory(prefix="hftune-") as folder:
        file = Path(folder) / local_name(str(source)).name
        patiently(lambda: get_file(str(source), file), f"{key}={source}")
        yield file


def patiently(
    call: Callable[[], T],
    what: Any,
    kind: Callable[[str], Exception] = ConfigError,
    keys: str = "those of the environment",
    wait: Callable[[float], Any] = time.sleep,
) -> T:
    """Return what a call returns that goes to an address; if it fails as networks do, call it again.

    Args:
        what: names the address in messages.
        kind: of error to raise.
        keys: which credentials to check, for messages.

    Raises:
        Exception: of this kind: it fails in another way, or again and again. ConfigError and DataError are raised as they are.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except (ConfigError, DataError):
            raise
        except Exception as error:  # each library has exceptions of its own
            if attempt == TRIES - 1 or is_for_good(error):
                raise kind(what_is_wrong(what, error, keys)) from error
            wait_s = FIRST_WAIT_S * 2**attempt
            if attempt > 1:
                text = f"note: {what} cannot be reached: {first_line(_said(error))}. Trying again in {wait_s:g} s."
                print(without_secrets(text), file=sys.stderr, flush=True)
            wait(wait_s)
    raise AssertionError


def is_for_good(error: BaseException) -> bool:
    """Whether a further attempt would end in the same error: a wrong name, a wrong key, no permission."""
    error = _said(error)
    is_full = isinstance(error, OSError) and error.errno in FULL
    return is_full or isinstance(error, FOR_GOOD) or type(error).__name__ in DENIED or _status(error) in (401, 403, 404, 410)


def what_is_wrong(what: Any, error: BaseException, keys: str = "those of the environment") -> str:
    """Return an error of a library as one sentence about an address; the arguments are those of ``patiently``."""
    error, protocol = _said(error), re.search(r"(\w+)://", str(what))
    package = PACKAGES.get(protocol[1]) if protocol else None
    if isinstance(error, ImportError) and package:
        return f"{what} needs a package that is not installed: pip install {package}."
    if isinstance(error, OSError) and error.errno in FULL:
        return f"{what} cannot be brought to this machine: {error.strerror}. Make room for it."
    if isinstance(error, FileNotFoundError) or _status(error) in (404, 410):
        return f"{what}: there is no such file or bucket. Correct the name, or create the bucket."
    if isinstance(error, PermissionError) or type(error).__name__ in DENIED or _status(error) in (401, 403):
        return f"{what}: access is denied ({message_of(error)}). Check the credentials, {keys}."
    advice = "Check the address and its options." if is_for_good(error) else "Check the network and the endpoint."
    return f"{what} cannot be reached: {first_line(error)}. {advice}"


def _said(error: BaseException) -> BaseException:
    """Return what a library has met: of any failure, fsspec (2026.9) says on the web that there is no such file."""
    cause = error.__cause__
    is_of_web = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if cause is not None and is_of_web and isinstance(error, FileNotFoundError) else error


def _status(error: BaseException) -> int:
    """Return what a server has answered, as aiohttp, gcsfs, adlfs and the Hub's library keep it; 0 if none has."""
    if str(error).startswith("Forbidden"):  # gcsfs (2026.10) keeps no more
        return 403
    kept = [getattr(error, name, None) for name in ("status", "code", "status_code")]
    status = str(next(filter(None, [*kept, getattr(getattr(error, "response", None), "status_code", None)]), 0))
    return int(status) if status.isdecimal() else 0
