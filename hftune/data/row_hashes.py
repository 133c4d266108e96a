"""rows.bin: a hash of each row of the training data, so that a row that was changed can be named.

The file holds 16 bytes a row and nothing else, in the order of the training split: bytes 16k to 16k + 15 belong to sample k.
The SHA-256 of the file stands for all rows. Reading it needs numpy alone, so that commands stay quick.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hftune.atomic import atomic_path
from hftune.errors import ConfigError, DataError

NAME = "rows.bin"
BYTES = 16
"""Of a SHA-256, for each row."""
CACHED_ROWS = 100_000
"""Rows from which on hashes are kept in the cache of prepared data; fewer take less than a second, unless they are files."""


def row_hashes(dataset: Any) -> np.ndarray | None:
    """Hash the content of each row of a data set: equal rows have equal hashes, wherever they lie.

    Returns:
        (N, 16) uint8; None for a large data set of the user's own whose rows are known only by reading all of them. See
        ``contents_by_row``.

    Raises:
        DataError: a data set of the user's own does not say as much of each row.
    """
    from hftune.data.row_contents import row_digests

    digests = row_digests(dataset)
    if digests is None:
        return None
    hashes = np.fromiter(digests, f"S{BYTES}").view(np.uint8).reshape(-1, BYTES)  # without millions of objects at once
    if len(hashes) != len(dataset):
        raise DataError(
            f"contents_by_row() of {type(dataset).__name__} has {len(hashes):,} entries for {len(dataset):,} samples. It must "
            "have one for each."
        )
    return hashes


def root(hashes: np.ndarray) -> str:
    """Return the SHA-256 that stands for all rows, in hexadecimal."""
    return sha256(np.ascontiguousarray(hashes).data).hexdigest()


def cached_hashes(dataset: Any, digest: str) -> np.ndarray | None:
    """Return ``row_hashes``, those of many rows from the cache of prepared data.

    Args:
        digest: of all that the data set holds.

    Raises:
        ConfigError: see ``cached_arrays``.
    """
    # What a data set of the user's own says of its rows alone is not in the digest, and may change under it.
    is_in_digest = not hasattr(dataset, "contents_by_row") or hasattr(dataset, "contents")
    if len(dataset) < CACHED_ROWS or not is_in_digest:
        return row_hashes(dataset)
    from hftune.data.cache import cached_arrays

    def make() -> dict[str, np.ndarray]:
        hashes = row_hashes(dataset)
        return {} if hashes is None else {"hashes": hashes}

    return cached_arrays(["row hashes", digest], make).get("hashes")


def write_rows(folder: Path, hashes: np.ndarray | None) -> None:
    """Write rows.bin into an output folder; without hashes, remove one of an earlier run."""
    if hashes is None:
        (folder / NAME).unlink(missing_ok=True)
        return
    with atomic_path(folder / NAME) as temporary:
        temporary.write_bytes(np.ascontiguousarray(hashes).data)


def read_rows(folder: str | Path) -> np.ndarray | None:
    """Return the hashes of the rows that a run was trained on, (N, 16) uint8; None if its folder holds none.

    Raises:
        ConfigError: rows.bin is cut off.
    """
    path = Path(folder) / NAME
    if not path.is_file():
        return None
    content = np.fromfile(path, np.uint8)
    if len(content) % BYTES:
        raise ConfigError(f"{path} has {len(content):,} bytes, which is no multiple of {BYTES}: it is cut off.")
    return content.reshape(-1, BYTES)
