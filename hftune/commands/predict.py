"""What ``hftune predict`` does with a model's answers: pictures into files, the rest into lines. Knows no model and no task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from hftune.errors import ConfigError


def named(value: Any) -> dict[str, str]:
    """Return the path of an input, and of a pair's first; nothing of a text."""
    path = value[0] if isinstance(value, tuple) else value
    return {"input": str(path)} if isinstance(path, Path) else {}


def output_names(inputs: Sequence[Any], output: Path | None) -> list[Path | None]:
    """Return where a picture that answers each input would be written: in ``output``, under the input's name.

    Raises:
        ConfigError: two inputs have one name, they lie in that folder, or it cannot be made.
    """
    if output is None:
        return [None] * len(inputs)
    paths = [Path(named(value).get("input", str(place))) for place, value in enumerate(inputs)]
    stems = [path.stem for path in paths]
    if any(path.resolve().parent == output.resolve() for path in paths):
        raise ConfigError(f"--output {output} is the folder of the inputs, which would be replaced. Name another.")
    if twice := [stem for stem, count in Counter(stems).items() if count > 1]:
        raise ConfigError(f"--output {output}: two inputs have the name {twice[0]}. Restore their folders one by one.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}.") from error
    return [output / f"{stem}.png" for stem in stems]


def keep_pictures(row: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Write the picture in a row, if any, and put its path in its place.

    Raises:
        ConfigError: there is one, and no folder for it, or it cannot be written.
    """
    kept = dict(row)
    for name, value in row.items():
        if isinstance(value, Image.Image):
            if path is None:
                raise ConfigError("The answers are pictures. Name a folder for them: --output FOLDER.")
            try:
                value.save(path)
            except OSError as error:
                raise ConfigError(f"--output {path} cannot be written: {error.strerror or error}.") from error
            kept[name] = str(path)
    return kept
