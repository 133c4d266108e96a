"""The table that `make gpu` ends with says of each promise whether it was kept; without a GPU there is none."""

from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADER = ["recipe", "old CPU", "float32", "bf16", "resumed", "two", "two resumed"]
KEPT = ["a_demo", "1.0e-08", "1.0e-07", "1.0e-03", "bit-equal", "2.0e-07", "bit-equal"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("float32", "2.0e-05", "2.0e-05 (b_demo)"),
        ("float32", "failed", "1 failed"),
        ("bf16", "nan", "nan (b_demo)"),
        ("two", "2.0e-05", "2.0e-05 (b_demo)"),
        ("resumed", "differs", "1 bit-equal"),
        ("two resumed", "failed", "1 bit-equal"),
    ],
)
def test_one_broken_promise_of_one_recipe_is_told_and_counts(gpu, column, cell, said):
    broken = ["b_demo", *KEPT[1:]]
    options = Namespace(demos=["a_demo", "b_demo"])
    rows, kept = gpu.summary(options, {"header": HEADER, "rows": [KEPT, broken]}, gpus=2)
    assert kept and len(rows) == 5
    broken[HEADER.index(column)] = cell
    found, kept = gpu.summary(options, {"header": HEADER, "rows": [KEPT, broken]}, gpus=2)
    assert not kept and [row[-1] for row in found if row not in rows] == [said]


@pytest.mark.parametrize(("cell", "keeps"), [("9.0e-02", True), ("2.0e-01", False)])
def test_a_training_that_last_bits_change_may_be_a_hundred_times_as_far_as_on_an_old_cpu(gpu, cell, keeps):
    chaotic = ["b_demo", "1.0e-03", cell, *KEPT[3:]]
    rows, kept = gpu.summary(Namespace(demos=["a_demo", "b_demo"]), {"header": HEADER, "rows": [KEPT, chaotic]}, gpus=2)
    assert kept == keeps and rows[0][-1] == f"{cell} (b_demo, old CPU 1.0e-03)"


def test_a_recipe_whose_kernels_do_not_repeat_their_bits_is_said_to_be_near(gpu):
    (name,) = gpu.UNREPEATABLE
    one, other = ([{"train/loss": loss}] for loss in (1.0, 1.5))
    assert gpu.resemblance(name, (one, b"1"), (other, b"2")) == "5.0e-01"
    assert [gpu.resemblance("a_demo", (one, b"1"), again) for again in ((one, b"1"), (other, b"1"))] == ["bit-equal", "differs"]
    near = [name, *KEPT[1:4], "5.0e-01", KEPT[5], "5.0e-01"]
    assert gpu.summary(Namespace(demos=["a_demo", name]), {"header": HEADER, "rows": [KEPT, near]}, gpus=2)[1]
    assert gpu.summary(Namespace(demos=[name]), {"header": HEADER, "rows": [near]}, gpus=2) == ([], True)


def test_a_loss_that_is_no_number_is_further_than_any_other(gpu):
    one, other = ([{"train/loss": loss} for loss in losses] for losses in ((1.0, float("nan"), 1.0), (1.0, 1.0, 1.0)))
    assert not gpu.furthest((one, b""), (other, b"")) <= 1e9


def test_without_a_gpu_one_sentence_says_so_and_the_exit_code_is_2(gpu, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "needs an NVIDIA GPU" in said.err
