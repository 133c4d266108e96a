"""New tokens, noise on embeddings, starts of adapters and rows without repetitions: the same on 1, 2 and 4 processes, and resumed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMultipleChoice,
    BertModel,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.neftune import neftune_post_forward_hook

from hftune import ConfigError, Recipe, load_model
from hftune.build import check_noise, first_epoch
from hftune.data.demo import reviews
from hftune.models.neftune import Noise
from hftune.strategies.packing import collate_for
from tests.support.runs import NO_DROPOUT, SMALL, train_on, write_jsonl


def model_at(path):
    return "replace=[task.model_config]", f"task.model={path}"


TOKENS = "task.new_tokens=[<place>, <dish>]"
PLATEAU = ("train.schedule=plateau", "train.gamma=0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pretrained model, and rows of which every third one is there again, with another id."""
    folder, rows = tmp_path_factory.mktemp("runs"), reviews("train")[:60]
    named = [{**row, "text": row["text"].replace("food", "<dish>")} for row in rows]
    again = [each for number, row in enumerate(named) for each in [row] * (1 + (number % 3 == 0))]
    write_jsonl(folder / "rows.jsonl", [{**row, "id": number} for number, row in enumerate(again)])
    write_jsonl(folder / "eval.jsonl", reviews("eval")[:20])
    words = (*SMALL, *NO_DROPOUT, "train.max_steps=1", "eval.every=never", f"output_dir={folder}/pretrained")
    train_on(1, {"pretrained": words}, folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    data = f"task.data_files={{train: {folder}/rows.jsonl, eval: {folder}/eval.jsonl}}"
    words = (*SMALL[len(SMALL) - 5 :], *NO_DROPOUT, data, "task.dataset=null", *model_at(f"{folder}/pretrained/model"), TOKENS)
    words = (*words, "task.max_length=64", "task.deduplicate=true", "train.neftune_alpha=20", "train.lr=1e-3", "train.epochs=1")
    lora = ("adapter.type=lora", "adapter.train_also=[word_embeddings]", "adapter.export=merged", "adapter.init=pissa")
    again = (*words, f"output_dir={folder}/again", "checkpoint.every=1")
    jobs = {
        1: {
            "all": (*words, "train.micro_batch_size=16"),
            "small": (*words, "train.micro_batch_size=3"),
            "padded": (*words, "train.micro_batch_size=5", "train.packing=off"),
            "quiet": (*words, "train.neftune_alpha=null"),
            "pissa": (*words, *lora),
        },
        2: {"all": words, "sharded": words, "pissa": (*words, *lora), "stopped": again, "resumed": again},
        4: {"all": (*words, "train.micro_batch_size=4")},
    }
    return {
        (name, size): run
        for size, some in jobs.items()
        for name, run in train_on(
            size, some, folder, stops={"stopped": (2, 1)} if size == 2 else None, sharded=["sharded"] if size == 2 else ()
        ).items()
    }


@pytest.mark.parametrize(
    ("name", "size", "of"),
    [
        *(("small", 1, "all"), ("padded", 1, "all"), ("all", 2, "all"), ("all", 4, "all"), ("sharded", 2, "all")),
        ("pissa", 2, "pissa"),
    ],
)
def test_losses_depend_on_neither_processes_nor_micro_batches_nor_sharding(runs, name, size, of):
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = runs[of, 1].logged(metric)
        assert values and runs[name, size].logged(metric) == pytest.approx(values, rel=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(runs):
    whole, resumed = (load_file(runs[name, 2].folder / "model_last" / "model.safetensors") for name in ("all", "resumed"))
    assert whole.keys() == resumed.keys() and all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_noise_is_on_in_training_and_off_in_evaluation(runs):
    noisy, quiet = (runs[name, 1].logged("train/loss") for name in ("all", "quiet"))
    assert noisy[0] != pytest.approx(quiet[0], rel=1e-4)
    run = runs["all", 1]
    texts = [row["text"] for row in reviews("eval")[:20]]
    said = load_model(run.folder, device="cpu").predict(texts)
    rows = {row["text"][:20]: row for row in run.predictions}
    assert run.result["best"]["step"] == run.result["steps"] == len(noisy)  # so both are of the same weights
    probabilities = [rows[text[:20]]["probability"] for text in texts]
    assert [answer["probability"] for answer in said] == pytest.approx(probabilities, abs=2e-6)


def test_rows_that_are_there_again_are_left_out_and_counted(runs, folder):
    facts = json.loads((runs["all", 2].folder / "run.json").read_text())
    assert facts["data"]["train"]["samples"] == 60
    assert "task.deduplicate=true: 20 rows of the train split equal an earlier one, and are left out." in facts["notices"]


def test_the_first_of_equal_rows_is_kept_and_others_stay(folder, tmp_path):
    rows = [("a", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 1), ("c", 0)]
    write_jsonl(tmp_path / "x.jsonl", [{"text": text, "label": label, "id": id_} for id_, (text, label) in enumerate(rows)])
    words = (
        "task.dataset=null",
        f"task.data_files={{train: {tmp_path}/x.jsonl, eval: {tmp_path}/x.jsonl}}",
        "task.deduplicate=true",
    )
    task = Recipe.load("yelp_demo", *SMALL[:4], *words).task
    assert task.rows["train"]["id"] == [0, 1, 2, 5] and len(task.rows["eval"]) == 6
    assert [task.row_of("train")(index) for index in range(4)] == [0, 1, 2, 5]
    held_out = Recipe.load(
        "yelp_demo", *SMALL[:4], words[0], f"task.data_files.train={tmp_path}/x.jsonl", "task.eval_share=0.5", words[2]
    )
    both = [row for split in ("train", "eval") for row in held_out.task.rows[split]["id"]]
    assert sorted(both) == [0, 1, 2, 5]  # no row of the evaluation is trained on
    task = Recipe.load("yelp_demo", *SMALL[:4], *words, "task.prepare=as_needed").task
    assert [row["label"] for row in task.rows["train"].read()] == [0, 1, 1, 0]


def test_exports_hold_new_tokens_and_so_does_a_merged_model_of_adapters(runs, folder):
    for name in ("all", "pissa"):
        path = runs[name, 1].folder / "model"
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
        before = AutoTokenizer.from_pretrained(folder / "pretrained" / "model")
        assert len(tokenizer) == len(before) + 2 == model.get_input_embeddings().weight.shape[0] == model.config.vocab_size
        assert tokenizer.tokenize("the <dish> was good")[1] == "<dish>"
        new = model.get_input_embeddings().weight[-2:]
        assert not torch.equal(new[0], new[1])  # <dish> occurs in the texts, <place> does not


def test_new_rows_begin_as_transformers_mean(folder):
    path = folder / "pretrained" / "model"
    task = Recipe.load("yelp_demo", *model_at(path), "task.max_length=64", TOKENS).task
    task.datasets()
    torch.manual_seed(0)
    ours = task.build_model().get_input_embeddings().weight
    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    theirs.resize_token_embeddings(len(ours))  # mean_resizing by default, whose covariance is multiplied by 1e-9
    assert torch.allclose(ours, theirs.get_input_embeddings().weight, atol=1e-4)
    assert torch.equal(ours[-1], ours[-2]) and torch.allclose(ours[-1], ours[:-2].mean(0), atol=1e-6)


def test_rows_in_reserve_are_used_first(folder, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "pretrained" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained" / "model")
    count = len(tokenizer)
    model.resize_token_embeddings(count + 7)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    task = Recipe.load("yelp_demo", *model_at(tmp_path), "task.max_length=64", TOKENS).task
    task.datasets()
    weight = task.build_model().get_input_embeddings().weight
    assert len(weight) == count + 7 and torch.allclose(weight[count : count + 2], weight[:count].mean(0), atol=1e-6)


def small_bert(**config):
    torch.manual_seed(1)
    return BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    )


def test_noise_has_the_size_of_transformers_and_leaves_padding_alone():
    model, ids = small_bert(), torch.arange(1, 41).view(2, 20)
    embeddings = model.get_input_embeddings()
    plain = embeddings(ids).detach()
    embeddings.neftune_noise_alpha = 5
    theirs = (neftune_post_forward_hook(embeddings, (ids,), plain.clone()) - plain).abs()
    noise, mask = Noise(model, 5), torch.ones_like(ids)
    mask[1, 12:] = 0
    kept = []
    embeddings.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    noise.key = 7, 3
    model(input_ids=ids, attention_mask=mask)
    ours = (kept[-1] - plain).abs()
    assert float(ours[0].max()) == pytest.approx(float(theirs.max()), rel=0.05) and float(ours[0].mean()) == pytest.approx(
        float(theirs.mean()), rel=0.1
    )
    assert float(ours[1, :12].max()) == pytest.approx(5 / (12 * 16) ** 0.5, rel=0.05) and ours[1, 12:].max() == 0
    alone = ids[1:, :12]
    model(input_ids=alone, attention_mask=torch.ones_like(alone))
    assert torch.equal(kept[-1][0], kept[-2][1, :12])  # whatever else is in the micro-batch
    noise.key = 7, 4
    model(input_ids=alone)
    assert not torch.equal(kept[-1], kept[-2])
    model.eval()
    model(input_ids=alone)
    assert torch.equal(kept[-1], plain[1:, :12])


def test_choices_have_the_noise_of_their_texts():
    ids = torch.arange(1, 41).view(4, 10)
    mask = torch.ones_like(ids)
    mask[2, 7:] = 0
    found = []
    for shape in ((4, 10), (4, 1, 10), (2, 2, 10)):
        torch.manual_seed(1)
        model = BertForMultipleChoice(
            BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
        )
        reader = model.train() if len(shape) == 3 else model.train().bert
        noise = Noise(reader, 5)
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: found.append(output.detach()))
        noise.key = 7, 3
        reader(input_ids=ids.view(shape), attention_mask=mask.view(shape))
    assert not torch.equal(found[0], model.get_input_embeddings().weight[ids])
    assert all(torch.equal(each.view_as(found[0]), found[0]) for each in found[1:])


def test_texts_whose_padding_no_mask_names_are_refused():
    def check(name, *words):
        recipe = Recipe.load(name, *words)
        check_noise(recipe, first_epoch(recipe, recipe.task.datasets()))

    check("yelp_demo", *SMALL[:4], "train.neftune_alpha=5")
    check("wikitext2_demo")
    with pytest.raises(
        ConfigError, match=r"train\.neftune_alpha=5: LanguageModeling gives its model no attention_mask, without"
    ):
        check("wikitext2_demo", "train.neftune_alpha=5")


def test_an_encoder_has_noise_and_its_decoder_has_none():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=30, dropout_rate=0.0)
    )
    ids, noise = torch.arange(2, 12).view(1, 10), Noise(model.train(), 50)
    plain = model(input_ids=ids, decoder_input_ids=ids)
    noise.key = 0, 0
    noisy = model(input_ids=ids, decoder_input_ids=ids.clone())
    assert not torch.allclose(plain.encoder_last_hidden_state, noisy.encoder_last_hidden_state, atol=1e-3)
    kept = model(input_ids=ids, decoder_input_ids=ids.clone(), encoder_outputs=(plain.encoder_last_hidden_state,))
    assert torch.equal(kept.logits, plain.logits)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration does not embed its input_ids as they are"):
        model(input_ids=ids, decoder_input_ids=ids)  # where the last one had no noise


