"""The page of one run: the facts of its header, and a function for each section."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.errors import cut, is_number
from hftune.metrics.records import place_of, record_of, title_of
from hftune.replay.run_record import RunRecord, flat, mapping
from hftune.reporting.blocks import (
    Block,
    Cell,
    Section,
    bullets,
    code,
    facts,
    millions,
    moment,
    number,
    quantity,
    section,
    table,
    text,
)
from hftune.reporting.charts import make_charts, notes_on_curves, point_limit
from hftune.reporting.confusion import confusion, data_uri
from hftune.tracking.console import duration
from hftune.tracking.summary import PRECISIONS

OPEN_ROWS = 10
"""Rows with large errors that are shown at once; the others unfold."""
IMAGES = 12
"""Samples of an evaluation that are shown, each at most IMAGE_WIDTH pixels wide."""
IMAGE_WIDTH = 640
SMALL_IMAGE, LARGE_IMAGE = 150, 480
IMAGE_BYTES = 40_000
"""PNG files up to this size are embedded as they are; greater ones as JPEG."""
EARLIER_EVALUATIONS = 4
"""Evaluations before the last whose images are shown, too: spread from the first on."""


def sections_of(run: RunRecord) -> list[Section | None]:
    lines = len(run.recipe_text.splitlines())
    recipe = {"kind": "source", "text": run.recipe_text, "fold": f"recipe.yaml, {lines} lines"} if lines else None
    return [
        notices(run),
        curves_section([run]),
        results_section(run),
        classes_section(run),
        predictions_section(run),
        images_section(run),
        speed_section(run),
        setup_section(run),
        section("Recipe", recipe),
    ]


def key_facts(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the facts of the header: what it is, its value, and a remark. Those that are not known are left out."""
    found: list[tuple[str, str, str]] = []
    if point := run.best_point():
        metric, step, value = point
        name = lower_first(title_of(f"eval/{metric}"))
        found.append((f"Best {name}", quantity(value, record_of(metric).unit).text, f"at step {step:,}"))
        if is_number(test := mapping(run.result.get("test")).get(metric)):
            found.append((f"Test {name}", quantity(test, record_of(metric).unit).text, "of the best model"))
    if run.log.last_step:
        epochs = run.log.last_step * run.log.epochs_per_step
        found.append(("Steps", f"{run.log.last_step:,}", f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}" if epochs else ""))
    if is_number(seconds := run.result.get("seconds")):
        found.append(("Time", duration(seconds), "with evaluations"))
    if (speed := run.log.curves.get("perf/samples_per_s")) and speed.finite().size:
        seconds = 1 / speed.finite().clip(min=1e-9)  # of a sample, in each stretch: a mean of speeds would forget slow ones
        found.append(("Samples/s", number(float(1 / seconds.mean())), "in training"))
    if processes := run.facts.get("processes") or run.result.get("world_size"):
        device, nodes = run.facts.get("device"), run.facts.get("nodes")
        remarks = [f"on {device}"] if device else []
        remarks += [f"{nodes} nodes"] if isinstance(nodes, int) and nodes > 1 else []
        found.append(("Processes", str(processes), ", ".join(remarks)))
    if is_number(count := run.facts.get("parameters")):
        trainable = run.facts.get("trainable_parameters")
        is_partial = is_number(trainable) and trainable != count
        found.append(("Parameters", millions(count), f"{millions(trainable)} trainable" if is_partial else ""))
    sizes = {split: about.get("samples") for split, about in data_of(run).items()}
    if is_number(train := sizes.get("train")):
        others = ", ".join(f"{size:,} {split}" for split, size in sizes.items() if split != "train" and is_number(size))
        found.append(("Training samples", f"{train:,}", others))
    return found


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
    return section(title, bullets(lines), class_="notices")


def curves_section(runs: Sequence[RunRecord]) -> Section | None:
    """Return the controls and the place for the charts."""
    charts = make_charts(runs)
    if not charts:
        return section("Curves", text("Nothing has been logged yet.", "empty"))
    limit, longest = point_limit(charts), max(len(line.curve.steps) for chart in charts for line in chart.lines)
    note = "Drag to zoom, double-click to see everything again; arrow keys move the cursor of a chart that has the focus."
    if longest > limit:
        note += (
            f" Curves of more than {limit:,} points (the longest has {longest:,}) are thinned: of each stretch its least and "
            "its greatest value are kept."
        )
    return section("Curves", {"kind": "curves"}, note=note)


def results_section(run: RunRecord) -> Section | None:
    """Return the metrics of the last evaluation, of the best one, and of the test."""
    log = run.log
    keys = [key for key in log.curves if key.startswith("eval/")]
    tests = {key.removeprefix("test/"): curve for key, curve in log.curves.items() if key.startswith("test/")}
    if not keys and not tests:
        is_off = run.recipe.get("eval.every") == "never"
        reason = "This run does not evaluate (eval.every=never)." if is_off else "There has been no evaluation yet."
        return section("Results", text(reason, "empty"))
    last = log.last_evaluation
    point = run.best_point()
    best = point[1] if point and point[1] != last else None
    names = list(dict.fromkeys([*(key.removeprefix("eval/") for key in keys), *tests]))
    head = ["metric"]
    head += [f"best model (step {best:,})"] if best is not None else []
    head += [f"last evaluation (step {last:,}{', the best' if point and best is None else ''})"] if keys else []
    head += ["test, best model"] if tests else []
    rows = []
    for name in names:
        chosen = "picks the best model" if point and name == point[0] else ""
        key = f"eval/{name}"
        known = record_of(key)
        values = [log.value_at(f"eval/{name}", best)] if best is not None else []
        values += [log.value_at(f"eval/{name}", last)] if keys else []
        values += [tests[name].last() if name in tests else None] if tests else []
        rows.append([Cell("metric", title_of(key), key, chosen), *(quantity(value, known.unit) for value in values)])
    return section("Results", table(head, rows))


def classes_section(run: RunRecord) -> Section | None:
    """Return the last confusion matrix, or the scores of labels of texts that can have several: of evaluation or test."""
    for part, name in (("eval", "evaluation"), ("test", "test")):
        if part in run.log.matrices:
            step, matrix = run.log.matrices[part]
            note = f"From the {name} after step {step:,}. Rows are true classes, columns are predictions."
            return section("Confusion matrix", confusion(matrix, run.class_names), note=note)
        if part in run.log.classes:
            step, scores = run.log.classes[part]
            columns = list(dict.fromkeys(column for row in scores.values() for column in row))
            head = ["label", *(record_of(f"eval/{column}").title for column in columns)]
            values = ([row.get(column) for column in columns] for row in scores.values())
            cells = ([quantity(value, "") if is_number(value) else None for value in row] for row in values)
            rows = [[label, *row] for label, row in zip(scores, cells, strict=True)]
            note = f"From the {name} after step {step:,}. Support: the samples that have a label."
            return section("Labels", table(head, rows), note=note)
    return None


def predictions_section(run: RunRecord) -> Section | None:
    """Return the rows with the largest errors, and the first ones."""
    found = run.predictions
    of = f"of {'the first ' if not found.is_whole else ''}{found.num_rows:,}"
    first = f"The first {len(found.first)} {of}"
    worst = found.worst
    if not worst:
        blocks = [rows_table(run, found.first, title=first)]
    else:
        blocks = [
            rows_table(run, worst[:OPEN_ROWS], title=f"Largest errors: {len(worst)} {of}"),
            rows_table(run, worst[OPEN_ROWS:], fold=f"{len(worst) - OPEN_ROWS} more"),
            rows_table(run, found.first if found.num_rows > len(worst) else [], fold=first),
        ]
    return section("Predictions", *blocks, note="Rows of the last evaluation; predictions.jsonl has all of them.")


def rows_table(run: RunRecord, rows: Sequence[Mapping[str, Any]], title: str = "", fold: str = "") -> Block | None:
    """Return rows with the columns that any of them has; class numbers become names."""
    names, columns = run.class_names, list(dict.fromkeys(key for row in rows for key in row))

    def shown(column: str, value: Any) -> Any:
        is_class = column in ("label", "prediction") and isinstance(value, int) and not isinstance(value, bool)
        return names[value] if is_class and 0 <= value < len(names) else value

    head = [column.replace("_", " ") for column in columns]
    values = [[shown(column, row.get(column)) for column in columns] for row in rows]
    return table(head, values, class_="rows", title=title, fold=fold)


def images_section(run: RunRecord) -> Section | None:
    """Return the images of the last evaluation, and a few of earlier ones."""
    if not run.images:
        return None
    *earlier, last = run.images.items()
    if len(earlier) > EARLIER_EVALUATIONS:
        places = [round(index * (len(earlier) - 1) / (EARLIER_EVALUATIONS - 1)) for index in range(EARLIER_EVALUATIONS)]
        earlier = [earlier[place] for place in places]
    blocks = [gallery(run, *last, IMAGES) | {"title": f"After step {last[0]:,}"}]
    blocks += [gallery(run, step, paths, 4) | {"fold": f"After step {step:,}"} for step, paths in reversed(earlier)]
    return section("Images", *blocks)


def gallery(run: RunRecord, step: int, paths: Sequence[Path], count: int) -> Block:
    """Return the first images of an evaluation, with a few fields of their rows of the predictions, but no counts."""
    found = []
    rows = run.predictions.first if step == max(run.images) else []  # of the same evaluation
    for index, path in enumerate(paths[:count]):
        if (embedded := image_uri(path)) is not None:
            uri, (width, height) = embedded
            shown = min(max(SMALL_IMAGE, 4 * width), LARGE_IMAGE)  # pixels on the page: small images are enlarged
            row = rows[index] if index < len(rows) else {}
            fields = [(name.replace("_", " "), value) for name, value in row.items() if isinstance(value, float | str)][:6]
            words = [f"{name} {cut(value, 60) if isinstance(value, str) else number(value)}" for name, value in fields]
            own = {"what": f"Sample {path.stem}", "facts": ", ".join(words), "shown": shown}
            found.append({"uri": uri, "width": width, "height": height, **own})
    left = len(paths) - count
    more = f"{left:,} more in {paths[0].parent}." if left > 0 else ""
    return {"kind": "gallery", "images": found, "step": step, "more": more}


def image_uri(path: Path) -> tuple[str, tuple[int, int]] | None:
    """Return a data URI of an image at most IMAGE_WIDTH pixels wide, and its original size; None if it cannot be read."""
    from PIL import Image

    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
            if len(data) <= IMAGE_BYTES and size[0] <= IMAGE_WIDTH and image.format == "PNG":
                return data_uri("png", data), size
            image = image.convert("RGB")
            image.thumbnail((IMAGE_WIDTH, 4 * IMAGE_WIDTH))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=85)
    except (OSError, ValueError, Image.DecompressionBombError):  # removed, or being written
        return None
    return data_uri("jpeg", buffer.getvalue()), size


