"""Rows of Excel files, of databases, and of programs: what becomes of their cells, and what is refused."""

import datetime
import sqlite3

import datasets
import pandas
import pytest

from hftune import ConfigError, DataError, rows_file
from hftune.config import Recipe
from hftune.data import notices
from hftune.data.cells import excel_file, query_file
from hftune.data.rows import load_split
from hftune.data.sources import Source, names_eval_data
from hftune.data.table import read_table
from hftune.tasks import SequenceClassification

CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
QUERY = "SELECT text, stars FROM reviews ORDER BY id"
ROWS = [{"text": f"text {number}", "stars": number % 2} for number in range(8)]


@pytest.fixture
def database(tmp_path):
    """The URL of a database with a table of reviews, whose ids go backwards."""
    with sqlite3.connect(tmp_path / "reviews.db") as connection:
        connection.execute("CREATE TABLE reviews (id INTEGER PRIMARY KEY, text TEXT, stars INTEGER)")
        values = [(-number, row["text"], row["stars"]) for number, row in enumerate(ROWS)]
        connection.executemany("INSERT INTO reviews VALUES (?, ?, ?)", values)
    connection.close()
    return f"sqlite:///{tmp_path}/reviews.db"


def read(path):
    return load_split(Source(files={"train": path}), "train")


def problems(**fields):
    return SequenceClassification(model=None, model_config=CONFIG, **fields).validate()


# Excel


@pytest.fixture
def book(tmp_path):
    """Write sheets of rows, and return the path of the file."""
    openpyxl = pytest.importorskip("openpyxl", reason="needs openpyxl, which writes Excel files")

    def write(name="book.xlsx", **sheets):
        made = openpyxl.Workbook()
        made.remove(made.active)
        for title, rows in sheets.items():
            sheet = made.create_sheet(title)
            for row in rows:
                sheet.append(row)
        made.save(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_cells_of_an_excel_file_are_what_they_are(book):
    day = datetime.datetime(2024, 5, 1)
    head = ["text", "code", "whole", "number", "mixed", "day", 2020]
    path = book(first=[head, ["NA", "007", 7, 7.5, 1, day, True], ["null", "1e3", None, 2, "two", None, False], [" ", None, 8]])
    rows = read(path)
    assert rows[:] == {
        **{"text": ["NA", "null", " "], "code": ["007", "1e3", None], "whole": [7, None, 8], "number": [7.5, 2.0, None]},
        **{"mixed": ["1", "two", None], "day": [day, None, None], "2020": [True, False, None]},
    }
    assert [rows.features[name].dtype for name in ("code", "whole", "number")] == ["string", "int64", "float64"]


def test_rows_of_an_excel_file_are_those_of_a_csv_file(book, tmp_path):
    table = [["text", "label"], *([row["text"], row["stars"]] for row in ROWS)]
    path = book(notes=[["nothing"]], data=table)
    pandas.DataFrame(table[1:], columns=table[0]).to_csv(tmp_path / "book.csv", index=False)
    excel = load_split(Source(files={"train": path}, sheet="data"), "train")
    assert excel[:] == load_split(Source(files={"train": str(tmp_path / "book.csv")}), "train")[:]
    assert read_table(book("one.xlsx", data=table)).rows[:] == excel[:]
    other = book("other.xlsx", data=[table[0], ["an other text", 3]])
    assert read([other, str(tmp_path / "one.xlsx")])["text"][:2] == ["an other text", "text 0"]


def test_excel_files_that_cannot_be_read_are_refused_in_a_sentence(book, tmp_path, monkeypatch):
    def said(*files, sheet=None):
        with pytest.raises(DataError) as caught:
            excel_file("task.data_files.train=x", [*files], sheet)
        return str(caught.value)

    path = book(reviews=[["text", "label"], ["a", 1]], notes=[["a"]])
    assert said(path, sheet="review") == (
        f"task.sheet=review is not a sheet of {path}. It has: reviews, notes. Did you mean 'reviews'?"
    )
    other = book("other.xlsx", one=[["text"], ["b"]])
    assert said(path, other) == (
        f"task.data_files.train=x: {other} has the columns text, and the first file has text, label. Make them the same."
    )
    (tmp_path / "no.xlsx").write_text("text,label")
    assert said(str(tmp_path / "no.xlsx")).startswith(f"task.data_files.train=x: {tmp_path}/no.xlsx cannot be read as an Excel")
    assert excel_file("", [path], None) == excel_file("", [path], None) != excel_file("", [path], "notes")
    monkeypatch.setattr(pandas, "ExcelFile", raising(ImportError("`Import openpyxl` failed.")))
    path = book(reviews=[["text", "label"], ["b", 2]])
    assert said(path) == f"task.data_files.train=x: {path} is an Excel file. To read it: pip install openpyxl"
    monkeypatch.setattr(pandas, "ExcelFile", raising(ImportError("`Import python-calamine` failed.")))
    (tmp_path / "old.xls").write_bytes(b"")
    assert said(str(tmp_path / "old.xls")).endswith("old.xls is an Excel file. To read it: pip install xlrd")


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


# Databases


def test_rows_of_a_query_are_in_its_order_and_their_file_is_named_by_what_is_in_them(database):
    query = "SELECT text, stars, '50% :x' AS note, CASE WHEN stars THEN 1 ELSE 'no' END AS mixed FROM reviews ORDER BY id DESC"
    path = query_file("task.query.train", database, query)
    rows = read(path)
    assert rows["text"][:] == [row["text"] for row in ROWS] and rows["stars"][:2] == [0, 1]
    assert rows[0]["note"] == "50% :x" and rows["mixed"][:2] == ["no", "1"]
    assert query_file("task.query.train", database, query) == path
    with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE reviews SET text = 'other' WHERE id = 0")
    connection.close()
    assert query_file("task.query.train", database, query) != path


def test_queries_of_both_splits_or_a_share_are_enough(database):
    eval_query = "SELECT text, stars FROM reviews WHERE id > -3 ORDER BY id"
    own = SequenceClassification(model=None, model_config=CONFIG, dataset=database, query={"train": QUERY, "eval": eval_query})
    assert own.validate() == [] and {split: len(rows) for split, rows in own.rows.items()} == {"train": 8, "eval": 3}
    assert names_eval_data(own) and notices.ignored_splits(own) == []
    shared = SequenceClassification(model=None, model_config=CONFIG, dataset=database, query={"train": QUERY}, eval_share=0.25)
    assert shared.validate() == [] and not names_eval_data(shared) and len(shared.rows["eval"]) == 2
    entries = [{"dataset": database, "query": QUERY, "columns": {"label": "stars"}}]
    mixed = SequenceClassification(model=None, model_config=CONFIG, datasets_=entries, eval_share=0.25)
    assert mixed.validate() == [] and mixed.rows["train"].column_names == ["text", "label"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"query": {"train": "SELECT text FROM reviews"}}, "task.query.train has no ORDER BY, and without one a database may"),
        (
            {"query": {"train": QUERY, "dev": QUERY}},
            "task.query.dev is not a key of a recipe. Keys of task.query: train, eval,",
        ),
        ({"query": {"train": 3}}, "task.query.train=3 is not a query, such as 'SELECT text, label FROM reviews ORDER BY id'."),
        ({}, "task.query.train is missing. Say which rows of task.dataset to train on, such as 'SELECT text, label FROM"),
        (
            {"query": {"train": QUERY}, "eval_share": None},
            "task.query.eval is missing. Select evaluation data (task.query.eval=",
        ),
        ({"dataset": "owner/name", "query": {"train": QUERY}}, "task.query asks a database. Name it alone, by task.dataset="),
        (
            {"dataset": "sqlite:///review.db", "query": {"train": QUERY}},
            "task.dataset=sqlite:///review.db: there is no such file.",
        ),
    ],
)
def test_wrong_queries_are_refused(database, fields, problem):
    said = problems(**{"dataset": database, "eval_share": 0.1, **fields})
    assert said[0].startswith(problem) and len(said) == 1