def test_texts_with_noise_share_no_beginnings_and_models_of_images_have_none():
    task = Recipe.load("dpo_demo").task
    model = small_bert()
    assert collate_for(model, task).args[-1] is True
    model.neftune = Noise(model, 5)
    assert collate_for(model, task).args[-1] is False
    images = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    for other in (images, torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="needs a model of transformers that reads tokens, unlike"):
            Noise(other, 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.new_tokens=[a, a]"], "task.new_tokens=['a', 'a']: 'a' is empty, or there twice."),
        (["train.neftune_alpha=5", "train.compile=true"], "train.neftune_alpha=5 does not work with train.compile=true."),
        (["train.neftune_alpha=5", "parallel.context=2"], "parallel.context=2 does not work with train.neftune_alpha=5"),
        (["train.schedule=plateau"], "train.schedule=plateau needs train.gamma"),
        (["train.schedule=plateau", "train.gamma=0.5", "eval.every=never"], "train.schedule=plateau follows eval.metric"),
        ([*PLATEAU, "eval.every=30 min"], "eval.every=30 min: with train.schedule=plateau the learning rate would depend on"),
        (["eval.min_improvement=0.1"], "eval.min_improvement=0.1 needs eval.patience, the number of evaluations"),
        (["train.warmup_steps=5", "train.warmup_ratio=0.1"], "train.warmup_steps=5 and train.warmup_ratio=0.1 both say"),
        (["adapter.type=lora", "adapter.init=olora"], "adapter.init=olora changes the frozen weights"),
        (["adapter.type=lora", "adapter.init=pisa"], "Did you mean 'pissa'?"),
        (["adapter.type=lora", TOKENS], "task.new_tokens does not go with adapter.export=adapter"),
        (["recipe=wikitext2_demo", "task.deduplicate=true"], "task.deduplicate=true is not for LanguageModeling"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(words, said):
    recipe = next((word.partition("=")[2] for word in words if word.startswith("recipe=")), "yelp_demo")
    with pytest.raises(ConfigError) as raised:
        Recipe.load(recipe, *(word for word in words if not word.startswith("recipe="))).validate()
    assert any(said in problem for problem in raised.value.problems), raised.value.problems


def test_a_token_that_is_there_already_and_embeddings_that_stay_frozen_are_refused(folder):
    path = folder / "pretrained" / "model"
    with pytest.raises(ConfigError, match=r"task\.new_tokens: '\[MASK\]' is a token of the tokenizer already"):
        Recipe.load("yelp_demo", *model_at(path), "task.new_tokens=['[MASK]']").task.datasets()
    from hftune.build import build_model

    recipe = Recipe.load(
        "yelp_demo", *model_at(path), "task.max_length=64", TOKENS, "adapter.type=lora", "adapter.export=merged"
    )
    recipe.task.datasets()
    with pytest.raises(ConfigError, match=r"Set adapter\.train_also=\[word_embeddings\]"):
        build_model(recipe)
