"""``report.html``: one file that shows a run, or compares several, without a network. Reads nothing but their folders."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from hftune.checkpoints.atomic_files import write_text
from hftune.reporting.charts import Chart, make_charts, notes_on_curves
from hftune.reporting.confusion import confusion
from hftune.reporting.curves import is_number, title_of, unit_of
from hftune.reporting.elements import (
    Html,
    cut,
    duration,
    element,
    escape,
    facts_list,
    join,
    millions,
    moment,
    number,
    picture_uri,
    plain,
    table,
)  # fmt: skip
from hftune.reporting.run_record import Pictures, RunRecord, flat, read_run, run_names

REPORT = "report.html"
POINTS = 48_000
"""Points of all curves of a page together: about 17 bytes each."""
POINTS_PER_CURVE = (200, 3000)
"""Least and greatest number of points to which a curve is thinned."""
OPEN_ROWS = 10
"""Rows with large errors that are shown at once; the others unfold."""
PICTURES = 12
"""Samples of an evaluation that are shown, each at most PICTURE_WIDTH pixels wide."""
PICTURE_WIDTH = 640
EARLIER_EVALUATIONS = 4
"""Evaluations before the last whose pictures are shown, too: spread from the first on."""


class Reporter:
    """Writes the report of a run in training. If it cannot, it says so once: training is worth more than its report."""

    def __init__(self) -> None:
        self._has_failed = False

    def write(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write report.html. Main process only; ``say`` prints a line."""
        try:
            write_report(folder)
        except Exception as error:  # whatever the files in the folder may lead to
            if not self._has_failed:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
                say(
                    f"{folder / REPORT} could not be written: {reason}. Training continues; hftune report {folder} tries again."
                )
            self._has_failed = True


def write_report(folder: Path) -> Path:
    """Write report.html into the folder of a run, and return its path."""
    path = folder / REPORT
    write_text(path, page([folder]))
    return path


def page(folders: Sequence[Path]) -> str:
    """Return the page of one run, or of several side by side, as HTML."""
    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
    body = one_run(runs[0]) if len(runs) == 1 else several_runs(runs)
    title = runs[0].title if len(runs) == 1 else f"Comparison: {', '.join(run.name for run in runs)}"
    text = document(title, body, chart_data(runs, make_charts(runs)))
    return text.encode("utf-8", "replace").decode("utf-8")  # a text may hold half a surrogate pair, which no file can


# The document


def document(title: str, body: Html, data: Mapping[str, Any]) -> str:
    """Return the page around its body. Its policy forbids the browser every request, and every script but our two."""
    library, script = asset("uPlot.iife.min.js"), asset("report.js")
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (library, script)
    )
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    # No "<" in the data, so that no text can end the script element.
    json_text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(cut(title, 100))}</title>",
        f"<style>{asset('uPlot.min.css')}{asset('report.css')}</style>",
    ]
    scripts = [
        f'<script type="application/json" id="data">{json_text}</script>',
        f"<script>{library}</script>",
        f"<script>{script}</script>",
    ]
    return "\n".join(["<!doctype html>", '<html lang="en">', *head, body, *scripts, "</html>", ""])


def asset(name: str) -> str:
    return (files("hftune.reporting") / "assets" / name).read_text(encoding="utf-8")


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


# Curves


