"""hftune plan: a run does what the plan predicts, and planning neither creates nor reads weights."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from hftune import ConfigError, Recipe, Task, TrainingError, cli, train
from hftune.batch_plan import BatchPlan, balance
from hftune.build import build_model
from hftune.checkpoints.checkpointer import steps
from hftune.config import TrainConfig
from hftune.optim import optimizer_class
from hftune.planning.memory import make_optimizer_state, packable_weights, step_memory
from hftune.planning.plan import in_4_bits, make_plan, survey
from hftune.planning.record import PipelinePlan
from hftune.planning.report import plan_text
from tests.support.runs import DATA, SMALL, TINY

ROOT = Path(__file__).parents[2]
FEW = "task.dataset=tests.support.tasks:few_reviews"
ONE_LAYER = "task.model_config.num_hidden_layers=1"
"""Planning calls each operation by itself, and takes as long as there are layers."""


def own(folder, task, **train_keys):
    """The recipe of a task of the tests."""
    path = folder / "own.yaml"
    path.write_text(f"task: {{type: {task}}}\n")
    return Recipe.load(path, f"output_dir={folder}/out", *(f"train.{key}={value}" for key, value in train_keys.items()))


def test_a_run_does_what_was_planned(tmp_path):
    words = (*SMALL, FEW, "train.max_steps=12", "train.warmup_ratio=0.3", "train.schedule=cosine", "eval.every=5")
    words = (*words, ONE_LAYER, "checkpoint.every=4", "checkpoint.keep=100", f"output_dir={tmp_path}/out")
    plan = make_plan(Recipe.load("yelp_demo", *words))
    result = train(Recipe.load("yelp_demo", *words))

    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["train/lr"] for line in lines if "train/lr" in line}
    assert (plan.steps.total, plan.steps.per_epoch) == (result.steps, 7) and len(rates) == plan.steps.total
    assert plan.evaluations == [line["step"] for line in lines if "eval/loss" in line] == [5, 10, 12]
    assert {rate.step: rate.lr for rate in plan.learning_rate} == {step: rates[step] for step in (1, 3, 5, 6, 9, 12)}
    assert plan.checkpoints == [4, 7, 8, 12]
    assert {*plan.checkpoints} <= {*steps(tmp_path / "out/checkpoints")} <= {*plan.checkpoints, *plan.evaluations}

    folder = tmp_path / "out/checkpoints/step_00000012"
    saved = {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}
    assert plan.parameters == plan.trainable_parameters == sum(value.numel() for value in saved["model"].values())
    assert plan.disk.checkpoint_bytes == sum(value.nbytes for group in saved.values() for value in group.values())
    assert plan.disk.model_bytes == sum(value.nbytes for value in saved["model"].values())
    assert plan.unused_parameters == []


def test_tokens_and_work_are_those_of_the_first_epoch():
    lengths = np.random.RandomState(0).randint(1, 90, 203)
    batches = BatchPlan(203, 16, micro_batch_size=4, micro_batch_tokens=200, lengths=lengths, seed=3)
    found = survey(batches, num_steps=1000, num_processes=3)
    whole = [*batches.epoch(0)]
    shares = [balance([part.cost for part in step], 3) for step in whole]
    loads = [[sum(step[place].cost for place in places) for places in bins] for step, bins in zip(whole, shares, strict=True)]
    assert found.data.tokens == lengths.sum() and found.data.padded_tokens == sum(map(sum, loads))
    assert found.work.micro_batches == sum(map(len, whole))
    assert found.work.evenness == pytest.approx(np.mean(loads) / np.mean([max(load) for load in loads]))
    assert found.work.most_per_process == max(len(places) for bins in shares for places in bins)
    assert found.work.idle_steps == sum(len(step) < 3 for step in whole)
    tokens = [part.tokens for step in whole for part in step]
    assert (found.work.mean_tokens, found.work.most_tokens) == (pytest.approx(np.mean(tokens)), max(tokens))
    assert not found.work.packed and list(found.work.evenness_by_processes) == [2, 4, 8]
    for processes, evenness in found.work.evenness_by_processes.items():
        assert evenness == survey(batches, 1000, processes).work.evenness
    parts = [part for step in whole for part in step]
    assert max(part.cost for part in parts) in [item.parts[0].cost for item in found.heaviest]
    assert max(len(part.samples) for part in parts) in [len(item.parts[0].samples) for item in found.heaviest]

    part = survey(batches, num_steps=5, num_processes=3)
    seen = np.concatenate([micro.samples for step in whole[:5] for micro in step])
    assert part.data.tokens == lengths[seen].sum() and part.work.micro_batches == sum(map(len, whole[:5]))


@pytest.mark.parametrize(("optimizer", "copies"), [("torch.optim.RMSprop", 1), ("torch.optim.NAdam", 2)])
def test_the_state_of_an_optimizer_of_ones_own_is_counted(tmp_path, optimizer, copies):
    memory = make_plan(own(tmp_path, "tests.support.tasks.Trapped", optimizer=optimizer)).memory
    assert memory.optimizer_bytes == pytest.approx(copies * memory.weights_bytes, abs=64)  # and counters of steps


def test_an_optimizer_that_needs_values_leaves_a_plan_without_memory(tmp_path):
    optimizer = "tests.support.optimizers.Reads"
    plan = make_plan(own(tmp_path, "tests.support.tasks.Trapped", optimizer=optimizer))
    assert plan.memory is None and plan.parameters > 0
    assert plan.notices[-1].startswith(
        f"The memory cannot be estimated: train.optimizer={optimizer} needs the values of tensors, and a plan has none ("
    )


@pytest.mark.parametrize(
    ("processes", "micro_batch_size", "gradients", "buckets"),
    [(1, 16, "some", 0), (1, 4, "all", 0), (2, 8, "none", 1), (2, 4, "none", 1)],
)
def test_gradients_are_there_once_and_in_the_buckets_of_ddp(tmp_path, processes, micro_batch_size, gradients, buckets):
    recipe = own(tmp_path, "tests.support.tasks.Trapped", batch_size=16, micro_batch_size=micro_batch_size)
    memory, size = make_plan(recipe, processes).memory, 8 * (4 * 8 + 8 + 8 * 2 + 2)
    assert memory.ddp_buckets_bytes == buckets * size
    assert memory.gradients_bytes in {"none": [0], "some": range(size), "all": [size]}[gradients]
    parts = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes
    assert memory.peak_bytes == parts + memory.ddp_buckets_bytes


@dataclass
class Terabyte(Task):
    """Its table of embeddings has 10^12 bytes."""

    def datasets(self):
        rows = [{"input": np.arange(4), "labels": 0} for _ in range(6)]
        return {"train": rows, "eval": rows}

    def build_model(self):
        return nn.Sequential(nn.Embedding(250_000_000, 1000), nn.Flatten(), nn.Linear(4000, 2))

    def loss(self, outputs, target):
        return cross_entropy(outputs, target, reduction="sum")


def test_a_terabyte_is_planned_and_not_allocated(tmp_path):
    plan = make_plan(own(tmp_path, "tests.parity.test_planning.Terabyte"))
    assert plan.memory.weights_bytes == 4 * plan.parameters == 10**12 + 4 * 8002
    assert plan.memory.optimizer_bytes == pytest.approx(2e12)
    assert plan.memory.peak_bytes >= 4e12  # the gradient of an embedding is as large as the table
    assert plan.disk.checkpoint_bytes == pytest.approx(3e12)


def test_the_weights_of_a_checkpoint_are_not_read(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    config = BertConfig(vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path / "bert")
    (tmp_path / "bert/model.safetensors").write_bytes(b"nothing that could be loaded")
    plan = make_plan(Recipe.load("yelp", f"task.model={tmp_path}/bert", FEW, "task.max_length=32", "train.packing=off", *DATA))
    five_classes = sum(parameter.numel() for parameter in model.parameters()) + 3 * 17
    assert plan.parameters == five_classes and plan.unused_parameters == []


def test_parameters_without_a_gradient_are_named_as_training_names_them(tmp_path, capsys):
    recipe = own(tmp_path, "tests.support.tasks.Trapped", epochs=1)
    recipe.task.trap = "unused parameters"
    assert make_plan(recipe).unused_parameters == ["unused.weight", "unused.bias"]
    with pytest.raises(TrainingError, match=r"2 parameters get no gradient: unused\.weight, unused\.bias"):
        train(recipe)
    words = [f"recipe={tmp_path}/own.yaml", "task.trap=unused parameters"]
    capsys.readouterr()
    assert cli.main(["plan", *words]) == 1
    assert capsys.readouterr().out.split("model  ")[1].split("memory")[0].split("\n")[:-2] == [
        "        76 parameters, all trained",
        "                 2 of its tensors get no gradient; training would stop at the first step:",
        "                   unused.weight",
        "                   unused.bias",
        "                 Freeze them in build_model (requires_grad_(False)), or leave them out of the model.",
    ]


@dataclass
class Repeated(Terabyte):
    """Its samples are a hundred times as long once they are augmented, and the model takes none that are not."""

    def augment(self, example, rng):
        return {"input": np.tile(example["input"], 100), "labels": example["labels"]}

    def build_model(self):
        return nn.Sequential(nn.Embedding(4, 1000), nn.Flatten(), nn.Linear(400_000, 2))


def test_samples_are_counted_as_they_are_augmented(tmp_path):
    plan = make_plan(own(tmp_path, "tests.parity.test_planning.Repeated", batch_size=1, micro_batch_size=1))
    assert plan.memory.activations_bytes > 400_000 * 4


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
def test_state_of_optimizers_whose_steps_ask_for_values_is_that_of_a_real_step(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    kind = optimizer_class(TrainConfig(optimizer=name))
    shapes = [(80, 70), (300,), (5, 6, 7), ()]
    real, planned = (kind([nn.Parameter(torch.ones(shape)) for shape in shapes], lr=0.1) for _ in range(2))
    for weight in real.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    real.step()
    make_optimizer_state(planned)
    shared = ("step", "qmap1", "qmap2")  # counters, and tables that all parameters share
    sizes = [
        [
            sorted((key, value.shape, value.dtype) for key, value in state.items() if key not in shared and value is not None)
            for state in optimizer.state.values()
        ]
        for optimizer in (real, planned)
    ]
    assert sizes[0] == sizes[1]


def test_bytes_are_those_of_real_tensors():
    def model_and_pass():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        make_optimizer_state(optimizer)
        x = torch.zeros(1000, 4)
        return model, optimizer, lambda: model(x).sum().backward()

    for has_gradients in (False, True):
        real = step_memory(*model_and_pass(), has_gradients)
        with FakeTensorMode():
            assert step_memory(*model_and_pass(), has_gradients) == real
        assert real.weights_bytes == 4 * (4 * 8 + 8 + 8 * 2 + 2)
        assert real.optimizer_bytes == 2 * real.weights_bytes + 4 * 4  # and a counter of steps each
        parts = real.weights_bytes + real.optimizer_bytes + real.gradients_bytes + real.activations_bytes
        assert real.peak_bytes == parts
        assert (real.gradients_bytes == real.weights_bytes) == has_gradients


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_planned_with_the_bytes_of_a_real_step(kind):
    sizes = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 32, head_dim: 16"
    words = (f"task.model_config={{model_type: {kind}, {sizes}, num_local_experts: 4}}", "train.parts=1", "train.packing=off")
    words = (*words, "task.max_train_samples=40", "task.max_eval_samples=4", "train.batch_size=40", "train.micro_batch_size=40")
    recipe = Recipe.load("chats_demo", *words, "train.micro_batch_tokens=null", "train.head_loss=whole")
    memory, task = make_plan(recipe).memory, recipe.task
    dataset, model = task.datasets()["train"], task.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters())
    make_optimizer_state(optimizer)
    batch = task.collate([*dataset])
    real = step_memory(model, optimizer, lambda: task.loss(model(**task.inputs(batch)), task.target(batch)).backward(), False)
    assert (memory.weights_bytes, memory.optimizer_bytes) == (real.weights_bytes, real.optimizer_bytes)
    assert memory.activations_bytes == pytest.approx(real.activations_bytes, rel=0.05)


def test_bf16_and_gradient_checkpointing_take_less_memory():
    wide = "task.model_config={model_type: bert, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 256}"
    words = (wide, *TINY[1:], *DATA, FEW, "train.batch_size=8", "train.micro_batch_size=8", "train.micro_batch_tokens=null")
    words = (*words, "train.packing=off", "train.parts=1")
    plain, bf16, recomputed = (
        make_plan(Recipe.load("yelp_demo", *words, word)).memory.activations_bytes
        for word in ("seed=1", "train.mixed_precision=bf16", "train.gradient_checkpointing=true")
    )
    assert bf16 < 0.8 * plain and recomputed < 0.5 * plain


def test_adapters_are_planned_beside_frozen_weights_whole_or_in_4_bits():
    words = (*TINY, *DATA, FEW, "adapter.type=lora", "adapter.export=both", "train.packing=off", "train.batch_size=4")
    recipe = Recipe.load("yelp_demo", *words)
    plan = make_plan(recipe)
    trained, whole = 4 * plan.trainable_parameters, plan.memory
    assert whole.weights_bytes - whole.frozen_bytes == trained and 0 < trained < 0.5 * whole.frozen_bytes
    assert whole.optimizer_bytes == pytest.approx(2 * trained, rel=0.01)
    assert trained <= plan.disk.checkpoint_bytes - whole.optimizer_bytes < 1.1 * trained
    assert plan.disk.model_bytes > whole.frozen_bytes
    assert "weights that stay frozen" in plan_text(plan)

    with torch.device("meta"):
        packed = in_4_bits(whole, model := build_model(recipe))
    linear = sum(value.numel() for value in packable_weights(model))
    assert linear == 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32  # of two layers, and the pooler
    assert whole.frozen_bytes - packed.frozen_bytes == pytest.approx(linear * (4 - 0.516), rel=1e-3)
    assert packed.peak_bytes < whole.peak_bytes


@pytest.mark.parametrize("architecture", ["prefix_lm", "encoder_decoder"])
def test_titles_are_planned(architecture):
    words = (
        "task.dataset=tests.support.tasks:few_articles",
        ONE_LAYER,
        "task.model_config.block_size=16",
        "train.batch_size=4",
    )
    plan = make_plan(Recipe.load("bigbird_demo", f"task.architecture={architecture}", *words), num_processes=2)
    assert plan.unused_parameters == []
    assert plan.memory.ddp_buckets_bytes == 4 * plan.parameters


@dataclass
class Curious(Terabyte):
    """Looks at its numbers."""

    where: str = "forward"

    def build_model(self):
        model = nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(8, 2))
        if self.where == "build_model":
            model[2].weight.data /= model[2].weight.norm().item()
        return model

    def loss(self, outputs, target):
        assert outputs.sum().item() > -9
        return super().loss(outputs, target)


def test_what_needs_values_is_not_planned_and_the_rest_is(tmp_path):
    recipe = own(tmp_path, "tests.parity.test_planning.Curious")
    plan = make_plan(recipe)
    assert (plan.parameters, plan.memory, plan.unused_parameters) == (38, None, None) and plan.disk.model_bytes == 152
    assert plan.notices == [
        "The memory cannot be estimated: the forward pass or the loss needs the values of tensors, and a plan has none "
        "(DataDependentOutputException: aten._local_scalar_dense.default)."
    ]
    recipe.task.where = "build_model"
    plan = make_plan(recipe)
    assert (plan.parameters, plan.memory, plan.disk) == (None, None, None) and plan.steps.total == 3
    assert plan.notices == [
        "The model cannot be planned: build_model() needs the values of tensors, and a plan has none "
        "(RuntimeError: Tensor.item() cannot be called on meta tensors)."
    ]


def test_processes_without_work_are_told(tmp_path):
    plan = make_plan(own(tmp_path, "tests.support.tasks.Tagging", batch_size=20, micro_batch_size=5), num_processes=8)
    assert plan.work.idle_steps == 3 and plan.work.evenness < 0.5
    said = "In 3 of 3 steps some processes are idle: there are fewer micro-batches than processes. "
    assert plan.notices == [said + "Set train.parts=8, or raise train.batch_size."]
    parts = make_plan(own(tmp_path, "tests.support.tasks.Tagging", batch_size=20, parts=8), num_processes=8)
    assert parts.work.idle_steps == 0 and parts.notices == []
    plan = make_plan(own(tmp_path, "tests.support.tasks.Tagging", batch_size=7, micro_batch_size=5), num_processes=8)
    assert plan.notices == [said.replace("3 of 3", "8 of 8") + "Raise train.batch_size."]


def test_auto_is_planned_with_the_most_that_training_would_try(tmp_path):
    plan = make_plan(own(tmp_path, "tests.support.tasks.Tagging", batch_size=25, micro_batch_size="auto"), num_processes=2)
    assert plan.work.most_per_step == 2
    assert plan.notices == ["train.micro_batch_size=auto: planned with 13, the largest size that training would try."]


def test_tokens_are_planned_with_a_share_of_a_step_and_auto_precision_with_that_of_the_device():
    words = (*TINY, *DATA, FEW, "train.micro_batch_size=null", "train.micro_batch_tokens=auto", "train.mixed_precision=auto")
    words = (*words, ONE_LAYER, "train.packing=off")
    recipe = Recipe.load("yelp_demo", *words)
    plan = make_plan(recipe, num_processes=2)
    (said,) = [notice for notice in plan.notices if "auto" in notice]
    tokens = int(re.fullmatch(r"train.micro_batch_tokens=auto: planned with (\d+), the largest size .*", said)[1])
    assert tokens == np.ceil(plan.data.tokens / plan.data.train_samples * plan.steps.batch_size / 2)
    assert plan.work.idle_steps == 1  # the short last one
    assert "train.mixed_precision=auto: planned with bf16." in make_plan(recipe, device="cuda").notices


@pytest.mark.parametrize(("built_for", "what"), [(None, "is built without CUDA"), ("13.0", "finds no GPU")])
def test_a_gpu_that_this_pytorch_cannot_simulate_is_told(built_for, what, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    plan = make_plan(own(tmp_path, "tests.support.tasks.Tagging"), device="cuda")
    assert plan.memory.device == "cpu"
    assert plan.notices == [
        f"The memory is estimated for the CPU: this PyTorch {what}, and cannot simulate a step there. Weights, "
        "gradients and optimizer are the same on a GPU; activations may differ, as other kernels run."
    ]


def refused(capsys, *words):
    assert cli.main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.removeprefix("hftune: ").rstrip("\n")


def test_what_cannot_be_planned_is_refused(capsys):
    assert refused(capsys) == "Name one recipe, such as recipe=yelp_demo; 0 were given."
    recipe = "recipe=yelp_demo"
    with pytest.raises(ConfigError) as caught:
        Recipe.load("yelp_demo", "train.learning_rate=1")
    assert refused(capsys, recipe, "train.learning_rate=1") == str(caught.value)
    for words, said in {
        "--processes 0": "--processes 0 must be at least 1.",
        "--fsdp": "--fsdp: it needs two processes or more (--processes), and goes neither with parallel.pipeline_stages nor "
        "with adapter.quantize. Leave it out.",
        f"{FEW} task.model_config.num_attention_heads=3": "task.model_config cannot be built: The hidden size (128) is not",
    }.items():
        assert said in refused(capsys, recipe, *words.split())


def test_options_may_stand_between_the_words(capsys, tmp_path):
    own(tmp_path, "tests.support.tasks.Tagging")
    words = [f"recipe={tmp_path}/own.yaml", "--processes", "4", "train.epochs=7", "--device", "cpu", "seed=1", "--json"]
    assert cli.main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["processes"], plan["memory"]["device"], plan["steps"]["epochs"]) == (4, "cpu", 7)
    with pytest.raises(SystemExit):
        cli.main(["plan", *words, "--nodes"])
    assert "unrecognized arguments: --nodes" in capsys.readouterr().err


def test_every_key_is_documented(tmp_path):
    plan = make_plan(own(tmp_path, "tests.support.tasks.Tagging")).to_dict()
    assert plan["pipeline"] is None
    plan["pipeline"] = {field.name: None for field in fields(PipelinePlan)}
    keys = {f"{name}.{key}" for name, part in plan.items() if isinstance(part, dict) for key in part} | {"pipeline"}
    keys |= {name for name, part in plan.items() if not isinstance(part, dict)}
    table = [line for line in (ROOT / "docs/plan-and-doctor.md").read_text().splitlines() if line.startswith("| `")]
    assert {key for line in table for key in re.findall(r"`([\w.]+)`", line.split("|")[1])} == keys


TEXT = """\
own on 2 processes: a plan, nothing is trained.

  data           50 samples to train on, 23 to evaluate on
                 508 tokens an epoch, the longest sample has 19; 13.6% of what is computed is padding

  steps          8 of 16 samples each: 2 epochs of 4 steps
                 1 to 4 micro-batches a step, at most 2 on a process
                 45 tokens a micro-batch on average, at most 76, padding included
                 load balance 93.0% (processes idle 7.0% of the time, waiting for the slowest)
                 the same micro-batches: load balance 93.0% on 2, 57.4% on 4, 28.7% on 8 processes

  learning rate  step 1  0                              first
                 step 2  0.0005    ██████████           a quarter
                 step 3  0.001     ████████████████████ peak, after the warmup
                 step 4  0.000833  █████████████████    half
                 step 6  0.0005    ██████████           three quarters
                 step 8  0.000167  ███                  last

  evaluation     after steps 4, 8

  checkpoint     after steps 1, 2, 3, 4, …, 8 (8 in all), and after each new best evaluation

  model          565 parameters, all trained

  memory         N KiB on each process (cpu), in a micro-batch of 4 samples of at most 19 tokens
                   N KiB  weights
                   N KiB  DDP gradient buckets
                   N KiB  optimizer
                   N KiB  activations
                 plus N KiB of host memory on the main process, from which checkpoints are written

  disk           N KiB at most, including the checkpoint and model being written
                   N KiB  4 checkpoints of N KiB
                   N KiB  3 models of N KiB

  notices        In 1 of 4 steps some processes are idle: there are fewer micro-batches than processes. Set
                 train.parts=2, or raise train.batch_size.
