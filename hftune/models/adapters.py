"""Adapters: LoRA and DoRA matrices beside the frozen weights of a transformers model, by peft. Independent of tasks and ranks.

They are put into the model in place, as transformers' ``add_adapter`` does: its class, its layers, ``generate`` and everything
that looks at them stay as they are. peft is imported when a model gets adapters.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hftune.config.sections import AdapterConfig
from hftune.errors import ConfigError
from hftune.models.kinds import drawn_parameters, is_linear, is_of_transformers, is_transposed
from hftune.models.weights import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""peft's name for what a model does, which its AutoPeft classes go by, by the end of the name of its class."""
TIED_BY_PEFT = "embed_tokens"
"""End of the name of the only input embeddings that peft (0.21) trains together with a head that shares their weights."""
LOWER = (torch.float16, torch.bfloat16)
"""Precisions that swallow small updates: what is trained does not stay in them."""


def check_installed(config: AdapterConfig) -> None:
    """Refuse adapters if peft is not installed, and 4 bits without bitsandbytes, or raise ConfigError. Imports nothing."""
    if config.type is not None and find_spec("peft") is None:
        raise ConfigError(f'adapter.type={config.type} needs peft, which is not installed: pip install "hftune[lora]".')
    if config.quantize is not None and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f'adapter.quantize={config.quantize} needs bitsandbytes, which is not installed: pip install "hftune[qlora]".'
        )


def add_adapter(model: nn.Module, config: AdapterConfig, new: Sequence[str] = ()) -> None:
    """Put fresh adapters into a model, in place, and freeze everything else but the modules that are trained as a whole.

    What is trained is float32, or float64 if the model is. Fresh adapters change nothing: the product of their matrices is 0,
    or is taken out of the frozen weight.

    Args:
        new: names of modules that begin at random, see ``new_modules``: they are trained as ``config.train_also`` are.

    Raises:
        ConfigError: the model is not one of transformers'; ``adapter.targets`` or ``adapter.train_also`` do not fit it; or a
            parameter would stay as it was drawn.
    """
    if not is_of_transformers(model):
        raise ConfigError(
            f"adapter.type={config.type} needs a model of transformers, and {type(model).__name__} is none. Leave it out: all "
            "weights are trained then."
        )
    import_peft()
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    from hftune.models.unread import as_if_read  # imports transformers

    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name.rpartition(".")[0])
    # Modules that share a weight, each with another one that has it.
    ties = {
        name: next(other for other in names if other != name) for names in owners.values() if len(names) > 1 for name in names
    }
    whole = whole_modules(model, config, new, ties)
    targets = target_modules(model, config, whole, ties)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        modules_to_save=whole or None,
        init_lora_weights=config.init or True,
        use_dora=config.type == "dora",
        use_rslora=config.rslora,
        task_type=next((kind for end, kind in TASK_TYPES.items() if type(model).__name__.endswith(end)), None),
        fan_in_fan_out=any(is_transposed(model.get_submodule(name)) for name in targets),
        ensure_weight_tying=not ties.keys().isdisjoint(whole),
    )
    try:
        with as_if_read(model), one_thread():
            model.add_adapter(lora)
    except ValueError as error:  # of targets that peft moves
        raise ConfigError(f"adapter.targets: peft refuses them for {type(model).__name__}: {error}") from error
    # peft (0.21) takes names such as gate_proj for those that a mixture's experts had in transformers 4, and puts adapters on
    # all experts at once instead. A layer of that name beside them, as DeepSeek's shared experts have, would get none.
    found = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if missing := sorted({*targets} - found):
        ends = sorted({name.rpartition(".")[2] for name in found.intersection(targets)})
        how = f"Name others: adapter.targets=[{', '.join(ends)}]" if ends else "Leave adapter.type out"
        raise ConfigError(
            f"adapter.targets: peft would leave out {missing[0]} of {type(model).__name__}, whose name is also that of a part "
            f"of its experts, and put adapters on these instead. {how}."
        )
    trained = {name for name, module in model.named_modules() if hasattr(module, "original_module")}
    if further := sorted(trained - {*whole} - ties.keys()):  # peft compares the ends of names, without a dot before them
        raise ConfigError(
            f"adapter.train_also: peft would train {further[0]}, too, whose name ends like one of {', '.join(whole)}. Give "
            "longer names, or leave it out."
        )
    raise_precision(model)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: the bits of the singular vectors of PiSSA, which a resumed run needs, depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def raise_precision(model: nn.Module) -> None:
    """Keep what is trained in float32, in which small updates are not lost."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in LOWER:
            parameter.data = parameter.data.float()


def import_peft() -> None:
    """Import peft in silence: it imports bitsandbytes if that is there, which warns of kernels for 4 bits on CPUs."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        importlib.import_module("peft")
    finally:
        log.setLevel(level)


