"""Comparisons from folders: metrics and rows in pairs, seeds, intervals, what is missing, and what hftune compare prints."""

import json
import math
import re

import numpy as np
import pytest
import yaml
from scipy.stats import binomtest, ttest_ind, ttest_rel

from hftune import cli
from hftune.replay.comparison import compare
from hftune.replay.paired import mcnemar, measures_of, of_independent, of_steps, of_unpaired
from hftune.replay.run_record import read_run, run_names
from hftune.reporting.charts import loss_difference
from hftune.reporting.page import page
from hftune.tracking.ledger import Ledger
from tests.support.events import step_taken

FACTS = {"world_size": 1, "strategy": "DataParallel", "plan": {"num_samples": 40, "batch_size": 4, "seed": 1}}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_ledger(folder, losses, *changes, **facts):
    """A ledger with a start, another one before each of the first steps that has changes, and the losses of the steps."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    ledger = Ledger(folder / "ledger.jsonl")
    for step, changed in enumerate([{}, *changes]):
        ledger.start(step, {**FACTS, "recipe": recipe, **facts, **changed})
        for number, loss in enumerate(losses[step : None if step == len(changes) else step + 1], start=step + 1):
            results = {"loss": loss, "grad_norm": 1.0, "lr": 1e-3}
            place = divmod(number - 1, 10)
            ledger.on_step(step_taken(number, place, num_samples=4, digest=f"{number}", num_items=4.0, **results))
    ledger.file.close()


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes the folder of a run."""

    def make(name, recipe="", losses=None, rows=(), accuracy=None, **facts):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(f"recipe: demo\n{recipe}")
        losses = [1.0 / step for step in range(1, 11)] if losses is None else losses
        lines = [{"step": step, "epoch": step / 4, "train/loss": loss} for step, loss in enumerate(losses, start=1)]
        if accuracy is not None:
            lines.append({"step": len(losses), "epoch": 1.0, "eval/loss": 1 - accuracy, "eval/accuracy": accuracy})
        write_lines(folder / "metrics.jsonl", lines)
        write_lines(folder / "predictions.jsonl", rows)
        if losses:
            write_ledger(folder, losses, **facts)
        return folder

    return make


def compared(*folders):
    return compare([read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)])


def said_of(capsys, *folders):
    assert cli.main(["compare", *map(str, folders)]) == 0
    return capsys.readouterr().out


def refused(capsys, *folders):
    assert cli.main(["compare", *map(str, folders)]) == 2
    return capsys.readouterr().err.removeprefix("hftune: ").rstrip("\n")


def predictions(right, num_rows=40):
    return [
        {
            "index": index,
            "text": f"text {index}",
            "label": "good",
            "prediction": "good" if index in right else "bad",
            "loss": 0.5 + 0.01 * (index in right),
        }
        for index in range(num_rows)
    ]


def test_two_runs_are_described(make_run, capsys):
    a = make_run("a", "train: {lr: 0.001}\n", packages={"torch": "2.13.0"})
    b = make_run("b", "train: {lr: 0.002}\n", [1.0, 0.5, 0.4, *[0.1] * 7], packages={"torch": "2.14.0"})
    said = said_of(capsys, a, b)
    assert "Equal to the bit up to step 2. They diverge in step 3: loss 0.33333 | 0.4 (1.7e-1; rounding would be" in said
    assert "likely   versions  torch 2.13.0 | 2.14.0" in said
    assert "no sign  recipe    train.lr: 0.001 | 0.002 (the learning rates are the same)" in said
    assert "The same in both: data, code, hardware, processes." in said
    assert f"git bisect run hftune bisect-step {a} --step 3" in said


def test_folder_without_a_ledger_is_compared_in_its_evaluations_and_it_is_said(make_run, capsys):
    a, b = (make_run(name, rows=predictions({1})) for name in "ab")
    (a / "ledger.jsonl").unlink()
    said = said_of(capsys, a, b)
    assert f"note: The steps of a are not compared: {a} holds no ledger.jsonl" in said
    assert "The runs have no step in common." in said and "40 rows in pairs" in said and "bisect" not in said