"""


def test_a_plan_without_padding_says_so():
    plan = make_plan(Recipe.load("yelp_demo", *TINY, *DATA, FEW, ONE_LAYER), num_processes=2)
    text = plan_text(plan)
    assert plan.work.packed and plan.data.padding_share == 0
    assert "; computed without padding\n" in text and "% of what is computed is padding" not in text
    assert (
        f"{plan.work.mean_tokens:,.0f} tokens a micro-batch on average, at most {plan.work.most_tokens:,}, without padding\n"
        in text
    )


def test_the_text_can_be_read(capsys, tmp_path):
    own(tmp_path, "tests.support.tasks.Tagging")
    words = ["train.epochs=2", "train.batch_size=16", "train.micro_batch_size=4", "train.warmup_ratio=0.25", "train.lr=0.001"]
    words += ["checkpoint.every=1", "--processes=2"]
    assert cli.main(["plan", f"recipe={tmp_path}/own.yaml", *words]) == 0
    assert without_sizes(capsys.readouterr().out) == without_sizes(TEXT)


def without_sizes(text):
    """Sizes depend on torch's version, and with them bars and columns."""
    text = re.sub(r"[\d.]+ (Ki)?B\b", "N KiB", text)
    return [re.sub(r"[ █]{2,}", "  ", line) if "N KiB" in line else line for line in text.splitlines()]
