"""Whether a W&B server answers, and how to leave one that does not. Independent of runs.

wandb tries again for as long as a server fails, and waits for it at the end of the process: on a cluster, that holds GPUs.
Its own bound, ``finish_timeout``, is set when a run begins, and would cut off the upload of a model to a healthy server, too.
"""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from threading import Event

ANSWER_S = 6.0
"""For a server to answer: one that takes longer is taken for dead."""
PAUSE_S = 0.5
QUESTION = b'{"query": "query ServerInfo { serverInfo { cliVersionInfo } }"}'


def answers(url: str) -> bool:
    """Ask a server something; return whether it says anything, be it that it does not know us."""
    request = urllib.request.Request(f"{url}/graphql", QUESTION, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, HTTPException) as error:
        return isinstance(getattr(error, "reason", error), ssl.SSLError)  # a certificate that wandb may accept
    return True


def wait_while_it_answers(done: Event, is_alive: Callable[[], bool]) -> bool:
    """Wait for ``done`` as long as the server answers. Return whether it is done."""
    answered = time.monotonic()
    while not done.wait(PAUSE_S):
        if is_alive():
            answered = time.monotonic()
        elif time.monotonic() - answered >= ANSWER_S:
            return done.is_set()
    return True


def leave() -> None:
    """End wandb's own process, which sends to the server. Its file has everything by now, written once a second."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
    # The connection to that process is broken; without this, the end of the interpreter would say so at length.
    with suppress(Exception, SystemExit):
        wandb.teardown()
