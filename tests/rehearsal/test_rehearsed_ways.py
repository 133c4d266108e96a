"""Ways to train, and commands, on simulated GPUs: precisions, packing, sharding, pipelines and what looks at a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.rehearsal.rehearsals import FEW, NO_DROPOUT, Rehearsal, Waits, assert_bit_equal, rehearse, rehearse_killed
from tests.support.runs import DATA, TINY, Group, Run, environment, train_on, warm_python
from tests.support.warm import STAYS_WARM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

DROPOUT = ("task.model_config.hidden_dropout_prob=0.1", "task.model_config.attention_probs_dropout_prob=0.1")
PACKED = ("train.micro_batch_size=null", "train.micro_batch_tokens=400", "train.parts=2")
RESNET = (
    "replace=[task.model_config]",
    "task.model_config={model_type: resnet, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic}",
    "task.dataset=tests.support.tasks:few_shapes",
)
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "packed": ("yelp_demo", (*PACKED,)),
    "packed with dropout": ("yelp_demo", (*PACKED, *DROPOUT)),
    "averaged weights": ("yelp_demo", ("train.ema_decay=0.9",)),
    "exported in between": ("yelp_demo", (*PACKED, "eval.every=2", "train.lr=1e-2")),
    "checkpointed": ("yelp_demo", (*PACKED, *DROPOUT, "train.gradient_checkpointing=true")),
    "deterministic": ("yelp_demo", ("train.deterministic=true",)),
    "clipped, with sgd": ("yelp_demo", ("train.optimizer=sgd", "train.clip_norm=0.1")),
    "muon": ("yelp_demo", ("train.optimizer=muon",)),
    "class weights and focal loss": (
        "text_classification_demo",
        (*NO_DROPOUT, "task.class_weights=balanced", "task.focal_gamma=2"),
    ),
    "batch norm": ("image_classification_demo", RESNET),
    "worker processes": ("yelp_demo", (*PACKED, "train.num_workers=2")),
}
"""The recipe and the words of each; float32, and the same on one and two GPUs and, without dropout, on a CPU."""


@pytest.mark.parametrize("way", WAYS)
def test_a_way_computes_what_a_cpu_does_on_one_and_two_and_does_not_wait(way, tmp_path):
    recipe, words = WAYS[way]
    words = (*FEW, *words)
    gpu, two = (rehearse(count, {way: words}, tmp_path, recipe)[way] for count in (1, 2))
    assert two.logged("train/loss") == pytest.approx(gpu.logged("train/loss"), rel=1e-5)
    assert two.result["metrics"]["loss"] == pytest.approx(gpu.result["metrics"]["loss"], rel=1e-5)
    if not set(DROPOUT) & set(words):
        cpu = train_on(1, {way: words}, tmp_path, recipe)[way]
        assert gpu.logged("train/loss") == pytest.approx(cpu.logged("train/loss"), rel=1e-6)
    assert_does_not_wait(gpu)


@pytest.mark.parametrize("way", ["packed with dropout", "averaged weights", "batch norm", "fp16", "sharded"])
def test_a_way_that_is_killed_on_two_and_resumed_ends_bit_equal(way, tmp_path):
    recipe, words = WAYS.get(way, ("yelp_demo", (*PACKED, *DROPOUT)))
    words = (*FEW, *words, *(("train.mixed_precision=fp16",) if way == "fp16" else ()))
    sharded = way == "sharded"
    whole = rehearse(2, {way: words}, tmp_path, recipe, sharded={way} if sharded else ())[way]
    assert_bit_equal(rehearse_killed(2, words, tmp_path, recipe, sharded), whole)


def assert_does_not_wait(run: Run) -> None:
    waits = Waits.read(run)
    assert waits.in_steps == [] == waits.races and waits.number("report") == waits.counts["step"]


@pytest.mark.parametrize(
    ("precision", "recipe", "more"),
    [
        ("bf16", "yelp_demo", ()),
        ("fp16", "yelp_demo", ()),
        ("bf16", "chats_demo", ("task.model_config.num_key_value_heads=2",)),  # which flash attention takes as they are
    ],
)
def test_half_precision_is_close_to_float32_and_waits_as_seldom(precision, recipe, more, tmp_path):
    words = (*FEW, *PACKED, *more)
    jobs = {"float32": words, precision: (*words, f"train.mixed_precision={precision}")}
    runs = rehearse(1, jobs, tmp_path, recipe)
    two = rehearse(2, {precision: jobs[precision]}, tmp_path, recipe)[precision]
    for run in (runs[precision], two):
        assert run.logged("train/loss") == pytest.approx(runs["float32"].logged("train/loss"), rel=0.02)
        assert_does_not_wait(run)


def test_a_gpu_chooses_bf16_and_packs_with_flash_attention(tmp_path):
    words = (*FEW, *PACKED, *DROPOUT, "train.mixed_precision=auto")
    run = rehearse(1, {"auto": words}, tmp_path, "yelp_demo")["auto"]
    assert json.loads((run.folder / "result.json").read_text())["metrics"]
    assert_does_not_wait(run)


def test_sharded_on_two_is_one(tmp_path):
    words = (*FEW, *NO_DROPOUT)
    one = rehearse(1, {"one": words}, tmp_path, "yelp_demo")["one"]
    two = rehearse(2, {"sharded": words}, tmp_path, "yelp_demo", sharded={"sharded"})["sharded"]
    assert_does_not_wait(two)
    assert two.logged("train/loss") == pytest.approx(one.logged("train/loss"), rel=1e-5)
    assert two.result["metrics"]["loss"] == pytest.approx(one.result["metrics"]["loss"], rel=1e-5)


def test_a_pipeline_of_two_is_one(tmp_path):
    words = (*FEW, "task.block_length=16", "task.max_test_samples=4")
    one = rehearse(1, {"one": words}, tmp_path, "wikitext2_demo")["one"]
    two = rehearse(2, {"piped": (*words, "parallel.pipeline_stages=2")}, tmp_path, "wikitext2_demo")["piped"]
    assert_does_not_wait(two)
    assert two.logged("train/loss") == pytest.approx(one.logged("train/loss"), rel=1e-5)


def test_auto_profiler_and_usage_find_a_gpu(tmp_path):
    words = (*FEW, "train.micro_batch_size=auto", "train.profile=[2, 3]")
    run = rehearse(1, {"auto": words}, tmp_path, "yelp_demo")["auto"]
    assert [*(run.folder / "profile").iterdir()]
    names = {name for line in (run.folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert any("gpu" in name and "gib" in name for name in names), sorted(names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "recipe=yelp_demo", "--device", "cuda"), "on each process (cuda"),
        (("doctor",), "NVIDIA H200"),
    ],
)
def test_commands_find_a_gpu(words, said, tmp_path):
    log = tmp_path / "log"
    codes = Rehearsal(1, [["hftune.cli", words, None, {"ACCELERATE_USE_CPU": "false"}]], log, as_typed=True).wait()
    assert codes == [0] and said in log.read_text(), log.read_text()


def test_a_model_trained_on_a_gpu_predicts_there_what_it_predicts_on_a_cpu(tmp_path):
    words = (*TINY, *DATA, *FEW, *NO_DROPOUT)
    run, answers = rehearse(1, {"run": words}, tmp_path, "yelp_demo")["run"], []
    for group in (Group, Rehearsal):  # on a CPU, and on a GPU
        log, errors = tmp_path / group.__name__, tmp_path / "errors"
        command = ["predict", str(run.folder / "model_last"), "--text", "fine", "--text", "never again", "--json"]
        codes = group(1, [["hftune.cli", command, None, {}]], log, as_typed=True, errors=errors).wait()
        assert codes == [0], log.read_text() + errors.read_text()
        answers.append([json.loads(line) for line in log.read_text().splitlines()])
    (one, other), (first, second) = answers
    assert one["label"] == first["label"] and other["label"] == second["label"]
    assert one["probability"] == pytest.approx(first["probability"], abs=2e-6)


def test_make_gpu_ends_with_a_table_of_kept_promises(tmp_path):
    """On two GPUs; what it says of speed is that of the CPU, and means nothing."""
    sizes = ("--layers", "1", "--width", "64", "--vocab-size", "500", "--batch-size", "8", "--rows", "4", "--steps", "2")
    command = [warm_python(), BENCHMARKS / "gpu.py", "yelp_demo", "--rounds", "1", *sizes, "--output", tmp_path / "result.json"]
    variables = {"ACCELERATE_USE_CPU": "false", STAYS_WARM: "yes"}
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    head, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert head.startswith("| 2 x NVIDIA H200; python ") and head.endswith(" | bound | found |")
    found = {
        what: (bound, said) for what, bound, said in (row.strip("| ").split(" | ") for row in rows if "training" not in row)
    }
    assert [said for _, said in found.values()][3:] == ["1 bit-equal", "1 bit-equal"] and len(found) == 5
    assert all(float(said.split()[0]) <= float(bound) for bound, said in [*found.values()][:3])
    assert rows[-1].startswith("| training BERT 1 x 64, bf16, eager, stored, packed |") and " x Trainer |" in rows[-1]
