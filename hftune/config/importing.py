"""Imports the code that a recipe names: a task, a network, a function that returns rows. Knows no recipe."""

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
        ConfigError: it cannot be imported, whatever its module does instead: it may be any script.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={name} cannot be imported: {_reason(error, module)}.") from error


def is_own(name: str) -> bool:
    """Say whether an import path leads to hftune's own code, which is safe to import."""
    return name.startswith(("hftune.tasks.", "hftune.models.", "hftune.data.demo"))


def find_beside(key: str, name: str, folders: Iterable[Path]) -> None:
    """Let the module that ``key=name`` needs be found in ``folders``, after everything that is found elsewhere.

    The folders stay on the path: a module may import its neighbours later, and so may the processes started from here.

    Raises:
        ConfigError: the folder has such a module, but Python would import another one.
    """
    top = name.replace(":", ".").partition(".")[0]
    for folder in folders:
        if not any(_is_same(path, folder) for path in sys.path):
            sys.path.append(str(folder.resolve()))
            importlib.invalidate_caches()
        beside = next((path for path in (folder / f"{top}.py", folder / top / "__init__.py") if path.is_file()), None)
        if beside is not None and not _is_same(found := _origin(top), beside):
            raise ConfigError(
                f"{key}={name}: {beside} is next to the recipe, but Python imports {found} as {top}. Rename your module."
            )


def _origin(module: str) -> str:
    """Return the file that a top-level module is, or would be, imported from."""
    if (loaded := sys.modules.get(module)) is not None:
        return getattr(loaded, "__file__", None) or "a built-in module"
    spec = importlib.util.find_spec(module)
    return (spec and spec.origin) or "nothing"


def _is_same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _reason(error: BaseException, module: str) -> str:
    """Say what went wrong in an import, and in which line of the imported code."""
    if isinstance(error, SystemExit):
        what = f"importing {module} calls sys.exit({error.code!r}); put what it runs under if __name__ == '__main__':"
    elif isinstance(error, (ImportError, AttributeError, ValueError, SyntaxError)):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    # wandb puts a function of its own in the place of sys.exit.
    own = [frame for frame in frames if "importlib" not in frame.filename and "wandb" not in Path(frame.filename).parts]
    return f"{what} ({own[-1].filename}, line {own[-1].lineno})" if own else what
