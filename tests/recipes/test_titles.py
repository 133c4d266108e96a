"""Chinese titles from the command line to a model that writes them again."""

import json
import shutil

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, BigBirdConfig, BigBirdForPreTraining

import hftune.data.jieba_tokenizer
import hftune.models.bigbird  # noqa: F401 - registers the classes
from hftune import DataError, Recipe, cli, load_model, train
from hftune.build import plan_batches
from hftune.data.demo import articles
from hftune.data.vocabulary import train_vocabulary
from hftune.errors import ConfigError
from hftune.reevaluation import evaluate
from hftune.run import main
from tests.support.runs import Run, train_on

ARCHITECTURES = ("prefix_lm", "encoder_decoder")
SMALL = (
    "task.model_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
    "block_size: 8, num_random_blocks: 1, hidden_dropout_prob: 0.1}",
    *("task.vocab_size=700", "task.max_source_length=128", "task.max_train_samples=60", "task.max_eval_samples=13"),
    *("train.batch_size=16", "train.micro_batch_tokens=500", "train.log_every=1", "train.epochs=3", "train.lr=2e-2"),
    "eval.every=3 epochs",
)
JOBS = {name: (*SMALL, f"task.architecture={name}", "task.generation.num_beams=2") for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_on(1, JOBS, tmp_path_factory.mktemp("runs"), "bigbird_demo")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_micro_batch_has_more_padded_tokens_than_asked_for(name):
    recipe = Recipe.load("bigbird_demo", *JOBS[name])
    task, data = recipe.task, recipe.task.datasets()["train"]
    model, plan, computed = task.build_model(), plan_batches(recipe, data), 0
    for micro_batch in (micro_batch for step in plan.epoch(0) for micro_batch in step):
        batch = task.collate([data[int(sample)] for sample in micro_batch.samples])
        (rows, source), title = batch["source"].shape, batch["title"].shape[1]
        if name == "encoder_decoder":
            source = model.config.encoder.padded_length(source)
        assert rows * (source + title) == micro_batch.tokens <= 500
        computed += micro_batch.tokens
    read = sum(len(row["source"]) + len(row["title"]) - 1 for row in data)
    assert task.lengths(data).sum() == read < computed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_titles_do_not_depend_on_the_batches_that_they_are_generated_in(runs, name):
    run, num_batches = runs[name], []
    for bound in ("eval.batch_size=3", "eval.batch_tokens=1500", "eval.batch_tokens=1"):
        recipe = Recipe.load(run.folder / "recipe.yaml", bound)
        task, batches = recipe.task, []
        task._generate = lambda *given, task=task, batches=batches: batches.append(given) or type(task)._generate(task, *given)
        found = evaluate(recipe, run.folder / "model_last").metrics
        expected = dict(run.result["metrics"])
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6) and found == expected
        num_batches.append(len(batches))
    assert sum(len(batch["title"]) for _, _, batch in batches) == 13
    assert num_batches[0] == 5 and 1 < num_batches[1] < num_batches[2]


def test_model_is_evaluated_as_the_recipe_says_now(runs):
    run = runs["encoder_decoder"]
    recipe = Recipe.load(run.folder / "recipe.yaml", "task.max_target_length=2", "task.max_eval_samples=5")
    found = evaluate(recipe, str(run.folder / "model_last")).metrics
    assert 0 < found["mean_length"] < run.result["metrics"]["mean_length"]


def test_predictions_hold_the_titles_as_they_stand_in_the_data(runs):
    titles = {row["title"] for row in articles("eval")}
    assert all(row["title"] in titles for row in runs["prefix_lm"].predictions)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_writes_the_same_titles_again(runs, name):
    run = runs[name]
    folder = str(run.folder / "model_last")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto = AutoModelForCausalLM if name == "prefix_lm" else AutoModelForSeq2SeqLM
    model = auto.from_pretrained(folder).eval()
    by_start = {row["content"][:60]: row["content"] for row in articles("eval")}
    for row in run.predictions:
        ids = tokenizer(by_start[row["source"]], truncation=True, max_length=128, return_tensors="pt")["input_ids"]
        if name == "prefix_lm":
            given = torch.cat([ids, torch.tensor([[tokenizer.cls_token_id]])], 1)
            types = torch.cat([torch.zeros_like(ids), torch.ones(1, 1, dtype=torch.long)], 1)
            said = model.generate(given, token_type_ids=types)[0, given.shape[1] :]
        else:
            said = model.generate(ids, attention_mask=torch.ones_like(ids))[0]
        assert tokenizer.decode(said, skip_special_tokens=True) == row["generated"]


