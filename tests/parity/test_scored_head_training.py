"""A loss that is computed together with the head is the loss of whole logits, on any number of processes, sharded or not."""

from pathlib import Path

import pytest

from tests.support.runs import train_on

RECIPE = str(Path(__file__).parents[1] / "support" / "scored_tokens.yaml")
WHOLE = ("train.head_loss=whole",)
TIED = ("task.model=llama_tied", "train.gradient_checkpointing=true", "task.dropout=0.1")
EXACT = ("task.model=gpt2", "task.float64=true", "train.packing=off")
EACH = ("task.type=tests.support.scored_tokens.EachToken",)
SPREAD = ("parallel.context=2",)
BF16 = ("task.model=transformer_lm", "train.mixed_precision=bf16")
JOBS = {
    1: {
        "packed": (),
        **{
            f"{name} whole": (*words, *WHOLE)
            for name, words in (("packed", ()), ("tied", TIED), ("exact", EXACT), ("bf16", BF16))
        },
        "exact": EXACT,
    },
    2: {
        "packed": (),
        "sharded": (),
        "tied sharded": TIED,
        "bf16 sharded": BF16,
        "tied spread": (*TIED, *SPREAD),
        "each sharded": EACH,
        "tied each sharded": (*TIED, *EACH),
        "cut": ("parallel.pipeline_stages=2",),
    },
    4: {"packed": (), "tied": TIED, "spread": SPREAD, "tied spread": (*TIED, *SPREAD)},
}
REFERENCE = {"packed": "packed whole", "sharded": "packed whole", "cut": "packed whole", "tied": "tied whole"}
REFERENCE |= {"spread": "packed whole", "tied spread": "tied whole"}
REFERENCE |= {"each sharded": "packed whole", "tied each sharded": "tied whole"}
REFERENCE |= {"tied sharded": "tied whole", "exact": "exact whole", "bf16": "bf16 whole", "bf16 sharded": "bf16 whole"}
CASES = [(name, size) for size, jobs in JOBS.items() for name in jobs if not name.endswith("whole")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sharded = [name for name in JOBS[2] if name.endswith("sharded")]
    found = {size: train_on(size, jobs, folder, RECIPE, sharded=sharded if size == 2 else ()) for size, jobs in JOBS.items()}
    return {(name, size): run for size, group in found.items() for name, run in group.items()}


@pytest.mark.parametrize(("name", "size"), CASES)
def test_losses_gradients_and_evaluations_are_those_of_whole_logits(runs, name, size):
    run, expected = runs[name, size], runs[REFERENCE[name], 1]
    tolerance = {"exact": 1e-10}.get(name, 2e-2 if "bf16" in name else 1e-5)
    for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/perplexity"):
        assert len(expected.logged(metric)) == (5 if metric.startswith("train") else 1)
        assert run.logged(metric) == pytest.approx(expected.logged(metric), rel=tolerance)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_chunks_are_really_computed_in_evaluations_too(runs, name, size):
    assert any(row["scored"] for row in runs[name, size].predictions) == (name != "cut")  # a pipeline returns logits


@pytest.mark.parametrize("name", ["packed", "tied", "exact", "bf16"])
def test_whole_is_whole(runs, name):
    assert not any(row["scored"] for row in runs[f"{name} whole", 1].predictions)
