"""Be one machine of an elastic job, with an output folder of its own: ``own_folders.py ROUND DEED MACHINES OVERRIDES...``

Forks of the warm interpreter run it, see tests/support/runs.py. The process of rank r is the machine of that place in MACHINES,
whose folder is the working directory. DEED: ``go`` to the end; ``leave-S``: SIGTERM in step S; ``die-S-C``: all are
killed in step S, once rank 1 has a copy of the checkpoint of step C.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hftune import Interrupted, Recipe, loop, train

RANK = int(os.environ["RANK"])


def main(number: str, deed: str, machines: str, *overrides: str) -> None:
    names = machines.split(",")
    home = Path(names[RANK]).resolve()
    agent = home.with_name(f"{home.name}-agent")
    for folder in (home, agent):
        folder.mkdir(exist_ok=True)
    count = str(len(names))
    os.environ |= {"HFTUNE_ROUND": number, "HFTUNE_AGENT_FOLDER": str(agent), "HFTUNE_JOB": "job", "LOCAL_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": count, "GROUP_RANK": str(RANK)}
    copy = Path(names[-1]).resolve() / "out/checkpoints"
    os.chdir(home)
    original = loop.take_step
    act(deed, copy, original)
    try:
        train(Recipe.load("mnist_demo", *overrides, "output_dir=out"))
    except Interrupted:
        assert deed.startswith("leave")
    finally:
        loop.take_step = original


def act(deed: str, copy: Path, original: Callable) -> None:
    """Do the deed between two steps."""
    kind, *numbers = deed.split("-")

    def take_step(run: loop.Run, batch: object) -> None:
        if kind != "go" and run.state.step + 1 == int(numbers[0]):
            if kind == "die":
                until = time.monotonic() + 20
                while not (copy / f"step_{int(numbers[1]):08d}").is_dir() and time.monotonic() < until:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        original(run, batch)

    loop.take_step = take_step


main(*sys.argv[1:])
