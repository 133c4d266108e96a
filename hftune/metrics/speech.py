"""Error rates of recognized speech. Independent of models and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hftune.errors import ConfigError


def error_rates(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return wer and cer: the least insertions, deletions and substitutions of words, or of characters, that turn references
    into texts, by the words or characters of all references together. They may exceed 1.

    Raises:
        ConfigError: jiwer is not installed.
    """
    jiwer = _jiwer()
    return {"wer": jiwer.wer([*references], [*texts]), "cer": jiwer.cer([*references], [*texts])}


def character_errors(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the cer of each text."""
    jiwer = _jiwer()
    return [jiwer.cer(reference, text) for text, reference in zip(texts, references, strict=True)]


def _jiwer() -> Any:
    try:
        import jiwer
    except ImportError as error:
        raise ConfigError('Word error rates need jiwer: pip install "hftune[audio]"') from error
    return jiwer
