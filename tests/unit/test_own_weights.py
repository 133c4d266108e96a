"""Weights of one's own: where they are looked for, and how they are compared with the model."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hftune import ConfigError
from hftune.models.weights import load_weights


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)


def tensors(**changed):
    found = {name: torch.full_like(value, 7) for name, value in Net().state_dict().items()}
    return {**found, **changed}


@pytest.mark.parametrize("kind", ["folder", "parts", "safetensors", "bin", "wrapped", "from ddp", "from ddp, compiled"])
def test_weights_are_found_in_files_and_folders(tmp_path, kind):
    given = tensors()
    path = tmp_path / "weights.pt"
    if kind == "folder":
        save_file(given, tmp_path / "model.safetensors")
        path = tmp_path
    elif kind == "parts":
        for number, names in enumerate((list(given)[:3], list(given)[3:])):
            save_file({name: given[name] for name in names}, tmp_path / f"part-{number}.safetensors")
        placed = {name: f"part-{int(index >= 3)}.safetensors" for index, name in enumerate(given)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        path = tmp_path
    elif kind == "safetensors":
        save_file(given, path := tmp_path / "weights.safetensors")
    elif kind == "bin":
        torch.save(given, path)
    elif kind == "wrapped":
        torch.save({"state_dict": given, "step": 5}, path)
    elif kind == "from ddp, compiled":
        torch.save({f"_orig_mod.module.{name}": value for name, value in given.items()}, path)
    else:
        torch.save({f"module.{name}": value for name, value in given.items()}, path)
    model = Net()
    assert load_weights(model, str(path)) == []
    assert all(bool((value == 7).all()) for value in model.state_dict().values())


def test_what_has_no_counterpart_is_said(tmp_path):
    given = tensors(extra=torch.ones(1))
    del given["head.weight"], given["head.bias"]
    torch.save(given, path := tmp_path / "weights.pt")
    model = Net()
    head = model.head.weight.clone()
    assert load_weights(model, str(path)) == [
        f"task.weights={path} lacks 2 of the model's tensors, which begin as they were: head.weight, head.bias.",
        f"task.weights={path} has 1 tensor that the model lacks: extra.",
    ]
    assert torch.equal(model.head.weight, head)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            tensors(**{"head.weight": torch.ones(5, 3)}),
            "head.weight is (5, 3) there and (2, 3) in Net. Change the model's sizes, or leave this tensor out of the file.",
        ),
        (
            {"other": torch.ones(1)},
            "holds no tensor of Net: it has other, and the model first.weight, first.bias, norm.weight, norm.bias, norm.running_mean and 4 more.",
        ),
        ([1, 2], "weights.pt holds no tensors by name, as model.state_dict() returns them."),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, given, message):
    torch.save(given, path := tmp_path / "weights.pt")
    with pytest.raises(ConfigError) as caught:
        load_weights(Net(), str(path))
    assert str(caught.value).startswith(f"task.weights={path}") and str(caught.value).endswith(message)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        ConfigError, match=rf"^task.weights={tmp_path}: model.safetensors.index.json cannot be read as a list of"
    ):
        load_weights(Net(), str(tmp_path))


def test_a_path_without_weights_is_refused_with_the_near_one(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load_weights(Net(), str(tmp_path / "missing"))
    (tmp_path / "model").mkdir()
    save_file(tensors(), tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"Did you mean {tmp_path}/model\?"):
        load_weights(Net(), str(tmp_path))
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"broken.safetensors cannot be read as tensors \(SafetensorError"):
        load_weights(Net(), str(tmp_path / "broken.safetensors"))


@pytest.mark.parametrize("name", ["reviews.csv", "tokenizer.json", "pickled.pt"])
def test_a_file_of_something_else_is_refused_in_a_sentence(tmp_path, name):
    path = tmp_path / name
    path.write_text("review,stars\ngood food,five\n" if name.endswith("csv") else '{"version": "1.0"}')
    if name.endswith("pt"):
        torch.save(object(), path)  # torch's own text says to unpickle it nonetheless
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as tensors \(\w+: ") as caught:
        load_weights(Net(), str(path))
    assert "weights_only" not in str(caught.value)
