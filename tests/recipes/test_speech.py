"""Speech recipes: the same losses and answers on any number of processes, in any micro-batches, and after a stop."""

import pytest

from tests.parity.test_fully_sharded import same
from tests.support.runs import train_on

FEW = (
    *("task.max_train_samples=36", "task.max_eval_samples=11", "train.epochs=2", "train.batch_size=12", "train.lr=1e-3"),
    *("train.micro_batch_size=4", "train.log_every=1", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=3"),
)
"""36 recordings in batches of 12: three steps an epoch."""
STILL = tuple(f"task.model_config.{name}=0" for name in ("hidden_dropout", "attention_dropout", "mask_time_prob"))
CALLS = ("recipe=audio_classification_demo", *FEW, "task.max_seconds=0.4")
CTC = ("recipe=ctc_demo", *FEW)
WHISPER = ("recipe=speech_to_text_demo", *FEW)
KINDS = {"calls": CALLS, "ctc": CTC, "whisper": WHISPER}
QUIET = {"ctc": (*CTC, *STILL), "whisper": (*WHISPER, "task.model_config.dropout=0")}

SIZES = {"ctc": (1, 5, 12), "whisper": (1, 12)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    again = (*CTC, f"output_dir={folder / 'again'}")
    sizes = {
        f"{name} by {size}": (*words, f"train.micro_batch_size={size}", f"eval.batch_size={size}")
        for name, words in QUIET.items()
        for size in SIZES[name]
    }
    lora = {"lora": (*CTC, "adapter.type=lora", "adapter.targets=[q_proj, v_proj]", "adapter.train_also=[lm_head]")}
    one = train_on(1, {**KINDS, **sizes, **lora}, folder)
    two = train_on(
        2,
        {**KINDS, **lora, "begins": again, "goes on": again, "sharded": CTC},
        folder,
        stops={"begins": (4, 1)},
        sharded=["sharded"],
    )
    four = train_on(4, {"ctc": CTC}, folder)
    parts = {1: one, 2: two, 4: four}
    return {(name, size): run for size, some in parts.items() for name, run in some.items()}


@pytest.mark.parametrize("name", [*KINDS, "lora"])
def test_losses_with_dropout_and_masks_are_those_of_one_process(runs, name):
    for size in (2, 4) if name == "ctc" else (2,):
        same(runs[name, size], runs[name, 1])
    losses = runs[name, 1].logged("train/loss")
    assert len(losses) == 6 and len(set(losses)) == 6


def test_so_are_those_of_sharded_weights(runs):
    same(runs["sharded", 2], runs["ctc", 1])


@pytest.mark.parametrize("name", QUIET)
def test_without_dropout_and_masks_they_do_not_depend_on_micro_batches(runs, name):
    for size in SIZES[name][:-1]:
        same(runs[f"{name} by {size}", 1], runs[f"{name} by 12", 1])


def test_a_resumed_run_is_the_same_to_the_bit(runs):
    assert runs["goes on", 2].logged("train/loss") == runs["ctc", 2].logged("train/loss")
    assert runs["goes on", 2].predictions == runs["ctc", 2].predictions


@pytest.mark.parametrize("name", KINDS)
def test_each_recording_is_scored_once(runs, name):
    rows = [runs[name, size].predictions for size in (1, 2)]
    assert [row["index"] for row in rows[0]] == list(range(11))
    if name != "calls":
        assert rows[0] == rows[1]
    for metric in ("loss", "accuracy") if name == "calls" else ("loss", "wer", "cer"):
        assert runs[name, 2].result["metrics"][metric] == pytest.approx(runs[name, 1].result["metrics"][metric], rel=1e-5)
    assert (runs[name, 1].folder / "samples").is_dir()