def test_rows_are_paired_by_sample(make_run):
    (pair,) = compared(make_run("a", rows=predictions({*range(20)})), make_run("b", rows=predictions({*range(5, 34)}))).pairs
    accuracy, loss = pair.evaluation.metrics
    assert (accuracy.name, accuracy.a, accuracy.b, accuracy.won, accuracy.lost) == ("accuracy", 0.5, 0.725, 14, 5)
    assert accuracy.p_value == pytest.approx(0.0636, abs=1e-4) and not accuracy.is_significant
    assert loss.interval.mean == pytest.approx(0.01 * 9 / 40) and pair.evaluation.num_rows == 40


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (predictions({1}, 39), "one evaluation has more rows than the other"),
        ([{**row, "text": "another"} for row in predictions({1})], "row 0 of predictions.jsonl is of another sample"),
        ((), "no rows"),
    ],
)
def test_rows_of_other_samples_are_not_paired(make_run, rows, reason):
    (pair,) = compared(make_run("a", rows=predictions({1}) if rows else ()), make_run("b", rows=rows)).pairs
    assert (pair.evaluation.metrics, pair.evaluation.reason) == ([], reason)


def test_training_loss_gets_an_interval_from_60_steps_on(make_run, capsys):
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 200))
    said = said_of(
        capsys, make_run("a", losses=[*map(float, 2 + noise[0])]), make_run("b", losses=[*map(float, 1.8 + noise[1])])
    )
    assert "Training loss, B less A, steps 41 to 200: -0.2" in said and "8 batch means, of these two runs alone" in said
    assert "): B is lower." in said and "  steps 1 to 25" in said


@pytest.mark.parametrize(
    ("row", "measures"),
    [
        (
            {"label": "a", "prediction": "b", "probability": 0.9, "label_probability": 0.1, "loss": 2.3, "error": 0.9},
            {"accuracy": 0, "loss": 2.3},
        ),
        ({"label": ["a"], "prediction": [], "probabilities": {"a": 0.4}, "error": 0.6}, {"error": 0.6}),
        ({"label": 3.0, "prediction": 2.5, "error": 0.5}, {"error": 0.5}),
        ({"source": "x", "target": "y", "generated": "z", "rouge_l": 0.5, "error": 0.5}, {"rouge_l": 0.5}),
        ({"text": "x", "tokens": 35, "loss": 70.0, "perplexity": 7.4, "error": 2.0}, {"error": 2.0}),
        ({"anchor": "x", "positive": "y", "similarity": 0.5, "rank": 2, "error": 0.5}, {"error": 0.5}),
        ({"psnr": 20.1, "ssim": None, "error": 0.01}, {"psnr": 20.1}),
    ],
)
def test_each_kind_of_row_says_how_good_it_is(row, measures):
    assert measures_of({"index": 0, **row}) == measures


def test_difference_of_the_losses_is_drawn_at_common_steps(make_run):
    a, b, same = (
        read_run(make_run(name, losses=losses))
        for name, losses in {"a": [1.0, 0.5, 0.4], "b": [1.0, 0.25], "c": [1.0, 0.5]}.items()
    )
    (line,) = loss_difference(a, b).lines
    assert ([*line.curve.steps], [*line.curve.values]) == ([1, 2], [0.0, -0.25])
    assert loss_difference(a, same) is None


def test_methods_are_judged_over_three_seeds_in_pairs(make_run, capsys):
    scores = {1: (0.70, 0.74), 2: (0.60, 0.65), 3: (0.80, 0.83)}
    folders = [
        make_run(f"{lr}-{seed}", f"seed: {seed}\ntrain: {{lr: {lr}}}\n", accuracy=pair[index])
        for index, lr in enumerate((0.1, 0.2))
        for seed, pair in scores.items()
    ]
    found = compared(*folders)
    assert [(method.name, method.seeds) for method in found.methods] == [
        ("A: train.lr=0.1", [1, 2, 3]),
        ("B: train.lr=0.2", [1, 2, 3]),
    ]
    (accuracy,) = [one for one in found.method_differences if one.metric == "accuracy"]
    assert (
        accuracy.is_paired
        and accuracy.mean == pytest.approx(0.04)
        and accuracy.interval.half_width == pytest.approx(0.0248, abs=1e-4)
    )
    said = said_of(capsys, *folders)
    assert "B: train.lr=0.2  accuracy  +0.040 +- 0.025  paired by seed: higher" in said
    (unpaired,) = [
        one
        for one in compared(*folders[:5], make_run("x", "seed: 9\ntrain: {lr: 0.2}\n", accuracy=0.83)).method_differences
        if one.metric == "accuracy"
    ]
    # Without pairs the same differences drown in the seeds'.
    assert not unpaired.is_paired and not unpaired.interval.is_significant
    assert "Over the seeds" in page(folders)


