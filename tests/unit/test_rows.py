"""Text data from every source that a recipe can name; tokenised once, checked, padded."""

import gzip
import io
import os
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from hftune import DataError
from hftune.data import tokenized
from hftune.data.rows import load_files, load_split, take
from hftune.data.sources import Source
from hftune.data.splits import Split, subsample_indices
from hftune.data.tokenized import Ragged, tokenizer_key
from hftune.data.word_tokenizer import word_tokenizer
from hftune.tasks import ImageClassification, SequenceClassification
from hftune.tasks.text import check_inputs
from tests.support.servers import Web

CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ROWS = [{"text": f"the food was {word} on day {day}", "label": label} for day in range(8) for label, word in enumerate("abc")]


def task(**fields):
    return SequenceClassification(model=None, model_config=CONFIG, vocab_size=100, **fields)


def write(rows, path):
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(path), features=table.features) as writer:
            writer.write_table(table.data.table)
            writer.finalize()
    else:
        getattr(table, f"to_{path.suffix[1:]}")(str(path))
    return str(path)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "arrow"])
def test_all_file_formats_give_the_same_samples(tmp_path, kind):
    files = {part: write(ROWS, tmp_path / f"{part}.{kind}") for part in ("train", "eval")}
    loaded = task(dataset=kind, data_files=files)
    assert loaded.validate() == []
    train = loaded.datasets()["train"]
    assert list(train.column("label")) == [row["label"] for row in ROWS]
    assert loaded.text_tokenizer.decode(train[0]["input_ids"], skip_special_tokens=True) == "the food was a on day 0"
    assert loaded.lengths(train).tolist() == [len(row) for row in (sample["input_ids"] for sample in train)]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_compressed_files_give_the_samples_of_the_files_in_them(tmp_path, kind):
    files = {part: write(ROWS, tmp_path / f"{part}.{kind}") for part in ("train", "eval")}
    packed = {part: f"{file}.gz" for part, file in files.items()}
    for part, file in files.items():
        Path(packed[part]).write_bytes(gzip.compress(Path(file).read_bytes()))
    (one, other) = (task(dataset=kind, data_files=named).datasets()["train"] for named in (files, packed))
    assert [*map(str, one)] == [*map(str, other)]


def test_rows_may_come_from_a_python_function():
    loaded = task(dataset="hftune.data.demo:reviews", max_train_samples=50, max_eval_samples=20)
    assert {part: len(rows) for part, rows in loaded.datasets().items()} == {"train": 50, "eval": 20}


def test_a_drawn_subset_keeps_the_order_and_is_the_same_every_time():
    rows = datasets.Dataset.from_list([{"n": n} for n in range(100)])
    drawn = take(rows, Split("train", 10))["n"]
    assert list(drawn) == sorted(set(drawn)) and len(drawn) == 10
    assert list(take(rows, Split("eval", 10))["n"]) == list(drawn) != list(subsample_indices(100, 10, seed=43))


def test_a_drawn_subset_has_the_rows_that_shuffle_and_select_would_take():
    rows = datasets.Dataset.from_list([{"n": n} for n in range(1000)])
    taken = rows.shuffle(seed=42).select(range(50))["n"]
    assert list(take(rows, Split("train", 50))["n"]) == sorted(taken)


def test_long_texts_are_cut_and_counted_with_their_special_tokens(tmp_path):
    files = {part: write(ROWS, tmp_path / f"{part}.json") for part in ("train", "eval")}
    loaded = task(dataset="json", data_files=files, max_length=5)
    assert set(loaded.lengths(loaded.datasets()["train"])) == {5}


def test_label_names_may_be_the_labels_themselves(tmp_path):
    rows = [{"text": "x y", "label": name} for name in ("good", "bad", "good")]
    files = {part: write(rows, tmp_path / f"{part}.csv") for part in ("train", "eval")}
    loaded = task(dataset="csv", data_files=files)
    assert loaded.labels == ["bad", "good"]
    assert list(loaded.datasets()["eval"].column("label")) == [1, 0, 1]


def test_a_csv_file_whose_header_lacks_a_name_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\n1,good,0\n2,bad,1\n")
    with pytest.raises(DataError, match=r"t\.csv cannot be read as csv: lines have more cells than the header has names\."):
        load_split(Source("csv", {"train": str(tmp_path / "t.csv")}), "train")


def test_a_csv_file_in_another_encoding_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "t.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t\.csv cannot be read as csv: 'utf-8' codec .*\. Save the file as UTF-8\.$"):
        load_split(Source("csv", {"train": str(tmp_path / "t.csv")}), "train")


