"""Trains the vocabulary of a JiebaTokenizer on a corpus. Independent of models and tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path

from datasets.fingerprint import Hasher
from transformers.models.bert.tokenization_bert_legacy import BasicTokenizer

from hftune.atomic import atomic_path
from hftune.data.cache import cache_dir, explained
from hftune.data.files import check_corpus, format_of
from hftune.data.jieba_tokenizer import SPECIAL_TOKENS, JiebaTokenizer, check_tokenizer, lower
from hftune.data.jieba_words import segment
from hftune.data.rows import load_files
from hftune.errors import ConfigError, DataError


def write_vocabulary(files: Sequence[str], columns: Sequence[str], size: int, folder: Path) -> dict[str, float]:
    """Train a vocabulary on texts in files and write its tokenizer into ``folder``, for ``task.vocabulary``.

    Args:
        files: .txt, one text per line; or .json, .jsonl, .csv, .tsv, .parquet or .arrow, whose ``columns`` are used.
        size: maximum number of tokens in the vocabulary.

    Returns:
        tokens, the size of the vocabulary; characters_per_token and unknown_share (in [0, 1]) on the first 1,000 texts.

    Raises:
        ConfigError: a file is missing or of an unknown type, ``size`` has no room for words, or the folder has other content.
        DataError: a file cannot be read, lacks the columns, or has no text.
    """
    if folder.exists() and not (folder / "vocab.txt").is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder} contains files other than a vocabulary. Choose a different folder, or empty it.")
    tokenizer = save_tokenizer(train_vocabulary(texts := _read(files, columns), size))
    try:
        check_tokenizer(tokenizer, str(folder))  # as loading it does
    except ConfigError as error:
        raise ConfigError(f"{size} tokens are too few for these texts, or they are not Chinese. {error}") from error
    tokenizer.save_pretrained(folder)
    tokens = [token for text in texts[:1000] for token in tokenizer.tokenize(text)]
    return {
        "tokens": len(tokenizer),
        "characters_per_token": sum(map(len, texts[:1000])) / len(tokens),
        "unknown_share": tokens.count(tokenizer.unk_token) / len(tokens),
    }


def _read(files: Sequence[str], columns: Sequence[str]) -> list[str]:
    texts: list[str] = []
    check_corpus(files)
    for file in map(Path, files):
        kind = format_of(file.name)
        rows = load_files(kind, str(file), [str(file)], "train")
        if not len(rows):
            continue
        for column in ["text"] if kind == "text" else columns:
            if column not in rows.column_names:
                raise DataError(f"{file} has no column {column!r}, only {', '.join(rows.column_names)}. Set --columns ...")
            if (dtype := getattr(rows.features[column], "dtype", None)) not in ("string", "large_string"):
                raise DataError(f"{file}: column {column!r} holds {dtype or 'lists'}, not text. Set --columns ...")
            texts += [text for text in rows[column] if text and text.strip()]
    if not texts:
        raise DataError(f"{', '.join(files)}: there is no text.")
    return texts


def train_vocabulary(texts: Iterable[str], size: int) -> list[str]:
    """Return an uncased vocabulary of at most ``size`` tokens for JiebaTokenizer, the lines of vocab.txt.

    In this order: SPECIAL_TOKENS; single characters by frequency, Latin letters and digits also with ##, at most half of the
    vocabulary; WordPiece pieces of Latin words and numbers, a tenth; jieba's words by frequency. Ties are broken by text, so
    that the same texts give the same vocabulary on every machine.

    Raises:
        ConfigError: ``size`` leaves no room for words.
    """
    room = size - len(SPECIAL_TOKENS)
    if room < 10:
        raise ConfigError(f"A vocabulary of {size} tokens has no room for words; use thousands.")
    words = Counter(chain.from_iterable(segment(lower(text)) for text in texts))
    cut = BasicTokenizer(do_lower_case=True).tokenize
    characters: Counter[str] = Counter()
    runs: Counter[str] = Counter()  # what WordPiece has to split: all but Han characters and punctuation
    whole: Counter[str] = Counter()
    for word, count in words.items():
        parts = cut(word)
        for part in parts:
            if len(part) > 1 or (part.isascii() and part.isalnum()):
                runs[part] += count
            else:
                characters[part] += count
        if len(word) > 1 and "".join(parts) == word:
            whole[word] = count
    for run, count in runs.items():
        for letter in run:
            characters[letter] += count
            characters[f"##{letter}"] += count
    vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *_by_frequency(characters)[: room // 2]])
    vocabulary |= dict.fromkeys(_pieces(runs, size // 10))
    for word in _by_frequency(whole):
        if len(vocabulary) >= size:
            break
        vocabulary.setdefault(word)
    return list(vocabulary)


def save_tokenizer(vocabulary: Sequence[str]) -> JiebaTokenizer:
    """Return the tokenizer of a trained vocabulary. vocab.txt stays in the cache: saving the tokenizer needs it.

    Raises:
        ConfigError: it cannot be written.
    """
    words = "\n".join(vocabulary) + "\n"
    path = cache_dir() / f"vocabulary-{Hasher.hash(words)}" / "vocab.txt"
    with explained():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_bytes() != words.encode():
            with atomic_path(path, is_shared=True) as temporary:  # other processes write the same text
                temporary.write_bytes(words.encode())
    return JiebaTokenizer(path)


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda text: (-counts[text], text))


def _pieces(runs: Counter[str], count: int) -> list[str]:
    """Train ``count`` WordPiece pieces of two or more characters, the most useful first.

    The letters are numbered in advance; otherwise, ties would depend on the order of a hash map (huggingface/tokenizers#1794).
    """
    from tokenizers import BertWordPieceTokenizer

    letters = sorted(set("".join(runs)))
    first = [*letters, *(f"##{letter}" for letter in letters)]
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(
        chain.from_iterable(repeat(run, runs[run]) for run in sorted(runs)),
        vocab_size=len(first) + count,
        min_frequency=2,
        special_tokens=first,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    vocabulary = trainer.get_vocab()
    return [piece for piece in sorted(vocabulary, key=vocabulary.get) if piece not in first]
