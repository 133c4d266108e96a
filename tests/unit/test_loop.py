"""The loop's decisions about what is due after a step; parity and multiprocess tests hold the steps themselves."""

import json

from hftune import Recipe, train


def test_a_time_as_an_interval_is_kept_by_the_clock_in_evaluations_and_lines(tmp_path):
    words = ("train.max_steps=3", "train.log_every=1 h", "checkpoint.every=never")
    for name, every in (("always", "0.0001 s"), ("rarely", "1 h")):
        train(Recipe.load("tests/support/tagging.yaml", *words, f"eval.every={every}", f"output_dir={tmp_path / name}"))
    steps = {
        name: [
            line["step"]
            for line in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
            if "eval/loss" in line
        ]
        for name in ("always", "rarely")
    }
    assert steps == {"always": [1, 2, 3], "rarely": [3]}
