"""WikiText-2's recipe from the command line to a model that continues texts, on the generated paragraphs."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.ngrams import bigram_perplexity, unigram_perplexity
from hftune import ConfigError, Interrupted, Recipe, cli, finish, load_model, train
from hftune.data.demo import paragraphs
from hftune.reevaluation import evaluate
from hftune.tasks.language_modeling import LanguageModeling
from tests.support.runs import Command, Run, train_on

ROOT = Path(__file__).parents[2]
TINY = (
    "task.model_config={model_type: transformer_lm, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, dropout: 0.2}",
    *("task.max_train_samples=69", "task.max_eval_samples=13", "task.max_test_samples=11", "task.block_length=12"),
    *("train.epochs=2", "train.lr=0.5", "train.micro_batch_size=6", "train.log_every=1", "eval.batch_size=4"),
)
"""69 blocks in batches of 20: three whole steps and a last one of 9, an epoch."""
GPT2 = "{model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 35}"
LLAMA = "{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2}"


def tiny(folder, *overrides):
    return Recipe.load("wikitext2_demo", *TINY, f"output_dir={folder}", *overrides)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's own command, cut short, on two processes."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    command = Command(2, "recipe=wikitext2_demo", "train.epochs=1", f"output_dir={folder}")
    out, err = command.communicate()
    assert command.returncode == 0, out + err
    return Run(folder), out


def test_demo_beats_what_counting_words_and_pairs_gives(demo):
    run, said = demo
    task = Recipe.load(run.folder / "recipe.yaml").task
    parts, size = task.datasets(), len(task.text_tokenizer)
    for part, found in (("eval", run.result["metrics"]), ("test", run.result["test"])):
        streams = parts["train"].stream, parts[part].stream
        pairs = bigram_perplexity(*streams, size)
        assert found["perplexity"] < 0.7 * pairs < 0.1 * unigram_perplexity(*streams, size)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)  # summed up otherwise
    assert "  eval  loss " in said and "  test  loss " in said and "  perplexity " in said


def test_export_is_loaded_by_transformers_and_continues_a_text(demo):
    import hftune.models.transformer_lm  # noqa: F401 - registers the classes

    run, _ = demo
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    text = "the rusty sailors near the anchor of the pier"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    (answer,) = load_model(run.folder, device="cpu").predict([text])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])
        written = model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :]
    assert answer["perplexity"] == round(math.exp(loss), 2)
    assert answer["generated"] == tokenizer.decode(written, skip_special_tokens=True) and len(written) == 40


def test_predictions_have_a_row_a_block_whose_losses_are_the_evaluations(demo):
    run, _ = demo
    rows, text = run.predictions, " ".join(f"{row['text']} <eos>" for row in paragraphs("eval")[:3]).split()
    assert rows[0]["text"].split() == text[:12]
    mean = math.fsum(row["loss"] for row in rows) / sum(row["tokens"] for row in rows)
    assert mean == pytest.approx(run.result["metrics"]["loss"], rel=1e-6)
    assert {row["tokens"] for row in rows[:-1]} == {35}


def test_evaluate_scores_the_test_part_again_and_says_where_there_is_none(demo, tmp_path, capsys):
    run, _ = demo
    recipe, model = Recipe.load(run.folder / "recipe.yaml"), run.folder / "model"
    # The run was on two processes.
    assert evaluate(recipe, model, split="test").metrics == pytest.approx(run.result["test"], rel=1e-6)
    assert cli.main(["evaluate", f"recipe={run.folder}/recipe.yaml", "task.test_split=null", "--split", "test"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "hftune: --split test: this recipe's data has no such split. It has: train, eval."


@pytest.fixture(scope="module")
def on_processes(tmp_path_factory):
    """The tiny model on one process, and on two under FSDP and as a pipeline."""
    folder = tmp_path_factory.mktemp("sizes")
    one = train_on(1, {"whole": TINY}, folder, "wikitext2_demo")
    jobs = {"sharded": TINY, "stages": (*TINY, "parallel.pipeline_stages=2")}
    return {"one": one["whole"], **train_on(2, jobs, folder, "wikitext2_demo", sharded=["sharded"])}


@pytest.mark.parametrize("name", ["sharded", "stages"])
def test_losses_and_the_test_do_not_depend_on_processes(on_processes, name):
    run, one = on_processes[name], on_processes["one"]
    assert len(one.logged("train/loss")) == 8
    for key in ("train/loss", "eval/perplexity", "test/loss", "test/perplexity"):
        assert run.logged(key) == pytest.approx(one.logged(key), rel=1e-5), key
    assert run.logged("train/lr") == [0.5] * 4 + [0.5 * 0.95] * 4
    assert run.result["test"] == {key: run.logged(f"test/{key}")[0] for key in ("loss", "perplexity")}


def test_the_best_model_is_tested_and_not_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Recipe, "greater_is_better", property(lambda self: True))  # so that the first model is the best
    run = Run(train(tiny(tmp_path)).output_dir)
    assert run.result["best"]["step"] == 4 and run.result["steps"] == 8
    recipe = Recipe.load(run.folder / "recipe.yaml")
    assert run.result["test"] == evaluate(recipe, run.folder / "model", split="test").metrics
    assert run.result["test"] != evaluate(recipe, run.folder / "model_last", split="test").metrics


def test_signal_in_the_test_writes_nothing_and_the_same_command_makes_it_again(tmp_path, monkeypatch, on_processes):
    original = finish.evaluate

    def evaluate(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(Interrupted) as caught:
        patched.setattr(finish, "evaluate", evaluate)
        train(tiny(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    assert str(caught.value) == (f"SIGTERM: stopped while testing the best model. The same command resumes from {checkpoint}.")
    assert not (tmp_path / "result.json").exists() and not Run(tmp_path).logged("test/loss")
    written = {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    run = Run(train(tiny(tmp_path)).output_dir)
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == written
    assert len(run.logged("test/loss")) == 1 and run.result["test"] == on_processes["one"].result["test"]
    (tmp_path / "result.json").unlink()
    assert Run(train(tiny(tmp_path)).output_dir).logged("test/loss") == run.logged("test/loss")  # tested again, logged once


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_models_of_transformers_learn_from_scratch(tmp_path, config):
    path = tmp_path / "mine.yaml"  # a recipe of one's own: the base's fields are another model's
    path.write_text(
        f"task: {{type: LanguageModeling, tokenizer: words, dataset: 'hftune.data.demo:paragraphs', model_config: {config}, "
        "test_split: null, max_train_samples: 69, max_eval_samples: 13}\n"
        "train: {lr: 1e-2, epochs: 4, batch_size: 20, micro_batch_size: 6, log_every: 1}"
    )
    run = Run(train(Recipe.load(path, f"output_dir={tmp_path}/out")).output_dir)
    assert run.result["test"] == {} and run.logged("train/loss")[-1] < 0.85 * run.logged("train/loss")[0]


def test_a_trained_model_is_trained_on_with_its_own_words(demo, tmp_path):
    run, _ = demo
    words = (f"task.model={run.folder}/model", "task.model_config=null", "task.tokenizer=null", "train.lr=1e-6")
    recipe = Recipe.load("wikitext2_demo", *words, "train.max_steps=1", f"output_dir={tmp_path}")
    result = train(recipe)
    assert result.metrics["loss"] == pytest.approx(run.result["metrics"]["loss"], rel=1e-4)


def test_the_test_is_logged_at_the_step_where_training_ended(tmp_path):
    run = Run(train(tiny(tmp_path, "train.max_steps=3")).output_dir)
    last = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last == {"step": 3, "epoch": 0.75, **{f"test/{name}": value for name, value in run.result["test"].items()}}


def test_another_test_part_is_another_run(tmp_path):
    train(tiny(tmp_path))
    (tmp_path / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot resume with task\.max_test_samples=10 \(it was 11\)\."):
        train(tiny(tmp_path, "task.max_test_samples=10"))


def test_the_real_files_have_the_known_numbers_of_words():
    folder = Path(os.environ.get("HFTUNE_TEST_DATA", ROOT.parent / "shared" / "data")) / "wikitext2"
    if not folder.is_dir():
        pytest.skip("WikiText-2 is not on this machine (set HFTUNE_TEST_DATA to the folder that holds wikitext2/)")
    files = {part: str(folder / f"{name}.txt") for part, name in (("train", "train"), ("eval", "valid"), ("test", "test"))}
    task = LanguageModeling(dataset="text", data_files=files, tokenizer="words", model_config={"model_type": "transformer_lm"})
    parts = task.datasets()
    assert len(task.text_tokenizer) == 33278
    assert {part: len(blocks.stream) for part, blocks in parts.items()} == {"train": 2088628, "eval": 217646, "test": 245569}
    assert {part: int(blocks.lengths.sum()) for part, blocks in parts.items()} == {
        "train": 2088627,
        "eval": 217645,
        "test": 245568,
    }
