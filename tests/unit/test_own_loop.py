"""``hftune.batches``: what a loop of one's own gets of each step."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType

import hftune

PLAN = hftune.BatchPlan(10, batch_size=4, micro_batch_size=2, seed=3)
DATA = [torch.tensor(index) for index in range(10)]


def given(steps, plan=PLAN, dataset=DATA, accelerator=None):
    return hftune.batches(plan, dataset, torch.stack, accelerator or Accelerator(cpu=True), len, steps)


def seen(steps, **options):
    """The samples of each micro-batch, with the first random number that its forward pass would draw."""
    return [
        (batch.step, batch.weight, [(ids.tolist(), float(torch.rand(()))) for ids in batch.micro_batches(torch.nn.Identity())])
        for batch in given(steps, **options)
    ]


def test_each_sample_comes_once_an_epoch_and_weights_are_one_over_the_items_of_a_step():
    epoch = seen(range(3))
    assert sorted(sample for *_, parts in epoch for ids, _ in parts for sample in ids) == [*range(10)]
    assert [weight for _, weight, _ in epoch] == [1 / 4, 1 / 4, 1 / 2]  # the last step has two samples
    assert [parts for *_, parts in epoch] != [parts for *_, parts in seen(range(3, 6))]


def test_the_number_of_a_step_is_all_that_it_takes_to_go_on_from_there():
    assert seen(range(4, 7)) == seen(range(7))[4:]


class FourProcesses:
    """An Accelerator of the last of four processes, whose sums are those of the whole step."""

    distributed_type, process_index, num_processes, device = DistributedType.MULTI_CPU, 3, 4, torch.device("cpu")
    gradient_accumulation_steps = 1

    def reduce(self, value, reduction):
        assert float(value) == 0
        return torch.tensor(4.0)


def test_a_process_without_micro_batches_gets_one_that_does_not_count():
    ((_, weight, parts),) = seen(range(1), accelerator=FourProcesses())
    assert weight == 0 and len(parts) == 1


def other(**values):
    return SimpleNamespace(
        **{"distributed_type": DistributedType.NO, "process_index": 0, "num_processes": 1, "gradient_accumulation_steps": 1}
        | values
    )


REFUSED = {
    "with gradient_accumulation_steps=1; this Accelerator has NO and 2": other(gradient_accumulation_steps=2),
    "works on one process and under DDP": other(distributed_type=DistributedType.FSDP),
}


@pytest.mark.parametrize("what", REFUSED)
def test_accelerators_that_accumulate_or_shard_are_refused(what):
    with pytest.raises(hftune.ConfigError, match=what):
        next(given(range(1), accelerator=REFUSED[what]))


def test_a_plan_of_other_data_is_refused():
    with pytest.raises(hftune.ConfigError, match=r"The plan is for 10 samples, and the data set has 9\."):
        next(given(range(1), dataset=DATA[:9]))


def test_a_step_without_items_has_no_mean():
    nothing = hftune.batches(PLAN, DATA, torch.stack, Accelerator(cpu=True), lambda ids: 0, range(1))
    with pytest.raises(hftune.TrainingError, match="num_items is 0 for all samples of step 0"):
        next(nothing)
