"""Every demo recipe on simulated GPUs: the losses of CPUs, on one and two, killed and resumed; and what the host waits for.

The counts of waits are in WAITS.md. REHEARSAL_WRITES=yes writes it anew.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rehearsal.rehearsals import FEW, NO_DROPOUT, Waits, rehearse
from tests.support.runs import Run, train_on

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*_demo.yaml"))
TABLE = Path(__file__).with_name("WAITS.md")
OWN_WORDS = {
    **dict.fromkeys(("multi_label_demo", "pairs_demo", "regression_demo", "text_classification_demo"), NO_DROPOUT),
    **dict.fromkeys(("token_classification_demo", "embeddings_demo", "audio_classification_demo"), NO_DROPOUT),
    "ctc_demo": ("task.model_config.hidden_dropout=0", "task.model_config.attention_dropout=0"),
    "mnist_demo": ("task.dropout=0",),
    "process_reward_demo": (  # the heads that transformers has for Llamas drop out a tenth, whatever their config says
        "replace=[task.model_config]",
        "task.model_config={model_type: gpt_neox, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        "num_attention_heads: 2, classifier_dropout: 0.0, max_position_embeddings: 128}",
    ),
    "segmentation_demo": ("task.model_config.classifier_dropout_prob=0", "task.model_config.drop_path_rate=0"),
    "speech_to_text_demo": ("task.model_config.dropout=0",),
}
"""A GPU draws dropout from a generator of its own: only without it are its losses the CPU's."""
BASES = {
    "chats_lora_demo": ("chats_demo", "task.model={}/model"),
    "distillation_demo": ("language_modeling_demo", "train.teacher={}"),
}
"""The recipes that begin with the model of another one, that one, and the word for its folder."""
WHY = {
    "ctc_demo": "torch's CTC loss is computed on the CPU, as its gradient on GPUs depends on chance; Wav2Vec2 masks by index",
    "detection_demo": "transformers matches boxes on the CPU, image by image",
    "distillation_demo": "the logits of labels, of teacher and student, are picked by a mask",
    "restoration_demo": "each image is measured by regions",
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
    """A run on a CPU, the same on one and on two GPUs, and one that was stopped and resumed."""
    folder, words = tmp_path_factory.mktemp(recipe), (*FEW, *OWN_WORDS.get(recipe, ()))
    if recipe in BASES:
        base, word = BASES[recipe]
        words += (word.format(train_on(1, {"base": FEW}, folder, base)["base"].folder),)
    again = (*words, f"output_dir={folder}/gpu/again")
    one = rehearse(1, {"whole": words, "stopped": again, "resumed": again}, folder, recipe, stops={"stopped": (2, 0)})
    return {
        "cpu": train_on(1, {"whole": words}, folder, recipe)["whole"],
        **{"gpu": one["whole"], "resumed": one["resumed"]},
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


def weights(run: Run) -> dict[str, torch.Tensor]:
    (path,) = (run.folder / "model_last").glob("*.safetensors")
    return load_file(path)


def test_losses_on_two_are_those_on_one(runs):
    assert runs["two"].logged("train/loss") == pytest.approx(runs["gpu"].logged("train/loss"), rel=1e-5)
    found, expected = (runs[name].result["metrics"]["loss"] for name in ("two", "gpu"))
    assert found == pytest.approx(expected, rel=evaluated_to(runs["gpu"]))


def evaluated_to(run: Run) -> float:
    """Return how far the losses of evaluations may lie apart: RT-DETR chooses among equally good queries while it knows nothing."""
    return 0.1 if "detection" in str(run.folder) else 1e-5


def test_a_run_that_was_stopped_and_resumed_ends_bit_equal(runs):
    one, other = runs["gpu"], runs["resumed"]
    assert other.logged("train/loss") == one.logged("train/loss")
    assert other.result["metrics"] == one.result["metrics"]
    found, expected = weights(other), weights(one)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_no_copy_races_and_the_host_waits_once_a_step_and_once_an_evaluated_batch_one_batch_late(recipe, runs):
    waits, two = Waits.read(runs["gpu"]), [Waits.read(runs["two"], rank) for rank in (0, 1)]
    assert waits.races == [] == two[0].races == two[1].races
    steps, batches = waits.counts["step"], waits.counts["batch"]
    assert waits.number("report") == steps == 4
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
