"""The JSON schema of recipes: editors mark what is wrong, and nothing that a run would accept."""

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from hftune import ConfigError, Recipe, cli
from hftune.config import reference, sections
from hftune.config.keys import problems_of
from hftune.config.recipe import _Schema
from hftune.config.schema import schema_text
from hftune.config.shipped_files import recipe_names, recipe_path
from tests.support.pages import PAGES, blocks

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(schema_text())
HEADER = "# yaml-language-server: $schema=./hftune.schema.json\n"
OWN = sorted([*ROOT.glob("examples/own_*/*.yaml"), *ROOT.glob("examples/extending/*.yaml"), *ROOT.glob("tests/support/*.yaml")])


def errors(values):
    """What is wrong with a recipe: (key, message) of each error, alternatives of a key included."""
    found = Draft7Validator(SCHEMA).iter_errors(values)
    return {".".join(map(str, error.path)): _messages(error) for error in found}


def _messages(error):
    return " | ".join([error.message, *(message for part in error.context or () for message in [_messages(part)])])


def test_schema_is_one():
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_names_the_schema_first_and_is_valid(name):
    text = recipe_path(name).read_text()
    assert text.startswith(HEADER)
    for read in (yaml.safe_load, lambda text: OmegaConf.to_container(OmegaConf.create(text))):  # 5e-5: a text, a number
        assert errors(read(text)) == {}
    assert errors(yaml.safe_load(Recipe.load(name).to_yaml())) == {}, "a run's recipe.yaml"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_recipe_of_an_own_task_or_on_a_base_is_valid(path):
    assert errors(yaml.safe_load(path.read_text())) == {}


def test_recipes_of_the_pages_are_valid():
    shown = [yaml.safe_load(block) for text in PAGES.values() for block in blocks(text, "yaml") if "kind: " not in block]
    recipes = [values for values in shown if "base" in values or "type" in values.get("task", {})]
    assert len(recipes) >= 5
    assert [errors(values) for values in recipes] == [{}] * len(recipes)


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("trian: {lr: 1}", "", "'trian' was unexpected"),
        ("train: {learning_rate: 1}", "train", "'learning_rate' was unexpected"),
        ("train: {lr: fast}", "train.lr", "'fast' does not match"),
        ("train: {epochs: 1.5}", "train.epochs", "1.5 is not of type 'integer'"),
        ("train: {epochs: null}", "train.epochs", "None is not of type 'integer'"),
        ("train: {tf32: 1}", "train.tf32", "1 is not of type 'boolean'"),
        ("train: {betas: [0.9]}", "train.betas", "[0.9] is too short"),
        ("train: {mixed_precision: bf8}", "train.mixed_precision", "'bf8' is not one of ['no', 'bf16', 'fp16', 'auto'"),
        ("train: {optimizer: adamm}", "train.optimizer", "'adamm' is not one of ['adamw', 'adam', 'sgd', 'muon', 'adafactor'"),
        ("train: {micro_batch_size: all}", "train.micro_batch_size", "'all' is not one of ['auto']"),
        ("eval: {every: epochs}", "eval.every", "'epochs' does not match"),
        ("eval: {metrics: accuracy}", "eval.metrics", "'accuracy' is not of type 'array'"),
        ("parallel: {schedule: zbv}", "parallel.schedule", "'zbv' is not one of ['gpipe', '1f1b'"),
        ("track: {with: [wanddb]}", "track.with", "'wanddb' is not one of ['wandb', 'mlflow', 'tensorboard', "),
        ("track: {upload: bset}", "track.upload", "'bset' is not one of ['none', 'best', 'all', None]"),
        ("base: yelpp", "base", "'yelpp' is not one of ['audio_classification'"),
        ("replace: task", "replace", "'task' is not of type 'array'"),
        (
            "task: {type: SequenceClasification}",
            "task.type",
            "'SequenceClasification' is not one of ['KTO', 'AudioClassification', ",
        ),
        ("task: {type: SequenceClassification, width: 2}", "task", "'width' was unexpected"),
        ("task: {type: TitleGeneration, architecture: decoder}", "task.architecture", "'decoder' is not one of ['prefix_lm'"),
        ("task: {width: 2}", "task", "'width' was unexpected"),  # of yelp's task
        ("base: mnist\ntask: {ordinal: true}", "task", "'ordinal' was unexpected"),
        ("base: mnist\ntask: {type: SequenceClassification, width: 2}", "task", "'width' was unexpected"),
        ("base: mine.yaml\ntask: {widht: 2}", "task", "'widht' was unexpected"),
    ],
)
def test_what_is_wrong_is_marked_and_refused(text, key, message, tmp_path):
    values = {"base": "yelp", **yaml.safe_load(text)}
    found = errors(values)
    assert [*found] == [key] and message in found[key]
    (tmp_path / "mine.yaml").write_text("base: mnist")
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError):
        Recipe.load(tmp_path / "wrong.yaml")


