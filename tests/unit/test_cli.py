"""The hftune command: what it refuses, and how."""

import subprocess
import sys
from pathlib import Path

import pytest

from hftune import __version__, cli
from hftune.launchers.slurm import time_s
from tests.support.runs import environment

CONFIGS = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))


def refused(capsys, *arguments):
    assert cli.main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.removeprefix("hftune: ").rstrip("\n")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"content": "北京大学的报告。", "title": "报告"}\n' * 3, encoding="utf-8")
    return path


def test_help_is_shown_and_needs_no_torch():
    code = "import sys; from hftune.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"hftune {__version__}\n"


def test_nothing_to_answer(capsys, tmp_path):
    assert refused(capsys, "predict", tmp_path) == "Nothing to answer: give --text, --text-file or --input."


def test_file_that_is_not_there_or_not_utf8(capsys, tmp_path):
    path = tmp_path / "article.txt"
    assert refused(capsys, "predict", tmp_path, "--text-file", path) == f"--text-file {path}: No such file or directory."
    path.write_bytes("文章".encode("gb18030"))
    assert refused(capsys, "predict", tmp_path, "--text-file", path) == (
        f"--text-file {path} is not UTF-8: 'utf-8' codec can't decode byte 0xce in position 0: invalid continuation byte. "
        "Convert it."
    )


def test_folder_that_holds_no_run(capsys, tmp_path):
    assert refused(capsys, "predict", tmp_path / "none", "--text", "x") == (
        f"{tmp_path}/none: there is no such folder. Name the output folder of a run, such as outputs/bigbird."
    )
    assert refused(capsys, "predict", tmp_path, "--text", "x") == (
        f"{tmp_path} holds no recipe.yaml, nor does the folder above. Name the output folder of a run."
    )
    (tmp_path / "recipe.yaml").write_text("base: yelp_demo\n")
    assert refused(capsys, "predict", tmp_path, "--text", "x") == (
        f"{tmp_path} holds no model yet: the first evaluation of its run writes it."
    )


def test_task_that_answers_nothing(capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: {type: tests.support.tasks.Tagging}\n")
    (tmp_path / "model").mkdir()
    assert refused(capsys, "predict", tmp_path, "--text", "x", "--trust-code") == (
        "tests.support.tasks.Tagging does not answer inputs. Give it a method answer(model, inputs)."
    )


def test_corpus_that_cannot_be_read(capsys, tmp_path, corpus):
    output = ("--output", tmp_path / "words")
    none = tmp_path / "none.txt"
    assert refused(capsys, "vocab", none, *output) == f"{none}: there is no such file."
    none.with_suffix(".md").write_text("x")
    assert refused(capsys, "vocab", none.with_suffix(".md"), *output) == (
        f"{none.with_suffix('.md')} is of no known type. Known: .txt, .json, .jsonl, .csv, .parquet."
    )
    assert refused(capsys, "vocab", corpus, "--columns", "text", *output) == (
        f"{corpus} has no column 'text', but content, title. Name them: --columns ..."
    )
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    assert refused(capsys, "vocab", blank, *output) == f"{blank}: no text in there."


def test_folder_with_something_else_is_not_written_into(capsys, tmp_path, corpus):
    assert refused(capsys, "vocab", corpus, "--output", tmp_path) == (
        f"{tmp_path} holds something else than a vocabulary. Name another folder, or empty it."
    )


def test_vocabulary_is_written_from_lines_of_text_and_over_an_earlier_one(capsys, tmp_path):
    (tmp_path / "corpus.txt").write_text("北京大学的报告。\n上海的地铁 Linux\n" * 5, encoding="utf-8")
    for size in (60, 50):
        words = Path(tmp_path / "words")
        assert cli.main(["vocab", str(tmp_path / "corpus.txt"), "--size", str(size), "--output", str(words)]) == 0
        listed = (words / "vocab.txt").read_text(encoding="utf-8").splitlines()
        assert len(listed) <= size and "的" in listed


def test_vocabulary_that_loading_would_refuse_is_not_written(capsys, tmp_path):
    (tmp_path / "corpus.txt").write_text("an English text\n" * 5, encoding="utf-8")
    said = refused(capsys, "vocab", tmp_path / "corpus.txt", "--size", "60", "--output", tmp_path / "words")
    assert said.startswith("60 tokens are too few for these texts, or they are not Chinese. The vocabulary of ")
    assert not (tmp_path / "words").exists()


def test_configs_are_listed_with_their_first_line_and_printed_whole(capsys):
    assert cli.main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.stem for path in CONFIGS}
    assert listed["2cpu"] == "Two processes on the CPUs of one machine, over Gloo."
    for path in CONFIGS:
        assert cli.main(["configs", path.stem]) == 0
        assert capsys.readouterr().out == path.read_text()


