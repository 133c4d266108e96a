"""The searches of hftune bisect, without a training."""

import itertools
import math

import pytest

from hftune import ConfigError
from hftune.replay.bisection import Judge, Scale, find_bad, steps_to_compute

KEYS = list("abcdefgh")


class Tries:
    """Says that sets are bad which hold one of the causes, and counts the tries."""

    def __init__(self, *causes, untriable=lambda keys: False):
        self.causes, self.untriable, self.made = [set(cause) for cause in causes], untriable, []

    def __call__(self, keys):
        self.made.append("".join(keys))
        return not self.untriable(keys) and any(cause <= set(keys) for cause in self.causes)


@pytest.mark.parametrize("cause", [*KEYS, *map("".join, itertools.combinations(KEYS, 2)), "adh", "bcdefg"])
def test_changes_that_act_together_are_found_and_nothing_else(cause):
    tries = Tries(cause)
    assert "".join(find_bad(KEYS, tries)) == cause
    assert "abcdefgh" not in tries.made and len(tries.made) <= 4 * len(cause)


def test_one_cause_takes_few_tries():
    many = [*range(1024)]
    for cause in (0, 511, 1023):
        tries = []
        assert find_bad(many, lambda some: tries.append(some) or cause in some) == [cause]  # noqa: B023
        assert len(tries) <= 11


def test_of_two_causes_that_are_bad_alone_one_is_found():
    assert find_bad(KEYS, Tries("b", "g")) == ["b"]


def test_change_that_cannot_be_tried_without_another_is_found_with_it():
    assert find_bad(KEYS, Tries("cf", untriable=lambda keys: ("c" in keys) != ("d" in keys))) == ["c", "d", "f"]


def test_a_single_change_needs_no_try():
    tries = Tries("a")
    assert find_bad(["a"], tries) == ["a"] and tries.made == []


def test_place_tells_how_far_a_try_is_on_the_way_to_the_bad_end():
    scale = Scale([2, 2, 1.0], [2, 2, 3.0])
    assert [scale.place([2, 2, last]) for last in (1, 2, 3, 4)] == [0, 0.5, 1, 1.5]
    assert scale.place([9, 9, 1]) == 0  # in another direction
    assert scale.difference == pytest.approx(2 / 17**0.5)
    assert Scale([1], [1]).difference == 0 and Scale([0.0], [0.0]).difference == 0
    assert Scale([0.0], [2.0]).difference == 1 and Scale([0.0], [2.0]).place([1.0]) == 0.5  # learned by heart


def test_curves_that_cross_are_apart_and_a_spike_may_come_a_step_later():
    crossing = Scale([3, 3, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3])
    assert crossing.difference > 0.7 and crossing.place([2] * 6) == 0.5
    spiked = Scale([1] * 6, [1, 9, 1, 1, 1, 1])
    assert spiked.place([9, 1, 1, 1, 1, 1]) == 1


def test_losses_count_up_to_a_ceiling_so_that_each_try_that_diverges_is_bad():
    scale = Scale([2, 2, 1.0], [2, 1e20, math.nan])
    assert scale.curve([1, 1, math.nan]) == scale.curve([1, 1, 1e30]) == [1, 1, 20]
    assert scale.place([2, 1e3, math.inf]) == 1 and scale.place([2, 2, 1.2]) < 0.02


def test_steps_are_as_few_as_tell_two_runs_apart():
    good = [2 - step / 200 for step in range(200)]
    late = [loss if step < 30 else loss + 0.5 for step, loss in enumerate(good)]
    assert steps_to_compute(good, [loss + 1 for loss in good]) == 15
    assert 30 < steps_to_compute(good, late) < 40
    assert steps_to_compute(good[:4], late) == 4
    slowly = [loss + step * 1e-5 for step, loss in enumerate(good)]
    assert steps_to_compute(good, slowly) == 100


def test_a_try_that_cannot_be_made_is_noted_and_none_is_made_twice():
    made, seen = [], []

    def compute(changes):
        made.append(changes)
        if "c" in changes:
            raise ConfigError("c needs d.")
        return [1.0, 1.0, 1.0 + len(changes)]

    judge = Judge(compute, Scale([1.0] * 3, [1.0, 1.0, 3.0]), seen.append)
    assert [judge.look(some).is_bad for some in ("ab", "a", "c", "ab")] == [True, False, False, True]
    assert made == ["ab", "a", "c"] and len(seen) == 3
    assert judge.look("c").problem == "c needs d." and judge.look("a").is_unclear
