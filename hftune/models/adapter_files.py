"""The folders that adapters are kept in, and models with adapters made plain again. Independent of tasks and ranks.

A folder is what peft and transformers write and load, ``adapter_config.json`` and ``adapter_model.safetensors``, with three
additions of ours:

- ``base.json``: which model the adapters belong to, and the digest of its weights. peft puts adapters on any other one, too.
- ``model_config/config.json``: the config with the task's class names. Beside adapter_config.json, transformers would take it
  for that of a whole model, and look for its weights there.
- ``base/``: the base itself, where no name leads to it, because it was built from a config or given weights of one's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hftune.errors import ConfigError
from hftune.models.adapters import base_digest, base_tensors, is_packed, raise_precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
"""Files of the folder."""
MODEL_CONFIG, OWN_BASE = "model_config", "base"
"""Its subfolders."""
PREFIX = "base_model.model."
"""What peft's files have before each name."""
ANSWERS = ("logits", "last_hidden_state")
"""What a model returns that two models are compared by."""


@dataclass(frozen=True)
class Base:
    """The model that adapters belong to."""

    name: str | None
    """On the Hub, or the path of its folder; None: it is in the subfolder ``base``."""
    commit: str | None
    """Of the Hub; None for a folder."""
    dtype: str
    """Of its weights in training, such as "bfloat16"."""
    quantized: str | None
    """nf4: its linear layers had 4 bits in training."""
    digest: str
    """See ``base_digest``."""
    whole: Sequence[str] = ()
    """Names of the modules that were trained as a whole."""

    def folder(self, directory: Path) -> str:
        """Return what ``load_model`` loads it from, given the folder of the adapters."""
        return str(directory / OWN_BASE) if self.name is None else self.name


def is_adapter(directory: Path) -> bool:
    """Say whether a folder holds adapters, and not a whole model."""
    return (directory / CONFIG).is_file()


def read_base(directory: Path) -> Base:
    """Return which model the adapters of a folder belong to.

    Raises:
        ConfigError: they are not hftune's.
    """
    path = directory / BASE
    if not path.is_file():
        raise ConfigError(f"{directory} holds adapters without a {BASE}: hftune did not write them. Load them with peft.")
    return Base(**json.loads(path.read_text(encoding="utf-8")))


# Writing


def complete_adapter(model: PreTrainedModel, directory: Path, name: str | None, commit: str | None, final: Path) -> None:
    """Add to a folder of ``save_pretrained`` what it lacks: the name of the base, its digest, and the model's config.

    Args:
        name: of the base, see ``Base``.
        final: where the folder will be.
    """
    quantized = "nf4" if is_quantized(model) else None
    dtype = str(base_dtype(model)).removeprefix("torch.")
    whole = [key for key, module in replaced(model) if hasattr(module, "original_module")]
    base = Base(name, commit, dtype, quantized, base_digest(model), whole)
    (directory / BASE).write_text(json.dumps(asdict(base), indent=1) + "\n", encoding="utf-8")
    path = directory / CONFIG
    written = json.loads(path.read_text(encoding="utf-8"))
    # Here and not in peft's config: peft would ask the Hub about the base each time it saves.
    written |= {"base_model_name_or_path": base.folder(final.absolute()), "revision": commit}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # save_pretrained leaves out a shared weight's second name, which peft wants to read.
    tensors = load_file(directory / WEIGHTS)
    trained = {f"{PREFIX}{name}": value for name, value in model.get_adapter_state_dict().items()}
    if missing := {name: value.detach().to("cpu", copy=True) for name, value in trained.items() if name not in tensors}:
        save_file({**tensors, **missing}, directory / WEIGHTS, {"format": "pt"})
    config = deepcopy(model.config)
    vars(config).pop("quantization_config", None)  # the files of the base are not quantised, as it would say
    config.save_pretrained(directory / MODEL_CONFIG)
    if name is None:
        plain_model(model, merged=False).save_pretrained(directory / OWN_BASE)


def is_quantized(model: nn.Module) -> bool:
    return any(map(is_packed, model.parameters()))


