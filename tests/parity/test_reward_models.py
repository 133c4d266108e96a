"""Reward models on 1, 2 and 4 processes, stopped and resumed, against TRL's formula, and loaded by transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import hftune
from hftune import DataError, Recipe, cli
from hftune.build import build_model, load_datasets
from hftune.data.demo import preferences
from tests.support.runs import train_on
from tests.support.trainer import STEPS, planned_batches

SMALL = (
    *("task.max_train_samples=80", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=4", "train.log_every=1"),
    *("train.micro_batch_tokens=400", "train.epochs=2", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=5"),
)
DROPOUT = "task.model_config.attention_dropout=0.2"
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2")
JOBS = {"whole": (*SMALL, DROPOUT), "lora": (*SMALL, DROPOUT, *LORA)}
ALONE = (*SMALL, "train.parts=null", "train.micro_batch_tokens=null", "train.epochs=4", "eval.every=never", "task.center=0.05")
CHAT = [{"role": "user", "content": "hana has 76 cups. how many?"}, {"role": "assistant", "content": "76"}]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The demo's pairs, each with a margin."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{**row, "ahead": index % 5 / 4} for index, row in enumerate(preferences("train")[:80])]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"task.data_files.train={path}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("runs")
    alone = (*ALONE, pairs, "task.dataset=null", "task.margin_column=ahead")
    jobs = {"alone": (*alone, "train.micro_batch_size=16"), "cut": (*alone, "train.micro_batch_size=3")}
    found = {(name, 1): run for name, run in train_on(1, {**JOBS, **jobs}, folder, "reward_demo").items()}
    again = (*JOBS["whole"], "checkpoint.every=2", f"output_dir={folder}/resumed")
    two = {**JOBS, "stopped": again, "resumed": again, "sharded": JOBS["whole"]}
    some = {"stops": {"stopped": (5, 0)}, "sharded": {"sharded"}}
    found |= {(name, 2): run for name, run in train_on(2, two, folder, "reward_demo", **some).items()}
    return found | {("whole", 4): train_on(4, {"whole": JOBS["whole"]}, folder, "reward_demo")["whole"]}


@pytest.mark.parametrize(
    ("name", "like", "size"), [("whole", "whole", 2), ("whole", "whole", 4), ("lora", "lora", 2), ("sharded", "whole", 2)]
)
def test_losses_and_metrics_do_not_depend_on_processes_with_dropout(runs, name, like, size):
    one, many = runs[like, 1], runs[name, size]
    expected = one.logged("train/loss")
    assert len(expected) == 10
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    assert many.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)
    assert many.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4, abs=1e-6)


def test_losses_do_not_depend_on_micro_batches(runs):
    assert runs["cut", 1].logged("train/loss") == pytest.approx(runs["alone", 1].logged("train/loss"), rel=1e-5)


def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["whole", 2], runs["resumed", 2]
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"]


def test_losses_of_twenty_steps_are_those_of_trls_formula(runs, pairs):
    """Each chat is written by apply_chat_template and computed alone, so that there is no padding."""
    words = ("task.dataset=null", "task.margin_column=ahead", "train.micro_batch_size=16")
    recipe = Recipe.load("reward_demo", *ALONE, pairs, *words)
    samples, model, config, losses = load_datasets(recipe)["train"], build_model(recipe), recipe.train, []
    tokenizer, rows = recipe.task.text_tokenizer, recipe.task.rows["train"]
    optimizer = torch.optim.AdamW(recipe.task.parameter_groups(model, config), config.lr, tuple(config.betas))

    def reward(row, side):
        chat = tokenizer.apply_chat_template([*row["prompt"], *row[side]], return_tensors="pt", return_dict=True)
        return model(input_ids=chat["input_ids"]).logits[0, 0]

    for step, batch in enumerate(planned_batches(recipe, samples, lambda pairs: [rows[int(pair["row"])] for pair in pairs])):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / STEPS)
        chosen, rejected = (torch.stack([reward(row, side) for row in batch]) for side in ("chosen", "rejected"))
        margin = torch.tensor([row["ahead"] for row in batch])
        loss = -logsigmoid(chosen - rejected - margin).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    ours = runs["alone", 1].logged("train/loss")
    assert len(ours) == STEPS and ours == pytest.approx(losses, rel=2e-5)


def test_transformers_scores_as_predict_does(runs):
    folder = runs["whole", 2].folder / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    longer = [*CHAT, {"role": "user", "content": "are you sure?"}, {"role": "assistant", "content": "yes"}]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in (CHAT, longer)]
    pair = [message["content"] for message in CHAT]
    ours = hftune.load_model(folder).predict([CHAT, longer, pair, "\t".join(pair), {"messages": CHAT}, [CHAT[:1], CHAT[1:]]])
    first, second, *rest = [row["score"] for row in ours]
    assert rest == pytest.approx([first] * 4, abs=1e-6) and abs(first - second) > 1e-3
    with torch.no_grad():  # alone, and together with padding
        alone = float(model(**tokenizer(texts[0], return_tensors="pt", add_special_tokens=False)).logits)
        both = model(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits.flatten().tolist()
    assert [first, first, second] == pytest.approx([alone, *both], abs=1e-5)
    piped = pipeline("text-classification", model=model, tokenizer=tokenizer)(texts, batch_size=2)
    assert [row["score"] for row in piped] == pytest.approx([first, second], abs=1e-5)


def test_the_best_of_a_pair_is_scored_higher_and_rows_say_by_how_much(runs):
    rows = runs["whole", 1].predictions
    assert len(rows) == 13 and all(row["margin"] == row["chosen_reward"] - row["rejected_reward"] for row in rows)
    metrics = runs["whole", 1].result["metrics"]
    assert metrics["accuracy"] == pytest.approx(sum(row["margin"] > 0 for row in rows) / 13)
    assert metrics["chosen_length"] == pytest.approx(sum(row["chosen_tokens"] for row in rows) / 13)
    assert rows[0]["prompt"].endswith("assistant") and rows[0]["chosen"] != rows[0]["rejected"]


def test_the_new_head_is_trained_beside_lora(runs):
    tensors = load_file(runs["lora", 2].folder / "model" / "adapter_model.safetensors")
    (head,) = (value for name, value in tensors.items() if name.endswith("score.weight"))
    recipe = Recipe.load("reward_demo", *JOBS["lora"])
    load_datasets(recipe)
    drawn = build_model(recipe).score.weight
    assert head.shape == drawn.shape == (1, 64) and (head - drawn).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"prompt": "2+2?", "answer": "4"}], []),
        ([{"prompt": "2+2?", "chosen": "4", "rejected": "5"}], ["--map", "answer=chosen"]),
        ([{"id": "a", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}], []),
    ],
)
def test_answers_in_a_table_are_scored(runs, given, words, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in given))
    folder, output = runs["lora", 1].folder, tmp_path / "scores.jsonl"
    assert cli.main(["predict", str(folder), "--data", f"{tmp_path}/answers.jsonl", "--output", str(output), *words]) == 0
    (row,) = map(json.loads, output.read_text().splitlines())
    (expected,) = hftune.load_model(folder).predict([["2+2?", "4"]])
    assert row["score"] == pytest.approx(expected["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2+2?", "Input 0 is no answer to a prompt: write a tab between the two, or give messages."),
        (["2+2?", " "], "Input 0 cannot be scored: It is one with an empty answer."),
        (CHAT[:1], "Input 0 cannot be scored: There is no message of the assistant to train on."),
        ([*CHAT, CHAT[0]], "Input 0 cannot be scored: The last message is the user's, no answer."),
        (["2+2? " * 80, "4"], " positions. Shorten it."),
    ],
)
def test_what_cannot_be_scored_is_refused_in_words(runs, value, message):
    with pytest.raises(DataError) as refused:
        hftune.load_model(runs["whole", 1].folder).predict([value])
    assert message in str(refused.value)


def test_a_chat_with_a_reward_model_is_refused(runs, capsys):
    assert cli.main(["predict", str(runs["whole", 1].folder), "--chat"]) == 2
    assert "--chat is for models that answer chats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        (None, r"has 1 pair without a finite margin; the first at row 1\."),
        ("NaN", r"has 1 pair without a finite margin; the first at row 1\."),
        (True, r"cannot be trained on, at row .: Its margin is True, which is no number\."),
    ],
)
def test_a_margin_that_is_no_number_is_refused_with_its_row(tmp_path, margin, message):
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5", "ahead": value} for value in (1.0, margin)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows).replace('"NaN"', "NaN")
    (tmp_path / "pairs.jsonl").write_text(text.replace("1.0", "true") if margin is True else text)
    recipe = Recipe.load(
        *("reward_demo", "task.dataset=null", f"task.data_files.train={tmp_path}/pairs.jsonl", "task.margin_column=ahead"),
        *("eval.every=never", "eval.metric=loss", "task.max_train_samples=null", f"output_dir={tmp_path}/out"),
    )
    with pytest.raises(DataError, match=message):
        load_datasets(recipe)


def test_show_marks_what_differs():
    task = Recipe.load("reward_demo", "task.max_train_samples=4").task
    pair = task.datasets()["train"][0]
    texts = "".join(text for text, _ in task.marked(pair))
    compared = [text for text, is_compared in task.marked(pair) if is_compared]
    assert len(compared) == 2 and all(text.endswith("<|im_end|>\n") for text in compared) and compared[0] != compared[1]
    assert texts.count("<|im_start|>assistant\n") == 2
