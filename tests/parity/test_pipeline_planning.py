"""hftune plan with a pipeline: its stages, what each process holds, and what cannot be planned."""

import json
import re
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from hftune import Recipe, cli
from hftune.batch_plan import BatchPlan
from hftune.build import build_model, load_datasets, plan_batches
from hftune.config.sections import ParallelConfig
from hftune.optim import build_optimizer
from hftune.planning.memory import TensorBytes, make_optimizer_state
from hftune.planning.pipeline import PipelineMeter, idle_share, in_flight, tensors
from hftune.planning.plan import make_plan, survey
from hftune.strategies.pipeline import Pipeline
from tests.support.tasks import Chain, NextToken

OWN = ("recipe=tests/support/next_token.yaml", "train.micro_batch_size=2")


def recipe_of(*words):
    return Recipe.load("tests/support/next_token.yaml", *OWN[1:], *words)


def test_stages_are_listed_with_layers_weights_and_processes():
    plan = make_plan(recipe_of("parallel.pipeline_stages=2", "parallel.split=[3,1]", "task.num_samples=16"), num_processes=4)
    first, last = plan.pipeline.stages
    assert first.modules == ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert last.modules == ["transformer.wte", "transformer.h.3", "transformer.ln_f"]  # its head is the embeddings' table
    assert (first.place, last.place, plan.pipeline.replicas) == (0, 1, 2)
    assert first.parameters + last.parameters == plan.parameters + 30 * 16
    assert plan.work.most_per_process == 4  # of 8, by one of two pipelines
    assert plan.memory.peak_bytes == max(place.peak_bytes for place in plan.pipeline.places)
    assert [place.weights_bytes // 4 for place in plan.pipeline.places] == [first.parameters, last.parameters]
    assert [place.optimizer_bytes // 4 for place in plan.pipeline.places] == [first.parameters, last.parameters]
    for found in (plan.memory, *plan.pipeline.places):
        parts = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes + found.activations_bytes
        assert found.peak_bytes == parts + found.receive_bytes


@pytest.mark.parametrize(
    ("schedule", "places", "model"),
    [
        ("gpipe", 2, "chain"),
        ("1f1b", 2, "gpt2"),
        ("interleaved", 2, "llama_tied"),
        *[("zero_bubble", 2, "gpt2"), ("zero_bubble", 2, "chain"), ("zero_bubble", 4, "llama_tied")],
    ],
)
def test_what_is_summed_up_by_a_formula_is_what_a_whole_step_takes(schedule, places, model):
    words = [f"parallel.schedule={schedule}", f"task.model={model}", "train.optimizer=adamw", f"train.batch_size={3 * places}"]
    recipe = recipe_of(f"parallel.pipeline_stages={places}", *words)
    task, dataset = recipe.task, load_datasets(recipe)["train"]
    step = plan_batches(recipe, dataset).epoch(0)[0]
    batches = [task.collate([dataset[sample] for sample in part.samples.tolist()]) for part in step]
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = build_model(recipe).train()
        optimizer = build_optimizer(module, recipe)
        make_optimizer_state(optimizer)
        meter = PipelineMeter(recipe, module, optimizer)
        planned = meter.measure(batches)
        taken = [peak_of_step(meter, *each) for each in enumerate(orders(recipe.parallel, len(batches)))]
    assert [place.peak_bytes for place in planned] == pytest.approx(taken, rel=0.01)


def orders(config, count):
    """What each process computes in one step of torch's schedule: stage, kind of pass (F, B, or B's halves I and W), micro-batch."""
    places = config.pipeline_stages
    if config.schedule in ("gpipe", "1f1b"):
        ahead = [count] * places if config.schedule == "gpipe" else [places - place for place in range(places)]
        for place, first in enumerate(ahead):
            turns = [(place, kind, index) for index in range(count) for kind in "BF"]
            # The last forward passes, in turns.
            yield sorted(turns, key=lambda turn: (turn[2] - first * (turn[1] == "F"), turn[1]))
        return
    kind = ScheduleInterleaved1F1B if config.schedule == "interleaved" else ScheduleInterleavedZeroBubble
    stage = SimpleNamespace(num_stages=config.num_stages, group_size=places, group_rank=0, submod=None)
    for actions in kind([stage] * (config.num_stages // places), count).pipeline_order.values():
        yield [(action.stage_index, action.computation_type.value, action.microbatch_index) for action in actions if action]


def peak_of_step(meter, place, order):
    """What a process holds at most, all of its step computed and nothing summed up."""
    own = nn.ModuleList(meter.stages[index] for index in range(place, len(meter.stages), meter.config.pipeline_stages))
    work, counter, outputs, halves, sent = own[0].micro_batches, TensorBytes(), {}, {}, {}
    meter.optimizer.zero_grad()
    counter.add_all([*own.parameters(), *own.buffers(), *(value for item in work for value in tensors(item))])
    counter.add_all(value for one in own.parameters() for value in meter.optimizer.state[one].values())
    for stage in own:
        for item in range(len(work)):
            received = torch.empty(*stage.buffer, *stage.width, requires_grad=True)
            gradient = torch.empty(*stage.buffer, *stage.width)
            counter.add_all(([] if stage.is_first else [received]) + ([] if stage.is_last else [gradient]))
            sent[meter.stages.index(stage), item] = received, gradient
    with counter:
        for index, kind, item in order:
            stage, (received, gradient) = meter.stages[index], sent[index, item]
            if kind == "F":
                outputs[index, item] = stage(received, item)
            elif kind == "I" and not stage.is_first:
                given = None if stage.is_last else [gradient]
                halves[index, item] = stage_backward_input([outputs.pop((index, item))], given, [received], stage.parameters())
            elif kind == "W" and not stage.is_first:
                stage_backward_weight(stage.parameters(), halves.pop((index, item))[1])
            elif kind != "I" and stage.is_last:
                outputs.pop((index, item)).sum().backward()
            elif kind != "I":
                outputs.pop((index, item)).backward(gradient)
    return counter.peak


@pytest.mark.parametrize(("places", "count"), [(2, 2), (3, 5), (4, 4), (4, 12)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_micro_batches_in_flight_are_those_of_torchs_schedules(schedule, places, count):
    config = ParallelConfig(places, schedule)
    count = config.fill_up(count)
    for place, order in enumerate(orders(config, count)):
        held = accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[kind] for _, kind, _ in order)
        assert sum(in_flight(config, place, count)) == max(held)


def test_idle_shares_are_those_of_the_papers():
    shares = {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved": 3 / 19, "zero_bubble": 3 / 27}
    assert {schedule: idle_share(ParallelConfig(4, schedule), 8) for schedule in shares} == pytest.approx(shares)


def one_of_two_pipelines(config, dp_rank):
    pipeline = object.__new__(Pipeline)  # no process group: what it assigns follows from a few numbers
    pipeline.config, pipeline.dp_size, pipeline.dp_rank, pipeline.together = config, 2, dp_rank, 1
    return pipeline


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_micro_batches_are_assigned_and_filled_up_as_training_does(schedule):
    lengths = np.random.RandomState(0).randint(1, 90, 203)
    batches = BatchPlan(203, 16, micro_batch_size=4, micro_batch_tokens=200, lengths=lengths, seed=3)
    config = ParallelConfig(3, schedule)
    found = survey(batches, 1000, 2, config)
    assigned = [one_of_two_pipelines(config, dp_rank).assign(step) for step in batches.epoch(0) for dp_rank in (0, 1)]
    assert found.filled_up == sum(batch.weights.count(0) for batch in assigned)
    counts = [sum(batch.weights) for batch in assigned]
    assert counts.count(found.usual) == max(map(counts.count, counts))
    shares = [[micro_batch.samples.tolist() for micro_batch in batch.mine] for batch in assigned]
    heaviest = [[micro_batch.samples.tolist() for micro_batch in item.parts] for item in found.heaviest]
    assert heaviest and all(share in shares for share in heaviest)
    most = max(sum(len(samples) for samples in share) for share in shares)
    if schedule == "gpipe":  # which holds all of them
        assert most in [sum(len(samples) for samples in share) for share in heaviest]


class Spare(Chain):
    """Has a layer that nothing is computed with, in its last stage."""

    def __init__(self):
        super().__init__(4, 0.0)
        self.spare = nn.Linear(2, 2)

    def stage(self, index, count):
        stage = super().stage(index, count)
        stage.spare = self.spare if index == count - 1 else None
        return stage


@dataclass
class SpareNextToken(NextToken):
    def build_model(self):
        return Spare()


def test_parameters_without_a_gradient_are_named():
    recipe = recipe_of("parallel.pipeline_stages=2", "task.type=tests.parity.test_pipeline_planning.SpareNextToken")
    assert make_plan(recipe, 2).unused_parameters == ["spare.weight", "spare.bias"]


def refused(capsys, *words):
    assert cli.main(["plan", *OWN, "parallel.pipeline_stages=2", *words]) == 2
    return capsys.readouterr().err.removeprefix("hftune: ").rstrip("\n")


def test_what_training_refuses_is_refused(capsys):
    for words, said in {
        ("--processes=3",): "parallel.pipeline_stages=2 does not divide the 3 processes",
        (
            "--processes=2",
            "train.micro_batch_size=auto",
        ): "train.micro_batch_size=auto does not work with parallel.pipeline_stages=2",
        ("--processes=16",): "needs at least 2 micro-batches in a step for each of 8 pipelines, 16 in all; a step of",
        ("--processes=2", "parallel.split=[3,3]"): "parallel.split=[3, 3] adds up to 6 layers, but GPT2LMHeadModel has 4.",
        ("--processes=2", "task.num_layers=1"): "GPT2LMHeadModel has 1 layers, too few for 2 stages",
    }.items():
        assert said in refused(capsys, *words)


TEXT = """\
  pipeline       4 stages on 2 processes, 4 pipelines in parallel
                 stage 1  processes 0, 2, …, 6  752 parameters  embed, layers.0
                 stage 2  processes 1, 3, …, 7  272 parameters  layers.1
                 stage 3  processes 0, 2, …, 6  272 parameters  layers.2
                 stage 4  processes 1, 3, …, 7  782 parameters  head, layers.3
                 interleaved with 3 micro-batches a pipeline: 14% of the time idle; with 6, 8%
                 short steps are filled up with dummies of one sample: 7 in the first epoch
"""


def test_the_text_can_be_read(capsys):
    words = ["parallel.pipeline_stages=2", "parallel.schedule=interleaved", "task.model=chain"]
    words += ["train.batch_size=24", "task.num_samples=50"]
    assert cli.main(["plan", *OWN, *words, "--processes=8"]) == 0
    said = capsys.readouterr().out
    assert f"\n\n{TEXT}\n  memory  " in said
    assert "\n                 1 to 12 micro-batches a step, at most 3 on a pipeline\n" in said
    assert "\n                 load balance 82.4% (pipelines idle 17.6% of the time, waiting for the slowest)\n" in said
    memory = re.sub(r"[\d.]+ (Ki)?B\b", "N KiB", said.split("  memory         ")[1].split("\n\n")[0]).splitlines()
    places = ["processes 0, 2, …, 6", "processes 1, 3, …, 7"]
    assert {memory[0].split(" (")[0], memory[-2].strip()} == {f"N KiB on {place}" for place in places}
    assert memory[0].endswith(" (cpu), in a step with micro-batches of 2 samples of at most 18 tokens")
    assert said.endswith(
        "  notices        In 1 of 3 steps some pipelines are idle: there are fewer micro-batches than pipelines. Set\n"
        "                 train.parts=4, or raise train.batch_size.\n"
    )
    assert memory[-3].endswith(" receive buffers")


def test_numbers_are_plain_json(capsys):
    assert cli.main(["plan", *OWN, "parallel.pipeline_stages=2", "task.model=chain", "--processes=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["pipeline"]
    assert (found["schedule"], found["micro_batches"], found["replicas"]) == ("1f1b", 8, 1)
    assert found["idle_share"] == pytest.approx(1 / 9) and found["idle_share_of_twice"] == pytest.approx(1 / 17)
