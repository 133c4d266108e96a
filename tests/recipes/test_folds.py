"""``hftune folds``: a run for each fold, predictions of every row, mean and deviation; resumed as a whole."""

import json
from statistics import fmean, stdev

import pytest

from hftune import cli
from hftune.data.demo import reviews
from hftune.replay.audit import audit
from tests.support.runs import SMALL, Command, train_on

SMALL_FOLDS = (*SMALL, "task.dataset=null", "task.max_train_samples=60", "task.max_eval_samples=null", "train.epochs=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two folds on one process; and on two, where the second fold had been stopped before."""
    folder = tmp_path_factory.mktemp("folds")
    path = folder / "all.jsonl"
    rows = [{**row, "label": index % 5} for index, row in enumerate(reviews("train")[:100])]  # so that no class is rare
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (*SMALL_FOLDS, f"task.data_files.train={path}", "train.micro_batch_size=4")
    assert cli.main(["folds", "recipe=yelp_demo", *words, f"output_dir={folder / 'one'}", "-k", "2"]) == 0
    stopped = {"stopped": (*words, "task.eval_fold=[1,2]", f"output_dir={folder / 'two' / 'fold_1'}")}
    train_on(2, stopped, folder, stops={"stopped": (3, 0)})
    again = Command(2, "folds", "recipe=yelp_demo", *words, f"output_dir={folder / 'two'}", "-k", "2", module="hftune.cli")
    out, err = again.communicate()
    assert again.returncode == 0, out + err
    return folder, words, out


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_predicted_once_in_the_order_of_the_file(made):
    folder, _, _ = made
    one, two = (read(folder / name / "out_of_fold.jsonl") for name in ("one", "two"))
    texts = [row["text"] for row in read(folder / "all.jsonl")]
    assert len(one) == 60 and [row["row"] for row in one] == sorted({row["row"] for row in one})
    assert all(texts[row["row"]].startswith(row["text"][:-1]) for row in one) and {row["fold"] for row in one} == {0, 1}
    assert [(row["row"], row["fold"], row["prediction"]) for row in two] == [
        (row["row"], row["fold"], row["prediction"]) for row in one
    ]


def test_each_fold_says_of_which_data_and_columns_it_is(made):
    folder, _, _ = made
    runs = [folder / name / f"fold_{number}" for name in ("one", "two") for number in (0, 1)]
    digests = {json.loads((run / "run.json").read_text())["fold_data"] for run in runs}
    assert len(digests) == 1 and None not in digests
    columns = json.loads((runs[0] / "model" / "hftune.json").read_text())["columns"]
    assert columns == {"text_column": "text", "label_column": "label"}


def test_the_predictions_are_those_of_the_best_model_of_each_fold(made):
    folder, _, _ = made
    scores = json.loads((folder / "one" / "folds.json").read_text())
    rows = read(folder / "one" / "out_of_fold.jsonl")
    for found in scores["folds"]:
        own = [row for row in rows if row["fold"] == found["fold"]]
        right = sum(row["prediction"] == row["label"] for row in own)
        assert found["metrics"]["accuracy"] == pytest.approx(right / len(own))


def test_mean_and_deviation_are_those_of_the_folds(made):
    folder, _, said = made
    one, two = (json.loads((folder / name / "folds.json").read_text()) for name in ("one", "two"))
    losses = [found["metrics"]["loss"] for found in one["folds"]]
    assert one["mean"]["loss"] == pytest.approx(fmean(losses)) and one["num_rows"] == 60
    assert one["standard_deviation"]["loss"] == pytest.approx(stdev(losses))
    assert two["mean"] == pytest.approx(one["mean"], rel=1e-5)
    assert "fold 0 of 2" in said and "\n  mean " in said and "\n  deviation " in said and said.count("\n  mean ") == 1


def test_a_fold_that_was_stopped_is_resumed_and_finished_ones_are_left_alone(made, capsys):
    folder, words, _ = made
    found = audit(folder / "two" / "fold_1")
    assert (found.problems, [start["after_step"] for start in found.starts]) == ([], [0, 4])
    before = (folder / "one" / "folds.json").read_text()
    assert cli.main(["folds", "recipe=yelp_demo", *words, f"output_dir={folder / 'one'}", "-k", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("is finished.") == 2 and "loading" not in said
    assert (folder / "one" / "folds.json").read_text() == before


@pytest.mark.parametrize(
    "words, said",
    [
        (("-k", "1"), "-k 1 must be at least 2: each fold is evaluated by a model that was trained on the others."),
        (("eval.every=never",), "eval.every=never: folds are there to be evaluated. Leave it out."),
        (("resume=outputs/x",), "resume=outputs/x: each fold resumes from its own folder. Use auto or never."),
        (
            ("recipe=restoration_demo",),
            "ImageRestoration cannot hold out folds: it does not say which rows they are (fold_rows).",
        ),
    ],
)
def test_what_cannot_be_folded_is_refused(capsys, words, said):
    recipe = () if any(word.startswith("recipe=") for word in words) else ("recipe=yelp_demo",)
    assert cli.main(["folds", *recipe, *words]) == 2
    assert capsys.readouterr().err == f"hftune: {said}\n"
