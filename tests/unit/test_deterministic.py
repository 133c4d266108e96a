"""train.deterministic: only algorithms that give the same bits each time."""

import os

import pytest
import torch
from safetensors.torch import load_file

from hftune import ConfigError, Recipe, train
from hftune.config.sections import TrainConfig
from hftune.distributed.accelerator import set_numerics
from tests.support.runs import SMALL


def test_contradiction_with_cudnn_benchmark_is_refused():
    with pytest.raises(ConfigError) as caught:
        Recipe.load("restoration", "train.deterministic=true", "task.data_dir=.")
    assert "train.deterministic=true contradicts train.cudnn_benchmark=true" in str(caught.value)
    assert "Set train.cudnn_benchmark=false." in str(caught.value)


def test_switches_are_set_and_taken_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_numerics(TrainConfig(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        set_numerics(TrainConfig(deterministic=True))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own
    finally:
        set_numerics(TrainConfig())
    assert not torch.are_deterministic_algorithms_enabled()


def test_on_cpus_it_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    found = []
    for name in ("false", "true"):
        words = (*SMALL, "task.dataset=tests.support.tasks:few_reviews", "train.max_steps=2", f"train.deterministic={name}")
        result = train(Recipe.load("yelp_demo", *words, f"output_dir={tmp_path}/{name}"))
        found.append(load_file(result.output_dir / "model_last" / "model.safetensors"))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
