"""The page of one run: its header, and a function for each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hftune.metrics.records import place_of, record_of
from hftune.replay.metrics_log import is_number
from hftune.replay.run_record import Images, RunRecord, flat, mapping
from hftune.reporting.charts import make_charts, notes_on_curves, point_limit
from hftune.reporting.confusion import confusion
from hftune.reporting.elements import (
    Figure,
    Html,
    cut,
    duration,
    element,
    facts_list,
    image_uri,
    join,
    millions,
    moment,
    number,
    plain,
    quantity,
    table,
)
from hftune.reporting.layout import Section, code, copyable, folded, layout, section, titled

OPEN_ROWS = 10
"""Rows with large errors that are shown at once; the others unfold."""
IMAGES = 12
"""Samples of an evaluation that are shown, each at most IMAGE_WIDTH pixels wide."""
IMAGE_WIDTH = 640
SMALL_IMAGE, LARGE_IMAGE = 150, 480
EARLIER_EVALUATIONS = 4
"""Evaluations before the last whose images are shown, too: spread from the first on."""


def one_run(run: RunRecord) -> Html:
    sections = [
        notices(run),
        curves_section([run]),
        results_section(run),
        confusion_section(run),
        labels_section(run),
        predictions_section(run),
        images_section(run),
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
        name = lower_first(record_of(f"eval/{metric}").title)
        facts.append((f"Best {name}", quantity(value, record_of(metric).unit), f"at step {step:,}"))
        if is_number(test := mapping(run.result.get("test")).get(metric)):
            facts.append((f"Test {name}", quantity(test, record_of(metric).unit), "of the best model"))
    if run.log.last_step:
        epochs = run.log.last_step * run.log.epochs_per_step
        facts.append(("Steps", f"{run.log.last_step:,}", f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}" if epochs else ""))
    if is_number(seconds := run.result.get("seconds")):
        facts.append(("Time", duration(seconds), "with evaluations"))
    if (speed := run.log.curves.get("perf/samples_per_s")) and speed.finite().size:
        facts.append(("Samples/s", number(float(speed.finite().mean())), "mean while training"))
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
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def data_of(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return what run.json says of each split."""
    return {str(split): mapping(about) for split, about in mapping(run.facts.get("data")).items()}


def notices(run: RunRecord, title: str = "Notices") -> Section | None:
    """Return what a reader should know: the run's own notices, and where its numbers were not finite."""
    told = run.facts.get("notices")
    lines = [*(told if isinstance(told, list) else []), *notes_on_curves(run)]
    items = [element("li", line if isinstance(line, str) else plain(line), dir="auto") for line in lines]
    return section(title, element("ul", *items) if items else None, class_="notices")


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


def results_section(run: RunRecord) -> Section | None:
    """Return the metrics of the last evaluation, of the best one, and of the test."""
    log = run.log
    keys = [key for key in log.curves if key.startswith("eval/")]
    tests = {key.removeprefix("test/"): curve for key, curve in log.curves.items() if key.startswith("test/")}
    if not keys and not tests:
        is_off = run.recipe.get("eval.every") == "never"
        reason = "This run does not evaluate (eval.every=never)." if is_off else "There has been no evaluation yet."
        return section("Results", element("p", reason, class_="empty"))
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
        unit = record_of(name).unit

        def shown(value: float | None, unit: str = unit) -> Figure | None:
            return None if value is None else quantity(value, unit)

        row: list[Any] = [metric_name(f"eval/{name}", is_chosen=bool(point) and name == point[0])]
        row += [shown(log.value_at(f"eval/{name}", best))] if best is not None else []
        row += [shown(log.value_at(f"eval/{name}", last))] if keys else []
        row += [shown(tests[name].last() if name in tests else None)] if tests else []
        rows.append(row)
    return section("Results", table(head, rows))


def metric_name(key: str, is_chosen: bool = False) -> Html:
    """Return the title of a metric, its key, and whether it picks the best model."""
    chosen = element("span", "picks the best model", class_="mark") if is_chosen else ""
    return element("span", record_of(key).title, " ", chosen, title=key)


def confusion_section(run: RunRecord) -> Section | None:
    """Return the last matrix of the evaluation; that of the test, if there is none."""
    for part, name in (("eval", "evaluation"), ("test", "test")):
        if part in run.log.matrices:
            step, matrix = run.log.matrices[part]
            note = f"From the {name} after step {step:,}. Rows are true classes, columns are predictions."
            return section("Confusion matrix", confusion(matrix, run.class_names), note=note)
    return None


def labels_section(run: RunRecord) -> Section | None:
    """Return the scores of each label of texts that can have several; a confusion matrix shows those of classes."""
    for part, name in (("eval", "evaluation"), ("test", "test")):
        if part in run.log.classes and part not in run.log.matrices:
            step, scores = run.log.classes[part]
            columns = list(dict.fromkeys(column for row in scores.values() for column in row))
            rows = [
                [label, *(quantity(value, "") if is_number(value := row.get(column)) else None for column in columns)]
                for label, row in scores.items()
            ]
            return section(
                "Labels",
                table(["label", *(record_of(f"eval/{column}").title for column in columns)], rows),
                note=f"From the {name} after step {step:,}. Support: the samples that have a label.",
            )
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


