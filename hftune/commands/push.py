"""``hftune push``: publish the best model of a run on the Hugging Face Hub, with its card, recipe and result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hftune.commands.arguments import add_trust_code
from hftune.commands.merge import MERGED
from hftune.errors import ConfigError
from hftune.secrecy import without_secrets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="output folder of a run, such as outputs/yelp")
    parser.add_argument("repository", metavar="USER/NAME", help="model repository on the Hub, created if necessary")
    parser.add_argument("--private", action="store_true", help="create the repository as a private one")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, created if necessary (default: main)")
    parser.add_argument("--message", help="commit message (default: the model's score)")
    parser.add_argument("--merged", action="store_true", help="push what hftune merge wrote, and not the adapters")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Push, and print the address of the model as the last line."""
    check_name(options.repository)
    from hftune.checkpoints.run_folder import open_run

    folder = options.folder
    recipe, model = open_run(folder, options.trust_code)
    if model != folder / "model":
        raise ConfigError(f"{folder} is a single model. Name the output folder of its run, whose best model is pushed.")
    check_passwords(folder / "recipe.yaml")
    merged = folder / MERGED if options.merged else None
    if merged is None:
        check_base(model, folder)
    else:
        check_merged(merged, model)
    from hftune.commands.upload import check_token, upload

    check_token()
    address = upload(folder, recipe, options.repository, options.private, options.revision, options.message, merged)
    print(address, flush=True)
    return 0


def check_base(model: Path, folder: Path) -> None:
    """Refuse adapters that belong to a model on this machine, which nobody else could load, or raise ConfigError."""
    path = model / "base.json"
    if not path.is_file():
        return
    base = json.loads(path.read_text(encoding="utf-8"))
    if base["commit"] is None:
        where = base["name"] or model / "base"
        raise ConfigError(
            f"{model} holds adapters of a model on this machine, {where}, without which nobody can load them. Push the two as "
            f"one: hftune merge {folder}, then hftune push --merged."
        )


def check_merged(merged: Path, model: Path) -> None:
    """Refuse to push a merged model that is not there, or was made of earlier adapters, or raise ConfigError."""
    from hftune.checkpoints.export import read_about

    if not merged.is_dir():
        raise ConfigError(f"--merged: there is no {merged}. hftune merge {merged.parent} writes it.")
    if (earlier := read_about(merged)) != (now := read_about(model)):
        raise ConfigError(
            f"--merged: {merged} was made of the adapters of step {earlier.get('step')}, and the best ones now are of step "
            f"{now.get('step')}. hftune merge {merged.parent} writes it again."
        )


def check_passwords(recipe: Path) -> None:
    """Refuse to publish a password or token that an earlier version wrote, or raise ConfigError."""
    text = recipe.read_text(encoding="utf-8")
    for line in text.splitlines():
        if (shown := without_secrets(line)) != line:
            raise ConfigError(
                f"{recipe} holds a password or token, in {shown.strip()}, and would be published. Write it as a "
                "reference to an environment variable, ${oc.env:NAME}."
            )


def check_name(repository: str) -> None:
    """Refuse what the Hub would not take as the name of a model, or raise ConfigError."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repository.count("/") != 1:
        raise ConfigError(f"{repository} is not USER/NAME or ORGANIZATION/NAME, as models on the Hub are called.")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository} cannot be the name of a model on the Hub: {error}") from error
