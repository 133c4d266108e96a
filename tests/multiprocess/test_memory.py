"""Too little memory: named, or avoided by smaller micro-batches that all processes agree on."""

import pytest

from hftune import ConfigError, Recipe, TrainingError, train
from hftune.replay.ledger import read_ledger
from tests.support.runs import Run, train_on

TASK = "task.type=tests.support.tasks.TooLarge"
JOB = (
    TASK,
    "train.epochs=1",
    "train.batch_size=16",
    "train.lr=1e-3",
    "train.log_every=1",
    "eval.batch_size=2",
    "eval.metric=loss",
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("task: {type: tests.support.tasks.TooLarge}\n")
    return str(path)


def run(source, folder, *overrides):
    return Run(train(Recipe.load(source, *JOB[1:], f"output_dir={folder}", *overrides)).output_dir)


def test_step_shape_and_way_out_are_named(source, tmp_path):
    with pytest.raises(TrainingError) as caught:
        run(source, tmp_path / "out", "train.micro_batch_size=8")
    assert str(caught.value) == (
        "Out of memory in step 1 on process 0, in a micro-batch of x (8, 4). Lower train.micro_batch_size or "
        "train.micro_batch_tokens: the steps stay the same. train.micro_batch_size=auto finds what fits; "
        "train.gradient_checkpointing=true and train.mixed_precision=bf16 also save memory."
    )


def test_evaluation_names_its_own_key(source, tmp_path):
    with pytest.raises(TrainingError) as caught:
        run(source, tmp_path / "out", "train.micro_batch_size=4", "eval.batch_size=16")
    assert str(caught.value) == (
        "Out of memory in the evaluation of 16 samples at a time. Lower eval.batch_size or eval.batch_tokens; "
        "no result depends on them."
    )


def test_auto_finds_what_fits_and_changes_no_step(source, tmp_path, capsys):
    expected = run(source, tmp_path / "small", "train.micro_batch_size=2").logged("train/loss")
    capsys.readouterr()
    found = run(source, tmp_path / "auto", "train.micro_batch_size=auto")
    assert "train.micro_batch_size=auto: 4 of the longest samples fit on every process." in capsys.readouterr().out
    assert len(expected) == 3 and found.logged("train/loss")[0] == pytest.approx(expected[0], rel=0.5)  # dropout is on


def test_auto_is_agreed_by_all_processes(source, tmp_path):
    """Process 1 has memory for 3 rows, process 0 for 5."""
    found = train_on(2, {"auto": (*JOB[1:], "train.micro_batch_size=auto")}, tmp_path, recipe=source)["auto"]
    ledger = read_ledger(found.folder)
    assert (ledger.starts[0]["world_size"], ledger.starts[0]["micro_batch_size"], len(ledger.steps)) == (2, 2, 3)


def test_auto_searches_again_where_it_did_not_search_before_or_memory_has_changed(source, tmp_path, capsys):
    def said(step, *words):
        capsys.readouterr()
        run(source, tmp_path / "out", "train.epochs=2", f"train.max_steps={step}", *words)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: train.micro_batch_size=auto")]

    auto = "train.micro_batch_size=auto"
    searched = ["note: train.micro_batch_size=auto: 4 of the longest samples fit on every process."]
    assert said(1, "train.micro_batch_size=1") == []
    assert said(2, auto) == searched
    assert said(3, auto) == ["note: train.micro_batch_size=auto: 4, found when the run began."]
    assert said(4, auto, "train.batch_norm=frozen") == searched


def test_auto_says_so_where_nothing_fits(source, tmp_path):
    with pytest.raises(ConfigError) as caught:
        run(source, tmp_path / "out", "train.micro_batch_size=auto", "task.most=0")
    assert str(caught.value) == (
        "train.micro_batch_size=auto: not even the longest sample alone fits into memory. Lower the task's maximum length, or set "
        "train.gradient_checkpointing=true or train.mixed_precision=bf16."
    )


def test_another_word_than_auto_is_refused():
    with pytest.raises(ConfigError, match=r"train.micro_batch_size='automatic' .* Did you mean 'auto'\?"):
        Recipe.load("yelp_demo", "train.micro_batch_size=automatic")