def speed_section(run: RunRecord) -> Section | None:
    """Return mean, range and last value of what was measured about speed and memory; those of many processes unfold."""
    keys = [key for key, curve in run.log.curves.items() if key.startswith("perf/") and curve.finite().size]
    parts = [key for key in keys if key.count("/") > 1]  # of one process or host each
    shown = [key for key in keys if key not in parts or len(parts) <= OPEN_ROWS]
    head = ["", "mean", "min", "max", "last"]
    unfolded = [speed_row(run, key) for key in parts] if len(parts) > OPEN_ROWS else []
    return section(
        "Speed and memory",
        table(head, [speed_row(run, key) for key in shown]),
        table(head, unfolded, fold="Each process and host"),
    )


def speed_row(run: RunRecord, key: str) -> list[Any]:
    """Return the row of one measured quantity."""
    unit, part, values = record_of(key).unit, place_of(key), run.log.curves[key].finite()
    is_within = unit in ("", "%", "B")  # other units stand once, beside the name
    name = f"{record_of(key).title}{f', {part}' if part else ''}{'' if is_within else f' ({unit})'}"
    numbers = (values.mean(), values.min(), values.max(), values[-1])
    return [Cell("metric", name, key), *(quantity(float(value), unit if is_within else "") for value in numbers)]