def has_adapter(model: nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# The base


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights that a model with adapters computes with, by their names in the model without adapters.

    The same for a model in training and for one that was loaded to answer, whose adapters are frozen as well. The originals of
    modules that are trained as a whole are not among them: they are not used.
    """
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if not any(part.startswith("lora_") or part in ("modules_to_save", "original_module") for part in parts):
            found[".".join(part for part in parts if part != "base_layer")] = parameter.detach()
    return found


def base_digest(model: nn.Module) -> str:
    """Return the SHA-256 of names, shapes, types and bytes of the frozen weights of a model with adapters.

    Of weights in 4 bits only names and shapes count: a CPU may round to them otherwise than a GPU. It takes some 6 seconds of a
    core for 10 GB; tensors are read in parallel, and the model remembers it.
    """
    if known := getattr(model, "known_base_digest", None):
        return known
    digest = weights_digest(base_tensors(model).items(), leaves_out=is_packed)
    if has_adapter(model):  # else its weights may still change
        model.known_base_digest = digest
    return digest


def packed_digest(model: nn.Module) -> str:
    """Return the digest of the weights in 4 bits, with their scales, as they are on this device; see ``weights_digest``."""
    packed = {name: value for name, value in model.named_parameters() if is_packed(value)}
    scales = {
        f"{name}.{key}": scale
        for name, value in packed.items()
        if (state := getattr(value, "quant_state", None)) is not None
        for key, scale in state.as_dict(packed=True).items()
    }
    return weights_digest({**packed, **scales}.items())


def has_packed(module: nn.Module) -> bool:
    return any(map(is_packed, module.parameters()))


def is_packed(value: Tensor) -> bool:
    """Say whether a weight holds several small numbers in each of its bytes."""
    return value.dtype == torch.uint8


# Which modules


def new_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that begin at random and must not stay so: the task's head, and what the files lack.

    The head is all that is beside the body (``base_model``) of a transformers model that does not predict tokens.
    """
    if not is_of_transformers(model):
        return []
    found: list[str] = []
    if model.base_model is not model and model.get_output_embeddings() is None:
        found = [name for name, child in model.named_children() if child is not model.base_model and trains(child)]
    drawn = {*drawn_parameters(model)}
    for owner in sorted({name.rpartition(".")[0] for name in drawn} - {""}):
        module = model.get_submodule(owner)
        if trains(module) and all(f"{owner}.{name}" in drawn for name, _ in module.named_parameters()):
            found.append(owner)
    return outermost(found)


def trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def outermost(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that are in no other one of them."""
    kept: list[str] = []
    for name in sorted({*names}):
        if not is_inside(name, kept):
            kept.append(name)
    return kept


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Say whether a module is one of these, or in one of them."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def whole_modules(model: PreTrainedModel, config: AdapterConfig, new: Sequence[str], ties: Mapping[str, str]) -> list[str]:
    """Return the names of the modules that are trained as a whole.

    Raises:
        ConfigError: one of ``adapter.train_also`` is not there, or shares its weights in a way that peft would break; or a
            parameter that was drawn at random is in none of them.
    """
    named = [name for pattern in config.train_also for name in matching(model, pattern, "adapter.train_also")]
    whole = outermost([*new, *named])
    for name in whole:
        is_input = name.endswith(TIED_BY_PEFT) and model.get_submodule(name) is model.get_input_embeddings()
        if name in ties and not is_input:
            instead = next(key for key, module in model.named_modules() if module is model.get_input_embeddings())
            how = f"Name {instead} instead" if instead.endswith(TIED_BY_PEFT) else "Leave it out"
            raise ConfigError(
                f"adapter.train_also: {name} of {type(model).__name__} shares its weights with {ties[name]}, and peft would "
                f"train only one of the two. {how}."
            )
        if has_packed(model.get_submodule(name)):
            raise ConfigError(
                f"adapter.quantize={config.quantize}: {name} of {type(model).__name__} has 4 bits, and could not be trained as "
                "a whole. Leave it out of adapter.train_also, or leave adapter.quantize out."
            )
    parameters = dict(model.named_parameters())
    for name in drawn_parameters(model):
        if name in parameters and parameters[name].requires_grad and not is_inside(name, whole):
            raise ConfigError(
                f"adapter.type={config.type} would leave {name} of {type(model).__name__} frozen as it was drawn at random: "
                f"task.model lacks it. Set adapter.train_also=[{name.rpartition('.')[0]}]."
            )
    return whole


def target_modules(model: PreTrainedModel, config: AdapterConfig, whole: Sequence[str], ties: Mapping[str, str]) -> list[str]:
    """Return the names of the modules that get an adapter.

    Raises:
        ConfigError: ``adapter.targets`` names a module that is not there, that adapters do not fit, that is trained as a whole
            or that shares its weights with another one; or there are no linear layers.
    """
    if config.targets == "all-linear":
        head = model.get_output_embeddings()
        found = [
            name
            for name, module in model.named_modules()
            if is_linear(module) and module is not head and not is_inside(name, whole)
            if trains(module) or is_packed(module.weight)
            if not isinstance(module, NonDynamicallyQuantizableLinear)  # whose weight nn.MultiheadAttention uses directly
            if name not in ties
        ]
        if not found:
            raise ConfigError(
                f"adapter.targets=all-linear: {type(model).__name__} has no linear layers but its head. Name other modules."
            )
        return found
    targets: list[str] = []
    for pattern in config.targets:
        named = matching(model, pattern, "adapter.targets")
        # Where the task has frozen some of them, as a vision tower, a name stands for the others.
        found = [name for name in named if trains(module := model.get_submodule(name)) or has_packed(module)] or named
        for name in found:
            module = model.get_submodule(name)
            if not is_adaptable(module) or isinstance(module, NonDynamicallyQuantizableLinear):
                raise ConfigError(
                    f"adapter.targets: {pattern!r} is a {type(module).__name__} of {type(model).__name__}. Adapters fit linear "
                    "layers, convolutions and embeddings: name those in it."
                )
            if name in ties:
                raise ConfigError(
                    f"adapter.targets: {name} of {type(model).__name__} shares its weights with {ties[name]}, and an adapter "
                    "of one of the two could not be merged. Leave it out, or train the weights: adapter.train_also."
                )
            if is_inside(name, whole):
                raise ConfigError(f"adapter.targets: {name} is trained as a whole, so it needs no adapter. Leave it out.")
        targets += found
    return sorted({*targets})


def is_adaptable(module: nn.Module) -> bool:
    """Say whether a LoRA fits a module."""
    return is_linear(module) or isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the names of the modules that are, or end in, a name.

    Raises:
        ConfigError: there are none; the message says which are near.
    """
    names = [name for name, _ in model.named_modules() if name]
    if found := [name for name in names if f".{name}".endswith(f".{pattern}")]:
        return found
    kinds = dict.fromkeys(name.rpartition(".")[2] for name, module in model.named_modules() if is_adaptable(module))
    ends = dict.fromkeys([*kinds, *(part for name in names for part in name.split(".") if not part.isdecimal())])
    near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=3)
    how = f"Near it: {', '.join(near)}." if near else f"It has {', '.join([*kinds][:8])}."
    raise ConfigError(f"{key}: {pattern!r} is no module of {type(model).__name__}. {how}")
