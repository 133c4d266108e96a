"""What a rehearsal's processes do: tests/support/worker.py on simulated GPUs, noting whatever makes the host wait, and where.

The interpreter that all of them are forks of has the simulated device, too: libraries ask for GPUs when they are imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rehearsal import simulated_cuda

PARTS = {
    "prepare": "hftune.training:prepare hftune.training:settle_micro_batches hftune.training:warm_up",
    "step": "hftune.loop:take_step",
    "after step": "hftune.loop:tell_step hftune.loop:finish_step",
    "report": "hftune.strategies.base:Strategy.report",
    "evaluation": "hftune.milestones:evaluate",
    "pictures": "hftune.evaluation:ask",
    "generation": "hftune.tasks.seq2seq:SourceToTarget._generate hftune.tasks.chat_task:ChatTask._generate "
    "hftune.tasks.speech_recognition:SpeechToText._generate",
    "export": "hftune.milestones:export_model",
    "checkpoint": "hftune.milestones:save_checkpoint",
    "finish": "hftune.training:finish",
}
"""The functions within which a wait belongs to a part of a training; the innermost one counts."""
COUNTED = {
    "micro-batch": ("step", "hftune.strategies.seeds:LayerSeeds.begin"),
    "batch": ("evaluation", "hftune.evaluation:_score"),
}
"""What is counted besides, within a part."""


class Recorder:
    """Counts waits by the part of the training and the place in hftune's code, and how often each part was come by."""

    def __init__(self):
        self.part, self.waits, self.counts = "start", Counter[tuple[str, str, str]](), Counter[str]()
        self.looks: list[int] = []
        """Of each wait of an evaluation, how many of its batches had been begun."""

    def note(self, kind: str, what: str, num_bytes: int) -> None:
        if kind in ("wait", "race"):
            self.waits[self.part, what, place()] += 1
            if self.part == "evaluation":
                self.looks.append(self.counts["batch"])

    @contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        originals = []
        for part, names in {**PARTS, **{name: function for name, (_, function) in COUNTED.items()}}.items():
            for name in names.split():
                module, _, attributes = name.partition(":")
                *owners, attribute = attributes.split(".")
                owner: Any = importlib.import_module(module)
                for each in owners:
                    owner = getattr(owner, each)
                originals.append((owner, attribute, getattr(owner, attribute)))
                setattr(owner, attribute, self.within(part, originals[-1][2]))
        simulated_cuda.watch(self.note)
        try:
            yield
        finally:
            simulated_cuda.watch(None)
            for original in originals:
                setattr(*original)
            waits = [[*key, count] for key, count in self.waits.items()]
            notes = {"waits": waits, "looks": self.looks, "counts": self.counts, "notes": simulated_cuda.notes()}
            path.write_text(json.dumps(notes))

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, self.part if part in COUNTED else part
            self.counts[part] += part not in COUNTED or before == COUNTED[part][0]
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return wrapper


def place() -> str:
    """Return where this is: file, line and function of hftune's three innermost frames, and of the one that it called."""
    frame, found, called = sys._getframe(1), [], []  # autograd calls from threads without any other
    while frame is not None and len(found) < 3:
        name, where = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
        if "/site-packages/" not in name and "/hftune/" in name:
            found.append(f"{name.rpartition('/hftune/')[2]}:{where}")
        elif not found and not called and "/rehearsal/" not in name:
            called = [f"{name.rpartition('/site-packages/')[2]}:{where}"]
        frame = frame.f_back
    return " < ".join([*called, *found])


def rehearse(jobs: list[Any], as_typed: bool) -> None:
    """Do the jobs of ``worker.work``; beside the output folder of each, write down what was noted."""
    from tests.support import worker

    os.environ["ACCELERATE_USE_CPU"] = "false"
    simulated_cuda.set_device_count(int(os.environ.get("WORLD_SIZE", "1")))
    for job in jobs:
        folder = next((word for word in reversed(job[1]) if word.startswith("output_dir=")), "").partition("=")[2]
        path = Path(f"{folder}-waits-{os.environ.get('RANK', '0')}.json") if folder else Path(os.devnull)
        with Recorder().recording(path):
            worker.work([job], as_typed)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        rehearse(**json.loads(sys.argv[1]))
    else:
        simulated_cuda.install()
        simulated_cuda.set_device_count(2)  # what commands find that are not given to ``rehearse``
        from tests.support import worker

        worker.main(Path(sys.argv[1]))
