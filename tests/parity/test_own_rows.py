"""Rows held out, several data sets with weights, and no evaluation: the same on 1, 2 and 4 processes, and resumed."""

import json
import sqlite3

import pytest
import torch
from safetensors.torch import load_file

from hftune import cli, rows_file
from hftune.data.demo import paragraphs, reviews
from hftune.replay.audit import audit
from tests.support.runs import SMALL, three_files, train_on

WORLD_SIZES = (1, 2, 4)
OWN = (*SMALL, "task.dataset=null", "task.max_train_samples=null", "task.max_eval_samples=null", "train.epochs=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = reviews("train")[:100]
    whole, many, few = three_files(folder, rows)
    parts = f"[{{data_files: {many}, weight: 0.5}}, {{data_files: {few}, weight: 2}}]"
    mixed = (*OWN, f"task.datasets={parts}", "task.eval_share=0.2", "train.micro_batch_size=4")
    parts, mixing = f"[{{data_files: {many}}}, {{data_files: {few}}}]", "{by: tokens, temperature: 3, max_repeats: 1.5}"
    tokens = (*mixed, f"task.datasets={parts}", f"task.mixing={mixing}")
    jobs = {
        "held_out": (*OWN, f"task.data_files.train={whole}", "task.eval_share=0.2", "train.micro_batch_size=4"),
        "mixed": mixed,
        "tokens": tokens,
        "never": (*OWN, f"task.data_files.train={whole}", "eval.every=never", "train.micro_batch_size=4", "train.epochs=1"),
    }
    for name, count in {"long": 300, "short": 100}.items():
        (folder / f"{name}.txt").write_text("".join(f"{row['text']}\n" for row in paragraphs("train")[: 3 * count]))
    parts = f"[{{data_files: {folder / 'long.txt'}, weight: 0.5}}, {{data_files: {folder / 'short.txt'}, weight: 2}}]"
    jobs["blocks"] = (
        *("recipe=language_modeling_demo", "task.dataset=null", f"task.datasets={parts}", "task.eval_share=0.1"),
        *("task.block_length=16", "task.model_config={n_embd: 32, resid_pdrop: 0.1, embd_pdrop: 0.1}", "train.epochs=1"),
        *("train.micro_batch_size=4", "train.log_every=1", "train.max_steps=12", "task.generation={max_new_tokens: 4}"),
    )
    with sqlite3.connect(folder / "rows.db") as database:  # where their order is a different one
        database.execute("CREATE TABLE rows (id INTEGER, text TEXT, label INTEGER)")
        values = [(number, row["text"], row["label"]) for number, row in enumerate(rows)]
        database.executemany("INSERT INTO rows VALUES (?, ?, ?)", values[::-1])
    database.close()
    elsewhere = ("task.dataset='${oc.env:OWN_DATABASE}'", "task.query.train=SELECT text, label FROM rows ORDER BY id")
    in_memory = f"task.data_files.train={rows_file(rows)}"
    found = {}
    for size in WORLD_SIZES:
        again = {
            "stopped": tokens,
            "resumed": (*tokens, f"output_dir={folder / 'stopped-on-2'}"),
            "asked": (*OWN, "task.eval_share=0.2", "train.micro_batch_size=4", *elsewhere),
            "asked_again": (
                *OWN,
                "task.eval_share=0.2",
                "train.micro_batch_size=4",
                *elsewhere,
                f"output_dir={folder / 'asked-on-2'}",
            ),
            "in_memory": (*jobs["held_out"], in_memory),
        }
        some = jobs | (again if size == 2 else {}) if size < 4 else {"mixed": mixed}
        options = {"stops": {"stopped": (7, 0), "asked": (3, 0)}, "variables": {"OWN_DATABASE": f"sqlite:///{folder}/rows.db"}}
        found |= {(name, size): run for name, run in train_on(size, some, folder, **options).items()}
    return found


@pytest.mark.parametrize(
    ("name", "size"), [("held_out", 2), ("mixed", 2), ("mixed", 4), ("tokens", 2), ("never", 2), ("blocks", 2)]
)
def test_losses_do_not_depend_on_processes_with_dropout_on(runs, name, size):
    expected = runs[name, 1].logged("train/loss")
    assert len(expected) == {"held_out": 12, "mixed": 10, "tokens": 12, "never": 7, "blocks": 12}[name]
    assert runs[name, size].logged("train/loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_rows_held_out_are_those_that_are_evaluated(runs, size):
    for name in ("held_out", "mixed") if size < 4 else ("mixed",):
        run = runs[name, size]
        assert len(run.predictions) == sum(map(sum, run.result["metrics"]["confusion_matrix"])) == 19  # a fifth of each grade
        assert [row["text"] for row in run.predictions] == [row["text"] for row in runs[name, 1].predictions]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_ledger_proves_the_use_of_each_data_set(runs, size):
    found = audit(runs["mixed", size].folder)
    assert (found.problems, found.whole_epochs) == ([], 2)
    assert [part["weight"] for part in found.mixture] == [0.5, 2.0] and sum(part["rows"] for part in found.mixture) == 81
    assert found.samples == 2 * sum(part["samples"] for part in found.mixture)
    assert size == 4 or audit(runs["held_out", size].folder).samples == 162


def test_a_mixture_that_was_stopped_ends_bit_equal(runs):
    one, two = (load_file(runs[name, 2].folder / "model_last" / "model.safetensors") for name in ("resumed", "tokens"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert runs["resumed", 2].logged("train/loss") == runs["tokens", 2].logged("train/loss")
    found = audit(runs["resumed", 2].folder)
    first, second = (start["after_step"] for start in found.starts)
    assert (found.problems, found.whole_epochs, first) == ([], 2, 0) and 7 <= second <= 8  # in the second epoch of 6 steps


def test_shares_of_tokens_are_the_same_on_any_number_of_processes_and_are_reported(runs):
    plans = [audit(runs["tokens", size].folder).mixture for size in (1, 2)]
    assert plans[0] == plans[1] and plans[0][1]["weight"] == 1.5 and plans[0][0]["weight"] < 1
    facts = json.loads((runs["tokens", 2].folder / "run.json").read_text())["mixture"]
    assert [part["name"] for part in facts] == ["many.jsonl", "few.jsonl"]
    assert [part["used"] for part in facts] == [part["samples"] for part in plans[0]]
    page = (runs["tokens", 2].folder / "report.html").read_text()
    assert "what an epoch uses of each" in page and "many.jsonl" in page


def test_rows_of_a_database_and_of_a_program_train_as_those_of_a_file(runs):
    expected = runs["held_out", 2].logged("train/loss")
    assert runs["in_memory", 2].logged("train/loss") == runs["asked_again", 2].logged("train/loss") == expected
    found = audit(runs["asked_again", 2].folder)
    assert (found.problems, found.whole_epochs, len(found.starts)) == ([], 2, 2)
    for path in runs["asked_again", 2].folder.rglob("*"):
        assert not path.is_file() or b"sqlite:///" not in path.read_bytes(), path


def test_without_evaluation_the_last_model_is_the_model(runs):
    run = runs["never", 2]
    assert run.result["best"] == {"step": 7} and run.result["metrics"] == {} and run.logged("eval/loss") == []
    assert sorted(path.name for path in run.folder.iterdir() if path.name.startswith(("model", "predict"))) == ["model"]
    columns = {"text_column": "text", "label_column": "label"}
    assert json.loads((run.folder / "model" / "hftune.json").read_text()) == {"step": 7, "columns": columns}
    assert "## Results" not in (run.folder / "model" / "README.md").read_text()
    assert "This run does not evaluate (eval.every=never)." in (run.folder / "report.html").read_text()


def test_evaluating_such_a_run_asks_for_data(runs, capsys):
    run = runs["never", 1]
    assert cli.main(["evaluate", str(run.folder)]) == 2
    assert "This run has no evaluation data (eval.every=never). Name some: task.data_files.eval=..." in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.folder), f"task.data_files.eval={run.folder.parent / 'few.jsonl'}"]) == 0
    said = capsys.readouterr().out
    assert "accuracy" in said and "samples   25" in said
