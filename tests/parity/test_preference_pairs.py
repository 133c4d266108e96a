"""Preference pairs on 1, 2 and 4 processes, stopped and resumed, and against a plain loop: the same losses of the same pairs."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy, logsigmoid

from hftune import ConfigError, Recipe, cli, load_model, settle, train
from hftune.build import build_model, load_datasets, plan_batches
from hftune.reevaluation import evaluate
from tests.support.runs import Run, train_on
from tests.support.trainer import STEPS, losses_of_trainer, planned_batches

DROPOUT = "task.model_config.attention_dropout=0.2"
SMALL = (
    *("task.max_train_samples=80", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=4", "train.log_every=1"),
    *("train.micro_batch_tokens=400", "train.epochs=2", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=5"),
)
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2")
JOBS = {
    "whole": (*SMALL, DROPOUT, "checkpoint.every=2"),
    "lora": (*SMALL, DROPOUT, *LORA, "task.method=ipo"),
    "orpo": (*SMALL, DROPOUT, "task.method=orpo", "eval.every=never", "train.packing=off"),
}
ALONE = (*SMALL, "train.parts=null", "train.micro_batch_tokens=null", "train.epochs=4", "eval.every=never", "task.beta=0.3")
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    alone = {"alone": (*ALONE, "train.micro_batch_size=16"), "cut": (*ALONE, "train.micro_batch_size=3")}
    jobs = {1: {**JOBS, **alone}, 2: {**JOBS, "cut": alone["cut"]}, 4: {"whole": JOBS["whole"], "lora": JOBS["lora"]}}
    found = {(name, size): run for size in SIZES for name, run in train_on(size, jobs[size], folder, "dpo_demo").items()}
    other = {"sharded": JOBS["whole"], "stages": (*JOBS["whole"], "parallel.pipeline_stages=2")}
    found |= {(name, 2): run for name, run in train_on(2, other, folder, "dpo_demo", sharded={"sharded"}).items()}
    named = {"named": (*SMALL, DROPOUT, "checkpoint.every=2", f"train.reference={found['whole', 1].folder}")}
    for size in SIZES:
        found["named", size] = train_on(size, named, folder, "dpo_demo")["named"]
    found["named_sharded", 2] = train_on(2, named, tmp_path_factory.mktemp("sharded"), "dpo_demo", sharded={"named"})["named"]
    stopped = {"resumed": (*JOBS["whole"], f"output_dir={folder}/resumed")}
    train_on(2, stopped, folder, "dpo_demo", stops={"resumed": (5, 0)})
    return found | {("resumed", 2): train_on(2, stopped, folder, "dpo_demo")["resumed"]}


@pytest.mark.parametrize(("name", "size"), [*product(["whole", "lora", "named"], SIZES[1:]), ("orpo", 2)])
def test_losses_do_not_depend_on_processes_with_dropout(runs, name, size):
    one, many = runs[name, 1], runs[name, size]
    expected = one.logged("train/loss")
    assert len(expected) == 10 and (expected[-1] < expected[0] or name == "named")
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    assert many.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)


@pytest.mark.parametrize("name", ["sharded", "stages"])
def test_losses_are_the_same_under_fsdp_and_in_a_pipeline(runs, name):
    whole, other = runs["whole", 1], runs[name, 2]
    assert other.logged("train/loss") == pytest.approx(whole.logged("train/loss"), rel=1e-5)
    assert other.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["whole", "named"])
def test_a_replayed_step_is_the_one_that_was(runs, capsys, monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert cli.main(["replay", str(runs[name, 1].folder), "--step", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bit_equal"]


@pytest.mark.parametrize("size", SIZES[:2])
def test_losses_do_not_depend_on_micro_batches(runs, size):
    assert runs["cut", size].logged("train/loss") == pytest.approx(runs["alone", 1].logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize(("name", "size"), [("whole", 2), ("whole", 4), ("lora", 4)])
def test_evaluations_do_not_depend_on_processes(runs, name, size):
    metrics, expected = runs[name, size].result["metrics"], runs[name, 1].result["metrics"]
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics.keys() == {
        *("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_length", "rejected_length")
    }


def test_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["whole", 2], runs["resumed", 2]
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"]


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_evaluating_the_export_compares_with_the_model_that_training_began_with(runs, name, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = runs[name, 1]
    last = "model_last" if (run.folder / "model_last").is_dir() else "model"
    metrics = evaluate(Recipe.load(run.folder / "recipe.yaml"), run.folder / last).metrics
    assert metrics["margin"] != 0
    assert metrics == pytest.approx(run.result["metrics"], rel=1e-5)


def test_a_model_that_the_recipe_names_is_what_training_and_evaluations_compare_with(runs, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run, start = runs["named", 1], runs["whole", 1].folder
    recipe = Recipe.load(run.folder / "recipe.yaml", "task.model_config.attention_dropout=0")
    pairs, model, other = load_datasets(recipe)["train"], build_model(recipe), load_model(start).model
    batch = [pairs[sample] for part in plan_batches(recipe, pairs).epoch(0)[0] for sample in part.samples.tolist()]
    total = 0.0
    with torch.no_grad():
        for pair in batch:
            margins = [logps(each, pair, "chosen") - logps(each, pair, "rejected") for each in (model, other.eval())]
            total -= float(logsigmoid(0.1 * (margins[0] - margins[1])))
    folder = Path(f"{run.folder}_first")
    train(replace(recipe, output_dir=str(folder), train=replace(recipe.train, max_steps=1)))
    assert Run(folder).logged("train/loss")[0] == pytest.approx(total / len(batch), rel=2e-5)
    assert abs(total / len(batch) - 0.6931472) > 1e-3
    last = "model_last" if (run.folder / "model_last").is_dir() else "model"
    for saved in ({"model": run.folder / last}, {"model": "", "checkpoint": run.folder / "checkpoints" / "step_00000010"}):
        assert evaluate(Recipe.load(run.folder / "recipe.yaml"), **saved).metrics == pytest.approx(
            run.result["metrics"], rel=1e-5
        )


def test_a_named_reference_under_fsdp_is_the_same(runs):
    whole, sharded = runs["named", 1], runs["named_sharded", 2]
    assert sharded.logged("train/loss") == pytest.approx(whole.logged("train/loss"), rel=1e-5)
    about = [json.loads((run.folder / "model" / "hftune.json").read_text())["reference"] for run in (whole, sharded)]
    assert about[0] == about[1] != json.loads((runs["whole", 1].folder / "model" / "hftune.json").read_text())["reference"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("task.method=simpo",), "Preferences with task.method=simpo compares with no other model. Leave it out."),
        ((), "there is no such folder. Name a run's output folder, or one of save_pretrained."),
    ],
)
def test_references_that_cannot_be_are_refused(words, expected, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"train.reference={tmp_path}/none: {expected}")):
        train(Recipe.load("dpo_demo", *SMALL, *words, f"train.reference={tmp_path}/none", f"output_dir={tmp_path}/run"))


def test_the_reference_is_computed_once(tmp_path, monkeypatch):
    """For train and eval; not again with another beta, nor by methods without a reference."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    counts, evaluate_inner = [], settle.evaluate

    def counted(strategy, dataset, config, **rest):
        counts.append(len(dataset))
        return evaluate_inner(strategy, dataset, config, **rest)

    monkeypatch.setattr(settle, "evaluate", counted)
    for name, words, expected in (
        ("first", ("train.max_steps=2",), [80, 13]),
        ("first", ("train.max_steps=3",), []),
        ("other", ("train.max_steps=1", "task.beta=0.7"), []),
        ("none", ("train.max_steps=1", "task.method=simpo"), []),
        ("seed", ("train.max_steps=1", "seed=5"), [80, 13]),
    ):
        train(Recipe.load("dpo_demo", *SMALL, *words, "eval.every=1", f"output_dir={tmp_path}/{name}", "checkpoint.every=1"))
        assert counts == expected, name
        counts.clear()


