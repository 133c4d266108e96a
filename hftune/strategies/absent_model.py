"""Stands for a whole model that no process has gathered. Independent of processes and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class ModelNeeded(BaseException):
    """A task has used the model that it was given for its predictions. Not an error: handlers of errors let it pass."""


USES = ("__getattribute__", "__setattr__", "__call__", "__getitem__", "__iter__", "__len__", "__bool__", "__contains__")


def absent_model(note: Callable[[], None]) -> Any:
    """Return what takes the place of the model: any use of it, even ``isinstance``, calls ``note`` and raises ModelNeeded."""

    def use(*args: Any, **kwargs: Any) -> NoReturn:
        note()
        raise ModelNeeded("the whole model is used here, which this process has not gathered")

    return type("AbsentModel", (), dict.fromkeys(USES, use))()
