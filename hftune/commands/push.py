"""``hftune push``: publish the best model of a run on the Hugging Face Hub, with its card, recipe and result."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, httpx, validate_repo_id

from hftune.checkpoints.export import read, read_about
from hftune.checkpoints.run_folder import here, open_run
from hftune.commands.arguments import add_trust_code, run_path
from hftune.commands.merge import MERGED
from hftune.config import Recipe
from hftune.data.hub import causes_of, network_reason
from hftune.errors import ConfigError, message_of
from hftune.reporting.card import CARD, METRICS, RECIPE, RESULT, card, for_repository, read_facts
from hftune.secrecy import without_secrets
from hftune.tracking.console import data_size, short
from hftune.tracking.facts import NAME as RUN
from hftune.tracking.jsonl import read_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=run_path, help="output folder of a run, such as outputs/yelp, or its address")
    parser.add_argument("repository", metavar="USER/NAME", help="model repository on the Hub, created if necessary")
    parser.add_argument("--private", action="store_true", help="create the repository as a private one")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, created if necessary (default: main)")
    parser.add_argument("--message", help="commit message (default: the model's score)")
    parser.add_argument("--merged", action="store_true", help="push what hftune merge wrote, and not the adapters")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Push the best model of a run in one commit, and print the address of the model as the last line.

    Raises:
        ConfigError: there is nothing that others could load; or the Hub refuses, or cannot be reached.
    """
    repository, folder = options.repository, here(options.folder, "model")
    if repository.count("/") != 1:
        raise ConfigError(f"{repository} is not USER/NAME or ORGANIZATION/NAME, as models on the Hub are called.")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository} cannot be the name of a model on the Hub: {error}") from error
    recipe, model = open_run(folder, options.trust_code)
    if model != folder / "model":
        raise ConfigError(f"{folder} is a single model. Name the output folder of its run, whose best model is pushed.")
    for line in (folder / RECIPE).read_text(encoding="utf-8").splitlines():  # with its section track, whatever wrote it
        if (shown := without_secrets(line)) != line:
            raise ConfigError(f"{folder / RECIPE}: {shown.strip()} holds a password or token. Write it as ${{oc.env:NAME}}.")
    merged = folder / MERGED if options.merged else None
    check_loadable(folder, model, merged)
    if is_offline_mode():
        raise ConfigError("HF_HUB_OFFLINE is set, and nothing can be pushed without the Hub. Unset it.")
    if get_token() is None:
        raise ConfigError(
            f"The Hub ({constants.ENDPOINT}) accepts uploads only from users who are logged in. {how_to_log_in()}"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    api, revision = HfApi(), options.revision
    with refusals(repository):
        user = api.whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"The token of {user['name']} may only read. {how_to_log_in()}")
    with refusals(repository, user["name"]), frozen(folder) as snapshot:
        url = str(api.create_repo(repository, private=options.private or None, exist_ok=True))
        if options.private and not api.model_info(repository).private:
            raise ConfigError(
                f"{repository} exists and is public, and --private is for new repositories. Make it private at {url}/settings, "
                "or choose a different name."
            )
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        files = contents(snapshot, recipe, repository, merged or snapshot / "model")
        size = data_size(sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values()))
        print(f"Pushing {len(files)} files ({size}) to {repository} ...", flush=True)
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()]
        api.create_commit(repository, additions, commit_message=options.message or best_of(snapshot), revision=revision)
    print(url if revision is None else f"{url}/tree/{revision}", flush=True)
    return 0


def check_loadable(folder: Path, model: Path, merged: Path | None) -> None:
    """Refuse adapters of a model on this machine, which nobody else could load, or raise ConfigError.

    Args:
        merged: the folder that hftune merge wrote, if it is to be pushed: it must be there, and of the best adapters.
    """
    if merged is None:
        base = read_object(model / "base.json")
        if base and base["commit"] is None:
            raise ConfigError(
                f"{model} holds adapters of a model on this machine, {base['name'] or model / 'base'}, without which nobody "
                f"can load them. Push the two as one: hftune merge {folder}, then hftune push --merged."
            )
    elif not merged.is_dir():
        raise ConfigError(f"--merged: there is no {merged}. hftune merge {folder} writes it.")
    elif (earlier := read_about(merged)) != (now := read_about(model)):
        raise ConfigError(
            f"--merged: {merged} was made of the adapters of step {earlier.get('step')}, and the best ones now are of step "
            f"{now.get('step')}. hftune merge {folder} writes it again."
        )