def test_best_of_more_runs_have_no_means_over_their_seeds(make_run):
    folders = [make_run(f"s{seed}", f"seed: {seed}\ntrain: {{lr: 1.0}}\n", accuracy=0.5) for seed in (1, 2, 3)]
    assert "Over the seeds" in page(folders) and "Over the seeds" not in page(folders, are_selected=True)


def test_change_of_hardware_on_the_way_leaves_a_seed_in_its_method(make_run):
    folders = [make_run(f"s{seed}", f"seed: {seed}\ntrain: {{lr: 1.0}}\n", accuracy=0.5) for seed in (1, 2, 3)]
    for folder, change in zip(folders, ({"hardware": {"cpu": "b"}}, {"recipe": {"train": {"lr": 2.0}}}, {}), strict=True):
        (folder / "ledger.jsonl").unlink()
        write_ledger(folder, [1.0, 0.5], change)
    found = compared(*folders)
    assert [len(run.changes) for run in found.runs] == [1, 1, 0]
    assert [method.runs for method in found.methods] == [["s1", "s3"], ["s2"]]


def test_run_without_a_common_step_does_not_count_as_equal(make_run, capsys):
    folders = [make_run("a"), make_run("b"), make_run("none", losses=[])]
    (folders[1] / "result.json").write_text('{"steps": 10}')
    first, second, *_ = (lines := said_of(capsys, *folders).splitlines())
    assert first.endswith("not finished") and not second.endswith("not finished")
    place = next(place for place, line in enumerate(lines) if "diverges in step" in line)
    assert [re.split("  +", line.strip()) for line in lines[place + 1 : place + 3]] == [
        ["b", "never", "+0"],
        ["none", "no common step"],
    ]


def test_losses_that_are_not_finite_do_not_count_and_it_is_said(make_run, capsys):
    a, b = make_run("a", losses=[1.0] * 100), make_run("b", losses=[1.5] * 90 + [float("nan")] * 10)
    assert "steps 19 to 90 without the 10 whose loss is not finite: +0.5" in said_of(capsys, a, b)


def test_two_seeds_are_not_enough(make_run, capsys):
    folders = [
        make_run(f"{lr}-{seed}", f"seed: {seed}\ntrain: {{lr: {lr}}}\n", accuracy=0.5) for lr in (0.1, 0.2) for seed in (1, 2)
    ]
    assert "An interval over the seeds takes 3 of each: A has 2, B has 2." in said_of(capsys, *folders)
    again = make_run("again", "seed: 1\ntrain: {lr: 0.1}\n", accuracy=0.5)
    assert compared(folders[0], again).methods == [] and compared(*folders, again).methods[0].seeds == [1, 2]


def test_methods_are_named_by_the_ends_of_paths_and_by_all_of_other_values(make_run):
    folders = [
        make_run(f"{name}{seed}", f"seed: {seed}\ntask: {{model: here/{name}, data_files: {{train: [{name}/x.csv]}}}}\n")
        for name in ("a", "b")
        for seed in (1, 2)
    ]
    names = [method.name for method in compared(*folders).methods]
    assert names == [
        f'{letter}: task.model={name}, task.data_files.train=["{name}/x.csv"]' for letter, name in (("A", "a"), ("B", "b"))
    ]


