"""Every script in benchmarks/ runs under --smoke, and what it writes makes sense."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machines import NotAllowed, two_machines
from tests.support.runs import environment, warm_python
from tests.support.warm import STAYS_WARM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED = {"bert_on_reviews", "contest", "gpu_speed", "measured", "ngrams", "record"}
POSITIVE = ("CPU s", "ms", "peak MiB", "rows/s", "samples/s", "seconds", "tokens/s")
"""Columns of what takes time or memory."""


class Cells:
    """One table of a result: its cells by row and column, commas and signs left out of numbers."""

    def __init__(self, table):
        self.rows = [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]

    def column(self, name):
        return [number(row[name]) for row in self.rows]


def number(cell):
    return float(cell.replace(",", "").rstrip("x%"))


def check_against_trainer(cells):
    theirs = {row["task"]: row[""] for row in cells.rows if row[""] not in ("hftune", "Trainer")}
    assert theirs == {"chats": "SFTTrainer", "embeddings": "SentenceTransformerTrainer"}
    assert [row["task"] for row in cells.rows[::2]] == [row["task"] for row in cells.rows[1::2]]


def check_batch_plan(cells):
    assert cells.column("steps") == [79, 79, 79]  # 10,000 samples in batches of 128, the short last one kept
    assert all(micro_batches >= 79 * 4 - 3 for micro_batches in cells.column("micro-batches"))


def check_chat_templates(cells):
    refused = "refused: one, turns, thoughts, call, spaces"
    found = {row["template"]: row["hftune"] for row in cells.rows}
    assert found == {"chatml": "3 exact; refused: thoughts, call", "qwen3": "5 exact", "deepseekv3": f"0 exact; {refused}"}


def check_elastic(events, runs):
    assert events.column("events") == [1, 1, 2] and all(0 < seconds < 120 for seconds in events.column("slowest"))
    assert [row["equal"] for row in runs.rows] == ["yes"] and runs.column("furthest")[0] < 1e-5


def check_faults(cells):
    assert [row["named"] for row in cells.rows] == ["yes"] and "train.speed is not a key" in cells.rows[0]["last words"]


def check_figure(cells):
    hftune, trainer = cells.rows[:2], cells.rows[2:]
    assert hftune[0]["first loss logged"] == hftune[1]["first loss logged"]
    assert all(number(row["furthest from 1"]) < 1e-5 for row in hftune)
    assert number(trainer[1]["first loss logged"]) == pytest.approx(2 * number(trainer[0]["first loss logged"]), rel=5e-2)


def check_gpu(losses, speeds):
    assert [row["float32"] for row in losses.rows] == ["0.0e+00"] and 0 < number(losses.rows[0]["bf16"]) < 0.1
    assert losses.rows[0]["resumed"] == "bit-equal"
    trainer, padded, plan, packed = speeds.column("padding")
    assert 0 == packed < plan < trainer < padded < 100


def check_gradient_scale(cells):
    right, accumulated = cells.rows
    assert right["Trainer grad norm"] == right["hftune grad norm"] == accumulated["hftune grad norm"]
    assert number(accumulated["Trainer grad norm"]) == pytest.approx(4 * number(right["hftune grad norm"]), rel=1e-2)


def check_in_batch_negatives(cells):
    assert cells.column("loss") == pytest.approx([cells.column("loss")[0]] * 4, rel=1e-5)


def check_jieba_speed(cells):
    assert cells.column("thousand characters/s")[1] > cells.column("thousand characters/s")[0]


def check_kill(cells):
    assert cells.column("kills") == cells.column("bit-equal") == [1, 1]


def check_ledger(cells, replayed):
    assert cells.column("figure")[1] < 1000  # a line takes some 20 us, and no machine of ours needs a millisecond
    assert [row["figure"] for row in replayed.rows][-1] == "0.0e+00"


def check_parity(cells):
    assert 0 <= cells.column("micro-batch 4")[0] < 1e-5


def check_pipeline(cells):
    assert all(0 <= cells.column(name)[0] < 1e-5 for name in ("loss", "gradient norm", "evaluation", "weights"))


def check_plan_memory(cells):
    assert all(0.5 < ratio < 2 for ratio in cells.column("ratio"))


def check_predict(cells):
    assert {row["other labels"] for row in cells.rows if "bf16" not in row[""]} == {"0"}


def check_preferences(dpo, kto, speed):
    for cells in (dpo, kto):
        assert [row[""] for row in cells.rows] == ["hftune", "hftune", "TRL", "TRL"]
        assert all(number(row[f"{kind} furthest from 1"]) < 1e-5 for row in cells.rows[:2] for kind in ("loss", "norm"))
        assert len({row["first loss"] for row in cells.rows}) == 1


def check_restoration_flowers(cells):
    inside = {row[""]: number(row["psnr_inside"]) for row in cells.rows}
    assert inside["damaged"] < inside["mean colour"] < inside["hftune"] < 60


def check_scaling(speeds, balances):
    for hftune, _, raw in (balances.rows[:3], balances.rows[3:]):
        assert 1 >= number(hftune["8 processes"]) > max(0.9, number(raw["2 processes"]))


def check_scored_head(*parts):
    for cells in parts:
        whole, chunks = cells.column("loss")
        assert chunks == pytest.approx(whole, rel=1e-6)


def check_sft_scale(whole, accumulated):
    assert whole.rows[0]["right loss"] == accumulated.rows[0]["right loss"]
    for cells in (whole, accumulated):
        assert 0 < number(cells.rows[1]["hftune loss"]) < number(cells.rows[0]["hftune loss"])
        assert all(number(cells.rows[-1][name]) < 1e-5 for name in ("hftune loss", "hftune norm"))
    assert all(number(whole.rows[-1][name]) < 1e-5 for name in ("TRL loss", "TRL norm"))
    assert number(accumulated.rows[-1]["averaged loss"]) > 1e-3  # these chats tell a wrong mean from the right one


def check_throughput(cells):
    padding = {row[""]: number(row["padding"]) for row in cells.rows}
    assert padding["hftune"] < padding["trainer"] < padding["padded"] and cells.column("x padded")[0] == 1


def check_wikitext2(cells):
    perplexity = {row[""]: number(row["perplexity"]) for row in cells.rows}
    assert 1 < perplexity["test, pairs counted"] < perplexity["test, words counted"] < perplexity["test, the best model"] < 300


COLD = ("batch_plan", "startup")
"""Run in an interpreter that has imported nothing, as a newcomer would: without torch, and a training."""
CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
"""What a figure must be like, where it can be told of a smoke run."""
TRL = {"sft_scale": "trl", "preferences": '"trl==1.16.*"'}
"""Scripts that compare with TRL, and what they ask for."""
SCRIPTS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED)


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke_run_ends_well_with_a_sensible_table(tmp_path, monkeypatch, name):
    if name in ("elastic", "faults"):
        try:
            with two_machines():
                pass
        except NotAllowed as error:
            pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "result.json"
    script = BENCHMARKS / f"{name}.py"
    command = [sys.executable if name in COLD else warm_python(), script, "--smoke", "--output", output]
    own = environment() if name in COLD else environment(**{STAYS_WARM: "yes"})  # they tune malloc, and empty caches
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["script"] == f"{name}.py" and result["smoke"] and result["versions"]["torch"] and result["machine"]["cores"]
    assert result["measured"] and all(what and figure for what, figure in result["measured"].items())
    assert all(table["title"] in done.stdout and table["rows"] for table in result["tables"])
    tables = [Cells(table) for table in result["tables"]]
    for table in tables:
        assert all(value > 0 for unit in POSITIVE if unit in table.rows[0] for value in table.column(unit))
    CHECKS.get(name, lambda *tables: None)(*tables)


def test_comparison_with_trainers_on_two_processes_divides_the_batch(tmp_path):
    output = tmp_path / "result.json"
    words = ("--smoke", "--tasks", "reviews", "chats", "--processes", "2", "--output", output)
    command = [warm_python(), BENCHMARKS / "against_trainer.py", *words]
    done = subprocess.run(command, env=environment(**{STAYS_WARM: "yes"}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes of one thread" in done.stdout and "runs on  2 processes" in done.stderr + done.stdout
    result = json.loads(output.read_text())
    assert [what.partition(":")[0] for what in result["measured"]] == ["reviews on 2 processes", "chats on 2 processes"]
    assert all(value > 0 for value in Cells(result["tables"][0]).column("samples/s"))


@pytest.mark.parametrize("name", TRL)
def test_comparison_with_trl_says_in_a_sentence_that_it_is_not_installed(name):
    done = run_without("trl", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"benchmarks/{name}.py compares hftune with TRL, which is not installed: pip install {TRL[name]}.\n"


def test_comparison_with_trainers_leaves_out_a_row_whose_library_is_not_installed():
    done = run_without("sentence_transformers", "against_trainer", "--tasks", "embeddings")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "embeddings is left out: sentence_transformers is not installed. "
        'pip install "trl==1.16.*" sentence-transformers has all.\n'
    )


def run_without(library, name, *words):
    # Cold: no torch is imported to say this.
    without = (
        f"import runpy, sys; sys.modules[{library!r}] = None; sys.path[0] = {str(BENCHMARKS)!r}; sys.argv = {[name, *words]!r}"
    )
    command = [sys.executable, "-c", f"{without}; runpy.run_path({str(BENCHMARKS / name)!r} + '.py', run_name='__main__')"]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)
