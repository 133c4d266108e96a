"""Opens a run's output folder: its recipe, its model. Imports nothing heavy, so that a mistyped path is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

from hftune.checkpoints.export import ABOUT, readable
from hftune.config.addresses import is_address
from hftune.config.recipe import Recipe, type_name
from hftune.errors import ConfigError
from hftune.task import Task

SAMPLE_IMAGES = "samples"
"""Subfolder with images of some samples, written after each evaluation."""
OUT_OF_FOLD = "out_of_fold.jsonl"
"""Predictions of the best model, with the numbers of the rows in the data, if ``task.eval_fold`` is set."""
REPORT = "report.html"
PROFILE = "profile"
"""Subfolder with the traces of ``train.profile``."""


def predictions_file(split: str) -> str:
    """Return the name of the file with the predictions of the last evaluation: of "eval", or of "eval/NAME"."""
    return f"predictions{split.removeprefix('eval').replace('/', '_')}.jsonl"


def here(run: str | Path, *parts: str, key: str = "") -> Path:
    """Return a run, or a part of it, as a path of this machine; see ``fetched`` for what is at an address."""
    if not is_address(str(run)):
        return Path(os.path.expanduser(run))  # noqa: PTH111 - Path's raises for ~nobody
    from hftune.checkpoints.objects import fetched  # imports torch

    return fetched(str(run), *parts, key=key)


def open_run(directory: str | Path, trust_code: bool = False, with_trackers: bool = False) -> tuple[Recipe, Path]:
    """Return the recipe of a run and the folder of its model.

    Args:
        directory: a run's output folder, or its address in a bucket; one of its models, such as outputs/bigbird/model_last; or
            what ``hftune push`` made of it, a model with its recipe.
        trust_code: import the code that the recipe names. The recipe came with the folder, wherever that came from.
        with_trackers: keep the section ``track``, which may name environment variables that this machine does not have.

    Raises:
        ConfigError: there is no such folder, recipe or model; or the recipe names code that is not trusted.
    """
    directory = here(directory, "model")
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder. Name the output folder of a run, such as outputs/bigbird.")
    if (directory / "manifest.json").is_file():
        raise ConfigError(
            f"{directory} is a checkpoint, which a run resumes from. Name the run's output folder; hftune evaluate "
            f"recipe={directory / 'recipe.yaml'} --checkpoint {directory} scores the checkpoint."
        )
    is_run = (directory / "recipe.yaml").is_file()
    is_pushed = is_run and (directory / ABOUT).is_file()
    run = directory if is_run else directory.resolve().parent
    folder = directory / "model" if is_run and not is_pushed else directory
    if not (run / "recipe.yaml").is_file():
        raise ConfigError(f"{directory} holds no recipe.yaml, nor does the folder above. Name the output folder of a run.")
    if not readable(folder).is_dir():
        raise ConfigError(f"{directory} holds no model yet: the first evaluation of its run writes it, or its end.")
    overrides = [] if with_trackers else ["replace=[track]"]
    recipe = Recipe.load(run / "recipe.yaml", *overrides, trust_code=trust_code)
    if not is_run and not any(path.is_file() for path in readable(folder).iterdir()):
        raise ConfigError(f"{directory} is not the folder of a model. Those of this run are {run / 'model'} and model_last.")
    return recipe, folder


def check_answers(task: Task) -> None:
    """Refuse a task that cannot predict from raw inputs, or raise ConfigError."""
    if type(task).predict is Task.predict:
        raise ConfigError(f"{type_name(type(task))} cannot predict from raw inputs. Give it a method predict(model, inputs).")


def check_model(model: Path) -> None:
    """Refuse a folder of a finished model that is not there, or raise ConfigError."""
    if not readable(model).is_dir():
        raise ConfigError(f"{model}: there is no model yet. Its run's first evaluation writes it; or name a --checkpoint.")


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that is not there, or raise ConfigError. Only the main process reads one."""
    if int(os.environ.get("RANK", 0)) == 0 and not path.is_dir():
        raise ConfigError(f"--checkpoint {path}: there is no such folder. Name one such as checkpoints/step_00000500 of a run.")
