"""train.skip: what is refused and said; tests/parity/test_skipped_steps.py trains with it."""

from types import SimpleNamespace

import pytest

from hftune import ConfigError, Recipe
from hftune.batch_plan import BatchPlan
from hftune.build import check_skip, skip_notices
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.resume import _changes
from hftune.checkpoints.train_state import TrainState
from hftune.config import TrainConfig
from hftune.loop import rest_of_epoch


def test_samples_of_skipped_steps_are_not_loaded():
    plan, asked = BatchPlan(num_samples=20, batch_size=4), []

    def batches(dataset, steps, num_workers, epoch):
        for step in steps:
            asked.append([sample for micro_batch in step for sample in micro_batch.samples])
            yield asked[-1]

    config, state = TrainConfig(skip=[2, 7, 10]), TrainState(step=6, epoch=1, step_in_epoch=1)
    run = SimpleNamespace(
        recipe=SimpleNamespace(train=config), state=state, plan=plan, strategy=SimpleNamespace(batches=batches)
    )
    steps = [*rest_of_epoch(run, None)]
    order = plan.epoch(1).order_N.tolist()
    assert steps == [None, order[8:12], order[12:16], None] and asked == [order[8:12], order[12:16]]


def test_steps_that_there_are_not_and_a_run_without_any_are_told():
    with pytest.raises(ConfigError, match=r"^train.skip=\[5, 0\]: each must be at least 1.$"):
        TrainConfig(skip=[5, 0])
    with pytest.raises(ConfigError, match=r"^train.skip leaves out all 3 steps of the run: nothing would be trained"):
        check_skip(TrainConfig(skip=[3, 1, 2, 9]), 3)
    check_skip(TrainConfig(skip=[3, 1, 9]), 3)
    assert skip_notices(TrainConfig(), 0, 60) == []
    assert skip_notices(TrainConfig(skip=[37]), 0, 60) == ["train.skip=[37]: step 37 is left out."]
    assert skip_notices(TrainConfig(skip=[37]), 40, 60) == []
    assert skip_notices(TrainConfig(skip=[37, 41, 50, 61]), 40, 60) == [
        "train.skip=[37, 41, 50, 61]: 2 steps are left out.",
        "train.skip: there is no step 61, because the run has 60 steps.",
    ]


@pytest.mark.parametrize(("before", "now", "step", "was"), [([], [137], 137, "taken"), ([5, 9, 40], [40], 5, "left out")])
def test_only_steps_to_come_can_change_on_resume(tmp_path, before, now, step, was):
    (tmp_path / "recipe.yaml").write_text(Recipe.load("yelp_demo", f"train.skip={before}").to_yaml())
    with pytest.raises(ConfigError) as caught:
        _changes(Checkpoint(tmp_path, 200, {}, {}), Recipe.load("yelp_demo", f"train.skip={now}"))
    assert str(caught.value) == (
        f"{tmp_path} cannot resume with train.skip={now} (it was {before}): step {step} was {was}. Change only what comes after "
        f"step 200; or resume from a checkpoint before step {step}: resume=FOLDER/checkpoints/step_..., with a different "
        "output_dir."
    )
    changed = _changes(Checkpoint(tmp_path, 4, {}, {}), Recipe.load("yelp_demo", f"train.skip={now}"))
    assert changed == {"train.skip": f"train.skip={now} (it was {before})"}


def test_recipes_of_before_there_was_the_key_resume(tmp_path):
    text = Recipe.load("yelp_demo").to_yaml()
    (tmp_path / "recipe.yaml").write_text(older := text.replace("  skip: []\n", "").replace("  keep_every: null\n", ""))
    assert len(older.splitlines()) == len(text.splitlines()) - 2
    assert _changes(Checkpoint(tmp_path, 200, {}, {}), Recipe.load("yelp_demo")) == {}


@pytest.mark.parametrize(
    ("words", "before", "now"),
    [
        ((), "task.label_smoothing=0.1", "task.label_smoothing=0.2"),
        (("task.divergence=alpha",), "task.alpha=0.3", "task.alpha=0.4"),
        (("task.method=simpo",), "task.gamma=1.0", "task.gamma=1.5"),
    ],
)
def test_what_the_loss_reads_cannot_change_on_resume(tmp_path, words, before, now):
    (tmp_path / "recipe.yaml").write_text(Recipe.load("dpo_demo", *words, before).to_yaml())
    checkpoint = Checkpoint(tmp_path, 4, {}, {})
    with pytest.raises(ConfigError, match=f"cannot resume with {now} "):
        _changes(checkpoint, Recipe.load("dpo_demo", *words, now))


def test_a_change_of_virtual_stages_is_told(tmp_path):
    words = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")
    (tmp_path / "recipe.yaml").write_text(Recipe.load("yelp_demo", *words).to_yaml())
    checkpoint = Checkpoint(tmp_path, 4, {}, {})
    changed = _changes(checkpoint, Recipe.load("yelp_demo", *words[:1], "parallel.virtual_stages=4"))
    assert changed == {"parallel.virtual_stages": "parallel.virtual_stages=4 (it was 2)"}
