"""``hftune evaluate --lm-eval`` on tasks in a folder: the scores are those of a computation by hand."""

import json
import os
from importlib.util import find_spec

import pytest
import torch

from hftune import cli, load_model
from tests.support.runs import train_on, write_jsonl

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='lm-eval is not installed: pip install "hftune[lm-eval]"'
)


@pytest.fixture(scope="module", autouse=True)
def environment_as_before():
    """lm-eval sets variables of the Hub's client when it is imported; what later tests start would get them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A task of questions with two answers each, and two models that have hardly been trained."""
    folder = tmp_path_factory.mktemp("lm-eval")
    words = ["river", "market", "city", "valley", "teacher", "garden", "harbour", "island"]
    rows = [
        {"question": f"The old {word} was near the", "choices": [words[index - 1], words[index - 3]], "answer": index % 2}
        for index, word in enumerate(words)
    ]
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "own.yaml").write_text(TASK.format(name="own_words", rows=folder / "rows.jsonl"))
    few = ("task.max_train_samples=64", "task.max_eval_samples=8", "train.max_steps=2")
    train_on(1, {"words": (*few, "task.test_split=null")}, folder, recipe="wikitext2_demo")
    train_on(1, {"chats": few}, folder, recipe="chats_demo")
    return folder


def log_likelihood(model, ids, choice):
    with torch.no_grad():
        logs = model(torch.tensor([ids + choice])).logits[0].log_softmax(-1)
    return sum(float(logs[len(ids) + place - 1, token]) for place, token in enumerate(choice))


@needs_lm_eval
@pytest.mark.parametrize("name", ["words", "chats"])
def test_scores_of_a_task_of_ones_own_are_those_computed_by_hand(folder, name, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run, output = folder / f"{name}-on-1", folder / f"{name}.json"
    assert cli.main(["evaluate", str(run), "--lm-eval", str(folder / "own.yaml"), "--output", str(output)]) == 0
    score = json.loads(output.read_text())["metrics"]["own_words/acc"]
    assert f"own_words/acc         {score:.3f}" in capsys.readouterr().out
    trained = load_model(run, device="cpu")
    tokens, hits = trained.recipe.task.text_tokenizer, []
    for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
        text, space = row["question"], " "
        if name == "chats":  # in its template, whose answer follows without a space
            text = tokens.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
            space = ""
        ids = tokens(text, add_special_tokens=False)["input_ids"]
        whole = [tokens(f"{text}{space}{choice}", add_special_tokens=False)["input_ids"] for choice in row["choices"]]
        found = [log_likelihood(trained.model, ids, each[len(ids) :]) for each in whole]
        hits.append((found[1] > found[0]) == row["answer"])
    assert score == pytest.approx(sum(hits) / len(hits))


@needs_lm_eval
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lm-eval", "nowhere.yaml"], "--lm-eval nowhere.yaml: there is no such file."),
        (["--lm-eval", "unnamed.yaml"], "--lm-eval unnamed.yaml: it has no task, the name under which lm-eval knows it."),
        (["--lm-eval", "own", "--track"], "--track does not go with --lm-eval"),
        (["--lm-eval", "own", "--split", "test"], "--split does not go with --lm-eval"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(folder, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unnamed.yaml").write_text("dataset_path: json\n")
    assert cli.main(["evaluate", str(folder / "words-on-1"), *words]) == 2
    assert said in capsys.readouterr().err


@needs_lm_eval
def test_a_task_that_is_none_is_named_with_one_that_is_near(folder, monkeypatch, capsys):
    from lm_eval import tasks

    real = tasks.TaskManager  # without lm-eval's own tasks, whose thousands of files take long
    monkeypatch.setattr(
        tasks, "TaskManager", lambda include_path, include_defaults: real(include_path=include_path, include_defaults=False)
    )
    assert cli.main(["evaluate", str(folder / "words-on-1"), "--lm-eval", f"{folder}/own.yaml,own_wrods"]) == 2
    error = capsys.readouterr().err
    assert "--lm-eval own_wrods is no task of lm-eval 0." in error and "Did you mean 'own_words'?" in error


def test_without_the_package_it_is_named(folder, monkeypatch, capsys):
    monkeypatch.setattr("hftune.commands.lm_eval_tasks.find_spec", lambda name: None)
    assert cli.main(["evaluate", str(folder / "words-on-1"), "--lm-eval", "hellaswag"]) == 2
    assert 'not installed: pip install "hftune[lm-eval]".' in capsys.readouterr().err
