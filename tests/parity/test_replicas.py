"""Under FSDP with replicas, each group of processes has all weights between them: the same training again."""

import pytest
from safetensors.torch import load_file

from tests.parity.test_fully_sharded import ODD, same
from tests.support.runs import train_on

GROUPS = (*ODD, "parallel.replicas=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    again, other = (*GROUPS, f"output_dir={folder / 'again'}"), (*GROUPS, f"output_dir={folder / 'other'}")
    jobs = {"whole": GROUPS, "begins": again, "goes on": again, "two groups": other}
    jobs["one group"] = (*ODD, f"output_dir={folder / 'other'}")
    stops = {"begins": (3, 1), "two groups": (3, 2)}
    return train_on(1, {"one": ODD}, folder) | train_on(4, jobs, folder, stops=stops, sharded=jobs)


@pytest.mark.parametrize("name", ["whole", "one group"])
def test_losses_and_gradient_norms_are_those_of_one_process(runs, name):
    same(runs[name], runs["one"])


def test_a_resumed_run_is_the_same_to_the_bit(runs):
    whole, resumed = (load_file(runs[name].folder / "model_last" / "model.safetensors") for name in ("whole", "goes on"))
    assert all(whole[name].equal(resumed[name]) for name in whole)
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert runs["goes on"].logged(metric) == runs["whole"].logged(metric)


def test_each_process_has_its_part_of_what_its_group_has(runs):
    whole = sum(value.nbytes for value in load_file(runs["whole"].folder / "model_last" / "model.safetensors").values())
    parts = [runs["whole"].weighed(rank) for rank in range(4)]
    for what, size in {"weights": whole, "gradient": whole, "moments": 2 * whole}.items():
        assert sum(part[what] for part in parts) == 2 * size and max(part[what] for part in parts) < 0.51 * size