def test_error_names_the_row_of_the_file_even_in_a_drawn_subset(tmp_path):
    rows = [dict(row) for row in ROWS]
    for row in rows[::2]:
        row["label"] = 9
    files = {part: write(rows, tmp_path / f"{part}.json") for part in ("train", "eval")}
    loaded = task(dataset="json", data_files=files, label_names=["a", "b", "c"], max_train_samples=6)
    with pytest.raises(DataError) as caught:
        loaded.datasets()
    row = int(str(caught.value).split()[1])
    assert rows[row]["label"] == 9


@pytest.mark.parametrize("setting", [{"truncation_side": "left"}, {"eos_token": "cat"}])
def test_tokens_are_kept_for_the_settings_that_made_them(setting):
    first, second = (word_tokenizer(["<unk>", "<eos>", "the", "cat"], "words") for _ in range(2))
    assert tokenizer_key(first) == tokenizer_key(second)
    for name, value in setting.items():
        setattr(second, name, value)
    assert tokenizer_key(first) != tokenizer_key(second)


def test_tokens_are_made_again_with_another_release_of_a_library(monkeypatch):
    tokenizer = word_tokenizer(["<unk>", "<eos>", "the", "cat"], "words")
    before = tokenizer_key(tokenizer)
    monkeypatch.setattr(tokenized, "version", lambda library: "0.1" if library == "tokenizers" else version(library))
    assert tokenizer_key(tokenizer) != before


def test_padding_is_on_the_right_and_masked():
    ids, mask = Ragged.of([np.array([5, 6, 7]), np.array([8])]).padded(0)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert Ragged.of([[5, 6, 7], [8]]).padded(0, side="left")[0].tolist() == [[5, 6, 7], [0, 0, 8]]


def test_shared_yelp_reviews_load(request):
    folder = Path(os.environ.get("HFTUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "yelp"
    if not folder.is_dir():
        pytest.skip("the Yelp sample is not on this machine (set HFTUNE_TEST_DATA to the folder that holds yelp/)")
    files = {"train": str(folder / "train.jsonl"), "eval": str(folder / "test.jsonl")}
    loaded = task(dataset="json", data_files=files, max_train_samples=200, max_eval_samples=100)
    assert set(loaded.datasets()["train"].column("label")) == {0, 1, 2, 3, 4}


def test_file_given_to_a_model_of_texts_says_how_texts_are_given():
    with pytest.raises(DataError) as caught:
        check_inputs([Path("photo.png")])
    assert str(caught.value) == (
        "Input 0 is the file photo.png; texts come from --text and --text-file. This model takes texts."
    )


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_a_quote_that_swallows_rows_is_refused_with_its_row(tmp_path, suffix):
    separator = "\t" if suffix == "tsv" else ","
    lines = [
        separator.join((f"the food was {word}", str(label)))
        for label, word in enumerate(["good", '"fine', "bad", 'b" ad', "ok"])
    ]
    lines[2:4] = [separator.join(('"fine', "1")), separator.join(('ba" d', "0"))]
    path = tmp_path / f"rows.{suffix}"
    path.write_text("\n".join(["text" + separator + "label", *lines]) + "\n")
    with pytest.raises(DataError, match=rf"rows\.{suffix}: a cell of row 2 has the lines of several rows"):
        load_split(Source(files={"train": str(path)}), "train")


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_texts_of_several_lines_that_are_quoted_well_are_read(tmp_path, suffix):
    separator = "\t" if suffix == "tsv" else ","
    cell = '"Dear Sir' + ("," if suffix == "csv" else "") + '\nyour ""food"" was good"'
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f"text{separator}label\n{cell}{separator}1\nbad{separator}0\n")
    rows = load_split(Source(files={"train": str(path)}), "train")
    assert len(rows) == 2 and rows[0]["text"].endswith('your "food" was good')


def test_compressed_and_very_long_texts_of_several_lines_are_read(tmp_path):
    content = f'text,label\n"Dear Sir,\nyour food was {"very " * 30_000}good",1\nbad,0\n'
    (tmp_path / "rows.csv").write_text(content)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("rows.csv", "rows.csv.gz"):
        assert len(load_split(Source(files={"train": str(tmp_path / name)}), "train")) == 2
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b'text,label\na,1\n"b,1\nb" b,0\n'))
    with pytest.raises(DataError, match="a cell of row 1 has the lines of several rows"):
        load_split(Source(files={"train": str(tmp_path / "rows.csv.gz")}), "train")