def test_what_a_database_refuses_is_said_in_a_sentence_without_its_password(database, monkeypatch):
    sqlalchemy = pytest.importorskip("sqlalchemy")

    def said(query=QUERY, url=database):
        with pytest.raises(DataError) as caught:
            query_file("task.query.train", url, query)
        assert caught.value.__cause__ is None or "hunter2" not in repr(caught.value.__cause__)
        return str(caught.value)

    assert said("SELECT txt FROM reviews ORDER BY id") == "task.query.train failed: no such column: txt."
    assert said("SELECT text FROM review ORDER BY id") == "task.query.train failed: no such table: review."
    assert said("DELETE FROM reviews").startswith("task.query.train failed: This result object does not return rows")
    assert len(read(query_file("task.query.train", database, QUERY))) == 8  # nothing has been deleted
    assert said("SELECT id, id FROM reviews").startswith("task.query.train selects two columns of the name id. Rename one")
    assert (
        said(url="nonsense://me:hunter2@host/x") == "task.query.train failed: Can't load plugin: sqlalchemy.dialects:nonsense."
    )
    refused = sqlalchemy.exc.OperationalError("SELECT", {}, Exception("password hunter2 of me is wrong\nDETAIL: more"))
    monkeypatch.setattr(sqlalchemy, "create_engine", raising(refused))
    assert said(url="mysql://me:hunter2@host/x") == "task.query.train failed: password ... of me is wrong."
    monkeypatch.setattr(sqlalchemy, "create_engine", raising(ModuleNotFoundError("No module named 'psycopg'", name="psycopg")))
    assert said() == "task.query.train needs the driver of this database, the Python package psycopg."


