"""JSON that every reader takes."""

import json
import math

import pytest

from hftune.replay.run_record import read_log, read_predictions
from hftune.tracking.jsonl import read_lines, strict_json


def test_numbers_that_json_does_not_have_become_null_however_deep_they_lie():
    value = {"perplexity": math.inf, "by_class": [[1.5, math.nan], (-math.inf, 2)], "name": "a", "none": None}
    assert json.loads(strict_json(value), parse_constant=pytest.fail) == {
        "perplexity": None,
        "by_class": [[1.5, None], [None, 2]],
        "name": "a",
        "none": None,
    }


def test_a_torn_line_is_passed_over_by_every_reader(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 3.0}\n{"step": 2, "train/lo{"step": 3, "train/loss": 1.0}\n{"step": 4, "train/loss": 0.5}\n'
    )
    assert [line["step"] for line in read_lines(path)] == [1, 4] and read_log(path).curves["train/loss"].steps.tolist() == [
        1,
        4,
    ]
    assert read_predictions(path).num_rows == 2
