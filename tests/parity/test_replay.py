"""A past step, computed again: equal to the bit on as many processes, and to 1e-6 on any other number.

The tolerance is the engine's: rounding was 2e-7 at most wherever it was measured, of steps near their checkpoints.
"""

import json
from pathlib import Path

import pytest

from hftune.replay.engine import TOLERANCE, Replayer, difference
from hftune.replay.history import Change, History
from tests.support.runs import SMALL, Command, train_on

ADAPTERS = str(Path(__file__).parents[1] / "support" / "adapters.yaml")
STEPS = (
    "train.max_steps=5",
    "train.epochs=2",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "eval.every=never",
    "train.log_every=1",
)
REVIEWS = (*SMALL, "task.dataset=tests.support.tasks:few_reviews", "task.max_train_samples=52", *STEPS)
WORDS = (
    "recipe=wikitext2_demo",
    "task.model_config={model_type: transformer_lm, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, dropout: 0.2}",
    *("task.max_train_samples=69", "task.block_length=12", "train.lr=0.5", "train.micro_batch_size=5", *STEPS),
)
FEW = ("task.max_train_samples=20", "train.batch_size=8", *STEPS)
NORM = ("task.network=tests.support.tasks.NormBlend", "train.micro_batch_size=2", "train.lr=1e-2")
ALONE = {
    "reviews": (*REVIEWS, "train.ema_decay=0.9"),
    "recomputed": (*REVIEWS, "train.gradient_checkpointing=true", "train.packing=off"),
    "adapters": (f"recipe={ADAPTERS}", "adapter.train_also=[lm_head]", *STEPS),
    "words": WORDS,
    "digits": ("recipe=mnist_demo", *FEW, "train.micro_batch_size=3"),
    "pictures": ("recipe=restoration_demo", *FEW, *NORM),
    "shapes": ("recipe=image_classification_demo", *FEW, "train.micro_batch_size=4"),
    "questions": ("recipe=embeddings_demo", *FEW, "train.micro_batch_size=3", "train.micro_batch_tokens=null"),
    "entities": ("recipe=token_classification_demo", *FEW),
    "spoken": ("recipe=seq2seq_demo", *FEW),
    "chats": ("recipe=chats_demo", *FEW),
    "titles": ("recipe=bigbird_demo", *FEW),
    "paragraphs": ("recipe=language_modeling_demo", *FEW),
}
ON_TWO = {
    "reviews": REVIEWS,
    "sharded": REVIEWS,
    "pipeline": (*WORDS, "parallel.pipeline_stages=2"),
    "pictures": ("recipe=restoration_demo", *FEW, *NORM),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        (name, size): run.folder
        for size, jobs in {1: ALONE, 2: ON_TWO}.items()
        for name, run in train_on(size, jobs, folder, sharded=("sharded",)).items()
    }


def replayed(folder, first, last, change=None, **options):
    """The steps from the checkpoint before ``first`` on, and how each compares with the ledger."""
    history = History.open(folder, trust_code=True, **options)
    with Replayer(history, first, change or Change()) as replayer:
        steps = list(replayer.advance(last))
    return steps, [difference(step, history.ledger.steps[step.step]) for step in steps]


def files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", ALONE)
def test_on_one_process_every_task_is_bit_equal(runs, name):
    folder = runs[name, 1]
    before = files(folder)
    steps, found = replayed(folder, 4, 5)
    assert [step.step for step in steps] in ([3, 4, 5], [4, 5])  # an epoch may have ended with step 3
    assert all(one.is_bit_equal for one in found), found
    assert files(folder) == before


@pytest.mark.parametrize("name", ON_TWO)
def test_run_of_two_processes_is_replayed_on_one(runs, name):
    _, found = replayed(runs[name, 2], 4, 5)
    assert all(one.same_samples and max(one.loss, one.grad_norm) <= TOLERANCE for one in found), found


@pytest.mark.parametrize(("name", "size"), [("reviews", 2), ("pictures", 2), ("reviews", 1)])
def test_on_two_processes(runs, name, size, tmp_path):
    words = ("replay", str(runs[name, size]), "--steps", "4:5", "--trust-code", f"--output={tmp_path}")
    command = Command(2, *words, module="hftune.cli")
    out, err = command.communicate()
    assert command.returncode == 0, out + err
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["equal"] and found["bit_equal"] == (size == 2), found
