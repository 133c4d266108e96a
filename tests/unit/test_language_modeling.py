"""Language modelling: what the tokens are, that each is predicted once and never seen before, and what is refused."""

import math
import re
import tracemalloc

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.ngrams import bigram_perplexity, unigram_perplexity
from hftune import ConfigError, DataError, Recipe
from hftune.config.recipe import flat
from hftune.config.shipped_files import recipe_path
from hftune.data import digest
from hftune.data.blocks import Blocks
from hftune.data.word_tokenizer import train_words, word_tokenizer
from hftune.tasks.language_modeling import LanguageModeling

OWN = {"model_type": "transformer_lm", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
OWN |= {"num_attention_heads": 2, "max_position_embeddings": 16}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LINES = [" The cat saw the <unk> . ", "", " The dog saw the cat . "]


@pytest.fixture
def task(tmp_path):
    """Return a function that makes a task on three lines, trained and evaluated on."""
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")

    def make(**fields):
        files = dict.fromkeys(("train", "eval"), str(tmp_path / "lines.txt"))
        default = {"dataset": "text", "data_files": files, "model_config": OWN, "tokenizer": "words", "block_length": 4}
        return LanguageModeling(**{**default, **fields})

    return make


def test_words_are_numbered_by_frequency_and_ties_by_text_and_keep_their_case():
    tokenizer = word_tokenizer(train_words(LINES, "words"), "words")
    assert " ".join(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) == "<unk> <eos> . The cat saw the dog"
    assert tokenizer("The bird saw the <unk>")["input_ids"] == [3, 0, 5, 6, 0]
    bound = word_tokenizer(train_words(reversed(LINES), "words", vocab_size=4), "words")
    assert bound.get_vocab() == {"<unk>": 0, "<eos>": 1, ".": 2, "The": 3}


@pytest.mark.parametrize(
    "text", ['It\'s “said” (twice): Yes, no; well...<br />"Quoted"  and\tÜber!? 3.5 @-@ x', "  <unk> don't ", "plain"]
)
def test_basic_english_cuts_as_torchtext_does(text):
    patterns = [r"\'", r"\"", r"\.", r"<br \/>", r",", r"\(", r"\)", r"\!", r"\?", r"\;", r"\:", r"\s+"]
    replaced = [" '  ", "", " . ", " ", " , ", " ( ", " ) ", " ! ", " ? ", " ", " ", " "]
    expected = text.lower()
    for pattern, content in zip(patterns, replaced, strict=True):
        expected = re.sub(pattern, content, expected)
    tokenizer = word_tokenizer(train_words([text], "basic_english"), "basic_english")
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == expected.split()


def test_word_tokenizer_is_loaded_from_an_export_as_it_was(tmp_path):
    tokenizer = word_tokenizer(train_words(LINES, "basic_english"), "basic_english")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab() and (loaded.eos_token, loaded.unk_token) == ("<eos>", "<unk>")
    assert loaded("The CAT, unseen")["input_ids"] == tokenizer("The CAT, unseen")["input_ids"]


def test_a_row_is_its_words_and_an_end_and_an_empty_row_an_end(task):
    made = task()
    words = made.text_tokenizer.convert_ids_to_tokens(made.datasets()["train"].stream.tolist())
    assert words == [*LINES[0].split(), "<eos>", "<eos>", *LINES[2].split(), "<eos>"]


@pytest.fixture
def subwords(tmp_path):
    """The folder of a byte-level tokenizer, as GPT-2's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        LINES, trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path / "subwords")
    return str(tmp_path / "subwords")


def test_a_row_of_subwords_is_its_text_and_a_newline(task, subwords):
    made = task(tokenizer=subwords)
    assert made.text_tokenizer.decode(made.datasets()["train"].stream) == "".join(f"{line}\n" for line in LINES)
    assert not any("Tokens that are" in line for line in made.notices(made.datasets(), None))  # nothing is unknown to it


@pytest.mark.parametrize("length", [1, 2, 35, 99, 100])
@pytest.mark.parametrize("num_tokens", [101, 102])
def test_every_token_but_the_first_is_a_label_exactly_once(length, num_tokens):
    stream = np.arange(num_tokens, dtype=np.int32)
    blocks = Blocks(stream, length)
    assert np.concatenate([block["labels"] for block in blocks]).tolist() == list(range(1, num_tokens))
    assert all((block["labels"] - block["input_ids"] == 1).all() for block in blocks)
    counts = [len(block["labels"]) for block in blocks]
    assert counts == blocks.lengths.tolist() and set(counts[:-1]) <= {length}


def test_fewer_blocks_are_drawn_once_and_stay_in_order():
    drawn = Blocks(np.arange(1000), 10, count=7)
    starts = [int(block["input_ids"][0]) for block in drawn]
    assert starts == sorted({*starts}) and len(drawn) == len(drawn.lengths) == 7
    assert starts != list(range(0, 70, 10)) and starts == [int(block["input_ids"][0]) for block in Blocks(drawn.stream, 10, 7)]


def test_unknown_words_are_told_by_their_share(task):
    made = task(vocab_size=4)
    assert made.notices(made.datasets(), None)[-1] == "Tokens that are <unk>: 53.3% of train, 53.3% of eval."


def test_blocks_are_hashed_by_the_first_start_alone(task, monkeypatch):
    monkeypatch.setattr(digest, "MIN_CACHED_ROWS", 1)
    made = task(block_length=3)
    said = made.notices(made.datasets(), None)
    for name in ("__getitem__", "contents_by_row"):
        monkeypatch.setattr(Blocks, name, None)
    assert made.notices(made.datasets(), None) == said and "blocks in the eval split are also in the train split" in said[-2]


def test_the_share_of_a_token_takes_little_memory():
    stream = np.zeros(2**24, np.int32)
    stream[:: 2**20] = 7
    tracemalloc.start()
    share, (_, most) = Blocks(stream, 2**10).share_of(7), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert share == 2**-20 and most < 2**23


@pytest.mark.parametrize("config", [OWN, GPT2, LLAMA], ids=["transformer_lm", "gpt2", "llama"])
def test_no_token_sees_a_later_one_and_padding_changes_no_loss(task, config):
    """Through the task: its batches, its inputs, its loss."""
    made = task(model_config=config, block_length=6)
    blocks = made.datasets()["train"]
    torch.manual_seed(0)
    model = made.build_model().eval()
    batch = made.collate([blocks[0], blocks[len(blocks) - 1]])
    assert (batch["labels"] == -100).sum() == 4 and made.num_items(made.target(batch)) == 8
    logits = model(**made.inputs(batch)).logits
    for place in range(1, 6):
        changed = {name: value.clone() for name, value in batch.items()}
        changed["input_ids"][:, place] = (changed["input_ids"][:, place] + 1) % 7
        after = model(**made.inputs(changed)).logits
        torch.testing.assert_close(after[:, :place], logits[:, :place])
        assert (after[:, place:] - logits[:, place:]).abs().amax((1, 2)).min() > 1e-6
    alone = [made.collate([blocks[place]]) for place in (0, len(blocks) - 1)]
    apart = sum(made.loss(model(**made.inputs(one)), made.target(one)) for one in alone)
    torch.testing.assert_close(made.loss(model(**made.inputs(batch)), made.target(batch)), apart)
    rows = made.predictions(model(**made.inputs(batch)), model, batch)
    assert [row["tokens"] for row in rows] == [6, 2] and sum(row["loss"] for row in rows) == pytest.approx(apart.item())


def test_perplexity_is_weighted_by_tokens():
    rows = [{"loss": 6 * 2.0, "tokens": 6}, {"loss": 2 * 4.0, "tokens": 2}]
    assert LanguageModeling().metrics(rows) == {"perplexity": math.exp(20 / 8)}
    assert LanguageModeling().metrics([{"loss": 1e6, "tokens": 1}]) == {"perplexity": math.inf}


@torch.no_grad()
def test_text_is_continued_and_its_own_perplexity_said(task):
    made = task(generation={"max_new_tokens": 3})
    made.datasets()
    model = made.build_model().eval()
    text = "The cat saw the dog ."
    answers = made.predict(model, [text, "cat", " ".join([text] * 9)])  # the last has more words than the model positions
    ids = torch.tensor(made.text_tokenizer(text)["input_ids"])[None]
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])
    assert answers[0]["perplexity"] == round(math.exp(loss), 2) and answers[1]["perplexity"] is None
    written = model.generate(ids, max_new_tokens=3)[0, ids.shape[1] :]
    assert answers[0]["generated"] == made.text_tokenizer.decode(written, skip_special_tokens=True)
    assert all(len(answer["generated"].split()) <= 3 for answer in answers)
    with pytest.raises(DataError, match=r"^Input 1 is an empty text\.$"):
        made.predict(model, [text, " "])


@torch.no_grad()
@pytest.mark.parametrize("new", [40, 64, 100])
def test_a_long_text_is_continued_up_to_the_last_position_at_most(task, new):
    config = {"model_type": "gpt2", "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    made = task(generation={"max_new_tokens": new}, model_config=config)
    made.datasets()
    model = made.build_model().eval()
    model.generation_config.eos_token_id = None
    (answer,) = made.predict(model, [" ".join(["The cat saw the dog ."] * 20)])
    assert 0 < len(answer["generated"].split()) <= min(new, 63)  # more positions than the model has would be an IndexError


@torch.no_grad()
def test_model_without_a_maximum_of_positions_reads_the_whole_text(task, monkeypatch):
    made = task(
        model_config={"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}, generation={"max_new_tokens": 2}
    )
    made.datasets()
    model = made.build_model().eval()
    generate, read = model.generate, []
    monkeypatch.setattr(model, "generate", lambda ids, **options: (read.append(ids.shape[1]), generate(ids, **options))[1])
    made.predict(model, ["The cat saw the dog ."])
    assert read == [6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("task.tokenizer=null", "task.model=null builds a new model: set task.tokenizer to words"),
        ("task.model=openai-community/gpt2", "task.tokenizer=words builds a vocabulary that does not fit"),
        ("task.tokenizer=./nowhere", "task.tokenizer=./nowhere: there is no such folder."),
        ("task.tokenizer=openai-community/gpt2; task.vocab_size=100", "has an effect only with task.tokenizer=words"),
        ("task.shuffle_window=100", "is not for LanguageModeling, whose samples are no single rows. Set it to null."),
        ("task.block_length=0", "task.block_length=0 must be at least 1."),
        ("task.model_config=null", "task.model=null builds a new model: set task.model_config.model_type (such as gpt2)"),
        ("task.dataset=text; task.data_files={train: x.txt, eval: x.txt, tset: x.txt}", "Keys of task.data_files: "),
        ("task.dataset=text; task.data_files={train: x.txt, eval: x.txt, test: y.txt}", "Did you mean x.txt?"),
        ("eval.metric=accuracy", "is not computed by LanguageModeling. It computes: loss, perplexity."),
    ],
)
def test_what_cannot_work_is_refused_before_torch(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("a b\n")
    with pytest.raises(ConfigError) as refused:
        Recipe.load("wikitext2", *words.split("; ")).validate()
    (problem,) = refused.value.problems
    assert message in problem


def test_data_that_cannot_work_are_refused_before_a_model_is_built(task, write_rows):
    path = str(write_rows("rows.jsonl", [{"text": "a b c"}, {"text": None}, {"text": ""}]))
    for fields, message in (
        ({"block_length": 15}, r"^task.block_length=15 needs 16 tokens or more; the train split has 15\. Lower it"),
        ({"text_column": "txt"}, r"^task.text_column=txt is not a column of the train split\. .* Did you mean 'text'\?$"),
        (
            {"dataset": "json", "data_files": {"train": path, "eval": path}},
            "^The train split has no text in column 'text' at row 1",
        ),
    ):
        with pytest.raises(DataError, match=message):
            task(**fields).datasets()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_position_embeddings": 3}, "task.block_length=4 exceeds the model's 3 positions. Lower it."),
        (
            {"hidden_size": 15},
            "task.model_config cannot be used: hidden_size=15 is not a multiple of 2 * num_attention_heads=4.",
        ),
        ({"nhead": 3}, "task.model_config.nhead is not a key of TransformerLMConfig."),
        ({"model_type": "transformer"}, "'transformer' is not known to transformers. Did you mean 'transformer_lm'?"),
    ],
)
def test_model_that_cannot_work_is_refused(task, config, message):
    made = task(model_config=config if "model_type" in config else OWN | config)
    made.datasets()
    with pytest.raises(ConfigError, match=re.escape(message)):
        made.build_model()


def test_tokenizer_that_knows_more_than_the_model_is_refused(task, subwords, tmp_path):
    made = task()
    made.datasets()
    made.save(made.build_model(), tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"^The tokenizer has \d+ tokens, but task.model=.*/model has only 8\. Set task.tokenizer=null"
    ):
        task(model=str(tmp_path / "model"), model_config={}, tokenizer=subwords).build_model()


def test_counted_pairs_are_probabilities_and_a_pair_tells_more_than_a_word():
    draw = np.random.RandomState(0)
    train = draw.randint(0, 5, 200)
    train[1::2] = (train[::2] + 1) % 5  # every other word follows from the one before it
    for before in range(6):  # the last of them never seen
        total = sum(1 / bigram_perplexity(train, np.array([before, after]), 6) for after in range(6))
        assert total == pytest.approx(1)
    assert sum(1 / unigram_perplexity(train, np.array([0, after]), 6) for after in range(6)) == pytest.approx(1)
    assert bigram_perplexity(train, train, 6) < 4 < unigram_perplexity(train, train, 6)


def test_the_article_recipe_sets_every_key_of_the_one_that_it_builds_on():
    """So that settings for data of one's own never change the article's."""
    own, base = (flat(yaml.safe_load(recipe_path(name).read_text())) for name in ("wikitext2", "language_modeling"))
    assert own.keys() >= base.keys() - {"task.type"} and own["base"] == "language_modeling"


def test_the_recipe_for_own_texts_needs_only_a_file(tmp_path):
    (path := tmp_path / "all.txt").write_text("a line of text\n" * 40)
    words = (f"task.data_files.train={path}", "task.eval_share=0.1", "task.block_length=8")
    recipe = Recipe.load("language_modeling_demo", *words)
    recipe.validate()
    assert recipe.task.test_split is None and [*recipe.task.datasets()] == ["train", "eval"]
    assert type(recipe.task.build_model()).__name__ == "GPT2LMHeadModel"