def how_to_log_in() -> str:
    """Say how to get a token that may write, and where to put it."""
    page = f"{constants.ENDPOINT}/settings/tokens"
    return f"Create a token with write access at {page}, and log in with `hf auth login` or set HF_TOKEN."


def contents(folder: Path, recipe: Recipe, repository: str, model: Path) -> dict[str, Path | bytes]:
    """Return the files of the repository: those of the model, its card, the recipe, and the result of a finished run."""
    facts = read_facts(folder, recipe, model=model)
    written = model / CARD
    has_card = written.is_file() and (folder / RESULT).is_file()  # else it may be that of an earlier, shorter training
    text = for_repository(written.read_text(encoding="utf-8"), facts, repository) if has_card else None
    files: dict[str, Path | bytes] = {path.relative_to(model).as_posix(): path for path in model.rglob("*") if path.is_file()}
    files |= {name: folder / name for name in (RECIPE, RESULT) if (folder / name).is_file()}
    files[CARD] = (text or card(facts, repository)).encode()
    return dict(sorted(files.items()))


@contextmanager
def frozen(folder: Path) -> Iterator[Path]:
    """Yield the output folder, or, of a run that is not finished, a copy of what is pushed: training may replace the model."""
    if (folder / RESULT).is_file():
        yield folder
        return
    with TemporaryDirectory(dir=folder, prefix=".push-") as temporary:
        copy = Path(temporary)

        def second_name(source: str, target: str) -> None:
            try:
                os.link(source, target)  # which costs neither time nor the space that the next checkpoint needs
            except OSError:  # some file systems have no such names
                shutil.copyfile(source, target)

        def take(model: Path) -> None:
            shutil.rmtree(copy / "model", ignore_errors=True)
            shutil.copytree(model, copy / "model", copy_function=second_name)

        read(folder / "model", take)
        for name in (RECIPE, RUN, METRICS):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, copy / name)
        print(f"{folder} is not finished. This is its best model so far: {best_of(copy)}.", flush=True)
        yield copy


def best_of(folder: Path) -> str:
    """Say which model of a run is its best."""
    best = read_about(folder / "model")
    if "metric" not in best:  # a run that never evaluates
        return f"the last one, after step {best['step']}"
    return f"{best['metric']} {short(best['value'])} after step {best['step']}"


@contextmanager
def refusals(repository: str, user: str | None = None) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one message on what to do.

    Args:
        user: who the token belongs to; None: the Hub has not accepted it yet.

    Raises:
        ConfigError: the block failed to talk to the Hub.
    """
    hub = f"the Hub ({constants.ENDPOINT})"
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = (error.server_message or message_of(error)).rstrip(".")
        if status == 401 and user is None:
            why = f"{hub} does not accept your token, which HF_TOKEN or `hf auth login` has set. {how_to_log_in()}"
        elif status in (401, 403, 404):
            check = f"Check the name; the rights of your tokens are listed at {constants.ENDPOINT}/settings/tokens."
            why = f"{user or 'the token'} may not write there ({status}: {said}). {check}"
        elif status >= 500:
            why = f"{hub} answers {status}. Try again later; files that have arrived are not sent again."
        else:
            why = f"{hub} answers {status}: {said}."
        raise ConfigError(f"{repository} was not pushed: {why}") from error
    except (httpx.HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:  # the last one by Xet
        reached = network_reason([*causes_of(error)]) or f"failed ({message_of(error)})"
        raise ConfigError(
            f"{repository} was not pushed: {hub} {reached}. Check the network and try again; files that have arrived are not "
            "sent again."
        ) from error
    except ValueError as error:  # the Hub has checked the metadata of README.md, which people edit
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{repository} was not pushed: {' '.join(str(error).split())}. Correct model/{CARD}.") from error
