"""``hftune meeting``: the place where the machines of elastic jobs meet, on a host that stays."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from hftune.errors import ConfigError

PORT = 29500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("port", nargs="?", type=int, default=PORT, help=f"port to open (default {PORT})")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if not 0 < options.port < 2**16:
        raise ConfigError(f"port {options.port} must be between 1 and {2**16 - 1}.")
    from torch.distributed import DistError, TCPStore

    from hftune.launchers.rendezvous import allow_open_files, owner_of

    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in the store's threads, too
    allow_open_files()
    try:
        store = TCPStore("127.0.0.1", options.port, is_master=True, wait_for_workers=False)
    except DistError as error:
        raise ConfigError(f"Port {options.port} cannot be opened{owner_of(options.port)}. Choose a different one.") from error
    where = f"{socket.gethostname()}:{store.port}"
    print(
        f"hftune: machines meet here: torchrun --rdzv-backend hftune --rdzv-endpoint {where}. Whoever reaches this port can "
        "disturb the jobs, so keep it inside your network. Ctrl-C ends it.",
        file=sys.stderr,
        flush=True,
    )
    signal.sigwait(ends)
    return 0
