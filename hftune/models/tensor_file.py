"""Files of tensors that are larger than memory: written piece by piece, and read where they are. Knows no model."""

from __future__ import annotations

import json
import mmap
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor

LENGTH = struct.Struct("<Q")
"""Of a header, which a file of safetensors begins with."""


@dataclass
class Pieces:
    """A tensor that comes in pieces, one after the other along its first dimension."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: Iterator[Tensor]
    """On the CPU. To be taken once, in the order of ``in_file_order`` where several tensors come from the same place."""

    def whole(self) -> Tensor:
        return torch.cat([piece.reshape(-1) for piece in self.pieces]).view(self.shape)


@contextmanager
def taken(groups: Mapping[str, Mapping[str, Tensor | Pieces]]) -> Iterator[None]:
    """Take what is left of all pieces in the end, also if they cannot be written: who sends them waits for it."""
    try:
        yield
    finally:
        for value in (value for group in groups.values() for value in group.values()):
            if isinstance(value, Pieces):
                with suppress(RuntimeError):  # who sends them has ended
                    deque(value.pieces, maxlen=0)


def in_file_order(dtypes: Mapping[str, torch.dtype]) -> dict[str, dict[str, Any]]:
    """Return what the header of a file says of tensors without elements, by name and in the order of a file."""
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype in dtypes.items()})
    (length,) = LENGTH.unpack_from(data)
    return json.loads(data[LENGTH.size : LENGTH.size + length])


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Pieces]) -> None:
    """Write a file of safetensors, byte for byte the one that ``safetensors.torch.save_file`` writes of whole tensors."""
    with path.open("wb") as file:
        _write(file, tensors)


def _write(file: BinaryIO, tensors: Mapping[str, Tensor | Pieces]) -> None:
    header, end = in_file_order({name: value.dtype for name, value in tensors.items()}), 0
    for name, about in header.items():
        value, start = tensors[name], end
        end += prod(value.shape) * value.dtype.itemsize
        about |= {"shape": [*value.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH.size)
    file.write(LENGTH.pack(len(text)) + text)
    for name in header:
        value = tensors[name]
        for piece in (value,) if isinstance(value, Tensor) else value.pieces:
            file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if file.tell() != LENGTH.size + len(text) + end:
        raise ValueError("the pieces of a tensor are not as long as it is")


def on_disk(tensors: Mapping[str, Tensor | Pieces], folder: Path) -> dict[str, Tensor]:
    """Return tensors that lie in a file without a name, as much of it in memory as the system has room for.

    The file is gone with the last of them. Changing them changes it.
    """
    with TemporaryFile(dir=folder) as scratch:  # of no name from the beginning: a kill leaves nothing
        _write(scratch, tensors)
        scratch.flush()
        data = mmap.mmap(scratch.fileno(), 0)
    (length,) = LENGTH.unpack_from(data)
    first, found = LENGTH.size + length, dict[str, Tensor]()
    for name, about in json.loads(data[LENGTH.size : first]).items():
        dtype, count = tensors[name].dtype, prod(about["shape"])
        start = first + about["data_offsets"][0]
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        found[name] = flat.view(about["shape"])
    return found
