"""``python -m hftune.launchers.quietly accelerate launch ...``, or ``torchrun ...``: without the launcher's own tracebacks.

A log should end with what the processes say. A launcher that a signal stops, or whose processes fail, adds thirty lines of its
own call stack on each node (torch 2.13, accelerate 1.15).
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path


def main(argv: list[str]) -> int | str:
    """Run the launcher; return its exit code, or what to print last in place of a traceback."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    is_torchrun = argv[0] == "torchrun"
    if is_torchrun:
        from torch.distributed.run import main as launch

        logging.disable(logging.ERROR)  # that a process failed and the others are being stopped, once for each
        sys.argv = argv
    else:
        from accelerate.commands.launch import main as launch

        sys.argv = [" ".join(argv[:2]), *argv[2:]]
    try:
        launch()
    except SignalException as error:
        print(f"The launcher on {socket.gethostname()} was stopped by {signal.Signals(error.sigval).name}.", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        is_explained = any(Path(failure.error_file).is_file() for failure in error.failures.values())
        # accelerate's is 1: to SLURM's script, STOPPED says that the launcher itself gave up.
        return max(error.get_first_failure()[1].exitcode, 1) if is_torchrun and is_explained else str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
