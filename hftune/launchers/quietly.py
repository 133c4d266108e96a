"""``python -m hftune.launchers.quietly accelerate launch ...``: the same without tracebacks of the launcher's own.

The log of a batch job should end with what its processes say. A launcher that a signal stops, or whose processes fail, adds
thirty lines of its own call stack on each node (torch 2.13, accelerate 1.15).
"""

from __future__ import annotations

import signal
import socket
import sys


def main(argv: list[str]) -> int | str:
    """Run ``accelerate launch ...``; return its exit code, or what to print last in place of a traceback."""
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv = [" ".join(argv[:2]), *argv[2:]]
    try:
        launch()
    except SignalException as error:
        print(f"The launcher on {socket.gethostname()} was stopped by {signal.Signals(error.sigval).name}.", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
