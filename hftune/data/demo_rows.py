"""What the generators of demo data share: rows that are drawn at random, none of them twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]


def distinct_rows(
    make: Callable[[random.Random], Row],
    sizes: Mapping[str, int],
    split: str,
    count: int | None = None,
    seed: int = 0,
    key: Callable[[Row], Any] = str,
) -> Iterator[Row]:
    """Yield rows that ``make`` draws, the same on every machine; no row has the key of another one, in both splits.

    Args:
        sizes: number of rows of "train" and "eval".
        count: number of rows to yield; None: that of ``sizes``.
    """
    rng = random.Random(f"{seed} {split}")
    seen = {key(row) for row in distinct_rows(make, sizes, "train", None, seed, key)} if split == "eval" else set()
    for _ in range(sizes[split] if count is None else count):
        row = make(rng)
        while key(row) in seen:
            row = make(rng)
        seen.add(key(row))
        yield row
