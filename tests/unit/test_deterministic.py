"""train.deterministic: only algorithms that give the same bits each time."""

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hftune import ConfigError, Recipe, train
from hftune.config.sections import TrainConfig
from hftune.distributed.accelerator import explained_determinism, set_numerics
from hftune.tasks import SemanticSegmentation
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


def test_an_operation_that_is_forbidden_is_named_with_the_setting():
    said = "grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set ..."  # seen on an H100
    with pytest.raises(ConfigError, match=r"needs grid_sampler_2d_backward_cuda, .* Set train.deterministic=false"):
        with explained_determinism():
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="another"), explained_determinism():
        raise RuntimeError("another")


def test_the_loss_of_a_segmentation_is_allowed(monkeypatch):
    """A GPU has no deterministic kernel that sums the losses of pixels itself."""
    calls = []
    compute = torch.nn.functional.cross_entropy
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda *given, **kwargs: (calls.append(kwargs), compute(*given, **kwargs))[1]
    )
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    loss = SemanticSegmentation.loss(None, SimpleNamespace(logits=logits), {"labels": labels})
    assert loss == pytest.approx(float(compute(logits, labels, reduction="sum")), rel=1e-6) and calls == [{"reduction": "none"}]
