"""A task of one's own whose loss is no sum over its items is refused before it trains with a wrong scale."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from hftune import ConfigError, Recipe, train
from hftune.strategies.contract import check_sums
from hftune.task import BatchLossTask, Task
from tests.support.tasks import NextToken, Tagging, Trapped

TRAPPED = Path(__file__).parents[1] / "support" / "trapped.yaml"


@dataclass
class Pairs(Trapped):
    """Two classes of points."""

    reduction: str = "sum"

    def loss(self, outputs, target):
        return cross_entropy(outputs, target, reduction=self.reduction)


@dataclass
class MeanOfPairs(Pairs):
    reduction: str = "mean"


class MeanOfTokens(NextToken):
    def loss(self, outputs, target):
        return cross_entropy(outputs.logits.flatten(0, 1), target.flatten(), ignore_index=-100)


class ForgottenTokens(NextToken):
    num_items = Task.num_items


class SamplesOnPurpose(NextToken):
    def num_items(self, target):
        return len(target)


class OneItem(Pairs):
    def num_items(self, target):
        return 1


class Pixels(Task):
    """A picture in, a picture out."""

    def datasets(self):
        return {"train": [{"x": torch.randn(3, 4, 4), "labels": torch.randn(3, 4, 4)} for _ in range(4)]}

    def build_model(self):
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5), nn.BatchNorm2d(3))

    def inputs(self, batch):
        return {"input": batch["x"]}

    def loss(self, outputs, target):
        return mse_loss(outputs, target, reduction="sum")


class Random(MeanOfPairs):
    def loss(self, outputs, target):
        return super().loss(outputs + torch.randn_like(outputs), target)


class OnlyOnGPUs(MeanOfPairs):
    def loss(self, outputs, target):
        raise RuntimeError("this kernel has no CPU version")


def check(task):
    torch.manual_seed(0)
    dataset, model = task.datasets()["train"], task.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    said = check_sums(task, model, dataset, task.lengths(dataset))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state) and all(module.training for module in model.modules())
    return said


def refusal(task):
    with pytest.raises(ConfigError) as caught:
        check(task)
    return str(caught.value)


@pytest.mark.parametrize("task", [Pairs(), Tagging(), NextToken(), NextToken(model="chain"), SamplesOnPurpose()], ids=repr)
def test_sums_are_let_through_padded_or_not(task):
    assert check(task) == []


def test_a_mean_over_samples_is_refused_with_the_line_to_write():
    said = refusal(MeanOfPairs())
    assert said.startswith("MeanOfPairs.loss returns a mean, but must return a sum: samples 12 and 13 have ")
    assert said.endswith(
        'Write reduction="sum", as in cross_entropy(outputs, target, reduction="sum"); hftune divides by the number of items.'
    )


def test_a_mean_over_tokens_of_padded_samples_is_refused():
    assert refusal(MeanOfTokens()).startswith("MeanOfTokens.loss returns a mean, ")


class Padded(NextToken):
    def num_items(self, target):
        return target.numel()


class PaddedByCollate(Padded):
    def lengths(self, dataset):
        return None


class Keys(Tagging):
    """Its target is no tensor: len() of it is the number of its keys."""

    num_items = Task.num_items

    def target(self, batch):
        return {"tags": batch["labels"], "first": batch["labels"][:, 0]}

    def loss(self, outputs, target):
        return super().loss(outputs, target["tags"])


class KeysInBatch(Keys, BatchLossTask):
    """The same where the loss compares the samples of a step."""

    def embed(self, outputs, target):
        return outputs

    def batch_losses(self, embeddings, labels):
        return embeddings.sum(1)


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (OneItem(), r"it returns (1, ){7}1 for samples 0, 6, 13, 20, 26, 33, 40, 47 alone, 8 in all, and 1 for all of them "),
        (Padded(), "and no padding"),
        (PaddedByCollate(), "and no padding"),
        (Keys(), "its target is a dict.* Define it: def num_items"),
        (KeysInBatch(), "its target is a dict.* Define it: def num_items"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_items_that_do_not_add_up_over_samples_of_different_length_are_refused(task, what):
    start = " has no num_items" if "dict" in what else ".num_items must"
    assert re.match(f"{type(task).__name__}{re.escape(start)}.*{what}", refusal(task), re.DOTALL)


class LossOfPadding(Tagging):
    """Forgets to leave padding out of the loss, which samples of equal length do not show."""

    def collate(self, examples):
        batch = super().collate(examples)
        return {**batch, "labels": batch["labels"].clamp(min=0), "real": batch["ids"] != 0}

    def inputs(self, batch):
        return {"ids": batch["ids"]}

    def target(self, batch):
        return torch.stack([batch["labels"], batch["real"].long()])

    def loss(self, outputs, target):
        return super().loss(outputs, target[0])

    def num_items(self, target):
        return int(target[1].sum())


def test_a_loss_that_depends_on_padding_gets_a_notice():
    (said,) = check(LossOfPadding())
    assert said.startswith("LossOfPadding.loss depends on padding: samples ") and "ignore_index=-100" in said


def test_forgotten_num_items_is_refused_for_labels_and_said_for_numbers():
    assert "ForgottenTokens has no num_items of its own" in refusal(ForgottenTokens())
    (said,) = check(Pixels())
    assert said.startswith("Pixels has no num_items of its own: each sample counts as one item, although its target has 48 ")


class NotFinite(MeanOfPairs):
    def loss(self, outputs, target):
        return super().loss(outputs, target) * float("inf")


class Single(MeanOfPairs):
    def datasets(self):
        return {split: samples[:1] for split, samples in super().datasets().items()}


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Random(), "it differs between two passes over the same samples in evaluation mode"),
        (OnlyOnGPUs(), "one or two samples cannot be computed on the CPU in evaluation mode (RuntimeError: this kernel has no"),
        (NotFinite(), "it is not finite for samples 12 and 13"),
        (Single(), "there is only one training sample"),
    ],
    ids=repr,
)
def test_what_cannot_be_compared_is_let_through_with_a_notice(task, why):
    (said,) = check(task)
    assert said.startswith(f"{type(task).__name__}.loss was not checked, because {why}")
    assert said.endswith(". Make sure that it returns a sum over the items.")


def test_training_refuses_it_and_leaves_no_result(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "mean.yaml").write_text(f"task: {{type: {__name__}.MeanOfPairs}}\n")
    with pytest.raises(ConfigError, match=r"MeanOfPairs\.loss returns a mean"):
        train(Recipe.load(tmp_path / "mean.yaml", f"output_dir={tmp_path}/out"))
    assert not (tmp_path / "out" / "result.json").exists()


@dataclass
class Named(Trapped):
    """Has strings beside its tensors, a test split, and a model to be served that is not the one in training."""

    def datasets(self):
        given = super().datasets()
        parts = {name: [{**row, "id": f"{index}"} for index, row in enumerate(rows)] for name, rows in given.items()}
        return {**parts, "test": parts["eval"]}

    def inputs(self, batch):
        assert batch["id"][0].isdecimal()
        return {"x": batch["x"]}

    def load(self, directory):
        return nn.Sequential(super().load(directory), nn.Softmax(-1))


def test_a_batch_may_hold_strings_and_the_test_split_needs_no_model_to_be_served(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "named.yaml").write_text(f"task: {{type: {__name__}.Named}}\ntrain: {{max_steps: 4, batch_size: 12}}\n")
    words = (f"output_dir={tmp_path}/out", "eval.every=2", "train.lr=0.1", "train.ema_decay=0.9")
    result = train(Recipe.load(tmp_path / "named.yaml", *words))
    assert result.test["loss"] == pytest.approx(result.best["value"], rel=1e-12)


def test_a_step_with_a_sample_that_batch_norm_cannot_take_alone_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = ("task.trap=running statistics", f"output_dir={tmp_path}/out", "train.batch_size=47")
    single = r"has a micro-batch of one sample, \d+, "
    with pytest.raises(ConfigError, match=rf"^Step 2 {single}.* train.batch_size .*train.skip=\[2\]"):
        train(Recipe.load(TRAPPED, *words))
    with pytest.raises(ConfigError, match=rf"^Step 1 {single}.* train.micro_batch_size "):
        train(Recipe.load(TRAPPED, *words, "train.batch_size=16"))
    assert train(Recipe.load(TRAPPED, *words, "train.micro_batch_size=12", "train.skip=[2,4]")).steps == 4


class WeightedPairs(Pairs):
    """As CrossEntropyLoss(weight=...) has it: an item is a sample's weight."""

    def num_items(self, target):
        return float(torch.tensor([0.623362, 0.731654])[target].sum())


