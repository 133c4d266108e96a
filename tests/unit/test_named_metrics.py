"""Metrics that a recipe names: functions of the rows by dotted path, and modules of evaluate by name or script."""

import math
from pathlib import Path

import pytest

from hftune import ConfigError, TrainingError
from hftune.metrics.named import compute, load_metrics

ROWS = [{"label": 0, "prediction": 0}, {"label": 1, "prediction": 0}, {"label": 1, "prediction": 1}]
SCRIPT = """
import datasets
import evaluate

class Misses(evaluate.Metric):
    def _info(self):
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=datasets.Features(features))

    def _compute(self, predictions, references):
        return {"misses": sum(one != other for one, other in zip(predictions, references))}
"""


def share_of_ones(rows):
    return sum(row["prediction"] for row in rows) / len(rows)


def two_metrics(rows):
    return {"rows": len(rows), "share_of_ones": share_of_ones(rows)}


def fails(rows):
    return rows[0]["title"]


def text(rows):
    return "good"


def computed(*names, taken=("loss", "accuracy")):
    return compute(load_metrics([f"{__name__}.{name}" for name in names]), ROWS, taken)


def test_a_number_goes_by_the_name_of_its_function_and_a_dict_by_its_own():
    assert computed("share_of_ones") == {"share_of_ones": pytest.approx(1 / 3)}
    assert computed("two_metrics") == {"rows": 3, "share_of_ones": pytest.approx(1 / 3)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fails"], "eval.metrics={here}.fails failed on 3 rows: KeyError: 'title'"),
        (["text"], "eval.metrics={here}.text returned 'good', which is neither a dict nor a number."),
        (
            ["share_of_ones", "two_metrics"],
            "eval.metrics={here}.two_metrics returned share_of_ones, which is already computed. Return it under a different name.",
        ),
    ],
)
def test_a_metric_that_cannot_join_the_others_is_named(names, message):
    with pytest.raises(TrainingError) as caught:
        computed(*names)
    assert str(caught.value) == message.format(here=__name__)


def test_a_clash_with_the_tasks_own_metrics_is_refused():
    with pytest.raises(TrainingError, match="share_of_ones returned share_of_ones, which is already computed"):
        computed("share_of_ones", taken=("share_of_ones",))


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "misses.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_of_evaluate_gets_predictions_and_references_from_the_rows(script):
    assert compute(load_metrics([script]), ROWS, ()) == {"misses": 1}


def test_rows_without_the_fields_of_an_evaluate_module_say_which_are_missing(script):
    with pytest.raises(TrainingError) as caught:
        compute(load_metrics([script]), [{"text": "a", "perplexity": math.e}], ())
    assert str(caught.value) == (
        f"eval.metrics={script} failed on 1 rows: ValueError: {script} needs predictions, a field of the rows called prediction or "
        "generated; these have text, perplexity"
    )


def test_a_module_that_evaluate_does_not_find_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"none.py is not a module that evaluate can load: "):
        load_metrics([f"{tmp_path}/none.py"])
    with pytest.raises(ConfigError, match=r"^eval.metrics=hftune.metrics.named.nothing cannot be imported: "):
        load_metrics(["hftune.metrics.named.nothing"])


def test_a_metric_is_loaded_once_a_process(script):
    """An evaluation later, its script may be gone."""
    (first,) = load_metrics([script]).values()
    Path(script).unlink()
    (again,) = load_metrics([script]).values()
    assert again is first
