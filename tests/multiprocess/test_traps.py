"""What goes wrong in distributed training without a word, and must not here."""

import json
import socket
from pathlib import Path
from statistics import median

import pytest

from hftune import Recipe, TrainingError, train
from tests.support.runs import Command, Run, train_on

SUPPORT = Path(__file__).parents[1] / "support"
RECIPE = str(SUPPORT / "trapped.yaml")
JOBS = {
    "plain": (),
    "statistics": ("task.trap=running statistics",),
    "slow": ("task.trap=slow process",),
    "dropped": ("task.trap=dropped layers", "train.clip_norm=0.5"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {(name, size): run for size in (1, 2) for name, run in train_on(size, JOBS, folder, RECIPE).items()}


def refused(tmp_path, trap):
    """Train on two processes and return the exit code and what hftune itself said."""
    done = Command(2, f"recipe={RECIPE}", f"task.trap={trap}", f"output_dir={tmp_path}/out")
    said = [line for line in done.communicate()[1].splitlines() if line.startswith("hftune: ")]
    return done.returncode, said


@pytest.mark.parametrize("world_size", (1, 2))
def test_predict_gets_the_model_without_dropout(runs, world_size):
    rows = runs["plain", world_size].predictions
    assert len(rows) == 21
    assert all(row["again"] == pytest.approx(row["given"], rel=1e-12) for row in rows)


def test_random_draws_of_an_evaluation_do_not_depend_on_processes(runs):
    draws = [[row["draw"] for row in runs["plain", size].predictions] for size in (1, 2)]
    assert draws[0] == draws[1] and len(set(draws[0])) > 15


def test_evaluation_and_export_use_the_same_running_statistics_on_all_processes(runs, tmp_path):
    import torch
    from safetensors.torch import load_file

    from tests.support.tasks import Trapped

    run = runs["statistics", 2]
    task = Trapped(trap="running statistics")
    model = task.build_model()
    model.load_state_dict(load_file(run.folder / "model_last" / "model.safetensors"))
    data = task.datasets()["eval"]
    with torch.no_grad():
        expected = model.eval()(torch.stack([torch.tensor(row["x"]) for row in data]))
    assert [row["given"] for row in run.predictions] == [pytest.approx(row, rel=1e-9) for row in expected.tolist()]


def test_numpy_metrics_are_written_and_what_is_not_finite_becomes_null(runs):
    lines = (runs["plain", 2].folder / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line, parse_constant=pytest.fail) for line in lines if "eval/loss" in line]
    assert [(line["eval/numpy"], line["eval/nothing"]) for line in evaluations] == [(0.5, None), (0.5, None)]
    result = json.loads((runs["plain", 2].folder / "result.json").read_text(), parse_constant=pytest.fail)
    assert (result["metrics"]["numpy"], result["metrics"]["nothing"]) == (0.5, None)


def test_a_process_that_makes_the_other_one_wait_is_named(runs):
    run = runs["slow", 2]
    assert median(run.logged("perf/slowest_rank")) == 1 and len(run.logged("perf/slowest_rank")) == 7  # of 8 steps
    # It sleeps a tenth of a second a step, of which the other one waits all, if nothing else holds it up.
    assert median(run.logged("perf/imbalance")) > 1.3 and median(run.logged("perf/wait_share")) > 0.15
    assert max(run.logged("perf/wait_share")) <= 1 and max(run.logged("perf/imbalance")) <= 2
    assert run.logged("train/loss") == pytest.approx(runs["plain", 2].logged("train/loss"), rel=1e-12)
    alone = runs["slow", 1]
    assert len(alone.logged("perf/data_share")) == 7 and not alone.logged("perf/slowest_rank")


def test_layers_dropped_at_random_give_the_same_gradient_on_any_number_of_processes(runs):
    one, two = runs["dropped", 1], runs["dropped", 2]
    for name in ("train/loss_step", "train/grad_norm", "eval/loss"):
        assert two.logged(name) == pytest.approx(one.logged(name), rel=1e-10)


UNUSED = (
    "2 parameters get no gradient: unused.weight, unused.bias. Freeze them in build_model (requires_grad_(False)), or leave them "
    "out of the model."
)


def test_unused_parameters_are_named(tmp_path, monkeypatch):
    assert refused(tmp_path, "unused parameters") == (1, [f"hftune: {UNUSED}"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(TrainingError) as caught:
        train(Recipe.load(RECIPE, "task.trap=unused parameters", f"output_dir={tmp_path}/alone"))
    assert str(caught.value) == UNUSED


def test_other_data_on_one_process_are_noticed_in_the_evaluation_set_too(tmp_path):
    code, said = refused(tmp_path, "other evaluation data")
    assert code == 2
    host = socket.gethostname()
    assert said == [
        f"hftune: Compared with process 0 on {host}, process 1 on {host} has different data: eval data. "
        "Use the same files on all machines, or the same revision of the data set on the Hub."
    ]


def test_a_step_without_items_says_so(tmp_path):
    code, said = refused(tmp_path, "no items")
    assert code == 1
    assert said == [
        "hftune: The loss of step 1 is inf (task.num_items is 0 for all its samples). "
        "Lower train.lr, set train.clip_norm, or look at these samples."
    ]


def test_settings_of_the_launcher_do_not_reach_the_mathematics(runs, tmp_path, monkeypatch):
    # check_launcher refuses them; this is what lies behind it.
    monkeypatch.setattr("hftune.distributed.session.check_launcher", lambda recipe: None)
    extra = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}
    for name, value in {"ACCELERATE_USE_CPU": "true", **extra}.items():
        monkeypatch.setenv(name, value)
    run, expected = Run(train(Recipe.load(RECIPE, f"output_dir={tmp_path}/out")).output_dir), runs["plain", 1]
    assert run.logged("train/grad_norm") == expected.logged("train/grad_norm")
    weights = [(made.folder / "model" / "model.safetensors").read_bytes() for made in (run, expected)]
    assert weights[0] == weights[1]
