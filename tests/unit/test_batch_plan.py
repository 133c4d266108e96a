"""Properties of the batch plan that must hold for any data set and any sizes."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hftune import ConfigError, DataError
from hftune.batch_plan import SURVEYED, BatchPlan, balance, by_length, known_lengths, samples_digest, spread


def lengths_of(num_samples):
    """Lengths from 1 to 40, drawn as bytes: hypothesis takes milliseconds for a list of hundreds of numbers."""
    drawn = st.binary(min_size=num_samples, max_size=num_samples)
    return drawn.map(lambda found: np.frombuffer(found, np.uint8).astype(np.int32) % 40 + 1)


@st.composite
def plans(draw):
    num_samples = draw(st.integers(1, 300))
    lengths = draw(lengths_of(num_samples))
    batch_size = draw(st.integers(1, 50))
    return BatchPlan(
        num_samples,
        batch_size,
        micro_batch_size=draw(st.none() | st.integers(1, batch_size)),
        micro_batch_tokens=draw(st.none() | st.integers(40, 200)),
        lengths=draw(st.sampled_from([lengths, lengths.astype(np.int64)])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(plans(), st.integers(0, 5))
def test_every_sample_is_used_exactly_once_an_epoch(plan, epoch):
    used = np.concatenate([micro_batch.samples for step in plan.epoch(epoch) for micro_batch in step])
    assert sorted(used) == list(range(plan.num_samples))


@given(plans())
def test_global_batches_have_exactly_batch_size_samples_but_for_the_last(plan):
    sizes = [sum(len(micro_batch.samples) for micro_batch in step) for step in plan.epoch(0)]
    assert len(sizes) == plan.num_steps
    assert all(size == plan.batch_size for size in sizes[:-1])
    assert 1 <= sizes[-1] <= plan.batch_size


@given(plans())
def test_micro_batches_keep_both_bounds_and_are_never_empty(plan):
    for micro_batch in (micro_batch for step in plan.epoch(0) for micro_batch in step):
        size, longest = len(micro_batch.samples), plan.lengths[micro_batch.samples].max()
        assert 1 <= size <= (plan.micro_batch_size or plan.batch_size)
        assert micro_batch.cost == size * longest <= (plan.micro_batch_tokens or np.inf)


@given(plans())
def test_samples_of_a_step_are_sorted_by_length_and_micro_batches_numbered(plan):
    for step in plan.epoch(0):
        lengths = plan.lengths[np.concatenate([micro_batch.samples for micro_batch in step])]
        assert (np.diff(lengths) <= 0).all()
        assert [micro_batch.index for micro_batch in step] == list(range(len(step)))


@given(plans())
def test_a_plan_is_a_pure_function_of_its_fields(plan):
    twin = BatchPlan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__})
    assert [step_samples(step) for step in plan.epoch(3)] == [step_samples(step) for step in twin.epoch(3)]


@st.composite
def plans_of_sizes(draw):
    """Plans of samples of two sizes, that are padded each by itself: added up, or multiplied."""
    num_samples = draw(st.integers(1, 200))
    sizes = draw(lengths_of(2 * num_samples)).reshape(num_samples, 2)
    padded_length = draw(st.sampled_from([sum, math.prod]))
    batch_size = draw(st.integers(1, 50))
    return BatchPlan(
        num_samples,
        batch_size,
        micro_batch_size=draw(st.none() | st.integers(1, batch_size)),
        micro_batch_tokens=draw(st.none() | st.integers(1600, 5000)),
        lengths=np.array([padded_length(pair) for pair in sizes.tolist()], np.int32),
        seed=draw(st.integers(0, 2**32 - 1)),
        sizes=sizes,
        padded_length=padded_length,
    )


@given(plans_of_sizes())
def test_both_bounds_hold_where_several_sizes_are_padded_each_by_itself(plan):
    used = []
    for micro_batch in (micro_batch for step in plan.epoch(0) for micro_batch in step):
        rows = len(micro_batch.samples)
        padded = rows * plan.padded_length(plan.sizes[micro_batch.samples].max(0).tolist())
        assert 1 <= rows <= (plan.micro_batch_size or plan.batch_size)
        assert plan.lengths[micro_batch.samples].sum() <= micro_batch.cost == padded <= (plan.micro_batch_tokens or np.inf)
        assert micro_batch.cost <= rows * plan.most_padded
        used += micro_batch.samples.tolist()
    assert sorted(used) == list(range(plan.num_samples))


@given(plans_of_sizes())
def test_micro_batches_of_several_sizes_are_as_few_as_the_bounds_allow(plan):
    for step in plan.epoch(0):
        sizes = plan.sizes[np.concatenate([micro_batch.samples for micro_batch in step])]
        rows, tokens, start, fewest = plan.micro_batch_size or 10**9, plan.micro_batch_tokens or 10**9, 0, 0
        while start < len(sizes):
            stop = start + 1
            while stop < len(sizes) and stop - start < rows:
                if plan.padded_length(sizes[start : stop + 1].max(0).tolist()) * (stop + 1 - start) > tokens:
                    break
                stop += 1
            start, fewest = stop, fewest + 1
        assert len(step) == fewest


def test_a_row_that_does_not_fit_by_itself_is_refused_by_its_padded_length():
    def in_blocks(sizes):
        return -(-sizes[0] // 8) * 8 + sizes[1]

    sizes = np.array([[3, 2], [9, 2], [4, 4]])
    with pytest.raises(ConfigError) as caught:
        BatchPlan(3, 3, micro_batch_tokens=17, lengths=sizes.sum(1), sizes=sizes, padded_length=in_blocks)
    assert str(caught.value).startswith("train.micro_batch_tokens=17 cannot hold sample 1 with its 18 tokens.")


def test_the_longest_samples_hold_the_largest_of_each_size():
    sizes = np.array([[1, 9], [8, 8], [10, 1], [7, 7]])
    plan = BatchPlan(4, 4, lengths=sizes.sum(1), sizes=sizes)
    assert [plan.longest(count).tolist() for count in (1, 3, 9)] == [[1], [1, 2, 0], [1, 2, 0, 3]]
    assert BatchPlan(4, 4, lengths=sizes.sum(1)).longest(2).tolist() == [1, 3]


def step_samples(step):
    return [micro_batch.samples.tolist() for micro_batch in step]


@given(plans())
def test_what_a_global_batch_contains_does_not_depend_on_lengths_or_micro_batches(plan):
    bare = BatchPlan(plan.num_samples, plan.batch_size, seed=plan.seed)
    for step, other in zip(plan.epoch(1), bare.epoch(1), strict=True):
        assert set(np.concatenate([m.samples for m in step])) == set(np.concatenate([m.samples for m in other]))


def test_each_epoch_and_each_seed_has_another_order():
    orders = [tuple(BatchPlan(50, 50, seed=seed).epoch(epoch).order_N) for seed in (0, 1, 2**32 - 1) for epoch in range(4)]
    assert len(set(orders)) == 12


def test_the_order_is_the_same_on_every_machine_and_for_ever():
    # Written down once: a run that is resumed under another numpy must find the same samples.
    assert BatchPlan(10, 10, seed=42).epoch(0).order_N.tolist() == [5, 0, 6, 4, 2, 7, 3, 1, 8, 9]


def test_unshuffled_plan_keeps_dataset_order_where_lengths_are_equal():
    assert BatchPlan(7, 3, shuffle=False).epoch(9).order_N.tolist() == list(range(7))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_balance_deals_every_item_once_and_no_rank_is_far_above_its_share(costs, num_bins):
    bins = balance(costs, num_bins)
    assert sorted(item for items in bins for item in items) == list(range(len(costs)))
    heaviest = max(sum(costs[item] for item in items) for items in bins)
    best_possible = max(max(costs), -(-sum(costs) // num_bins))
    # Graham's bound is 4/3 of the optimum; the optimum itself is at most twice this lower bound.
    assert heaviest <= sum(costs) / num_bins + max(costs) and heaviest <= 2 * best_possible


@given(st.lists(st.integers(0, 9) | st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 70))
def test_balance_gives_each_item_to_the_lightest_bin_then_to_the_one_of_fewest_items_then_to_the_first(costs, num_bins):
    expected = [[] for _ in range(num_bins)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        min(expected, key=lambda items: (sum(costs[other] for other in items), len(items))).append(item)
    assert balance(costs, num_bins) == [sorted(items) for items in expected]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_step_bounded_in_tokens_is_balanced_over_ranks(num_ranks):
    lengths = np.random.RandomState(0).lognormal(4, 0.8, 4096).clip(1, 512).astype(np.int32)
    for step in list(BatchPlan(4096, 256, micro_batch_tokens=1024, lengths=lengths).epoch(0))[:4]:
        costs = [micro_batch.cost for micro_batch in step]
        loads = [sum(costs[item] for item in items) for items in balance(costs, num_ranks)]
        assert max(loads) <= 1.25 * sum(costs) / num_ranks


@given(plans())
def test_micro_batches_are_as_few_as_the_bounds_allow(plan):
    for step in plan.epoch(0):
        lengths = plan.lengths[np.concatenate([micro_batch.samples for micro_batch in step])]
        rows, tokens, stop, fewest = plan.micro_batch_size or 10**9, plan.micro_batch_tokens or 10**9, 0, 0
        while stop < len(lengths):  # filling each one up is optimal: no later start can reach further
            stop, fewest = stop + min(rows, tokens // int(lengths[stop])), fewest + 1
        assert len(step) == fewest


def test_micro_batches_are_evened_out():
    # Filled up to 40 tokens they would cost 4 x 10 = 40 and 4 x 2 = 8; as few, and evener, are 3 x 10 and 5 x 5.
    lengths = np.array([10, 10, 5, 5, 2, 2, 2, 2])
    (step,) = BatchPlan(8, 8, micro_batch_tokens=40, lengths=lengths).epoch(0)
    assert [micro_batch.cost for micro_batch in step] == [30, 25]


def test_token_bound_below_the_longest_sample_is_refused():
    with pytest.raises(ConfigError) as caught:
        BatchPlan(3, 3, micro_batch_tokens=9, lengths=np.array([4, 12, 2]))
    assert str(caught.value) == (
        "train.micro_batch_tokens=9 cannot hold sample 1 with its 12 tokens. Raise it, or lower the task's maximum length."
    )


def test_token_bound_without_lengths_is_refused():
    with pytest.raises(ConfigError) as caught:
        BatchPlan(3, 3, micro_batch_tokens=9)
    assert str(caught.value) == (
        "train.micro_batch_tokens needs a task whose samples have lengths; this task's have none. Set train.micro_batch_size instead."
    )


@st.composite
def packed_plans(draw):
    num_samples, batch_size = draw(st.integers(1, 200)), draw(st.integers(1, 50))
    return BatchPlan(
        num_samples,
        batch_size,
        micro_batch_size=draw(st.none() | st.integers(1, batch_size)),
        micro_batch_tokens=draw(st.none() | st.integers(40, 200)),
        lengths=draw(lengths_of(num_samples)),
        packed=True,
        parts=draw(st.none() | st.integers(1, batch_size)),
        width=draw(st.none() | st.integers(1, 8)),
    )


@given(packed_plans())
def test_a_packed_plan_keeps_its_bounds_and_uses_every_sample_once(plan):
    used = []
    for step in plan.epoch(0):
        samples = sum(len(micro_batch.samples) for micro_batch in step)
        assert len(step) == samples or len(step) % (plan.parts or 1) == 0
        for micro_batch in step:
            lengths = plan.lengths[micro_batch.samples]
            assert micro_batch.tokens == lengths.sum() <= (plan.micro_batch_tokens or np.inf)
            assert micro_batch.length == lengths.max() and len(lengths) <= (plan.micro_batch_size or np.inf)
            assert micro_batch.cost == sum(
                length + (length**2 // (6 * plan.width) if plan.width else 0) for length in lengths.tolist()
            )
            used += micro_batch.samples.tolist()
        assert [micro_batch.index for micro_batch in step] == list(range(len(step)))
        assert np.all(np.diff([micro_batch.cost for micro_batch in step]) >= 0)  # the largest last
    assert sorted(used) == list(range(plan.num_samples))


def test_packed_steps_are_dealt_together_as_each_by_itself(monkeypatch):
    lengths = np.random.default_rng(0).lognormal(4, 1, 3010).astype(int).clip(1, 512)
    # Often too few micro-batches at first, as some would have too many rows
    plan = BatchPlan(3010, 16, 5, 700, lengths, packed=True, parts=2, width=64)
    together = [*plan.epoch(0)]
    monkeypatch.setattr("hftune.batch_plan.AT_ONCE", 1)
    assert repr(together) == repr([*plan.epoch(0)])


def test_processes_share_packed_steps_evenly():
    lengths = np.random.default_rng(0).lognormal(4.8, 0.6, 20_000).astype(int).clip(8, 512)
    for batch_size, tokens, parts, floor in ((32, None, 4, {2: 0.995, 4: 0.97}), (128, 4096, 8, {2: 0.998, 4: 0.998, 8: 0.99})):
        settings = {"micro_batch_tokens": tokens, "lengths": lengths, "width": 384}
        packed = BatchPlan(len(lengths), batch_size, packed=True, parts=parts, **settings)
        padded = BatchPlan(len(lengths), batch_size, micro_batch_size=None if tokens else 8, **settings)
        for processes, least in floor.items():
            assert evenness(packed, processes) > least > evenness(padded, processes)


def evenness(plan, processes):
    """Return the mean load of a process over the largest, of all full steps."""
    mean = most = 0
    for step in list(plan.epoch(0))[:-1]:
        loads = [sum(step[index].cost for index in share) for share in balance([part.cost for part in step], processes)]
        mean, most = mean + sum(loads) / processes, most + max(loads)
    return mean / most


def test_a_packed_micro_batch_has_bounded_padding_because_heads_compute_it():
    lengths = np.array([1000] + [1] * 99)
    for step in BatchPlan(100, 100, micro_batch_tokens=1000, lengths=lengths, packed=True).epoch(0):
        assert all(len(micro_batch.samples) * micro_batch.length <= 4000 for micro_batch in step)


@given(plans(), st.integers(1, 9))
def test_a_padded_step_has_a_multiple_of_the_parts_or_a_micro_batch_a_sample(plan, parts):
    plan = dataclasses.replace(plan, parts=parts)
    for step in plan.epoch(0):
        samples = sum(len(micro_batch.samples) for micro_batch in step)
        assert len(step) % parts == 0 or len(step) == samples
        assert all(1 <= len(part.samples) <= (plan.micro_batch_size or np.inf) for part in step)
        assert all(part.tokens <= (plan.micro_batch_tokens or np.inf) for part in step)


def test_one_long_sample_does_not_shrink_all_micro_batches():
    lengths = np.random.default_rng(2).integers(12, 20, 512)
    lengths[:5] = 512
    (step,) = BatchPlan(512, 512, micro_batch_tokens=4096, lengths=lengths, packed=True).epoch(0)
    assert len(step) <= 8  # five of them have few rows; without padding's bound three would do


def test_a_bound_of_samples_costs_a_packed_step_no_micro_batches():
    lengths = np.random.default_rng(1).integers(1, 100, 64)
    steps = BatchPlan(64, 16, micro_batch_size=2, lengths=lengths, packed=True, parts=4).epoch(0)
    assert [[len(part.samples) for part in step] for step in steps] == [[2] * 8] * 4


def test_samples_without_lengths_are_cut_into_equal_parts():
    sizes = [[len(part.samples) for part in step] for step in BatchPlan(20, 10, micro_batch_size=8, parts=4).epoch(0)]
    assert [sorted(step) for step in sizes] == [[1, 3, 3, 3]] * 2


def test_digest_of_samples_is_that_of_earlier_versions():
    # Ledgers hold it, and are compared with runs of today.
    assert samples_digest(np.arange(1000)) == (2121805609195, 2115044550853)


class Lazy:
    """Lengths that are known only where they are asked for."""

    def __init__(self, lengths):
        self.lengths, self.asked, self.expected = lengths, [], []

    def __len__(self):
        return len(self.lengths)

    def expect(self, order, start):
        self.expected.append(order[start:].tolist())

    def __getitem__(self, samples):
        self.asked += samples.tolist()
        return self.lengths[samples]


@given(plans())
def test_a_step_asks_for_the_lengths_of_its_own_samples_only(plan):
    lazy = Lazy(plan.lengths)
    order, expected = dataclasses.replace(plan, lengths=lazy).epoch(1), plan.epoch(1)
    for step in range(len(expected)):
        lazy.asked.clear()
        found = [[part.samples.tolist() for part in one[step]] for one in (order, expected)]
        assert found[0] == found[1] and {*lazy.asked} == {*order.samples(step).tolist()}


def test_sample_without_a_length_is_left_out_of_its_step():
    plan = BatchPlan(6, 3, lengths=np.array([4, -1, 2, -1, -1, 1]), shuffle=False, micro_batch_size=2)
    assert [part.samples.tolist() for part in plan.epoch(0)[0]] == [[0, 2]]
    assert [part.samples.tolist() for part in plan.epoch(0)[1]] == [[5]]
    assert by_length(plan.lengths).tolist() == [5, 2, 0]
    nothing = BatchPlan(4, 2, lengths=Lazy(np.array([1, 1, -1, -1])), shuffle=False)
    with pytest.raises(DataError, match="None of the 2 rows of a step"):
        nothing.epoch(0)[1]
    with pytest.raises(DataError, match="None of 3 training rows that were looked at"):
        known_lengths(np.full(3, -1))


def test_sample_that_no_micro_batch_can_hold_is_refused_when_its_step_comes():
    plan = BatchPlan(4, 2, micro_batch_tokens=5, lengths=Lazy(np.array([2, 2, 9, 1])), shuffle=False)
    assert len(plan.epoch(0)[0]) == 1
    with pytest.raises(ConfigError, match="micro_batch_tokens=5 cannot hold sample 2 with its 9 tokens"):
        plan.epoch(0)[1]
    sizes = Lazy(np.array([[2, 2], [3, 1], [1, 1], [4, 5]]))
    plan = BatchPlan(4, 2, micro_batch_tokens=8, lengths=Lazy(sizes.lengths.sum(1)), sizes=sizes, shuffle=False)
    assert sum(len(part.samples) for part in plan.epoch(0)[0]) == 2
    with pytest.raises(ConfigError, match="micro_batch_tokens=8 cannot hold sample 3 with its 9 tokens"):
        plan.epoch(0)[1]


def test_what_follows_from_lengths_follows_from_samples_spread_over_all():
    assert spread(5).tolist() == [0, 1, 2, 3, 4] and spread(10, 4, run=1).tolist() == [0, 3, 6, 9]
    lengths = np.arange(1, 20_001)
    samples, known = known_lengths(Lazy(lengths))
    assert len(samples) == SURVEYED and samples[0] == 0 and samples[-1] > 19_990 and (known == lengths[samples]).all()
    assert len(known_lengths(lengths)[0]) == 20_000 and len(known_lengths(lengths, SURVEYED)[0]) == SURVEYED


def test_samples_are_shuffled_in_windows_of_groups_that_are_shuffled():
    groups = [30, 5, 40, 25, 50, 50]
    plan = BatchPlan(200, 8, window=60, groups=groups, seed=3)
    owner = np.repeat(np.arange(6), groups)
    for epoch in range(3):
        order = plan.epoch(epoch).order_N
        assert sorted(order.tolist()) == [*range(200)]
        spans = [(places.min(), places.max()) for places in (np.flatnonzero(owner[order] == group) for group in range(6))]
        firsts = sorted({first for first, _ in spans})
        # Groups of one window are mixed, and those of different ones are apart, so that each is read once.
        sizes = np.diff([*[first for first in firsts if all(last < first or begin >= first for begin, last in spans)], 200])
        assert (sizes[:-1] >= 60).all() and len(sizes) >= 2
        assert order.tolist() != plan.epoch(epoch + 1).order_N.tolist()
    assert plan.epoch(1).order_N.tolist() == BatchPlan(200, 16, window=60, groups=groups, seed=3).epoch(1).order_N.tolist()


def test_window_of_all_samples_is_the_usual_shuffle():
    wide = BatchPlan(200, 8, window=200, groups=[150, 50], seed=3)
    assert wide.epoch(2).order_N.tolist() == BatchPlan(200, 8, seed=3).epoch(2).order_N.tolist()


def test_samples_of_a_mixture_are_shuffled_in_windows():
    plan = BatchPlan(60, 8, mixture=[(40, 0.5), (20, 2)], window=16, groups=[10] * 6, seed=3)
    order = plan.epoch(0).order_N
    assert len(order) == 60 and (np.bincount(order[order >= 40])[40:] == 2).all() and len({*order[order < 40].tolist()}) == 20


def test_step_says_which_samples_follow():
    lazy = Lazy(np.arange(1, 21))
    epoch = BatchPlan(20, 4, lengths=lazy).epoch(0)
    epoch[3]
    assert lazy.expected == [epoch.order_N[12:].tolist()]


def test_samples_to_survey_are_runs_that_are_read_together():
    some = spread(1_000_000)
    assert len(some) == len({*some.tolist()}) == 4096 and some[-1] < 1_000_000
    assert (np.diff(some) == 1).sum() == 4096 - 16 and (spread(5000, 4999) < 5000).all()
