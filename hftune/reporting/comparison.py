"""The page of several runs: curves on top of each other, results side by side, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hftune.reporting.confusion import confusion
from hftune.reporting.curves import is_number, title_of
from hftune.reporting.elements import Figure, Html, cut, duration, element, plain, table
from hftune.reporting.layout import Section, code, layout, section
from hftune.reporting.run_record import RunRecord, flat
from hftune.reporting.sections import curves_section, lower_first, notices, state


def several_runs(runs: Sequence[RunRecord]) -> Html:
    title = element("div", element("h1", f"Comparison of {len(runs)} runs"), class_="title")
    entries = [
        element(
            "li",
            swatch(index),
            element("strong", run.name, dir="auto"),
            " ",
            element("span", run.title, dir="auto"),
            " ",
            state(run),
        )
        for index, run in enumerate(runs)
    ]
    sections = [
        comparison_section(runs),
        curves_section(runs),
        differences_section(
            "Differences of the recipes", runs, [recipe_keys(run) for run in runs], "The recipes are the same."
        ),
        differences_section("Other differences", runs, [fact_keys(run) for run in runs], ""),
        matrices_section(runs),
        side_by_side_section(runs),
        *(notices(run, f"Notices of {run.name}") for run in runs),
    ]
    return layout(element("header", title, element("ul", *entries, class_="runs")), sections)


def swatch(index: int) -> Html:
    """Return the mark of a run; report.js gives it the colour of its curves."""
    return element("span", class_="swatch", data_run=index, aria_hidden="true")


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
        row: list[Any] = [element("span", swatch(index), element("span", run.name, dir="auto"), class_="run")]
        row += [point[2] if point and point[0] == name else None for name in metrics]
        row.append(point[1] if point else None)
        row += [run.log.curves[key].last() if key in run.log.curves else None for key in keys]
        seconds = run.result.get("seconds")
        row += [run.log.last_step, Figure(duration(seconds)) if is_number(seconds) else None]
        row.append(run.facts.get("processes") or run.result.get("world_size"))
        rows.append(row)
    return section("Results", table(head, rows, class_="rows all"))


def recipe_keys(run: RunRecord) -> dict[str, Any]:
    """Return what a recipe says about the training; two runs never share their folder."""
    return {key: value for key, value in run.recipe.items() if key not in ("output_dir", "resume")}


def fact_keys(run: RunRecord) -> dict[str, Any]:
    """Return the facts that may explain a difference of results."""
    facts = flat(
        {name: value for name, value in run.facts.items() if name not in ("command", "started", "notices", "recipe", "labels")}
    )
    return facts or flat({"versions": run.result.get("versions"), "processes": run.result.get("world_size")})


def differences_section(
    title: str, runs: Sequence[RunRecord], values: Sequence[Mapping[str, Any]], same: str
) -> Section | None:
    """Return a table of the keys whose values differ."""
    keys = list(dict.fromkeys(key for one in values for key in one))
    absent = object()
    rows: list[list[Any]] = []
    for key in keys:
        found = [one.get(key, absent) for one in values]
        if len({plain(value) if value is not absent else "" for value in found}) > 1:
            cells = [
                element("span", "\N{EN DASH}", class_="none") if value is absent else code(scalar(value)) for value in found
            ]
            rows.append([code(key), *cells])
    if not rows:
        return section(title, element("p", same, class_="empty")) if same and any(values) else None
    class_ = "differences" if len(runs) == 2 else "differences rows"  # more columns do not fit on a phone
    return section(title, table(["key", *(run.name for run in runs)], rows, class_=class_))


def scalar(value: Any) -> str:
    """Return a value as a recipe has it."""
    return cut(value if isinstance(value, str) and value else plain(value), 200)


def matrices_section(runs: Sequence[RunRecord]) -> Section | None:
    cards = [
        element(
            "div",
            element("h3", swatch(index), run.name),
            confusion(run.log.matrices["eval"][1], run.class_names),
            class_="card",
        )
        for index, run in enumerate(runs)
        if "eval" in run.log.matrices
    ]
    return section("Confusion matrices", element("div", *cards, class_="cards")) if cards else None


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
