# ruff: noqa: RUF001 - the tokens of DeepSeek have full-width bars
"""Tokenizers for chat templates: byte-level BPE, trained here on a few sentences, with the special tokens of a template."""

import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
SENTENCES = [
    "You are a helpful assistant. What is two plus three? The answer is five.\n\n\n It is sunny in Paris, 21 degrees.",
    'user system tool model think\n\nweather {"name": "weather", "arguments": {"city": "Paris"}}\n',
] * 3
SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen's tokenizers split texts, so that line breaks can merge across the end of a prompt."""
SPECIAL = r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<\|?turn\|?>|<\|?channel\|?>|<\|tool_\w+>|<tool_\w+\|>|\[/?[A-Z_]{3,}\]"
ORDINARY = r"</?think>|</?tool_call>|</?tool_response>|</?arg_\w+>"
"""Tokens of their own that are not special: users may write them."""


@cache
def _merges() -> str:
    """Return the trained tokenizer without special tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


def chat_tokenizer(template: str | None, eos: str = "</s>", bos: str = "<s>", more: tuple[str, ...] = ()):
    """Return a tokenizer with this template, and with all tokens in it that look like special ones."""
    special = sorted({*re.findall(SPECIAL, template or ""), *more} - {eos, bos})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_merges()), bos_token=bos, eos_token=eos, additional_special_tokens=special
    )
    ordinary = sorted(set(re.findall(ORDINARY, template or "")))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    tokenizer.chat_template = template
    return tokenizer


def shipped(name: str, **tokens):
    """Return a tokenizer with a template of tests/fixtures/chat_templates."""
    return chat_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), **tokens)
