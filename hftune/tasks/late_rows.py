"""Rows of an evaluation that nobody waits for: a GPU's numbers are copied while it goes on computing. Knows no task."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor


class LateRows(UserList):
    """A list of rows that is made when something first looks at it."""

    def __init__(self, rows: Callable[[], list] | Iterable = ()):  # UserList's methods make new ones of lists
        self._rows = rows

    @cached_property
    def data(self) -> list:  # type: ignore[override]  # what UserList keeps its items in
        return self._rows() if callable(self._rows) else [*self._rows]


def late_rows(make: Callable[..., list[dict[str, Any]]], *values: Any) -> list[dict[str, Any]]:
    """Return the rows that ``make`` makes of values with their tensors on the host; at once, unless those are on a GPU.

    From there they are copied behind what it is computing, into pinned memory, as torch's ``to`` does it; whoever looks at a
    row waits for them all. Evaluations look a batch late.

    Args:
        values: tensors, or mappings and lists of them.
    """
    from torch.utils._pytree import tree_leaves, tree_map

    device = next((value.device for value in tree_leaves(values) if getattr(value, "is_cuda", False)), None)
    if device is None:
        return make(*values)
    import torch

    copies = tree_map(lambda value: value.detach().to("cpu", non_blocking=True) if hasattr(value, "detach") else value, values)
    copied = torch.cuda.current_stream(device).record_event()

    def made() -> list[dict[str, Any]]:
        copied.synchronize()
        return make(*copies)

    return cast(list, LateRows(made))


def late_rows_each(row: Callable[..., dict[str, Any]], *columns: Tensor) -> list[dict[str, Any]]:
    """Return ``late_rows`` that ``row`` makes of each sample's numbers: of each tensor those at its place, as lists."""
    return late_rows(lambda *found: [row(*own) for own in zip(*(each.tolist() for each in found), strict=True)], *columns)
