"""Orders of a pipeline: torch's own, and their idle time that of the papers."""

import pytest

from hftune.sections import ParallelConfig
from hftune.strategies.schedules import Action, Pass, idle_share, order_of


def config(schedule, places, virtual=None):
    return ParallelConfig(places, schedule, virtual)


def in_flight(actions):
    """The most micro-batches, counted once a stage, that are between forward and backward pass."""
    count, most = 0, 0
    for action in actions:
        count += {Pass.FORWARD: 1, Pass.BACKWARD: -1, Pass.BACKWARD_INPUT: 0, Pass.BACKWARD_WEIGHT: -1}[action.what]
        most = max(most, count)
    assert count == 0
    return most


@pytest.mark.parametrize(("places", "count"), [(2, 2), (2, 5), (4, 4), (4, 12), (8, 64)])
def test_idle_shares_are_those_of_the_papers(places, count):
    """GPipe: Huang et al. 2019, section 2.3. 1F1B and interleaved: Narayanan et al. 2021, sections 2.2.1 and 2.2.2. ZB-H1: Qi et
    al. 2023, table 1, with forward, input and weight passes of equal length."""
    one = (places - 1) / (count + places - 1)
    assert idle_share(config("gpipe", places), count) == pytest.approx(one)
    assert idle_share(config("1f1b", places), count) == pytest.approx(one)
    assert idle_share(config("zero_bubble", places), count) == pytest.approx((places - 1) / (3 * count + places - 1))
    if count % places == 0:
        for virtual in (2, 4):
            share = (places - 1) / (virtual * count + places - 1)
            assert idle_share(config("interleaved", places, virtual), count) == pytest.approx(share)


def test_micro_batches_in_flight_are_those_that_memory_is_needed_for():
    assert [in_flight(actions) for actions in order_of(config("gpipe", 4), 9)] == [9, 9, 9, 9]
    assert [in_flight(actions) for actions in order_of(config("1f1b", 4), 9)] == [4, 3, 2, 1]
    assert [in_flight(actions) for actions in order_of(config("1f1b", 4), 4)] == [4, 3, 2, 1]
    assert [in_flight(actions) for actions in order_of(config("interleaved", 2), 4)] == [5, 3]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_stage_computes_every_micro_batch_once_each_way(schedule):
    parallel = config(schedule, 3)
    backward = {Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT} if schedule == "zero_bubble" else {Pass.BACKWARD}
    order = order_of(parallel, 6)
    done = sorted(action for actions in order for action in actions)
    stages, kinds = range(parallel.num_stages), {Pass.FORWARD, *backward}
    assert done == sorted(Action(stage, what, index) for stage in stages for what in kinds for index in range(6))
    assert all(action.stage % 3 == place for place, actions in enumerate(order) for action in actions)


def test_micro_batches_that_fill_up_a_schedule_take_no_time():
    assert idle_share(config("1f1b", 4), 1) == pytest.approx(3 / 4)
    assert idle_share(config("gpipe", 4), 1) == pytest.approx(3 / 4)
    assert config("interleaved", 4).fill_up(7) == 7
    assert config("interleaved", 4).fill_up(9) == 10
    assert idle_share(config("interleaved", 4), 10) < idle_share(config("interleaved", 4), 9)
