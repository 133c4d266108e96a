"""What a person reads who gives hftune a wrong recipe or wrong data, or whose task fails on one process; and that it ends.

One process meets the same ``main`` as many do, so what needs no second process calls it here; the rest is launched as
users launch it, under a limit that ends the whole job where it hangs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401 - here, not in the first test that needs it: its log would hold on to that test's captured stderr
import pytest

import hftune.run
from tests.support.runs import Command, warm_python

ROOT = Path(__file__).resolve().parents[2]
TINY = """
task:
  type: SequenceClassification
  model: null
  model_config: {model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}
  vocab_size: 100
  dataset: json
  label_names: [bad, good]
  max_length: 16
train: {epochs: 1, batch_size: 4, micro_batch_size: 2}
"""

GOOD = [{"text": f"text number {number} is fine", "label": number % 2} for number in range(8)]


@pytest.fixture
def tiny(tmp_path: Path, write_rows) -> Callable[..., list[str]]:
    """Return a function that makes the arguments of a run that would train within a second, but for what is overridden."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY)
    good = write_rows("good.jsonl", GOOD)

    def arguments(*overrides: str, train: object = good, eval: object = good) -> list[str]:
        files = [f"task.data_files.train={train}", f"task.data_files.eval={eval}"]
        return [f"recipe={recipe}", f"output_dir={tmp_path / 'out'}", *files, *overrides]

    return arguments


