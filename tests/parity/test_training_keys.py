"""The keys of training, and optimizers of the user's, keep the promise: the same training on 1, 2 and 4 processes, and bit-equal when resumed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hftune import ConfigError, Recipe, cli
from hftune.planning.plan import make_plan
from tests.support.runs import train_on

RECIPE = str(Path(__file__).parents[1] / "support" / "next_token.yaml")
WORDS = ("task.dropout=0.1", "train.epochs=1", "train.optimizer=adamw", "train.momentum=0.0", "train.lr=1e-2", "resume=auto")
WORDS = (*WORDS, "checkpoint.every=100", "eval.every=3")
GROUPS = "train.groups=[{match: ln_f, lr: 1e-3, weight_decay: 0.1}, {match: mlp, weight_decay: 0.2}]"
FLAT = ("eval.every=1", "eval.patience=100", "eval.min_improvement=10")
JOBS = {
    "patience": (*WORDS, "eval.every=1", "eval.patience=2", "eval.min_improvement=10", "train.log_every=100"),
    "ema": (*WORDS, "train.ema_decay=0.9", "train.freeze=[wpe]", GROUPS, "train.layer_decay=0.7"),
    "plateau": (*WORDS, "train.schedule=plateau", "train.gamma=0.5", "train.plateau_patience=1", *FLAT),
    "muon": (*WORDS, "train.optimizer=muon", "train.weight_decay=0.1"),
    "adafactor": (*WORDS, "train.optimizer=adafactor"),
    "lion": (*WORDS, "train.optimizer=lion", "train.lr=1e-3", "train.schedule=cosine_restarts"),
    "schedule_free": (*WORDS, "train.optimizer=schedule_free", "train.schedule=constant"),
    "adamw_8bit": (*WORDS, "train.optimizer=adamw_8bit", "train.optimizer_args={min_8bit_size: 16}"),
    "rmsprop": (*WORDS, "train.optimizer=torch.optim.RMSprop", "train.optimizer_args={alpha: 0.9, momentum: 0.5}"),
    "counted": (*WORDS, "train.optimizer=tests.support.optimizers.Counted", "train.lr=1e-1"),
    "layers": (*WORDS, "task.type=tests.support.tasks.SlowEmbedding"),
    "own": (*WORDS, "task.type=tests.support.tasks.OwnOptimizer", "train.schedule=wsd", "train.freeze=[wpe]"),
}
"""Trained on 1 process."""
SHARDED = [f"{name} under FSDP" for name in ("ema", "muon", "lion", "schedule_free", "rmsprop", "layers")]
CUT = [f"{name} in a pipeline" for name in ("ema", "rmsprop", "adafactor", "layers")]
WAYS = {
    1: [],
    2: ["patience", "plateau", "adafactor", "adamw_8bit", "rmsprop", "counted", *CUT, *SHARDED],
    4: ["ema", "muon", "counted"],
}
"""How each number of processes trains them; all of them on 1."""
RESUMED = {
    1: ["muon", "lion", "adafactor", "adamw_8bit"],
    2: ["patience", "plateau", "rmsprop", "counted", "ema under FSDP", "schedule_free under FSDP"],
    4: [],
}


def words(way):
    return (*JOBS[way.split()[0]], *(["parallel.pipeline_stages=2"] if "pipeline" in way else []))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for size, ways in WAYS.items():
        jobs = {way: words(way) for way in (ways or JOBS)}
        again = {way: (*words(way), f"output_dir={folder}/{way} on {size} again") for way in RESUMED[size]}
        stopped = {f"{way}, stopped": these for way, these in again.items()}
        jobs |= stopped | {f"{way}, resumed": these for way, these in again.items()}
        # patience: in the evaluation that exhausts it, between two lines of metrics.jsonl
        stops = {name: (3 if name.startswith("patience") else 2, size - 1) for name in stopped}
        sharded = [way for way in jobs if "FSDP" in way]
        done = train_on(size, jobs, folder, recipe=RECIPE, stops=stops, sharded=sharded)
        found |= {(way, size): run for way, run in done.items()}
    return found


@pytest.mark.parametrize(("way", "size"), [(way, size) for size, ways in WAYS.items() for way in ways])
def test_losses_do_not_depend_on_how_many_processes_step_or_in_which_way(runs, way, size):
    expected, run = runs[way.split()[0], 1], runs[way, size]
    tolerance = 1e-3 if way == "adamw_8bit" else 1e-5  # its state is rounded to 8 bits, which a gradient's last bit can tip
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = expected.logged(metric)
        assert values and run.logged(metric) == pytest.approx(values, rel=tolerance)


def test_the_trainings_are_different_ones(runs):
    assert len({tuple(runs[name, 1].logged("eval/loss")) for name in JOBS}) == len(JOBS)


@pytest.mark.parametrize(("way", "size"), [(way, size) for size, ways in RESUMED.items() for way in ways])
def test_a_resumed_run_ends_with_the_same_bits(runs, way, size):
    whole, resumed = runs[way, size], runs[f"{way}, resumed", size]
    for metric in ("train/loss", "eval/loss"):
        assert resumed.logged(metric) == whole.logged(metric)
    for model in ("model", "model_last"):
        weights = [(run.folder / model / "model.safetensors").read_bytes() for run in (whole, resumed)]
        assert weights[0] == weights[1]


@pytest.mark.parametrize(("way", "size"), [("ema", 1), ("ema under FSDP", 2), ("ema in a pipeline", 2)])
def test_the_average_is_exported_and_frozen_weights_stay(runs, way, size):
    folder = runs[way, size].folder
    last, exported = max((folder / "checkpoints").iterdir()), load_file(folder / "model_last" / "model.safetensors")
    weights, averages = (load_file(last / f"{name}.safetensors") for name in ("model", "ema"))
    frozen = "transformer.wpe.weight"
    assert averages.keys() == weights.keys() - {frozen}
    exported["transformer.wte.weight"] = exported.pop("lm_head.weight", exported.get("transformer.wte.weight"))  # tied
    assert all(torch.equal(exported[name], value) for name, value in averages.items())
    assert not any(torch.equal(weights[name], value) for name, value in averages.items())
    others = [load_file(runs[name, 1].folder / "model" / "model.safetensors")[frozen] for name in ("ema", "muon")]
    assert torch.equal(exported[frozen], others[0]) and not torch.equal(exported[frozen], others[1])


@pytest.mark.parametrize("name", ["patience", "patience, resumed"])
def test_training_ends_when_patience_is_exhausted_and_says_so(runs, name):
    run = runs[name, 2]
    why = "Stopped after step 3 of 5: 2 evaluations did not improve eval/loss by more than 10 (eval.patience=2)."
    assert run.result["stopped_early"] == why and run.result["steps"] == 3
    assert why[:40] in (run.folder.parent / "next_token-2.log").read_text()
    assert len(run.logged("eval/loss")) == 3 and len(run.logged("train/loss")) == 2  # the first step, and the last
    assert max((run.folder / "checkpoints").iterdir()).name == "step_00000003"


def test_a_run_that_patience_has_ended_is_finished(runs, tmp_path):
    run = runs["patience", 1]
    before = (run.folder / "result.json").stat().st_mtime_ns
    words = (*JOBS["patience"], f"output_dir={run.folder}")
    train_on(1, {"again": words}, tmp_path, recipe=RECIPE)
    assert (run.folder / "result.json").stat().st_mtime_ns == before
    assert "Nothing was trained. To train longer, raise eval.patience" in (tmp_path / "next_token-1.log").read_text()
    train_on(1, {"longer": (*words, "eval.patience=3")}, tmp_path, recipe=RECIPE)
    assert json.loads((run.folder / "result.json").read_text())["steps"] == 4


def test_training_starts_from_weights_of_ones_own_and_says_what_they_lack(runs, tmp_path):
    whole, start = runs["patience", 1].folder / "model", tmp_path / "start.safetensors"
    tensors = {name: value for name, value in load_file(whole / "model.safetensors").items() if "ln_f" not in name}
    save_file({**tensors, "extra": torch.ones(2)}, start)
    job = (
        *WORDS,
        "task.type=tests.support.tasks.FromWeights",
        f"task.weights={start}",
        "train.freeze=[wpe]",
        "train.max_steps=1",
    )
    run = train_on(1, {"started": job}, tmp_path, recipe=RECIPE)["started"]
    exported, frozen = load_file(run.folder / "model" / "model.safetensors"), "transformer.wpe.weight"
    assert torch.equal(exported[frozen], tensors[frozen])
    said = (tmp_path / "next_token-1.log").read_text().replace("\n", " ")
    assert "lacks 2 of the model's tensors, which begin as they were: transformer.ln_f.weight, transformer.ln_f.bias." in said
    assert "has 1 tensor that the model lacks: extra." in said
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        make_plan(Recipe.load(RECIPE, *job[:-2], "task.weights=missing"))


def test_a_model_whose_weights_were_not_all_trained_is_evaluated_again(runs, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = runs["own", 1]
    assert run.result["test"]["loss"] > 0
    assert cli.main(["evaluate", str(run.folder), "--split", "test", "--trust-code"]) == 0
    assert f"{run.result['test']['loss']:.4g}" in capsys.readouterr().out
