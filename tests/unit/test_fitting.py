"""Micro-batches as large as fit: train.micro_batch_tokens=auto. Real memory errors are in tests/multiprocess/test_memory.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hftune.batch_plan import BatchPlan
from hftune.build import plan_batches
from hftune.config import Recipe
from hftune.errors import ConfigError
from hftune.settle import settle_micro_batches
from hftune.strategies.fitting import largest_micro_batch_tokens

LENGTHS = np.array([10] * 40 + [20] * 20 + [40] * 4, np.int32)


class Fitting:
    """A strategy whose processes have room for so many tokens or rows."""

    device, num_processes, precision = torch.device("cpu"), 2, "no"

    def __init__(self, tokens, rows=100, others=()):
        self.tokens, self.rows, self.others, self.tried = tokens, rows, others, []

    def fits(self, dataset, samples):
        lengths = LENGTHS[samples]
        self.tried.append((len(samples), int(lengths.max())))
        return len(samples) * lengths.max() <= self.tokens and len(samples) <= self.rows

    def broadcast(self, value):
        return value

    def gather_to_main(self, rows):
        return [*rows, *self.others]


def settle(strategy, earlier=None, batch_size=32):
    words = ("train.micro_batch_tokens=auto", "train.micro_batch_size=null", f"train.batch_size={batch_size}")
    recipe = Recipe.load("yelp_demo", *words)
    parts = SimpleNamespace(plan=BatchPlan(64, batch_size, lengths=LENGTHS), datasets={"train": range(64)}, notices=[])
    found = settle_micro_batches(recipe, strategy, parts, earlier or {})
    return found, parts


def test_tokens_are_those_of_the_longest_samples_that_fit():
    found, parts = settle(Fitting(tokens=170))
    assert parts.plan.micro_batch_tokens == 160 and found["size"] == 4
    assert parts.notices == ["train.micro_batch_tokens=auto: 160 tokens, 4 of the longest samples, fit on every process."]
    assert all(micro_batch.cost <= 160 for step in parts.plan.epoch(0) for micro_batch in step)


def test_as_many_short_samples_as_have_so_many_tokens_fit_too():
    """Rows cost memory of their own, such as titles' logits."""
    strategy = Fitting(tokens=170, rows=8)
    found, parts = settle(strategy)
    assert found["size"] == 2 and parts.plan.micro_batch_tokens == 80
    assert strategy.tried[-2:] == [(2, 40), (8, 10)]


def test_no_more_than_a_share_of_a_step_so_that_no_process_is_idle():
    _, parts = settle(Fitting(tokens=10**6))
    assert parts.plan.micro_batch_tokens == 240  # of 32 samples of 15 tokens on average, for two processes
    assert parts.notices == ["train.micro_batch_tokens=auto: 240 tokens, a process's share of a step, fit on every process."]
    assert all(len(step) >= 2 for step in parts.plan.epoch(0))


def test_a_packed_plan_has_work_for_all_processes_by_its_parts():
    packed = BatchPlan(64, 32, lengths=LENGTHS, packed=True, parts=4)
    assert largest_micro_batch_tokens(packed, size=16, num_processes=4) == 640
    assert largest_micro_batch_tokens(packed, size=16, num_processes=8) == 60


def test_the_size_of_the_run_that_is_resumed_is_kept_under_the_same_conditions():
    found, _ = settle(Fitting(tokens=170))
    strategy = Fitting(tokens=10**6)
    again, parts = settle(strategy, found)
    assert (again, parts.plan.micro_batch_tokens, strategy.tried) == (found, 160, [])
    assert parts.notices == ["train.micro_batch_tokens=auto: 160, found when the run began."]
    _, parts = settle(Fitting(tokens=10**6), found | {"mixed_precision": "bf16"})
    assert parts.plan.micro_batch_tokens == 240


def test_the_size_is_found_anew_once_any_machine_has_another_device():
    """A machine of an elastic job was replaced by one with a smaller GPU, and the main one stayed."""
    found, _ = settle(Fitting(tokens=10**6, others=["a GPU of 80 GB"]))
    assert settle(Fitting(tokens=170, others=["a GPU of 80 GB"]), found)[1].plan.micro_batch_tokens == 240  # not tried
    assert settle(Fitting(tokens=170, others=["a GPU of 24 GB"]), found)[1].plan.micro_batch_tokens == 160


def test_where_not_even_one_fits_the_key_is_named():
    with pytest.raises(ConfigError, match=r"^train\.micro_batch_tokens=auto: not even the longest sample alone fits"):
        settle(Fitting(tokens=30))


def test_samples_without_lengths_have_no_tokens():
    recipe = Recipe.load("mnist_demo", "train.micro_batch_tokens=auto", "train.micro_batch_size=null")
    with pytest.raises(ConfigError) as caught:
        plan_batches(recipe, range(10))
    assert str(caught.value) == (
        "train.micro_batch_tokens=auto needs a task whose samples have lengths; this task's have none. "
        "Set train.micro_batch_size=auto instead."
    )
