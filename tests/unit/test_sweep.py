"""hftune sweep without trainings: what it tries, how it names and runs trials, and how it goes on. Trials are shell scripts."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from hftune import cli
from hftune.commands import folds, sweep
from hftune.commands.sweep_space import Trial, parse, split, trial_name
from hftune.config import Recipe
from hftune.errors import ConfigError, format_value
from hftune.launchers import forks
from hftune.launchers.local import kill
from hftune.tracking.facts import COMMAND

TRIAL = """
echo $LR >>"{log}"
echo '{facts}' >"$OUT/run.json"
case "{fails}" in *" $LR "*) echo "hftune: The loss is not finite."; exit 1;; esac
if [ -e "{stops}" ]; then trap 'exit 75' TERM; touch "$OUT/began"; while :; do sleep 0.02; done; fi
echo '{{"best": {{"metric": "accuracy", "value": '$VALUE', "step": 5}}, "seconds": 3.0}}' >"$OUT/result.json"
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replace trainings by a shell script; return the learning rates of those that were begun."""
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    state = {"fails": "", "stops": tmp_path / "stops", "facts": "{}"}

    def command(self, trial):
        rate = trial.values["train.lr"]
        value = 1 - abs(float(rate) - 3e-5) * 1e4 + 0.01 * int(trial.values.get("seed", 0))
        variables = [f"LR={rate}", f"OUT={self.folder_of(trial)}", f"VALUE={value:.4f}"]
        return ["env", *variables, "sh", "-c", TRIAL.format(log=log, **state)]

    monkeypatch.setattr(sweep.Sweep, "command", command)

    def rates():
        found = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(found)

    rates.state = state
    return rates


def swept(*words):
    return cli.main(["sweep", "recipe=yelp_demo", *words])


def summary(folder="outputs/yelp_demo/sweep"):
    return json.loads((Path(folder) / "sweep.json").read_text())


def test_commas_outside_of_brackets_and_quotes_separate_values():
    assert split("1e-5,3e-5") == ["1e-5", "3e-5"]
    assert split("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]
    assert split("{a: [1,2], b: 3}") == ["{a: [1,2], b: 3}"]
    assert split("'a,b',\"c,d\"") == ["'a,b'", '"c,d"']
    space = parse(["recipe=yelp", "train.lr=1e-5,3e-5", "task.label_names=[a,b]", "seed=1,2"])
    assert space.fixed == ["task.label_names=[a,b]"]
    assert space.grid()[1] == {"train.lr": "1e-5", "seed": "2"} and len(space.grid()) == 4


def test_ranges_are_logarithmic_from_a_factor_of_ten():
    space = parse(["recipe=x", "train.lr=1e-5..1e-3", "train.weight_decay=0.0..0.1", "train.epochs=2..5", "a=../x"])
    assert space.ranges == {"train.lr": (1e-5, 1e-3), "train.weight_decay": (0.0, 0.1), "train.epochs": (2, 5)}
    assert space.fixed == ["a=../x"] and all(isinstance(end, int) for end in space.ranges["train.epochs"])
    pytest.importorskip("optuna")
    assert [space.distribution(key).log for key in space.ranges] == [True, False, False]
    assert space.distribution("train.epochs").high == 5 and space.distribution("train.epochs", "9").high == 9


def test_trials_have_readable_names_that_differ():
    assert trial_name({"train.lr": "1e-5", "seed": "1"}) == "lr_1e-5_seed_1"
    keys = ["train.batch_size", "eval.batch_size"]
    assert trial_name(dict.fromkeys(keys, "8")) == "train.batch_size_8_eval.batch_size_8"
    listed = {trial_name({"a": value}) for value in ("[1,2]", "[12]", "1-2", "x" * 300, "x" * 301)}
    assert len(listed) == 5 and all(len(name) < 120 and "/" not in name for name in listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.lr=1e-5"], "Nothing varies."),
        (["train.lr=1,x"], "train.lr='x' is not a number"),
        (["train.lr=1,1"], "train.lr=1,1: a value is given twice."),
        (["train.lr=1,2,"], "train.lr=1,2,: a value is missing."),
        (["seed=1,2", "seed=3"], "seed is given twice."),
        (["train.lrs=1,2"], "train.lrs is not a key of a recipe. Did you mean 'train.lr'?"),
        (["output_dir=a,b"], "output_dir cannot vary in a sweep."),
        (["train.lr=1e-5..1e-3"], "train.lr=1e-05..0.001 is a range: --optuna N searches it."),
        (["train.lr=1e-3..1e-5", "--optuna", "2"], "train.lr=1e-3..1e-5: the first end must be below the second."),
        (["train.lr=0..1e-5", "--optuna", "2"], "train.lr=0.0 must be above 0."),
        (["seed=1,2", "--jobs", "0"], "--jobs 0 must be at least 1."),
        (["recipe=yelp", "seed=1,2"], "Name one recipe"),
        (["seed=1,2", "eval.every=never"], "A sweep compares evaluations, and eval.every=never makes none."),
        (["eval.every=5,never"], "A sweep compares evaluations, and eval.every=never makes none."),
        (["eval.metric=accuracy,loss"], "eval.metric cannot vary in a sweep."),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(trained, capsys, words, said):
    assert swept(*words) == 2
    assert capsys.readouterr().err.startswith(f"hftune: {said}")
    assert not trained() and not Path("outputs").exists()


def test_a_grid_trains_every_combination_and_shows_the_best_first(trained, capsys):
    assert swept("train.lr=1e-5,3e-5", "seed=1,2,3", "--jobs", "2") == 0
    assert trained() == ["1e-5"] * 3 + ["3e-5"] * 3
    said = capsys.readouterr().out
    lines = said[said.index("\n\n") :].split("\n")
    assert lines[2].split() == ["train.lr", "seed", "accuracy", "at", "step", "time"]
    assert lines[3].split()[:3] == ["3e-5", "3", "1.030"]
    assert lines[8].split()[:3] == ["1e-5", "1", "0.810"]
    assert ["3e-5", "1.020", "±", "0.0100", "3"] in [line.split() for line in lines]
    found = summary()
    assert [trial["name"] for trial in found["trials"]][:2] == ["lr_3e-5_seed_3", "lr_3e-5_seed_2"]
    assert found["objective"] == {"metric": "accuracy", "greater_is_better": True}
    assert found["over_seeds"][0]["mean"] == pytest.approx(1.02)
    assert "lr_3e-5_seed_3" in Path("outputs/yelp_demo/sweep/compare.html").read_text()
    assert swept("train.lr=1e-5,3e-5,1e-4", "seed=1,2,3") == 0
    assert trained() == ["1e-4"] * 3, "finished trials are not trained again"


def test_a_failed_trial_does_not_end_the_others_and_is_tried_again(trained, capsys):
    trained.state["fails"] = " 1e-5 "
    assert swept("train.lr=1e-5,3e-5") == 1
    said = capsys.readouterr().out
    assert (
        "lr_1e-5: failed: hftune: The loss is not finite. (exit code 1; see outputs/yelp_demo/sweep/lr_1e-5/output.log)" in said
    )
    assert [trial["state"] for trial in summary()["trials"]] == ["finished", "failed"]
    trained.state["fails"] = ""
    assert trained() == ["1e-5", "3e-5"]
    assert swept("train.lr=1e-5,3e-5") == 0
    assert trained() == ["1e-5"]


@pytest.mark.parametrize(
    ("facts", "what"), [({"data": {"train": "b"}}, "The data"), ({"code": {"t.py": "b"}}, "Files of your")]
)
def test_a_sweep_does_not_go_on_with_other_data_or_code(trained, tmp_path, capsys, facts, what):
    trained.state["facts"] = json.dumps({"data": {"train": "a"}, "code": {"t.py": "a"}})
    assert swept("train.lr=1e-5,3e-5") == 0
    trained.state["facts"] = json.dumps(facts)
    (tmp_path / "stops").touch()  # it is ended as soon as it says what it is trained on
    assert swept("train.lr=1e-5,3e-5,1e-4") == 2
    (tmp_path / "stops").unlink()
    folder = Path("outputs/yelp_demo/sweep")
    said = f"hftune: {what}"
    assert (err := capsys.readouterr().err).startswith(said) and f"{folder}/lr_1e-5 and {folder}/lr_1e-4" in err
    trained.state["facts"] = json.dumps({"data": {"train": "a"}, "code": {"t.py": "a"}})
    assert swept("train.lr=1e-5,3e-5,1e-4") == 0, "the change is undone"
    (folder / "lr_3e-5" / "run.json").write_text(json.dumps(facts))
    assert swept("train.lr=1e-5,3e-5") == 2 and capsys.readouterr().err.startswith(said)


def test_another_sweep_in_the_same_folder_is_refused(trained, capsys):
    assert swept("train.lr=1e-5,3e-5", "train.epochs=1") == 0
    for words, said in {
        ("train.lr=1e-5,3e-5", "train.epochs=2"): "fixed ['train.epochs=1'], not ['train.epochs=2']",
        ("train.lr=1e-5", "seed=1,2", "train.epochs=1"): "fixed ['train.epochs=1'], not ",
        ("train.lr=1e-5,3e-5", "train.epochs=1", "--optuna", "2"): "by 'grid', not 'optuna'",
    }.items():
        assert swept(*words) == 2
        assert f"outputs/yelp_demo/sweep holds a different sweep: {said}" in capsys.readouterr().err
    assert swept("train.lr=1e-5,3e-5", "train.epochs=2", "output_dir=outputs/two") == 0
    assert summary("outputs/two/sweep")["trials"]


def test_values_that_the_recipe_alone_would_refuse_may_vary_and_words_may_come_in_another_order(trained):
    words = ["train.micro_batch_size=64", "train.epochs=1", "train.batch_size=64,128", "train.lr=1e-5,3e-5"]
    assert swept(*words) == 0
    names = {trial["name"] for trial in summary()["trials"]}
    assert len(trained()) == 4
    assert swept(*reversed(words)) == 0
    assert not trained() and {trial["name"] for trial in summary()["trials"]} == names


def test_the_first_trial_tells_the_folder_and_what_all_share_whatever_values_are_added(trained):
    for folder, word, values, added in (
        ("outputs/x-1", "output_dir=outputs/x-${seed}", "seed=1,2", ",3"),
        ("outputs/yelp_demo", "train.warmup_ratio=${train.weight_decay}", "train.weight_decay=0.1,0.2", ",0.3"),
    ):
        assert swept(word, "train.lr=1e-5,3e-5", values) == 0 and len(trained()) == 4
        assert swept(word, "train.lr=1e-5,3e-5", values + added) == 0 and len(trained()) == 2
        assert len(summary(f"{folder}/sweep")["trials"]) == 6


def test_a_grid_that_was_begun_with_its_keys_in_another_order_goes_on(trained):
    words = ["train.lr=1e-5,3e-5", "seed=1,2"]
    assert swept(*words) == 0 and len(trained()) == 4
    path = Path("outputs/yelp_demo/sweep/sweep.json")
    before = json.loads(path.read_text())
    before["sweep"]["keys"] = ["train.lr", "seed"]  # as earlier versions wrote it
    for trial in before["trials"]:
        own = f"seed_{trial['values']['seed']}_lr_{trial['values']['train.lr']}"
        (path.parent / trial["name"]).rename(path.parent / own)
        trial["name"] = own
    path.write_text(json.dumps(before))
    assert swept(*words) == 0 and not trained()


def test_a_score_that_is_not_finite_is_not_called_a_missing_evaluation(tmp_path):
    for best, why in (({"metric": "loss", "value": None}, "its eval.metric is not finite"), ({}, "it was never evaluated")):
        (tmp_path / "result.json").write_text(json.dumps({"best": best}))
        assert (trial := Trial("t", {})).read_result(tmp_path)
        assert trial.error == f"{why}, so there is nothing to compare"


@pytest.mark.parametrize("optuna, number", [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGHUP)])
def test_a_signal_stops_all_trials_and_the_same_command_goes_on(trained, tmp_path, capsys, request, optuna, number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    words = ["train.lr=1e-5..1e-4", "--optuna", "4"] if optuna else ["train.lr=1e-5,3e-5,1e-4,2e-5"]
    if optuna:
        pytest.importorskip("optuna")
    trained.state["stops"].touch()

    def interrupt():
        until = time.monotonic() + 20
        while len(list(tmp_path.glob("outputs/yelp_demo/sweep/*/began"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    assert swept(*words, "--jobs", "2") == 75
    assert "The same command goes on." in capsys.readouterr().err
    begun = trained()
    assert len(begun) == 2 and [trial["state"] for trial in summary()["trials"]].count("stopped") == 2
    trained.state["stops"].unlink()
    assert swept(*words, "--jobs", "2") == 0
    again = trained()
    assert len(again) == 4 and set(begun) <= set(again), "those that were interrupted come again, with the same values"
    assert len(summary()["trials"]) == 4 and all(trial["state"] == "finished" for trial in summary()["trials"])


def test_a_signal_that_comes_as_a_trial_starts_stops_it_too(trained, monkeypatch):
    trained.state["stops"].touch()
    popen = subprocess.Popen

    def start(*args, **options):
        process = popen(*args, **options)
        timer = threading.Timer(20, process.kill)
        timer.daemon = True
        timer.start()
        while not list(Path("outputs").rglob("began")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    began = time.monotonic()
    assert swept("train.lr=1e-5,3e-5", "--jobs", "1") == 75
    assert time.monotonic() - began < 15 and trained() == ["1e-5"]


def test_optuna_searches_a_range_and_goes_on_with_more_trials(trained, capsys):
    pytest.importorskip("optuna")
    assert swept("train.lr=1e-5..1e-3", "train.schedule=linear,cosine", "--optuna", "3") == 0
    first = trained()
    assert len(set(first)) == 3 and all(1e-5 <= float(rate) <= 1e-3 for rate in first)
    assert swept("train.lr=1e-5..1e-3", "train.schedule=linear,cosine", "--optuna", "5") == 0
    second = trained()
    assert len(second) == 2 and not {*second} & {*first}
    found = [trial["value"] for trial in summary()["trials"]]
    assert found == sorted(found, reverse=True) and len(found) == 5
    assert {trial["values"]["train.schedule"] for trial in summary()["trials"]} <= {"linear", "cosine"}


def test_lists_that_optuna_has_begun_to_choose_from_stay_as_they_are(trained, capsys):
    pytest.importorskip("optuna")
    assert swept("train.lr=1e-5..1e-3", "train.schedule=linear,cosine", "--optuna", "1") == 0
    trained()
    assert swept("train.lr=1e-5..1e-3", "train.schedule=linear,cosine,constant", "--optuna", "2") == 2
    assert "holds a different sweep: lists {'train.schedule': ['linear', 'cosine']}, not " in capsys.readouterr().err
    assert not trained()
    assert swept("train.lr=1e-6..1e-3", "train.schedule=linear,cosine", "--optuna", "2") == 0


def test_trials_are_killed_with_what_they_started_in_other_sessions():
    script = ["sh", "-c", "setsid sleep 100 & echo $!; wait"]
    process = subprocess.Popen(script, start_new_session=True, stdout=subprocess.PIPE)
    child = psutil.Process(int(process.stdout.readline()))
    kill(process)
    assert process.returncode == -signal.SIGKILL and psutil.wait_procs([child], timeout=5)[1] == []
    kill(process)  # one that has ended by itself
    process.stdout.close()


def test_gpus_are_shared_out_among_jobs(monkeypatch):
    monkeypatch.setattr(forks, "gpus", lambda: ["4", "5", "6", "7"])
    assert sweep.share_gpus(2, 2) == ["4", "5", "6", "7"]
    with pytest.raises(ConfigError, match="needs 6 GPUs; there are 4"):
        sweep.share_gpus(3, 2)
    monkeypatch.setattr(forks, "gpus", list)
    assert sweep.share_gpus(2, 2) == []
    one = sweep.Sweep(None, None, None, 2, 2, None, ["4", "5", "6", "7"])
    assert [one.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["4,5", "6,7"]
    assert COMMAND not in one.environment(0)  # a trial's report shows its own


@pytest.mark.parametrize("text", ["run #1", "a: b", "1e3", 'it\'s "x"', "[a", "b\\"])
def test_a_trial_gets_folder_and_group_as_they_are_whatever_yaml_makes_of_their_texts(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    fixed = [f"{key}={format_value(text)}" for key in ("output_dir", "track.group")]
    options = cli.parse(["sweep", "recipe=yelp_demo", *fixed, "track.with=[tensorboard]", "train.lr=1e-5,3e-5"])
    swept = sweep.Sweep.prepare(options)
    recipes = [Recipe.from_argv(swept.words(trial)) for trial in swept.trials]
    assert [Path(recipe.output_dir) for recipe in recipes] == [Path(text, "sweep", f"lr_{lr}") for lr in ("1e-5", "3e-5")]
    assert {recipe.track.group for recipe in recipes} == {text}
    recipes = folds.fold_recipes(["recipe=yelp_demo", *fixed], 2)
    assert [recipe.output_dir for recipe in recipes] == [f"{text}/fold_0", f"{text}/fold_1"]
