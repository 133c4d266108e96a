"""A key's rules are said once, at its definition, and hold wherever the key is read."""

import dataclasses
from dataclasses import dataclass

import pytest

from hftune.config import reference
from hftune.config.every import Every
from hftune.config.keys import Effect, effects, key, keys_of, problems_of
from hftune.config.sections import SECTIONS, CheckpointConfig, EvalConfig, RunConfig
from hftune.errors import ConfigError

BOUNDED = [
    (described, beyond)
    for definitions in reference.all_keys().values()
    for described in definitions[:1]
    for bound, beyond in (
        (described.rule.gt, described.rule.gt),
        (described.rule.ge, (described.rule.ge or 0) - 1),
        (described.rule.lt, described.rule.lt),
        (described.rule.le, (described.rule.le or 0) + 1),
    )
    if bound is not None
]


@pytest.mark.parametrize(("described", "beyond"), BOUNDED, ids=[f"{one.name}={value}" for one, value in BOUNDED])
def test_a_number_just_beyond_a_bound_is_refused_with_the_bound(described, beyond):
    said = described.problem([beyond, beyond] if isinstance(described.default, (list, tuple)) else beyond)
    assert said.startswith(f"{described.name}=") and described.rule.bounds in said


@dataclass
class Own:
    """A task of one's own: with rules, and plain."""

    size: int = key(3, ge=1, le=9, changes="model")
    kind: str = key("a", choices=("a", "b"), own="mine.Kind")
    power: float = key(1.0, needs=("kind", ("b",)))
    names: list[str] = key(list, changes="nothing")
    plain: int = 5


def test_a_task_of_ones_own_has_keys_with_rules_or_plain_ones():
    assert dataclasses.asdict(Own()) == {"size": 3, "kind": "a", "power": 1.0, "names": [], "plain": 5}
    assert [*problems_of(Own(plain=-1, kind="mine.Other"), "task")] == []
    assert [*problems_of(Own(size=10, kind="c", power=2.0), "task")] == [
        "task.size=10 must be in [1, 9].",
        "task.kind='c' is not one of a, b, nor a dotted path such as mine.Kind.",
        "task.power=2.0 needs task.kind=b, not c.",
    ]
    assert keys_of(Own, "task")["plain"].rule.changes == effects("unknown")
    with pytest.raises(ValueError, match="'wieghts' is no effect"):
        key(0, changes="wieghts")


def test_a_resumed_run_may_change_what_leaves_its_weights_and_samples():
    rules = {name: reference.resume_rule(name) for name in reference.all_keys()}
    assert {name for name, rule in rules.items() if rule == "fixed" and name.partition(".")[0] not in ("task", "adapter")} == {
        *("seed", "train.batch_size", "train.optimizer", "train.freeze", "train.groups", "train.layer_decay", "train.teacher")
    }
    assert {name for name, rule in rules.items() if rule != "fixed" and name.startswith(("task.", "adapter."))} == {
        *("task.weights", "task.storage_options", "task.cache_gib", "adapter.export")
    }
    assert {name for name, rule in rules.items() if rule == "length"} == {
        *("train.epochs", "train.max_steps", "eval.patience", "eval.min_improvement")
    }
    assert rules["train.lr"] == "free" and rules["track.project"] == "harmless" and rules["output_dir"] == "own"
    assert reference.resume_rule("task.data_files.train") == "fixed" == reference.resume_rule("task.of_ones_own")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.lr", "lr"),
        ("train.batch_size", "samples lr"),
        ("task.type", "model"),
        ("task.model_config.hidden_size", "model"),
        ("task.model_config.hidden_dropout_prob", "forward backward"),
        ("task.data_files.train", "data"),
        ("task.data_files.eval", "output"),
        ("task.max_eval_samples", "output"),
        ("adapter.rank", "model update"),
        ("parallel.split", "rounding"),
        ("parallel.replicas", "rounding"),
        ("parallel.context", "rounding"),
        ("task.of_ones_own", "unknown"),
    ],
)
def test_what_a_key_changes_is_known_by_its_name(name, words):
    assert reference.effects_of(name) == effects(words)


def test_a_task_cannot_touch_the_schedule():
    assert Effect.LR not in effects("unknown")


def test_every_section_has_its_name():
    assert [type_.section for type_ in SECTIONS.values()] == [*SECTIONS] and RunConfig.section == ""


@pytest.mark.parametrize(
    ("value", "every"),
    [
        (500, Every(steps=500)),
        ("epoch", Every(epochs=1)),
        ("12 epochs", Every(epochs=12)),
        ("90 s", Every(seconds=90)),
        ("30 min", Every(seconds=1800)),
        ("1.5h", Every(seconds=5400)),
        ("never", Every()),
    ],
)
def test_every_is_steps_epochs_time_or_never(value, every):
    assert Every.read(value) == every
    assert every.is_never == (value == "never")


@pytest.mark.parametrize("value", [0, -1, True, None, 1.5, "20", "epochs", "0 epochs", "two epochs", "0 s", "5 days", "Never"])
def test_anything_else_is_refused_with_examples(value):
    with pytest.raises(
        ValueError, match=r"is neither a number of steps, such as 500, nor epoch, '2 epochs', '30 min' or never"
    ):
        Every.read(value)


def test_the_last_step_is_evaluated_and_saved_whatever_every_says():
    for every, steps in {3: [3, 6, 8], "2 epochs": [8], "epoch": [4, 8], "30 min": [8], "never": []}.items():
        assert [step for step in range(1, 9) if EvalConfig(every=every).falls_on(step, 8, 4)] == steps
    assert [step for step in range(1, 9) if CheckpointConfig(every=3).falls_on(step, 8, 4)] == [3, 4, 6, 8]


@pytest.mark.parametrize("value", ["Watch", {"every": 3}, 3])
def test_a_callback_is_a_dotted_path_with_arguments_or_without(value):
    given = ["my_module.Watch", {"type": "my_module.Watch", "threshold": 3}]
    assert RunConfig(callbacks=given).callbacks == given
    with pytest.raises(
        ConfigError, match=r"^callbacks=.*which is neither a dotted path, such as my_module.Watch, nor a mapping"
    ):
        RunConfig(callbacks=[*given, value])
