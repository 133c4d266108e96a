"""Files of tensors that no process holds as a whole."""

from collections import deque

import pytest
import torch
from safetensors.torch import load_file, save_file

from hftune.models.tensor_file import Pieces, in_file_order, on_disk, taken, write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def tensors():
    torch.manual_seed(0)
    found = {f"layer.{number}": (torch.randn(5, 3) * 9).to(dtype) for number, dtype in enumerate(DTYPES)}
    return {**found, 'a "name" of ünicode\\': torch.randn(2, 2, 2), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def in_pieces(value):
    return Pieces(value.shape, value.dtype, iter(value.split(2) if value.ndim else [value]))


@pytest.mark.parametrize(
    "form", [lambda value: value, in_pieces, lambda value: value.T.contiguous().T if value.ndim == 2 else value]
)
def test_a_file_is_byte_for_byte_that_of_safetensors(tmp_path, form):
    save_file(tensors(), tmp_path / "expected")
    write_tensors(tmp_path / "found", {name: form(value) for name, value in reversed(tensors().items())})
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert all(torch.equal(value, tensors()[name]) for name, value in load_file(tmp_path / "found").items())


def test_the_order_of_a_part_of_the_tensors_is_that_of_the_whole():
    dtypes = {name: value.dtype for name, value in tensors().items()}
    order, part = [*in_file_order(dtypes)], {name: dtypes[name] for name in [*dtypes][::2]}
    assert [*in_file_order(part)] == [name for name in order if name in part]


def test_pieces_that_are_too_short_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the pieces of a tensor are not as long as it is"):
        write_tensors(tmp_path / "found", {"a": Pieces(torch.Size([4]), torch.float32, iter([torch.zeros(3)]))})


def test_tensors_on_the_disk_can_be_changed_and_leave_no_file(tmp_path):
    found = on_disk({name: in_pieces(value) for name, value in tensors().items()}, tmp_path)
    assert [*tmp_path.iterdir()] == [] and found.keys() == tensors().keys()
    assert all(torch.equal(value, tensors()[name]) and value.dtype == tensors()[name].dtype for name, value in found.items())
    found["layer.0"] += 1
    assert torch.equal(found["layer.0"], tensors()["layer.0"] + 1)


def test_all_pieces_are_taken_even_if_they_cannot_be_written(tmp_path):
    left = iter([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(OSError), taken({"model": {"a": Pieces(torch.Size([4]), torch.float32, left), "b": torch.zeros(1)}}):
        write_tensors(tmp_path / "no" / "folder", {})
    assert not deque(left)
