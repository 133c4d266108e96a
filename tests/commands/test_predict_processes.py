"""hftune predict --data on several processes: the same rows in the same order, also after a kill."""

import csv
import os
import signal
import subprocess
import time

import pytest

from hftune.data.demo import reviews
from tests.support.predictions import untrained
from tests.support.runs import TINY, Command, environment, warm_python

ROWS = 2300  # two parts


def rows_of(path):
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [row["text"] for row in reviews("train")]
    with (folder / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([index, f"{index} {texts[index]}"] for index in range(ROWS))])
    untrained("yelp_demo", folder / "run", *TINY)
    return folder


def test_two_processes_predict_as_one_does_and_go_on_after_a_kill(data):
    words = ["predict", str(data / "run"), "--data", str(data / "test.csv"), "--columns", "id,label,probability", "--output"]
    alone = Command(1, *words, str(data / "one.csv"), module="hftune.cli")
    assert alone.communicate()[0].splitlines()[-1] == str(data / "one.csv")
    killed, parts = Command(2, *words, str(data / "two.csv"), module="hftune.cli"), data / "two.csv.parts"
    until = time.monotonic() + 120
    while not list(parts.glob("rows_*.jsonl")) and killed.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(killed.pids[1], signal.SIGKILL)
    killed.wait()
    assert not (data / "two.csv").exists()
    command = [warm_python(), "-m", "hftune.cli", *words, str(data / "two.csv"), "--processes", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "note: Going on after " in done.stdout and done.stdout.splitlines()[-1] == str(data / "two.csv")
    one, two = rows_of(data / "one.csv"), rows_of(data / "two.csv")
    assert [row["id"] for row in two] == [str(index) for index in range(ROWS)]
    assert one == two  # the batches are the same on any number of processes
