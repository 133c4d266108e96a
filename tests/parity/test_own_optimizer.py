"""An optimizer of the user's keeps the promise: the same training on any number of processes, and bit-equal when resumed."""

from pathlib import Path

import pytest

from tests.support.runs import train_on

RECIPE = str(Path(__file__).parents[1] / "support" / "next_token.yaml")
WORDS = ("task.dropout=0.1", "train.epochs=1", "train.momentum=0.0", "train.lr=1e-2", "resume=auto", "checkpoint.every=2")
RMSPROP = (*WORDS, "train.optimizer=torch.optim.RMSprop", "train.optimizer_args={alpha: 0.9, momentum: 0.5}")
ADAFACTOR = (*WORDS, "train.optimizer=torch.optim.Adafactor")
COUNTED = (*WORDS, "train.optimizer=tests.support.optimizers.Counted", "train.lr=1e-1")
LAYERS = (*WORDS, "task.type=tests.support.tasks.SlowEmbedding", "train.optimizer=adamw")
PIPELINE = "parallel.pipeline_stages=2"
WAYS = {
    "rmsprop": RMSPROP,
    "rmsprop under FSDP": RMSPROP,
    "rmsprop in a pipeline": (*RMSPROP, PIPELINE),
    "adafactor": ADAFACTOR,
    "adafactor in a pipeline": (*ADAFACTOR, PIPELINE),
    "counted": COUNTED,
    "layers": LAYERS,
    "layers under FSDP": LAYERS,
    "layers in a pipeline": (*LAYERS, PIPELINE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    plain = {name: words for name, words in WAYS.items() if " " not in name}
    found = {(name, 1): run for name, run in train_on(1, plain, folder, recipe=RECIPE).items()}
    found["counted", 4] = train_on(4, {"counted": COUNTED}, folder, recipe=RECIPE)["counted"]
    stopped = {f"{name}, stopped": (*WAYS[name], f"output_dir={folder}/{name} again") for name in ("rmsprop", "counted")}
    resumed = {f"{name}, resumed": words for name, words in zip(("rmsprop", "counted"), stopped.values(), strict=True)}
    jobs, stops = {**WAYS, **stopped, **resumed}, dict.fromkeys(stopped, (3, 1))
    sharded = [name for name in jobs if "FSDP" in name]
    two = train_on(2, jobs, folder, recipe=RECIPE, stops=stops, sharded=sharded)
    return found | {(name, 2): run for name, run in two.items()}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in WAYS), ("counted", 4)])
def test_losses_do_not_depend_on_how_many_processes_step_or_in_which_way(runs, name, size):
    expected, run = runs[name.split()[0], 1], runs[name, size]
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = expected.logged(metric)
        assert values and run.logged(metric) == pytest.approx(values, rel=1e-5)


def test_the_optimizers_are_different_ones(runs):
    losses = {tuple(runs[name, 1].logged("eval/loss")) for name in ("rmsprop", "adafactor", "counted", "layers")}
    assert len(losses) == 4


@pytest.mark.parametrize("name", ["rmsprop", "counted"])
def test_a_resumed_run_ends_with_the_same_bits(runs, name):
    whole, resumed = runs[name, 2], runs[f"{name}, resumed", 2]
    assert len(resumed.logged("train/loss")) == 5 and resumed.logged("train/loss") == whole.logged("train/loss")
    weights = [(run.folder / "model_last" / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
