"""train.profile: traces of a few steps. tests/multiprocess/test_profiled.py has those of a whole run."""

import gzip
import json

import pytest
import torch

from hftune.callbacks import StepBegin
from hftune.tracking.profiler import Profiler, unreachable_steps
from tests.support.events import step_taken

CPU = torch.device("cpu")


def run(profiler, steps):
    """Take steps, each with a matrix product; what is between two of them is an addition."""
    for step in steps:
        profiler.on_step_begin(StepBegin(step))
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        profiler.on_step(step_taken(step))
        torch.add(1, 1)


def operators(path):
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]


def test_each_process_writes_a_trace_and_a_table_of_exactly_these_steps(tmp_path, capsys):
    for rank in (1, 0):
        run(Profiler([2, 4], tmp_path / "profile", rank, CPU), range(1, 8))
    names = [f"steps_2-4_process{rank}.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names
    assert operators(tmp_path / "profile" / names[2]).count("aten::mm") == 3
    assert "aten::mm" in (tmp_path / "profile" / names[3]).read_text()
    assert capsys.readouterr().out.splitlines() == [
        f"note: Steps 2 to 4 were profiled: open {tmp_path}/profile/steps_2-4_process0.json.gz at https://ui.perfetto.dev; "
        "steps_2-4_process0.txt beside it lists the operators that took longest. Each process has its own."
    ]


def test_a_run_that_is_stopped_and_resumed_keeps_both_parts(tmp_path):
    stopped = Profiler([2, 4], tmp_path, 0, CPU)
    run(stopped, (1, 2))
    stopped.on_step_begin(StepBegin(3))  # and is stopped before it has computed it
    stopped.close()
    run(Profiler([2, 4], tmp_path, 0, CPU), (3, 4, 5))
    run(Profiler([2, 4], tmp_path, 0, CPU), (5, 6))
    assert sorted(path.stem for path in tmp_path.glob("*.txt")) == ["steps_2-2_process0", "steps_3-4_process0"]
    assert operators(tmp_path / "steps_3-4_process0.json.gz").count("aten::mm") == 2


def test_without_the_key_nothing_is_profiled(tmp_path):
    profiler = Profiler(None, tmp_path / "profile", 0, CPU)
    run(profiler, range(3))
    profiler.close()
    assert not (tmp_path / "profile").exists()


def test_what_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    run(Profiler([1, 1], tmp_path / "profile", 3, CPU), (1, 2, 1))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("warning: The profile of process 3 could not be written: ") and said.endswith("Training continues.")


def test_a_profiler_that_does_not_start_is_a_warning_and_not_tried_again(tmp_path, capsys, monkeypatch):
    def broken(**_):
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr("torch.profiler.profile", broken)
    run(Profiler([1, 3], tmp_path, 0, CPU), (1, 2, 3))
    assert capsys.readouterr().out == (
        "warning: The profile of process 0 could not be started: CUPTI is in use. Training continues.\n"
    )


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (None, []),
        ([2, 10], []),
        ([2, 11], ["train.profile=[2, 11]: only steps 2 to 10 are profiled, because the run has 10 steps."]),
        ([20, 23], ["train.profile=[20, 23]: nothing is profiled, because the run has 10 steps."]),
    ],
)
def test_steps_that_a_run_does_not_have_are_told(steps, said):
    assert unreachable_steps(steps, 10) == said
