"""Draw the pictures of the documentation that explain: python docs/assets/draw.py writes them beside this file.

Each is 360 wide, the width of a phone's column, with texts of 12, and has a light and a dark palette of its own.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

LIGHT = {"page": "#f5f6f8", "text": "#1a1f25", "muted": "#56606b", "line": "#8a939d", "empty": "#dde1e6"}
LIGHT |= {"a": "#b5daf0", "b": "#ffcfae", "c": "#aee3d1", "d": "#ecc6de"}
DARK = {"page": "#171c22", "text": "#e6eaee", "muted": "#9ba6b2", "line": "#6b7682", "empty": "#2c343d"}
DARK |= {"a": "#0d4e78", "b": "#7a3c0c", "c": "#0c5845", "d": "#6b3055"}
WIDTH, FIRST = 360, 64
"""Of a picture, and where its rows begin, right of their names."""


def style() -> str:
    """Return the rules of all pictures: fills by the names of the palettes."""
    light, dark = (
        "".join(f".{name}{{fill:{colour}}}" for name, colour in palette.items()) + f".rule{{stroke:{palette['line']}}}"
        for palette in (LIGHT, DARK)
    )
    own = "text{font:12px system-ui,sans-serif}.bold{font-weight:600}.mid{text-anchor:middle}.rule{fill:none;stroke-width:1.5}"
    return f"<style>{own}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def say(x: float, y: float, words: str, kind: str = "text") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, kind: str, words: str = "", height: float = 18) -> str:
    inside = say(x + width / 2, y + height / 2 + 4, words, "text mid") if words else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>{inside}'


def rule(path: str) -> str:
    return f'<path d="{path}" class="rule"/>'


def picture(height: int, what: str, *parts: str) -> str:
    """Return a picture of this height, with its title for those who do not see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    page = f'<rect width="{WIDTH}" height="{height}" class="page"/>'
    return "\n".join([head, f"<title>{escape(what)}</title>", style(), page, *parts, "</svg>\n"])


def global_batch() -> str:
    """Draw the 16 micro-batches of a step on one process and on four, over time."""
    parts = [say(10, 20, "One step: 128 samples in 16 micro-batches of 8", "text bold"), say(10, 42, "on 1 process", "text")]
    parts += [box(10 + 21.4 * index, 50, 19, "abcd"[index % 4], str(index + 1)) for index in range(16)]
    parts.append(say(10, 92, "on 4 processes", "text"))
    for process in range(4):
        y = 100 + 22 * process
        parts += [box(10 + 21.4 * turn, y, 19, "abcd"[process], str(4 * turn + process + 1)) for turn in range(4)]
        parts.append(say(100, y + 13, f"process {process}", "muted"))
    parts += [rule("M172 100h6v84h-6M178 142h14"), say(198, 138, "sum of all 128 losses"), rule("M198 144h124")]
    parts += [say(198, 159, "number of their items"), say(198, 180, "the same loss", "text bold")]
    parts += [rule("M10 204h336l-5-4m5 4l-5 4"), say(10, 222, "time", "muted")]
    return picture(230, "A global batch of 16 micro-batches, on one process and on four: the same sum", *parts)


def packing() -> str:
    """Draw the tokens of four texts, with padding and without."""
    lengths, cell = (9, 4, 6, 3), 15.4
    tokens = sum(lengths)
    parts = [say(10, 20, "With padding: 36 places for 22 tokens", "text bold")]
    for row, length in enumerate(lengths):
        y = 30 + 21 * row
        parts += [box(10 + cell * k, y, cell - 2, "abcd"[row] if k < length else "empty") for k in range(max(lengths))]
        parts.append(say(158, y + 13, f"text {row + 1}" + (f", {9 - length} empty places" if length < 9 else ""), "muted"))
    parts.append(say(10, 142, f"Without: the {tokens} tokens, side by side", "text bold"))
    start = 0
    for row, length in enumerate(lengths):
        x = 10 + cell * start
        parts += [box(x + cell * k, 152, cell - 2, "abcd"[row]) for k in range(length)]
        parts += [
            rule(f"M{x:g} 174v5h{cell * length - 2:g}v-5"),
            say(x + cell * length / 2, 194, f"text {row + 1}", "muted mid"),
        ]
        start += length
    parts.append(say(10, 216, "Each text attends to itself only: the same losses."))
    return picture(226, "Tokens of four texts in a micro-batch, with padding and without", *parts)


def elastic_rounds() -> str:
    """Draw three machines, one of which is lost and comes back: three rounds."""
    parts = [say(10, 20, "A job on 2 to 3 machines: three rounds", "text bold")]
    rounds = ((FIRST, 100, "a", "1 to 47"), (FIRST + 104, 90, "b", "41 to 80"), (FIRST + 198, 88, "c", "81 to 125"))
    for number, (x, width, _, steps) in enumerate(rounds, start=1):
        parts += [say(x + width / 2, 42, f"round {number}", "text mid"), say(x + width / 2, 58, steps, "muted mid")]
    for row, machine in enumerate("ABC"):
        y = 66 + 26 * row
        parts.append(say(10, y + 13, f"node {machine}"))
        parts += [box(x, y, width, kind) for x, width, kind, _ in rounds if (machine, kind) != ("C", "b")]
    parts += [say(FIRST + 108, 131, "lost", "text"), say(10, 58, "steps", "muted")]
    parts += [rule(f"M{x} 148v14") for x in (FIRST + 86, FIRST + 196)]
    parts += [say(FIRST + 86, 176, "checkpoint, step 40", "muted mid"), say(FIRST + 200, 176, "step 80", "muted mid")]
    parts.append(say(10, 202, "Node C is lost in step 47: A and B go on from step 40."))
    parts.append(say(10, 220, "C comes back after step 80: a checkpoint, and on."))
    parts.append(say(10, 244, "The samples of each step stay the same.", "text bold"))
    return picture(254, "Three rounds of an elastic job: a machine is lost, and comes back", *parts)


def replay() -> str:
    """Draw the way from a checkpoint to a step that is computed again."""
    cell = 28
    parts = [
        say(10, 20, "hftune replay outputs/yelp --step 47", "text bold"),
        say(10, 44, "the run's ledger: loss of each step", "muted"),
    ]
    for index, step in enumerate(range(40, 52)):
        x = 10 + cell * index
        parts.append(box(x, 52, cell - 3, "d" if step == 47 else "empty", str(step), 22))
        parts += [box(x, 122, cell - 3, "d" if step == 47 else "a", str(step), 22)] if 40 < step <= 47 else []
    parts += [box(10, 122, cell - 3, "c", "40", 22), say(10, 164, "checkpoint", "muted"), rule("M22.5 80v38")]
    parts += [rule("M218.5 78v40m-4-5l4 5l4-5m-8-30l4-5l4 5"), say(228, 103, "equal to the bit")]
    parts.append(say(110, 164, "computed again: steps 41 to 47", "muted"))
    return picture(174, "A replay of step 47: from checkpoint 40, compared with the ledger", *parts)


PICTURES = {"global-batch": global_batch, "packing": packing, "elastic-rounds": elastic_rounds, "replay": replay}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), encoding="utf-8")
