"""Write the table in docs/benchmarks.md from the result files in benchmarks/results, so that no figure in it is typed in.

    python benchmarks/measured.py

A figure is marked if its script, or a file that the script imports, has changed since it was measured, and if it was taken over
from an earlier README instead of measured into a result file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from record import HERE, RESULTS, fingerprint

START = "<!-- measured: what stands between these two comments is written by `make measured` -->"
END = "<!-- measured: end -->"
CHANGED, TAKEN_OVER = "†", "‡"
NOTES = {
    CHANGED: "The script has changed since.",
    TAKEN_OVER: "Taken over from an earlier README, which gave neither machine nor versions; the script has changed since.",
}


def main() -> None:
    page = HERE.parent / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(with_section(text, section(RESULTS, HERE)), encoding="utf-8")


def with_section(page: str, content: str) -> str:
    """Return the text of the page with ``content`` between the two comments.

    Raises:
        ValueError: the comments are not both there, once each and in this order.
    """
    if not (page.count(START) == page.count(END) == 1 and page.index(START) < page.index(END)):
        raise ValueError(f"docs/benchmarks.md needs the lines {START!r} and {END!r}, once each and in this order.")
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{content}\n\n{END}{rest.partition(END)[2]}"


def section(results: Path, scripts: Path) -> str:
    """Lay out the table, what its marks mean, and what was measured on which machine.

    Args:
        results: the folder of the result files.
        scripts: the folder of the scripts that they name.
    """
    rows, marks, machines = [], set(), {}
    for path in sorted(results.glob("*.json")):
        result = read(path)
        mark = mark_of(result, scripts)
        marks.add(mark.strip())
        where = describe(result)
        if where:
            machines.setdefault(where, []).append(f"`{result['script']}`")
        when = f"{result['date'][:10]}, {result['commit'] or 'no commit'}"
        rows += [(what, figure + mark, f"`{result['script']}`", when) for what, figure in result["measured"].items()]
    lines = ["| what | figure | script | measured |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines += [line for mark, note in NOTES.items() if mark in marks for line in ("", f"{mark} {note}")]
    if machines:
        lines += ["", *(f"- {', '.join(names)}: {where}." for where, names in machines.items())]
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: it was written under --smoke, whose figures mean nothing.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    if result.get("smoke"):
        raise ValueError(f"{path.name} was written under --smoke, which measures nothing. Run {result['script']} without it.")
    return result


def mark_of(result: dict[str, Any], scripts: Path) -> str:
    """Return the mark of a result's figures; none if the script is the one that measured them."""
    if "taken_over" in result:
        return f" {TAKEN_OVER}"
    script = scripts / result["script"]
    return "" if script.is_file() and fingerprint(script) == result["script_sha256"] else f" {CHANGED}"


def describe(result: dict[str, Any]) -> str:
    """Name machine and versions in a line; nothing if they are not known."""
    machine, versions = result.get("machine"), result.get("versions")
    if not machine or not versions:
        return ""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB{gpu}; {packages}"


if __name__ == "__main__":
    main()
