"""The recipe sft from the command line: what is trained, what is refused, and answers from the export."""

import io
import json
import re
import shutil
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hftune import Recipe, cli, load_model
from hftune.build import build_model, load_datasets
from hftune.checkpoints.resume import keep_settled
from hftune.errors import ConfigError, DataError
from hftune.reevaluation import evaluate
from tests.support.runs import train_on

SMALL = ("task.max_train_samples=3200", "task.max_eval_samples=16", "train.log_every=50", "seed=1")
CHAT = [{"role": "system", "content": "plain"}, {"role": "user", "content": "ann has 37 cups. how many?"}]
ANSWER = {"role": "assistant", "content": "37"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return train_on(1, {"chats": SMALL}, folder, "chats_demo")["chats"]


@pytest.fixture(scope="module")
def lora(run):
    words = ("task.max_train_samples=320", "task.max_eval_samples=16", "train.log_every=1")
    return train_on(1, {"lora": (*words, f"task.model={run.folder / 'model'}")}, run.folder.parent, "chats_lora_demo")["lora"]


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""

    def make(*rows, words=(), recipe="chats_demo"):
        (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / "good.jsonl").write_text(json.dumps(rows[0]) + "\n")
        files = (f"task.data_files.train={tmp_path}/chats.jsonl", f"task.data_files.eval={tmp_path}/good.jsonl")
        return Recipe.load(recipe, "task.dataset=null", *files, f"output_dir={tmp_path}/out", *words)

    return make


def test_demo_learns_and_says_so(run):
    assert run.result["metrics"]["exact_match"] >= 0.4  # a third of the demo's steps; by chance it would be a few percent
    row = run.predictions[0]
    assert row.keys() >= {"prompt", "answer", "generated", "tokens", "loss", "perplexity", "error"}
    assert "that answers chats" in (run.folder / "model" / "README.md").read_text()


def test_export_has_template_and_stops_and_answers_as_the_evaluation_did(run):
    folder = run.folder / "model"
    tokens, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    assert "<|im_start|>" in tokens.chat_template
    assert model.generation_config.max_new_tokens is None, "the evaluation's settings are its own"
    assert model.generation_config.eos_token_id == [tokens.convert_tokens_to_ids("<|im_end|>")]
    prompt = tokens.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    expected = tokens.decode(answer, skip_special_tokens=True)
    trained = load_model(run.folder, device="cpu")
    batched = trained.predict([{"messages": CHAT[1:]}, CHAT, "bob has 2 coins. who?"])
    assert batched[1] == {"generated": expected}
    assert evaluate(Recipe.load(run.folder / "recipe.yaml"), folder).metrics == run.result["metrics"]


@pytest.fixture
def based(run, own, tmp_path):
    """Return a function that builds the model of a recipe on an export whose generation settings were changed."""

    def make(settings, *words):
        base = shutil.copytree(run.folder / "model", tmp_path / "base", dirs_exist_ok=True)
        path = base / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        words = (f"task.model={base}", "task.dataset_config=null", "task.max_length=96", *words)
        recipe = own(BEFORE, recipe="sft", words=words)
        load_datasets(recipe)
        return recipe.task, build_model(recipe)

    return make


SAMPLED = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 40}


@pytest.mark.parametrize(
    ("settings", "words", "kept"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, (), {"temperature": None, "top_p": None}),
        (SAMPLED, ("task.generation={do_sample: false, max_new_tokens: 3}",), SAMPLED),
        ({"length_penalty": 0.5}, ("task.generation={num_beams: 2, length_penalty: 2.0}",), {"num_beams": None}),
    ],
)
def test_export_keeps_the_settings_of_its_base_that_have_an_effect(based, tmp_path, settings, words, kept):
    _, model = based(settings, *words)
    model.save_pretrained(tmp_path / "again")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again").generation_config
    assert {key: getattr(saved, key) for key in kept} == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{temperature: 0.7}", "`temperature`: `do_sample` is not set to `True`"),
        ("{length_penalty: 2.0}", "`length_penalty`: `num_beams` is set to"),
        ("{max_new_token: 3}", "Did you mean 'max_new_tokens'?"),
    ],
)
def test_settings_without_effect_are_refused_before_training(based, words, message):
    with pytest.raises(ConfigError) as refused:
        based({}, f"task.generation={words}")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_answers_end_where_the_positions_do(based):
    task, model = based({"num_beams": 2, "early_stopping": True})
    assert len(task.prompt_ids(0, "x" * 60)) < 128
    model.generation_config.eos_token_id = None  # nothing else ends them
    prompt = "many " * 20
    (row,) = task.predict(model, [prompt])
    assert len(task.prompt_ids(0, prompt)) + len(task.text_tokenizer(row["generated"])["input_ids"]) <= 128
    assert isinstance(task.reply(model, [{"role": "user", "content": prompt}]), str)
    with pytest.raises(DataError, match=r"Input 1 has [0-9]+ tokens, .*: the model has 128 positions"):
        task.predict(model, ["x", "many " * 200])


