"""The W&B sweep of examples/sweep: W&B's own agent, at a server on loopback that asks for one training."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import yaml
from wandb.wandb_agent import Agent, run_agent

from hftune.config.recipe import Recipe
from tests.support.fake_wandb import FakeWandb
from tests.support.runs import DATA, TINY, environment, warm_python

SWEEP = Path(__file__).parents[2] / "examples" / "sweep" / "wandb_sweep.yaml"


class SweepServer(FakeWandb):
    """Has one sweep, and asks its agent for one run."""

    def __init__(self, sweep, values):
        super().__init__()
        self.sweep = sweep
        self.commands = [{"type": "run", "run_id": "run1", "program": None, "args": values}]

    def on_SweepWithRuns(self, v):
        return {
            "project": {"sweep": {"id": "s1", "name": v["sweep"], "config": yaml.safe_dump(self.sweep), "runs": {"edges": []}}}
        }

    def on_CreateAgent(self, v):
        return {"createAgent": {"agent": {"id": "agent1"}}}

    def on_Heartbeat(self, v):
        commands, self.commands = self.commands, []
        return {"agentHeartbeat": {"agent": {"id": v["id"]}, "commands": json.dumps(commands)}}


def test_the_agent_trains_with_the_values_it_is_given_and_finds_its_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Agent, "POLL_INTERVAL", 0.2)
    sweep = yaml.safe_load(SWEEP.read_text())
    sweep["command"][-1:-1] = [*TINY, *DATA, "train.max_steps=4", "eval.every=2"]
    values = {"train.lr": 3e-4, "train.weight_decay": 0.05, "seed": 2}
    with SweepServer(sweep, {name: {"value": value} for name, value in values.items()}) as server:
        path = f"{Path(warm_python()).parent}{os.pathsep}{os.environ['PATH']}"
        online = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": FakeWandb.KEY}
        with patch.dict(os.environ, environment(**online, HOME=str(tmp_path / "home"), PATH=path)):  # the agent changes it
            run_agent("tester/hftune/sweep1", count=1)
    assert server.unknown == []
    folder = tmp_path / "outputs" / "wandb_sweep" / "run1"
    recipe = Recipe.load(folder / "recipe.yaml")
    assert (recipe.train.lr, recipe.train.weight_decay, recipe.seed) == (3e-4, 0.05, 2)
    (run,) = server.runs.values()
    assert sweep["parameters"].keys() == values.keys() and recipe.greater_is_better == (sweep["metric"]["goal"] == "maximize")
    objective = sweep["metric"]["name"]
    assert run.id == "run1" and run.exit_code == 0
    assert run.summary[objective] == json.loads((folder / "result.json").read_text())["best"]["value"]