def test_config_is_copied_and_overwrites_nothing_unasked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "2cpu", "--copy"]) == 0
    assert capsys.readouterr().out == (
        "Edit 2cpu.yaml, then: accelerate launch --config_file 2cpu.yaml -m hftune.run recipe=NAME\n"
    )
    whole = Path("2cpu.yaml").read_text()
    Path("2cpu.yaml").write_text("mine")
    assert refused(capsys, "configs", "2cpu", "--copy") == (
        "2cpu.yaml exists. Name another file, --copy PATH, or overwrite it with --force."
    )
    assert Path("2cpu.yaml").read_text() == "mine"
    for arguments in (["--copy", "--force"], ["--copy", "other.yaml"]):
        assert cli.main(["configs", "2cpu", *arguments]) == 0
    assert Path("2cpu.yaml").read_text() == Path("other.yaml").read_text() == whole
    capsys.readouterr()
    assert refused(capsys, "configs", "2cpu", "--copy", "none/2cpu.yaml") == (
        "none/2cpu.yaml cannot be written: No such file or directory."
    )


def test_config_that_is_not_there_names_the_nearest(capsys):
    shipped = ", ".join(sorted(path.stem for path in CONFIGS))
    assert refused(capsys, "configs", "4gpus") == (
        f"4gpus: there is no such launch configuration. Did you mean '4gpu'? Shipped: {shipped}."
    )
    assert refused(capsys, "configs", "--copy") == f"--copy what? Name a launch configuration: {shipped}."


SLURM = ("slurm", "recipe=yelp", "--nodes", "2", "--gpus", "2")


def test_job_that_cannot_be_asked_of_slurm_is_refused(capsys):
    assert refused(capsys, *SLURM, "--nodes", "0", "--cpus-per-gpu", "0", "--job-name", "a b", "--grace-s", "10") == (
        "--nodes 0 must be at least 1.\n"
        "  --cpus-per-gpu 0 must be at least 1.\n"
        "  --grace-s 10 must be at least 40.\n"
        "  --job-name 'a b' has characters that SLURM's names do not: it goes into an #SBATCH line."
    )
    assert refused(capsys, *SLURM, "--time", "2") == (
        "--time 2 is 120 s, and --grace-s 120 stops training so many seconds before its end: at once. A bare number means "
        "minutes; 2 hours are 2:00:00."
    )
    assert refused(capsys, *SLURM, "--time", "2h") == (
        "--time '2h' is not a time as SLURM writes it: MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS."
    )
    assert refused(capsys, *SLURM, "--gpus", "1", "--nodes", "1", "--config", "4gpu") == (
        "--config 4gpu is for several processes, and --nodes 1 --gpus 1 are one."
    )
    assert refused(capsys, *SLURM, "--config", "cpu") == (
        "--config cpu has distributed_type NO: accelerate launch would start one process on each node."
    )


def test_mistyped_key_or_recipe_that_does_not_resume_never_reaches_the_queue(capsys):
    assert refused(capsys, *SLURM, "train.lrr=1") == "train.lrr is not a key of a recipe. Did you mean 'train.lr'?"
    assert refused(capsys, *SLURM, "resume=never") == (
        "resume=never would begin there again each time that the job is requeued. Leave it out."
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-12", 216_000), ("1-0:30", 88_200), ("1-00:00:01", 86_401), ("1h", None)],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert time_s(text) == seconds


def test_batch_script_takes_any_words_as_they_are_and_asks_for_what_was_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["track.with=[wandb]", "task.label_names=[a, 'b \"c\"']", "output_dir=$HOME/`it's` here;exit"]
    assert cli.main([*SLURM, words[0], "--cpus-per-gpu", "8", *words[1:], "--partition", "long", "--config", "4gpu"]) == 0
    script = capsys.readouterr().out
    head = script.split("\n\n")[0].splitlines()
    for line in ("--job-name=yelp", "--nodes=2", "--gpus-per-node=2", "--partition=long", "--cpus-per-task=16"):
        assert f"#SBATCH {line}" in head
    assert f"--config_file {CONFIGS[0].parent / '4gpu.yaml'}" in script
    before_srun = script.split("# One launcher on each node")[0]
    said = subprocess.run(
        ["bash", "-c", f'scontrol() {{ echo node1; }}\n{before_srun}\nprintf "%s\\n" "${{words[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.splitlines() == ["recipe=yelp", *words]
