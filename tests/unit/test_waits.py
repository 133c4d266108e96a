"""What a GPU is not waited for: seen here without one, by what looks at a tensor's values, and when."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedModel, masking_utils

from hftune.config import EvalConfig, Recipe
from hftune.distributed.collectives import Collectives
from hftune.evaluation import evaluate
from hftune.strategies.base import Strategy
from hftune.strategies.packing import padding_of, told_of_padding
from hftune.strategies.statistics import RunningStatistics
from hftune.task import Task
from hftune.tasks.late_rows import LateRows, late_rows, late_rows_each

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
MODELS = {"both ways": BertModel(BertConfig(**SMALL)).eval(), "causal": LlamaModel(LlamaConfig(**SMALL)).eval()}
MASKS = {"padded": [[1, 1, 1], [1, 1, 0]], "whole": [[1, 1, 1], [1, 1, 1]]}


class Copied:
    """A tensor on a GPU as ``late_rows`` sees it."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, values: list[int], done: list[str]):
        self.values, self.done = torch.tensor(values), done

    def detach(self) -> Copied:
        return self

    def to(self, device: str, non_blocking: bool) -> Tensor:
        assert (device, non_blocking) == ("cpu", True)
        self.done.append("copy")
        return self.values


def test_rows_are_made_when_they_are_looked_at_after_the_copies_have_arrived(monkeypatch):
    done: list[str] = []
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: done.append("wait")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    rows = late_rows_each(lambda one, other: {"one": one, "other": other}, Copied([1, 2], done), Copied([3, 4], done))
    assert isinstance(rows, LateRows) and done == ["copy", "copy"]
    assert [{**row} for row in rows] == [{"one": 1, "other": 3}, {"one": 2, "other": 4}] == rows and len(rows + rows) == 4
    assert done == ["copy", "copy", "wait"]


def test_on_a_cpu_rows_are_a_plain_list_of_the_tensors_themselves():
    value = torch.ones(2)
    rows = late_rows(lambda given, nested: [{"same": given is value, "nested": nested["a"] is value}], value, {"a": value})
    assert type(rows) is list and rows == [{"same": True, "nested": True}]


class Scored(Task):
    """Counts, in ``events``, forward passes and looks at rows."""

    def __init__(self, events: list[str]):
        self.events = events

    def datasets(self):
        raise NotImplementedError

    def build_model(self):
        raise NotImplementedError

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return outputs.sum()

    def predictions(self, outputs, model, batch):
        number = int(outputs[0])
        return LateRows(lambda: [self.events.append(f"look {number}") or {"value": value} for value in outputs.tolist()])

    def metrics(self, rows):
        return {"total": sum(row["value"] for row in rows)}


def test_an_evaluation_looks_at_the_rows_of_a_batch_when_the_next_one_is_computed():
    events: list[str] = []

    def batches(dataset, micro_batches, num_workers, should_stop):
        for micro_batch in micro_batches:
            values = torch.tensor(dataset)[micro_batch.samples]
            yield micro_batch, {"labels": values}, float(len(values))

    def forward(batch):
        events.append(f"forward {int(batch['labels'][0])}")
        return batch["labels"]

    strategy = SimpleNamespace(
        **{"task": Scored(events), "model": None, "forward": forward, "exact": torch.float64, "evaluation_batches": batches},
        **{"share": list, "any_process": bool, "gather_to_main": lambda rows, at_once: rows, "on_main": lambda run: run()},
        progress=SimpleNamespace(tick=lambda: None),
        rounding_once=nullcontext,
    )
    found = evaluate(strategy, [10.0, 20.0, 30.0, 40.0, 50.0], EvalConfig(batch_size=2))
    assert events == [
        *("forward 10", "forward 30", "look 10", "look 10"),
        *("forward 50", "look 30", "look 30", "look 50"),
    ]
    assert found.metrics == {"loss": 30.0, "total": 150.0} and [row["value"] for row in found.rows] == [10, 20, 30, 40, 50]


