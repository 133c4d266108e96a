"""Every demo recipe on simulated GPUs: the losses of CPUs, on one and two, killed and resumed; and what the host waits for.

The counts of waits are in WAITS.md. REHEARSAL_WRITES=yes writes it anew.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.rehearsal.rehearsals import FEW, Waits, assert_bit_equal, rehearse, rehearse_killed, weights
from tests.support.runs import Run, train_on

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
GPU = importlib.import_module("gpu")
RECIPES = GPU.DEMOS
TABLE = Path(__file__).with_name("WAITS.md")
DROPOUT_OFF, BASES = GPU.DROPOUT_OFF, GPU.NEEDS
WHY = {
    "ctc_demo": "torch's CTC loss is computed on the CPU, as its gradient on GPUs depends on chance; Wav2Vec2 masks by index",
    "detection_demo": "transformers matches boxes on the CPU, image by image",
    "distillation_demo": "how many labels there are decides the shape of their logits, of teacher and student",
    "vision_chats_demo": "transformers counts and places the tokens of images",
}
"""Recipes that wait more often than promised, and why."""
GENERATES = ("bigbird_demo", "chats_demo", "chats_lora_demo", "seq2seq_demo", "speech_to_text_demo")
"""Recipes whose evaluations generate texts of each batch, and begin by asking the device for much."""


@pytest.fixture(params=RECIPES, scope="module")
def recipe(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory) -> dict[str, Run]:
    """A run on a CPU, the same on one and on two GPUs, and one that was killed and resumed."""
    folder, words = tmp_path_factory.mktemp(recipe), (*FEW, *DROPOUT_OFF.get(recipe, ()))
    if recipe in BASES:
        base, word = BASES[recipe]
        words += (word.format(train_on(1, {"base": FEW}, folder, base)["base"].folder),)
    return {
        "cpu": train_on(1, {"whole": words}, folder, recipe)["whole"],
        "gpu": rehearse(1, {"whole": words}, folder, recipe)["whole"],
        "resumed": rehearse_killed(1, words, folder, recipe),
        "two": rehearse(2, {"whole": words}, folder, recipe)["whole"],
    }


def test_losses_and_metrics_are_those_of_a_cpu(runs):
    cpu, gpu = runs["cpu"], runs["gpu"]
    assert gpu.logged("train/loss") == pytest.approx(cpu.logged("train/loss"), rel=1e-6)
    assert gpu.logged("train/grad_norm") == pytest.approx(cpu.logged("train/grad_norm"), rel=1e-4)
    assert gpu.result["metrics"].keys() == cpu.result["metrics"].keys()
    assert gpu.result["metrics"]["loss"] == pytest.approx(cpu.result["metrics"]["loss"], rel=evaluated_to(gpu))
    assert len(gpu.predictions) == len(cpu.predictions)


def test_the_export_holds_the_weights_of_the_last_step_on_the_cpu(runs):
    one, other = (weights(runs[name]) for name in ("cpu", "gpu"))
    assert one.keys() == other.keys()
    whole, difference = (
        torch.cat([value.double().flatten() for value in each])
        for each in (one.values(), [one[name].double() - other[name].double() for name in one])
    )
    assert difference.norm() <= 1e-3 * whole.norm()  # Adam makes steps of what is 0 but for rounding


def test_losses_on_two_are_those_on_one(runs):
    assert runs["two"].logged("train/loss") == pytest.approx(runs["gpu"].logged("train/loss"), rel=1e-5)
    found, expected = (runs[name].result["metrics"]["loss"] for name in ("two", "gpu"))
    assert found == pytest.approx(expected, rel=evaluated_to(runs["gpu"]))


def evaluated_to(run: Run) -> float:
    """Return how far the losses of evaluations may lie apart: RT-DETR chooses among equally good queries while it knows nothing."""
    return 0.1 if "detection" in str(run.folder) else 1e-5


def test_a_run_that_was_killed_and_resumed_ends_bit_equal(runs):
    assert_bit_equal(runs["resumed"], runs["gpu"])


def test_no_copy_races_and_the_host_waits_once_a_step_and_once_an_evaluated_batch_one_batch_late(recipe, runs):
    waits, two = Waits.read(runs["gpu"]), [Waits.read(runs["two"], rank) for rank in (0, 1)]
    assert waits.races == [] == two[0].races == two[1].races
    steps, batches = waits.counts["step"], waits.counts["batch"]
    assert waits.number("report") == steps == 4
    assert waits.number("export") == waits.counts["export"] > 0, waits.places("export")  # all weights are copied at once
    back = [count for (_, what, where), count in waits.of.items() if what == "copy to the host" and "trial.py" in where]
    assert sum(back) < 5, waits.places("prepare")  # a trial's copies on the GPU are dropped
    note(recipe, f"{waits.number('step') / waits.counts['micro-batch']:g}", f"{len(evaluated(waits)) / batches:g}")
    if recipe in WHY:
        return
    assert waits.in_steps == [] == two[0].in_steps == two[1].in_steps
    if recipe not in GENERATES:
        assert Counter(evaluated(waits)) <= Counter([*range(2, batches + 1), batches]), waits.places("evaluation")


def evaluated(waits: Waits) -> list[int]:
    """Return when an evaluation waited, but for its sums at the end; see ``Waits.looks``."""
    return waits.looks[:-1]


def note(recipe: str, step: str, evaluation: str) -> None:
    """Hold the table to what was found; or write it."""
    why = WHY.get(recipe, "texts are generated" if recipe in GENERATES else "")
    line = f"| {recipe} | {step} | {evaluation} | {why} |"
    if "REHEARSAL_WRITES" not in os.environ:
        assert line in TABLE.read_text().splitlines(), f"{TABLE.name} does not say: {line}"
        return
    head, lines = table()
    lines[recipe] = line
    TABLE.write_text("\n".join([*head, *(lines[name] for name in sorted(lines))]) + "\n")


def table() -> tuple[list[str], dict[str, str]]:
    lines = TABLE.read_text().splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "_demo" in line}
    return [line for line in lines if line not in rows.values()], rows


def test_the_table_has_every_demo_recipe():
    assert [*table()[1]] == RECIPES
