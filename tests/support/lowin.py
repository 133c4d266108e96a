"""The jieba tokenizer's reference: Lowin's class, under transformers 4."""

from __future__ import annotations

import os
import re
from functools import cache

import jieba
from transformers import BertTokenizerLegacy

from hftune.data.jieba_tokenizer import JiebaTokenizer


def prepare_jieba():
    """Let jieba keep its cache file where the tests keep theirs, not where another user's may lie."""
    jieba.setLogLevel("ERROR")
    jieba.dt.tmp_dir = os.environ["HF_DATASETS_CACHE"]
    jieba.initialize()


def write(tokens, folder):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8", newline="\n")
    return folder / "vocab.txt"


class LowinTokenizer(BertTokenizerLegacy):
    """The authors' class on the Python-backed tokenizer, and what transformers 4 did before it called ``_tokenize``.

    Source: the readme of Lowin/chinese-bigbird-base-4096; transformers 4.6.1 to 4.57, PreTrainedTokenizer.tokenize.
    """

    def tokenize(self, text, **kwargs):
        if self.do_lower_case:
            text = lowered_but("|".join(map(re.escape, self.all_special_tokens)), text)
        return super().tokenize(text, **kwargs)

    def _tokenize(self, text, *args, **kwargs):
        tokens = []
        for word in jieba_words(text):
            if word in self.vocab:
                tokens.append(word)
            else:
                tokens.extend(super()._tokenize(word))
        return tokens


@cache  # for the second vocabulary
def lowered_but(special, text):
    return re.sub(rf"({special})|(.+?)", lambda match: match[1] or match[2].lower(), text)


@cache
def jieba_words(text):
    return jieba.lcut(text, HMM=False)


def assert_same_ids(vocab_file, texts, **kwargs):
    ours, reference = JiebaTokenizer(vocab_file, **kwargs), LowinTokenizer(str(vocab_file), **kwargs)
    different = [text for text, ids in zip(texts, ours(texts)["input_ids"], strict=True) if ids != reference.encode(text)]
    assert different == []
