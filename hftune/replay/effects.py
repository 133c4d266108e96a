"""What differences between two runs can change in a training: names for sets of effects, and those of each recipe key."""

from __future__ import annotations

from hftune.config import reference
from hftune.config.keys import Effect, effects

NOTHING: frozenset[Effect] = frozenset()
RATE, UPDATE, ROUNDING = frozenset({Effect.LR}), frozenset({Effect.UPDATE}), frozenset({Effect.ROUNDING})
CONTENT = frozenset({Effect.ITEMS, Effect.FORWARD, Effect.BACKWARD})
MODEL, DATA = effects("model"), effects("data")
ANYTHING = frozenset(Effect) - {Effect.OUTPUT}
UNKNOWN = ANYTHING - RATE
"""Of a key whose effects nobody has listed: a task's fields cannot touch the schedule."""


def effects_of(key: str) -> frozenset[Effect]:
    """Return what a recipe key can change in a training."""
    return reference.effects_of(key) - {Effect.OUTPUT}
