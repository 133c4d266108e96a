"""Which samples form each global batch, and how it is cut into micro-batches. Pure functions, independent of ranks.

Shape suffixes: S steps of an epoch, B samples of a global batch, M micro-batches of a step, N samples of the dataset,
K sizes of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np

from hftune.errors import ConfigError, DataError

Pairs = tuple[tuple[int, float], ...]


def drawn(count: int, weight: float) -> int:
    """Return how many samples an epoch takes from a data set of ``count`` rows."""
    return max(1, int(weight * count + 0.5))


SURVEYED = 4096
"""What follows from lengths before training, follows from those of at most so many samples: the same, whether samples are
prepared before training or as they are needed."""


def spread(count: int, most: int = SURVEYED, run: int = 256) -> np.ndarray:
    """Return the numbers of at most ``most`` of ``count`` samples: evenly spread runs of some, which are read together."""
    if count <= most:
        return np.arange(count)
    starts = np.linspace(0, max(count - run, 0), -(-most // run)).astype(int)
    return np.unique(np.minimum(starts[:, None] + np.arange(run), count - 1))[:most]


def known_lengths(lengths: Any, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples whose lengths are known before training, and these: of samples that are made as needed, of some.

    Args:
        most: the most samples to return; None: all that are known.

    Raises:
        DataError: none of them can be trained on.
    """
    samples = spread(len(lengths), most or (len(lengths) if isinstance(lengths, np.ndarray) else SURVEYED))
    known = lengths[samples]
    if (known < 0).all():
        raise DataError(f"None of {len(samples):,} training rows that were looked at can be trained on.")
    return samples[known >= 0], known[known >= 0]


