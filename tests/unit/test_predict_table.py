"""hftune predict --data on one process: formats, columns, order, what is refused, and going on after a kill."""

import csv
import gzip
import json
import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from hftune import cli, load_model
from hftune.commands import predict_rows
from hftune.commands.predict_data import find_columns, flat, flattened, output_columns, output_rows
from hftune.data.files import IMAGES
from hftune.data.table import read_table, write_table
from hftune.errors import DataError
from hftune.tasks import Seq2Seq, SequenceClassification
from tests.support.predictions import untrained
from tests.support.runs import TINY

TEXTS = [
    "The food was superb.",
    "Cold, and late; never again. " * 9,
    "So so",
    'Great\nplace, "really" great.',
    "I would not go.",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained("yelp_demo", tmp_path_factory.mktemp("run"), *TINY)


@pytest.fixture(scope="module")
def expected(run):
    return load_model(run, device="cpu").predict(TEXTS, probabilities=True)


def test_a_text_that_is_in_no_list_is_refused(run):
    with pytest.raises(DataError, match=r"^The inputs are a single str\. Put it in a list"):
        load_model(run, device="cpu").predict("superb")  # each letter would be answered


@pytest.fixture
def table(tmp_path):
    """A table as a competition gives it: an id with zeros in front, a column in between, no labels."""
    path = tmp_path / "test.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "stars_seen", "text"])
        writer.writerows([f"{index:03d}", index or None, text] for index, text in enumerate(TEXTS))
    return path


def predict(run, *words):
    return cli.main(["predict", str(run), *map(str, words)])


def check(rows, expected):
    assert [row["label"] for row in rows] == [row["label"] for row in expected]
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx([row["probability"] for row in expected], abs=2e-6)  # rounded to 1e-6; batches differ


def test_a_submission_has_the_columns_asked_for_in_the_order_of_the_rows(run, table, expected, tmp_path, capsys):
    output = tmp_path / "submission.csv"
    assert predict(run, "--data", table, "--output", output, "--columns", "id,label", "--batch-size", 2) == 0
    assert output.read_text().splitlines()[:2] == ["id,label", f"000,{expected[0]['label']}"]
    rows = list(csv.DictReader(output.open()))
    assert [row["id"] for row in rows] == ["000", "001", "002", "003", "004"]
    assert [row["label"] for row in rows] == [row["label"] for row in expected]
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["submission.csv", "test.csv"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_each_format_is_read_and_written_with_all_its_cells(run, table, expected, tmp_path, kind):
    frame = pandas.read_csv(table, dtype={"id": str})
    source, output = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    if kind == "parquet":
        frame.to_parquet(source)
    elif kind == "jsonl":
        frame.to_json(source, orient="records", lines=True)
    else:
        frame.to_csv(source, index=False, sep="\t" if kind == "tsv" else ",")
    assert predict(run, "--data", source, "--output", output, "--probabilities") == 0
    if kind == "parquet":
        found = pandas.read_parquet(output)
    elif kind == "jsonl":
        found = pandas.read_json(output, lines=True, dtype={"id": str})
    else:
        found = pandas.read_csv(output, dtype={"id": str}, sep="\t" if kind == "tsv" else ",")
    classes = list(expected[0]["probabilities"])
    assert list(found.columns) == ["id", "stars_seen", "text", *classes, "label", "probability"]
    assert list(found["id"]) == list(frame["id"]) and list(found["text"]) == TEXTS
    assert np.isnan(found["stars_seen"][0]) and list(found["stars_seen"][1:]) == [1, 2, 3, 4]
    check(found.to_dict("records"), expected)
    assert found[classes].sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-5)


def test_the_datas_own_label_is_kept_beside_the_prediction(run, tmp_path, write_rows, expected, capsys):
    path = write_rows("eval.jsonl", [{"text": text, "label": index} for index, text in enumerate(TEXTS)])
    assert predict(run, "--data", path, "--output", tmp_path / "out.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["label_given"] for row in rows] == [0, 1, 2, 3, 4]
    check(rows, expected)
    assert "note: The data's own values are in label_given." in capsys.readouterr().out


def test_a_text_column_of_another_name_is_mapped_or_asked_for(run, table, tmp_path, capsys):
    output = tmp_path / "out.csv"
    other = tmp_path / "other.csv"
    other.write_text(table.read_text().replace(",text", ",review"))
    assert predict(run, "--data", other, "--output", output) == 2
    assert "has no column 'text'. It has: id, stars_seen, review. Name the right one: --map text=" in capsys.readouterr().err
    assert predict(run, "--data", other, "--output", output, "--map", "text=review", "--columns", "label") == 0
    assert len(output.read_text().splitlines()) == 6
    assert predict(run, "--data", other, "--output", output, "--map", "text=reviews") == 2
    assert "has no such column. It has: id, stars_seen, review. Did you mean 'review'?" in capsys.readouterr().err
    assert predict(run, "--data", other, "--output", output, "--map", "text=stars_seen") == 2
    assert "column 'stars_seen' holds numbers, not texts." in capsys.readouterr().err
    assert predict(run, "--data", other, "--output", output, "--map", "texts=review") == 2
    assert "--map texts=review: this task's inputs are called text." in capsys.readouterr().err
    lines = tmp_path / "lines.txt"  # a single column, whatever its name
    lines.write_text("\n".join(["Good.", "Bad."]))
    assert predict(run, "--data", lines, "--output", output, "--columns", "label") == 0
    assert len(output.read_text().splitlines()) == 3


def test_empty_texts_are_refused_by_row_or_get_no_prediction(run, tmp_path, write_rows, capsys):
    path = write_rows("holes.jsonl", [{"id": 0, "text": "Good."}, {"id": 1, "text": " "}, {"id": 2, "text": None}])
    output = tmp_path / "out.csv"
    assert predict(run, "--data", path, "--output", output) == 2
    assert "has no input in column 'text' at row 1, 2 (counted from 0)." in capsys.readouterr().err
    assert predict(run, "--data", path, "--output", output, "--empty", "null", "--columns", "id,label") == 0
    assert [line.split(",")[1] == "" for line in output.read_text().splitlines()[1:]] == [False, True, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--output x.csv --data nope.csv", "--data nope.csv: there is no such file."),
        ("--data test.csv", "--data needs a file for the predictions: --output FILE (.csv, .tsv, .jsonl, .parquet)."),
        ("--data test.csv --output x.xlsx", "--output x.xlsx: its name does not end in one of .csv,"),
        ("--data test.csv --output none/x.csv", "--output none/x.csv: there is no folder "),
        (
            "--data y.csv.parts --output x.csv",
            f"--data y.csv.parts: y.csv.parts has no images ({', '.join(IMAGES)}). For a table, name its",
        ),
        ("--data empty.csv --output x.csv", "--data empty.csv cannot be read as csv: No columns to parse from file."),
        ("--data header.csv --output x.csv", "--data header.csv has no rows."),
        ("--data ragged.csv --output x.csv", "--data ragged.csv cannot be read as csv: Error tokenizing data."),
        ("--data test.csv --output x.csv --columns id,lable", "--columns: there is no column 'lable'. There are:"),
        ("--data test.csv --output x.csv --text x", "--text does not go with --data."),
        ("--data owner/name --output x.csv", "--data=owner/name cannot be loaded: HF_HUB_OFFLINE is set"),
        ("--data blank.csv --output x.csv --empty null", "--data blank.csv: no row has an input in column 'text'."),
        ("--data test.csv --output y.csv", "y.csv.parts has the name of the folder for unfinished predictions, but holds"),
        ("--data test.csv --output ./test.csv", "--output test.csv is the table itself, which would be overwritten. Name a"),
        ("--text x --map text=a", "--map is for tables: --data FILE."),
    ],
)
def test_bad_input_is_refused_in_a_sentence(run, table, tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    tables = {"empty.csv": "", "header.csv": "text\n", "ragged.csv": "text\na\nb,c,d\n", "blank.csv": "text,id\n,1\n"}
    (tmp_path / "y.csv.parts").mkdir()
    for name, text in {**tables, "y.csv.parts/kept": "mine"}.items():
        (tmp_path / name).write_text(text)
    assert predict(run, *words.split()) == 2
    assert capsys.readouterr().err.startswith(f"hftune: {said}")
    assert not (tmp_path / "x.csv").exists() and (tmp_path / "y.csv.parts" / "kept").exists()


def test_a_compressed_table_is_read_as_the_one_in_it(table):
    packed = table.with_name("test.csv.gz")
    packed.write_bytes(gzip.compress(table.read_bytes()))
    assert read_table(str(packed)).rows.to_list() == read_table(str(table)).rows.to_list()


def test_a_column_without_a_cell_in_ten_thousand_rows_is_read_as_text(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,id,late,never\n" + "a,007,,\n" * 10_000 + "a,008,true,\n")
    rows = read_table(str(path)).rows
    assert rows[0] == {"text": "a", "id": "007", "late": None, "never": None} and rows[10_000]["late"] == "true"
    assert {name: kind.dtype for name, kind in rows.features.items()} == dict.fromkeys(rows.features, "large_string")


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_bare_carriage_return_breaks_no_row(tmp_path, kind):
    write_table(path := tmp_path / f"t.{kind}", kind, ["text", "id"], [{"text": "a\rb", "id": 1}, {"text": "c", "id": 2}])
    assert read_table(str(path)).rows["text"] == ["a\rb", "c"]
    assert path.read_bytes().count(b"\n") == 3 and b"\r\n" not in path.read_bytes()


@pytest.mark.parametrize("is_list", [False, True])
def test_dates_of_a_json_file_stay_as_they_are_written(tmp_path, is_list):
    first = {"day": "2024-05-01", "text": "a", "at": {"last": ["2024-05-01T10:00:00Z"]}}
    days = [first, {"day": None, "text": "b\u2028"}]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(days) if is_list else "\n".join(json.dumps(row, ensure_ascii=False) for row in days))
    rows = read_table(str(path)).rows
    assert rows.column_names == ["day", "text", "at"] and list(rows) == [days[0], {**days[1], "at": None}]
    path.write_text('{"day": "2024-05-01"}')
    assert list(read_table(str(path)).rows) == [{"day": "2024-05-01"}]


def test_numbers_of_64_bits_and_values_of_several_kinds_are_written_as_parquet(run, tmp_path):
    path, output = tmp_path / "test.jsonl", tmp_path / "out.parquet"
    path.write_text("\n".join(json.dumps({"text": "So so", "id": value}) for value in (1, "x", None, [2])))
    assert predict(run, "--data", path, "--output", output) == 0
    assert list(pandas.read_parquet(output)["id"].fillna("")) == ["1", '"x"', "", "[2]"]
    rows = datasets.Dataset.from_dict({"id": np.array([2**64 - 1], np.uint64)})
    write_table(output, "parquet", ["id"], iter(rows), rows.features)
    assert pandas.read_parquet(output)["id"].tolist() == [2**64 - 1]


def test_no_column_takes_the_place_of_another_one(tmp_path):
    (tmp_path / "t.csv").write_text("text,label,label_given\nhello,new,old\n")
    job = SimpleNamespace(table=read_table(str(tmp_path / "t.csv")), selected=None, options={"probabilities": True})
    prediction = {"label": "probability", "probability": 0.75, "probabilities": {"probability": 0.75, "label": 0.25}}
    columns = output_columns(job, list(flat(prediction)))
    assert list(output_rows(job, columns, iter([prediction]))) == [
        {
            **{"text": "hello", "label_given_given": "new", "label_given": "old"},
            **{"probability_probability": 0.75, "label_probability": 0.25, "label": "probability", "probability": 0.75},
        }
    ]


def test_the_column_that_was_trained_on_comes_before_a_guess(tmp_path):
    (tmp_path / "t.csv").write_text("id,text,opinion\n1,a,b\n")
    table, task = read_table(str(tmp_path / "t.csv")), SequenceClassification(label_column="label")
    assert task.input_columns() == {"text": None}
    for trained_on, column in (({"text_column": "opinion"}, "opinion"), ({"text_column": "gone"}, "text"), ({}, "text")):
        assert find_columns(task, table, {}, trained_on, task.input_columns()) == {"text": column}
    (tmp_path / "n.csv").write_text("id,stars\n1,2\n")
    with pytest.raises(DataError, match=r"has no column that could be the text\. It has: id, stars\. Name the right one"):
        find_columns(task, read_table(str(tmp_path / "n.csv")), {}, {}, task.input_columns())


def test_a_text_without_a_token_is_planned():
    assert sum(len(batch.samples) for batch in predict_rows.plan(np.zeros(3, np.int64), 2, 2048)) == 3


def test_texts_of_a_translation_column_are_found_by_their_names(tmp_path, write_rows):
    path = write_rows("rows.jsonl", [{"id": 1, "translation": {"en": "a train", "fr": "un train"}}])
    task, given = Seq2Seq(source_column="translation.en", target_column="translation.fr"), {"source": "translation.fr"}
    table = flattened(read_table(str(path)), task.input_columns(), {})
    assert (
        find_columns(task, table, {}, {}, task.input_columns()) == {"source": "translation.en"}
        and table.rows[0]["translation.en"] == "a train"
    )
    wanted = Seq2Seq().input_columns()
    assert find_columns(Seq2Seq(), flattened(read_table(str(path)), wanted, given), given, {}, wanted) == given


def test_a_killed_prediction_goes_on_and_starts_over_for_different_data(run, table, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(predict_rows, "PART", 2)
    output, calls, predict_one = tmp_path / "out.csv", [], SequenceClassification.predict

    def dying(self, model, inputs, **options):
        calls.extend(inputs)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return predict_one(self, model, inputs, **options)

    monkeypatch.setattr(SequenceClassification, "predict", dying)
    assert predict(run, "--data", table, "--output", output) == 130
    assert not output.exists() and len(list((tmp_path / "out.csv.parts").glob("rows_*.jsonl"))) == 2
    shutil.copytree(tmp_path / "out.csv.parts", tmp_path / "kept")
    calls.clear()
    (run / "model").rename(run / ".model.replaced")  # as a kill between two renames of an export leaves it
    assert predict(run, "--data", table, "--output", output, "--batch-size", 3) == 0
    (run / ".model.replaced").rename(run / "model")
    assert calls == TEXTS[4:] and not (tmp_path / "out.csv.parts").exists()
    assert "note: Going on after 4 of 5 rows, which are predicted already." in capsys.readouterr().out
    check(list(csv.DictReader(output.open())), expected)

    shutil.copytree(tmp_path / "kept", tmp_path / "out.csv.parts")
    table.write_text(table.read_text() + "005,,Fine.\n")
    monkeypatch.setattr(SequenceClassification, "predict", predict_one)
    assert predict(run, "--data", table, "--output", output, "--batch-size", 3) == 0
    assert "out.csv.parts belongs to a different input: starting over." in capsys.readouterr().out
    assert len(output.read_text().splitlines()) > 6

    shutil.copytree(tmp_path / "kept", tmp_path / "out.csv.parts")
    (tmp_path / "out.csv.parts" / "about.json").write_text("{")
    assert predict(run, "--data", table, "--output", output, "--batch-size", 3) == 0
    assert "starting over." in capsys.readouterr().out


def test_images_come_from_a_folder_or_by_their_paths(tmp_path, capsys, monkeypatch):
    folder = untrained("mnist_demo", tmp_path / "run")
    digits = tmp_path / "digits" / "some"
    digits.mkdir(parents=True)
    for index in range(3):
        Image.fromarray(np.full((28, 28), 60 * index, np.uint8)).save(digits / f"{index}.png")
    output = tmp_path / "out.csv"
    assert predict(folder, "--data", digits.parent, "--output", output, "--columns", "image,label") == 0
    by_folder = output.read_text().splitlines()
    assert [line.split(",")[0] for line in by_folder[1:]] == ["some/0.png", "some/1.png", "some/2.png"]
    table = digits.parent / "list.csv"
    table.write_text("file_name\nsome/2.png\nsome/0.png\n")
    assert predict(folder, "--data", table, "--output", output, "--columns", "file_name,label") == 0
    assert output.read_text().splitlines()[1:] == [by_folder[3], by_folder[1]]
    assert predict(folder, "--input", digits.parent) == 0
    said = capsys.readouterr().err
    assert f"note: --input {digits.parent}: 1 file is left out as no image: {table}" in said
    (digits / "a.wav").write_bytes(b"")
    assert predict(folder, "--input", digits.parent) == 0
    assert f"note: --input {digits.parent}: 2 files are left out as no images: {table}" in capsys.readouterr().err
    assert predict(folder, "--data", digits.parent, "--output", output, "--columns", "image,label") == 0
    assert output.read_text().splitlines() == by_folder
    table.write_text("file_name\nsome/9.png\n")
    assert predict(folder, "--data", table, "--output", output) == 2
    assert "names an image that is not there, at row 0: some/9.png." in capsys.readouterr().err
    tracked = []
    monkeypatch.setattr("hftune.commands.tracked.as_run", lambda recipe, *run: recipe)
    monkeypatch.setattr("hftune.commands.tracked.track_predictions", lambda recipe, facts, rows, images: tracked.extend(rows))
    assert predict(folder, "--input", digits.parent, "--track") == 0
    assert [row["input"] for row in tracked] == [str(digits / f"{index}.png") for index in range(3)]
