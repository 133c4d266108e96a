"""hftune bisect and bisect-step without a training: what can be changed, the search, what is refused, and the exit codes of git."""

import argparse
import itertools
import math
import sys
from types import SimpleNamespace

import pytest

from hftune import ConfigError, Recipe, cli
from hftune.commands.bisect_step import check, judge
from hftune.replay.bisection import Judge, Scale, find_bad, steps_to_compute
from hftune.replay.key_search import DataFiles, End, KeyChange, Search, changed_keys, override

# What can be changed one by one


BAD = (
    "train.lr=0.1",
    "train.betas=[0.9,0.99]",
    "train.clip_norm=null",
    "train.log_every=3",
    "eval.batch_size=7",
    "task.model_config.hidden_dropout_prob=0.3",
    "output_dir=elsewhere",
    "seed=7",
)


def recipes(*words):
    return Recipe.load("yelp_demo"), Recipe.load("yelp_demo", *words)


def test_keys_that_can_change_a_loss_are_changes_of_their_own():
    good, bad = recipes(*BAD)
    found = changed_keys(good.to_dict(), bad.to_dict())
    assert sorted(map(str, found)) == [
        "seed=7",
        "task.model_config.hidden_dropout_prob=0.3",
        "train.betas=[0.9, 0.99]",
        "train.clip_norm=null",
        "train.lr=0.1",
    ]


@pytest.mark.parametrize(
    "words",
    [
        BAD,
        ("replace=[task.model_config]", "task.model_config={model_type: bert, hidden_size: 64}"),
        ("train.optimizer=sgd", "train.schedule=step", "train.gamma=0.5"),
        ("train.optimizer_args={amsgrad: true}", "train.groups=[{match: '[.]bias$', lr: 1e-05}]"),
        ("recipe=mnist_demo",),
    ],
)
def test_all_changes_together_make_the_bad_recipe_and_none_the_good_one(words, tmp_path):
    good, bad = recipes(*words) if words != ("recipe=mnist_demo",) else (Recipe.load("yelp_demo"), Recipe.load("mnist_demo"))
    changes = changed_keys(good.to_dict(), bad.to_dict())
    (tmp_path / "good.yaml").write_text(good.to_yaml())
    for made, wanted in (changes, bad), ([], good):
        mixed = Recipe.load(tmp_path / "good.yaml", override(made))
        assert changed_keys(mixed.to_dict(), wanted.to_dict()) == []


@pytest.mark.parametrize(("suffix", "between"), [("csv", ","), ("tsv", "\t")])
def test_lines_of_a_data_file_are_mixed(tmp_path, suffix, between):
    good, bad, mixed = (tmp_path / f"{name}.{suffix}" for name in ("good", "bad", "mixed"))
    good.write_text("text,label\na,0\nb\r,1\nc,0\nd,1\n".replace(",", between))
    bad.write_text("text,label\na,1\nb\r,1\nc,1\nd,0".replace(",", between))
    files = DataFiles(good, bad)
    assert [change.number for change in files.changes] == [2, 4, 5]
    files.write(files.changes[1:2], mixed)
    mixed_lines = "text,label\na,0\nb\n,1\nc,1\nd,1\n"  # read_text makes \n of \r
    assert mixed.read_text() == mixed_lines.replace(",", between)
    files.write(files.changes, mixed)
    assert mixed.read_text() == bad.read_text() + "\n"


@pytest.mark.parametrize(
    ("name", "good", "bad", "said"),
    [
        ("x.csv", "a,b\n1,2\n", "a,c\n1,2\n", "different columns"),
        ("x.tsv", "a\tb\n1\t2\n", "a\tc\n1\t2\n", "different columns"),
        ("x.csv", 'a\n"1\n2"\n', 'a\n"1\n3"\n', "line 2 has a cell of several lines"),
        ("x.json", "[\n1]", "[\n2]", "it is one JSON list"),
        ("x.jsonl", "{}\n", "{}\n{}\n", "has 1 lines and .* has 2[.] Then no step has the samples it had"),
        ("x.parquet", "", "", "needs two files of one format"),
        ("x.jsonl.gz", "", "", "needs two files of one format"),
    ],
)
def test_files_that_cannot_be_mixed_are_refused(tmp_path, name, good, bad, said):
    (tmp_path / f"good-{name}").write_text(good)
    (tmp_path / f"bad-{name}").write_text(bad)
    with pytest.raises(ConfigError, match=said):
        DataFiles(tmp_path / f"good-{name}", tmp_path / f"bad-{name}")


