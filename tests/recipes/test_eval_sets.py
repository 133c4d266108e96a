"""Several evaluation sets by name: on any number of processes, resumed, in all that is written, and what is refused."""

import json

import pytest

from hftune import ConfigError, DataError, Recipe, cli
from hftune.data.demo import reviews, spoken
from hftune.replay.run_record import read_run
from hftune.reporting.charts import make_charts
from tests.support.runs import DATA, NO_DROPOUT, SMALL, three_files, train_on, write_jsonl

SETS = "eval.sets={again: eval, short: %s, renamed: {data_files: %s, columns: {text: words}}}"
WORDS = (*SMALL, *NO_DROPOUT, "train.lr=1e-3", "train.epochs=2", "eval.on_start=true", "eval.metric=short/accuracy")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of short reviews, and one whose texts are in another column."""
    folder, rows = tmp_path_factory.mktemp("sets"), reviews("eval")
    short = [row for row in rows if len(row["text"]) < 400][:29]
    write_jsonl(folder / "short.jsonl", short)
    write_jsonl(folder / "renamed.jsonl", [{"words": row["text"], "label": row["label"]} for row in short])
    return folder


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sets = SETS % (files / "short.jsonl", files / "renamed.jsonl")
    words = (*WORDS, sets)
    stopped = (*words, f"output_dir={folder}/stopped", "checkpoint.every=1")
    jobs = {"sets": words, "stopped": stopped, "resumed": stopped}
    found = train_on(2, jobs, folder, stops={"stopped": (9, 1)})
    alone = {"sets": (*words, "train.micro_batch_size=5", "eval.batch_size=7"), "plain": WORDS[:-1]}
    one = train_on(1, alone, folder)
    return {**found, "one": one["sets"], "plain": one["plain"]}


def evaluations(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key.startswith(("eval/", "step"))}
        for line in lines
        if "eval/loss" in line
    ]


def numbers(evaluation):
    return {key: value for key, value in evaluation.items() if isinstance(value, int | float)}


def test_every_set_has_the_same_metrics_on_any_number_of_processes(runs):
    for mine, theirs in zip(evaluations(runs["sets"]), evaluations(runs["one"]), strict=True):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-5)
    last = evaluations(runs["one"])[-1]
    assert {key.rpartition("/")[0] for key in last if "/" in key} == {"eval", "eval/again", "eval/short", "eval/renamed"}
    # The same rows by another name, and by another column, have the same metrics; others have others.
    for key, value in numbers(last).items():
        if key.startswith("eval/again/"):
            assert value == pytest.approx(last[key.replace("/again", "")], rel=1e-6)
        if key.startswith("eval/renamed/"):
            assert value == pytest.approx(last[key.replace("renamed", "short")], rel=1e-6)
    assert last["eval/short/loss"] != last["eval/loss"]


def test_more_sets_change_neither_the_training_nor_the_scores_of_the_eval_split(runs):
    with_sets, without = evaluations(runs["one"]), evaluations(runs["plain"])
    assert runs["one"].logged("train/loss_step") == pytest.approx(runs["plain"].logged("train/loss_step"), rel=1e-5)
    for mine, theirs in zip(with_sets, without, strict=True):
        assert {key: mine[key] for key in numbers(theirs)} == pytest.approx(numbers(theirs), rel=1e-5)


def test_the_first_evaluation_is_of_the_untrained_model_and_never_the_best(runs):
    run = runs["one"]
    assert [line["step"] for line in evaluations(run)] == [0, 7, 14]
    scores = {line["step"]: line["eval/short/accuracy"] for line in evaluations(run) if line["step"]}
    best = run.result["best"]
    assert best == {"metric": "short/accuracy", "value": max(scores.values()), "step": best["step"]}
    assert scores[best["step"]] == best["value"]
    assert run.result["metrics"] == {
        key.removeprefix("eval/"): value for key, value in evaluations(run)[-1].items() if key != "step"
    }


def test_a_resumed_run_is_the_same_and_does_not_begin_with_an_evaluation_again(runs):
    assert evaluations(runs["resumed"]) == evaluations(runs["sets"])


def test_every_sample_of_every_set_is_predicted_once_into_a_file_of_its_own(runs):
    for name, count in (("", 37), ("_again", 37), ("_short", 29), ("_renamed", 29)):
        rows, others = (
            [json.loads(line) for line in (runs[run].folder / f"predictions{name}.jsonl").read_text().splitlines()]
            for run in ("sets", "one")
        )
        assert len(rows) == count and [row["text"] for row in rows] == [row["text"] for row in others]
        assert sum(row["label"] == row["prediction"] for row in rows) / count == pytest.approx(
            evaluations(runs["sets"])[-1][f"eval{name.replace('_', '/')}/accuracy"]
        )
    assert rows[0]["text"].split()[:3] == reviews_of(runs)[0]["text"].split()[:3]


def reviews_of(runs):
    return [row for row in reviews("eval") if len(row["text"]) < 400]


def test_sets_are_in_the_charts_and_tables_of_a_report_and_evaluate_scores_one(runs, capsys):
    record = read_run(runs["one"].folder)
    (chart,) = [chart for chart in make_charts([record]) if chart.key == "eval/accuracy"]
    assert {line.label for line in chart.lines} == {"accuracy", "again", "short", "renamed"}
    page = (runs["one"].folder / "report.html").read_text()
    assert "Accuracy on short" in page and "Best accuracy on short" in page
    assert (
        cli.main(["evaluate", str(runs["one"].folder), "--split", "short", "--output", str(runs["one"].folder / "x.json")]) == 0
    )
    written = json.loads((runs["one"].folder / "x.json").read_text())
    step = runs["one"].result["best"]["step"]
    (line,) = [line for line in evaluations(runs["one"]) if line["step"] == step]
    assert written["num_samples"] == 29 and written["metrics"]["loss"] == pytest.approx(line["eval/short/loss"], rel=1e-5)
    assert cli.main(["evaluate", str(runs["one"].folder), "--split", "shrot"]) == 2
    assert "--split shrot is not one of eval, test, again, short, renamed. Did you mean 'short'?" in capsys.readouterr().err


def test_texts_that_are_generated_are_those_of_their_own_set(tmp_path):
    _, _, few = three_files(tmp_path, spoken("eval")[:40])
    tiny = ("task.model_config.d_model=16", "task.model_config.d_ff=16", "task.model_config.num_layers=1")
    words = (*tiny, "task.max_train_samples=40", "task.max_eval_samples=12", "train.max_steps=1", f"eval.sets.few={few}")
    run = train_on(1, {"titles": words}, tmp_path, recipe="seq2seq_demo")["titles"]
    rows = [json.loads(line) for line in (run.folder / "predictions_few.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == [row["target"] for row in spoken("eval")[30:40]]


def problems(*words):
    with pytest.raises(ConfigError) as raised:
        Recipe.load("yelp_demo", *words).validate()
    return " ".join(raised.value.problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.sets.a=no.jsonl"], "eval.sets.a=no.jsonl: there is no such file."),
        (["eval.sets={a b: eval}"], "eval.sets.a b: metrics and files have the name of a set."),
        (["eval.sets.test=eval"], "eval.sets.test: metrics and files have the name of a set."),
        (["eval.sets.a=3"], "eval.sets.a=3 names no rows: give it a split of task.dataset"),
        (["eval.sets.a={splt: eval}"], "eval.sets.a.splt is not a key. Keys: dataset, dataset_config"),
        (["eval.sets.a={columns: {text: words}}"], "eval.sets.a.split is missing: which rows to evaluate on."),
        (
            ["eval.sets.a={dataset: own.module:rows}"],
            "eval.sets.a.dataset=own.module:rows must be a data set on the Hub or a folder.",
        ),
        (["eval.sets.a=eval", "eval.every=never"], "eval.sets.a needs evaluations, but eval.every=never."),
        (["eval.on_start=true", "eval.every=never"], "eval.on_start=true needs evaluations, but eval.every=never."),
        (["eval.sets.a=eval", "eval.metric=b/accuracy"], "Did you mean 'a/accuracy'?"),
        (["eval.sets.a=eval", "eval.metric=a/accuracy", "eval.greater_is_better=false"], "contradicts eval.metric=a/accuracy"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(words, said):
    assert said in problems(*words)


def test_a_set_must_have_the_columns_that_are_read(tmp_path):
    write_jsonl(tmp_path / "other.jsonl", [{"review": "Good.", "label": 3}])
    task = Recipe.load("yelp_demo", *DATA, f"eval.sets.other={tmp_path}/other.jsonl").task
    with pytest.raises(DataError, match="eval/other"):
        task.datasets()
    task = Recipe.load(
        "yelp_demo", *DATA, f"eval.sets.other={{data_files: {tmp_path}/other.jsonl, columns: {{text: words}}}}"
    ).task
    with pytest.raises(DataError, match=r"eval\.sets\.other\.columns\.text=words is not a column of eval/other\."):
        task.datasets()
    with pytest.raises(DataError, match=r"Set eval\.sets\.other to one of them|no .* split"):
        Recipe.load("yelp_demo", *DATA, "eval.sets.other=nowhere").task.datasets()