def test_command_prints_a_title_for_each_text(runs, tmp_path, capsys):
    run, (first, second) = runs["encoder_decoder"], articles("eval")[:2]
    (tmp_path / "article.txt").write_text(first["content"], encoding="utf-8")
    arguments = ["predict", str(run.folder), "--text", second["content"], "--text-file", str(tmp_path / "article.txt")]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    expected = [row["generated"] for row in load_model(run.folder).predict([second["content"], first["content"]])]
    assert said == expected and all(said)
    assert cli.main([*arguments, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"generated": title} for title in expected]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_goes_on_from_an_export_on_files_of_ones_own(runs, name, tmp_path):
    files = write(tmp_path, articles("train")[:20])
    lengths = ("task.max_source_length=128", "task.max_target_length=32")
    steps = ("train.batch_size=8", "train.max_steps=2", "train.log_every=1", f"output_dir={tmp_path / 'out'}")
    model = (f"task.model={runs[name].folder / 'model_last'}", f"task.architecture={name}")
    recipe = Recipe.load("bigbird", *files, *lengths, *steps, *model)
    first = Run(train(recipe).output_dir).logged("train/loss")[0]
    assert first == pytest.approx(runs[name].result["metrics"]["loss"], rel=0.5)  # not a fresh model's, which is near 6.5
    assert first < 5.5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recipe_starts_from_a_checkpoint_as_it_was_published(tmp_path, name):
    """Lowin's has config.json, vocab.txt without a tokenizer_config.json, and pytorch_model.bin of a BigBirdForPreTraining."""
    texts = [text for row in articles("train")[:50] for text in row.values()]
    published = tmp_path / "published"
    published.mkdir()
    (published / "vocab.txt").write_text("\n".join(train_vocabulary(texts, 1200)), encoding="utf-8")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 1200}
    source = BigBirdForPreTraining(BigBirdConfig(**size, max_position_embeddings=4096, block_size=16, num_random_blocks=1))
    source.config.save_pretrained(published)
    torch.save(source.state_dict(), published / "pytorch_model.bin")
    files = write(tmp_path, articles("train")[:6])
    words = (f"task.model={published}", "train.max_steps=1", f"task.architecture={name}", f"output_dir={tmp_path}/o")
    recipe = Recipe.load("bigbird", *files, *words)
    recipe.task.datasets()
    model = recipe.task.build_model()
    stacks = [model.bert] if name == "prefix_lm" else [model.encoder, model.decoder.bert]
    for stack in stacks:
        assert torch.equal(stack.embeddings.word_embeddings.weight, source.bert.embeddings.word_embeddings.weight)
        own = stack.encoder.layer[1].attention.self.query.weight
        assert torch.equal(own, source.bert.encoder.layer[1].attention.self.query.weight)
    assert Run(train(recipe).output_dir).result["steps"] == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_layers_than_the_model_has_are_refused(runs, tmp_path, name):
    """The third would be drawn at random, and nobody would know."""
    model = runs["prefix_lm"].folder / "model_last"
    if name == "encoder_decoder":  # from a BERT: an encoder and decoder is loaded as it is
        AutoModelForCausalLM.from_pretrained(model).bert.save_pretrained(tmp_path / "bert")
        config = json.loads((tmp_path / "bert" / "config.json").read_text())
        (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
        shutil.copy(model / "vocab.txt", tmp_path / "bert")
        model = tmp_path / "bert"
    files = write(tmp_path, articles("train")[:6])
    lengths = ("task.max_source_length=128", "task.max_target_length=32", "task.model_config.num_hidden_layers=3")
    recipe = Recipe.load("bigbird", f"task.model={model}", f"task.architecture={name}", *files, *lengths)
    recipe.task.datasets()
    with pytest.raises(ConfigError, match=r"has no [\w.]+\.layer\.2\.[\w.]+: task.model_config has more layers than the model"):
        recipe.task.build_model()


def write(folder, rows):
    """Write rows as both parts and return the overrides that name them."""
    for part in ("train", "eval"):
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
    return [f"task.data_files.{part}={folder}/{part}.jsonl" for part in ("train", "eval")]


def fresh(tmp_path, rows, *overrides):
    source = ("task.dataset=json", *write(tmp_path, rows), f"output_dir={tmp_path}/out", *SMALL)
    return Recipe.load("bigbird_demo", *source, *overrides)


FLEX = ["task.architecture=encoder_decoder", "task.model_config.block_sparse_kernel=flex"]


@pytest.mark.parametrize(
    ("kind", "row", "words", "hint"),
    [
        (
            DataError,
            {"content": "一篇文章", "title": " "},
            [],
            "has an empty text in column 'title' at row 5. Remove these rows,",
        ),
        (DataError, {"content": "", "title": "标题"}, [], "has an empty text in column 'content' at row 5. Remove these rows,"),
        (DataError, None, ["task.target_column=titel"], "task.target_column=titel"),
        (DataError, None, ["task.target_column=titel"], "It has: content, title. Did you mean 'title'?"),
        (
            ConfigError,
            None,
            ["task.max_source_length=630"],
            "task.max_source_length=630 and task.max_target_length=32 need 662",
        ),
        (ConfigError, None, ["task.max_source_length=630"], "with architecture=prefix_lm; the model has 640. Lower one"),
        (ConfigError, None, FLEX, "task.model_config.block_sparse_kernel=flex cannot train on a CPU: "),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_training(kind, row, words, hint, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(kind) as caught:
        train(fresh(tmp_path, [*articles("train")[:5], *([] if row is None else [row])], *words))
    assert hint in str(caught.value)


def test_traditional_characters_emoji_and_long_sources_train_and_generate(tmp_path):
    rows = [{"content": "臺灣的🚀發射。" * 60 + "Ünïcode ㄅㄆㄇ\u200b", "title": "臺灣🚀"} for _ in range(6)]
    result = train(fresh(tmp_path, rows, "train.max_steps=1"))
    assert result.metrics["loss"] > 0 and len(Run(result.output_dir).predictions) == 6


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_of_other_kinds_give_the_same_samples_as_json(tmp_path, kind):
    rows = articles("train")[:6]
    expected = fresh(tmp_path, rows).task.datasets()["train"]
    for part in ("train", "eval"):
        getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(tmp_path / f"{part}.{kind}"))
    files = [f"task.data_files.{part}={tmp_path}/{part}.{kind}" for part in ("train", "eval")]
    found = fresh(tmp_path, rows, f"task.dataset={kind}", *files).task.datasets()["train"]
    for found_row, row in zip(found, expected, strict=True):
        assert found_row["source"].tolist() == row["source"].tolist()
        assert found_row["title"].tolist() == row["title"].tolist()


def test_share_of_cut_texts_is_said_once_and_samples_are_shown(tmp_path, capsys):
    rows = [{"content": "北京大学的报告。" * length, "title": "北京大学"} for length in (1, 1, 1, 40)]
    train(fresh(tmp_path, rows, "task.max_source_length=64", "train.max_steps=1", "eval.show_samples=2"))
    said = capsys.readouterr().out
    for note in (
        "source_column=content, chosen from the columns content, title.",
        "4 of the 4 rows in the eval split are also in",
    ):
        assert said.count(note) == 1
    assert said.count("=64 tokens are truncated at the end: 25.0% of train and 25.0% of eval.") == 1
    shown = [line.split() for line in said.splitlines() if line.startswith("  source ")]
    assert shown == [["source", "北京大学的报告。"]] * 2


def test_length_that_is_no_multiple_of_the_block_is_said(tmp_path, capsys):
    rows = articles("train")[:5]
    long = ("task.architecture=encoder_decoder", "task.max_source_length=100", "train.max_steps=1")
    train(fresh(tmp_path, rows, *long))
    assert "is not a multiple of the encoder's block size 8: the longest sources are padded to 104" in capsys.readouterr().out


def test_vocabulary_made_beforehand_is_used(tmp_path, capsys):
    rows = articles("train")[:40]
    files = write(tmp_path, rows)
    assert cli.main(["vocab", files[0].split("=")[1], "--size", "900", "--output", str(tmp_path / "words")]) == 0
    count = len((tmp_path / "words" / "vocab.txt").read_text(encoding="utf-8").splitlines())
    assert capsys.readouterr().out.startswith(f"{tmp_path}/words: {count} tokens, ")
    recipe = fresh(tmp_path, rows, f"task.vocabulary={tmp_path}/words", "train.max_steps=1")
    recipe.validate()
    result = train(recipe)
    kept = AutoTokenizer.from_pretrained(result.model_dir)
    assert kept.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "words").get_vocab()


def test_vocabulary_that_is_none_or_has_no_use_is_refused_before_torch(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Recipe.load("bigbird_demo", f"task.vocabulary={tmp_path}/words", f"task.model={tmp_path}").validate()
    _, one, two = caught.value.problems
    assert "is for new models, but" in one and one.endswith("Set task.model=null.") and two.endswith("there is no such folder.")
    with pytest.raises(ConfigError, match=r"has no vocab.txt: name a folder written by `hftune vocab`\."):
        Recipe.load("bigbird_demo", f"task.vocabulary={tmp_path}").validate()


def test_file_that_is_not_utf8_is_refused(tmp_path, capsys):
    recipe = fresh(tmp_path, articles("train")[:5])
    (tmp_path / "train.jsonl").write_bytes('{"content": "文章", "title": "题"}\n'.encode("gb18030"))
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert main([f"recipe={tmp_path}/recipe.yaml"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"hftune: task.data_files.train={tmp_path}/train.jsonl is not UTF-8 in column 'content': "
        "Invalid UTF8 sequence at string index 0. Convert its file."
    )


def test_vocabulary_without_words_of_jieba_is_refused(tmp_path, runs):
    folder = tmp_path / "characters"
    model = AutoModelForCausalLM.from_pretrained(runs["prefix_lm"].folder / "model_last")
    model.save_pretrained(folder)
    letters = sorted({letter for row in articles("train")[:50] for letter in row["content"] + row["title"]})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^The vocabulary of {folder} has none of jieba's words"):
        train(fresh(tmp_path, articles("train")[:5], f"task.model={folder}", "task.model_config={}"))