def test_recipe_without_a_base_needs_a_task():
    assert "'task' is a required property" in errors({"train": {"lr": 1}})[""]
    assert "'type' is a required property" in errors({"task": {"ordinal": True}})["task"]


@pytest.mark.parametrize(
    "text",
    [
        "base: mine.yaml\ntask: {width: 2, ordinal: true}\ntrain:\n",  # of which task is not known
        "task: {type: moons.Moons, anything: [1]}",
        "base: yelp\nreplace: [task.model_config]\ntask: {model_config: null, label_names: [1, 2]}",
        "base: yelp\nseed: ${oc.env:SEED}\ntrain: {lr: '${eval.batch_size}', betas: '${x}', tf32: '${y}', schedule: a.b}",
        "base: yelp\ntrain: {mixed_precision: no, epochs: '3', tf32: on, lr: 5e-5}\ntrack: {run_name: 7, with: [mine.Tracker]}",
        "base: yelp\neval: {every: 2 epochs}\nresume: outputs/yelp/checkpoints/step_00000100",
    ],
)
def test_what_a_run_accepts_is_not_marked(text):
    assert errors(yaml.safe_load(text)) == {}


VALUES = [
    None,
    True,
    False,
    3,
    -1,
    0.5,
    *("text", "auto", "5e-5", "yes", "${seed}", "a.b"),
    [],
    [1],
    ["x"],
    [0.5, 0.5],
    {},
    {"a": 1},
]
SECTIONS = [
    *((name, type_, SCHEMA["properties"][name]) for name, type_ in sections.SECTIONS.items()),
    *(("task", type_, SCHEMA["definitions"][name]) for name, type_ in reference.task_types().items()),
]


@pytest.mark.parametrize(("section", "type_", "part"), SECTIONS, ids=[type_.__name__ for _, type_, _ in SECTIONS])
def test_no_value_that_is_accepted_is_marked(section, type_, part):
    """Each key with values of all types; what is marked, the loader refuses."""
    task_type = type_ if section == "task" else reference.task_types()["ImageClassification"]
    marked, reading = 0, _Schema(task_type)
    for (key, expected), value in product(part["properties"].items(), VALUES):
        if key == "type" or Draft7Validator(expected).is_valid(value):
            continue
        marked += 1
        if reading.assign(f"{section}.{key}", value) is None:  # it may still be none of the names that the section knows
            field_name = next(name for name in reading.values[section] if name.removesuffix("_") == key)
            with pytest.raises(ConfigError):
                raise ConfigError([*problems_of(type_(**{field_name: reading.values[section][field_name]}), section)])
            reading = _Schema(task_type)
    assert marked > len(dataclasses.fields(type_))


# The command


def test_command_prints_the_schema(capsys):
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_command_writes_the_schema_and_says_how_a_recipe_names_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in ("new", "again, after an upgrade"):
        assert cli.main(["schema", "--output"]) == 0
        assert capsys.readouterr().out.endswith(f"on their first line:\n{HEADER}")
        assert json.loads((tmp_path / "hftune.schema.json").read_text()) == SCHEMA


def test_command_overwrites_no_recipe(capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: yelp")
    assert cli.main(["schema", "--output", str(recipe)]) == 2
    assert f"--output {recipe}: the name of the file must end in .json, such as hftune.schema." in capsys.readouterr().err
    assert recipe.read_text() == "base: yelp"
    assert cli.main(["schema", "--output", str(tmp_path / "none" / "x.json")]) == 2
    assert capsys.readouterr().err == f"hftune: --output {tmp_path}/none/x.json cannot be written: No such file or directory.\n"
