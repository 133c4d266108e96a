"""Addresses of places that fsspec reaches, such as s3://bucket/run: their names, and what is wrong with one in a sentence.

Credentials and endpoints are never part of an address or a recipe: the libraries read them from the environment.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError, did_you_mean, first_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""What to install for a protocol."""
AT_ONCE: dict[str, Any] = {"max_concurrency": 2}
"""Parts of 50 MB. By default there are ten at a time, and an upload takes a gigabyte of memory (s3fs 2026.9, measured)."""
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "local": {"auto_mkdir": True},
    "s3": AT_ONCE,
    "s3a": AT_ONCE,
}
"""What a file system is given."""
FOR_GOOD = (FileNotFoundError, PermissionError, ImportError, ValueError, TypeError)
"""Errors that no second attempt mends; the network is none of them."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the disk of this machine says."""
WITHOUT_KEYS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
"""The same, by their names, as their package may not be there."""


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


def file_system(address: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address, and the path of the address in it. Does not connect.

    Raises:
        ImportError: its package is missing. See ``what_is_wrong``.
    """
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(address, use_listings_cache=False, **OPTIONS.get(address.partition(":")[0], {}))
    return fs, str(path).rstrip("/")


@contextmanager
def downloaded(source: str | Path, key: str) -> Iterator[str | Path]:
    """Yield a path of this machine: of a file at an address for as long as the block lasts; anything else as it is.

    Raises:
        ConfigError: there is no such file, or it cannot be reached.
    """
    if not is_address(str(source)):
        yield source
        return
    with TemporaryDirectory(prefix="hftune-") as folder:
        file = Path(folder) / local_name(str(source)).name
        try:
            fs, path = file_system(str(source))
            fs.get_file(path, str(file))
        except FileNotFoundError as error:
            raise ConfigError(f"{key}={source}: there is no such file.") from error
        except Exception as error:  # whatever a library raises
            raise what_is_wrong(key, str(source), error) from error
        yield file


def is_for_good(error: BaseException) -> bool:
    """Whether a further attempt would end in the same error: a wrong name, a wrong key, no permission."""
    is_full = isinstance(error, OSError) and error.errno in FULL
    return is_full or isinstance(error, FOR_GOOD) or type(error).__name__ in WITHOUT_KEYS


def what_is_wrong(key: str, address: str, error: BaseException) -> ConfigError:
    """Return an error of a library as one sentence about an address."""
    if isinstance(error, ConfigError):
        return error
    protocol = address.partition(":")[0]
    place = f"{protocol}://{local_name(address).parts[0]}"
    if isinstance(error, ImportError):
        package = PACKAGES.get(protocol)
        hint = f"needs a package that is not installed: pip install {package}." if package else f"cannot be used: {error}."
        return ConfigError(f"{key}={address} {hint}")
    if isinstance(error, OSError) and error.errno in FULL:
        return ConfigError(f"{key}={address} cannot be brought to this machine: {error.strerror}. Make room for it.")
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{key}={address}: there is no {place}. Create it, or correct the name.")
    if isinstance(error, PermissionError):
        said = str(error.strerror or error).partition("\n")[0].rstrip(". ")
        return ConfigError(
            f"{key}={address}: access is denied ({said}). Check the keys in the environment, and that they may read, write and "
            f"remove objects in {place}."
        )
    if type(error).__name__ in WITHOUT_KEYS:
        return ConfigError(f"{key}={address} cannot be used: {first_line(error)}. Put keys into the environment.")
    return ConfigError(f"{key}={address} cannot be reached: {first_line(error)}. Check the network and the endpoint.")
