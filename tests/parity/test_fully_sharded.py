"""FSDP is only another way to compute the same training: as under DDP, with a part of everything on each process."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import hftune.models.bigbird  # noqa: F401 - registers the classes
from hftune import ConfigError, Recipe, train
from hftune.distributed.preflight import check_launcher
from hftune.planning.plan import make_plan
from hftune.planning.report import plan_text
from hftune.replay.audit import audit
from hftune.strategies.fully_sharded import FullySharded
from tests.support.runs import FSDP, SMALL, Command, Run, environment, train_on, warm_python
from tests.support.tasks import few_reviews

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
JOB = (
    *SMALL,
    "task.dataset=tests.support.tasks:few_reviews",
    "resume=auto",
    "train.epochs=2",
    "train.clip_norm=0.5",
    "checkpoint.keep=9",
)
ODD = (*JOB, "train.micro_batch_size=3", "eval.batch_size=8")
"""Six micro-batches a step on two processes, and two in the last one of an epoch; the norm is always clipped. Five micro-batches
in an evaluation."""
SHORT = (*JOB, "train.max_steps=4")
TITLES = (
    "recipe=bigbird_demo",
    "task.model_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
    "block_size: 8, num_random_blocks: 1, hidden_dropout_prob: 0.1}",
    *("task.vocab_size=700", "task.max_source_length=128", "task.max_train_samples=60", "task.max_eval_samples=13"),
    *("train.batch_size=16", "train.micro_batch_tokens=500", "train.log_every=1", "train.epochs=4", "train.lr=2e-2"),
    "eval.every=4 epochs",
    "task.generation.num_beams=2",
)
BF16 = ("train.mixed_precision=bf16", "train.gradient_checkpointing=true")
PAIRS = {
    "dropout": ODD,
    "unequal": (  # under DDP, one process has more micro-batches than the other
        *SHORT,
        *("train.micro_batch_size=null", "train.micro_batch_tokens=100", "train.gradient_checkpointing=true"),
    ),
    "bf16": (*SHORT, *BF16),
    "sgd": (*SHORT, "train.optimizer=sgd", "train.lr=1e-2", "train.momentum=0.9"),
    "prefix_lm": (*TITLES, "task.architecture=prefix_lm", "eval.batch_size=13"),  # process 1 has nothing to evaluate
    "encoder_decoder": (*TITLES, "task.architecture=encoder_decoder", "eval.batch_size=5"),  # one has two batches, one has one
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """Every job under DDP and under FSDP; and one that begins under FSDP, goes on under DDP, and is stopped again."""
    stopped = (*ODD, f"output_dir={folder / 'chain'}")
    jobs = {f"{way} {name}": words for way in ("ddp", "fsdp") for name, words in PAIRS.items()}
    jobs |= {"fsdp begins": stopped, "ddp goes on": stopped}
    jobs["fsdp gathers bf16"] = (*PAIRS["bf16"], "train.fsdp_gather=bf16")
    sharded = [name for name in jobs if name.startswith("fsdp")]
    return train_on(2, jobs, folder, stops={"fsdp begins": (3, 1), "ddp goes on": (5, 1)}, sharded=sharded)


def same(run, expected, rel=1e-5):
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        values = expected.logged(metric)
        assert values and run.logged(metric) == pytest.approx(values, rel=rel)
    assert run.logged("train/lr") == expected.logged("train/lr")


@pytest.mark.parametrize("name", PAIRS)
def test_losses_and_gradient_norms_are_those_of_ddp(runs, name):
    # In bfloat16 the last bit of a weight may round a product the other way.
    same(runs[f"fsdp {name}"], runs[f"ddp {name}"], rel=1e-3 if name == "bf16" else 1e-5)


def test_the_norm_was_clipped_and_every_sample_was_used_once(runs):
    assert all(norm > 0.5 for norm in runs["fsdp dropout"].logged("train/grad_norm"))
    found = audit(runs["fsdp dropout"].folder)
    assert (found.problems, found.steps, found.whole_epochs) == ([], 14, 2)


def test_gathers_in_bf16_change_no_loss(runs):
    # Autocast would have rounded the same weights, and torch adds their gradients up in float32 either way.
    same(runs["fsdp gathers bf16"], runs["fsdp bf16"], rel=1e-7)


def test_no_task_of_hftune_gathers_a_whole_copy(runs):
    assert not {name for name, run in runs.items() if run.has_copied}


def test_evaluations_score_every_sample_in_its_place(runs):
    rows, expected = runs["fsdp dropout"].predictions, runs["ddp dropout"].predictions
    assert [row["text"] for row in rows] == [row["text"] for row in expected] and len(rows) == 37
    assert [row["probability"] for row in rows] == pytest.approx([row["probability"] for row in expected], abs=1e-5)


@pytest.mark.parametrize("kind", ["StoppedWhileEvaluated", "StoppedWhileGenerating"])
def test_an_evaluation_stops_on_all_processes_and_a_resumed_run_is_the_same(runs, tmp_path, kind):
    words = (f"recipe={SUPPORT / 'next_token.yaml'}", f"task.type=tests.support.tasks.{kind}", "resume=auto")
    words = (*words, "eval.batch_size=2", f"output_dir={tmp_path}/out")
    done = Command(2, *words, **FSDP)
    assert done.returncode != 0
    assert "The same command resumes from" in done.communicate()[1]
    assert "eval/loss" not in (tmp_path / "out" / "metrics.jsonl").read_text()
    done = Command(2, *words, **FSDP)
    assert done.returncode == 0, done.communicate()[1]
    assert Run(tmp_path / "out").logged("eval/loss")


def test_each_process_has_half_of_weights_gradient_and_moments(runs):
    for name in ("dropout", "prefix_lm"):
        run = runs[f"fsdp {name}"]
        whole = sum(value.nbytes for value in load_file(run.folder / "model_last" / "model.safetensors").values())
        parts = [run.weighed(rank) for rank in (0, 1)]
        for what, size in {"weights": whole, "gradient": whole, "moments": 2 * whole}.items():
            assert sum(part[what] for part in parts) == size
            assert max(part[what] for part in parts) < 0.51 * size


def test_a_plan_foretells_what_each_process_holds(runs):
    plan = make_plan(Recipe.load("yelp_demo", *PAIRS["dropout"]), 2, "cpu", fsdp=True)
    found, held = plan.memory, runs["fsdp dropout"].weighed(0)
    steps = 4 * len([*load_file(runs["fsdp dropout"].folder / "model_last" / "model.safetensors")])  # float32 counters
    assert (found.gradients_bytes, found.optimizer_bytes) == (held["gradient"], held["moments"] + steps)
    assert found.weights_bytes == held["weights"] + 2 * 512 * 8  # BERT's buffers of positions, which are whole everywhere
    assert found.host_copy_bytes > 3 * held["weights"] and found.load_bytes < 2 * held["weights"]
    text = plan_text(plan)
    assert "on 2 processes under FSDP" in text and "whole blocks, gathered" in text and "to load it from files" in text


def test_checkpointed_blocks_and_rounded_gathers_keep_no_second_weights():
    words = (*PAIRS["dropout"], "train.mixed_precision=bf16")
    plans = [
        make_plan(Recipe.load("yelp_demo", *words, *more), 2, "cpu", fsdp=True).memory.activations_bytes
        for more in ((), ("train.gradient_checkpointing=true",), ("train.fsdp_gather=bf16",))
    ]
    assert plans[0] > max(plans[1:]) + 20_000


def test_autocast_keeps_no_weights_that_it_has_rounded():
    accelerator = SimpleNamespace(process_index=0, num_processes=2, device=torch.device("cpu"))
    FullySharded(accelerator, Recipe.load("yelp_demo").task)
    assert accelerator.autocast_handler.to_kwargs() == {"cache_enabled": False}


def test_the_export_is_a_plain_model_that_predicts_what_the_evaluation_did(runs):
    run = runs["fsdp dropout"]
    exported, expected = (load_file(made.folder / "model_last" / "model.safetensors") for made in (run, runs["ddp dropout"]))
    assert {name: (value.shape, value.dtype) for name, value in exported.items()} == {
        name: (value.shape, value.dtype) for name, value in expected.items()
    }
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "model_last")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model_last")
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    answers = classify([row["text"] for row in few_reviews("eval")], truncation=True, max_length=64, batch_size=1)
    assert [answer["score"] for answer in answers] == pytest.approx([row["probability"] for row in run.predictions], abs=1e-5)
    assert [answer["label"] for answer in answers] == [row["prediction"] for row in run.predictions]


@pytest.mark.parametrize("name", ["prefix_lm", "encoder_decoder"])
def test_titles_are_generated_by_processes_with_unequal_shares(runs, name):
    run, expected = runs[f"fsdp {name}"], runs[f"ddp {name}"]
    assert run.predictions == expected.predictions and len(run.predictions) == 13
    assert any(row["generated"] for row in run.predictions)


def test_tied_weights_stay_tied(runs):
    model = AutoModelForCausalLM.from_pretrained(runs["fsdp prefix_lm"].folder / "model_last")
    expected = AutoModelForCausalLM.from_pretrained(runs["ddp prefix_lm"].folder / "model_last")
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is embeddings
    assert torch.allclose(embeddings, expected.get_input_embeddings().weight, atol=1e-4)


def test_a_run_goes_from_fsdp_to_ddp_and_back_as_launched_by_accelerate(runs, folder):
    chain = Run(folder / "chain")
    assert len(chain.logged("train/loss")) == 10 and not (chain.folder / "result.json").exists()
    config = str(ROOT / "accelerate_configs" / "fsdp.yaml")
    command = [warm_python(), "-m", "accelerate.commands.launch", "--config_file", config, "-m", "hftune.run"]
    words = ["recipe=yelp_demo", *ODD, f"output_dir={chain.folder}"]
    done = subprocess.run([*command, *words], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (notice,) = [line for line in done.stdout.splitlines() if line.startswith("note: FSDP: ")]
    assert notice == "note: FSDP: process 0 keeps 22,227 of 44,421 weights; they are gathered one BertLayer at a time."
    same(chain, runs["fsdp dropout"])
    assert [start["after_step"] for start in audit(chain.folder).starts] == [0, 4, 10]


def test_a_checkpoint_of_fsdp_goes_on_with_one_process(runs, folder, tmp_path):
    checkpoint = folder / "chain" / "checkpoints" / "step_00000004"
    recipe = Recipe.load("yelp_demo", *ODD, f"resume={checkpoint}", f"output_dir={tmp_path}")
    same(Run(train(recipe).output_dir), runs["ddp dropout"])


IN_FLOAT64 = {
    "dropout": ("task.dropout=0.3", "train.epochs=1", "eval.batch_size=4"),  # two processes evaluate twice, two once
    "whole": ("train.micro_batch_size=12", "train.clip_norm=null", "train.epochs=1"),
    "statistics": (f"recipe={SUPPORT / 'trapped.yaml'}", "task.trap=running statistics"),
    "weights": (f"recipe={SUPPORT / 'trapped.yaml'}", "task.trap=weights that are read"),
}


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """A weight of five rows leaves one of four processes with none; steps have one micro-batch, or four."""
    jobs = {f"{way} {name}": words for way in ("ddp", "fsdp") for name, words in IN_FLOAT64.items()}
    sharded = [name for name in jobs if name.startswith("fsdp")]
    return train_on(4, jobs, tmp_path_factory.mktemp("on_four"), str(SUPPORT / "tagging.yaml"), sharded=sharded)


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_tasks_without_transformers_are_equal_to_rounding_in_float64(on_four, name):
    same(on_four[f"fsdp {name}"], on_four[f"ddp {name}"], rel=1e-13)


@pytest.mark.parametrize("name", ["statistics", "weights"])
def test_a_task_of_ones_own_calls_the_model_on_shards_and_reads_weights_of_a_copy(on_four, name):
    assert on_four[f"fsdp {name}"].has_copied == (name == "weights")  # which one process alone reads
    again, given, draws = ([row[key] for row in on_four[f"fsdp {name}"].predictions] for key in ("again", "given", "draw"))
    assert again == given and draws == [row["draw"] for row in on_four[f"ddp {name}"].predictions]


def test_running_statistics_are_those_of_ddp(on_four):
    given, expected = ([row["given"] for row in on_four[f"{way} statistics"].predictions] for way in ("fsdp", "ddp"))
    assert given == [pytest.approx(row, rel=1e-12) for row in expected]


def test_unused_parameters_are_named(tmp_path):
    words = [f"recipe={SUPPORT / 'trapped.yaml'}", "task.trap=unused parameters", f"output_dir={tmp_path}/out"]
    done = Command(2, *words, **FSDP)
    assert [line for line in done.communicate()[1].splitlines() if line.startswith("hftune: ")] == [
        "hftune: 2 parameters get no gradient: unused.weight, unused.bias. "
        "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."
    ]


BF16_GATHER = "train.fsdp_gather=bf16"
REFUSED = {
    "DeepSpeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, (), "asks for DeepSpeed", "fsdp.yaml."),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, (), "asks for Megatron-LM", "fsdp.yaml."),
    "FSDP 1": ({"ACCELERATE_USE_FSDP": "true"}, (), "asks for FSDP version 1", "Set fsdp_version: 2"),
    "offload": ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, (), "fsdp_offload_params: true", "Set it to false."),
    "checkpointing": (
        *({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, ()),
        *("fsdp_activation_checkpointing: true", "train.gradient_checkpointing=true in the recipe."),
    ),
    "auto": (
        FSDP,
        ("train.micro_batch_size=auto",),
        "train.micro_batch_size=auto does not work under FSDP",
        "micro_batch_size=4",
    ),
    "gathers without bf16": (FSDP, (BF16_GATHER,), f"{BF16_GATHER} needs train.mixed_precision=bf16", "not no"),
    "gathers without FSDP": (
        *({}, (BF16_GATHER, "train.mixed_precision=bf16")),
        *(f"{BF16_GATHER} needs FSDP", "set train.fsdp_gather=float32."),
    ),
    "replicas without FSDP": ({}, ("parallel.replicas=2",), "parallel.replicas=2 needs FSDP", "set parallel.replicas=1"),
    "no launcher": (FSDP, (), "asks for FSDP, but Accelerate chose NO", "accelerate_configs/fsdp.yaml."),
}


def test_groups_of_unequal_size_are_refused(monkeypatch):
    for variable, value in {"ACCELERATE_USE_CPU": "true", **FSDP, "WORLD_SIZE": "3", "RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=r"^parallel.replicas=2 does not divide the number of processes, 3. Set it to"):
        check_launcher(Recipe.load(SUPPORT / "trapped.yaml", "parallel.replicas=2"))
    monkeypatch.setenv("WORLD_SIZE", "1")  # the last process of an elastic job
    check_launcher(Recipe.load(SUPPORT / "trapped.yaml", "parallel.replicas=2"))


def test_detectors_are_refused_before_anything_is_loaded(monkeypatch):
    for variable, value in {"ACCELERATE_USE_CPU": "true", **FSDP}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=r"^FSDP does not work with ObjectDetection, .* Launch without it"):
        check_launcher(Recipe.load("detection_demo"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_launcher_asks_for_in_vain_is_refused(name, tmp_path, monkeypatch):
    variables, words, what, hint = REFUSED[name]
    for variable, value in {"ACCELERATE_USE_CPU": "true", **variables}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        train(Recipe.load(SUPPORT / "trapped.yaml", *words, f"output_dir={tmp_path / 'out'}"))
    assert what in str(caught.value) and hint in str(caught.value)


def test_gpus_that_are_not_to_be_used_must_be_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for variable, value in {"ACCELERATE_USE_CPU": "true", **FSDP}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="GPUs are hidden: set CUDA_VISIBLE_DEVICES=''"):
        train(Recipe.load(SUPPORT / "trapped.yaml", f"output_dir={tmp_path / 'out'}"))
