"""Words and their tags: checked, aligned with tokens, and joined to entities. Independent of tasks and models.

Tags of entities are written as in IOB2: B-PER for the first word of a person's name, I-PER for those inside it, O for all
others; or with S- and E- as well, for single and last words (IOBES).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets

WORD = re.compile(r"\w+|[^\w\s]")
"""A word, or a punctuation mark, as corpora with tags have them."""


def read_tags(
    rows: datasets.Dataset, words_column: str, tags_column: str, split: str, row_of: Callable[[int], int]
) -> list[list[Any]]:
    """Return the tags of each row: names if the data have any, else whole numbers.

    Args:
        row_of: translates an index of ``rows`` to the row in the data, for messages.

    Raises:
        DataError: a column does not hold lists, or a row has no words, or as many tags as words.
    """
    from hftune.data.columns import is_label, is_list, is_text

    for column, what, holds in ((words_column, "words", is_text), (tags_column, "tags", is_label)):
        if not is_list(kind := rows.features[column], holds):
            raise DataError(
                f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not lists of {what}. "
                'A line of a jsonl file looks like {"tokens": ["In", "Rome"], "ner_tags": ["O", "B-LOC"]}.'
            )
    for index, (words, tags) in enumerate(zip(rows[words_column], rows[tags_column], strict=True)):
        if not words or any(word is None or not word.strip() for word in words):
            wrong = f"{'an empty word' if words else 'no words'} in column {words_column!r}. Fill it in, or remove it."
        elif tags is None or len(tags) != len(words):
            wrong = f"{len(words)} words and {len(tags or [])} tags. Give each word one tag."
        elif any(tag is None or (isinstance(tag, str) and not tag.strip()) for tag in tags):
            wrong = f"a word without a tag in column {tags_column!r}. Tags outside of entities are O."
        else:
            wrong = None
        if wrong is not None:
            raise DataError(f"Row {row_of(index)} of the {split} split has {wrong}")
    return named_tags(rows[tags_column], getattr(rows.features[tags_column].feature, "names", None))


def named_tags(tags: Sequence[Sequence[Any]], names: Sequence[str] | None) -> list[list[Any]]:
    """Return tags with names instead of numbers, if the data have names."""
    if not names:
        return [list(listed) for listed in tags]
    return [[names[tag] if isinstance(tag, int) and 0 <= tag < len(names) else tag for tag in listed] for listed in tags]


def tag_names(tags: Sequence[Sequence[Any]], column: str) -> list[str]:
    """Return the distinct tags in alphabetical order, O first.

    Raises:
        DataError: they are numbers, whose meaning nobody knows.
    """
    distinct = {tag for listed in tags for tag in listed}
    if numbers := [tag for tag in distinct if not isinstance(tag, str)]:
        raise DataError(
            f"Column {column!r} holds numbers without names, from {min(numbers)} to {max(numbers)}. Name them in "
            "task.label_names, in their order, such as [O, B-PER, I-PER]."
        )
    return sorted(distinct, key=lambda tag: (tag != "O", tag.partition("-")[2], tag))


def joins_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer would read the words of a list as one word, as RoBERTa's does: to it a space begins a word."""
    return '"type":"ByteLevel","add_prefix_space":false' in tokenizer.backend_tokenizer.to_str().replace(" ", "")


def word_ids(
    texts: Sequence[Sequence[str]], tokenizer: Any, max_length: int
) -> tuple[list[list[int]], list[list[int | None]], list[bool]]:
    """Tokenize texts that are lists of words.

    Returns:
        the token ids of each text, at most ``max_length``; the word that each token belongs to, None for special tokens; and
        whether the text had more tokens.
    """
    from hftune.data.tokenized import truncated

    encoded, cut = truncated(tokenizer, max_length, [list(words) for words in texts], is_split_into_words=True)
    return encoded["input_ids"], [encoded.word_ids(index) for index in range(len(texts))], cut


def windows(
    texts: Sequence[Sequence[str]], tokenizer: Any, max_length: int
) -> tuple[list[list[int]], list[list[int | None]], list[int]]:
    """Tokenize texts that are lists of words, a long one in several windows, of which two in a row share a quarter.

    Returns:
        the token ids of each window, at most ``max_length``; the word that each token belongs to; and the text of each window.
    """
    room = max_length - tokenizer.num_special_tokens_to_add()
    encoded = tokenizer(
        [list(words) for words in texts],
        is_split_into_words=True,
        truncation=True,
        max_length=max_length,
        stride=room // 4,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids = encoded["input_ids"]
    return ids, [encoded.word_ids(index) for index in range(len(ids))], encoded["overflow_to_sample_mapping"]


def first_tokens(words: Sequence[int | None]) -> Iterator[int | None]:
    """Yield, for each token, the word that it is the first token of; None for all others."""
    before = None
    for word in words:
        yield word if word != before else None
        before = word


@dataclass(frozen=True)
class Word:
    """A word and its place in its text."""

    text: str
    start: int
    end: int


def checked_words(value: Any, index: int) -> list[Word]:
    """Cut a text into words and punctuation marks; a list of words is joined by spaces.

    Raises:
        DataError: an input is neither, or empty.
    """
    if isinstance(value, str):
        found = [Word(match[0], match.start(), match.end()) for match in WORD.finditer(value)]
    elif isinstance(value, (list, tuple)) and all(isinstance(word, str) and word.strip() for word in value):
        found, start = [], 0
        for word in value:
            found.append(Word(word, start, start + len(word)))
            start += len(word) + 1
    else:
        raise DataError(f"Input {index} is neither a text nor a list of words.")
    if not found:
        raise DataError(f"Input {index} is an empty text.")
    return found


def is_entity_scheme(names: Collection[str]) -> bool:
    """Return whether all tags are O or begin with B-, I-, S- or E-."""
    return "O" in names and len(names) > 1 and all(name == "O" or name[:2] in ("B-", "I-", "S-", "E-") for name in names)


def spans_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the type, first word and end of each entity. An inside tag that continues nothing begins an entity."""
    spans: list[tuple[str, int, int]] = []
    is_open = False
    for place, tag in enumerate(tags):
        position, _, kind = tag.partition("-")
        if position in ("I", "E") and is_open and spans[-1][0] == kind:
            spans[-1] = (kind, spans[-1][1], place + 1)
        elif position != "O":
            spans.append((kind, place, place + 1))
        is_open = position in ("B", "I")
    return spans


def entities_of(words: Sequence[Word], tags: Sequence[str], probabilities: Sequence[float]) -> list[dict[str, Any]]:
    """Return type, text, place in the text, and the mean of the probabilities of its tags, of each entity."""
    found = []
    for kind, start, end in spans_of(tags):
        text = words[start].text
        for before, word in zip(words[start:end], words[start + 1 : end], strict=False):
            text += " " * (word.start - before.end) + word.text
        probability = round(sum(probabilities[start:end]) / (end - start), 6)
        place = {"start": words[start].start, "end": words[end - 1].end}
        found.append({"type": kind, "text": text, **place, "probability": probability})
    return found


def bracketed(words: Sequence[str], tags: Sequence[str]) -> str:
    """Return a text with its entities in brackets, "[Ada Lovelace PER] lived in [London LOC]", or with tags behind words."""
    if not all(tag == "O" or tag[:2] in ("B-", "I-", "S-", "E-") for tag in tags):
        return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))
    parts, done = [], 0
    for kind, start, end in spans_of(tags):
        parts += [*words[done:start], f"[{' '.join(words[start:end])} {kind}]"]
        done = end
    return " ".join([*parts, *words[done:]])
