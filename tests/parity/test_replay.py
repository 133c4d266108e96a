"""A past step, computed again: equal to the bit on as many processes, and to 1e-6 on any other number.

The tolerance is the engine's: rounding was 2e-7 at most wherever it was measured, of steps near their checkpoints.
"""

import json
import shutil

import pytest
import torch

from hftune import ConfigError, cli
from hftune.models import scored_head
from hftune.replay.engine import Replayer
from hftune.replay.history import Change, History
from hftune.replay.samples import batch_loss, look_inside
from hftune.replay.tolerance import TOLERANCE, difference
from tests.support.runs import FSDP, SMALL, Command, train_on

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
PLATEAU = ("train.schedule=plateau", "train.gamma=0.5", "train.plateau_patience=1", "eval.every=1", "eval.min_improvement=10")
FEW = ("task.max_train_samples=20", "train.batch_size=8", *STEPS)
NORM = ("task.network=tests.support.tasks.NormBlend", "train.micro_batch_size=2", "train.lr=1e-2")
ALONE = {
    "reviews": (*REVIEWS, "train.ema_decay=0.9"),
    "recomputed": (*REVIEWS, "train.gradient_checkpointing=true", "train.packing=off"),
    "adapters": (*REVIEWS, "adapter.type=lora", "adapter.dropout=0.1"),
    "skipping": (*REVIEWS, "train.skip=[4]"),
    "falling": (*WORDS, *PLATEAU, "train.warmup_steps=2", "train.skip=[4]"),
    "at first": (*REVIEWS, "train.max_steps=4", "output_dir={folder}/changed"),
    "changed": (*REVIEWS, "train.max_steps=7", "train.lr=2e-4", "train.clip_norm=0.5", "output_dir={folder}/changed"),
    "words": WORDS,
    "digits": ("recipe=mnist_demo", *FEW, "task.dataset=tests.support.tasks:few_digits", "train.micro_batch_size=3"),
    "pictures": ("recipe=restoration_demo", *FEW, *NORM),
    "shapes": ("recipe=image_classification_demo", *FEW, "task.image_size=24", "train.micro_batch_size=4"),
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
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: run.folder for name, run in train_on(1, placed(ALONE, folder), folder).items()}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    runs = train_on(2, ON_TWO, tmp_path_factory.mktemp("two"), sharded=("sharded",))
    return {name: run.folder for name, run in runs.items()}


def placed(jobs, folder):
    return {name: tuple(word.replace("{folder}", str(folder)) for word in words) for name, words in jobs.items()}


def replayed(folder, first, last, change=None, look=None, **options):
    """The steps from the checkpoint before ``first`` on, and how each compares with the ledger."""
    history = History.open(folder, trust_code=True, **options)
    with Replayer(history, first, change or Change()) as replayer:
        steps = list(replayer.advance(last, look))
    return steps, [difference(step, history.ledger.steps[step.step]) for step in steps]


def files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def look_into_step_4(looked):
    """A look that must not change step 5."""

    def look(replayer, batch, report):
        if replayer.step == 4:
            looked["samples"] = look_inside(replayer, batch, report)
            looked["losses"] = [batch_loss(replayer, found, 4) for found in (batch, replayer.batch_of(4))]
            looked["in chunks"] = replayer.strategy.scores_head

    return look


def check_samples(looked, step):
    """Losses and gradients of the samples are those of the step."""
    samples = looked["samples"]
    assert [sample.sample for sample in samples] == step.samples.tolist()
    assert sum(sample.items for sample in samples) == pytest.approx(step.items)
    added = sum(sample.loss_sum for sample in samples) / step.items
    assert [added, *looked["losses"]] == pytest.approx([step.loss] * 3, rel=1e-6)
    assert sum(sample.gradient_share for sample in samples) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", sorted(ALONE.keys() - {"skipping", "falling", "at first"}))
def test_on_one_process_every_task_is_bit_equal(alone, name):
    folder, looked = alone[name], {}
    before = files(folder)
    steps, found = replayed(folder, 4, 5, look=look_into_step_4(looked))
    assert [step.step for step in steps] in ([3, 4, 5], [4, 5])  # an epoch may have ended with step 3
    assert all(one.is_bit_equal for one in found), found
    assert files(folder) == before
    check_samples(looked, steps[-2])


