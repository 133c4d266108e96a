"""Trackers by name and by dotted path: what they are given, and that one that fails stops no training."""

import json

import numpy as np
import pytest

from hftune import ConfigError, Recipe, TrackConfig, TrackerBackend
from hftune.config import sections
from hftune.distributed.failure_report import STOPPED, Report
from hftune.tracking.tracker import TRACKERS, Tracker, check_trackers, tracker_class
from tests.support.tasks import Tagging


class Remembers(TrackerBackend):
    """Keeps all it is given."""

    def __init__(self, recipe):
        super().__init__(recipe)
        self.calls = []

    def start(self, config, earlier):
        self.calls.append(("start", config["train"]["lr"], earlier.step, earlier.run_id, len(earlier.lines)))

    def log(self, step, values):
        self.calls.append(("log", step, dict(values)))

    def log_table(self, step, name, rows):
        self.calls.append((name, step, rows))

    def log_confusion_matrix(self, step, name, counts, labels):
        self.calls.append((name, step, counts, labels))

    def log_images(self, step, name, images, captions):
        self.calls.append((name, step, [image_HWC.shape for image_HWC in images], captions))

    def log_best(self, step, metric, value):
        self.calls.append(("best", step, metric, value))

    def alert(self, title, text, level):
        self.calls.append(("alert", title, text, level))

    @property
    def run_id(self):
        return "seven"

    def close(self):
        self.calls.append(("close",))

    def interrupt(self):
        self.calls.append(("interrupt",))

    def abandon(self):
        self.calls.append(("abandon",))


class Fails(Remembers):
    def log(self, step, values):
        raise OSError("the server is gone")


class DoesNotStart(TrackerBackend):
    def start(self, config, earlier):
        raise RuntimeError("no licence\nmore")


def opened(folder, *names, step=0, run_ids=None):
    recipe = Recipe(task=Tagging(), output_dir=str(folder), track=TrackConfig(with_=[f"{__name__}.{name}" for name in names]))
    tracker = Tracker(recipe)
    tracker.start(recipe, step, False, run_ids or {}, {})
    return tracker


def calls(tracker, name):
    return tracker._trackers[f"{__name__}.{name}"].calls


def test_the_names_that_recipes_may_use_are_those_of_the_table():
    assert tuple(TRACKERS) == sections.TRACKERS


def test_a_tracker_of_ones_own_gets_everything(tmp_path):
    tracker = opened(tmp_path, "Remembers")
    tracker.log(1, 0.5, {"train/loss": 2.0, "eval/confusion": [[1]], "eval/nothing": float("nan")})
    tracker.log_samples(1, [{"text": "a"}])
    tracker.log_predictions(1, [{"text": "a", "error": 0.1}, {"text": "b", "error": 0.9}, {"text": "c", "error": 0.9}])
    tracker.log_confusion_matrix(1, [[1, 0], [0, 2]], ["cat", "dog"])
    tracker.log_images(1, [np.zeros((2, 3, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], ["a cat", "a dog"])
    tracker.log_best(1, "accuracy", 0.9)
    assert tracker.run_ids() == {f"{__name__}.Remembers": "seven"}
    tracker.close("1 step, accuracy 0.9.")
    worst = [
        {"index": 1, "text": "b", "error": 0.9},
        {"index": 2, "text": "c", "error": 0.9},
        {"index": 0, "text": "a", "error": 0.1},
    ]
    assert calls(tracker, "Remembers") == [
        ("start", 5e-5, 0, None, 0),
        ("log", 1, {"epoch": 0.5, "train/loss": 2.0}),
        ("eval/samples", 1, [{"text": "a"}]),
        ("eval/predictions", 1, worst),
        ("eval/confusion", 1, [[1, 0], [0, 2]], ["cat", "dog"]),
        ("eval/images", 1, [(2, 3, 3), (4, 5, 3)], ["a cat", "a dog"]),
        ("best", 1, "accuracy", 0.9),
        ("alert", "unnamed finished", "1 step, accuracy 0.9.", "info"),
        ("close",),
    ]


def test_a_run_that_ends_early_says_why_unless_it_is_to_be_resumed(tmp_path):
    failed = opened(tmp_path, "Remembers")
    failed.end_early(Report("[process 1]\nTraceback (most recent call last):\nValueError: no such word"))
    assert calls(failed, "Remembers")[1:] == [("alert", "unnamed failed", "ValueError: no such word", "error"), ("abandon",)]
    stopped = opened(tmp_path, "Remembers")
    stopped.end_early(Report("hftune: SIGTERM: stopped after step 3.", STOPPED))
    assert calls(stopped, "Remembers")[1:] == [("interrupt",)]


def test_a_resumed_run_tells_its_tracker_where_it_was(tmp_path):
    opened(tmp_path, "Remembers").log(1, 0.5, {"train/loss": 2.0})
    again = opened(tmp_path, "Remembers", step=1, run_ids={f"{__name__}.Remembers": "seven"})
    assert calls(again, "Remembers") == [("start", 5e-5, 1, "seven", 1)]


def test_a_tracker_that_fails_is_one_warning_and_the_others_get_everything(tmp_path, capsys):
    tracker = opened(tmp_path, "Fails", "Remembers")
    for step in (1, 2, 3):
        tracker.log(step, 0.5, {"train/loss": 2.0})
    tracker.close("done")
    assert capsys.readouterr().out == (
        f"track.with={__name__}.Fails failed: OSError: the server is gone. It gets nothing more; "
        f"{tmp_path}/metrics.jsonl has everything.\n"
    )
    assert [call[0] for call in calls(tracker, "Fails")] == ["start"]
    assert [call[0] for call in calls(tracker, "Remembers")] == ["start", "log", "log", "log", "alert", "close"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_tracker_that_does_not_start_ends_the_run_before_it_trains(tmp_path):
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, "DoesNotStart")
    assert str(caught.value) == f"track.with={__name__}.DoesNotStart does not start: RuntimeError: no licence."


def test_a_class_that_is_no_tracker_is_refused_before_anything_is_loaded():
    recipe = Recipe(task=Tagging(), track=TrackConfig(with_=["tests.support.tasks.Net"]))
    with pytest.raises(ConfigError) as caught:
        check_trackers(recipe)
    assert str(caught.value) == "track.with=tests.support.tasks.Net is not a subclass of hftune.TrackerBackend."


@pytest.mark.parametrize("name", TRACKERS)
def test_each_bare_name_is_a_tracker(name):
    pytest.importorskip(name)
    assert issubclass(tracker_class(name), TrackerBackend)
