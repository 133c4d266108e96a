"""The parts that both pages are made of: sections with headings, what unfolds, what can be copied. Knows no run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hftune.reporting.elements import Html, element, join


@dataclass
class Section:
    """A part of the page with a heading, which the list of sections leads to."""

    title: str
    content: Sequence[Html]
    note: str = ""
    class_: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    def html(self) -> Html:
        intro = [element("p", self.note, class_="note")] if self.note else []
        heading = element("h2", self.title, dir="auto")
        return element("section", heading, *intro, *self.content, id=self.anchor, class_=self.class_ or None)


def layout(header: Html, sections: Sequence[Section | None]) -> Html:
    button = element("button", "Theme", id="theme", type="button", title="Change between light and dark")
    written = f"Written by hftune on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. This file needs no network."
    shown = [part for part in sections if part]
    nav = element("nav", *(element("a", part.title, href=f"#{part.anchor}") for part in shown), aria_label="Sections")
    return join([header, nav, element("main", *(part.html() for part in shown)), element("footer", written), button])


def section(title: str, *content: Html | None, note: str = "", class_: str = "") -> Section | None:
    """Return a section; None if it has no content."""
    found = [part for part in content if part]
    return Section(title, found, note, class_) if found else None


def folded(title: str, content: Html) -> Html:
    return element("details", element("summary", title), content)


def titled(title: str, content: Html) -> Html:
    return join([element("h3", title), content])


def code(value: Any) -> Html | None:
    return element("code", value) if value else None


def copyable(text: str) -> Html:
    """Return a text as it stands, with a button that copies it."""
    button = element("button", "Copy", type="button", class_="copy")
    return element("div", element("pre", element("code", text), tabindex="0"), button, class_="source")
