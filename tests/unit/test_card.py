"""The model card: what it says of a run's folder, and what it leaves out."""

import json
import math
import re
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from hftune import Recipe, Task, tasks
from hftune.reporting.callbacks import Card
from hftune.reporting.card import CARD, card, for_repository, purpose, read_facts

BERT, YELP = "a" * 40, "b" * 40
RESULT = {
    "metrics": {"loss": 1.0, "accuracy": 0.5}, "test": {}, "steps": 500, "seconds": 754.2, "world_size": 2,
    "best": {"metric": "accuracy", "value": 0.6787499785423279, "step": 250},
    "commits": {"task.model": BERT, "task.dataset": YELP}, "versions": {"hftune": "0.3.0", "torch": "2.13.0"},
}  # fmt: skip
RUN = {
    "device": "NVIDIA H200", "precision": "no", "nodes": 1, "num_steps": 500, "commits": RESULT["commits"],
    "model": "BertForSequenceClassification", "parameters": 109_486_085, "trainable_parameters": 1_000,
    "data": {"train": {"samples": 5000, "digest": "all:17"}, "eval": {"samples": 800, "digest": "all:18"}},
    "git": {"commit": "c" * 40, "is_dirty": True}, "labels": ["1 star", "5|6 `stars`"],
}  # fmt: skip
LINES = [
    {"step": 250, "epoch": 2.0, "train/loss": 1.1},
    {"step": 250, "epoch": 2.0, "eval/loss": 0.7316, "eval/accuracy": 0.6787499785423279, "eval/confusion_matrix": [[1]]},
    {"step": 500, "epoch": 4.0, "eval/loss": 1.0, "eval/accuracy": 0.5, "eval/mae": None},
]


