"""What torchrun and accelerate launch find as the rendezvous backend "hftune" (an entry point in pyproject.toml).

torchrun calls it while it is being imported, whatever its backend. So it imports what it needs only once it is asked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

REMINDER_S = 15.0


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of the handler for ``rdzv_backend: hftune``.

    If torchrun starts hftune with a different backend, reminders are printed meanwhile.
    """
    is_ours = threading.Event()
    if any(before in ("-m", "--module") and word.startswith("hftune.") for before, word in pairwise(sys.argv)):
        if problem := range_problem(sys.argv):
            print(f"hftune: {problem}", file=sys.stderr, flush=True)
            sys.exit(2)
        threading.Thread(target=_remind, args=[is_ours], name="hftune remind", daemon=True).start()

    def create(params: RendezvousParameters) -> RendezvousHandler:
        """Let machines meet once if their number is fixed, again and again for a range; or raise SystemExit with a message."""
        is_ours.set()  # this backend names the missing machines itself
        if params.min_nodes != params.max_nodes or "min_machines" in params.config:
            from hftune.elastic.parameters import attend
            from hftune.elastic.rendezvous import ElasticRendezvous

            return ElasticRendezvous(*attend(params), params.run_id)
        from hftune.launchers.rendezvous import create_fixed

        return create_fixed(params)

    return create


def range_problem(words: Sequence[str]) -> str | None:
    """Say what is wrong with the range of machines in torchrun's command line; None if nothing is, or if there is no range."""
    options = {}
    for word, following in pairwise((*words, "")):
        if word in ("-m", "--module"):
            break
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            options[name[2:].replace("_", "-")] = value if has_value else following
    machines, backend = options.get("nnodes", ""), options.get("rdzv-backend", "static")
    least, is_range, most = machines.partition(":")
    if not is_range:
        return None
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        return (
            f"--nnodes {machines} is no range of machines: write the least number, which is at least 1, and the most, such as "
            "--nnodes 1:4."
        )
    if backend == "hftune" or least == most or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return None
    return (
        f"--nnodes {machines} with --rdzv-backend {backend} does not work: it loses the job with the first machine, and "
        "newcomers and the others may wait for each other without end (torch 2.13). Use --rdzv-backend hftune with "
        "--rdzv-endpoint FOLDER on a file system that all machines share, or HOST:PORT of a machine that stays."
    )


def _remind(is_ours: threading.Event) -> None:
    """Print what a launcher waits for until it starts a process: torch's own backends wait for minutes in silence."""
    began = time.monotonic()
    while not is_ours.wait(REMINDER_S) and not psutil.Process().children():
        print(
            f"hftune: This launcher has started no process for {time.monotonic() - began:.0f} s: it is waiting for the other "
            "machines. Start them with the same number of machines, address and port. With --rdzv-backend hftune "
            "(accelerate: --rdzv_backend) it names the missing ones.",
            file=sys.stderr,
            flush=True,
        )