def test_samples_have_losses_where_the_head_computes_one_in_chunks(alone, monkeypatch):
    looked = {}
    monkeypatch.setattr(scored_head, "AT_ONCE", 1000)
    steps, found = replayed(alone["paragraphs"], 4, 5, look=look_into_step_4(looked))
    assert looked["in chunks"] and all(one.is_equal for one in found), found
    check_samples(looked, steps[-2])


@pytest.mark.parametrize("name", ON_TWO)
def test_run_of_two_processes_is_replayed_on_one(on_two, name):
    _, found = replayed(on_two[name], 4, 5)
    assert all(one.same_samples and max(one.loss, one.grad_norm) <= TOLERANCE for one in found), found


def on_two_processes(folder, output, *words, **variables):
    """What `hftune replay` says of steps 4 and 5, and of each step on the way."""
    words = ("replay", str(folder), "--steps=4:5", "--trust-code", f"--output={output}", "--worst=0", *words)
    command = Command(2, *words, module="hftune.cli", **variables)
    out, err = command.communicate()
    assert command.returncode == 0, out + err
    rows = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    return json.loads((output / "replay.json").read_text()), {row["step"]: row for row in rows}


def test_run_of_one_process_is_replayed_on_two(alone, tmp_path):
    found, rows = on_two_processes(alone["reviews"], tmp_path, "--worst=3", "--why")
    assert found["equal"] and max(found["largest_difference"].values()) <= TOLERANCE
    samples = [row for row in map(json.loads, (tmp_path / "samples.jsonl").open()) if row["step"] == 5]
    assert sorted(row["sample"] for row in samples) == sorted(rows[5]["samples"])
    assert sum(row["loss"] * row["items"] for row in samples) == pytest.approx(rows[5]["loss"] * rows[5]["items"], rel=1e-6)
    assert sum(row["gradient_share"] for row in samples) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_processes_again_it_is_bit_equal_and_can_be_changed(on_two, name, tmp_path):
    change = ("--set", "train.lr=2e-6", "train.ema_decay=0.9")  # a new set-up after step 3, with its weights
    found, rows = on_two_processes(on_two[name], tmp_path, *change, **(FSDP if name == "sharded" else {}))
    from_step_2 = name != "pictures"  # of which an epoch has ended after step 3
    assert found["bit_equal"] and found["compared_steps"] == from_step_2 and found["notices"] == [], found
    was, now = ([row[name] for name in ("loss", "grad_norm")] for row in (rows[4]["then"], rows[4]))
    assert now == was and rows[5]["loss"] != rows[5]["then"]["loss"]  # the new rate is that of step 4's update


def test_steps_on_both_sides_of_a_resume_have_the_recipes_of_their_time(alone, tmp_path):
    folder = shutil.copytree(alone["changed"], tmp_path / "out")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")  # the replay has to go on where the training once stopped
    steps, found = replayed(folder, 4, 6)
    assert [step.step for step in steps] == [3, 4, 5, 6] and all(one.is_bit_equal for one in found), found
    assert steps[2].lr > 3 * steps[1].lr


def test_step_that_was_skipped_is_skipped_again(alone):
    steps, found = replayed(alone["skipping"], 3, 5)
    assert [step.step for step in steps] == [3, 5] and all(one.is_bit_equal for one in found)


def test_rate_that_fell_on_a_plateau_falls_as_often_from_another_start(alone):
    steps, found = replayed(alone["falling"], 3, 5)
    assert [step.lr for step in steps] == [0.5, 0.125] and all(one.is_bit_equal for one in found)
    with Replayer(History.open(alone["falling"]), 1, Change(("train.lr=0.1", "train.skip=[]"))) as replayer:
        assert [step.lr for step in replayer.advance(5)] == [0, 0.05, 0.1, 0.1, 0.025]


def test_change_from_the_first_step_gives_the_run_that_was_changed_so(alone):
    change = Change(("train.gradient_checkpointing=true", "train.packing=off"), from_step=1)
    steps, _ = replayed(alone["reviews"], 1, 5, change)
    lines = History.open(alone["recomputed"]).ledger.steps
    assert [(step.loss, step.grad_norm) for step in steps] == [(line["loss"], line["grad_norm"]) for line in lines.values()]


@pytest.mark.parametrize("name", ["reviews", "paragraphs"])
def test_sample_without_weight_stays_in_the_forward_pass_of_the_others(alone, name):
    history, seen = History.open(alone[name], trust_code=True), []
    with Replayer(history, 4) as replayer:
        *_, was = replayer.advance(4, lambda replayer, *step: seen.append(look_inside(replayer, *step)))
        left_out = seen[-1][0]
        replayer.restart(Change(without=frozenset([left_out.sample]), from_step=4))
        *_, step = replayer.advance(4)
    assert (step.items, step.num_samples) == (was.items - left_out.items, was.num_samples)
    assert step.loss * step.items == pytest.approx(was.loss * was.items - left_out.loss_sum, rel=1e-6)
    assert step.grad_norm != was.grad_norm


