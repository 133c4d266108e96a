"""Finds the files shipped beside the code, recipes/ and accelerate_configs/, in a wheel and in a checkout alike."""

from __future__ import annotations

import difflib
from pathlib import Path

from hftune.errors import ConfigError


def resource_dir(kind: str) -> Path:
    """Return the folder ``recipes`` or ``accelerate_configs``: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return package / kind if (package / kind).is_dir() else package.parent / kind


def recipe_names() -> list[str]:
    """List the shipped recipes, sorted."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))


def recipe_path(source: str | Path) -> Path:
    """Resolve a shipped recipe's name, or a path that ends in .yaml, to a file.

    Raises:
        ConfigError: no such file or recipe; the message lists the shipped ones.
    """
    given = Path(source).expanduser()
    if given.suffix in (".yaml", ".yml"):
        if not given.is_file():
            raise ConfigError(f"recipe={source}: there is no such file (looked at {given.resolve()}).")
        return given
    shipped = resource_dir("recipes") / f"{source}.yaml"
    if shipped.is_file() and given.name == str(source):
        return shipped
    near = difflib.get_close_matches(str(source), recipe_names(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"recipe={source}: there is no such recipe.{hint} Shipped: {', '.join(recipe_names())}. "
        "For a file of your own give its path, ending in .yaml."
    )
