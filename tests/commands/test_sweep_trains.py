"""hftune sweep with real trainings, which are processes of their own."""

import json
import sys

from hftune import cli
from tests.support.runs import DATA, TINY, warm_python


def test_trials_are_trained_at_the_same_time_and_a_bad_one_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())
    words = [*TINY, *DATA, "train.max_steps=2", "eval.every=2", "train.mixed_precision=no", "train.lr=1e-4,1e-3,1e38"]
    assert cli.main(["sweep", "recipe=yelp_demo", *words, "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    folder = tmp_path / "outputs" / "yelp_demo" / "sweep"
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["finished", "finished", "failed"]
    for trial in trials[:2]:
        result = json.loads((folder / trial["name"] / "result.json").read_text())
        assert trial["value"] == result["best"]["value"] and trial["step"] == 2
    assert "lr_1e38: failed: hftune: " in said and "diverged" in trials[2]["error"]
    assert f"best: outputs/yelp_demo/sweep/{trials[0]['name']}" in said