def test_rewinding_and_loading_lead_to_the_same_steps(alone):
    history = History.open(alone["reviews"], trust_code=True)
    lines = history.ledger.steps
    with Replayer(history, 5) as replayer:
        for first in (5, 1, 3):
            replayer.rewind(first)
            assert all(difference(step, lines[step.step]).is_bit_equal for step in replayer.advance(5))
        weights = replayer.weights()["model"]
        replayer.load(5)
        assert all(torch.equal(value, weights[name]) for name, value in replayer.weights()["model"].items())


def test_checkpoints_that_a_replay_leaves_serve_the_next_one(alone, tmp_path, capsys):
    folder = shutil.copytree(alone["words"], tmp_path / "out")
    shutil.rmtree(folder / "checkpoints")
    assert cli.main(["replay", str(folder), "--step", "5", "--save-every", "2"]) == 0
    assert "Step 5 of 5, from the first weights: 5 steps on 1 process" in capsys.readouterr().out
    assert cli.main(["replay", str(folder), "--step", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["from_checkpoint"] == 4 and found["bit_equal"] and not (folder / "checkpoints").exists()


def test_change_is_shown_beside_what_happened(alone, tmp_path, capsys):
    words = [
        "replay",
        str(alone["words"]),
        "--steps",
        "3:5",
        "--set",
        "train.lr=0.1",
        "--skip",
        "4",
        f"--output={tmp_path}/new",
    ]
    assert cli.main(words) == 0
    said, rows = capsys.readouterr().out, (tmp_path / "new" / "steps.jsonl").read_text().splitlines()
    assert "skipped" in said and [json.loads(row)["step"] for row in rows] == [3, 5]
    assert [json.loads(row)["lr"] < json.loads(row)["then"]["lr"] for row in rows] == [True, True]


def test_checkpoint_that_is_broken_is_passed_over_and_named(alone, tmp_path):
    folder = shutil.copytree(alone["words"], tmp_path / "out")
    broken = folder / "checkpoints" / "step_00000004"
    (broken / "optimizer.safetensors").unlink()
    history = History.open(folder)
    with Replayer(history, 5) as replayer:
        assert replayer.step == 2 and replayer.notices == [f"Skipped {broken}: optimizer.safetensors is missing."]
        assert all(difference(step, history.ledger.steps[step.step]).is_bit_equal for step in replayer.advance(5))


def test_change_that_ends_the_run_earlier(alone):
    with (
        pytest.raises(ConfigError, match="With this change the run ends after step 4: there is no step 5"),
        Replayer(History.open(alone["words"]), 5, Change(("train.max_steps=4",), from_step=5)) as replayer,
    ):
        list(replayer.advance(5))


def test_step_that_is_not_as_in_the_ledger_ends_with_code_1(alone, tmp_path, capsys):
    folder = shutil.copytree(alone["words"], tmp_path / "out")
    *lines, last = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    assert not any(str(alone["words"]) in line for line in lines), "the ledger names the folder of its run"
    place = next(place for place, line in enumerate(lines) if json.loads(line).get("step") == 4)
    lines[place] = json.dumps({**json.loads(lines[place]), "loss": 1.0}) + "\n"
    (folder / "ledger.jsonl").write_text("".join([*lines, last]))
    assert cli.main(["replay", str(folder), "--step", "4", "--worst", "0"]) == 1
    assert "NOT equal. Step 4 has loss" in capsys.readouterr().out


def test_row_that_was_changed_is_named(alone, tmp_path, capsys):
    folder = shutil.copytree(alone["words"], tmp_path / "out")
    text = (folder / "ledger.jsonl").read_text()
    line = json.loads(text.splitlines()[0])
    (folder / "ledger.jsonl").write_text(text.replace(line["data"]["train"]["digest"], "all:other", 1))
    rows = bytearray((folder / "rows.bin").read_bytes())
    rows[16 * 5] ^= 1  # of row 5
    (folder / "rows.bin").write_bytes(rows)
    assert cli.main(["replay", str(folder), "--steps", "3:4"]) == 0
    assert "  data      train: row 5 differs; it is first used in step" in capsys.readouterr().out