def by_length(lengths: Any) -> np.ndarray:
    """Return the samples whose lengths are known, shortest first."""
    samples, known = known_lengths(lengths)
    return samples[np.argsort(known, kind="stable")]


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass."""

    index: int
    """Its position in the step: the same on every process, so it can seed the dropout of this forward pass."""
    samples: np.ndarray
    length: int
    """Of its rows, padding included; 1 if samples have no lengths."""
    tokens: int
    """That the layers compute: samples x length, or, if the plan is packed, the real tokens."""
    cost: int
    """By which processes are given equal work: the tokens, and what attention adds to them; see ``BatchPlan.width``."""


@dataclass(frozen=True)
class BatchPlan:
    """A pure function of (number of samples, lengths and sizes, seed, epoch, batch sizes).

    Every epoch is a new seeded shuffle of all samples (of a mixture, of those that it takes), cut into global batches of
    exactly ``batch_size`` samples; the last one has the remainder. Inside a global batch the samples are sorted by length,
    longest first, and cut into micro-batches of at most ``micro_batch_size`` samples and at most ``micro_batch_tokens`` padded
    tokens, as few and as even as possible.
    Sorting inside the batch saves padding without changing what a batch contains, hence without biasing the gradient.

    A packed plan is for models that compute no padding: samples of any length are dealt to micro-batches of equal work, as few
    as the bounds allow. ``micro_batch_tokens`` then bounds the real tokens.

    Args:
        num_samples: samples in the dataset, at least 1.
        batch_size: samples of one optimizer step over all processes.
        micro_batch_size: maximum number of samples in one forward pass; None for no bound.
        micro_batch_tokens: maximum number of padded tokens (samples x padded length) in one forward pass; None for no bound.
        lengths: one length per sample (int, at least 1), an array or something that arrays of sample numbers index, whose
            ``max`` is at least the largest, and which is told by ``expect`` what comes next; -1 of a sample that is left out of
            its step. None if all samples cost the same.
        seed: of the shuffle.
        shuffle: False keeps dataset order, as evaluation does.
        sizes: (N, K) int, the parts of a sample that are padded separately, such as source and title, or height and width. The
            largest of each in a micro-batch determine its padded length. None: the largest of ``lengths`` does.
        padded_length: returns the length of a row that is padded to K sizes, monotonic in each. Required with ``sizes``.
        packed: whether micro-batches are computed without padding. Needs lengths.
        parts: the number of micro-batches in a step is a multiple of it (a step of fewer samples has one for each): processes
            whose number divides it have equally many. None: any number.
        width: of the model's hidden states, if it has attention: a row of t tokens costs t + t^2 / (6 width), the ratio of
            floating point operations in transformer layers with feed-forward blocks of 4 x width. None: it costs t.
        mixture: number of samples and weight of each data set that the samples come from, in their order. A data set of n
            samples and weight w is gone through again and again, each time in a new order, and an epoch takes the next w x n
            samples (rounded, at least one): with weight 0.5 each sample every other epoch, with 2 twice in each. None: an epoch
            has each sample once.
        window: samples among which those of an epoch are shuffled, if that is not all of them: the groups are shuffled, and
            then the samples of consecutive ones that have at least so many together. So a group is read once in an epoch.
        groups: the number of samples of each group, in their order; required with ``window``.

    Raises:
        ConfigError: ``micro_batch_tokens`` without lengths, or fewer than a single sample has.
    """

    num_samples: int
    batch_size: int
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    lengths: Any = None
    seed: int = 0
    shuffle: bool = True
    sizes: np.ndarray | None = None
    padded_length: Callable[[Sequence[int]], int] = sum
    packed: bool = False
    parts: int | None = None
    width: int | None = None
    mixture: Sequence[Sequence[Any]] | None = None
    window: int | None = None
    groups: Sequence[int] = ()

    def __post_init__(self):
        if self.mixture is not None and sum(count for count, _ in self.mixture) != self.num_samples:
            raise ValueError(f"{self.mixture} do not add up to {self.num_samples} samples.")
        if self.lengths is not None and len(self.lengths) != self.num_samples:
            raise ValueError(f"{len(self.lengths)} lengths for {self.num_samples} samples.")
        if self.micro_batch_tokens is None:
            return
        if self.lengths is None:
            raise ConfigError(
                "train.micro_batch_tokens needs a task whose samples have lengths; this task's have none. "
                "Set train.micro_batch_size instead."
            )
        if isinstance(self.lengths, np.ndarray):
            self.check_fits(*self._longest_alone())

    def check_fits(self, sample: int, tokens: int) -> None:
        """Raise ConfigError if a sample has more tokens alone than a micro-batch may have."""
        if self.micro_batch_tokens is not None and tokens > self.micro_batch_tokens:
            raise ConfigError(
                f"train.micro_batch_tokens={self.micro_batch_tokens} cannot hold sample {sample} with its "
                f"{tokens} tokens. Raise it, or lower the task's maximum length."
            )

    def _longest_alone(self) -> tuple[int, int]:
        """Return the sample that is the longest row on its own, and that row's length."""
        if self.sizes is None or self.packed:
            longest = int(np.argmax(self.lengths))
            return longest, int(self.lengths[longest])
        different_K, indices = np.unique(self.sizes, axis=0, return_index=True)
        rows = [self.padded_length(sizes) for sizes in different_K.tolist()]
        longest = max(range(len(rows)), key=rows.__getitem__)
        return int(indices[longest]), rows[longest]

    @property
    def most_padded(self) -> int:
        """Length of the longest row that any micro-batch can be padded to; 1 if samples have no lengths."""
        if self.lengths is None:
            return 1
        if self.sizes is None or self.packed:
            return int(self.lengths.max())
        return self.padded_length(self.sizes.max(0).tolist())

    def row_costs(self, lengths_B: Any) -> Any:
        """Return what rows of these lengths cost, whole numbers; for an array or a number."""
        return lengths_B if self.width is None else lengths_B + lengths_B * lengths_B // (6 * self.width)

    def num_parts(self, least: Any, num_samples: int) -> Any:
        """Return how many micro-batches, ``least`` or more, a step of ``num_samples`` is cut into; for an array or a number."""
        parts = self.parts or 1
        return np.minimum(-(-least // parts) * parts, num_samples)

    def longest(self, count: int) -> np.ndarray:
        """Return up to ``count`` samples that need the most memory together: the longest, and those of the largest sizes."""
        if self.lengths is None:
            return np.arange(min(count, self.num_samples))
        samples_N, lengths_N = known_lengths(self.lengths)
        order_N = samples_N[np.argsort(-lengths_N, kind="stable")]
        largest_K = [] if self.sizes is None else samples_N[self.sizes[samples_N].argmax(0)].tolist()
        return np.array([*dict.fromkeys([int(order_N[0]), *largest_K, *order_N[:count].tolist()])][:count])

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one epoch, each counted as often as it is used."""
        return self.num_samples if self.mixture is None else sum(self.drawn_per_epoch)

    @property
    def drawn_per_epoch(self) -> list[int]:
        """Samples in one epoch from each data set of the mixture."""
        return [drawn(count, weight) for count, weight in self.mixture or ()]

    @property
    def num_steps(self) -> int:
        """Optimizer steps in one epoch."""
        return -(-self.samples_per_epoch // self.batch_size)

    def epoch(self, epoch: int) -> EpochPlan:
        """Lay out one epoch (0-based): O(N) time, 4 bytes a sample. Lengths are looked at when a step is."""
        mixture = None if self.mixture is None else tuple((count, weight) for count, weight in self.mixture)
        return EpochPlan(
            self, order(self.num_samples, self.seed, epoch, self.shuffle, mixture, self.window, tuple(self.groups))
        )


@lru_cache(maxsize=1)  # of a plan before and after its micro-batches are settled; of 40 million samples, it takes seconds
def order(
    num_samples: int, seed: int, epoch: int, shuffle: bool, mixture: Pairs | None, window: int | None, groups: tuple[int, ...]
) -> np.ndarray:
    """Return the samples of an epoch in their order, read-only; see ``BatchPlan``."""
    kind = np.int32 if num_samples < 2**31 else np.int64
    if mixture is None:
        order_N = np.arange(num_samples, dtype=kind)
    else:
        parts, start = [], 0
        for index, (count, weight) in enumerate(mixture):
            # Three numbers seed the passes and two the shuffle of an epoch, so that they never overlap.
            each = drawn(count, weight)
            part = samples_in_passes(count, epoch * each, (epoch + 1) * each, [seed % 2**32, index])
            parts.append(start + np.sort(part).astype(kind))
            start += count
        order_N = np.concatenate(parts)  # ascending: with weights of 1, as without a mixture
    if shuffle:
        # RandomState, not Generator: its stream is frozen for good (NEP 19), and a run may be resumed under a
        # newer numpy. The pair seeds Mersenne Twister's init_by_array, so epochs and seeds never overlap.
        rng = np.random.RandomState([seed % 2**32, epoch])
        if window is None or window >= len(order_N):
            rng.shuffle(order_N)
        else:
            order_N = shuffled_in_windows(order_N, groups, window, rng)
    order_N.flags.writeable = False
    return order_N


def samples_in_passes(num_samples: int, first: int, last: int, seed: Sequence[int]) -> np.ndarray:
    """Return places ``first`` up to ``last`` of endless passes over the samples, each a new permutation of all of them."""
    pieces = []
    for number in range(first // num_samples, -(-last // num_samples)):
        order_N = np.random.RandomState([*seed, number]).permutation(num_samples)
        begin = number * num_samples
        pieces.append(order_N[max(0, first - begin) : last - begin])
    return np.concatenate(pieces)


def shuffled_in_windows(samples_N: np.ndarray, groups: Sequence[int], window: int, rng: np.random.RandomState) -> np.ndarray:
    """Shuffle ascending samples as ``BatchPlan.window`` says."""
    parts = np.split(samples_N, np.searchsorted(samples_N, np.cumsum(groups)[:-1]))
    parts = [parts[number] for number in rng.permutation(len(parts))]
    shuffled_N, start, stop = np.concatenate(parts), 0, 0
    for part in parts:
        stop += len(part)
        if stop - start >= window:
            rng.shuffle(shuffled_N[start:stop])
            start = stop
    rng.shuffle(shuffled_N[start:])
    return shuffled_N


class EpochPlan(Sequence):
    """The steps of one epoch: ``epoch_plan[i]`` is the list of micro-batches of its i-th global batch."""

    def __init__(self, plan: BatchPlan, order_N: np.ndarray):
        self.plan, self.order_N = plan, order_N
        all_known = isinstance(plan.lengths, np.ndarray) and plan.lengths.min() >= 0
        self._together = max(1, AT_ONCE // plan.batch_size) if plan.packed and all_known else None
        self._dealt: tuple[int, list[list[MicroBatch]]] = (-1, [])

    def __len__(self) -> int:
        return self.plan.num_steps

    def samples(self, step: int) -> np.ndarray:
        """Return the samples of a step, those that are left out of it included, in no certain order."""
        return self.order_N[step * self.plan.batch_size : (step + 1) * self.plan.batch_size]

    def __getitem__(self, step: int) -> list[MicroBatch]:  # type: ignore[override]  # no slices
        if not 0 <= step < len(self):
            raise IndexError(step)
        plan, samples_B = self.plan, self.samples(step)
        if self._together is not None:
            block, place = divmod(step, self._together)
            if self._dealt[0] != block:
                self._dealt = block, self._deal_from(step - place, self._together)
            return self._dealt[1][place]
        if plan.lengths is None:
            return self._cut(samples_B, np.ones(len(samples_B), np.int64))
        if not isinstance(plan.lengths, np.ndarray):
            plan.lengths.expect(self.order_N, step * plan.batch_size)
        samples_B, lengths_B = longest_first(samples_B, plan.lengths)
        if lengths_B[0] < 0:
            raise DataError(f"None of the {len(samples_B):,} rows of a step can be trained on. Leave it out with train.skip.")
        samples_B, lengths_B = samples_B[lengths_B >= 0], lengths_B[lengths_B >= 0]
        if plan.packed or plan.sizes is None:
            plan.check_fits(int(samples_B[0]), int(lengths_B[0]))  # otherwise ``_cut`` knows the padded length
        return self._deal(samples_B[None], lengths_B[None])[0] if plan.packed else self._cut(samples_B, lengths_B)

    def _deal_from(self, first: int, num_steps: int) -> list[list[MicroBatch]]:
        """Deal some steps of the epoch together, which takes a quarter of the time that each by itself would."""
        size = self.plan.batch_size
        samples = self.order_N[first * size : (first + num_steps) * size]
        full, rest = np.split(samples, [len(samples) - len(samples) % size])  # the rest is the last step of the epoch
        parts = [part_SB for part_SB in (full.reshape(-1, size), rest[None]) if part_SB.size]
        return [step for part_SB in parts for step in self._deal(*longest_first(part_SB, self.plan.lengths))]

    def _deal(self, samples_SB: np.ndarray, lengths_SB: np.ndarray, least_S: Any = None) -> list[list[MicroBatch]]:
        """Deal samples, longest first, to micro-batches of equal work, ``least_S`` in a step or more; the cheapest one first.

        So the all-reduce of the gradient, which begins with the last backward pass, hides behind the longest one.
        """
        plan, (num_steps, size) = self.plan, samples_SB.shape
        costs_SB, total_S = plan.row_costs(lengths_SB), lengths_SB.sum(1)
        max_rows = plan.micro_batch_size or size
        max_tokens_S = total_S if plan.micro_batch_tokens is None else np.full(num_steps, plan.micro_batch_tokens)
        if least_S is None:
            least_S = np.maximum(-(-size // max_rows), -(-total_S // max_tokens_S))
        count_S = plan.num_parts(least_S, size)
        # The longest sample of a micro-batch is the first that it gets, which is the m-th of the step.
        longest_SM = lengths_SB[:, : count_S.max()]
        most_SM = np.minimum(max_rows, MAX_PADDED_TO_REAL * max_tokens_S[:, None] // longest_SM)
        bins_SB = _lightest_of_steps(costs_SB, count_S, most_SM)
        rows_SM, tokens_SM, costs_SM = (
            np.bincount(bins_SB.ravel(), each_SB.ravel(), most_SM.size).astype(np.int64).reshape(most_SM.shape)
            for each_SB in (np.ones_like(costs_SB), lengths_SB, costs_SB)
        )
        fits_S = ((rows_SM <= most_SM) & (tokens_SM <= max_tokens_S[:, None])).all(1) | (count_S == size)
        # By cost; of equal ones, the last comes first. Those that a step does not have come last.
        keys_SM = np.where(rows_SM > 0, costs_SM, np.iinfo(np.int64).max)[:, ::-1]
        order_SM = most_SM.shape[1] - 1 - keys_SM.argsort(1, kind="stable")
        ranks_SM = order_SM.argsort(1) + np.arange(num_steps)[:, None] * most_SM.shape[1]
        samples = samples_SB.ravel()[ranks_SM.ravel()[bins_SB.ravel()].argsort(kind="stable")]
        facts = (np.take_along_axis(x_SM, order_SM, 1).tolist() for x_SM in (rows_SM, longest_SM, tokens_SM, costs_SM))
        steps, stop = list[list[MicroBatch]](), 0
        for count, *facts_of_M in zip(count_S.tolist(), *facts, strict=True):
            steps.append([])
            for index, (rows, length, tokens, cost) in zip(range(count), zip(*facts_of_M, strict=True), strict=False):
                start, stop = stop, stop + rows
                steps[-1].append(MicroBatch(index, samples[start:stop], length, tokens, cost))
        if not fits_S.all():
            least_S = np.maximum(count_S + 1, count_S * 9 // 8)[~fits_S]
            more = self._deal(samples_SB[~fits_S], lengths_SB[~fits_S], least_S)
            for number, step in zip(np.flatnonzero(~fits_S), more, strict=True):
                steps[number] = step
        return steps

    def _cut(self, samples_B: np.ndarray, lengths_B: np.ndarray) -> list[MicroBatch]:
        """Cut samples, longest first, into micro-batches of little padding."""
        plan = self.plan
        max_rows = plan.micro_batch_size or len(samples_B)
        rows: _Lengths | _Sizes
        if plan.sizes is None:
            rows = _Lengths(lengths_B.tolist(), max_rows)
        else:
            rows = _Sizes(plan.sizes[samples_B].tolist(), max_rows, plan.padded_length)
            alone = [*map(plan.padded_length, rows.sizes)]
            plan.check_fits(int(samples_B[np.argmax(alone)]), max(alone))
        high = plan.micro_batch_tokens or rows.padded(0, len(samples_B)) * max_rows
        if plan.lengths is None and plan.parts is None:
            stops = rows.fill(high)  # full ones, and a rest
        else:
            stops = even_cuts(rows.fill, rows.longest, high, lambda least: plan.num_parts(least, len(samples_B)))
        micro_batches = []
        for index, (start, stop) in enumerate(pairwise([0, *stops])):
            length, count = rows.padded(start, stop), stop - start
            tokens, cost = length * count, plan.row_costs(length) * count
            micro_batches.append(MicroBatch(index, samples_B[start:stop], length, tokens, cost))
        return micro_batches


MAX_PADDED_TO_REAL = 4
"""Padded tokens of a packed micro-batch per token of ``micro_batch_tokens``: embeddings and heads still see padding."""


AT_ONCE = 2**14
"""Samples of the steps that are dealt together."""
FEW = 32
"""Steps that are dealt one by one: numpy would take longer."""


def longest_first(samples: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return samples, (B,) or (S, B), sorted by length, and their lengths, int64; equal lengths are sorted by sample number."""
    keys = -lengths[samples].astype(np.int64) << 32 | samples
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(samples.dtype), -(keys >> 32)


def _lightest_of_steps(costs_SB: np.ndarray, count_S: np.ndarray, most_SM: np.ndarray) -> np.ndarray:
    """Do what ``_lightest`` does for several steps: return the number of the micro-batch of each sample, counted over them."""
    (num_steps, size), num_bins = costs_SB.shape, most_SM.shape[1]
    firsts_S = np.arange(num_steps) * num_bins
    if num_steps < FEW:
        steps = zip(costs_SB.tolist(), count_S.tolist(), most_SM.tolist(), strict=True)
        return np.array([_lightest(*step) for step in steps]) + firsts_S[:, None]
    bits, full = size.bit_length(), 2**62
    keys_SM = np.where(np.arange(num_bins) < count_S[:, None], 0, np.iinfo(np.int64).max)
    keys, most = keys_SM.ravel(), most_SM.ravel()
    bins_BS = np.empty((size, num_steps), np.int64)
    for bins_S, added_S in zip(bins_BS, (costs_SB.T << bits) + 1, strict=True):
        np.add(keys_SM.argmin(1), firsts_S, out=bins_S)
        added_S += keys[bins_S]
        keys[bins_S] = added_S | full * (added_S % 2**bits >= most[bins_S])
    return bins_BS.T


def even_cuts(
    fill: Callable[[int], list[int]], low: int, high: int, num_parts: Callable[[int], int] = lambda least: least
) -> list[int]:
    """Cut samples into as few micro-batches as the bounds allow, the most expensive one as cheap as possible.

    Filling one micro-batch after the other up to the bounds gives the fewest. The smallest token bound that still gives as
    few evens them out: less padding, less memory, and equal work for the processes.

    Args:
        fill: cuts greedily, given the maximum tokens of a micro-batch; returns where each one stops.
        low: tokens of the longest sample alone.
        high: maximum tokens of a micro-batch.
        num_parts: how many micro-batches to make where this many are needed.
    """
    stops = fill(high)
    count = num_parts(len(stops))
    while low < high:
        middle = (low + high) // 2
        candidate = fill(middle)
        if len(candidate) <= count:
            stops, high = candidate, middle
        else:
            low = middle + 1
    while len(stops) < count:  # equal samples, say, of which no bound makes as many
        start, stop = max(pairwise([0, *stops]), key=lambda ends: ends[1] - ends[0])
        stops = sorted([*stops, (start + stop) // 2])
    return stops


@dataclass(frozen=True)
class _Lengths:
    """Rows of one size each, longest first, to be cut into micro-batches."""

    lengths: Sequence[int]
    max_rows: int

    @property
    def longest(self) -> int:
        """Padded length of the longest row alone."""
        return self.lengths[0]

    def padded(self, start: int, stop: int) -> int:
        """Return the padded length of some rows."""
        return self.lengths[start]

    def fill(self, max_tokens: int) -> list[int]:
        """Cut greedily: the first sample of a micro-batch sets the length of all its rows. Return where each one stops."""
        lengths, max_rows, stops, stop = self.lengths, self.max_rows, list[int](), 0
        while stop < len(lengths):
            rows = max_tokens // lengths[stop]
            stop += rows if rows < max_rows else max_rows
            stops.append(stop)
        stops[-1] = len(lengths)
        return stops


@dataclass(frozen=True)
class _Sizes:
    """Rows of several sizes each, which are padded separately; the methods are those of ``_Lengths``."""

    sizes: Sequence[Sequence[int]]
    max_rows: int
    padded_length: Callable[[Sequence[int]], int]

    @property
    def longest(self) -> int:
        return max(map(self.padded_length, self.sizes))

    def padded(self, start: int, stop: int) -> int:
        return self.padded_length([*map(max, zip(*self.sizes[start:stop], strict=True))])

    def fill(self, max_tokens: int) -> list[int]:
        """Cut greedily: the largest of each size in a micro-batch set the length of all its rows."""
        stops: list[int] = []
        start, largest = 0, self.sizes[0]
        for index, row in enumerate(self.sizes):
            larger: Sequence[int] = [*map(max, largest, row)]
            if index - start == self.max_rows or self.padded_length(larger) * (index + 1 - start) > max_tokens:
                stops.append(index)
                start, larger = index, row
            largest = larger
        return [*stops, len(self.sizes)]


def balance(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Assign items to ``num_bins`` bins so that the most expensive bin is cheap; return each bin's item indices, ascending.

    Longest processing time first: at most 4/3 of the best possible maximum. Ties go to the bin of fewer items, then to the
    lower item and the lower bin, so that every process computes the same assignment.
    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    for item, index in zip(order, _lightest([costs[item] for item in order], num_bins), strict=True):
        bins[index].append(item)
    return [sorted(items) for items in bins]


def _lightest(costs: Sequence[int], num_bins: int, most: Sequence[int] | None = None) -> list[int]:
    """Return the bin of each item, the most expensive item first: always the one of the least cost so far.

    Args:
        most: items of each bin at most. If they are too few, some bin gets more.
    """
    # Cost, items and number of a bin are one integer, which compares faster than a tuple.
    bits = max(len(costs), num_bins).bit_length()
    last, one, full = (1 << bits) - 1, 1 << bits, 1 << 100
    heap = [*range(num_bins)]
    if most is None:
        return [heapreplace(heap, heap[0] + (cost << 2 * bits) + one) & last for cost in costs]
    bins = []
    for cost in costs:
        key = heap[0] + (cost << 2 * bits) + one
        bins.append(index := key & last)
        heapreplace(heap, key if (key >> bits) & last < most[index] else key | full)
    return bins


def samples_digest(samples: np.ndarray) -> tuple[int, int]:
    """Hash a set of sample numbers into two sums, which add up over disjoint parts of the set.

    Each sum stays below 2**53, the last whole number that float64 counts to, for up to 2**21 samples.
    Source: the finalizer of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    mixed = (samples.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return int((mixed & np.uint64(0xFFFFFFFF)).sum()), int((mixed >> np.uint64(32)).sum())


def format_digest(low: float, high: float) -> str:
    """Format the two sums of ``samples_digest`` in hexadecimal."""
    return f"{int(low):x}-{int(high):x}"
