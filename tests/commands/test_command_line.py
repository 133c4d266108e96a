"""The commands as a shell starts them: modules of the current folder, closed pipes, terminals without Unicode."""

import subprocess
import sys
from pathlib import Path

import pytest

from hftune import cli, run
from tests.support.runs import environment


def test_modules_in_the_current_folder_hide_no_installed_ones(tmp_path):
    for name in ("omegaconf", "yaml", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    (tmp_path / "recipe.yaml").write_text("base: yelp_demo")
    command = [sys.executable, "-m", "hftune.cli", "evaluate", "recipe=recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "there is no model yet" in done.stderr, done.stderr


@pytest.mark.parametrize("words", [["configs"], ["--help"], ["train", "--help", "task"]], ids=" ".join)
def test_reader_that_goes_away_is_no_error(words):
    command = [sys.executable, "-m", "hftune.cli", *words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    # argparse drops the error of an unbuffered help by itself.
    assert process.returncode == 141 or (words == ["--help"] and process.returncode == 0)


def test_characters_that_the_output_does_not_know_are_escaped():
    command = [sys.executable, "-m", "hftune.cli", "show", "recipe=yelp_demo", "track.run_name=标题"]
    done = subprocess.run(command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"run_name: \u6807\u9898" in done.stdout


def test_training_outlives_the_reader_of_its_output(tmp_path):
    code = "import sys; from pathlib import Path; from hftune import run; run.outlive_readers(); sys.stdin.readline()\n"
    code += "print('step 1', flush=True); print('step 2', flush=True); Path(sys.argv[1]).touch()"
    command, pipe = [sys.executable, "-c", code, str(tmp_path / "trained")], subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        _, err = process.communicate(b"\n")
    assert (process.returncode, (tmp_path / "trained").exists()) == (0, True)
    assert err == b"hftune: the reader of the output has exited; the run continues.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_training_goes_on_if_the_disk_of_its_log_is_full():
    with run._OptionalOutput("/dev/full", "w") as log:
        assert log.write(b"step 1\n") == 7


def test_a_command_whose_output_is_closed_succeeds(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert cli.main(["configs"]) == 0
