"""Finds the files of the user's own code, on which results may depend. Independent of what is in them."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from pathlib import Path

from hftune.config.shipped_files import PACKAGE


def hashes_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of modules and of all that they import, by file name.

    Without hftune, Python and installed packages, which have versions: those that pip has listed, wherever they are. Imports
    are read from the source: those inside functions count, and what a process happens to have loaded does not. Modules that
    cannot be found are left to who imports them.
    """
    files, waiting = dict[str, Path](), [*modules]
    while waiting:
        name = waiting.pop()
        if name in files or (path := _file_of(name)) is None:
            continue
        files[name] = path
        with suppress(OSError, SyntaxError, ValueError):  # importing it says what is wrong
            waiting += _imported(name if path.stem == "__init__" else name.rpartition(".")[0], path.read_bytes())
    return {_shown(name, path): sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


def _file_of(module: str) -> Path | None:
    """Return the file of a module of the user's; None for others, and for what is no file, such as a notebook."""
    top, _, rest = module.partition(".")
    for name in (top, module) if rest else (top,):  # the first is enough to know an installed package by
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin is None:
            with suppress(Exception, SystemExit):  # it imports the packages around a module
                origin = getattr(find_spec(name), "origin", None)
        path = Path(origin or "").resolve()
        if origin is not None and (not path.is_file() or any(map(path.is_relative_to, _roots())) or _has_metadata(name, path)):
            return None
    return path if origin is not None else None


@cache
def _roots() -> list[Path]:
    """Return the folders of hftune, Python and installed packages."""
    return [PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))]


def _has_metadata(module: str, path: Path) -> bool:
    """Whether pip installed a module: into a folder of Python's, or by ``--target`` into any."""
    levels = module.count(".") + (path.stem == "__init__")
    folder = path.parents[min(levels, len(path.parents) - 1)]
    return folder.name in ("site-packages", "dist-packages") or path.relative_to(folder).parts[0] in _installed(folder)


@cache
def _installed(folder: Path) -> set[str]:
    """Return the names in a folder that pip put there, as its lists of files say."""
    lists = [path.read_text(encoding="utf-8", errors="ignore") for path in folder.glob("*.dist-info/RECORD")]
    return {line.partition(",")[0].partition("/")[0] for text in lists for line in text.splitlines()}


@cache
def _imported(package: str, source: bytes) -> list[str]:
    """Return the names of modules that a file of a package may import; those of other things are not found."""
    names = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            with suppress(ImportError):
                parent = resolve_name(name, package) if node.level else name
                names += (parent, *(f"{parent}.{alias.name}" for alias in node.names))
    return names


def _shown(module: str, path: Path) -> str:
    folder, _, last = module.replace(".", "/").rpartition("/")
    return "/".join(part for part in (folder, *((last,) if path.stem in ("__init__", "__main__") else ()), path.name) if part)
