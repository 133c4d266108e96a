"""Byte-level tokenizers trained on the texts of a new model. Independent of models and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END = "<pad>", "</s>"
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of a new model."""
IMAGE = "<image>"
PARTS = "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
PICTURED_CHATML = CHATML.replace("message.content + '<|im_end|>", f"'' }}}}{PARTS}{{{{ '<|im_end|>")
"""The same for messages with pictures, whose content is a list of parts."""


def train_bytes(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (PAD, END)) -> str:
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
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if END in special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    return tokenizer.to_str()


def byte_tokenizer(trained: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``train_bytes`` trained: it ends each text with END, as T5's does."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained), pad_token=PAD, eos_token=END)


def chat_tokenizer(trained: str, pictured: bool = False) -> PreTrainedTokenizerBase:
    """Return a tokenizer that was trained with the special tokens PAD, TURN and END_OF_TURN, with ChatML as its template.

    Args:
        pictured: it was trained with IMAGE, too, and chats have pictures.
    """
    further = [TURN, IMAGE] if pictured else [TURN]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained), pad_token=PAD, eos_token=END_OF_TURN, additional_special_tokens=further
    )
    tokenizer.chat_template = PICTURED_CHATML if pictured else CHATML
    return tokenizer