def test_cells_of_texts_are_read_as_they_are_written_though_a_file_or_a_part_of_it_has_only_numbers(tmp_path):
    cells = ["007", "1.10", "True", "x"]
    first = [*cells, *["x"] * 9_996]
    for name, part in {"a": [*first, "007", "1.10"], "b": ["007", "010"], "c": ["1.10", "2.0"], "d": ["True", "False"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *(f"good,{cell}" for cell in part)]) + "\n")
    files = [str(tmp_path / f"{name}.csv") for name in "abcd"]
    rows = load_split(Source(files={"train": files}), "train")
    expected = ["007", "1.10", "007", "010", "1.10", "2.0", "True", "False"]
    assert rows["label"][:3] == cells[:3] and rows["label"][10_000:] == expected


@pytest.mark.parametrize(
    ("row", "column"), [(b'{"text": "a", "label": "\xe9"}', "label"), (b'{"text": [{"content": "\xe9"}]}', "text")]
)
def test_a_json_file_that_is_not_utf8_is_refused_whatever_column_it_is(tmp_path, row, column):
    (tmp_path / "rows.jsonl").write_bytes(row)
    with pytest.raises(DataError) as refused:
        load_files("json", "--data rows.jsonl", [str(tmp_path / "rows.jsonl")], "test")
    assert str(refused.value) == (
        f"--data rows.jsonl is not UTF-8 in column {column!r}: Invalid UTF8 sequence at string index 0. Convert its file."
    )


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv", "rows.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_text(tmp_path, name):
    content = {"rows.txt": "one\ntwo\n", "rows.csv": "text\none\ntwo\n", "rows.jsonl": '{"text": "one"}\n{"text": "two"}\n'}
    (tmp_path / name).write_text(content[name], encoding="utf-8-sig")
    rows = load_split(Source(files={"train": str(tmp_path / name)}), "train")
    assert list(rows["text"]) == ["one", "two"]


def test_folder_of_save_to_disk_is_a_data_set(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
    rows.save_to_disk(tmp_path / "one")
    assert load_split(Source(str(tmp_path / "one")), "train", "train")["text"] == rows["text"]
    datasets.DatasetDict(train=rows, test=rows.select([2])).save_to_disk(tmp_path / "several")
    assert load_split(Source(str(tmp_path / "several")), "eval", "test")["text"] == ["c"]
    with pytest.raises(
        DataError, match=r"several: unknown split 'dev'\. It has test, train\. Set task\.eval_split to one of them"
    ):
        load_split(Source(str(tmp_path / "several")), "eval", "dev")


def test_zip_files_and_files_elsewhere_are_read(tmp_path):
    content = b"text,label\n007,1\nb,0\n"
    with zipfile.ZipFile(tmp_path / "rows.csv.zip", "w") as file:
        file.writestr("rows.csv", content)
    with Web({"rows.csv": content, "rows.jsonl": b'{"text": "007"}\n{"text": "b"}\n'}) as web:
        for path in (tmp_path / "rows.csv.zip", f"{web.address}/rows.csv", f"{web.address}/rows.jsonl"):
            assert load_split(Source(files={"train": str(path)}), "train")["text"][:] == ["007", "b"]
        with pytest.raises(DataError, match=r"none\.csv: there is no such file or bucket\."):
            load_split(Source(files={"train": f"{web.address}/none.csv"}), "train")


@pytest.mark.parametrize("name", ["rows.jsonl.zst", "rows.csv.zst"])
def test_missing_package_for_zstd_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr("hftune.data.rows.find_spec", lambda name: None)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    with Web({name: b""}) as web:
        for path in (tmp_path / name, f"{web.address}/{name}?x=1"):
            with pytest.raises(
                DataError, match=rf"{name}(\?x=1)? is compressed with zstd\. To read it: pip install zstandard$"
            ):
                load_split(Source(files={"train": str(path)}), "train")
        assert not web.asked  # it is not downloaded before


def test_tar_files_of_webdataset_are_rows_of_images(tmp_path):
    with tarfile.open(tmp_path / "images.tar", "w") as file:
        for number in range(3):
            image = io.BytesIO()
            Image.new("L", (4, 4), number).save(image, "PNG")
            for name, data in ((f"{number}.png", image.getvalue()), (f"{number}.cls", str(number % 2).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    source = Source(files={"train": str(tmp_path / "*.tar")})
    assert not [*source.problems(needs_eval=False)]
    rows = load_split(source, "train")
    assert rows["cls"][:] == [0, 1, 0] and [image.getpixel((0, 0)) for image in rows["png"]] == [0, 1, 2]
    task = ImageClassification(data_files=source.files, eval_share=0.4, label_column="cls")
    assert task.find_columns(rows) == {"image_column": "png", "label_column": "cls"}