def rows_table(run: RunRecord, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Return rows with the columns that any of them has; class numbers become names."""
    names, columns = run.class_names, list(dict.fromkeys(key for row in rows for key in row))

    def shown(column: str, value: Any) -> Any:
        is_class = column in ("label", "prediction") and isinstance(value, int) and not isinstance(value, bool)
        return names[value] if is_class and 0 <= value < len(names) else value

    head = [column.replace("_", " ") for column in columns]
    values = [[shown(column, row.get(column)) for column in columns] for row in rows]
    return table(head, values, class_="rows")


def images_section(run: RunRecord) -> Section | None:
    """Return the images of the last evaluation, and a few of earlier ones."""
    if not run.images:
        return None
    *earlier, last = run.images
    if len(earlier) > EARLIER_EVALUATIONS:
        places = [round(index * (len(earlier) - 1) / (EARLIER_EVALUATIONS - 1)) for index in range(EARLIER_EVALUATIONS)]
        earlier = [earlier[place] for place in places]
    parts = [element("h3", f"After step {last.step:,}"), gallery(run, last, IMAGES)]
    for images in reversed(earlier):
        shown = gallery(run, images, 4)
        parts.append(folded(f"After step {images.step:,}", shown))
    return section("Images", *parts)


def gallery(run: RunRecord, images: Images, count: int) -> Html:
    """Return the first images of an evaluation with captions."""
    figures = []
    for index, path in enumerate(images.paths[:count]):
        found = image_uri(path, IMAGE_WIDTH)
        if found is None:
            continue
        uri, (width, height) = found
        what = f"All samples of step {images.step:,}" if images.is_grid else f"Sample {path.stem}"
        caption = element("figcaption", what, element("small", image_facts(run, images, index), dir="auto"))
        image = element("img", src=uri, alt=f"{what} after step {images.step:,}", width=width, height=height)
        shown = min(max(SMALL_IMAGE, 4 * width), LARGE_IMAGE)  # pixels on the page: small images are enlarged
        figures.append(element("figure", image, caption, style=f"width: {shown}px"))
    left = len(images.paths) - count
    more = [element("p", f"{left:,} more in {images.paths[0].parent}.", class_="note")] if left > 0 else []
    return join([element("div", *figures, class_="gallery"), *more])


def image_facts(run: RunRecord, images: Images, index: int) -> str:
    """Return a few fields of the image's row of the predictions, counts left out, if they are of the same evaluation."""
    if images.is_grid or images is not run.images[-1] or index >= len(run.predictions.first):
        return ""
    row = run.predictions.first[index]
    fields = [(name, value) for name, value in row.items() if isinstance(value, float | str)]
    return ", ".join(
        f"{name.replace('_', ' ')} {cut(value, 60) if isinstance(value, str) else number(value)}" for name, value in fields[:6]
    )


def speed_section(run: RunRecord) -> Section | None:
    """Return mean, range and last value of what was measured about speed and memory; those of many processes unfold."""
    keys = [key for key, curve in run.log.curves.items() if key.startswith("perf/") and curve.finite().size]
    parts = [key for key in keys if key.count("/") > 1]  # of one process or host each
    shown = [key for key in keys if key not in parts or len(parts) <= OPEN_ROWS]
    head = ["", "mean", "min", "max", "last"]
    content = [table(head, [speed_row(run, key) for key in shown])] if shown else []
    if len(parts) > OPEN_ROWS:
        content.append(folded("Each process and host", table(head, [speed_row(run, key) for key in parts])))
    return section("Speed and memory", *content)


def speed_row(run: RunRecord, key: str) -> list[Any]:
    """Return the row of one measured quantity."""
    unit, part, values = record_of(key).unit, place_of(key), run.log.curves[key].finite()
    is_within = unit in ("", "%", "B")  # other units stand once, beside the name
    name = f"{record_of(key).title}{f', {part}' if part else ''}{'' if is_within else f' ({unit})'}"
    numbers = (values.mean(), values.min(), values.max(), values[-1])
    return [element("span", name, title=key), *(quantity(float(value), unit if is_within else "") for value in numbers)]


def setup_section(run: RunRecord) -> Section | None:
    """Return what was trained on what, by which versions."""
    recipe, facts = run.recipe, run.facts
    chosen = {
        "Task": recipe.get("task.type"),
        "Model": recipe.get("task.model"),
        "Class of the model": facts.get("model"),
        "Data set": recipe.get("task.dataset"),
        "Epochs": recipe.get("train.epochs"),
        "Steps": facts.get("num_steps"),
        "Steps per epoch": facts.get("steps_per_epoch"),
        "Global batch": recipe.get("train.batch_size"),
        "Learning rate": recipe.get("train.lr"),
        "Schedule": recipe.get("train.schedule"),
        "Optimizer": recipe.get("train.optimizer"),
        "Precision": facts.get("precision", recipe.get("train.mixed_precision")),
        "Seed": recipe.get("seed"),
        "Started": moment(facts.get("started")),
        "Processes": facts.get("processes"),
        "Nodes": facts.get("nodes"),
        "Device": facts.get("device"),
    }
    data = [[split, about.get("samples"), code(about.get("digest"))] for split, about in data_of(run).items()]
    commits = mapping(facts.get("commits") or run.result.get("commits"))
    git = mapping(facts.get("git"))
    if git.get("commit"):
        commits = {**commits, "code": f"{git['commit']}{', with changes' if git.get('is_dirty') else ''}"}
    versions = mapping(facts.get("versions") or run.result.get("versions"))
    parts = [
        facts_list(chosen) if any(chosen.values()) else None,
        titled("Command", copyable(str(facts["command"]))) if facts.get("command") else None,
        titled("Data", table(["split", "samples", "digest"], data)) if data else None,
        titled("Commits", facts_list({name: code(value) for name, value in flat(commits).items()})) if commits else None,
        titled("Versions", facts_list(flat(versions))) if versions else None,
    ]
    return section("Setup", *parts)


def recipe_section(run: RunRecord) -> Section | None:
    if not run.recipe_text:
        return None
    return section("Recipe", folded(f"recipe.yaml, {len(run.recipe_text.splitlines())} lines", copyable(run.recipe_text)))
