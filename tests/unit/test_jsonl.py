"""JSON that every reader takes."""

import json
import math

import pytest

from hftune.tracking.jsonl import LineFile, strict_json


def test_numbers_that_json_does_not_have_become_null_however_deep_they_lie():
    value = {"perplexity": math.inf, "by_class": [[1.5, math.nan], (-math.inf, 2)], "name": "a", "none": None}
    assert json.loads(strict_json(value), parse_constant=pytest.fail) == {
        "perplexity": None,
        "by_class": [[1.5, None], [None, 2]],
        "name": "a",
        "none": None,
    }


def test_a_line_with_a_nested_number_that_is_not_finite_is_written(tmp_path):
    file = LineFile(tmp_path / "lines.jsonl")
    file.append({"eval/by_class": [math.nan]})
    file.close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"eval/by_class": [null]}\n'
