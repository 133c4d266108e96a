"""The state of a run in the memory of a process, as a checkpoint that was never written. Independent of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hftune.checkpoints.checkpointer import Checkpoint, path_of
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.strategies.sharding import SavedState

LAST = "last"
"""Key in the progress of such a checkpoint: the last step's values, see ``RestoredState.last``. On disk none has it."""


def in_memory(
    output_dir: Path, saved: SavedState, state: TrainState, provenance: Provenance, last: Mapping[str, Any] | None
) -> Checkpoint:
    """Return the checkpoint of a state, where it would be if it were written into the run's own folder."""
    tensors, values = saved
    progress = {"state": asdict(state), "values": values, **asdict(provenance), LAST: dict(last or {})}
    groups = {name: dict(group) for name, group in tensors.items()}
    return Checkpoint(path_of(output_dir / "checkpoints", state.step), state.step, progress, groups)