def check_widths(model: nn.Module) -> None:
    """Refuse layers of 4 bits that bitsandbytes (0.50) cannot compute on CPUs: it fails in the first evaluation there.

    Raises:
        ConfigError: naming the first one.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and is_packed(weight) and (module.in_features % 64 or module.out_features % 32):
            raise ConfigError(
                f"adapter.quantize: {name} has {module.in_features} inputs and {module.out_features} outputs, but on CPUs 4 "
                "bits need multiples of 64 and 32. Leave it out, or train on a GPU."
            )


def base_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the frozen weights of a model with adapters, those in 4 bits aside."""
    return next((value.dtype for value in base_tensors(model).values() if value.dtype.is_floating_point), torch.float32)


# Loading


def load_adapter(model: PreTrainedModel, directory: Path, is_as_trained: bool = True) -> None:
    """Put the adapters of a folder on their base, in place: as in training, and so that they could be trained on.

    Not ``PreTrainedModel.load_adapter``: it drops the vectors of DoRA without a word (transformers 5.23).

    Args:
        is_as_trained: the weights are those of training; else they are the ones that had 4 bits then, and have no digest.

    Raises:
        ConfigError: the model is not their base; or they do not fit it.
    """
    from peft import LoraConfig, set_peft_model_state_dict

    config, base = LoraConfig.from_pretrained(directory), read_base(directory)
    config.inference_mode = False
    model.add_adapter(config)
    raise_precision(model)
    if is_as_trained and (digest := base_digest(model)) != base.digest:
        raise ConfigError(
            f"{directory} holds adapters of another base model than {base.folder(directory)} is now: its weights have the "
            f"digest {digest[:12]}, and those that the adapters were trained on {base.digest[:12]}. Put the earlier ones back."
        )
    tensors = {name.removeprefix(PREFIX): value for name, value in load_file(directory / WEIGHTS).items()}
    outcome = set_peft_model_state_dict(model, tensors)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    if missing := [*sorted(trained & {*outcome.missing_keys}), *outcome.unexpected_keys]:
        raise ConfigError(f"{directory / WEIGHTS} does not fit its base model: {missing[0]} is in one of the two only.")


# Plain models


def merge(model: PreTrainedModel, with_adapters: bool = True) -> None:
    """Add the adapters to the weights they belong to, in place: the model is then a plain one, with the names of its base.

    Each layer is merged in float32, and takes its own type again: rounded once.

    Args:
        with_adapters: False: leave the adapters out instead.

    Raises:
        ConfigError: the layers have 4 bits, to which the sums would be rounded.
    """
    if with_adapters and is_quantized(model):
        raise ConfigError("Adapters cannot be merged into weights of 4 bits: load the base without adapter.quantize.")
    for name, module in [*replaced(model)]:
        if hasattr(module, "original_module"):  # trained as a whole
            trained, plain = module.modules_to_save[module.active_adapters[0]], module.original_module
            dtypes = {value.dtype for value in plain.parameters()}
            if with_adapters:
                plain = trained.to(dtypes.pop()) if len(dtypes) == 1 else trained
        else:
            plain = module.get_base_layer()
            dtype = plain.weight.dtype
            if with_adapters:
                plain.to(torch.promote_types(dtype, torch.float32))
                module.merge(safe_merge=True)
                plain.to(dtype)
        model.set_submodule(name, plain)
    model._hf_peft_config_loaded = False
    del model.peft_config
    model.requires_grad_(True)
    model.tie_weights()


def plain_model(model: PreTrainedModel, merged: bool) -> PreTrainedModel:
    """Return a plain model on the CPU, with the adapters merged or left out; the given one, which may be in training, stays."""
    values = {id(value): nn.Parameter(value.detach().to("cpu", copy=True), value.requires_grad) for value in model.parameters()}
    values |= {id(value): value.to("cpu", copy=True) for value in model.buffers()}
    plain = deepcopy(model, values)
    merge(plain, merged)
    return plain.eval()


def replaced(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that peft has put in the place of a model's own, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


@torch.no_grad()
def answers(model: PreTrainedModel) -> Tensor | None:
    """Return what a model computes for a small fixed input, float32; None if it takes neither tokens nor images."""
    config = model.config
    if model.main_input_name == "input_ids":
        inputs: dict[str, Any] = {"input_ids": torch.arange(3, 19)[None] % config.get_text_config().vocab_size}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    elif model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        inputs = {"pixel_values": torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)}
    else:
        return None
    outputs = model.eval()(**inputs)
    return next((value.float() for name in ANSWERS if (value := getattr(outputs, name, None)) is not None), None)
