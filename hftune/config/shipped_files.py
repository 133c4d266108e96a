"""Finds the files shipped beside the code, recipes/ and accelerate_configs/, in a wheel and in a checkout alike."""

from __future__ import annotations

from pathlib import Path

import hftune
from hftune.errors import ConfigError, did_you_mean

PACKAGE = Path(hftune.__file__).resolve().parent
"""The folder of hftune's own code."""


def resource_dir(kind: str) -> Path:
    """Return the folder ``recipes`` or ``accelerate_configs``: inside the package in a wheel, beside it in a checkout."""
    return PACKAGE / kind if (PACKAGE / kind).is_dir() else PACKAGE.parent / kind


def recipe_names() -> list[str]:
    """List the shipped recipes, sorted."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))


def recipe_path(source: str | Path, key: str = "recipe") -> Path:
    """Resolve a shipped recipe's name, or a path that ends in .yaml, to a file.

    Raises:
        ConfigError: no such file or recipe.
    """
    given = Path(source).expanduser()
    if given.suffix in (".yaml", ".yml"):
        try:
            if given.is_dir():
                raise ConfigError(f"{key}={source} is a folder. Name the recipe file in it.")
            if not given.is_file():
                raise ConfigError(f"{key}={source}: there is no such file (looked at {given.resolve()}).")
        except OSError as error:  # a folder above it that this user may not look into
            raise ConfigError(f"{key}={source} cannot be read: {error.strerror}.") from error
        return given
    shipped = resource_dir("recipes") / f"{source}.yaml"
    if shipped.is_file() and given.name == str(source):
        return shipped
    hint = did_you_mean(str(source), recipe_names())
    if (given / "recipe.yaml").exists():
        hint = f" Did you mean {key}={given / 'recipe.yaml'}?"
    raise ConfigError(
        f"{key}={source}: there is no such recipe.{hint} hftune recipes lists those that ship with hftune. "
        "For a file of your own, give its path, ending in .yaml."
    )


def config_names() -> list[str]:
    """List the shipped launch configurations, sorted."""
    return sorted(path.stem for path in resource_dir("accelerate_configs").glob("*.yaml"))


def config_path(name: str) -> Path:
    """Return the file of a shipped launch configuration; its name may be given with folder and ending, too.

    Raises:
        ConfigError: no such configuration; the message lists them.
    """
    stem, names = Path(name).name.removesuffix(".yaml"), config_names()
    if stem not in names or Path(name).parent.name not in ("", "accelerate_configs"):
        raise ConfigError(
            f"{name}: there is no such launch configuration.{did_you_mean(stem, names)} Shipped: {', '.join(names)}."
        )
    return resource_dir("accelerate_configs") / f"{stem}.yaml"


def copy_config(name: str, target: Path, overwrite: bool) -> Path:
    """Copy a shipped launch configuration to ``target``: a file, or an existing folder.

    Raises:
        ConfigError: the file exists and ``overwrite`` was not asked for, or it cannot be written.
    """
    source = config_path(name)
    target = target / source.name if target.is_dir() else target
    try:
        with target.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise ConfigError(
            f"{target} exists. Name a different file with --copy PATH, or overwrite this one with --force."
        ) from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.") from error
    return target
