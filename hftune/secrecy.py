"""Secrets in texts that people read: passwords and tokens of addresses, and tokens of well-known services."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = (
    r"(?<![a-z])sig(?![a-z])|signature|token(?!s|i[sz])|secret|passw|pwd|credential|auth(?!or(?!iz))|api[-_]?key|access[-_]?key|"
    r"key[-_]pair|account[-_]?key"
)
_FORMS = (
    # A user may stand alone, as in ssh://git@host and abfss://container@account, but for the web he may be a token, also before
    # an empty password or GitHub's x-oauth-basic.
    re.compile(r"https?:/{1,2}([^\s/'\":?#@]+)(?=:(?:x-oauth-basic)?@)", re.IGNORECASE),
    # A password should spell / and @ as %2F and %40, but does not always: after a user and a colon, everything up to the last @
    # goes. Nor does a user who is an e-mail address.
    re.compile(r":/{1,2}[^\s/'\"@:?#${]*:(?!\d+/)([^\s'\"]*)(?=@)"),
    re.compile(r"(?<!ssh):/{1,2}[^\s/'\"@:?#${]+@[^\s/'\"@:?#${]+:(?!\d+/)([^\s'\"]*)(?=@)"),
    re.compile(r"https?:/{1,2}([^\s/'\":?#]+)(?=@)", re.IGNORECASE),
    re.compile(rf"(?<=[?&;#])(?:[\w.%-]*(?:{_NAMES})[\w.%-]*|key)=([^\s&;#'\")]+)", re.IGNORECASE),
    re.compile(
        r"\b((?:hf_(?:oauth_)?|gh[oprsu]_)[A-Za-z0-9]{20,}|(?:github_pat_|glpat-|xox[abp]-|xapp-|sk-(?:proj|svcacct|ant-\w+)-)"
        r"[\w-]{20,}|dapi[0-9a-f]{32}|sk-[A-Za-z0-9]{20,}|A[KS]IA[0-9A-Z]{16})\b"
    ),
    re.compile(r"(?<=hooks\.slack\.com/services/)([\w/]+)"),
)
_REFERENCE = re.compile(r"\$\{[^{}]*\}")
HIDDEN = "..."


def without_secrets(text: str) -> str:
    """Return a text with ``...`` for each secret: https://me:...@host/x?sig=..."""

    def hidden(match: re.Match[str]) -> str:
        return match[0] if not _REFERENCE.sub("", match[1]) else match[0].removesuffix(match[1]) + HIDDEN

    for form in _FORMS:
        text = form.sub(hidden, text)
    return text


def keys_with_secrets(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of plain data that hold a secret, with their texts but for it. ``${oc.env:NAME}`` is none."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from keys_with_secrets(item, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from keys_with_secrets(item, key)
    elif isinstance(value, str):
        text = _REFERENCE.sub(HIDDEN, value)
        named = re.search(rf"\.storage_options\..*({_NAMES})", key, re.IGNORECASE)
        if named and text != HIDDEN:
            yield key, HIDDEN
        elif any(match[1].strip(".") for form in _FORMS for match in form.finditer(text)):
            yield key, without_secrets(value)
