"""What hftune bisect and bisect-step refuse before they compute anything, and the exit codes that git reads."""

import argparse
import math
import sys
from types import SimpleNamespace

import pytest

from hftune import ConfigError, cli
from hftune.commands.bisect_step import check, judge
from hftune.replay.bisection import Scale
from hftune.replay.key_search import End, KeyChange, Search


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a", "1 run(s) were given. Name the good and the bad one, or what makes one bad: --bad train.lr=0.1"),
        ("a b c", "3 run(s) were given. Name the good and the bad one, or what makes one bad: --bad train.lr=0.1"),
        ("a b --steps 0", "--steps 0 must be at least 1."),
        ("a b --from 0", "--from 0 must be at least 1."),
        ("a b", "a holds no ledger.jsonl: name the output folder of a run."),
    ],
)
def test_search_that_cannot_be_made_is_refused(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bisect", *words.split()]) == 2
    assert capsys.readouterr().err == f"hftune: {said}\n"


@pytest.mark.parametrize("words", ["none --step 3", "none --step 0", "none --step 3 --tolerance nan"])
def test_step_that_could_be_computed_with_no_revision_ends_git_s_search(capsys, monkeypatch, words):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert cli.main(["bisect-step", *words.split()]) == 128  # 1 to 127 would blame or skip this revision
    assert capsys.readouterr().err.startswith("hftune: ")


@pytest.mark.parametrize("words", ["none", "none --step three", "none --step 3 --other", "none other --step 3"])
def test_usage_error_is_no_verdict_on_a_revision(capsys, words):
    with pytest.raises(SystemExit) as left:
        cli.main(["bisect-step", *words.split()])
    assert left.value.code == 128 and "hftune bisect-step: error: " in capsys.readouterr().err


def test_code_that_exits_when_it_is_imported_is_skipped(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.setattr("hftune.commands.bisect_step.check", lambda options: None)
    monkeypatch.setattr("hftune.commands.bisect_step.compute", lambda history, options: sys.exit(0))
    assert cli.main(["bisect-step", "none", "--step", "3"]) == 125


@pytest.mark.parametrize(("noise", "found"), [(2e-5, False), (1e-6, True)])
def test_difference_that_may_be_noise_has_no_cause(noise, found):
    """On a GPU that gives other bits each time; the key makes a difference of 4e-5."""
    said, tries = [], []

    def losses(words):
        tries.append(words)
        return [2.0 + noise * len(tries) + 8e-5 * (words[-1].get("train.lr") == 0.1)] * 3

    ends = (End(name, SimpleNamespace(folder="out", ledger=SimpleNamespace(steps={})), ["seed=1"]) for name in ("good", "bad"))
    changes = [KeyChange("train.lr", 0.0, 0.1), KeyChange("train.eps", 1, 2)]
    result = Search(*ends, [], changes, 1, 3, said.append).search(losses)
    assert [change["key"] for change in result["found"]] == (["train.lr"] if found else [])
    assert any("That may be chance" in line for line in said) is not found


@pytest.mark.parametrize("command", ["bisect a b", "bisect-step a --step 3"])
def test_search_is_made_in_one_process(capsys, monkeypatch, command):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert cli.main(command.split()) in (2, 128)
    assert capsys.readouterr().err == (
        f"hftune: hftune {command.split()[0]} computes in one process, and 2 were started. Call it without a launcher.\n"
    )


@pytest.mark.parametrize(
    ("name", "losses", "said"),
    [
        ("good", [2.0, 1.0], ", as in its ledger"),
        ("good", [2.0, 1.00001], ", as in its ledger to 1e-05"),
        (
            "good",
            [2.0, 1.5],
            "; not as it was: step 8 had loss 1.000 and has 1.500 here. Code, libraries, data or hardware ",
        ),
        (
            "bad",
            [2.5, 1.5],
            "; not as it was: step 7 had loss 2.000 and has 2.500 here. The keys do not explain all of it: see ",
        ),
        ("bad", [2.0, math.inf], "; not as it was: step 8 had loss 1.000 and has "),
    ],
)
def test_end_says_whether_it_is_what_its_run_was(name, losses, said):
    steps = {number: {"loss": loss} for number, loss in enumerate([3.0, 2.0, 1.0, 0.5], start=6)}
    history = SimpleNamespace(folder="out", ledger=SimpleNamespace(steps=steps))
    found = End(name, history, []).remark(losses, 7, Scale([2.0, 1.0], [2.0, 3.0]))
    assert found == said or (said[0] == ";" and found.startswith(said))
    assert End(name, history, ["train.lr=1"]).remark(losses, 7, Scale([2.0], [3.0])) == ""


LINE = {"step": 3, "loss": 1.5, "grad_norm": 2.0, "digest": "d"}


@pytest.mark.parametrize(
    ("changed", "tolerance", "code", "said"),
    [
        ({}, 2e-6, 0, "good: step 3 of out has loss 1.5, in its ledger 1.5"),
        ({"loss": 1.5 * (1 + 5e-7)}, 2e-6, 0, "good"),
        ({"loss": 1.5 * (1 + 5e-6)}, 2e-6, 1, "bad"),
        ({"loss": 1.5 * (1 + 5e-6)}, 1e-5, 0, "good"),
        ({"grad_norm": 2.1}, 2e-6, 1, "bad: step 3 of out has loss 1.5, in its ledger 1.5, gradient norm 2.1 and 2.0"),
        ({"digest": "e"}, 2e-6, 1, "bad: step 3 of out has loss 1.5, in its ledger 1.5, of other samples"),
        ({"loss": float("nan")}, 2e-6, 1, "bad"),
    ],
)
def test_exit_code_says_whether_the_step_is_as_it_was(capsys, changed, tolerance, code, said):
    options = argparse.Namespace(step=3, run_folder="out", tolerance=tolerance)
    history = SimpleNamespace(ledger=SimpleNamespace(steps={3: LINE}))
    assert judge(history, SimpleNamespace(**{**LINE, **changed}), options) == code
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("line", [{"skipped": True}, {}, {"loss": None}])
def test_step_without_a_loss_is_refused(monkeypatch, line):
    history = SimpleNamespace(ledger=SimpleNamespace(steps={3: line}), check_step=lambda step: None)
    monkeypatch.setattr("hftune.replay.history.History.open", lambda *_, **__: history)
    options = argparse.Namespace(step=3, run_folder="out", tolerance=2e-6, trust_code=False, data=[])
    with pytest.raises(ConfigError, match="The ledger of out has no loss of step 3"):
        check(options)