@pytest.mark.parametrize("seed", range(20))
def test_items_that_add_up_but_for_rounding_are_right(seed):
    torch.manual_seed(seed)
    samples = [{"input": torch.randn(4), "labels": seed % 2}, {"input": torch.randn(4), "labels": 1}]
    check_sums(WeightedPairs(), nn.Linear(4, 2), samples, None)


def test_a_model_that_a_single_sample_breaks_is_left_to_training():
    class Squeezed(nn.Module):
        def forward(self, input):
            return nn.functional.log_softmax(input.squeeze(), dim=1)

    task = Pairs()
    samples = [{"input": torch.randn(4), "labels": 0}, {"input": torch.randn(4), "labels": 1}]
    (notice,) = check_sums(task, Squeezed(), samples, None)
    assert notice.startswith("Pairs.loss was not checked, because one or two samples cannot be computed on the CPU ")


def test_a_user_meets_twenty_members_and_a_hook_that_a_task_lacks_has_its_default():
    assert len([name for name in dir(Task) if not name.startswith("_")]) == 20
    task = Pairs()
    assert (task.rows_per_sample, task.padded_length([2, 3]), task.fold_rows, task.augments) == (1, 5, None, False)
    assert task.evaluation_inputs({"input": 1, "labels": 2}) == {"input": 1}
    with pytest.raises(AttributeError, match="'Pairs' object has no attribute 'colour'"):
        _ = task.colour


class BrokenHook(Pairs):
    @property
    def class_names(self):
        return self.nowhere


def test_a_property_that_fails_says_why():
    with pytest.raises(AttributeError, match="'nowhere'"):
        _ = BrokenHook().class_names
