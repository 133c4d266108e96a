"""Lets Optuna choose the values of a sweep's trials; its journal is in the sweep's folder, so that a search goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hftune.commands.sweep import Trial
from hftune.commands.sweep_space import Range, Space, spell, trial_name
from hftune.config import Recipe

JOURNAL = "optuna.log"


class Search:
    """Trials chosen by Optuna's tree-structured Parzen estimator, seeded by the recipe's seed."""

    def __init__(self, space: Space, folder: Path, num_trials: int, recipe: Recipe):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.folder, self.num_trials = space, folder, num_trials
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        direction = "maximize" if recipe.greater_is_better else "minimize"
        self.study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        begun = self.study.get_trials(deepcopy=False)
        # A sampler that starts again with the same seed would repeat its first draws.
        self.study.sampler = optuna.samplers.TPESampler(seed=(recipe.seed + len(begun)) % 2**32, constant_liar=True)
        self.distributions = distributions(space)
        self._trials: list[Trial] = []
        self._interrupted: list[Trial] = []
        for known in begun:
            if known.state == TrialState.RUNNING and known.params.keys() != self.distributions.keys():
                self.study.tell(known.number, state=TrialState.FAIL)  # ended before all its values were drawn
                continue
            trial = self._trial(known.number, known.params)
            if known.state == TrialState.RUNNING:
                self._interrupted.append(trial)
            elif known.state == TrialState.COMPLETE:
                trial.read_result()
            else:
                trial.state = "failed"
            self._trials.append(trial)
        for trial in [trial for trial in self._interrupted if trial.read_result()]:  # killed after the training
            self._interrupted.remove(trial)
            self.ended(trial)

    @property
    def trials(self) -> list[Trial]:
        return self._trials

    def next(self) -> Trial | None:
        """Return an interrupted trial, or a new one."""
        if self._interrupted:
            return self._interrupted.pop(0)
        if len(self._trials) >= self.num_trials:
            return None
        asked = self.study.ask(self.distributions)
        self._trials.append(self._trial(asked.number, asked.params))
        return self._trials[-1]

    def ended(self, trial: Trial) -> None:
        if trial.value is None:
            self.study.tell(trial.number, state=TrialState.FAIL)
        else:
            self.study.tell(trial.number, trial.value)

    def _trial(self, number: int, params: Mapping[str, Any]) -> Trial:
        values = {key: value if isinstance(value, str) else spell(value) for key, value in params.items()}
        values = {key: values[key] for key in self.space.keys if key in values}
        name = f"{number:04d}_{trial_name(values, self.space.keys)}"
        return Trial(name, values, self.folder / name, number)


def distributions(space: Space) -> dict[str, Any]:
    """Return what Optuna draws from: the listed values, or a range of numbers."""
    return {
        **{key: CategoricalDistribution(values) for key, values in space.lists.items()},
        **{key: _distribution(part) for key, part in space.ranges.items()},
    }


def _distribution(part: Range) -> Any:
    if part.is_whole:
        return IntDistribution(int(part.low), int(part.high), log=part.is_log)
    return FloatDistribution(part.low, part.high, log=part.is_log)
