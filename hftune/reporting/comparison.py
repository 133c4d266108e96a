"""The page of several runs: curves on top of each other, results side by side, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hftune.metrics.records import record_of
from hftune.replay.comparison import Comparison, compare
from hftune.replay.differences import Difference
from hftune.replay.intervals import MIN_SEEDS, Interval
from hftune.replay.metrics_log import is_number
from hftune.replay.run_record import RunRecord, cut, flat, plain
from hftune.replay.sentences import (
    divergence_sentences,
    divergence_step,
    evaluation_sentence,
    kinds_sentences,
    mean_and_deviation,
    method_reading,
    metric_reading,
    plus_minus,
    training_sentence,
)
from hftune.reporting.blocks import (
    Block,
    Cell,
    Section,
    bullets,
    code,
    duration,
    figure,
    number,
    section,
    table,
    text,
)
from hftune.reporting.confusion import confusion
from hftune.reporting.sections import curves_section, lower_first, notices


def comparison_sections(runs: Sequence[RunRecord], are_selected: bool = False) -> list[Section | None]:
    """Return the sections. Runs ``are_selected`` if they are the best of more: no means over their seeds then."""
    compared = compare(runs)
    recipes, facts = [recipe_keys(run) for run in runs], [fact_keys(run) for run in runs]
    return [
        comparison_section(runs),
        divergences_section(compared),
        chance_section(compared),
        None if are_selected else seeds_section(compared),
        curves_section(runs),
        differences_section("Differences of the recipes", runs, recipes, "The recipes are the same."),
        differences_section("Other differences", runs, facts),
        matrices_section(runs),
        side_by_side_section(runs),
        *(notices(run, f"Notices of {run.name}") for run in runs),
    ]


def comparison_section(runs: Sequence[RunRecord]) -> Section | None:
    """Return a row for each run: its best metric first, then the last value of each metric that any of them has."""
    points = [run.best_point() for run in runs]
    metrics = list(dict.fromkeys(point[0] for point in points if point))
    keys = list(dict.fromkeys(key for run in runs for key in run.log.curves if key.startswith(("eval/", "test/"))))
    head = ["run", *(f"best {lower_first(record_of(f'eval/{name}').title)}" for name in metrics), "at step"]
    head += [
        f"{'last' if key.startswith('eval/') else 'test'} {lower_first(record_of(key).title).removeprefix('evaluation ')}"
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


def divergences_section(compared: Comparison) -> Section | None:
    """Return where the runs diverge from the first, and why."""
    if len(compared.pairs) > 1:
        head = ["run", "diverges in step", "verdict", "kind", "difference"]
        rows = [
            [pair.b, figure(divergence_step(pair.divergence)), *(verdict(cause) if cause else [None, None, None])]
            for pair in compared.pairs
            for cause in [cause for cause in pair.divergence.causes if cause.is_likely] or [None]
        ]
        note = f"Each run beside {compared.pairs[0].a}, with the likely causes. hftune compare shows two runs in full."
        return section("Where the runs diverge", table(head, rows, class_="rows"), remarks(compared), note=note)
    (pair,) = compared.pairs
    causes = [verdict(cause) for cause in pair.divergence.causes]
    return section(
        "Where the runs diverge",
        text(divergence_sentences(pair.divergence)),
        table(["verdict", "kind", "difference"], causes, class_="rows"),
        *(text(sentence, "note") for sentence in kinds_sentences(pair.divergence)),
        remarks(compared),
        note=f"A is {pair.a}, B is {pair.b}.",
    )


def verdict(cause: Difference) -> list[Any]:
    """Return the cells of a cause."""
    mark = Cell("verdict", cause.verdict, mark="likely" if cause.is_likely else "")
    return [mark, cause.kind, Cell("cause", cause.text, mark=cause.reason or "")]


def remarks(compared: Comparison) -> Block | None:
    """Return what runs changed on their way, and what is not known of them."""
    lines = [
        f"{run.name}, from step {step:,} on, after a resume: {'; '.join(changes)}"
        for run in compared.runs
        for step, changes in run.changes
    ]
    for run in compared.runs:
        lines += [
            *run.missing,
            *(f"The ledger of {run.name} is not what was written. {problem}" for problem in run.problems[:1]),
        ]
    return bullets(lines)


def chance_section(compared: Comparison) -> Section | None:
    """Return what the losses and metrics of two runs differ by, and whether that may be chance."""
    if len(compared.pairs) > 1:
        return None
    (pair,) = compared.pairs
    rows = [
        [record_of(f"eval/{one.name}").title, one.a, one.b, interval_figure(one.interval), metric_reading(one)]
        for one in pair.evaluation.metrics
    ]
    loss = text(with_sign(training_sentence(pair.training))) if pair.training and pair.divergence.step is not None else None
    if not loss and not rows:
        return None
    metrics = table(["", "A", "B", "B less A, 95 % interval", ""], rows, class_="rows")
    return section("More than chance?", loss, text(evaluation_sentence(pair.evaluation)), metrics)


def seeds_section(compared: Comparison) -> Section | None:
    """Return the means over the seeds of each method, and what they differ by."""
    if not compared.methods:
        return None
    names = list(dict.fromkeys(name for method in compared.methods for name in method.metrics))
    rows = [
        [code(method.name), len(method.runs), *(mean_figure(method.metrics.get(name)) for name in names)]
        for method in compared.methods
    ]
    differences = [
        [code(one.method), record_of(f"eval/{one.metric}").title, interval_figure(one.interval), method_reading(one)]
        for one in compared.method_differences
        if one.interval is not None
    ]
    head = ["recipe", "difference of", "mean, 95 % interval", ""]
    return section(
        "Over the seeds",
        table(["recipe", "seeds", *(record_of(f"eval/{name}").title for name in names)], rows, class_="rows"),
        table(head, differences, class_="rows", title=f"Less {compared.methods[0].name}"),
        note=f"Mean, and deviation in brackets. An interval takes {MIN_SEEDS} seeds of each.",
    )


def interval_figure(interval: Interval | None) -> Cell | None:
    return None if interval is None else figure(with_sign(plus_minus(interval)))


def with_sign(text: str) -> str:
    return text.replace("+-", "\N{PLUS-MINUS SIGN}")


def mean_figure(values: Sequence[float] | None) -> Cell | None:
    return figure(mean_and_deviation(values, number)) if values else None


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
    title: str, runs: Sequence[RunRecord], values: Sequence[Mapping[str, Any]], same: str = ""
) -> Section | None:
    """Return a table of the keys whose values differ."""
    rows = []
    for key in dict.fromkeys(key for one in values for key in one):
        found = [scalar(one[key]) if key in one else None for one in values]
        if len({*found}) > 1:
            rows.append([code(key), *(Cell("absent", "") if value is None else code(value) for value in found)])
    if not rows:
        return section(title, text(same, "empty")) if same and any(values) else None
    class_ = "differences" if len(runs) == 2 else "differences rows"  # more columns do not fit on a phone
    return section(title, table(["key", *(run.name for run in runs)], rows, class_=class_))


def scalar(value: Any) -> str:
    """Return a value as a recipe has it."""
    return cut(plain(value), 200) if value != "" else '""'


def matrices_section(runs: Sequence[RunRecord]) -> Section | None:
    cards = [
        confusion(run.log.matrices["eval"][1], run.class_names) | {"index": index, "name": run.name}
        for index, run in enumerate(runs)
        if "eval" in run.log.matrices
    ]
    return section("Confusion matrices", {"kind": "cards", "cards": cards} if cards else None)


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
