"""train.profile on two processes: a trace of each, across a stop within the steps, and the same training."""

import torch
from safetensors.torch import load_file

from tests.support.runs import train_on

JOB = ("train.max_steps=6", "train.log_every=1", "checkpoint.every=100")
PROFILED = (*JOB, "train.profile=[2, 5]")


def test_profiled_steps_are_traced_on_each_process_and_change_nothing(tmp_path):
    recipe = "tests/support/tagging.yaml"
    stop = {"profiled": (3, 1)}
    plain = train_on(2, {"plain": JOB, "profiled": PROFILED}, tmp_path, recipe, stops=stop)["plain"]
    profiled = train_on(2, {"profiled": PROFILED}, tmp_path, recipe)["profiled"]

    files = sorted(path.name for path in (profiled.folder / "profile").iterdir())
    assert files == [
        f"steps_{steps}_process{rank}.{kind}" for steps in ("2-4", "5-5") for rank in (0, 1) for kind in ("json.gz", "txt")
    ]
    assert profiled.logged("train/loss") == plain.logged("train/loss") and len(plain.logged("train/loss")) == 6
    one, two = (load_file(run.folder / "model_last" / "model.safetensors") for run in (plain, profiled))
    assert all(torch.equal(one[name], two[name]) for name in one)

    for run in (plain, profiled):  # whatever else is measured
        assert all(seconds > 0 for seconds in run.logged("perf/step_s"))
        assert len(run.logged("perf/memory_gb")) >= 4 and 0.05 < max(run.logged("perf/memory_gb")) < 100
        assert all(0 <= wait < 60 for wait in run.logged("perf/data_wait_s"))
