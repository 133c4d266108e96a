"""Recordings: decoded, mixed to one channel and resampled once per machine, or one by one for a model's inputs.

Independent of tasks. soundfile decodes, soxr resamples; both are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hftune.data.cache import Stream, cached_arrays, idle_cores
from hftune.data.columns import is_text
from hftune.data.images import name_of, states_of_files, with_file
from hftune.data.tokenized import Ragged
from hftune.errors import ConfigError, DataError

CHUNK = 200
"""Recordings that are decoded together: few enough to hold all of them in memory."""
LOUDEST = 100
"""Samples beyond this are integers that were not scaled, not recordings that are too loud, or normalized."""
PICTURE = (128, 400)
"""Most rows and columns of a spectrogram's picture."""


@dataclass
class Recordings:
    """A data set in memory-mapped files. A sample has ``audio`` (T,) float32, one channel, and its value of each column."""

    audio: Ragged
    columns: Mapping[str, Any] = field(default_factory=dict)
    """By name, what is indexed by the sample: a class number or, as Ragged, tokens."""

    def __len__(self) -> int:
        return len(self.audio.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        others = {name: _row(column, index) for name, column in self.columns.items()}
        return {"audio": _row(self.audio, index), **others}

    def contents(self) -> dict[str, Any]:
        parts = {"audio": self.audio, **self.columns}
        flat = {name: part.flat for name, part in parts.items() if isinstance(part, Ragged)}
        return {**parts, **flat, **{f"{name}_offsets": parts[name].offsets for name in flat}}

    def contents_by_row(self) -> dict[str, Any]:
        return {"audio": self.audio, **self.columns}


def _row(column: Any, index: int) -> Any:
    return column.flat[column.offsets[index] : column.offsets[index + 1]] if isinstance(column, Ragged) else column[index]


def decode_recordings(rows: datasets.Dataset, column: str, split: str, rate: int, folders: Sequence[Path] = ()) -> Ragged:
    """Decode a column of recordings once per machine: the samples of each, one channel of ``rate`` Hz, float32.

    Args:
        column: of files, as datasets stores them; of arrays with their rate, {array, sampling_rate}; or of paths.
        folders: those of the tables, to which paths are relative.

    Raises:
        ConfigError: a library that decodes or resamples them is missing.
        DataError: a recording cannot be read or is empty, the message names the first one; or paths are relative to tables in
            several folders.
    """
    rows = rows.select_columns([column])
    if is_text(rows.features[column]):
        values = [located(path, folders, split) for path in rows[column][:]]
        rows = datasets.Dataset.from_dict({column: values}).cast_column(column, datasets.Audio(decode=False))
    has_files = isinstance(rows.features[column], datasets.Audio)
    kind = rows.features[column]["array"] if isinstance(rows.features[column], dict) else None
    while hasattr(kind, "feature"):
        kind = kind.feature

    def samples(stored: Any, index: int) -> np.ndarray:
        if kind is not None and stored is not None and stored["array"] is not None:  # of lists, the width is not known
            stored = {**stored, "array": np.asarray(stored["array"], kind.dtype)}
        return read_audio(stored, name_of(rows, index, split), rate)

    lengths: list[int] = []

    def decoded() -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(idle_cores(len(rows), rows_each=20)) as threads:  # both libraries work without Python's lock
            for start in range(0, len(rows), CHUNK):
                stored = rows[start : start + CHUNK][column]
                found = [*threads.map(samples, stored, range(start, start + len(stored)))]
                lengths.extend(map(len, found))
                yield np.concatenate(found)

    def counted() -> Iterator[np.ndarray]:  # once all are decoded
        yield np.array(lengths, np.int64)

    depends_on = [rows._fingerprint, column, rate, states_of_files(rows) if has_files else None, *map(_version, LIBRARIES)]
    arrays = cached_arrays(
        ["recordings", *depends_on],
        lambda: {"audio": Stream(np.float32, None, decoded()), "lengths": Stream(np.int64, None, counted())},
    )
    return Ragged(arrays["audio"], np.concatenate([[0], arrays["lengths"].cumsum()]))


LIBRARIES = ("soundfile", "soxr")


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def located(path: str | None, folders: Sequence[Path], split: str) -> str | None:
    """Return a path beside the table that names it, or as it is.

    Raises:
        DataError: there are tables in several folders, so that it may be of another one's.
    """
    beside = next((folder / path for folder in folders if (folder / path).exists()), None) if path else None
    if beside is not None and len(folders) > 1 and not Path(str(path)).is_absolute():
        raise DataError(
            f"The tables of the {split} split are in {len(folders)} folders, and name recordings by relative paths, such as "
            f"{path}: which folder they are in is not known. Make the paths absolute, or put the tables into one folder."
        )
    return path if beside is None else str(beside)


def read_audio(stored: Any, name: str, rate: int) -> np.ndarray:
    """Return a recording (T,) float32: the mean of its channels, at ``rate`` Hz.

    Args:
        stored: a path; an array at ``rate``, (T,) or with a second dimension of channels; such an array and its rate,
            {array, sampling_rate}; or a file, {bytes, path}. Arrays of integers of up to 32 bits are scaled to [-1, 1], as
            those of files are.
        name: which one it is, at the beginning of messages.

    Raises:
        ConfigError: a library that decodes or resamples it is missing.
        DataError: it cannot be read, is empty, or has values that are not finite or far beyond [-1, 1].
    """
    if isinstance(stored, str | Path):
        stored = {"bytes": None, "path": str(Path(stored).expanduser())}
    elif isinstance(stored, np.ndarray):
        stored = {"array": stored, "sampling_rate": rate}
    if stored is None or (isinstance(stored, Mapping) and not any(value is not None for value in stored.values())):
        raise DataError(f"{name} has no recording. Remove such rows.")
    if not isinstance(stored, Mapping) or not {"array", "bytes", "path"} & stored.keys():
        raise DataError(f"{name} is a {type(stored).__name__}, not a path, an array, or {{array, sampling_rate}}.")
    if stored.get("array") is not None:
        samples, own = _scaled(np.asarray(stored["array"]), name), stored.get("sampling_rate")
        if samples.ndim not in (1, 2) or not own:
            raise DataError(f"{name} has an array {samples.shape} with sampling_rate={own}. Give (T,) or channels, and a rate.")
        samples = samples if samples.ndim == 1 else samples.mean(int(np.argmin(samples.shape)))
    else:
        name = with_file(stored, name)
        samples, own = _decoded(stored, name)
    if len(samples) == 0:
        raise DataError(f"{name} is empty: it has no samples. Remove it.")
    if not np.isfinite(samples).all():
        raise DataError(f"{name} has samples that are not finite numbers. Correct or remove it.")
    if own != rate:
        samples = _library("soxr").resample(samples, own, rate)
        if len(samples) == 0:
            raise DataError(f"{name} is too short to be resampled from {own} to {rate} Hz. Remove it.")
    return np.ascontiguousarray(samples, np.float32)


def _scaled(samples: np.ndarray, name: str) -> np.ndarray:
    is_whole = samples.dtype.kind in "iu"
    if is_whole and samples.dtype.itemsize <= 4:
        width = np.iinfo(samples.dtype)
        half = (int(width.max) - int(width.min) + 1) // 2
        return ((samples.astype(np.float64) - (width.min + half)) / half).astype(np.float32)
    if samples.size and (1 if is_whole else LOUDEST) < (most := np.abs(samples).max()) < np.inf:
        raise DataError(
            f"{name} has samples of up to {most:g}, not within [-1, 1]. Divide them by the largest, 32768 for int16."
        )
    return samples.astype(np.float32)


def _decoded(stored: Mapping[str, Any], name: str) -> tuple[np.ndarray, int]:
    soundfile = _library("soundfile")
    if stored.get("bytes") is None and not Path(stored["path"]).is_file():
        raise DataError(f"{name}: there is no such file.")
    try:
        file = stored["path"] if stored.get("bytes") is None else BytesIO(stored["bytes"])
        samples_TC, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, TypeError, RuntimeError) as error:  # TypeError: raw samples without a header
        raise DataError(f"{name} is not a recording that can be read: {str(error).rstrip('.')}.") from error
    return samples_TC.mean(1), rate


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: of a system without the library that it wraps
        raise ConfigError(f'Recordings need {name}, which cannot be imported ({error}): pip install "hftune[audio]"') from error