@dataclass
class Moons(Task):
    """A task as a user writes it."""

    width: int = 32

    def datasets(self):
        raise NotImplementedError

    def build_model(self):
        raise NotImplementedError

    def loss(self, outputs, target):
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes the output folder of a run, and reads its facts."""

    def make(*words, result=RESULT, run=RUN, lines=LINES, config=None):
        path = tmp_path / "out"
        shutil.rmtree(path, ignore_errors=True)
        (path / "model").mkdir(parents=True, exist_ok=True)
        recipe = Recipe.load(words[0], "output_dir=outputs/mine", *words[1:])
        (path / "recipe.yaml").write_text(recipe.to_yaml())
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, value in {"result.json": result, "run.json": run, "model/config.json": config}.items():
            if value is not None:
                (path / name).write_text(json.dumps(value))
        (path / "model" / "hftune.json").write_text(json.dumps(RESULT["best"]))
        return read_facts(path, recipe)

    return make


def section(text, title):
    return text.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0].rstrip("\n")


def test_card_of_a_model_from_the_hub(folder):
    text = card(folder("yelp", "train.warmup_ratio=0.1"))
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-classification")
    assert data.base_model == "google-bert/bert-base-cased"
    assert (data.datasets, data.tags, data.license, data.language) == (["Yelp/yelp_review_full"], ["hftune"], None, None)
    scores = {(result.dataset_split, result.metric_type): result.metric_value for result in data.eval_results}
    assert scores == {("test", "loss"): 0.7316, ("test", "accuracy"): 0.67875}  # the data set's split that evaluates
    assert {result.dataset_revision for result in data.eval_results} == {YELP}
    base = "[google-bert/bert-base-cased](https://huggingface.co/google-bert/bert-base-cased)"
    reviews = "[Yelp/yelp_review_full](https://huggingface.co/datasets/Yelp/yelp_review_full)"
    first = f"\n# yelp\n\nA model that classifies texts, fine-tuned from {base} on {reviews} with hftune 0.3.0.\n"
    assert text.split("---\n", 2)[2].startswith(first)
    assert section(text, "Results") == (
        "| metric | evaluation |\n|---|---|\n| `loss` | 0.732 |\n| `accuracy` | 0.679 |\n\n"
        "This is the model after step 250 of 500, the best of 2 evaluations by `accuracy`."
    )
    assert section(text, "How to use it") == (
        '```python\nfrom transformers import pipeline\n\npredict = pipeline("text-classification", model="outputs/mine/model", '
        'truncation=True, max_length=512)\npredict(["A text."])\n```\n\n'
        "Labels: `1 star`, `5\\|6 'stars'`."
    )
    rows = [line.strip("| ").split(" | ") for line in section(text, "How it was trained").splitlines()[2:]]
    assert dict(rows) == {
        "base model": f"{base}, commit `{BERT}`", "data set": f"{reviews}, commit `{YELP}`",
        "training data": "5,000 samples, digest `all:17`", "evaluation data": "800 samples, digest `all:18`",
        "network": "`BertForSequenceClassification`, 109,486,085 parameters, of which 1,000 were trained",
        "global batch": "128 samples", "steps": "500 (4 epochs)", "optimizer": "adamw, weight decay 0.01",
        "learning rate": "5e-05, linear schedule, warm-up over 10 % of the steps", "precision": "float32", "seed": "42",
        "processes": "2 on NVIDIA H200", "time": "0:12:34", "versions": "hftune 0.3.0, torch 2.13.0",
        "code": f"commit `{'c' * 40}` with changes that are in no commit",
    }  # fmt: skip
    commits = f"task.model_revision={BERT} task.dataset_revision={YELP}"
    again = f"```bash\nhftune train recipe=outputs/mine/recipe.yaml output_dir=outputs/again {commits}\n```\n\n"
    assert section(text, "How to train it again").startswith(again)


def test_scores_of_the_test_split_stand_beside_those_of_the_evaluation(folder):
    best = {"metric": "perplexity", "value": 21.5, "step": 250}
    test = {"loss": 3.012345678, "perplexity": math.inf, "by_length": {"10": 2.0}, "tokens": 10}
    lines = [{"step": 250, "epoch": 1.0, "eval/loss": 3.1, "eval/perplexity": 21.5}]
    text = card(folder("wikitext2", result={**RESULT, "best": best, "test": test}, lines=lines))
    assert section(text, "Results").startswith(
        "| metric | evaluation | test |\n|---|---|---|\n| `loss` | 3.100 | 3.012 |\n| `perplexity` | 21.50 |  |\n| `tokens` |  | 10 |\n"
    )
    data = ModelCard(text).data
    scores = {(result.dataset_split, result.metric_type): result.metric_value for result in data.eval_results}
    expected = {("validation", "loss"): 3.1, ("validation", "perplexity"): 21.5}
    assert scores == {**expected, ("test", "loss"): 3.01235, ("test", "tokens"): 10}
    assert (data.pipeline_tag, data.library_name) == ("text-generation", None)


def test_metrics_of_ones_own_may_have_a_slash_unlike_those_of_eval_sets(folder):
    lines = [{"step": 250, "epoch": 1.0, "eval/loss": 3.1, "eval/group/recall": 0.25, "eval/short/loss": 1.0}]
    found = ModelCard(card(folder("yelp", "eval.sets.short=test", lines=lines))).data.eval_results
    assert [result.metric_type for result in found] == ["loss", "group/recall", "accuracy"]


@pytest.mark.parametrize(("architecture", "library"), [("GPT2LMHeadModel", "transformers"), ("TransformerLM", None)])
def test_library_is_transformers_only_where_it_knows_the_architecture(folder, architecture, library):
    facts = folder("wikitext2", config={"architectures": [architecture], "model_type": "x"})
    assert ModelCard(card(facts)).data.library_name == library


def test_what_is_not_known_is_left_out(folder):
    """A folder as hftune 0.2 left it: no run.json, and here no lines of a log either."""
    text = card(folder("yelp_demo", run=None, lines=[], result={**RESULT, "commits": {}}))
    assert not re.search(r"None|null|nan|[Mm]ore information|\{\}|\[\]|digest|commit|Labels", text)
    assert "A model that classifies texts, trained from scratch on `hftune.data.demo:reviews` with hftune 0.3.0.\n" in text
    assert "| `accuracy` | 0.679 |\n\nThis is the model after step 250 of 500" in text
    assert "\nhftune train recipe=outputs/mine/recipe.yaml output_dir=outputs/again\n" in text
    data = ModelCard(text).data
    assert (data.base_model, data.datasets) == (None, None)


def test_url_of_a_database_is_not_shown(folder):
    words = ("task.dataset=sqlite:///own.db", "task.query.train=SELECT text FROM t ORDER BY id")
    text = card(folder("yelp_demo", *words, run=None, result={**RESULT, "commits": {}}))
    assert "own.db" not in text and "trained from scratch with hftune" in text


def test_labels_come_from_the_model_where_the_run_did_not_write_them_down(folder):
    names = {str(number): f"class {number}" for number in range(60)}
    text = card(folder("yelp_demo", run={**RUN, "labels": None}, config={"id2label": names}))
    assert "Labels: `class 0`, `class 1`, `class 2`," in text and "`class 49` and 10 more." in text
    text = card(folder("mnist_demo", run={}, config={"label_names": ["cat", "dog"]}))
    assert "Labels: `cat`, `dog`.\n" in text
    assert 'import hftune\n\ntrained = hftune.load_model("outputs/mine")\ntrained.predict(["image.png"])\n' in text


def test_run_that_is_not_finished_says_so(folder):
    text = card(folder("yelp_demo", result=None))
    assert "the best of 2 evaluations by `accuracy`. Its training was not finished when this card was written." in text
    assert "| steps | 500 |" in text and "| time |" not in text


def test_task_of_ones_own_needs_its_code_and_gets_no_place_among_the_hubs_tasks(folder, tmp_path):
    (tmp_path / "moons.yaml").write_text("task: {type: tests.unit.test_card.Moons}\neval: {greater_is_better: true}\n")
    text = card(folder(tmp_path / "moons.yaml", config=None, run=None, result={**RESULT, "commits": {}}), "me/moons")
    assert text.startswith("---\ntags:\n- hftune\n---\n\n# moons\n\nA model for the task `tests.unit.test_card.Moons`, tra")
    assert section(text, "How to use it") == (
        "```python\nimport hftune\nfrom huggingface_hub import snapshot_download\n\n"
        'trained = hftune.load_model(snapshot_download("me/moons"), trust_code=True)\n'
        "trained.model  # a torch.nn.Module\n```\n\n"
        "It needs code that is not part of hftune: the modules that `recipe.yaml` names."
    )


def test_values_of_environment_variables_are_not_disclosed(folder, monkeypatch):
    monkeypatch.setenv("A_SECRET", "s3cr3t")
    reference = "${oc.env:A_SECRET}"
    words = (f"task.model={reference}/x", f"task.dataset={reference}/y", f"recipe={reference}", f"output_dir={reference}")
    for repository in (None, "me/x"):
        text = card(folder("yelp", *words), repository)
        assert "s3cr3t" not in text
        assert ModelCard(text).data.base_model is None


def test_edits_stay_when_the_card_goes_to_the_hub(folder):
    facts = folder("yelp")
    licensed = card(facts).replace("tags:\n", "license: mit\ntags:\n")
    edited = licensed.replace("## Results", "## Limits\n\nNone known.\n\n## Results")
    pushed = for_repository(edited, facts, "me/yelp")
    assert ModelCard(pushed).data.license == "mit" and "None known." in pushed
    assert 'model="me/yelp"' in pushed and "recipe=recipe.yaml " in pushed and "outputs/mine" not in pushed
    assert for_repository(card(facts), facts, "me/yelp") == card(facts, "me/yelp")


def test_card_that_cannot_be_written_costs_one_line_and_not_the_run(folder, tmp_path, capsys):
    facts = folder("yelp_demo", result=None)
    writer = Card()
    writer.on_begin(SimpleNamespace(recipe=facts.recipe))

    def end(**values):
        folders = {"model_dir": tmp_path / "out" / "model", "output_dir": tmp_path / "out"}
        writer.on_end(SimpleNamespace(result=SimpleNamespace(**folders, to_json=lambda: RESULT | values)))

    end(best=None)
    said = capsys.readouterr().out
    assert said.startswith(f"warning: {tmp_path}/out/model/README.md could not be written: ")
    assert said.endswith(". Everything else is saved.\n")
    assert said.count("\n") == 1 and not (tmp_path / "out" / "model" / CARD).exists()
    end()
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out" / "model" / CARD).read_text().startswith("---\n")


@pytest.mark.parametrize("name", [name for name in tasks.__all__ if issubclass(getattr(tasks, name), Task)])
def test_every_shipped_task_has_its_words_and_the_hubs_name(name):
    tag, words = purpose(getattr(tasks, name)())
    assert tag is not None and words.startswith("that ")
