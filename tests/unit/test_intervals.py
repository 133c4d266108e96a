"""Intervals: that they cover what they promise, and where there is none."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_ind, ttest_rel

from hftune.replay.paired import mcnemar, of_independent, of_steps, of_unpaired


def correlated(rho, num_steps, num_runs):
    """AR(1) noise of mean 0, (num_runs, num_steps)."""
    noise = np.random.default_rng(0).normal(size=(num_runs, num_steps))
    for step in range(1, num_steps):
        noise[:, step] += rho * noise[:, step - 1]
    return noise


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.6, 0.90), (0.9, 0.85)])
def test_interval_of_steps_covers_the_mean_although_steps_are_correlated(rho, least):
    found = [of_steps(row) for row in correlated(rho, 250, 400)]
    assert least <= np.mean([not interval.is_significant for interval in found]) <= 0.985
    naive = [of_independent(row[50:]) for row in correlated(rho, 250, 400)]
    assert rho < 0.9 or np.mean([not interval.is_significant for interval in naive]) < 0.5


def test_steps_of_the_beginning_are_left_out_and_few_steps_have_no_interval():
    interval = of_steps([100.0] * 20 + [1.0, 2.0] * 40)
    assert interval.mean == 1.5 and interval.half_width == 0 and interval.is_significant
    assert of_steps(np.ones(59)) is None and of_steps(np.ones(60)) is not None


def test_equal_steps_before_runs_part_do_not_count():
    interval = of_steps([0.0] * 60 + [1.5] * 40)
    assert interval.mean == 1.5 and interval.half_width == 0
    assert of_steps([0.0] * 61 + [1.0] * 39) is None and of_steps(np.zeros(60)).half_width == 0


def test_intervals_are_those_of_student_and_welch():
    a, b = np.random.default_rng(1).normal(size=(2, 12))
    paired, unpaired = ttest_rel(b, a).confidence_interval(), ttest_ind(b, a, equal_var=False).confidence_interval()
    for found, expected in ((of_independent(b - a), paired), (of_unpaired(a, b), unpaired)):
        assert found.mean - found.half_width == pytest.approx(expected.low)
        assert found.mean + found.half_width == pytest.approx(expected.high)


def test_too_few_values_and_values_that_are_not_finite_have_no_interval():
    assert of_independent([1.0]) is None and of_independent([1.0, 2.0], min_count=3) is None
    assert of_independent([1.0, math.nan, 2.0]) is None and of_unpaired([1.0, 2.0], [1.0]) is None
    assert of_unpaired([1.0, 1.0], [2.0, 2.0]).half_width == 0


def test_a_metric_that_is_the_same_in_all_runs_shows_no_difference():
    assert not any(of_unpaired([0.3] * count, [0.3] * other).is_significant for count in range(2, 20) for other in range(2, 20))


@pytest.mark.parametrize(("won", "lost"), [(15, 24), (0, 1), (5, 5), (0, 0), (30, 2)])
def test_mcnemar_is_the_exact_binomial_test(won, lost):
    assert mcnemar(won, lost) == pytest.approx(binomtest(won, won + lost).pvalue if won + lost else 1.0)
