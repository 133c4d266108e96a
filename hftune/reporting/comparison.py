"""The page of several runs: curves on top of each other, results side by side, and what differs between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hftune.errors import cut, is_number
from hftune.metrics.records import title_of
from hftune.replay.comparison import compare
from hftune.replay.findings import Finding, findings, remarks
from hftune.replay.run_record import RunRecord, flat, plain
from hftune.reporting.blocks import Cell, Section, bullets, code, figure, section, table, text
from hftune.reporting.confusion import confusion
from hftune.reporting.sections import curves_section, lower_first, notices
from hftune.tracking.console import duration


def comparison_sections(runs: Sequence[RunRecord], are_selected: bool = False) -> list[Section | None]:
    """Return the sections. Runs ``are_selected`` if they are the best of more: no means over their seeds then."""
    compared = compare(runs)
    if are_selected:
        compared.methods, compared.method_differences = [], []
    recipes = [{key: value for key, value in run.recipe.items() if key not in ("output_dir", "resume")} for run in runs]
    own = ("command", "started", "notices", "recipe", "labels")  # which explain no difference of results
    facts = [
        flat({name: value for name, value in run.facts.items() if name not in own})
        or flat({"versions": run.result.get("versions"), "processes": run.result.get("world_size")})
        for run in runs
    ]
    matrices = [
        confusion(run.log.matrices["eval"][1], run.class_names) | {"index": index, "name": run.name}
        for index, run in enumerate(runs)
        if "eval" in run.log.matrices
    ]
    names = (
        "A is {}, B is {}."
        if len(runs) == 2
        else "Each run is compared with the first, {}. For more on two of them: hftune compare A B"
    )
    return [
        comparison_section(runs),
        section("How they compare", text(names.format(*(run.name for run in runs))), bullets(remarks(compared))),
        *map(finding_section, findings(compared)),
        curves_section(runs),
        differences_section("Differences of the recipes", runs, recipes, "The recipes are the same."),
        differences_section("Other differences", runs, facts),
        section("Confusion matrices", {"kind": "cards", "cards": matrices} if matrices else None),
        side_by_side_section(runs),
        *(notices(run, f"Notices of {run.name}") for run in runs),
    ]


def comparison_section(runs: Sequence[RunRecord]) -> Section | None:
    """Return a row for each run: its best metric first, then the last value of each metric that any of them has."""
    points = [run.best_point() for run in runs]
    metrics = list(dict.fromkeys(point[0] for point in points if point))
    keys = list(dict.fromkeys(key for run in runs for key in run.log.curves if key.startswith(("eval/", "test/"))))
    head = ["run", *(f"best {lower_first(title_of(f'eval/{name}'))}" for name in metrics), "at step"]
    head += [
        f"{'last' if key.startswith('eval/') else 'test'} {lower_first(title_of(key)).removeprefix('evaluation ')}"
        for key in keys
    ]
    head += ["steps", "time", "processes"]
    rows = []
    for index, (run, point) in enumerate(zip(runs, points, strict=True)):
        row: list[Any] = [Cell("run", run.name, mark=str(index))]
        row += [point[2] if point and point[0] == name else None for name in metrics]
        row.append(point[1] if point else None)
        row += [run.log.curves[key].last() if key in run.log.curves else None for key in keys]
        seconds = run.result.get("seconds")
        row += [run.log.last_step, figure(duration(seconds)) if is_number(seconds) else None]
        row.append(run.facts.get("processes") or run.result.get("world_size"))
        rows.append(row)
    return section("Results", table(head, rows, class_="rows all"))


def finding_section(finding: Finding) -> Section | None:
    """Return what ``hftune compare`` says, with its numbers to the right, and a mark at what is likely."""

    def cell(text: str) -> str | Cell | None:
        if not text:
            return None
        text = text.replace("+-", "\N{PLUS-MINUS SIGN}")
        if text == "likely":
            return Cell("verdict", text)
        return figure(text) if re.fullmatch(r"[-+\d.,e%() \N{PLUS-MINUS SIGN}]*", text) else text

    blocks = []
    for part in finding.parts:
        if isinstance(part, str):
            blocks.append(text(part.replace("+-", "\N{PLUS-MINUS SIGN}")))
        else:
            blocks.append(table(part[0], [[*map(cell, row)] for row in part[1:]], class_="rows"))
    return section(finding.title, *blocks)


def differences_section(
    title: str, runs: Sequence[RunRecord], values: Sequence[Mapping[str, Any]], same: str = ""
) -> Section | None:
    """Return a table of the keys whose values differ."""
    rows = []
    for key in dict.fromkeys(key for one in values for key in one):
        found = [(cut(plain(one[key]), 200) or '""') if key in one else None for one in values]
        if len({*found}) > 1:
            rows.append([code(key), *(Cell("absent", "") if value is None else code(value) for value in found)])
    if not rows:
        return section(title, text(same, "empty")) if same and any(values) else None
    class_ = "differences" if len(runs) == 2 else "differences rows"  # more columns do not fit on a phone
    return section(title, table(["key", *(run.name for run in runs)], rows, class_=class_))


def side_by_side_section(runs: Sequence[RunRecord]) -> Section | None:
    """Return the first samples with what each run made of them, if all runs evaluated the same samples."""
    rows = [run.predictions.first for run in runs]
    if not all(rows):
        return None
    columns = list(dict.fromkeys(key for first in rows for row in first for key in row))
    count = min(map(len, rows))

    def agree(column: str) -> bool:
        return all(len({plain(first[index].get(column)) for first in rows}) == 1 for index in range(count))

    given = [column for column in columns if agree(column)]
    made = [column for column in columns if column not in given and any(isinstance(row.get(column), str) for row in rows[0])]
    if not made or not any(isinstance(rows[0][0].get(column), str) for column in given):
        return None
    head = [*given, *(f"{column}: {run.name}" for column in made for run in runs)]
    body = [
        [*(rows[0][index].get(column) for column in given), *(first[index].get(column) for column in made for first in rows)]
        for index in range(count)
    ]
    return section("The same samples", table(head, body, class_="rows"), note=f"The first {count} of the last evaluations.")
