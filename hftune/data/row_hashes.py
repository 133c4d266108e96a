"""rows.bin: a hash of each row of the training data, so that a row that was changed can be named.

The file holds 16 bytes a row and nothing else, in the order of the training split: bytes 16k to 16k + 15 belong to sample k.
The SHA-256 of the file stands for all rows. Reading it needs numpy alone, so that commands stay quick.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np

from hftune.atomic import atomic_path
from hftune.errors import ConfigError

NAME = "rows.bin"
BYTES = 16
"""Of a SHA-256, for each row."""


def root(hashes: np.ndarray) -> str:
    """Return the SHA-256 that stands for all rows, in hexadecimal."""
    return sha256(np.ascontiguousarray(hashes).data).hexdigest()


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
