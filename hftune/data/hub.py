"""The Hugging Face Hub: names of repositories, revisions resolved to commits, downloads, and messages for failures.

Independent of tasks. huggingface_hub is imported inside the functions, so that names can be checked without waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.errors import ConfigError, DataError, did_you_mean, message_of

ERRORS = {"model": ConfigError, "dataset": DataError}
_NOUNS = {"model": "model", "dataset": "data set"}
_EXAMPLES = {"model": "google-bert/bert-base-cased", "dataset": "Yelp/yelp_review_full"}


def name_problems(key: str, name: str, kind: str, others: Sequence[str] = ()) -> Iterator[str]:
    """Yield a problem if the name of a repository has no owner.

    Args:
        key: key of the recipe, such as "task.model".
        kind: "model" or "dataset".
        others: other values that the key takes, such as file formats.
    """
    if "/" not in name:
        kinds = f"one of {', '.join(others)} nor " if others else ""
        yield (
            f"{key}={name} is not {kinds}a folder on this machine, and names on the Hub are owner/name, such as "
            f"{_EXAMPLES[kind]}.{did_you_mean(name, others)}"
        )


def commit_of(kind: str, name: str, revision: str | None, key: str, instead: str = "") -> str:
    """Return the commit (SHA-1) of a revision: a branch, a tag or a commit; None for the main branch.

    If the Hub cannot be reached, the commit comes from the cache. ``instead`` is as for ``failure``.

    Raises:
        ConfigError (for a model), DataError (for a data set): there is no such repository or revision, or the Hub does not
            answer and the cache does not have it.
    """
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import RevisionResolutionError
    from huggingface_hub.utils import httpx

    try:
        resolved = HfApi().resolve_revision(name, repo_type=kind, revision=revision, local_files_only=is_offline_mode())
    except (RevisionResolutionError, OSError, ValueError, httpx.HTTPError) as error:
        raise ERRORS[kind](failure(error, kind, name, key, instead)) from error
    return resolved.resolved


def fetch(kind: str, name: str, commit: str, patterns: Sequence[str], key: str, instead: str = "") -> Path:
    """Return a folder with the files of a commit that match the patterns, downloaded once per machine.

    ``instead`` is as for ``failure``.

    Raises:
        ConfigError (for a model), DataError (for a data set): they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import httpx

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=commit, allow_patterns=list(patterns)))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ERRORS[kind](failure(error, kind, name, key, instead)) from error


def failure(error: BaseException, kind: str, name: str, key: str, instead: str = "") -> str:
    """Return a message on why a repository could not be loaded and what to do.

    Args:
        error: error of any library; the errors that it was raised from are examined, too.
        instead: a sentence on how to do without the Hub, added if the Hub does not answer.
    """
    instead = f"Without the Hub, name a folder: {key}=FOLDER." if kind == "model" else instead
    return f"{key}={name} cannot be loaded: {_reason([*causes_of(error)], kind, name, key, instead)}".rstrip()


def _reason(causes: Sequence[BaseException], kind: str, name: str, key: str, instead: str) -> str:
    from huggingface_hub import constants, errors

    noun, page = _NOUNS[kind], f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    if _first(causes, errors.GatedRepoError):
        return f"its owner requires agreement to terms. Accept them at {page} and log in with `hf auth login`, on each machine."
    if _first(causes, errors.RevisionNotFoundError):
        return f"it has no such revision. Correct {key}_revision; the commits are listed at {page}/commits/main."
    response = _first(causes, errors.HfHubHTTPError)
    status = response.response.status_code if response is not None else None
    if status in (401, 403, 404) and not isinstance(response, errors.EntryNotFoundError):
        return f"the Hub has no such {noun}, or it is private. Check the name; for a private one, log in with `hf auth login`."
    if _first(causes, errors.OfflineModeIsEnabled) or constants.is_offline_mode():
        return (
            f"HF_HUB_OFFLINE is set, and the cache ({constants.HF_HOME}) does not have all of it. Run once without "
            f"HF_HUB_OFFLINE, or copy the cache from a machine that has it. {instead}"
        )
    if status is not None and status >= 500:
        return f"the Hub ({constants.ENDPOINT}) answers {status}. Try again later; finished downloads are kept. {instead}"
    if (reached := network_reason(causes)) is not None:
        return (
            f"the Hub ({constants.ENDPOINT}) {reached}. Check the network and try again; finished downloads are kept. "
            f"HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer for an answer; HF_HUB_OFFLINE=1 uses the cache only. {instead}"
        )
    return message_of(causes[0])


def network_reason(causes: Sequence[BaseException]) -> str | None:
    """Return in which way the Hub was not reached: "does not answer in time"; None if these errors are of another kind."""
    from huggingface_hub.utils import httpx

    if _first(causes, httpx.TimeoutException, TimeoutError):
        return "does not answer in time"
    if broken := _first(causes, httpx.RemoteProtocolError):
        return f"closed the connection ({message_of(broken)})"
    if lost := _first(causes, httpx.TransportError, ConnectionError):
        return f"cannot be reached ({message_of(lost)})"
    return None


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and then the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first(causes: Sequence[BaseException], *kinds: type[BaseException]) -> Any:
    return next((cause for cause in causes if isinstance(cause, kinds)), None)


def known(commits: Mapping[str, str | None]) -> dict[str, str]:
    """Return the commits without those that are None, which did not come from the Hub."""
    return {key: commit for key, commit in commits.items() if commit is not None}
