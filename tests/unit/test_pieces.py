"""Token ids from remembered pieces: those that the tokenizer itself makes, whatever the text."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as cuts
from transformers import BertTokenizer, PreTrainedTokenizerFast

from hftune.data import pieces
from hftune.data.byte_tokenizer import byte_tokenizer, train_bytes
from hftune.data.demo import reviews
from hftune.data.pieces import cutter, pieces_of
from hftune.data.tokenized import to_ids, truncated
from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer

SPACES = "\n\t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
CHARACTERS = [*"aAbs'tréß.,!1234[]<>_-\"", *SPACES, *"\u0301\u0345\u1100\u1161\ufb01\u00a8\u03a3\u4f60\u0000\u00ad\u0130"]
PARTS = [*CHARACTERS, *[" "] * 14, "[MASK]", "[SEP]", "<pad>", "</s>", "'ll", "<mask>"]
RANDOM = random.Random(0)
TEXTS = [row["text"] for row in reviews("train")][:100]
ODD = ["".join(RANDOM.choices(PARTS, k=RANDOM.randint(0, 40))) for _ in range(800)]


def bpe(*cut, normalizer=None, mask=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = cuts.Sequence([*cut]), normalizer
    alphabet = cuts.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS + ODD, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    if mask is not None:
        found.add_special_tokens({"mask_token": mask})
    return found


def byte_level(prefix=False, regex=True):
    return cuts.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def split(pattern):
    return bpe(cuts.Split(Regex(pattern), "isolated"), byte_level(regex=False), normalizer=normalizers.NFC())


MADE = {
    "BERT": lambda: wordpiece_tokenizer(train_wordpiece(TEXTS + ODD, 800)),
    "cased BERT": lambda: BertTokenizer(vocab=train_wordpiece(TEXTS + ODD, 800), do_lower_case=False),
    "hftune's bytes": lambda: byte_tokenizer(train_bytes(TEXTS + ODD, 500)),
    "GPT-2": lambda: bpe(byte_level()),
    "with a prefix": lambda: bpe(byte_level(True), normalizer=normalizers.NFKC()),
    "digits": lambda: bpe(cuts.Digits(individual_digits=True), byte_level(True)),
    "a mask that takes space before it": lambda: bpe(byte_level(), mask=AddedToken("<mask>", lstrip=True)),
    **{f"split {number}": lambda pattern=pattern: split(pattern) for number, pattern in enumerate(sorted(pieces._PATTERNS))},
    "a mask that takes space behind it": lambda: bpe(byte_level(), mask=AddedToken("<mask>", rstrip=True)),
    "a token with a space": lambda: bpe(byte_level(), mask=AddedToken("a b")),
    "words and spaces": lambda: bpe(cuts.Metaspace(split=False)),
    "a pattern of its own": lambda: split(r"\S+ ?"),
}
WHOLE = {"a mask that takes space behind it", "a token with a space", "words and spaces", "a pattern of its own"}


@pytest.mark.parametrize("name", MADE)
def test_ids_and_what_is_cut_are_those_of_the_tokenizer(name, monkeypatch):
    monkeypatch.setattr(pieces, "REMEMBERED", 200)  # so that it forgets in between
    tokenizer = MADE[name]()
    assert (cutter(tokenizer.backend_tokenizer) is None) == (name in WHOLE)
    for side, longest in (("right", 512), ("right", 12), ("left", 12), ("right", 3)):
        tokenizer.truncation_side = side
        for start in range(0, 900, 300):
            some = (ODD + TEXTS)[start : start + 300]
            ids, cut = to_ids(some, tokenizer, longest)
            expected, cut_expected = truncated(tokenizer, longest, some)
            assert [[*map(int, row)] for row in ids] == expected["input_ids"] and cut == cut_expected


def test_long_pieces_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(pieces, "REMEMBERED", 1000)
    found = pieces_of(MADE["BERT"]())
    for number in range(100):
        found.ids([f"a {'b' * 100}{number}"])
        assert sum(map(len, found._known)) < 1200


def test_word_is_tokenized_once_and_texts_of_one_word_or_none_have_their_special_tokens():
    tokenizer = MADE["BERT"]()
    found, asked = pieces_of(tokenizer), []
    real = found._encoded
    found._encoded = lambda texts: asked.extend(texts) or real(texts)
    texts = ["the food was good", "the food was not good", "", "good"]
    ids, _ = to_ids(texts, tokenizer, 8)
    assert sorted(asked) == sorted([" food", " was", " good", " not", "the", "the", "", "good"])
    assert [row.tolist() for row in ids] == tokenizer(texts)["input_ids"]
    assert [row.tolist() for row in to_ids(["\x00"], tokenizer, 8)[0]] == tokenizer(["\x00"])["input_ids"]