def spectrogram_picture(values: np.ndarray) -> np.ndarray:
    """Return a picture (H, W, 3) uint8, low frequencies at the bottom, loud ones dark, of what a model is given.

    Args:
        values: samples (T,), of which it computes short-time spectra; or features, (frequencies, frames).
    """
    if values.ndim == 1:
        size = 2 * PICTURE[0]
        padded = np.pad(values, (0, max(0, size - len(values))))
        frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: max(size // 2, len(padded) // PICTURE[1])]
        values = np.log(np.abs(np.fft.rfft(frames * np.hanning(size))[:, 1:]) + 1e-5).T
    values = values[:, :: max(1, -(-values.shape[1] // PICTURE[1]))]
    low, high = np.percentile(values, [5, 99.5])
    shade = 255 - (255 * (values - low) / max(high - low, 1e-9)).clip(0, 255)
    return np.repeat(shade[::-1, :, None].astype(np.uint8), 3, axis=2)


def durations(lengths: np.ndarray, rate: int) -> str:
    """Return how long recordings are, in words: "3.2 hours, 0.5 to 12.1 s each"."""
    seconds = lengths / rate
    total = seconds.sum()
    whole = f"{total / 3600:.1f} hours" if total >= 3600 else f"{total / 60:.1f} minutes"
    return f"{whole}, {seconds.min():.1f} to {seconds.max():.1f} s each"
