"""Orders of a pipeline: torch's own, and their idle time that of the papers."""

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from hftune.config.sections import ParallelConfig
from hftune.strategies.pipeline_schedules import Action, Pass, idle_share, order_of


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


class Recorder:
    """A stage for torch's schedules that computes nothing, and notes what it is asked for."""

    is_first, is_last, has_backward, num_stages, submod = True, False, False, 4, None

    def __init__(self, place):
        self.stage_index, self.asked = place, []

    def forward_one_chunk(self, index, *args, **kwargs):
        self.asked.append(Action(self.stage_index, Pass.FORWARD, index))

    def backward_one_chunk(self, index, *args, **kwargs):
        self.asked.append(Action(self.stage_index, Pass.BACKWARD, index))

    def __getattr__(self, name):
        return lambda *args, **kwargs: []


@pytest.mark.parametrize(("schedule", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize("count", [4, 9])
def test_order_is_that_in_which_torch_computes(schedule, kind, count, monkeypatch):
    monkeypatch.setattr(kind, "_initialize_stage", lambda *args: None)
    for place, expected in enumerate(order_of(config(schedule, 4), count)):
        stage = Recorder(place)
        kind(stage, count)._step_microbatches([()] * count, [{}] * count)
        assert stage.asked == expected