@contextmanager
def no_looks(monkeypatch):
    """Let whatever looks at a mask or at positions fail."""
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__bool__", lambda self: pytest.fail("a tensor was looked at"))
        yield


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mask", [*MASKS, None])
def test_a_model_that_is_told_of_padding_looks_at_no_tensor_and_computes_the_same(kind, mask, monkeypatch):
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]])}
    inputs |= {} if mask is None else {"attention_mask": torch.tensor(MASKS[mask])}
    expected, padding = MODELS[kind](**inputs).last_hidden_state, padding_of(inputs)
    assert padding == ({} if mask is None else {(2, 3): mask == "padded"})
    with no_looks(monkeypatch), told_of_padding(padding):
        found = MODELS[kind](**inputs).last_hidden_state
    assert torch.equal(found, expected)
    assert masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0]])) is not None
    assert PreTrainedModel.warn_if_padding_and_no_attention_mask.__name__ == "warn_if_padding_and_no_attention_mask"


def test_a_compiled_model_is_not_compiled_again_for_what_it_is_told():
    counter = CompileCounter()
    model = torch.compile(BertModel(BertConfig(**SMALL)).eval(), backend=counter)
    counts = []
    for mask in (*MASKS.values(), *MASKS.values()):
        inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor(mask)}
        with torch.no_grad(), told_of_padding(padding_of(inputs)):
            model(**inputs)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


def test_a_mask_of_another_shape_is_looked_at_and_positions_that_a_task_gives_are_too():
    assert padding_of({"attention_mask": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 0]])}) is None
    assert padding_of({"attention_mask": torch.ones(2, 1, 3), "labels": torch.zeros(2)}) == {(2, 3): False}
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor(MASKS["padded"])}
    expected = MODELS["both ways"](**inputs).last_hidden_state
    with told_of_padding({(2, 4): False}):
        assert torch.equal(MODELS["both ways"](**inputs).last_hidden_state, expected)


def test_averaging_running_statistics_copies_nothing_from_the_host(monkeypatch):
    norm = torch.nn.BatchNorm1d(2)
    statistics = RunningStatistics([(norm, "running_mean")], torch.float64)
    statistics.begin()
    with statistics.micro_batch(2):
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("a copy"))
    statistics.finish(torch.cat(statistics.own()))
    assert norm.running_mean.tolist() == pytest.approx([0.2, 0.3])


def test_one_process_asks_no_device_what_any_process_says():
    alone = SimpleNamespace(num_processes=1, sum=lambda value: pytest.fail("a collective"))
    assert Collectives.any_process(alone, True) is True and Collectives.any_process(alone, False) is False


@pytest.mark.parametrize("is_finite", [True, False])
def test_the_loss_scale_is_looked_at_only_after_a_step_whose_gradient_overflowed(is_finite):
    looks: list[bool] = []
    scaler = SimpleNamespace(get_scale=lambda: looks.append(True) or 1.0)
    optimizer = SimpleNamespace(param_groups=[{}], step=lambda: None)
    strategy = SimpleNamespace(
        **{"sharding": SimpleNamespace(optimizer=optimizer), "times": SimpleNamespace(finish=lambda: None)},
        **{"accelerator": SimpleNamespace(scaler=scaler), "_is_finite": is_finite},
    )
    Strategy.optimizer_step(strategy, 0.1)
    assert looks == [True] * (not is_finite)


def test_the_scores_of_choices_and_the_masks_of_images_of_different_sizes_are_found_without_a_look():
    from hftune.tasks.multiple_choice import _scores
    from hftune.tasks.semantic_segmentation import _one_by_one

    with FakeTensorMode():  # refuses whatever needs values
        outputs = SimpleNamespace(logits=torch.empty(5, 1))
        assert _scores(outputs, {"places": torch.empty(2, 3, dtype=torch.long)}).shape == (2, 3)
        target = {"labels": torch.empty(2, 8, 8, dtype=torch.long), "size": [(8, 6), (5, 8)]}
        pairs = [*_one_by_one(SimpleNamespace(logits=torch.empty(2, 3, 4, 4)), target)]
        assert [(tuple(logits.shape), tuple(labels.shape)) for logits, labels in pairs] == [
            ((3, 8, 6), (8, 6)),
            ((3, 5, 8), (5, 8)),
        ]


@pytest.mark.parametrize(("recipe", "keeps"), [("process_reward_demo", False), ("language_modeling_demo", True)])
def test_a_decoder_that_generates_nothing_keeps_no_keys_and_values(recipe, keeps):
    task = Recipe.load(recipe, "task.max_train_samples=9", "task.max_eval_samples=9").task
    task.datasets()
    assert task.build_model().config.use_cache is keeps