def test_keys_that_comparisons_know_to_change_no_loss_are_not_tried():
    words = ("task.generation={num_beams: 4}", "task.scores=[bleu]", "train.ema_decay=0.99", "task.max_eval_samples=10")
    words += ("adapter.export=merged", "train.log_every=7", "train.cudnn_benchmark=true", "train.lr=1e-4")
    good, bad = (Recipe.load("seq2seq_demo", *given).to_dict() for given in ((), words))
    assert [change.key for change in changed_keys(good, bad)] == ["train.lr"]


# The search, without a training


KEYS = list("abcdefgh")


class Tries:
    """Says that sets are bad which hold one of the causes, and counts the tries."""

    def __init__(self, *causes, untriable=lambda keys: False):
        self.causes, self.untriable, self.made = [set(cause) for cause in causes], untriable, []

    def __call__(self, keys):
        self.made.append("".join(keys))
        return not self.untriable(keys) and any(cause <= set(keys) for cause in self.causes)


@pytest.mark.parametrize("cause", [*KEYS, *map("".join, itertools.combinations(KEYS, 2)), "adh", "bcdefg"])
def test_changes_that_act_together_are_found_and_nothing_else(cause):
    tries = Tries(cause)
    assert "".join(find_bad(KEYS, tries)) == cause
    assert "abcdefgh" not in tries.made and len(tries.made) <= 4 * len(cause)


def test_one_cause_takes_few_tries():
    many = [*range(1024)]
    for cause in (0, 511, 1023):
        tries = []
        assert find_bad(many, lambda some: tries.append(some) or cause in some) == [cause]  # noqa: B023
        assert len(tries) <= 11


def test_of_two_causes_that_are_bad_alone_one_is_found():
    assert find_bad(KEYS, Tries("b", "g")) == ["b"]


def test_change_that_cannot_be_tried_without_another_is_found_with_it():
    assert find_bad(KEYS, Tries("cf", untriable=lambda keys: ("c" in keys) != ("d" in keys))) == ["c", "d", "f"]


def test_a_single_change_needs_no_try():
    tries = Tries("a")
    assert find_bad(["a"], tries) == ["a"] and tries.made == []


def test_place_tells_how_far_a_try_is_on_the_way_to_the_bad_end():
    scale = Scale([2, 2, 1.0], [2, 2, 3.0])
    assert [scale.place([2, 2, last]) for last in (1, 2, 3, 4)] == [0, 0.5, 1, 1.5]
    assert scale.place([9, 9, 1]) == 0  # in another direction
    assert scale.difference == pytest.approx(2 / 17**0.5)
    assert Scale([1], [1]).difference == 0 and Scale([0.0], [0.0]).difference == 0
    assert Scale([0.0], [2.0]).difference == 1 and Scale([0.0], [2.0]).place([1.0]) == 0.5  # learned by heart


def test_curves_that_cross_are_apart_and_a_spike_may_come_a_step_later():
    crossing = Scale([3, 3, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3])
    assert crossing.difference > 0.7 and crossing.place([2] * 6) == 0.5
    spiked = Scale([1] * 6, [1, 9, 1, 1, 1, 1])
    assert spiked.place([9, 1, 1, 1, 1, 1]) == 1


def test_losses_count_up_to_a_ceiling_so_that_each_try_that_diverges_is_bad():
    scale = Scale([2, 2, 1.0], [2, 1e20, math.nan])
    assert scale.curve([1, 1, math.nan]) == scale.curve([1, 1, 1e30]) == [1, 1, 20]
    assert scale.place([2, 1e3, math.inf]) == 1 and scale.place([2, 2, 1.2]) < 0.02


def test_steps_are_as_few_as_tell_two_runs_apart():
    good = [2 - step / 200 for step in range(200)]
    late = [loss if step < 30 else loss + 0.5 for step, loss in enumerate(good)]
    assert steps_to_compute(good, [loss + 1 for loss in good]) == 15
    assert 30 < steps_to_compute(good, late) < 40
    assert steps_to_compute(good[:4], late) == 4
    slowly = [loss + step * 1e-5 for step, loss in enumerate(good)]
    assert steps_to_compute(good, slowly) == 100


def test_a_try_that_cannot_be_made_is_noted_and_none_is_made_twice():
    made, seen = [], []

    def compute(changes):
        made.append(changes)
        if "c" in changes:
            raise ConfigError("c needs d.")
        return [1.0, 1.0, 1.0 + len(changes)]

    judge = Judge(compute, Scale([1.0] * 3, [1.0, 1.0, 3.0]), seen.append)
    assert [judge.look(some).is_bad for some in ("ab", "a", "c", "ab")] == [True, False, False, True]
    assert made == ["ab", "a", "c"] and len(seen) == 3
    assert judge.look("c").problem == "c needs d." and judge.look("a").is_unclear


# The commands


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
