"""Byte-level tokenizers trained on the texts of a new encoder-decoder. Independent of models and tasks."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END = "<pad>", "</s>"


def train_bytes(texts: Iterable[str], vocab_size: int) -> str:
    """Train byte-pair encoding on the UTF-8 bytes of the texts, and return the tokenizer as JSON.

    Decoding gives back each text as it was, with its case, accents and spaces, as generated texts need it. Each digit is a
    token of its own. The same texts give the same tokenizer on every machine: the trainer numbers its alphabet by value, and
    breaks ties by number.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer.to_str()


def byte_tokenizer(trained: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``train_bytes`` trained: it ends each text with END, as T5's does."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained), pad_token=PAD, eos_token=END)