def test_more_methods_than_letters_have_numbers(make_run, capsys):
    folders = [make_run(f"{lr}", f"seed: 1\ntrain: {{lr: {lr}}}\n", accuracy=0.5) for lr in range(1, 28)]
    again = make_run("again", "seed: 2\ntrain: {lr: 1}\n", accuracy=0.5)
    assert "Z has 1, A26 has 1." in said_of(capsys, *folders, again)


def test_bad_arguments_are_refused(make_run, tmp_path, capsys):
    run = make_run("a")
    assert refused(capsys, run) == f"compare needs two or more runs: hftune compare {run} RUN."
    assert refused(capsys, run, run) == "The same run is named twice. Name each once."
    assert (
        refused(capsys, run, tmp_path / "none")
        == f"{tmp_path}/none: there is no such folder. Name the output folder of a run, such as outputs/yelp."
    )
    assert refused(capsys, run, tmp_path) == f"{tmp_path} holds no run: neither metrics.jsonl nor recipe.yaml is in it."


def test_json_has_no_number_that_json_lacks(make_run, capsys):
    a, b = make_run("a"), make_run("b", losses=[1.0, float("nan"), *[0.5] * 8])
    assert cli.main(["compare", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["pairs"][0]["divergence"]["step"] == 2 and [run["name"] for run in found["runs"]] == ["a", "b"]


# Intervals


def correlated(rho, num_steps, num_runs):
    """AR(1) noise of mean 0, (num_runs, num_steps)."""
    noise = np.random.default_rng(0).normal(size=(num_runs, num_steps))
    for step in range(1, num_steps):
        noise[:, step] += rho * noise[:, step - 1]
    return noise


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.6, 0.90), (0.9, 0.85)])
def test_interval_of_steps_covers_the_mean_although_steps_are_correlated(rho, least):
    found = [of_steps(row) for row in correlated(rho, 250, 400)]
    assert least <= np.mean([not interval.is_significant for interval in found]) <= 0.985
    naive = [of_independent(row[50:]) for row in correlated(rho, 250, 400)]
    assert rho < 0.9 or np.mean([not interval.is_significant for interval in naive]) < 0.5


def test_steps_of_the_beginning_are_left_out_and_few_steps_have_no_interval():
    interval = of_steps([100.0] * 20 + [1.0, 2.0] * 40)
    assert interval.mean == 1.5 and interval.half_width == 0 and interval.is_significant
    assert of_steps(np.ones(59)) is None and of_steps(np.ones(60)) is not None


def test_equal_steps_before_runs_part_do_not_count():
    interval = of_steps([0.0] * 60 + [1.5] * 40)
    assert interval.mean == 1.5 and interval.half_width == 0
    assert of_steps([0.0] * 61 + [1.0] * 39) is None and of_steps(np.zeros(60)).half_width == 0


def test_intervals_are_those_of_student_and_welch():
    a, b = np.random.default_rng(1).normal(size=(2, 12))
    paired, unpaired = ttest_rel(b, a).confidence_interval(), ttest_ind(b, a, equal_var=False).confidence_interval()
    for found, expected in ((of_independent(b - a), paired), (of_unpaired(a, b), unpaired)):
        assert found.mean - found.half_width == pytest.approx(expected.low)
        assert found.mean + found.half_width == pytest.approx(expected.high)


def test_too_few_values_and_values_that_are_not_finite_have_no_interval():
    assert of_independent([1.0]) is None and of_independent([1.0, 2.0], min_count=3) is None
    assert of_independent([1.0, math.nan, 2.0]) is None and of_unpaired([1.0, 2.0], [1.0]) is None
    assert of_unpaired([1.0, 1.0], [2.0, 2.0]).half_width == 0


def test_a_metric_that_is_the_same_in_all_runs_shows_no_difference():
    assert not any(of_unpaired([0.3] * count, [0.3] * other).is_significant for count in range(2, 20) for other in range(2, 20))


@pytest.mark.parametrize(("won", "lost"), [(15, 24), (0, 1), (5, 5), (0, 0), (30, 2)])
def test_mcnemar_is_the_exact_binomial_test(won, lost):
    assert mcnemar(won, lost) == pytest.approx(binomtest(won, won + lost).pvalue if won + lost else 1.0)
