"""Imports the code that a recipe names by a dotted path: a task, an optimizer, a metric. Independent of recipes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hftune.errors import ConfigError


def import_named(key: str, name: str, module: str, attribute: str) -> Any:
    """Import ``attribute`` of ``module``, which the recipe names as ``key=name``.

    Raises:
        ConfigError: it cannot be imported. The module may be any script, which may even exit.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={name} cannot be imported: {_reason(error, module)}.") from error


def is_own(name: str) -> bool:
    """Return whether a dotted path leads to hftune's own code, which is safe to import."""
    return name.startswith(("hftune.tasks.", "hftune.models.", "hftune.metrics.", "hftune.data.demo"))


def find_beside(key: str, name: str, folders: Iterable[Path]) -> None:
    """Let Python find the module that ``key=name`` needs in ``folders``, after all other places.

    The folders stay on the path: a module may import its neighbours later, and so may child processes.

    Raises:
        ConfigError: a folder has such a module, but Python would import a different one.
    """
    top = name.replace(":", ".").partition(".")[0]
    for folder in folders:
        if not any(_is_same(path, folder) for path in sys.path):
            sys.path.append(str(folder.resolve()))
            importlib.invalidate_caches()
        beside = next((path for path in (folder / f"{top}.py", folder / top / "__init__.py") if path.is_file()), None)
        if beside is None:
            continue
        if (loaded := sys.modules.get(top)) is not None:
            found = getattr(loaded, "__file__", None) or "a built-in module"
        else:
            spec = importlib.util.find_spec(top)
            found = (spec and spec.origin) or "nothing"
        if not _is_same(found, beside):
            raise ConfigError(
                f"{key}={name}: {beside} is next to the recipe, but Python imports {found} as {top}. Rename your module."
            )


def _is_same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _reason(error: BaseException, module: str) -> str:
    """Describe what went wrong in an import, with the line of the imported code."""
    if isinstance(error, SystemExit):
        what = f"importing {module} calls sys.exit({error.code!r}); move the code that it runs under if __name__ == '__main__':"
    elif isinstance(error, (ImportError, AttributeError, ValueError, SyntaxError)):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    # wandb replaces sys.exit with its own function.
    users = [frame for frame in frames if "importlib" not in frame.filename and "wandb" not in Path(frame.filename).parts]
    return f"{what} ({users[-1].filename}, line {users[-1].lineno})" if users else what
