"""Pretrained models without their weights, which are read later, a part of each at a time. Knows no processes.

transformers loads tensors that are not there: they are on the meta device, and only note where in the files their values are,
and what is computed from these. So names, prefixes, fused and tied weights, and what the files lack, are as ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hftune.errors import ConfigError
from hftune.models.weights import weight_files

ROW_BY_ROW = (Tensor.to, Tensor.detach, Tensor.contiguous)
"""Functions of which rows can be computed from the same rows of their first argument."""
CANNOT = (ConfigError, OSError, ValueError, RuntimeError, KeyError, ArithmeticError, SafetensorError, NotImplementedError)
"""What is raised of files or models that cannot be loaded in this way, and perhaps in none."""


class Unread(Tensor):
    """A tensor on the meta device that can be read: from a file, or by a function of such tensors."""

    read: Callable[[slice], Tensor]
    """Returns rows of it, on the CPU; of a scalar, the scalar."""

    @classmethod
    def of(cls, empty: Tensor, read: Callable[[slice], Tensor]) -> Unread:
        """Make one in the shape of a tensor on the meta device."""
        value = empty.as_subclass(cls)
        value.read = read
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.to:  # it stays where it is
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
            raise NotImplementedError(f"{name} would change values that are not there")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name in ("as_subclass", "requires_grad_"):
            return args[0] if name == "requires_grad_" else result
        if isinstance(result, (tuple, list)):
            return type(result)(cls._computed(part, func, args, kwargs, place) for place, part in enumerate(result))
        return cls._computed(result, func, args, kwargs)

    @classmethod
    def _computed(cls, result: Any, func: Any, args: Any, kwargs: Mapping[str, Any], place: int | None = None) -> Any:
        if not isinstance(result, Tensor):
            return result

        def read(rows: slice) -> Tensor:
            if func in ROW_BY_ROW or (func is Tensor.__getitem__ and args[1] is Ellipsis):
                return func(read_rows(args[0], rows), *args[1:], **kwargs)
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if func is torch.stack and dim == 0:  # the experts of a layer
                return torch.stack([read_rows(part, EVERYTHING) for part in args[0][rows]])
            if func is torch.cat and dim not in (0, -result.ndim):
                return torch.cat([read_rows(part, rows) for part in args[0]], dim)
            values = func(*tree_map(lambda value: read_rows(value, EVERYTHING), args), **kwargs)
            return read_rows(values if place is None else values[place], rows)

        return cls.of(result, read)


EVERYTHING = slice(None)


def read_rows(value: Any, rows: slice) -> Any:
    """Return rows of a tensor, read if need be; anything else as it is."""
    if isinstance(value, Unread):
        return value.read(rows)
    return value[rows] if isinstance(value, Tensor) and value.ndim else value


def unread_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name, as their headers describe them.

    Raises:
        OSError, SafetensorError: one cannot be read.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        opened = safe_open(file, framework="pt")  # for as long as any of its tensors is there
        for name in opened.keys():  # noqa: SIM118 - it is no dict
            mapped = opened.get_tensor(name)  # into memory: its rows are read where they are used

            def read(rows: slice, opened: Any = opened, name: str = name) -> Tensor:
                return read_rows(opened.get_tensor(name), rows)

            found[name] = Unread.of(torch.empty_like(mapped, device="meta"), read)
    return found


def load_unread(
    model_class: type[PreTrainedModel], folder: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Load a model whose tensors are on the meta device if the files have them; and transformers' info on the loading.

    What they lack is on the CPU, drawn from torch's generator as ever. The model's attribute ``unread`` has the tensors to
    read, by name; it has to go before the model is copied.

    Returns:
        None, with the generator as it was, if this model has to be loaded with its weights, or cannot be loaded.
    """
    before = torch.get_rng_state()
    try:
        # Adapters beside the weights, other files, and weights of fewer bits are transformers' own business.
        if (folder / "adapter_config.json").exists() or getattr(config, "transformers_weights", None):
            return None
        if type(config).extra_files or getattr(config, "quantization_config", None) is not None:
            return None
        files = weight_files(str(folder))
        if any(file.suffix != ".safetensors" for file in files):
            return None
        options: dict[str, Any] = {"config": config, "dtype": dtype, "state_dict": unread_tensors(files)}
        if (folder / "generation_config.json").is_file():
            options["generation_config"] = GenerationConfig.from_pretrained(folder)
        model, info = model_class.from_pretrained(None, ignore_mismatched_sizes=True, output_loading_info=True, **options)
        ties = model.all_tied_weights_keys.items()
        if any(model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other) for one, other in ties):
            raise ValueError("two copies of a weight would have to be compared")
    except CANNOT:
        torch.set_rng_state(before)
        return None
    model.name_or_path = model.config.name_or_path = str(folder)
    model.unread = set_aside(model)
    return model, info


def set_aside(model: nn.Module) -> dict[str, Unread]:
    """Put plain tensors on the meta device into the places of those to read; return the latter by name. Tied ones stay tied."""
    found: dict[str, Unread] = {}
    plain: dict[int, Tensor] = {}
    for prefix, module, key, value in places(model):
        if isinstance(value, Unread):
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, nn.Parameter):
                empty = nn.Parameter(empty, value.requires_grad)
            setattr(module, key, plain.setdefault(id(value), empty))
            found[prefix + key] = value
    return found


def places(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Return where each parameter and buffer is, tied ones repeatedly: prefix of its name, the module, its name there."""
    here: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return [
        (f"{name}." if name else "", module, key, value)
        for name, module in model.named_modules()
        for key, value in chain(module.named_parameters(**here), module.named_buffers(**here))
    ]


@contextmanager
def as_if_read(model: nn.Module) -> Iterator[None]:
    """Let tensors that are to be read seem to be zeros on the CPU: peft creates what it adds where the weights are.

    They take no memory, except for copies that peft makes to train modules as a whole, for as long as this lasts.
    """
    if not (unread := vars(model).get("unread")):
        yield
        return
    zeros: dict[Tensor, nn.Parameter] = {}
    for _, module, key, value in places(model):
        if value.is_meta and isinstance(value, nn.Parameter):
            if value not in zeros:
                zero = torch.zeros((), dtype=value.dtype)
                zeros[value] = nn.Parameter(zero.expand(value.shape), value.requires_grad)
            setattr(module, key, zeros[value])
    try:
        yield
    finally:
        empty: dict[int, nn.Parameter] = {}
        for prefix, module, key, value in places(model):
            if isinstance(value, nn.Parameter) and plain_name(prefix + key) in unread:
                back = nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)
                setattr(module, key, empty.setdefault(id(value), back))


def plain_name(name: str) -> str:
    """Return the name that a tensor of a model with adapters has without them."""
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)", "", f".{name}")[1:]


def match_unread(model: nn.Module) -> bool:
    """Give the tensors to read their names in a model that may have adapters by now; say whether it has all that it needs.

    Not if a task has put together models, or parts of them.
    """
    unread = vars(model).get("unread", {})
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    found = {name: unread.get(plain_name(name)) for name, value in named if value.is_meta}
    model.unread = found
    return None not in found.values()