def test_password_of_a_database_is_refused_or_stays_a_reference(database, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"task\.dataset=postgresql://me:\.\.\.@host/db holds a password or token") as caught:
        Recipe.load("text_classification", "task.dataset=postgresql://me:hunter2@host/db", f"task.query.train={QUERY}")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("OWN_DB", database)
    recipe = Recipe.load("text_classification", "task.dataset=${oc.env:OWN_DB}", {"task.query": {"train": QUERY}})
    assert database not in recipe.to_yaml() and "${oc.env:OWN_DB}" in recipe.to_yaml() and recipe.task.source.kind == "database"


def test_queries_of_a_recipe_need_trust(database, tmp_path):
    (path := tmp_path / "own.yaml").write_text(
        f"base: text_classification\ntask: {{dataset: '{database}', query: {{train: '{QUERY}'}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"task\.query\.train \(.*own\.yaml\) is run by a database, and may change it\. Add"):
        Recipe.load(path, trust_code=False)
    assert Recipe.load(path).needs_trust()
    entry = f"{{dataset: '{database}', query: '{QUERY}'}}"
    path.write_text(f"base: text_classification\ntask: {{datasets: [{entry}], eval_share: 0.1}}\n")
    with pytest.raises(ConfigError, match=r"task\.datasets \(.*own\.yaml\) is run by a database, and may change it\."):
        Recipe.load(path, trust_code=False)
    assert not Recipe.load("text_classification", "task.data_files.train=a.csv").needs_trust()


# Rows of programs


def test_rows_of_a_program_become_a_file_that_is_named_by_what_they_are():
    path = rows_file(ROWS)
    assert rows_file(pandas.DataFrame(ROWS)) == rows_file(datasets.Dataset.from_list(ROWS)) == rows_file(iter(ROWS)) == path
    assert rows_file(ROWS[::-1]) != path
    assert read(path)[:] == {name: [row[name] for row in ROWS] for name in ROWS[0]}
    own = SequenceClassification(model=None, model_config=CONFIG, data_files={"train": path}, eval_share=0.25)
    assert own.validate() == [] and len(own.rows["train"]) == 6


def test_columns_that_only_some_rows_have_categories_and_class_names_are_kept():
    assert read(rows_file([{"text": "a"}, {"text": "b", "label": 1}]))[:] == {"text": ["a", "b"], "label": [None, 1]}
    frame = pandas.DataFrame({"text": ["007", "b"], "label": pandas.Categorical(["yes", "no"])})
    assert read(rows_file(frame))[:] == {"text": ["007", "b"], "label": ["yes", "no"]}
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    named = datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
    assert read(rows_file(named)).features == features
    assert rows_file(named) != rows_file([{"text": "a", "label": 1}])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"label": 1}, {"label": "one"}], "Column 'label' holds values of several kinds: int, str. Make them one."),
        (pandas.DataFrame({"label": [1, "one"]}), "Column 'label' holds values of several kinds: int, str. Make them one."),
        (["a text"], "A row must be a dictionary, such as {'text': 'Great.', 'label': 1}, not str."),
        ({"text": ["a"]}, "Rows are a list of dictionaries, a pandas.DataFrame or a datasets.Dataset, not dict."),
        ([], "There are no rows to write."),
    ],
)
def test_what_are_no_rows_is_refused(rows, problem):
    with pytest.raises(DataError) as caught:
        rows_file(rows)
    assert str(caught.value) == problem


def test_query_beside_several_data_sets_is_refused(database):
    (said,) = problems(datasets_=[{"dataset": database, "query": QUERY}], query={"eval": QUERY}, eval_share=0.1)
    assert said.startswith("task.query and task.datasets both name data. Make it an entry of task.datasets")


def test_sheet_of_files_that_are_not_excel_files_is_refused():
    (said,) = problems(data_files={"train": rows_file(ROWS)}, sheet="data", eval_share=0.1)
    assert said == "task.sheet=data names a sheet of Excel files, and none of the files is one. Leave it out."
    entries = [{"data_files": rows_file(ROWS), "sheet": "data"}]
    assert problems(datasets_=entries, eval_share=0.1)[0].startswith("task.datasets[0].sheet=data names a sheet of Excel files")


def test_rows_in_place_of_a_path_and_columns_that_are_not_there_are_refused():
    (said,) = problems(data_files={"train": pandas.DataFrame(ROWS)}, eval_share=0.1)
    assert said.startswith("task.data_files.train=") and said.endswith(
        " is not a path or a list of paths. hftune.rows_file(rows) makes a file of rows."
    )
    own = SequenceClassification(data_files={"train": rows_file(ROWS)}, text_column="review", eval_share=0.1)
    with pytest.raises(DataError, match=r"task\.text_column=review is not a column of the train split\. It has: text, stars"):
        own.rows  # noqa: B018 - it is the looking that is tested