def test_the_reference_that_runs_record_depends_on_neither_processes_nor_sharding(runs):
    def recorded(*jobs):
        return {json.loads((runs[job].folder / "model" / "hftune.json").read_text()).get("reference") for job in jobs}

    (whole,) = recorded(*(("whole", size) for size in SIZES), ("resumed", 2), ("sharded", 2), ("stages", 2))
    (lora,) = recorded(*(("lora", size) for size in SIZES))
    assert whole and len(lora.split()) == 2 and recorded(("orpo", 1)) == {None}


def test_another_reference_is_refused_on_resume_and_in_evaluations(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = (*SMALL, "eval.every=never", "checkpoint.every=1", f"output_dir={tmp_path}/run")
    built = build_model(recipe := Recipe.load("dpo_demo", *words, "train.max_steps=1"))
    torch.save(built.state_dict(), tmp_path / "weights.pt")
    train(recipe)
    with pytest.raises(ConfigError, match=r"step_00000001 was trained with another reference, .* resume=never starts over\.$"):
        with torch.no_grad():
            built.lm_head.weight.mul_(1.01)
        torch.save(built.state_dict(), tmp_path / "others.pt")
        train(Recipe.load("dpo_demo", *words, "train.max_steps=2", f"task.weights={tmp_path}/others.pt"))
    train(Recipe.load("dpo_demo", *words, "train.max_steps=2", f"task.weights={tmp_path}/weights.pt"))
    other = Recipe.load("dpo_demo", *words, f"task.weights={tmp_path}/others.pt")
    for start in (
        {"model": tmp_path / "run" / "model"},
        {"model": "", "checkpoint": tmp_path / "run/checkpoints/step_00000002"},
    ):
        with pytest.raises(ConfigError, match=r"(model|step_00000002) was trained with another reference"):
            evaluate(other, **start, split="train")


def logps(model, pair, side):
    """Return the log-probability that a model gives one answer, computed alone and without padding."""
    ids, labels = (torch.as_tensor(pair[name])[None] for name in (side, f"{side}_labels"))
    return -cross_entropy(model(input_ids=ids).logits[0], labels[0], ignore_index=-100, reduction="sum")


def test_losses_are_those_of_a_plain_loop_with_a_frozen_copy(runs):
    recipe = Recipe.load("dpo_demo", *ALONE, "train.micro_batch_size=16")
    pairs, model, config, losses = load_datasets(recipe)["train"], build_model(recipe), recipe.train, []
    reference = deepcopy(model).eval()
    optimizer = torch.optim.AdamW(recipe.task.parameter_groups(model, config), config.lr, tuple(config.betas))
    for step, batch in enumerate(planned_batches(recipe, pairs, list)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / STEPS)
        total = 0
        for pair in batch:
            with torch.no_grad():
                base = logps(reference, pair, "chosen") - logps(reference, pair, "rejected")
            total = total - logsigmoid(0.3 * (logps(model, pair, "chosen") - logps(model, pair, "rejected") - base))
        optimizer.zero_grad()
        (total / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(total.item() / len(batch))
    ours = runs["alone", 1].logged("train/loss")
    assert len(ours) == STEPS and ours[0] == pytest.approx(0.6931472, rel=1e-5) and ours[-1] < 0.6
    assert ours == pytest.approx(losses, rel=2e-5)  # the log-probabilities of 30 tokens are rounded in another order


TRLS = ("sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down")


@pytest.fixture(scope="module")
def ours_and_trls(tmp_path_factory):
    """Our losses of twenty steps by each method, and those of TRL's DPOTrainer."""
    import trl  # takes seconds

    folder, found = tmp_path_factory.mktemp("trl"), {}
    words = {
        method: (
            *ALONE,
            "task.type=tests.support.tasks.PrecisePreferences",
            "train.micro_batch_size=16",
            f"task.method={method}",
            *(("task.label_smoothing=0.1",) * (method == "robust")),
        )
        for method in TRLS
    }
    runs = train_on(1, words, folder, "dpo_demo")
    for method in TRLS:
        recipe = Recipe.load("dpo_demo", *words[method])
        pairs, tokenizer = load_datasets(recipe)["train"], recipe.task.text_tokenizer

        def whole(examples, pad=tokenizer.pad_token_id):
            """TRL's models shift the labels themselves."""
            rows = [(row[side].tolist(), row[f"{side}_labels"].tolist()) for side in ("chosen", "rejected") for row in examples]
            width = 1 + max(len(ids) for ids, _ in rows)
            rest = [width - 1 - len(ids) for ids, _ in rows]
            return {
                "input_ids": torch.tensor(
                    [[*ids, labels[-1], *[pad] * more] for (ids, labels), more in zip(rows, rest, strict=True)]
                ),
                "attention_mask": torch.tensor([[1] * (width - more) + [0] * more for more in rest]),
                "completion_mask": torch.tensor(
                    [
                        [0, *(int(label != -100) for label in labels), *[0] * more]
                        for (_, labels), more in zip(rows, rest, strict=True)
                    ]
                ),
            }

        def trainer(model, settings, tokenizer=tokenizer):
            rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])  # it reads the batches that it is given
            reference = deepcopy(model)
            return trl.DPOTrainer(model, reference, settings, train_dataset=rows, processing_class=tokenizer)

        task = recipe.task
        settings = partial(trl.DPOConfig, bf16=False, loss_type=[method], beta=task.beta, label_smoothing=task.label_smoothing)
        theirs = losses_of_trainer(recipe, folder / method, planned_batches(recipe, pairs, whole), trainer, settings)
        found[method] = runs[method].logged("train/loss"), theirs
    return found


@pytest.mark.parametrize("method", TRLS)
def test_twenty_steps_equal_those_of_trl(ours_and_trls, method):
    ours, theirs = ours_and_trls[method]
    assert len(ours) == len(theirs) == STEPS and torch.tensor(ours).std() > 1e-3
    # Our references are kept in float32; ipo squares the difference from them.
    assert ours == pytest.approx(theirs, rel=5e-6 if method == "ipo" else 1e-6, abs=1e-6)