def chart_data(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> dict[str, Any]:
    """Return what report.js draws."""
    limit = point_limit(charts)
    return {
        "runs": [{"name": run.name, "epochs": run.log.epochs_per_step} for run in runs],
        "charts": [
            {
                "title": chart.title,
                "unit": chart.unit,
                "group": chart.group,
                "key": chart.key,
                "lines": [
                    {
                        "run": line.run_index,
                        "label": line.label,
                        "points": line.curve.thinned(limit),
                        "smooth": line.is_smoothed,
                        "best": line.best,
                    }
                    for line in chart.lines
                ],
            }
            for chart in charts
        ],
    }


def point_limit(charts: Sequence[Chart]) -> int:
    """Return the number of points that each curve of a page may have."""
    least, most = POINTS_PER_CURVE
    return max(least, min(most, POINTS // max(1, sum(len(chart.lines) for chart in charts))))


def curves_section(runs: Sequence[RunRecord]) -> Section | None:
    """Return the controls and the place for the charts."""
    charts = make_charts(runs)
    if not charts:
        return section("Curves", element("p", "Nothing has been logged yet.", class_="empty"))
    limit, longest = point_limit(charts), max(len(line.curve) for chart in charts for line in chart.lines)
    note = "Drag to zoom, double-click to see everything again; arrow keys move the cursor of a chart that has the focus."
    if longest > limit:
        note += (
            f" Curves of more than {limit:,} points (the longest has {longest:,}) are thinned: of each stretch its least and "
            "its greatest value are kept."
        )
    smoothing = element(
        "label", "Smoothing ", element("input", id="smoothing", type="range", min=0, max=0.99, step=0.01, value=0),
        element("output", "0", id="smoothed"),
    )  # fmt: skip
    choices = [
        switch("scale", "Scale", {"linear": "Linear", "log": "Log"}),
        switch("axis", "Horizontal axis", {"step": "Steps", "epoch": "Epochs"}),
        smoothing,
        element("button", "Reset zoom", id="reset", type="button", disabled=True),
    ]
    bar = element("div", *choices, class_="bar", role="toolbar", aria_label="Curves")
    without = element("noscript", element("p", "The curves need JavaScript. The tables below do not.", class_="empty"))
    return section("Curves", bar, element("div", id="charts"), without, note=note)


def switch(name: str, label: str, choices: Mapping[str, str]) -> Html:
    """Return a group of buttons of which one is pressed, at first the first."""
    buttons = [
        element("button", text, type="button", data_value=value, aria_pressed=str(index == 0).lower())
        for index, (value, text) in enumerate(choices.items())
    ]
    return element("span", *buttons, class_="switch", id=name, role="group", aria_label=label)


# One run


def one_run(run: RunRecord) -> Html:
    sections = [
        notices(run),
        curves_section([run]),
        results_section(run),
        confusion_section(run),
        predictions_section(run),
        pictures_section(run),
        speed_section(run),
        setup_section(run),
        recipe_section(run),
    ]
    return layout(header(run), sections)


def header(run: RunRecord) -> Html:
    name = element("p", str(run.folder), class_="path", dir="auto")
    title = element("div", element("h1", run.title, dir="auto"), state(run), class_="title")
    tiles = [
        element("div", element("dt", label), element("dd", value, note and element("small", note)))
        for label, value, note in key_facts(run)
    ]
    return element("header", title, name, element("dl", *tiles, class_="tiles"))


def state(run: RunRecord) -> Html:
    """Return a mark that says whether the run is finished, or how far it is."""
    num_steps = run.facts.get("num_steps")
    if run.is_finished:
        return element("span", "Finished", class_="state finished")
    if not run.log.last_step:
        return element("span", "No step logged yet", class_="state")
    of = f" of {num_steps:,}" if isinstance(num_steps, int) else ""
    return element(
        "span",
        f"Step {run.log.last_step:,}{of}",
        class_="state running",
        title="It was not finished when this page was written.",
    )


def key_facts(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the facts of the header: what it is, its value, and a remark. Those that are not known are left out."""
    facts: list[tuple[str, str, str]] = []
    if point := run.best_point():
        metric, step, value = point
        name = lower_first(title_of(f"eval/{metric}"))
        facts.append((f"Best {name}", with_unit(value, f"eval/{metric}"), f"at step {step:,}"))
        if is_number(test := (run.result.get("test") or {}).get(metric)):
            facts.append((f"Test {name}", with_unit(test, f"eval/{metric}"), "of the best model"))
    if run.log.last_step:
        epochs = run.log.last_step * run.log.epochs_per_step
        facts.append(("Steps", f"{run.log.last_step:,}", f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}" if epochs else ""))
    if is_number(seconds := run.result.get("seconds")):
        facts.append(("Time", duration(seconds), "evaluations included"))
    if (speed := run.log.curves.get("perf/samples_per_s")) and speed.finite().size:
        facts.append(("Speed", f"{number(float(speed.finite().mean()))} samples/s", "mean while training"))
    processes = run.facts.get("processes") or run.result.get("world_size")
    if processes:
        nodes = run.facts.get("nodes")
        device = run.facts.get("device")
        remark = ", ".join(
            filter(None, [device and f"on {device}", f"{nodes} nodes" if isinstance(nodes, int) and nodes > 1 else ""])
        )
        facts.append(("Processes", str(processes), remark))
    if is_number(count := run.facts.get("parameters")):
        trainable = run.facts.get("trainable_parameters")
        is_partial = is_number(trainable) and trainable != count
        facts.append(("Parameters", millions(count), f"{millions(trainable)} trainable" if is_partial else ""))
    sizes = {split: about.get("samples") for split, about in data_of(run).items()}
    if is_number(train := sizes.get("train")):
        others = ", ".join(f"{size:,} {split}" for split, size in sizes.items() if split != "train" and is_number(size))
        facts.append(("Training samples", f"{train:,}", others))
    return facts


def lower_first(title: str) -> str:
    """Return a title as it stands within a phrase: "accuracy", but "MAE"."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def with_unit(value: float, key: str) -> str:
    return f"{number(value)} {unit_of(key).replace('%', '')}".rstrip()


def data_of(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return what run.json says of each split."""
    data = run.facts.get("data")
    return {str(split): about for split, about in data.items() if isinstance(about, dict)} if isinstance(data, dict) else {}


def notices(run: RunRecord, title: str = "Notices") -> Section | None:
    """Return what a reader should know: the run's own notices, and where its numbers were not finite."""
    told = run.facts.get("notices")
    lines = [*(told if isinstance(told, list) else []), *notes_on_curves(run)]
    items = [element("li", line if isinstance(line, str) else plain(line), dir="auto") for line in lines]
    return section(title, element("ul", *items) if items else None, class_="notices")


def results_section(run: RunRecord) -> Section | None:
    """Return the metrics of the last evaluation, of the best one, and of the test."""
    log = run.log
    keys = [key for key in log.curves if key.startswith("eval/")]
    tests = {key.removeprefix("test/"): curve for key, curve in log.curves.items() if key.startswith("test/")}
    if not keys and not tests:
        return section("Results", element("p", "There has been no evaluation yet.", class_="empty"))
    last = max((step for key in keys for step in log.curves[key].steps), default=None)
    point = run.best_point()
    best = point[1] if point and point[1] != last else None
    names = list(dict.fromkeys([*(key.removeprefix("eval/") for key in keys), *tests]))
    head = ["metric"]
    head += [f"best model (step {best:,})"] if best is not None else []
    head += [f"last evaluation (step {last:,}{', the best' if point and best is None else ''})"] if keys else []
    head += ["test, best model"] if tests else []
    rows = []
    for name in names:
        row: list[Any] = [metric_name(f"eval/{name}", is_chosen=bool(point) and name == point[0])]
        row += [log.value_at(f"eval/{name}", best)] if best is not None else []
        row += [log.value_at(f"eval/{name}", last)] if keys else []
        row += [float(tests[name].values[-1]) if name in tests and tests[name].finite().size else None] if tests else []
        rows.append(row)
    return section("Results", table(head, rows))


def metric_name(key: str, is_chosen: bool = False) -> Html:
    """Return the title of a metric, its key, and whether it picks the best model."""
    unit = unit_of(key)
    chosen = element("span", "picks the best model", class_="mark") if is_chosen else ""
    return element("span", title_of(key), f" ({unit})" if unit not in ("", "%") else "", " ", chosen, title=key)


def confusion_section(run: RunRecord) -> Section | None:
    """Return the last matrix of the evaluation; that of the test, if there is none."""
    for part, name in (("eval", "evaluation"), ("test", "test")):
        if part in run.log.matrices:
            step, matrix = run.log.matrices[part]
            note = f"From the {name} after step {step:,}. Rows are true classes, columns are predictions."
            return section("Confusion matrix", confusion(matrix, run.class_names), note=note)
    return None


def predictions_section(run: RunRecord) -> Section | None:
    """Return the rows with the largest errors, and the first ones."""
    found = run.predictions
    of = f"of {'the first ' if not found.is_whole else ''}{found.num_rows:,}"
    parts = []
    first = f"The first {len(found.first)} {of}"
    if worst := found.worst:
        parts += [element("h3", f"Largest errors: {len(worst)} {of}"), rows_table(run, worst[:OPEN_ROWS])]
        parts += [folded(f"{len(worst) - OPEN_ROWS} more", rows_table(run, worst[OPEN_ROWS:]))] if worst[OPEN_ROWS:] else []
        parts += [folded(first, rows_table(run, found.first))] if found.num_rows > len(worst) else []
    elif found.first:
        parts += [element("h3", first), rows_table(run, found.first)]
    return section("Predictions", *parts, note="Rows of the last evaluation; predictions.jsonl has all of them.")


def folded(title: str, content: Html) -> Html:
    return element("details", element("summary", title), content)


def rows_table(run: RunRecord, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Return rows with the columns that any of them has; class numbers become names."""
    names, columns = run.class_names, list(dict.fromkeys(key for row in rows for key in row))

    def shown(column: str, value: Any) -> Any:
        is_class = column in ("label", "prediction") and isinstance(value, int) and not isinstance(value, bool)
        return names[value] if is_class and 0 <= value < len(names) else value

    return table(columns, [[shown(column, row.get(column)) for column in columns] for row in rows], class_="rows")


def pictures_section(run: RunRecord) -> Section | None:
    """Return the pictures of the last evaluation, and a few of earlier ones."""
    if not run.pictures:
        return None
    *earlier, last = run.pictures
    if len(earlier) > EARLIER_EVALUATIONS:
        places = [round(index * (len(earlier) - 1) / (EARLIER_EVALUATIONS - 1)) for index in range(EARLIER_EVALUATIONS)]
        earlier = [earlier[place] for place in places]
    parts = [element("h3", f"After step {last.step:,}"), gallery(run, last, PICTURES)]
    for pictures in reversed(earlier):
        shown = gallery(run, pictures, 4)
        parts.append(folded(f"After step {pictures.step:,}", shown))
    return section("Pictures", *parts)


def gallery(run: RunRecord, pictures: Pictures, count: int) -> Html:
    """Return the first pictures of an evaluation with captions."""
    figures = []
    for index, path in enumerate(pictures.paths[:count]):
        found = picture_uri(path, PICTURE_WIDTH)
        if found is None:
            continue
        uri, (width, height) = found
        what = f"All samples of step {pictures.step:,}" if pictures.is_grid else f"Sample {path.stem}"
        caption = element("figcaption", what, element("small", picture_facts(run, pictures, index), dir="auto"))
        image = element("img", src=uri, alt=f"{what} after step {pictures.step:,}", width=width, height=height, loading="lazy")
        figures.append(element("figure", image, caption))
    left = len(pictures.paths) - count
    more = [element("p", f"{left:,} more in {pictures.paths[0].parent}.", class_="note")] if left > 0 else []
    return join([element("div", *figures, class_="gallery"), *more])


def picture_facts(run: RunRecord, pictures: Pictures, index: int) -> str:
    """Return a few fields of the picture's row of the predictions, if they are of the same evaluation."""
    if pictures.is_grid or pictures is not run.pictures[-1] or index >= len(run.predictions.first):
        return ""
    row = run.predictions.first[index]
    values = {name: value for name, value in row.items() if name != "index" and isinstance(value, (int, float, str))}
    return ", ".join(
        f"{name} {number(value) if is_number(value) else cut(str(value), 60)}" for name, value in [*values.items()][:6]
    )


def speed_section(run: RunRecord) -> Section | None:
    """Return mean, range and last value of what was measured about speed and memory."""
    rows = []
    for key, curve in run.log.curves.items():
        if key.startswith("perf/") and (values := curve.finite()).size:
            scale = 100 if unit_of(key) == "%" else 1
            part = "/".join(key.split("/")[1:-1])
            name = element("span", f"{title_of(key)}{f', {part}' if part else ''}", title=key)
            numbers = [float(value) * scale for value in (values.mean(), values.min(), values.max(), values[-1])]
            rows.append([name, unit_of(key), *numbers])
    if not rows:
        return None
    return section("Speed and memory", table(["", "unit", "mean", "least", "greatest", "last"], rows))


def setup_section(run: RunRecord) -> Section | None:
    """Return what was trained on what, by which versions."""
    recipe, facts = run.recipe, run.facts
    chosen = {
        "Task": recipe.get("task.type"),
        "Model": recipe.get("task.model"),
        "Data set": recipe.get("task.dataset"),
        "Epochs": recipe.get("train.epochs"),
        "Steps": facts.get("num_steps"),
        "Steps per epoch": facts.get("steps_per_epoch"),
        "Global batch": recipe.get("train.batch_size"),
        "Learning rate": recipe.get("train.lr"),
        "Schedule": recipe.get("train.schedule"),
        "Optimizer": recipe.get("train.optimizer"),
        "Precision": recipe.get("train.mixed_precision"),
        "Seed": recipe.get("seed"),
        "Started": moment(facts.get("started")),
        "Processes": facts.get("processes"),
        "Nodes": facts.get("nodes"),
        "Device": facts.get("device"),
    }
    data = [[split, about.get("samples"), code(about.get("digest"))] for split, about in data_of(run).items()]
    commits = facts.get("commits") or run.result.get("commits")
    git = facts.get("git")
    if isinstance(git, dict) and git.get("commit"):
        commits = {
            **(commits if isinstance(commits, dict) else {}),
            "code": f"{git['commit']}{', with changes' if git.get('is_dirty') else ''}",
        }
    versions = facts.get("versions") or run.result.get("versions")
    parts = [
        facts_list(chosen) if any(chosen.values()) else None,
        titled("Command", copyable(str(facts["command"]))) if facts.get("command") else None,
        titled("Data", table(["split", "samples", "digest"], data)) if data else None,
        titled("Commits", facts_list({name: code(value) for name, value in flat(commits).items()})) if commits else None,
        titled("Versions", facts_list(flat(versions))) if versions else None,
    ]
    return section("Setup", *parts)


def titled(title: str, content: Html) -> Html:
    return join([element("h3", title), content])


def code(value: Any) -> Html | None:
    return element("code", value) if value else None


def copyable(text: str) -> Html:
    """Return a text as it stands, with a button that copies it."""
    button = element("button", "Copy", type="button", class_="copy")
    return element("div", element("pre", element("code", text), tabindex="0"), button, class_="source")


def recipe_section(run: RunRecord) -> Section | None:
    if not run.recipe_text:
        return None
    return section("Recipe", folded(f"recipe.yaml, {len(run.recipe_text.splitlines())} lines", copyable(run.recipe_text)))


# Several runs


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
        row += [
            float(values[-1]) if key in run.log.curves and (values := run.log.curves[key].finite()).size else None
            for key in keys
        ]
        seconds = run.result.get("seconds")
        row += [run.log.last_step, escape(duration(seconds)) if is_number(seconds) else None]
        row.append(run.facts.get("processes") or run.result.get("world_size"))
        rows.append(row)
    return section("Results", element("div", table(head, rows), class_="wide", tabindex="0"))


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
    return section(title, table(["key", *(run.name for run in runs)], rows, class_="differences"))


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
