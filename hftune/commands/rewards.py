"""What scores answers for ``hftune sample``: a Python function of the user's, or a finished run that gives scores."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hftune.checkpoints.run_folder import check_answers, here, open_run
from hftune.commands.predict_data import stamps
from hftune.config.addresses import is_address
from hftune.config.importing import find_beside, import_named
from hftune.config.own_code import hashes_of
from hftune.config.recipe import type_name
from hftune.data.table import Table
from hftune.errors import ConfigError, DataError, cut, first_line
from hftune.task import Task

if TYPE_CHECKING:
    from hftune.inference import TrainedModel

SHOWN = 60
"""Characters of an answer in a message."""


class Reward(Protocol):
    """Scores the answers to a prompt."""

    digest: Any
    """Changes if the scores may; JSON-serializable."""
    compared: Any
    """The part of it that is the same on all machines, which the times of files are not."""

    def __call__(self, prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        """Return the score of each answer, a finite number.

        Args:
            prompt: a text, or a list of messages.
            row: of the table, by column.

        Raises:
            DataError: an answer cannot be scored.
        """


def reward_of(name: str, table: Table, trust_code: bool) -> Reward:
    """Return the reward that ``--reward`` names.

    Raises:
        ConfigError: it is neither a run that gives scores nor a function of prompt and answer.
    """
    if is_address(name) or Path(name).is_dir():
        return RunReward(name, trust_code)
    if re.fullmatch(r"\w+(\.\w+)+", name):
        return FunctionReward(name, table)
    raise ConfigError(
        f"--reward {name} is neither the output folder of a run, such as outputs/reward, nor a function, such as "
        "my_module.score."
    )


@dataclass
class FunctionReward:
    """Calls a function with prompt, answer, and the columns of the row that its further parameters are called as."""

    name: str
    table: Table

    def __post_init__(self) -> None:
        module, _, attribute = self.name.rpartition(".")
        find_beside("--reward", self.name, [Path()])
        self.function: Callable[..., Any] = import_named("--reward", self.name, module, attribute)
        self.digest = self.compared = [self.name, hashes_of([module])]
        if not callable(self.function):
            raise ConfigError(f"--reward {self.name} is {type(self.function).__name__}, not a function.")
        parameters = [*inspect.signature(self.function).parameters.values()]
        named = [
            parameter for parameter in parameters[2:] if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        needed = {parameter.name for parameter in named if parameter.default is parameter.empty}
        if missing := sorted(needed - {*self.table.columns}):
            raise ConfigError(
                f"--reward {self.name} asks for {missing[0]}, which is not a column of {self.table.name}. It has: "
                f"{', '.join(self.table.columns)}."
            )
        self.columns = [own.name for own in named if own.name in self.table.columns]

    def __call__(self, prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        given = {name: row[name] for name in self.columns}
        return [self._score(prompt, answer, given) for answer in answers]

    def _score(self, prompt: Any, answer: str, given: Mapping[str, Any]) -> float:
        try:
            value = self.function(deepcopy(prompt), answer, **deepcopy(given))  # it may change them
        except Exception as error:  # whatever the user's code raises
            raise DataError(f"--reward {self.name} failed on {_shown(answer)}: {first_line(error)}.") from error
        try:
            score = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise DataError(f"--reward {self.name} returned {value!r} for {_shown(answer)}, and not a finite number.")
        return score


@dataclass
class RunReward:
    """Scores by the model of a run, which is loaded when it is first needed, whole on each process.

    The answers to a prompt are computed by themselves, so that their scores do not depend on the prompts beside it.
    """

    name: str
    trust_code: bool

    def __post_init__(self) -> None:
        recipe, folder = open_run(self.name, self.trust_code)
        check_answers(recipe.task)
        if len(recipe.task.input_columns()) != 2:
            raise self._no_scores(recipe.task)
        self.digest = [self.name, stamps(folder)]
        self.compared = [self.name, [[file, size] for file, size, _ in self.digest[1]]]

    @cached_property
    def model(self) -> TrainedModel:
        from hftune.inference import load_model

        return load_model(here(self.name, "model"), trust_code=self.trust_code)

    def __call__(self, prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        try:
            rows = self.model.predict([[prompt, self._given(answer)] for answer in answers])
        except DataError as error:
            raise DataError(f"--reward {self.name} cannot score an answer: {error}") from error
        if "score" not in rows[0]:
            raise self._no_scores(self.model.recipe.task)
        scores = [row["score"] for row in rows]
        if not all(map(math.isfinite, scores)):
            raise DataError(f"--reward {self.name} gave the scores {scores}, which are not all finite numbers.")
        return scores

    def _given(self, answer: str) -> Any:
        """Return an answer as the task is to read it: a text that looks like a whole conversation is none."""
        from hftune.tasks.chat_task import ChatTask

        reads_chats = isinstance(self.model.recipe.task, ChatTask)
        return [{"role": "assistant", "content": answer}] if reads_chats else answer

    def _no_scores(self, task: Task) -> ConfigError:
        return ConfigError(
            f"--reward {self.name}: {type_name(type(task))} gives answers no scores. Name a run of the recipe reward, or a "
            "Python function."
        )


def _shown(answer: str) -> str:
    return f"the answer {cut(answer, SHOWN)!r}"
