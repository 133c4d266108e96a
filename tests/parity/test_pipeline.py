"""Stages are only another way to compute the same training: losses, gradients and weights are those of one process."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hftune.replay.audit import audit
from tests.support.runs import Command, Run, train_on

SUPPORT = Path(__file__).parents[1] / "support"
RECIPE = str(SUPPORT / "next_token.yaml")
MODELS = ("transformer_lm", "gpt2", "llama")
ZERO_BUBBLE = "zero_bubble" if torch.__version__ >= "2.13" else "1f1b"  # which hftune refuses before
SCHEDULES = ("gpipe", "1f1b", "interleaved", ZERO_BUBBLE)
DROPOUT = ("task.dropout=0.1",)
"""A step has four micro-batches of unequal lengths, the last one of an epoch two: too few for some pipelines."""


EPOCH = ("train.epochs=1",)


def stages(count, schedule="1f1b"):
    return (f"parallel.pipeline_stages={count}", f"parallel.schedule={schedule}")


def layouts(num_processes, model):
    """How so many processes may share the work of a model: name -> overrides.

    On four processes the first model has all of them. The others have one: they are cut in the same places as on two.
    On one process, "chain" has both epochs, as the runs that are stopped and go on; all others have the first.
    """
    if num_processes == 1:
        return {"one": EPOCH} | ({"chain": ()} if model == "gpt2" else {})
    if num_processes == 4 and model != MODELS[0]:
        schedule = {"gpt2": ZERO_BUBBLE, "llama": "1f1b"}[model]
        return {f"4 {schedule}": (*EPOCH, *stages(4, schedule))}
    counts = [count for count in (2, 4) if count <= num_processes]
    cut = {f"{count} {schedule}": (*EPOCH, *stages(count, schedule)) for count in counts for schedule in SCHEDULES}
    cut.pop("4 interleaved", None)  # of eight stages: see SPECIAL
    return {"data": EPOCH, **cut}


EXACT = (
    "task.model=chain",
    "task.float64=true",
    "task.dropout=0.3",
    "train.micro_batch_size=null",
    "train.micro_batch_tokens=40",
)
SHORT = ("train.max_steps=3",)
SPECIAL = {
    "exact": EXACT,
    "recomputed": ("task.model=gpt2", *DROPOUT, "train.gradient_checkpointing=true", *SHORT),
    "shared": ("task.model=llama_tied", *DROPOUT, *SHORT),
    "deep": ("task.model=gpt2", "task.num_layers=8", *DROPOUT, *SHORT),
    "adam": ("task.model=gpt2", "task.float64=true", "train.optimizer=adamw", "train.lr=1e-3", *SHORT),
    "bf16": ("task.model=transformer_lm", "train.mixed_precision=bf16", *SHORT),
}
"""What else must change nothing; on four processes with four stages, and two on each for "deep"."""
CHAIN = ("task.model=gpt2", *DROPOUT, "checkpoint.keep=9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """Every layout of every model; and one run that is stopped three times, and goes on in another layout each time."""
    found = {}
    resumed = {4: stages(2), 1: (), 2: stages(2, ZERO_BUBBLE)}
    for size in (4, 1, 2):
        jobs = {
            f"{model} {name}": (f"task.model={model}", *DROPOUT, *words)
            for model in MODELS
            for name, words in layouts(size, model).items()
        }
        for name, words in SPECIAL.items():
            schedule = {"shared": ZERO_BUBBLE, "deep": "interleaved"}.get(name, "1f1b")
            jobs[name] = (*words, *(stages(size, schedule) if size > 1 else ()))
        jobs["goes on"] = (*CHAIN, *resumed[size], f"output_dir={folder / 'chain'}")
        done = train_on(size, jobs, folder, RECIPE, stops={"goes on": (2, size - 1)})
        found |= {(name, size): run for name, run in done.items()}
    last = (*CHAIN, *stages(4, "gpipe"), f"output_dir={folder / 'chain'}")
    return found | {("goes on", 4): train_on(4, {"goes on": last}, folder, RECIPE)["goes on"]}


def same(run, expected, rel=1e-5):
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = expected.logged(metric)
        assert values and run.logged(metric) == pytest.approx(values, rel=rel)
    own, other = (load_file(made.folder / "model_last" / "model.safetensors") for made in (run, expected))
    assert own.keys() == other.keys()
    for name, value in other.items():
        # The bias of attention's keys has a gradient of zero, but for rounding: nothing to compare it with.
        assert torch.allclose(own[name], value, rtol=0, atol=rel * max(float(value.abs().max()), 1e-2)), name


@pytest.mark.parametrize(
    ("model", "size", "layout"), [(model, size, name) for model in MODELS for size in (2, 4) for name in layouts(size, model)]
)
def test_an_epoch_is_that_of_one_process_with_dropout_on(runs, model, size, layout):
    run, expected = runs[f"{model} {layout}", size], runs[f"{model} one", 1]
    assert len(expected.logged("train/loss")) == 5
    same(run, expected)
    assert run.predictions == expected.predictions and len(run.predictions) == 23


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_that_cuts_itself_is_equal_to_rounding_in_float64(runs, size):
    same(runs["exact", size], runs["exact", 1], rel=1e-13)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["recomputed", "shared", "deep", "adam"])
def test_recomputed_layers_shared_weights_more_stages_and_adam_change_nothing(runs, name, size):
    same(runs[name, size], runs[name, 1])


def test_bfloat16_is_that_of_one_process_to_its_own_rounding(runs):
    for metric in ("train/loss", "train/grad_norm"):
        assert runs["bf16", 2].logged(metric) == pytest.approx(runs["bf16", 1].logged(metric), rel=1e-2)


def test_a_run_goes_on_in_any_layout_and_ends_as_one_that_never_stopped(runs):
    """On 2 pipelines of 2 stages, then on one process, on 2 stages, and on 4."""
    run = runs["goes on", 4]
    same(run, runs["gpt2 chain", 1])
    found = audit(run.folder)
    assert (found.problems, found.whole_epochs) == ([], 2)
    assert [(start["after_step"], start["world_size"]) for start in found.starts] == [(0, 4), (3, 1), (5, 2), (8, 4)]


def held(run, size):
    return [run.weighed(rank) for rank in range(size)]


def test_each_process_of_two_stages_holds_half_of_weights_gradient_and_optimizer(runs):
    """But for tied embeddings, which the first and the last stage have."""
    (whole,) = held(runs["transformer_lm one", 1], 1)
    assert all(whole.values())
    for size in (2, 4):
        parts = held(runs["transformer_lm 2 1f1b", size], size)
        for what, size_bytes in whole.items():
            assert all(0.45 * size_bytes < part[what] < 0.55 * size_bytes for part in parts)
            assert parts[0][what] + parts[1][what] == size_bytes
    (whole,), parts = held(runs["adam", 1], 1), held(runs["adam", 2], 2)
    assert whole["moments"] == 2 * whole["weights"]
    tied = 30 * 16 * 8
    for what, count in (("weights", 1), ("gradient", 1), ("moments", 2)):
        assert sum(part[what] for part in parts) == whole[what] + count * tied
        assert max(part[what] for part in parts) < 0.6 * whole[what]


def test_evaluating_through_stages_gives_the_numbers_of_the_run(runs, tmp_path):
    run = runs["transformer_lm 2 1f1b", 2]
    words = (
        "evaluate",
        f"recipe={run.folder / 'recipe.yaml'}",
        "eval.batch_size=2",
        "--trust-code",
        "--output",
        str(tmp_path / "out.json"),
    )
    done = Command(4, *words, module="hftune.cli")
    assert done.returncode == 0, done.communicate()[1]
    expected = run.result["best"]
    assert json.loads((tmp_path / "out.json").read_text())["metrics"]["loss"] == pytest.approx(expected["value"], rel=1e-6)


def test_a_stop_during_an_evaluation_stops_all_stages_and_going_on_begins_with_it(runs, tmp_path):
    words = (
        f"recipe={RECIPE}",
        *DROPOUT,
        *stages(2),
        "task.type=tests.support.tasks.StoppedWhileEvaluated",
        f"output_dir={tmp_path}/out",
    )
    done = Command(2, *words)
    assert done.returncode != 0
    assert "stopped after step 5. The same command resumes from" in done.communicate()[1]
    done = Command(2, *words)
    assert done.returncode == 0, done.communicate()[1]
    same(Run(tmp_path / "out"), runs["gpt2 chain", 1])


def test_a_stage_that_fails_ends_all_with_its_own_message(tmp_path):
    words = (f"recipe={RECIPE}", *stages(2), "task.type=tests.support.tasks.FailingLoss", f"output_dir={tmp_path}/out")
    done = Command(2, *words)
    assert done.returncode != 0
    said = [line for line in done.communicate()[1].splitlines() if line.startswith("ValueError: ")]
    assert said and set(said) == {"ValueError: no such token"}


def test_a_model_that_cannot_be_cut_is_refused_before_the_processes_meet(tmp_path):
    done = Command(
        2,
        "recipe=yelp_demo",
        *stages(2),
        "task.dataset=tests.support.tasks:few_reviews",
        f"output_dir={tmp_path}/out",
    )
    assert done.returncode != 0
    said = {line for line in done.communicate()[1].splitlines() if line.startswith("hftune: ")}
    assert said == {
        "hftune: BertForSequenceClassification cannot be cut into stages: it has no head that predicts tokens. A pipeline cuts "
        "models that have a method stage(index, count), which returns one of their parts, and transformers' decoders: embeddings, "
        "one ModuleList of layers, a norm and a head. parallel.pipeline_stages=1 trains the model uncut."
    }