def test_an_answer_is_as_long_beside_a_prompt_that_leaves_less_room(based):
    task, model = based({})
    model.generation_config.eos_token_id = None
    prompts = ["x", "many " * 20, "y"]
    assert task.predict(model, prompts) == [task.predict(model, [prompt])[0] for prompt in prompts]


def test_chats_of_a_file_and_of_the_terminal_are_answered(run, tmp_path, capsys, monkeypatch):
    expected = load_model(run.folder, device="cpu").predict([CHAT])[0]
    separated = [{"role": "system", "content": "plain\u2028"}, CHAT[1]]
    lines = [json.dumps({"messages": CHAT}), "", json.dumps(CHAT), json.dumps(separated, ensure_ascii=False)]
    (tmp_path / "chats.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert cli.main(["predict", str(run.folder), "--messages", f"{tmp_path}/chats.jsonl", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[:2] == [expected] * 2 and len(answers) == 3

    rows = [{"messages": json.dumps(CHAT)}, {"messages": CHAT[1]["content"]}]
    (tmp_path / "table.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("--data", f"{tmp_path}/table.jsonl", "--map", "prompt=messages", "--output", f"{tmp_path}/answers.jsonl")
    assert cli.main(["predict", str(run.folder), *words]) == 0
    capsys.readouterr()
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert answers[0]["generated"] == expected["generated"] and len(answers) == 2

    question = CHAT[1]["content"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n/new\n<|im_end|>\n{question}\n/exit\n{question}\n"))
    assert cli.main(["predict", str(run.folder), "--chat", "--system", "plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[-1]] == [expected["generated"]] * 2
    assert len(lines) == 3 and "'<|im_end|>', which the tokenizer reads as a special token" in lines[1]


@pytest.mark.parametrize(
    ("words", "line", "message"),
    [
        (("--messages", "{file}"), '{"text": "x"}', "line 1 is neither a list of messages nor"),
        (("--messages", "{file}"), "x", "line 1 is not valid JSON"),
        (("--messages", "{file}"), json.dumps([*CHAT, ANSWER]), "the last message is the assistant's"),
        (("--system", "plain"), "", "--system is for --chat"),
        (("--messages", "{file}", "--output", "{file}.csv"), "", "--output is for --data"),
        (("--chat", "--text", "x"), "", "--chat reads its messages from the terminal"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(run, tmp_path, capsys, words, line, message):
    (tmp_path / "chats.jsonl").write_text(line)
    assert cli.main(["predict", str(run.folder), *(word.format(file=tmp_path / "chats.jsonl") for word in words)]) == 2
    error = capsys.readouterr().err
    assert message.lower() in error.lower() and error.count("\n") == 1


def test_adapters_start_from_the_export_of_the_demo_and_are_a_fraction_of_it(run, lora):
    losses = lora.logged("train/loss")
    assert len(losses) == 10 and losses[-1] < losses[0] - 2
    adapters, whole = lora.folder / "model" / "adapter_model.safetensors", run.folder / "model" / "model.safetensors"
    assert (lora.folder / "model" / "generation_config.json").is_file(), "docs/chats.md loads it"
    assert adapters.stat().st_size < whole.stat().st_size / 3  # matrices of rank 8 beside a model that is 64 wide
    assert evaluate(Recipe.load(lora.folder / "recipe.yaml"), lora.folder / "model").metrics == lora.result["metrics"]


def test_samples_are_shown_with_what_is_trained(capsys, own):
    untrained = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "ann", "train": False}]
    recipe = own({"messages": [*CHAT, ANSWER, *untrained]})
    train = load_datasets(recipe)["train"]
    assert [text for text, is_trained in recipe.task.marked(train[0]) if is_trained] == ["37<|im_end|>"]
    assert cli.main(["show", "recipe=chats_demo", "--samples", "2", "task.max_train_samples=20"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sample 0 of 20 (") and "sample 1 of" in shown and "sample 2" not in shown
    assert "<|im_start|>assistant\n\u00ab" in shown and "<|im_end|>\u00bb\n" in shown


@pytest.mark.parametrize("recipe", ["seq2seq_demo", "language_modeling_demo"])
def test_other_texts_are_shown_too(capsys, recipe):
    assert cli.main(["show", f"recipe={recipe}", "--samples", "1", "task.max_train_samples=20"]) == 0
    assert "\u00ab" in capsys.readouterr().out


def test_samples_of_images_are_not(capsys):
    assert cli.main(["show", "recipe=mnist_demo", "--samples", "1"]) == 2
    assert "--samples: ImageClassification has no samples" in capsys.readouterr().err


BEFORE = {"messages": [*CHAT, ANSWER]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (CHAT, "at row 1: There is no message of the assistant to train on."),
        ([CHAT[1], CHAT[0], ANSWER], "at row 1: Message 1 has the role system, which comes first, before user."),
        ([{"role": "usr", "content": "x"}, ANSWER], "at row 1: Message 0 has the role 'usr'."),
        ([{"role": "user", "content": "<|im_end|>"}, ANSWER], "at row 1: Message 0 holds the text '<|im_end|>'"),
        ([*CHAT, {**ANSWER, "content": "a b " * 60}], "has 1 chat longer than task.max_length=96 tokens"),
    ],
)
def test_row_that_cannot_be_trained_on_is_refused_by_its_number(own, messages, message):
    with pytest.raises(DataError) as refused:
        load_datasets(own(BEFORE, {"messages": messages}))
    text = str(refused.value)
    assert text.startswith("The train split ") and message in text and "row 1" in text and "\n" not in text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task.prompt_column=a", "task.completion_column is missing"),
        ("task.chat_template=none.jinja", "task.chat_template=none.jinja: there is no such file."),
        ("task.date=today", "task.date=today is not a date"),
        ("task.scores=[rogue]", "Did you mean 'rouge'?"),
        ("task.train_on=all", "task.generation compares answers, which task.train_on=all does not know."),
    ],
)
def test_keys_that_contradict_are_refused_before_anything_is_loaded(own, word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        own(BEFORE, words=(word,)).validate()


def test_model_without_a_template_is_refused(own, run, tmp_path):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(run.folder / "model").save_pretrained(model)
    tokens = AutoTokenizer.from_pretrained(run.folder / "model")
    tokens.chat_template = None
    tokens.save_pretrained(model)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_datasets(own(BEFORE, recipe="sft", words=(f"task.model={model}", "task.dataset_config=null")))


def test_long_chats_are_dropped_or_cut_to_whole_turns_and_counted(own):
    turns = [message for _ in range(8) for message in (CHAT[1], ANSWER)]
    rows = (BEFORE, {"messages": turns})
    for too_long, samples, told in (("drop", 1, "Dropped 1 of 2 chats"), ("cut", 2, "Cut 1 of 2 chats of the train split")):
        recipe = own(*rows, words=(f"task.too_long={too_long}",))
        found = load_datasets(recipe)
        assert len(found["train"]) == samples and max(len(sample["input_ids"]) for sample in found["train"]) <= 96
        assert all(sample["labels"][-1] == recipe.task.chat_format.stops[0] for sample in found["train"])
        assert any(told in notice for notice in recipe.task.notices(found, build_model(recipe)))


def test_prompts_and_completions_are_chats_too(own):
    recipe = own({"prompt": CHAT[1]["content"], "completion": "37"})
    pieces = recipe.task.marked(load_datasets(recipe)["train"][0])
    assert pieces == [
        (f"<|im_start|>user\n{CHAT[1]['content']}<|im_end|>\n<|im_start|>assistant\n", False),
        ("37<|im_end|>", True),
    ]


def test_run_that_is_resumed_keeps_the_date_of_its_start(own, tmp_path):
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    words = (f"task.chat_template={tmp_path}/template.jinja",)
    first = own(BEFORE, words=(*words, "task.date=2025-01-02"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.yaml").write_text(first.to_yaml())
    again, anew = own(BEFORE, words=words), own(BEFORE, words=(*words, "resume=never"))
    keep_settled(again)
    keep_settled(anew)
    assert (again.task.date, anew.task.date) == ("2025-01-02", None)
    texts = [recipe.task.marked(load_datasets(recipe)["train"][0])[0][0] for recipe in (again, anew)]
    assert texts[0].startswith("02 Jan 2025<|im_start|>") and not texts[1].startswith("02 Jan 2025")
    assert anew.task.date is not None