MIXTURE = ("data set", "samples", "times used", "samples used", "share", "tokens used, about", "share")
"""The columns of ``mixture_rows``."""


def mixture_rows(run: RunRecord) -> list[list[Any]]:
    """Return what an epoch uses of each data set of ``task.datasets``."""
    listed = run.facts.get("mixture")
    parts = [*map(mapping, listed)] if isinstance(listed, list) else []
    columns: list[list[Any]] = [[part.get(name) for part in parts] for name in ("name", "samples", "weight")]
    for name in ("used", "tokens"):
        counts = [part.get(name) for part in parts]
        whole = sum(filter(is_number, counts))
        columns += [counts, [quantity(count / whole, "%") if is_number(count) and whole else None for count in counts]]
    return [*map(list, zip(*columns, strict=True))]


def setup_section(run: RunRecord) -> Section | None:
    """Return what was trained on what, by which versions."""
    recipe, known = run.recipe, run.facts
    lr = recipe.get("train.lr")
    chosen = {
        "Task": recipe.get("task.type"),
        "Model": recipe.get("task.model"),
        "Class of the model": known.get("model"),
        "Data set": recipe.get("task.dataset"),
        "Epochs": recipe.get("train.epochs"),
        "Steps": known.get("num_steps"),
        "Steps per epoch": known.get("steps_per_epoch"),
        "Global batch": recipe.get("train.batch_size"),
        "Learning rate": str(lr) if is_number(lr) else lr,  # as it is written
        "Schedule": recipe.get("train.schedule"),
        "Optimizer": recipe.get("train.optimizer"),
        "Precision": PRECISIONS.get(precision := known.get("precision", recipe.get("train.mixed_precision")), precision),
        "Seed": recipe.get("seed"),
        "Started": moment(known.get("started")),
        "Processes": known.get("processes"),
        "Nodes": known.get("nodes"),
        "Device": known.get("device"),
    }
    data = [[split, about.get("samples"), code(about.get("digest"))] for split, about in data_of(run).items()]
    commits = mapping(known.get("commits") or run.result.get("commits"))
    git = mapping(known.get("git"))
    if git.get("commit"):
        commits = {**commits, "code": f"{git['commit']}{', with changes' if git.get('is_dirty') else ''}"}
    versions = mapping(known.get("versions") or run.result.get("versions"))
    return section(
        "Setup",
        facts("", chosen),
        {"kind": "source", "text": str(known["command"]), "title": "Command"} if known.get("command") else None,
        table(["split", "samples", "digest"], data, title="Data"),
        table(MIXTURE, mixture_rows(run), title="Data sets: what an epoch uses of each"),
        facts("Commits", {name: code(value) for name, value in flat(commits).items()}),
        facts("Versions", flat(versions)),
    )
