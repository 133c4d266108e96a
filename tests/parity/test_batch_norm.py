"""Running statistics are a step's, however it is spread: evaluations with BatchNorm do not depend on processes either."""

import pytest
import torch
from safetensors.torch import load_file

from hftune import Recipe, train
from hftune.config import TrainConfig
from hftune.planning.plan import make_plan
from hftune.strategies.statistics import notice
from tests.support.runs import train_on

JOB = (
    *(
        "task.dataset=tests.support.tasks:few_pictures",
        "task.max_train_samples=10",
        "task.max_eval_samples=5",
        "train.epochs=2",
        "train.lr=1e-2",
        "train.log_every=1",
    ),
    *("train.micro_batch_size=1", "task.network=tests.support.tasks.NormBlend"),
)
CHECKPOINTING = "task.network_args={checkpointing: true}"
JOBS = {
    "batch": JOB,
    "fours": (*JOB, "train.micro_batch_size=4"),  # 2 micro-batches: two of 4 processes have dummies
    "frozen": (*JOB, "train.batch_norm=frozen"),
}
STEPS = 4


def weights(run):
    return load_file(run.folder / "model_last" / "model.safetensors")


def statistics(run):
    return {name: value for name, value in weights(run).items() if "running" in name or "num_batches" in name}


def same(run, expected):
    assert run.logged("train/loss") == pytest.approx(expected.logged("train/loss"), rel=1e-5)
    for name, value in statistics(expected).items():
        torch.testing.assert_close(statistics(run)[name], value, rtol=1e-5, atol=1e-6)
    for name in ("eval/loss", "eval/psnr_inside", "eval/ssim"):
        assert run.logged(name) == pytest.approx(expected.logged(name), rel=1e-5), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    telling = {name: (f"task.network_args={{told: {folder / name}}}",) for name in ("batch", "sharded", "fours")}
    some = {"batch": JOB + telling["batch"], "frozen": JOBS["frozen"], "sharded": JOB + telling["sharded"]}
    fours = {"fours": JOBS["fours"] + telling["fours"]}
    jobs = {1: {**JOBS, "checkpointed": (*JOB, CHECKPOINTING)}, 2: some, 4: fours}
    return {
        (name, size): run
        for size, some in jobs.items()
        for name, run in train_on(size, some, folder, "restoration_demo", sharded=("sharded",)).items()
    }


@pytest.mark.parametrize(("name", "size"), [("batch", 2), ("frozen", 2), ("fours", 4)])
def test_losses_statistics_and_evaluations_do_not_depend_on_processes(runs, name, size):
    same(runs[name, size], runs[name, 1])


def test_fully_sharded_keeps_the_same_statistics(runs):
    same(runs["sharded", 2], runs["batch", 1])


@pytest.mark.parametrize(("name", "size"), [("batch", 2), ("sharded", 2), ("fours", 4)])
def test_all_processes_have_the_same_bits_of_statistics_though_nobody_sends_them(runs, name, size):
    folder = runs[name, size].folder.parent
    told = [[*dict.fromkeys((folder / f"{name}.{rank}").read_text().split())] for rank in range(size)]
    assert told == [told[0]] * size and len(told[0]) == STEPS


def test_what_gradient_checkpointing_computes_again_counts_once(runs):
    same(runs["checkpointed", 1], runs["batch", 1])


def test_statistics_move_once_a_step_by_the_mean_of_its_micro_batches(runs):
    for run in (runs["batch", 1], runs["batch", 2], runs["fours", 4], runs["checkpointed", 1]):
        assert statistics(run)["network.norm.num_batches_tracked"] == STEPS


def test_frozen_statistics_stay_and_the_norms_weights_are_trained(runs):
    for size in (1, 2):
        found = weights(runs["frozen", size])
        assert found["network.norm.running_mean"].abs().max() == 0 and found["network.norm.num_batches_tracked"] == 0
        assert (found["network.norm.weight"] - 1).abs().max() > 1e-3


def test_resumed_run_ends_bit_equal(runs, tmp_path):
    job = (*JOB, f"output_dir={tmp_path}/out")
    train_on(2, {"part": job}, tmp_path, "restoration_demo", stops={"part": (2, 1)})
    run, expected = train_on(2, {"part": job}, tmp_path, "restoration_demo")["part"], runs["batch", 2]
    assert all(torch.equal(value, weights(expected)[name]) for name, value in weights(run).items())
    assert run.logged("eval/psnr_inside") == expected.logged("eval/psnr_inside")


NOTICE = (
    "BatchNorm2d normalises each micro-batch by itself: results depend on train.micro_batch_size but not on the number of "
    "processes. Use GroupNorm or train.batch_norm=frozen if they should depend on neither."
)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (
            {"micro_batch_size": "auto"},
            "train.micro_batch_size, which auto chooses by the available memory, but not on the number",
        ),
        ({"micro_batch_tokens": 64}, "train.micro_batch_tokens but not on the number of processes."),
        (
            {"micro_batch_size": 4, "micro_batch_tokens": "auto"},
            "train.micro_batch_size and train.micro_batch_tokens, which auto chooses by the available memory and the number of",
        ),
    ],
)
def test_the_bounds_that_are_set_are_said_and_whether_they_depend_on_processes(bounds, said):
    assert f": results depend on {said}" in notice(["BatchNorm2d"], TrainConfig(**bounds))


def test_run_and_plan_say_what_batch_norm_depends_on(tmp_path, capsys):
    short = (*JOB, "train.max_steps=1", "eval.show_samples=0", "train.num_workers=0")

    def said(name, *words):
        recipe = Recipe.load("restoration_demo", *short, *words, f"output_dir={tmp_path}/{name}")
        train(recipe)
        printed = capsys.readouterr().out.splitlines()
        return [line.removeprefix("note: ") for line in printed if line.startswith("note: ")], make_plan(recipe).notices

    for lines in said("batch"):
        assert NOTICE in lines
    for lines in said("group", "task.network_args={norm: group}"):
        assert not any("micro_batch_size" in line for line in lines)
    for lines in said("frozen", "train.batch_norm=frozen"):
        assert "train.batch_norm=frozen: BatchNorm2d uses its running statistics in training and does not update them." in lines
    for lines in said("nothing", "train.batch_norm=frozen", "task.network_args={norm: group}"):
        assert "train.batch_norm=frozen: the model has no running statistics to freeze." in lines


def test_stages_of_pipelines_keep_the_same_statistics(tmp_path):
    source = tmp_path / "norm.yaml"
    source.write_text("task: {type: tests.support.tasks.NextToken, model: norm_chain, num_samples: 30, float64: true}\n")
    job = ("train.epochs=1", "train.batch_size=12", "train.micro_batch_size=3", "train.lr=1e-2", "train.log_every=1")
    one = train_on(1, {"one": job}, tmp_path, str(source))["one"]
    jobs = {name: (*job, "parallel.pipeline_stages=2", f"parallel.schedule={name}") for name in ("1f1b", "interleaved")}
    for size in (2, 4):
        for run in train_on(size, jobs, tmp_path, str(source)).values():
            assert run.logged("train/loss") == pytest.approx(one.logged("train/loss"), rel=1e-9)
            assert run.logged("eval/loss") == pytest.approx(one.logged("eval/loss"), rel=1e-9)
            for name, value in weights(one).items():
                torch.testing.assert_close(weights(run)[name], value, rtol=1e-6, atol=1e-9)