@pytest.fixture
def refused(capsys, monkeypatch) -> Callable[[list[str]], str]:
    """Return a function that runs the command line in this process, and returns all it says of why it refuses."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(arguments: list[str]) -> str:
        code = hftune.run.main(arguments)
        out, err = capsys.readouterr()
        assert code == 2 and [line for line in out.splitlines() if not line.endswith("; loading libraries ...")] == [], err
        return err

    return run


def launch(*command: str, **variables: str) -> tuple[int, str, str]:
    """Run a command as a user does; return exit code, stdout and stderr. A job that hangs is killed, and fails the test."""
    job = subprocess.Popen(
        [Path(warm_python()).with_name(command[0]), *command[1:]],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=150)  # of a whole job, imports included; on a free machine they take 3 to 12 s
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        pytest.fail(f"{' '.join(command)} hangs. It said:\n{out}\n{err}")
    return job.returncode, out, err


def own_lines(err: str) -> list[str]:
    """Return the lines that hftune wrote itself; torchrun repeats them, indented, in its table of failures."""
    return [line for line in err.splitlines() if line.startswith("hftune:")]


# The recipe


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.lr=abc", "train.lr='abc' is not a number, such as 5e-05."),
        ("train.mixed_precision=fp16", "train.mixed_precision=fp16 needs a GPU, and this runs on CPUs. Use bf16 or no."),
        ("task.max_length=4096", "task.max_length=4096 exceeds the model's 512 positions. Lower it."),
        ("train.micro_batch_tokens=3", "train.micro_batch_tokens=3 cannot hold sample 0 with its 7 tokens. Raise it, or lower"),
        ("task.model_config.model_type=brt", "'brt' is not known to transformers. Did you mean 'bert'?"),
        ("task.model_config.hidden_sise=16", "hidden_sise is not a key of BertConfig. Did you mean 'hidden_size'?"),
        ("task.model_config.hidden_size=15", "task.model_config cannot be built: The hidden size (15) is not a multiple of"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(tiny, refused, word, message):
    said = refused(tiny(word))
    assert said.startswith("hftune: t") and message in said and said.count("\n") == 1


def test_an_output_folder_that_cannot_be_written_is_refused(tiny, refused, tmp_path):
    folder = tmp_path / "tiny.yaml" / "out"  # below a file: root cannot write there either
    assert f"output_dir={folder} cannot be written: Not a directory. Set output_dir=" in refused(tiny(f"output_dir={folder}"))


def test_no_arguments_print_the_help_and_fail(capsys):
    assert hftune.run.main([]) == 2
    assert capsys.readouterr() == (hftune.run.HELP + "\n", "")


# The data


def test_the_data_that_the_others_differ_from_is_trained_on(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    code, err = hftune.run.main(tiny()), capsys.readouterr().err
    assert code == 0, err
    assert own_lines(err) == []
    assert (tmp_path / "out" / "result.json").is_file()


LABEL = r"there are 2 labels, 0 to 1 \(bad, good\)\. Correct the row, or set task\.label_names; null uses the names of the data"
EMPTY = "The train split has an empty text in column 'text' at row"


def labelled(*labels: object) -> list[dict[str, object]]:
    return [{"text": "a", "label": label} for label in labels]


def emptied(text: str | None) -> dict[str, object]:
    return {"text": text, "label": 0}


@pytest.mark.parametrize(
    ("files", "words", "says"),
    [
        ({}, "task.text_column=txt", "task.text_column=txt is not a column .* It has: text, label. Did you mean 'text'"),
        ({}, "task.label_column=stars", "task.label_column=stars is not a column of the train split. It has: text, label"),
        ({"eval": [{"text": "a", "stars": 1}]}, "", "task.label_column=label is not a column of the eval split. It has: te"),
        ({"train": [*GOOD[:3], *labelled(2)]}, "", f"Row 3 of the train split has the label 2; {LABEL}"),
        ({"train": [*GOOD[:3], *labelled(-1)]}, "", f"Row 3 of the train split has the label -1; {LABEL}"),
        ({"eval": labelled("good", "god")}, "", f"Row 1 of the eval split has the label 'god'; {LABEL}"),
        ({"train": [*GOOD[:3], *labelled(None)]}, "", "Row 3 of the train split has no label in column 'label'. Fill it in"),
        ({"train": labelled(0.0, 1.5)}, "", "Column 'label' of the train split holds float64, not whole numbers or names"),
        ({"train": [{"text": 3, "label": 0}]}, "", "Column 'text' of the train split holds int64, not text"),
        ({"train": []}, "", r"The train split of json has no rows \(.*train.json\)"),
        ({"eval": []}, "", r"The eval split of json has no rows \(.*eval.json\)"),
        ({"train": [*GOOD[:2], emptied("")]}, "", f"{EMPTY} 2. Remove these rows, or fill them in"),
        ({"train": [*GOOD[:2], *map(emptied, ("", "  ", "\n", None, ""))]}, "", f"{EMPTY} 2, 3, 4 and 2 more. Remove"),
        (
            {"train": '{"text": "a", "label": 0}\n{"text": "b", \n'},
            "",
            "train.json cannot be read as json: JSON parse .* in row 1",
        ),
        ({"train": "hello\nworld\n"}, "", "train.json cannot be read as json: JSON parse error: Invalid value. in row 0"),
        ({"train": "text,label\na,1\nb,0,1,1\n"}, "task.dataset=csv", "cannot be read as csv: .* 2 fields in line 3, saw 4"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_in_one_sentence(tiny, refused, write_rows, tmp_path, files, words, says):
    paths = {}
    for split, content in files.items():
        paths[split] = tmp_path / f"{split}.json"
        paths[split].write_text(content) if isinstance(content, str) else write_rows(f"{split}.json", content)
    said = refused(tiny(*words.split(), **paths))
    assert re.match(rf"hftune: .*{says}.*\n$", said), said


def test_a_missing_data_file_is_refused(tiny, refused, tmp_path):
    said = refused(tiny(train=tmp_path / "god.jsonl"))
    assert f"task.data_files.train={tmp_path}/god.jsonl: there is no such file. Did you mean {tmp_path}/good.jsonl?" in said


def test_the_row_is_that_of_the_file_where_rows_are_drawn_from_it(tiny, refused, write_rows):
    # All rows but the first 50 are wrong: whichever 30 of 200 are drawn, the first wrong one comes from row 50 or later.
    path = write_rows("many.jsonl", [{"text": f"text {row}", "label": 0 if row < 50 else row} for row in range(200)])
    said = refused(tiny("task.max_train_samples=30", train=path))
    row = int(said.split()[2])
    assert row >= 50 and f"Row {row} of the train split has the label {row};" in said


# Processes


def test_a_wrong_value_ends_a_plain_process_with_exit_code_2():
    code, out, err = launch("python", "-m", "hftune.run", "recipe=yelp_demo", "train.lr=abc")
    assert (code, out, err) == (2, "", "hftune: train.lr='abc' is not a number, such as 5e-05.\n")


def test_two_processes_refuse_a_recipe_once():
    code, out, err = launch("torchrun", "--nproc_per_node", "2", "-m", "hftune.run", "recipe=yelp_demo", "train.lrr=1")
    assert code != 0
    assert out == ""
    assert own_lines(err) == ["hftune: train.lrr is not a key of a recipe. Did you mean 'train.lr'?"]
    assert "exitcode  : 2 " in err  # of the process itself: torchrun's own is 1 whatever happened


FIRST_LINE = f"hftune {hftune.__version__}: recipe tiny, 2 processes; loading libraries ...\n"
"""Of the main process alone."""


def test_two_processes_refuse_data_once(tiny):
    code, out, err = launch("torchrun", "--nproc_per_node", "2", "-m", "hftune.run", *tiny("task.text_column=txt"))
    assert code != 0
    assert out == FIRST_LINE
    assert own_lines(err) == [
        "hftune: task.text_column=txt is not a column of the train split. It has: text, label. Did you mean 'text'?"
    ]
    assert "exitcode  : 2 " in err


def test_the_others_end_where_the_main_process_alone_cannot_write(tiny, tmp_path):
    folder = tmp_path / "tiny.yaml" / "out"
    done = Command(2, *tiny(f"output_dir={folder}"))
    out, err = done.communicate()
    assert done.returncode == 2
    assert out == FIRST_LINE
    assert own_lines(err) == [
        f"hftune: output_dir={folder} cannot be written: Not a directory. Set output_dir=... to a different folder."
    ]


def test_the_launcher_adds_nothing_to_the_last_words_of_a_process_that_fails(tmp_path):
    command = ["accelerate", "launch", "--config_file", "accelerate_configs/2cpu.yaml", "-m", "hftune.run"]
    code, out, err = launch(*command, *failing(tmp_path, at=4))
    assert_failed(tmp_path, code, out, err, where="in forward_backward", doing="step 3")


def test_a_process_that_fails_in_an_evaluation_ends_the_job_and_has_the_last_word(tmp_path):
    """Each process has one micro-batch of each step; after 8 steps process 1 evaluates, 32 samples in 16 micro-batches."""
    done = Command(2, *failing(tmp_path, at=10))
    assert_failed(tmp_path, done.returncode, *done.communicate(), where="in evaluate", doing="the evaluation after step 8")


def failing(folder: Path, at: int) -> list[str]:
    """Return the words of a run whose process 1 fails at a call of its loss."""
    recipe = folder / "failing.yaml"
    recipe.write_text(
        f"task: {{type: tests.support.tasks.FailingAt, at: {at}}}\n"
        "train: {epochs: 1, batch_size: 4, micro_batch_size: 2}\n"
        "eval: {every: 8, batch_size: 2}\n"
    )
    return [f"recipe={recipe}", f"output_dir={folder / 'out'}"]


def assert_failed(folder: Path, code: int, out: str, err: str, where: str, doing: str) -> None:
    """It did train, and its last words are those of the process that failed."""
    assert code != 0
    assert "step 1/16" in out
    assert "step 10/16" not in out
    assert not (folder / "out" / "result.json").exists()
    said = [line for line in err.splitlines() if line.strip(" =-")]
    assert any(line.endswith(where) for line in said)
    assert any(line.startswith(f"[process 1 of 2 on host {socket.gethostname()}, {doing}, samples ") for line in said)
    assert said[-1].strip() == "ValueError: bad sample 17"
    assert not any("Connection closed" in line for line in said)
