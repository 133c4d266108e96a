"""Pieces of HTML: escaped texts, tables, numbers for people, images as data URIs. Knows no run."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hftune.replay.metrics_log import is_number
from hftune.replay.run_record import cut, plain

SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SHORT_TEXT = 40
"""Characters of a text that has room beside others on a phone."""
IMAGE_BYTES = 40_000
"""PNG files up to this size are embedded as they are; greater ones as JPEG."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that HTML does not allow."""


class Html(str):
    """Text that is HTML already; every other text is escaped."""

    __slots__ = ()


class Figure(Html):
    """A number as HTML, such as "35.6 %"."""

    __slots__ = ()


def escape(value: Any) -> Html:
    """Return a value as HTML that shows it."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))))


def join(parts: Sequence[Html], between: str = "") -> Html:
    return Html(between.join(parts))


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """Return an element around its content, which is escaped; ``class_`` stands for class, ``_`` in other names for a hyphen.

    An attribute that is None or False is left out, one that is True has no value.
    """
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f'{name}="{escape(value)}"')
    opened = Html(f"<{' '.join(words)}>")
    return opened if tag in ("img", "input", "meta") else Html(f"{opened}{join([*map(escape, content)])}</{tag}>")


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str = "") -> Html:
    """Return a table. Numbers are right-aligned; of the class "rows", on a phone each row becomes a card."""
    kinds = [column_kind([row[column] for row in rows]) for column in range(len(head))]
    top = [element("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True)]
    body = []
    for row in rows:
        cells = zip(head, row, kinds, strict=True)
        body.append(element("tr", *(element("td", cell(value), data_label=name, class_=kind) for name, value, kind in cells)))
    found = element("table", element("thead", element("tr", *top)), element("tbody", *body), class_=class_ or None)
    return element("div", found, class_="wide")


def column_kind(values: Sequence[Any]) -> str | None:
    """Return the class of a column: "number", "long" if it has a long text, or none."""
    if values and all(map(is_figure, values)):
        return "number"
    return (
        "long"
        if any(isinstance(value, str) and not isinstance(value, Html) and len(value) > SHORT_TEXT for value in values)
        else None
    )


def is_figure(value: Any) -> bool:
    """Return whether a cell belongs in a column of numbers."""
    return value is None or isinstance(value, Figure) or is_number(value)


def cell(value: Any) -> Html:
    """Return the contents of a cell: a number shortened, a text in the direction of its script."""
    if value is None:
        return element("span", "\N{EN DASH}", class_="none", title="no value")
    if value == "":
        return element("span", "empty", class_="none")
    if isinstance(value, Html):
        return value
    if is_number(value):
        return escape(number(value))
    return element("span", cut(value if isinstance(value, str) else plain(value)), dir="auto", class_="text")


def number(value: float) -> str:
    """Format a number for reading, with four digits, since runs are compared: 0.8312, 0.7500, 31.50, 1,234, 2.40e-05."""
    size = abs(value)
    if size == 0 or (isinstance(value, int) and size < 10**15):
        return f"{value:,.0f}"
    if size >= 1e6 or size < 1e-3 or not math.isfinite(value):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:#.4g}".rstrip(".")


def quantity(value: float, unit: str) -> Figure:
    """Format a number with its unit; "%" is of a share, and bytes are counted in GB and the like, as in the curves."""
    if unit == "B":
        size, prefix = next(((size, prefix) for size, prefix in SIZES if abs(value) >= size), (1.0, ""))
        return Figure(f"{value / size:.3g} {prefix}B")
    return Figure(escape(f"{100 * value:.3g} %" if unit == "%" else f"{number(value)} {unit}".rstrip()))


def facts_list(facts: Mapping[str, Any]) -> Html:
    """Return names and values; those without a value are left out."""
    pairs = [
        element("div", element("dt", name), element("dd", cell(value)))
        for name, value in facts.items()
        if value not in (None, "", [], {})
    ]
    return element("dl", *pairs, class_="facts")


def duration(seconds: float) -> str:
    """Format seconds for reading: 8.2 s, 3 min 12 s, 2 h 05 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(text: Any) -> str | None:
    """Format a time as run.json has it: 2026-11-22 18:30 UTC; None if it is none."""
    try:
        then = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    zone = then.strftime("%Z")
    return f"{then:%Y-%m-%d %H:%M} {'UTC' if zone.startswith('UTC+00') else zone}".rstrip()


def millions(count: float) -> str:
    """Format a great number for reading: 109.5 million."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:,.0f}"


def image_uri(path: Path, width: int) -> tuple[str, tuple[int, int]] | None:
    """Return a data URI of an image at most ``width`` pixels wide, and its original size; None if it cannot be read."""
    from PIL import Image

    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
            if len(data) <= IMAGE_BYTES and size[0] <= width and image.format == "PNG":
                return data_uri("png", data), size
            image = image.convert("RGB")
            image.thumbnail((width, 4 * width))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=85)
    except (OSError, ValueError, Image.DecompressionBombError):  # removed, or being written
        return None
    return data_uri("jpeg", buffer.getvalue()), size


def data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
