"""hftune bisect and bisect-step on real runs: a key, keys that act together, a line of data, and a revision of code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hftune import Recipe, cli, train
from hftune.batch_plan import BatchPlan
from hftune.data.demo import reviews
from tests.support.runs import SMALL, warm_python

NUM_ROWS, NUM_STEPS = 400, 12
GOOD = (
    *SMALL,
    "task.max_train_samples=null",
    f"train.max_steps={NUM_STEPS}",
    "train.parts=1",
    "train.lr=1e-3",
    "train.warmup_ratio=0.1",
    "eval.every=never",
    "checkpoint.every=10",
)
BAD = (
    "train.warmup_ratio=0.05",
    "train.weight_decay=0.01",
    "train.clip_norm=0.9",
    "train.eps=1e-7",
    "train.micro_batch_size=8",
    "train.schedule=cosine",
    "train.lr=3e-2",
    "train.betas=[0.9,0.99]",
)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A good run, and one that was spoilt by one of eight keys."""
    folder = tmp_path_factory.mktemp("bisect")
    write_rows(folder / "rows.jsonl", reviews("train")[:NUM_ROWS])
    data = ("task.dataset=json", f"task.data_files={{train: {folder}/rows.jsonl}}")
    for name, words in {"good": (), "bad": BAD}.items():
        train(Recipe.load("yelp_demo", *GOOD, *data, *words, f"output_dir={folder / name}"))
    return folder


def bisect(capsys, *words):
    capsys.readouterr()
    assert cli.main(["bisect", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_one_key_of_eight_is_named(folder, capsys):
    before = sorted(folder.rglob("*"))
    said = bisect(capsys, folder / "good", folder / "bad")
    assert said.count(", as in its ledger\n") == 2  # both ends
    assert said.count("\n    ") <= 2 + 5  # and few tries
    assert "\nCause:\n  train.lr: 0.001 -> 0.03\nIt makes " in said
    assert sorted(folder.rglob("*")) == before


def test_two_keys_that_act_together_are_named(folder, capsys):
    sgd = ("train.optimizer=sgd", "train.clip_norm=null")
    good = (*sgd, "train.lr=0.05", "train.momentum=0.0", "train.weight_decay=0.0")
    bad = (*sgd, "train.lr=0.4", "train.momentum=0.9", "train.weight_decay=0.01")
    result = json.loads(bisect(capsys, folder / "good", "--good", *good, "--bad", *bad, "--steps", "9", "--json"))
    assert [change["key"] for change in result["found"]] == ["train.lr", "train.momentum"]
    assert len(result["changed"]) == 3 and result["steps"] == [1, 9]


def used_rows(run, num_steps):
    """The rows of the first steps of a run."""
    start = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])
    plan = BatchPlan(**start["plan"])
    return plan.epoch(0).order_N[: num_steps * plan.batch_size].tolist()


def test_line_of_a_data_file_is_named(folder, capsys):
    used = used_rows(folder / "good", 6)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    unused = [row for row in range(NUM_ROWS) if row not in used]
    for row in (used[20], *unused[:3]):
        rows[row]["label"] = (rows[row]["label"] + 2) % 5
    write_rows(folder / "flipped.jsonl", rows)
    said = bisect(capsys, folder / "good", "--bad", f"task.data_files.train={folder}/flipped.jsonl", "--steps", "6")
    assert "\n4 lines differ between " in said and f"\nCause:\n  line {used[20] + 1}  good  {{" in said
    assert said.endswith("It makes 100% of the difference; the other 3 lines make 0% without it.\n")


REVISIONS = {
    "a schedule": "def factor(step, num_steps, steps_per_epoch):\n    return 1 - step / num_steps\n",
    "other words": "def factor(step, num_steps, steps_per_epoch):\n    left = num_steps - step\n    return left / num_steps\n",
    "unfinished": "def factor(step, num_steps, steps_per_epoch:\n",
    "finished": "def factor(step, total, steps_per_epoch):\n    left = total - step\n    return left / total\n",
    "an oversight": "def factor(step, total, steps_per_epoch):\n    left = total - step\n    return left / (total + 1)\n",
    "a remark": "# Linear.\ndef factor(step, total, steps_per_epoch):\n    left = total - step\n    return left / (total + 1)\n",
}
"""Of a file with code of one's own. After the fourth one, losses are others."""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with the revisions, in which a run was trained with the first one."""

    def git(*words):
        done = subprocess.run(["git", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    git("init", "-q")
    Path(".gitignore").write_text("outputs\n__pycache__\n")
    for number, (subject, text) in enumerate(REVISIONS.items(), start=1):
        Path("own_schedule.py").write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", subject)
        git("tag", f"v{number}")
    git("checkout", "-q", "v1")
    words = (
        "train.schedule=own_schedule.factor",
        "task.max_train_samples=100",
        "train.max_steps=6",
        "train.warmup_ratio=0",
        "output_dir=outputs/own",
    )
    train(Recipe.load("yelp_demo", *GOOD, *words))
    del sys.modules["own_schedule"]
    return git


def test_revision_that_changed_the_loss_is_named(repository):
    repository("bisect", "start", "v6", "v1")
    step = [str(Path(warm_python()).with_name("hftune")), "bisect-step", "outputs/own", "--step", "6", "--trust-code"]
    said = repository("bisect", "run", *step)
    first_bad = repository("rev-parse", "v5").strip()
    assert f"{first_bad} is the first bad commit" in said
    assert "good: step 6 of outputs/own has loss " in said and "bad: step 6 of outputs/own has loss " in said
