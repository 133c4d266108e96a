"""Cuts Chinese into jieba's words, for the tokenizer of titles and for ROUGE. Independent of both."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.util import find_spec

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def segment(text: str) -> list[str]:
    """Split a text into the words of ``jieba.lcut(text, HMM=False)``. Nothing is lost; spaces are words, too.

    rjieba is 13 times as fast as jieba, with the same result (compared on 200,000 texts that cover all Unicode characters).
    """
    try:
        return _cutter()(text)
    except UnicodeEncodeError:  # Rust refuses half a surrogate pair; BERT drops it, as it drops \0.
        return _cutter()(_HALF_CHARACTER.sub("\0", text))


def segmenter() -> str:
    """Return the name of the package that ``segment`` uses."""
    return "rjieba" if find_spec("rjieba") else "jieba"


@functools.cache  # not at import, so that every process, also a spawned one, loads the dictionary on first use
def _cutter() -> Callable[[str], list[str]]:
    try:
        import rjieba

        return functools.partial(rjieba.cut, hmm=False)
    except ImportError:  # no wheel for this machine
        import jieba
    # Not from its cache file, which jieba keeps in the temporary folder for all users alike: it trusts any content and cannot
    # replace a file of a different user. Reading the dictionary instead takes a second more.
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return functools.partial(cutter.lcut, HMM=False)
