"""report.html: what it shows of a run's folder, what it survives there, and that nothing in it can run or fetch anything."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hftune import cli
from hftune.checkpoints.output_dir import start_folder
from hftune.replay.run_record import Curve, read_run, run_names
from hftune.reporting import page as report
from hftune.reporting.blocks import millions, number
from hftune.reporting.callbacks import Report
from hftune.reporting.charts import make_charts
from hftune.reporting.page import page, write_report

ASSETS = Path(report.__file__).parent / "assets"
NASTY = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'& \u202e\u05e9\u05dc\u05d5\u05dd \U0001f642 \x00\ud800"
)


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text of each element of one kind."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append([tag, ""])

    def handle_endtag(self, tag):
        while self._open:
            opened, text = self._open.pop()
            self.texts.append((opened, " ".join(text.split())))
            if self._open:
                self._open[-1][1] += text
            if opened == tag:
                break

    def handle_data(self, data):
        if self._open and self._open[-1][0] not in ("style",):
            self._open[-1][1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag):
        return [text for name, text in self.texts if name == tag]


def data_of(text):
    """The curves that the page draws, by the key of their chart."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return {chart["key"]: chart for chart in json.loads(found)["charts"]}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes the folder of a run with the given parts in it."""

    def make(name="yelp", num_steps=6, metrics=(), rows=(), facts=None, result=None, recipe="recipe: yelp_demo\nseed: 42\n"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(recipe)
        training = [
            {"step": step, "epoch": step / 4, "train/loss": 1 / step, "train/loss_step": 1 / step, "train/lr": 1e-3}
            for step in range(1, num_steps + 1)
        ]
        write_lines(folder / "metrics.jsonl", [*training, *metrics])
        write_lines(folder / "predictions.jsonl", rows)
        for file, value in (("run.json", facts), ("result.json", result)):
            if value is not None:
                (folder / file).write_text(json.dumps(value))
        return folder

    return make


MATRIX = [[5, 1], [2, 4]]
EVALUATIONS = (
    {"step": 3, "epoch": 0.75, "eval/loss": 0.6, "eval/accuracy": 0.75, "eval/confusion_matrix": [[9, 0], [0, 9]]},
    {"step": 6, "epoch": 1.5, "eval/loss": 0.5, "eval/accuracy": 0.7, "eval/confusion_matrix": MATRIX},
)
BEST = {"metric": "accuracy", "value": 0.75, "step": 3}


# What it shows


def test_page_of_a_finished_run_shows_its_numbers(make_run):
    facts = {
        "recipe": "yelp_demo", "started": "2026-11-22T18:30:00+00:00", "command": "accelerate launch -m hftune.run recipe=yelp_demo",
        "processes": 2, "nodes": 1, "device": "NVIDIA H200", "parameters": 109486085, "trainable_parameters": 1000000,
        "data": {"train": {"samples": 6400, "digest": "sha256:12ab"}, "eval": {"samples": 320, "digest": "sha256:34cd"}},
        "commits": {"task.model": "abc123"}, "versions": {"hftune": "0.3.0"}, "git": {"commit": "f00d", "is_dirty": True},
        "labels": ["bad", "good"], "num_steps": 6, "steps_per_epoch": 4, "notices": ["80 rows are left out by max_eval_samples."],
    }  # fmt: skip
    result = {"best": BEST, "test": {"accuracy": 0.71}, "seconds": 192.4, "steps": 6, "world_size": 2}
    tests = {"step": 6, "epoch": 1.5, "test/loss": 0.55, "test/accuracy": 0.71}
    found = Page(page([make_run(metrics=[*EVALUATIONS, tests], facts=facts, result=result)]))
    assert found.text("h1") == ["yelp_demo"] and "Finished" in found.text("span")
    tiles = dict(zip(found.text("dt"), found.text("dd"), strict=True))
    assert tiles["Best accuracy"] == "0.7500at step 3" and tiles["Test accuracy"] == "0.7100of the best model"
    assert tiles["Time"] == "0:03:12with evaluations" and tiles["Processes"] == "2"
    assert tiles["Parameters"] == "109.5 million1 million trainable" and tiles["Training samples"] == "6,400320 eval"
    assert tiles["code"] == "f00d, with changes" and tiles["Started"] == "2026-11-22 18:30 UTC"
    assert "80 rows are left out by max_eval_samples." in found.text("li")
    rows = [text for text in found.text("tr") if text.startswith("Accuracy")]
    assert rows == ["Accuracy picks the best model0.75000.70000.7100"]
    assert "accelerate launch -m hftune.run recipe=yelp_demo" in found.text("code")


def test_speed_precision_and_learning_rate_are_as_the_terminal_has_them(make_run):
    speeds = [{"step": step, "perf/samples_per_s": speed} for step, speed in ((7, 100.0), (8, 300.0))]  # as many samples each
    found = Page(page([make_run(metrics=speeds, facts={"precision": "no"}, recipe="recipe: a\ntrain: {lr: 0.004}\n")]))
    tiles = dict(zip(found.text("dt"), found.text("dd"), strict=True))
    assert (tiles["Samples/s"], tiles["Precision"], tiles["Learning rate"]) == ("150.0in training", "float32", "0.004")


def test_best_is_marked_in_the_curve_while_the_run_is_going_on(make_run):
    folder = make_run(metrics=EVALUATIONS, facts={"num_steps": 12})
    (folder / "model").mkdir()
    (folder / "model" / "hftune.json").write_text(json.dumps(BEST))
    text = page([folder])
    assert "Step 6 of 12" in Page(text).text("span")
    charts = data_of(text)
    assert [chart["title"] for chart in charts.values()] == ["Loss", "Learning rate", "Accuracy"]
    assert [line["label"] for line in charts["train/loss"]["lines"]] == ["training", "evaluation"]
    assert charts["eval/accuracy"]["lines"][0]["best"] == [3, 0.75]
    assert charts["eval/accuracy"]["lines"][0]["points"] == [[3, 6], [0.75, 0.7]]


def test_confusion_matrix_is_the_last_one_with_names_counts_and_shares(make_run):
    found = Page(page([make_run(metrics=EVALUATIONS, facts={"labels": ["bad", "good"]})]))
    titles = [cell["title"] for cell in found.all("td") if cell.get("class") in ("right", "wrong")]
    assert titles[0] == "5 of bad predicted as bad: 83.3%" and titles[2] == "2 of good predicted as bad: 33.3%"
    assert titles[1] == "1 of bad predicted as good: 16.7%" and len(titles) == 4


def test_matrix_of_many_classes_is_an_image_and_its_worst_confusions(make_run):
    matrix = (50 * np.eye(100)).astype(int)
    matrix[3, 7] = 21
    text = page([make_run(metrics=[{"step": 6, "eval/loss": 1.0, "eval/confusion_matrix": matrix.tolist()}])])
    found = Page(text)
    assert "372130%" in found.text("tr"), "the most frequent confusion"
    assert "370%71" in found.text("tr"), "the weakest class"
    assert [image["class"] for image in found.all("img")] == ["matrix"] and len(text) < 200_000


def test_worst_predictions_come_first_and_class_numbers_become_names(make_run):
    rows = [
        {"index": index, "text": f"review {index}", "label": 1, "prediction": 0, "error": index / 100} for index in range(60)
    ]
    folder = make_run(rows=rows, recipe="task: {label_names: [bad, good]}\n")
    lines = [text for text in Page(page([folder])).text("tr") if "review" in text]
    assert lines[0] == "59review 59goodbad0.5900" and lines[24] == "35review 35goodbad0.3500"
    assert len(lines) == 25 + 8, "the first rows, too"


def test_without_an_error_the_surest_mistakes_come_first(make_run):
    rows = [
        {"index": 0, "label": 1, "prediction": 1, "probability": 0.99},
        {"index": 1, "label": 1, "prediction": 0, "probability": 0.6},
        {"index": 2, "label": 0, "prediction": 1, "probability": 0.8},
    ]
    assert [row["index"] for row in read_run(make_run(rows=rows)).predictions.worst] == [2, 1]


def test_images_of_the_last_evaluation_are_embedded_with_captions(make_run):
    folder = make_run(metrics=EVALUATIONS, rows=[{"index": 0, "psnr": 31.5}, {"index": 1, "psnr": 28.0}])
    noise = np.random.default_rng(0).integers(0, 255, (600, 2000, 3), dtype=np.uint8)
    for step in (3, 6):
        (folder / f"samples/step_{step:08d}").mkdir(parents=True)
        for name, pixels in (("0", noise), ("1", noise[:8, :8]), ("10", noise[:8, :8])):
            Image.fromarray(pixels).save(folder / f"samples/step_{step:08d}/{name}.png")
        Image.fromarray(noise[:16, :16]).save(folder / f"samples/step_{step:08d}.png")
    (folder / "samples/step_00000006/2.png").write_bytes(b"being written")
    found = Page(page([folder]))
    assert [image["alt"] for image in found.all("img")][:3] == [f"Sample {name} after step 6" for name in ("0", "1", "10")]
    assert found.text("figcaption")[:2] == ["Sample 0psnr 31.50", "Sample 1psnr 28.00"]
    kinds = [image["src"].partition(";")[0] for image in found.all("img")]
    assert kinds[:2] == ["data:image/jpeg", "data:image/png"]
    assert max(len(image["src"]) for image in found.all("img")) < 200_000, "2 MB as PNG"


def test_metrics_of_hosts_are_lines_of_one_chart(make_run):
    names = ("host0/memory_gib", "host0/gpu0_power_w", "host0/gpu1_power_w", "host1/memory_gib", "host1/gpu0_power_w")
    values = {f"perf/{name}": 5.0 for name in (*names, "samples_per_s")}
    charts = data_of(page([make_run(metrics=[{"step": 1, **values}])]))
    groups = {chart["key"]: chart["group"] for chart in charts.values()}
    assert [*groups][2:] == ["perf/samples_per_s", "perf/*/memory_gib", "perf/*/gpu*_power_w"]
    assert [*groups.values()][2:] == ["Speed", "Machines", "Machines"]
    assert [line["label"] for line in charts["perf/*/gpu*_power_w"]["lines"]] == ["host0 gpu0", "host0 gpu1", "host1 gpu0"]


def test_numbers_are_formatted_for_reading():
    numbers = (0, 0.0, 3, 1234, 0.83125, 0.75, 31.5, 999.97, 12345.6, 2.4e-5, 7.2e9, -0.5, float("inf"))
    said = ["0", "0", "3", "1,234", "0.8313", "0.7500", "31.50", "1000", "12,346", "2.40e-05", "7.20e+09", "-0.5000", "inf"]
    assert [number(value) for value in numbers] == said
    assert [millions(count) for count in (812, 109_486_085, 7e9)] == ["812", "109.5 million", "7 billion"]


# What it survives


def test_folder_without_anything_gives_a_page(tmp_path):
    assert "Nothing has been logged yet." in Page(page([tmp_path])).text("p")
    assert "There has been no evaluation yet." in Page(page([tmp_path])).text("p")


def test_damaged_files_give_a_page_of_what_is_left(make_run):
    folder = make_run(metrics=EVALUATIONS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"epoch": 1}\n{"step": "x"}\n{"step": 7, "train/loss": NaN}\n\0\0\0\n')
        file.write('{"step": 8, "train/loss": null, "own/flag": true, "own/list": [1], "own/text": "x"}\n{"step": 9, "train/lo')
    (folder / "run.json").write_text('["no", "object"]')
    (folder / "result.json").write_text('{"best": 3, "test": [], "versions": null')
    (folder / "recipe.yaml").write_text("a: [1\nb: }")
    (folder / "samples").mkdir()
    (folder / "samples" / "step_x.png").write_bytes(b"")
    text = page([folder])
    assert data_of(text)["train/loss"]["lines"][0]["points"][1][-2:] == [None, None]
    assert "train/loss was not a finite number in 2 of its 8 points." in Page(text).text("li")


@pytest.mark.parametrize(
    "facts",
    [
        {"labels": 3, "data": [], "notices": "x", "versions": [], "git": "no", "num_steps": "many", "parameters": "few"},
        {"labels": ["one"], "data": {"train": 5}, "notices": [{"a": 1}], "commits": ["x"], "started": 5, "nodes": "a"},
    ],
)
def test_facts_of_another_shape_give_a_page(make_run, facts):
    assert page([make_run(metrics=EVALUATIONS, facts=facts, result={"best": [], "test": 1, "seconds": "long"})])


def test_rows_of_an_own_task_may_have_any_fields(make_run):
    rows = [{"index": 0, "boxes": [[1, 2]], "about": {"a": None}, "ok": True, "none": None}, {"index": 1, "other": "x" * 5000}]
    found = Page(page([make_run(rows=rows)]))
    assert '0[[1, 2]]{"a": null}true\N{EN DASH}\N{EN DASH}' in found.text("tr")
    assert len(max(found.text("td"), key=len)) == 600


def test_one_point_is_enough_and_a_step_that_was_logged_twice_counts_once(make_run):
    assert data_of(page([make_run("one", num_steps=1)]))["train/loss"]["lines"][0]["points"] == [[1], [1.0]]
    folder = make_run(num_steps=3, metrics=[{"step": 2, "train/loss": 9.0}])
    assert data_of(page([folder]))["train/loss"]["lines"][0]["points"] == [[1, 2, 3], [1.0, 9.0, 0.333333]]


def test_no_text_can_leave_its_place(make_run):
    """Names, keys, texts, notices and labels of all kinds: they are shown, and nothing else happens."""
    facts = {**dict.fromkeys(("recipe", "command", "device"), NASTY), "labels": [NASTY, "b"], "notices": [NASTY]}
    facts["versions"] = {NASTY: NASTY}
    rows = [{"index": 0, "text": NASTY, NASTY: NASTY, "label": 0, "prediction": 1, "error": 1.0}]
    metrics = [*EVALUATIONS, {"step": 6, f"eval/{NASTY}": 1.0, f"{NASTY}/{NASTY}/x": 2.0}]
    folders = [
        make_run(f"run<b>{name}", metrics=metrics, rows=rows, facts=facts, recipe=f"task: {{model: 'a<b>{name}'}}")
        for name in "xy"
    ]
    write_report(folders[0])  # half a surrogate pair does not fit into a file
    for text in ((folders[0] / "report.html").read_text(encoding="utf-8"), page(folders)):
        found = Page(text)
        assert len(found.all("script")) == 3 and not [name for name, _ in found.elements if name == "b"]
        assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
        assert data_of(text)["eval/accuracy"]
        assert "alert(1)" in text and "<script>alert" not in text and "\x00" not in text


def test_page_fetches_nothing_and_runs_only_its_own_scripts(make_run):
    text = page([make_run(metrics=EVALUATIONS)])
    found = Page(text)
    (policy,) = [meta["content"] for meta in found.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;")
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2 and re.findall(r"sha256-([^']+)", policy) == digests
    addresses = [value for _, attributes in found.elements for name in ("src", "href") if (value := attributes.get(name))]
    assert all(value.startswith(("#", "data:")) for value in addresses)
    assert not re.findall(r"@import|url\(", text)


def test_secrets_that_a_recipe_refers_to_stay_references(make_run, monkeypatch):
    monkeypatch.setenv("HFTUNE_SECRET", "do-not-show")
    text = page([make_run(recipe="track: {run_name: '${oc.env:HFTUNE_SECRET}'}\n")])
    assert "${oc.env:HFTUNE_SECRET}" in text and "do-not-show" not in text


# Size


def test_ten_thousand_steps_fit_into_a_small_file_which_says_that_it_is_thinned(make_run):
    noise = np.random.default_rng(0).normal(size=(10_000, 8)).tolist()
    names = [f"train/{name}" for name in "abcd"] + [f"perf/{name}" for name in "efgh"]
    rows = [{"step": index + 7, **dict(zip(names, values, strict=True))} for index, values in enumerate(noise)]
    text = page([make_run(metrics=rows)])
    assert len(text.encode()) < 1_000_000
    assert "(the longest has 10,000) are thinned" in text
    for index, name in enumerate(names):
        (line,) = data_of(text)[name]["lines"]
        assert max(line["points"][1]) == pytest.approx(max(row[index] for row in noise), rel=1e-5)
        assert min(line["points"][1]) == pytest.approx(min(row[index] for row in noise), rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 2500, 12345])
def test_thinning_keeps_peaks_ends_and_order(count):
    curve = Curve()
    for step in range(count):
        curve.steps.append(step)
        curve.values.append(float("nan") if step % 7 == 3 else float(np.sin(step)))
    curve.values[count // 2] = 100.0
    steps, values = curve.thinned(1000)
    assert len(steps) <= min(count, 1002) and (count > 1000 or len(steps) == count)
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, count - 1)
    assert values[steps.index(count // 2)] == 100.0


def test_smoothing_of_a_thinned_curve_begins_with_means_and_not_with_extremes():
    curve = Curve()
    for step in range(3500):
        curve.steps.append(step)
        curve.values.append(float("nan") if step % 7 == 3 else float(step % 7 == 0))  # of 7 points one is 1, five are 0
    assert curve.means(4000) is None
    steps, means = curve.means(1000)
    assert (len(steps), steps[0], steps[-1]) == (500, 6, 3499)
    assert set(means) == {0.166667}


def test_only_the_first_rows_of_a_huge_file_are_looked_through(make_run, monkeypatch):
    monkeypatch.setattr("hftune.replay.run_record.MAX_ROWS", 30)
    rows = [{"index": index, "error": float(index)} for index in range(40)]
    found = Page(page([make_run(rows=rows)]))
    assert "Largest errors: 25 of the first 30" in found.text("h3")


# Several runs


def test_comparison_shows_results_differences_and_curves_of_all_runs(make_run):
    facts = {"recipe": "yelp_demo", "processes": 1, "data": {"train": {"digest": "sha256:1"}}}
    result = {"best": BEST, "seconds": 60.0}
    recipe = "recipe: yelp_demo\noutput_dir: {}\ntrain: {{lr: {}, batch_size: 32}}\n"
    one = make_run("a/yelp", metrics=EVALUATIONS, facts=facts, result=result, recipe=recipe.format("a", 1e-3))
    mine = [{"step": 6, "eval/mine": 2.0}]
    two = make_run("b/yelp", metrics=mine, facts={**facts, "processes": 4}, recipe=recipe.format("b", 2e-3))
    text = page([one, two])
    found, charts = Page(text), data_of(text)
    rows = found.text("tr")
    assert "train.lr0.0010.002" in rows and "processes14" in rows
    assert not [row for row in rows if row.startswith(("output_dir", "train.batch_size"))]
    assert "a/yelp0.750030.50000.7000\N{EN DASH}60:01:001" in rows
    assert [line["label"] for line in charts["train/loss"]["lines"]] == ["a/yelp", "b/yelp"]
    assert [line["run"] for line in charts["eval/mine"]["lines"]] == [1]


def test_same_samples_are_shown_side_by_side(make_run):
    titles = {"a": ["North wind", "Rain"], "b": ["South wind", "Rain"]}
    folders = [
        make_run(
            name, rows=[{"index": index, "source": f"article {index}", "generated": text} for index, text in enumerate(texts)]
        )
        for name, texts in titles.items()
    ]
    assert "0article 0North windSouth wind" in Page(page(folders)).text("tr")


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart():
    assert run_names([Path("/out/a"), Path("/out/b")]) == ["a", "b"]
    assert run_names([Path("/one/a/x"), Path("/two/a/x"), Path("/b")]) == ["one/a/x", "two/a/x", "b"]


# In training


def test_report_that_cannot_be_written_gives_one_warning(make_run, monkeypatch, capsys):
    folder = make_run()
    reporter = Report()
    reporter.on_begin(SimpleNamespace(output_dir=folder))
    monkeypatch.setattr(report, "page", lambda *_, **options: 1 / 0)
    for _ in range(2):
        reporter.on_evaluation(SimpleNamespace(split="eval"))
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"warning: {folder}/report.html could not be written: ZeroDivisionError: ")
    assert told.endswith(f" Training continues; hftune report {folder} tries again.")


def test_report_that_takes_long_is_written_rarely_but_at_the_end(make_run, monkeypatch):
    folder, now, written = make_run(), [100.0], []

    def slowly(folder, result):
        written.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("hftune.reporting.page.write_report", slowly)
    reporter = Report()
    reporter.on_begin(SimpleNamespace(output_dir=folder))
    for now[0] in (100.0, 120.0, 159.0, 160.0, 161.0):  # 3 seconds are 5 percent of a minute
        reporter.on_evaluation(SimpleNamespace(split="eval"))
    reporter.on_end(SimpleNamespace(result=SimpleNamespace(to_json=dict)))
    assert written == [100.0, 160.0, 161.0]


def test_report_of_an_earlier_run_is_removed(make_run):
    folder = make_run()
    path = write_report(folder)
    start_folder(folder)
    assert not path.exists()


# The command


def test_command_writes_the_report_and_prints_its_path(make_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("a"), make_run("b")
    assert cli.main(["report", "a"]) == 0 and capsys.readouterr().out == "a/report.html\n"
    assert cli.main(["report", "a", "b"]) == 0 and capsys.readouterr().out == "compare.html\n"
    assert cli.main(["report", "a", "b", "--output", "new/c.html"]) == 0 and capsys.readouterr().out == "new/c.html\n"
    assert "Comparison of 2 runs" in Path("new/c.html").read_text()
    assert Page(Path("a/report.html").read_text()).text("h1") == ["yelp_demo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: there is no such folder. Name the output folder of a run, such as outputs/yelp."),
        (["."], ". holds no run: neither metrics.jsonl nor recipe.yaml is in it."),
        (["a", "../{}/a"], "The same run is named twice. Name each once."),
        (["a", "--output", "a"], "a cannot be written: Is a directory. Name another: --output FILE."),
    ],
)
def test_command_refuses(make_run, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run("a")
    assert cli.main(["report", *(word.format(tmp_path.name) for word in words)]) == 2
    assert capsys.readouterr().err == f"hftune: {message}\n"


# Looks


def luminance(color):
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_curves_stand_out_from_their_background(theme):
    """WCAG 2: 4.5 for text, 3 for what is drawn."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (ASSETS / "report.css").read_text())
    colors = {name: (light, dark)[theme] for name, light, dark in found}
    for name in ("text", "muted", "accent", "good"):
        for background in ("page", "card", "raised"):
            assert contrast(colors[name], colors[background]) >= 4.5, f"{name} on {background}"
    curves = [name for name in colors if name.startswith("curve-")]
    assert len(curves) == 7 and all(contrast(colors[name], colors["card"]) >= 3 for name in curves)
    assert contrast(colors["text"], colors["warn"]) >= 4.5


def test_vendored_library_has_its_licence():
    assert (ASSETS / "uPlot.iife.min.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot")
    assert "The MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


def test_charts_of_a_run_are_in_reading_order(make_run):
    names = ("perf/samples_per_s", "mine", "own/x", "eval/loss", "eval/mae", "eval/accuracy", "test/mae")
    metrics = [{"step": 1, **dict.fromkeys(names, 1.0)}]
    charts = make_charts([read_run(make_run(metrics=metrics, result={"best": BEST}))])
    order = ["train/loss", "train/lr", "eval/accuracy", "eval/mae", "perf/samples_per_s", "mine", "own/x"]
    assert [chart.key for chart in charts] == order
