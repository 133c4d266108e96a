"""Trains several recipes one after the other in one process group: starting processes costs more than the small runs."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hftune import Interrupted, Recipe, train
from hftune.strategies.data_parallel import DataParallel


def main() -> None:
    before = dict(os.environ)
    for source, overrides, stop, environment in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.clear()  # accelerate writes there, too
        os.environ.update({**before, **environment})
        recipe = Recipe.load(source, *overrides)
        with weighed(Path(recipe.output_dir)):
            if stop is None:
                train(recipe)
            else:
                with terminated_after(*stop), suppress(Interrupted):
                    train(recipe)


@contextmanager
def weighed(folder: Path) -> Iterator[None]:
    """Write down how many bytes of weights, gradient and moments each process has after a step: bytes-0.json, ..."""
    original = DataParallel.optimizer_step

    def own(tensors: Iterable[Any]) -> int:
        parts = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        return sum(part.numel() * part.element_size() for part in parts if part.ndim)

    def optimizer_step(self: DataParallel, lr: float) -> None:
        parameters = [value for group in self.optimizer.param_groups for value in group["params"]]
        found = {"weights": own(parameters), "gradient": own(value.grad for value in parameters)}
        original(self, lr)
        state = self._bare_optimizer().state
        found["moments"] = own(value for values in state.values() for value in values.values() if value is not None)
        if not (path := folder / f"bytes-{self.process_index}.json").exists():
            path.write_text(json.dumps(found))

    DataParallel.optimizer_step = optimizer_step
    try:
        yield
    finally:
        DataParallel.optimizer_step = original


@contextmanager
def terminated_after(step: int, rank: int) -> Iterator[None]:
    """Send one process SIGTERM as soon as it has taken so many optimizer steps: the step after that is the last."""
    taken, original = 0, DataParallel.optimizer_step

    def optimizer_step(self: DataParallel, lr: float) -> None:
        nonlocal taken
        original(self, lr)
        taken += 1
        if taken == step and self.process_index == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    DataParallel.optimizer_step = optimizer_step
    try:
        yield
    finally:
        DataParallel.optimizer_step = original


if __name__ == "__main__":
    main()
