"""Chats on 1, 2 and 4 processes, stopped and resumed, and against a plain loop and TRL: the same losses, of the same tokens."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy

from hftune import Recipe
from hftune.build import build_model, load_datasets
from tests.support.runs import train_on
from tests.support.trainer import STEPS, losses_of_trainer, planned_batches

DROPOUT = "task.model_config.attention_dropout=0.2"
SMALL = (
    *("task.max_train_samples=80", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=4", "train.log_every=1"),
    *("train.micro_batch_tokens=200", "train.epochs=2", "train.warmup_ratio=0", "eval.every=epoch"),
)
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2", "eval.every=never")
JOBS = {"whole": (*SMALL, DROPOUT), "lora": (*SMALL, DROPOUT, *LORA)}
ALONE = (*SMALL, "train.parts=null", "train.micro_batch_tokens=null", "train.micro_batch_size=16", "train.epochs=4")
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    jobs = {1: {**JOBS, "alone": (*ALONE, "eval.every=never")}, 2: JOBS, 4: {"whole": JOBS["whole"]}}
    found = {(name, size): run for size in SIZES for name, run in train_on(size, jobs[size], folder, "chats_demo").items()}
    stopped = {"resumed": (*JOBS["whole"], f"output_dir={folder}/resumed", "checkpoint.every=2")}
    train_on(2, stopped, folder, "chats_demo", stops={"resumed": (5, 0)})
    return found | {("resumed", 2): train_on(2, stopped, folder, "chats_demo")["resumed"]}


@pytest.mark.parametrize(("name", "size"), [("whole", 2), ("whole", 4), ("lora", 2)])
def test_losses_do_not_depend_on_processes_with_dropout_and_without_padding(runs, name, size):
    one, many = runs[name, 1], runs[name, size]
    expected = one.logged("train/loss")
    assert len(expected) == 10 and expected[-1] < expected[0]
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    assert many.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)
    assert "without padding" in (one.folder.parent / "chats_demo-1.log").read_text()


@pytest.mark.parametrize("size", SIZES[1:])
def test_answers_and_scores_do_not_depend_on_processes(runs, size):
    one, many = runs["whole", 1], runs["whole", size]
    assert [row["generated"] for row in many.predictions] == [row["generated"] for row in one.predictions]
    metrics, expected = many.result["metrics"], one.result["metrics"]
    assert metrics == pytest.approx(expected, rel=1e-5) and metrics.keys() >= {"loss", "perplexity", "exact_match"}


def test_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["whole", 2], runs["resumed", 2]
    assert resumed.logged("train/loss")[-5:] == whole.logged("train/loss")[-5:]
    assert resumed.result["metrics"] == whole.result["metrics"]


def test_losses_are_those_of_a_plain_loop_over_the_trained_tokens_of_each_step(runs):
    recipe = Recipe.load("chats_demo", *ALONE)
    samples = load_datasets(recipe)["train"]
    model, config, losses = build_model(recipe), recipe.train, []
    optimizer = torch.optim.AdamW(recipe.task.parameter_groups(model, config), config.lr, tuple(config.betas))
    for step, batch in enumerate(planned_batches(recipe, samples)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / STEPS)
        logits, labels = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
        loss = cross_entropy(logits[labels != -100], labels[labels != -100])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    ours = runs["alone", 1].logged("train/loss")
    assert len(ours) == STEPS and torch.tensor(ours).std() > 0.05
    assert ours == pytest.approx(losses, rel=1e-5)


def test_twenty_steps_equal_those_of_trl(runs, tmp_path):
    import trl  # takes seconds

    recipe = Recipe.load("chats_demo", *ALONE)
    samples, tokenizer = load_datasets(recipe)["train"], recipe.task.text_tokenizer

    def whole(rows):
        """TRL's models shift the labels themselves."""
        ids = [[*row["input_ids"], row["labels"][-1]] for row in rows]
        labels = [[-100, *row["labels"]] for row in rows]
        width = max(map(len, ids))
        return {
            "input_ids": torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
            "labels": torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels]),
        }

    def trainer(model, settings):
        rows = Dataset.from_list([{"input_ids": [1, 2]}])  # it reads the batches that it is given
        return trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)

    settings = partial(trl.SFTConfig, bf16=False)  # which it takes by default
    theirs = losses_of_trainer(recipe, tmp_path, planned_batches(recipe, samples, whole), trainer, settings)
    assert runs["alone", 1].logged("train/loss") == pytest.approx(theirs, rel=1e-5)
