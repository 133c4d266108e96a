"""KTO on 1, 2 and 4 processes, stopped and resumed, and against a plain loop: the same baseline of the same answers."""

import json
from copy import deepcopy
from functools import partial

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy

from hftune import Recipe, cli
from hftune.build import build_model, load_datasets
from hftune.reevaluation import evaluate
from tests.support.runs import train_on
from tests.support.trainer import STEPS, losses_of_trainer, planned_batches

WEIGHTS = (3.0, 0.2)  # that much more likely is every answer made that the baseline is above 0
SMALL = (
    *("task.max_train_samples=80", "task.max_eval_samples=13", "train.batch_size=16", "train.parts=4", "train.log_every=1"),
    *("train.micro_batch_tokens=400", "train.epochs=2", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=5"),
    *(f"task.desirable_weight={WEIGHTS[0]}", f"task.undesirable_weight={WEIGHTS[1]}"),
)
DROPOUT = "task.model_config.attention_dropout=0.2"
LORA = ("adapter.type=lora", "adapter.rank=4", "adapter.dropout=0.2")
JOBS = {"whole": (*SMALL, DROPOUT, "checkpoint.every=2"), "lora": (*SMALL, DROPOUT, *LORA)}
ALONE = (*SMALL, "train.parts=null", "train.micro_batch_tokens=null", "train.epochs=4", "eval.every=never", "task.beta=0.3")
WHOLE = (*ALONE, "train.micro_batch_size=16")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {(name, 1): run for name, run in train_on(1, JOBS, folder, "kto_demo").items()}
    again = {"resumed": (*JOBS["whole"], f"output_dir={folder}/resumed")}
    train_on(2, again, folder, "kto_demo", stops={"resumed": (5, 0)})
    many = {**JOBS, **again, "sharded": JOBS["whole"]}
    found |= {(name, 2): run for name, run in train_on(2, many, folder, "kto_demo", sharded={"sharded"}).items()}
    return found | {("whole", 4): train_on(4, {"whole": JOBS["whole"]}, folder, "kto_demo")["whole"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of twenty steps on one process, in one micro-batch each, and in several."""
    jobs = {"whole": WHOLE, "cut": (*ALONE, "train.micro_batch_size=3")}
    runs = train_on(1, jobs, tmp_path_factory.mktemp("alone"), "kto_demo")
    return {name: run.logged("train/loss") for name, run in runs.items()}


@pytest.mark.parametrize(
    ("name", "like", "size"), [("whole", "whole", 2), ("whole", "whole", 4), ("lora", "lora", 2), ("sharded", "whole", 2)]
)
def test_losses_and_metrics_do_not_depend_on_processes_with_dropout(runs, name, like, size):
    one, many = runs[like, 1], runs[name, size]
    expected = one.logged("train/loss")
    assert len(expected) == 10
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    assert many.logged("train/grad_norm") == pytest.approx(one.logged("train/grad_norm"), rel=1e-4)
    assert many.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4, abs=1e-6)
    assert one.result["metrics"].keys() == {
        *("loss", "accuracy", "margin", "kl", "desirable_reward", "undesirable_reward"),
        *("desirable_length", "undesirable_length"),
    }


def test_evaluating_the_export_gives_the_same_metrics_in_other_batches(runs, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = runs["whole", 1]
    last = "model_last" if (run.folder / "model_last").is_dir() else "model"
    found = evaluate(Recipe.load(run.folder / "recipe.yaml", "eval.batch_size=2"), run.folder / last).metrics
    assert found["kl"] > 0
    assert found == pytest.approx(run.result["metrics"], rel=1e-5, abs=1e-6)


def test_losses_do_not_depend_on_micro_batches(alone):
    assert alone["cut"] == pytest.approx(alone["whole"], rel=1e-5)


def test_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    whole, resumed = runs["whole", 2], runs["resumed", 2]
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"]


def test_a_replayed_step_is_the_one_that_was_and_tells_the_loss_of_each_sample(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = runs["whole", 1]
    assert cli.main(["replay", str(run.folder), "--step=8", "--why", "--json", f"--output={tmp_path}/replay"]) == 0
    assert json.loads(capsys.readouterr().out)["bit_equal"]
    losses = [json.loads(line)["loss"] for line in next(tmp_path.rglob("samples.jsonl")).read_text().splitlines()]
    assert len(losses) == 16
    assert sum(losses) / 16 == pytest.approx(run.logged("train/loss")[7], rel=1e-5)


def logp(model, sample, name):
    """Return the log-probability that a model gives an answer, computed alone and without padding."""
    ids, labels = (torch.as_tensor(sample[name + end])[None] for end in ("", "_labels"))
    return -cross_entropy(model(input_ids=ids).logits[0], labels[0], ignore_index=-100, reduction="sum")


def test_losses_are_those_of_a_plain_loop_with_a_frozen_copy(alone):
    recipe = Recipe.load("kto_demo", *WHOLE)
    samples, model, config, losses, baselines = load_datasets(recipe)["train"], build_model(recipe), recipe.train, [], []
    reference, known = deepcopy(model).eval(), {}
    optimizer = torch.optim.AdamW(recipe.task.parameter_groups(model, config), config.lr, tuple(config.betas))
    for step, batch in enumerate(planned_batches(recipe, samples, list)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / STEPS)
        with torch.no_grad():
            for sample in batch:
                if sample["row"] not in known:
                    known[sample["row"]] = [logp(reference, sample, name) for name in ("completion", "mismatched")]
            others = [logp(model, sample, "mismatched") - known[sample["row"]][1] for sample in batch]
            baseline = max(0.0, float(sum(others)) / len(batch))
        total = 0
        for sample in batch:
            lead = logp(model, sample, "completion") - known[sample["row"]][0] - baseline
            total = total + (
                WEIGHTS[0] * (1 - (0.3 * lead).sigmoid()) if sample["label"] else WEIGHTS[1] * (0.3 * lead).sigmoid()
            )
        optimizer.zero_grad()
        (total / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(total.item() / len(batch))
        baselines.append(baseline)
    assert len(losses) == STEPS and sum(baseline > 0.1 for baseline in baselines) > STEPS / 2
    assert alone["whole"] == pytest.approx(losses, rel=2e-5)  # log-probabilities are rounded in another order


def test_twenty_steps_equal_those_of_trl(alone, tmp_path):
    """On one process, a micro-batch per step: there its baseline is that of the batch, too."""
    import trl  # takes seconds

    recipe = Recipe.load("kto_demo", *WHOLE)
    samples, tokenizer = load_datasets(recipe)["train"], recipe.task.text_tokenizer

    def whole(examples):
        """TRL shifts the labels itself."""
        found = {"label": torch.tensor([bool(example["label"]) for example in examples])}
        for name, prefix in (("completion", ""), ("mismatched", "KL_")):
            rows = [(example[name].tolist(), example[f"{name}_labels"].tolist()) for example in examples]
            width = 1 + max(len(ids) for ids, _ in rows)
            columns = {"input_ids": [], "attention_mask": [], "completion_mask": []}
            for ids, labels in rows:
                rest = [0] * (width - 1 - len(ids))
                columns["input_ids"].append([*ids, labels[-1], *[tokenizer.pad_token_id for _ in rest]])
                columns["attention_mask"].append([1] * (1 + len(ids)) + rest)
                columns["completion_mask"].append([0, *(int(label != -100) for label in labels), *rest])
            found |= {prefix + column: torch.tensor(values) for column, values in columns.items()}
        return found

    def trainer(model, settings):
        rows = Dataset.from_list([{"prompt": "a", "completion": "b", "label": label} for label in (True, False)])
        return trl.KTOTrainer(model, deepcopy(model), settings, train_dataset=rows, processing_class=tokenizer)  # reads batches

    task = recipe.task
    weights = {"desirable_weight": task.desirable_weight, "undesirable_weight": task.undesirable_weight}
    options = {"per_device_train_batch_size": 16, "train_sampling_strategy": "sequential"}
    settings = partial(trl.KTOConfig, bf16=False, beta=task.beta, **weights, **options)
    theirs = losses_of_trainer(recipe, tmp_path, planned_batches(recipe, samples, whole), trainer, settings)
    assert len(theirs) == STEPS
    assert alone["whole"] == pytest.approx(theirs, rel=2e-5, abs=1e-5)
