"""Weights of one's own to start from: read from a file or folder, and compared with the model; and the digest of weights.

Independent of tasks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hftune.errors import ConfigError, first_few, first_line
from hftune.models.tensor_file import Pieces

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights of a folder, in the order they are looked for."""
INDICES = tuple(f"{name}.index.json" for name in FILES)
"""Files that list those with parts of the weights."""
WRAPPERS = ("state_dict", "model")
"""Names under which scripts put the weights beside other things into a file."""
PREFIXES = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before each name."""
MAX_THREADS = 4
"""Threads that hash weights, and tensors that they hold at a time. They read some 6 GB a second."""


def weight_files(path: str, key: str = "task.weights") -> list[Path]:
    """Return the files of weights that a path leads to: itself, or those in a folder.

    Raises:
        ConfigError: there are none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"{key}={path}: there is no such file or folder. Models of the Hub are named in task.model.")
    if found := next((place / name for name in FILES if (place / name).is_file()), None):
        return [found]
    if index := next((place / name for name in INDICES if (place / name).is_file()), None):
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [place / name for name in dict.fromkeys(listed)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{key}={place}: {index.name} cannot be read as a list of files ({first_line(error)}). Copy it again from "
                "where the weights come from."
            ) from error
    inner = next((name for name in ("model", "model_last") if (place / name / FILES[0]).is_file()), None)
    hint = f" Did you mean {place / inner}?" if inner else ""
    raise ConfigError(f"{key}={path} holds neither {', '.join(FILES)} nor an index of parts.{hint}")


def load_weights(model: nn.Module, path: str, key: str = "task.weights") -> list[str]:
    """Copy the weights of a file or folder into a model, by name; return sentences on what had no counterpart.

    Raises:
        ConfigError: a file cannot be read; it holds no tensor of the model; or one has a different shape.
    """
    found: dict[str, Tensor] = {}
    for file in weight_files(path, key):
        found |= read_tensors(file, f"{key}={path}")
    while prefix := next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in found)), None):
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    persistent, own = model.state_dict(keep_vars=True), dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in found.items():
        if name in persistent and persistent[name].shape != value.shape:
            shapes = [str(tuple(tensor.shape)) for tensor in (value, persistent[name])]
            raise ConfigError(
                f"{key}={path}: {name} is {shapes[0]} there and {shapes[1]} in {type(model).__name__}. Change the model's "
                "sizes, or leave this tensor out of the file."
            )
    used = [name for name in found if name in persistent]
    if not used:
        raise ConfigError(
            f"{key}={path} holds no tensor of {type(model).__name__}: it has {first_few(found)}, and the model "
            f"{first_few(persistent)}."
        )
    with torch.no_grad():
        for name in used:
            persistent[name].copy_(found[name])
    given = {id(persistent[name]) for name in used}  # tied tensors may be there under one name
    missing = [name for name, value in own.items() if name in persistent and id(value) not in given]
    model.drawn_parameters = [name for name in missing if name in getattr(model, "drawn_parameters", own)]
    said, unexpected = [], [name for name in found if name not in persistent]
    if missing:
        said.append(
            f"{key}={path} lacks {len(missing)} of the model's tensors, which begin as they were: {first_few(missing)}."
        )
    if unexpected:
        tensors = "tensors" if len(unexpected) > 1 else "tensor"
        said.append(f"{key}={path} has {len(unexpected)} {tensors} that the model lacks: {first_few(unexpected)}.")
    return said


def read_tensors(file: Path, what: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name. Nothing in it is executed.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's text recommends weights_only=False, which would run the file's code
        reason = "UnpicklingError: it holds something other than tensors"
        raise ConfigError(f"{what}: {file.name} cannot be read as tensors ({reason}).") from error
    except Exception as error:  # of a file that is something else, torch's unpickler raises whatever its bytes lead to
        raise ConfigError(f"{what}: {file.name} cannot be read as tensors ({first_line(error)}).") from error
    for name in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)} if isinstance(found, dict) else {}
    if not tensors:
        raise ConfigError(f"{what}: {file.name} holds no tensors by name, as model.state_dict() returns them.")
    return tensors


def weights_digest(
    tensors: Iterable[tuple[str, Tensor | Pieces]], leaves_out: Callable[[Any], bool] = lambda value: False
) -> str:
    """Return the SHA-256 of names, shapes, types and bytes of named tensors, whatever their order and device.

    It takes 6 to 10 seconds of a core for 10 GB. Several cores share it: a launcher may leave torch one thread in each process,
    but the other processes wait meanwhile.

    Args:
        leaves_out: says whether only name, shape and type of a tensor count.
    """

    def of_bytes(value: Tensor | Pieces) -> bytes:
        if leaves_out(value):
            return b""
        digest = sha256()
        for piece in (value,) if isinstance(value, Tensor) else value.pieces:
            digest.update(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.digest()

    found: dict[str, tuple[str, Future[bytes]]] = {}
    running: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for name, value in tensors:
            running.append(threads.submit(of_bytes, value))
            found[name] = f"{name} {tuple(value.shape)} {value.dtype} ", running[-1]
            if len(running) == MAX_THREADS:
                running.popleft().result()
        digest = sha256()
        for _, (header, own) in sorted(found.items()):
            digest.update(header.encode() + own.result())
    return digest.hexdigest()
