"""Loads models and tokenizers of transformers by name or folder, or builds them from a config. Independent of tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hftune.data.hub import fetch
from hftune.errors import ConfigError, did_you_mean, message_of

CONFIG = ("config.json", "generation_config.json")
TOKENIZER = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""All small files, because the files of tokenizers have many names."""
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
"""Weights of older repositories, from which transformers reads only tensors."""
_OPTIONS: ContextVar[Mapping[str, Any]] = ContextVar("options of from_pretrained", default=MappingProxyType({}))
_IN_A_LAYER = re.compile(r"\.(layers?|h|blocks?)\.\d+\.")


def folder_of(model: str, commit: str | None, files: Sequence[str], key: str = "task.model") -> Path:
    """Return the folder of a local model, or, for a commit on the Hub, a folder with its ``files`` (patterns).

    Loading from there needs no further requests to the Hub. Given a name, transformers (5.23) would treat files that it cannot
    download as missing, and have a bot convert repositories with pickled weights.

    Raises:
        ConfigError: the files cannot be downloaded.
    """
    return Path(model).expanduser() if commit is None else fetch("model", model, commit, files, key)


def load_config(model: str | None, overrides: Mapping[str, Any], commit: str | None = None) -> PreTrainedConfig:
    """Load a model's config and apply ``overrides``; without a model, build a config from ``overrides`` alone.

    Args:
        commit: commit of a model on the Hub; None for a folder.

    Raises:
        ConfigError: there is no such model, or an override or the ``model_type`` is unknown.
    """
    key = "task.model_config" if overrides else f"the config of task.model={model}"
    if model is None:
        if (kind := overrides["model_type"]) not in CONFIG_MAPPING:
            hint = did_you_mean(kind, CONFIG_MAPPING)
            raise ConfigError(f"task.model_config.model_type={kind!r} is not known to transformers.{hint}")
        default = CONFIG_MAPPING[kind]()
        refuse_unknown([name for name in overrides if not hasattr(default, name)], default.to_dict(), type(default).__name__)
    try:
        if model is None:
            config, unknown = AutoConfig.for_model(**overrides), {}
        else:
            config, unknown = AutoConfig.from_pretrained(
                folder_of(model, commit, CONFIG), return_unused_kwargs=True, trust_remote_code=False, **overrides
            )
    except ConfigError:  # files that cannot be downloaded
        raise
    except (OSError, ValueError) as error:
        what = "task.model_config cannot be used" if model is None else f"task.model={model} cannot be loaded"
        raise ConfigError(f"{what}: {message_of(error)}.") from error
    except StrictDataclassError as error:
        raise ConfigError(f"{key} cannot be used: {wrong_value(error)}.") from error
    refuse_unknown(unknown, config.to_dict(), type(config).__name__)
    return config


def refuse_unknown(keys: Iterable[str], known: Iterable[str], kind: str, section: str = "task.model_config") -> None:
    """Raise ConfigError for the first of some keys that a class of configs does not know."""
    known = [*known]
    for key in keys:
        if key not in known:
            raise ConfigError(f"{section}.{key} is not a key of {kind}.{did_you_mean(key, known)}")


@contextmanager
def loading(**options: Any) -> Iterator[None]:
    """Let ``load_model`` hand these to ``from_pretrained``, such as a dtype other than float32, whatever task calls it.

    ``unread=True`` lets it leave the weights in the files, if it can: see ``load_unread``. ``sharded=True`` has it refuse those
    that cannot be sharded.
    """
    token = _OPTIONS.set({**_OPTIONS.get(), **options})
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def load_model(auto_class: Any, model: str | None, config: PreTrainedConfig, commit: str | None = None) -> PreTrainedModel:
    """Load weights in float32 (transformers 5 would keep a checkpoint's bfloat16), or initialize them if ``model`` is None.

    In a context of ``loading``, with its options.

    Parameters that are missing in the checkpoint or have a different shape there, such as a head for other classes, are
    initialized from torch's global generator. On ``torch.device("meta")``, as in ``hftune plan``, no weights are read.

    Raises:
        ConfigError: there is no such model, or its body, not only its head, has different sizes or fewer layers; or it has
            to be sharded and cannot be.
    """
    options = {"dtype": torch.float32, **_OPTIONS.get()}
    is_unread, is_sharded = options.pop("unread", False), options.pop("sharded", False)
    if is_sharded and (options.get("quantization_config") or getattr(config, "quantization_config", None)) is not None:
        raise ConfigError(
            f"task.model={model} has weights of 8 or 4 bits (quantization_config), which FSDP cannot shard. Launch without "
            "FSDP, or name the model that it was made from."
        )
    dtype = _OPTIONS.get().get("dtype") if model is None else options["dtype"]
    if model is None or torch.get_default_device().type == "meta":
        try:
            return _initialize(auto_class, config, dtype)
        except (ValueError, KeyError, ArithmeticError) as error:  # an unknown activation is a KeyError
            raise ConfigError(f"task.model_config cannot be built: {message_of(error)}.") from error
    if (quantized := options.get("quantization_config")) is not None:
        quantized = options["quantization_config"] = deepcopy(quantized)
        # All that is beside the body of the model, or computes its logits, stays as it is. By itself, transformers (5.23)
        # leaves out of its 4 bits only what has the last weight, and not if that has a bias, too.
        with torch.device("meta"):
            empty = _initialize(auto_class, config, None)
        last, body = empty.get_output_embeddings(), empty.base_model
        beside = [name for name, child in empty.named_children() if child is not body] if body is not empty else []
        quantized.llm_int8_skip_modules += [*beside, *(name for name, module in empty.named_modules() if module is last)]
    folder = folder_of(model, commit, (*CONFIG, *WEIGHTS))
    if commit is not None and not any(folder.glob("model*.safetensors")):
        folder = folder_of(model, commit, PICKLED)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # fine-tuning always misses head weights; no table of them
    try:
        found = _load_unread(auto_class, folder, config, options["dtype"]) if is_unread else None
        loaded, info = found or auto_class.from_pretrained(
            folder, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"task.model={model} cannot be loaded: {message_of(error)}.") from error
    finally:
        logging.set_verbosity(verbosity)
    if deeper := sorted(key for key in info["missing_keys"] if _IN_A_LAYER.search(key) and "crossattention" not in key):
        raise ConfigError(f"task.model={model} has no {deeper[0]}: task.model_config has more layers than the model.")
    body = [key for key, *_ in info["mismatched_keys"] if key.startswith(f"{loaded.base_model_prefix}.")]
    if body:
        raise ConfigError(f"task.model_config gives {body[0]} a different size than task.model={model} has.")
    vars(loaded).pop("hf_device_map", None)  # Accelerate (1.15) would keep a quantised model where it was loaded
    loaded.drawn_parameters = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    return loaded


def _load_unread(auto_class: Any, folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    from hftune.models.unread import load_unread

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        empty = _initialize(auto_class, config, None)
    # An auto class may choose the model, and a part of the config with it.
    return load_unread(type(empty), folder, config if type(empty.config) is type(config) else empty.config, dtype)


def saved_config(directory: Path) -> PreTrainedConfig:
    """Load the config of a model that a task has saved, or of one whose adapters it has saved."""
    from hftune.models.adapter_files import MODEL_CONFIG, is_adapter

    return load_config(str(directory / MODEL_CONFIG if is_adapter(directory) else directory), {})


def load_saved(auto_class: Any, directory: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Load a model that a task has saved; if these are adapters, on their base.

    The base is float32 in the end, in which all answers are computed, or has 4 bits if it had them in training.

    Raises:
        ConfigError: as ``load_model`` and ``load_adapter``.
    """
    from hftune.models.adapter_files import is_adapter, load_adapter, read_base
    from hftune.models.adapters import import_peft

    if not is_adapter(directory):
        return load_model(auto_class, str(directory), config)
    import_peft()
    base, given = read_base(directory), _OPTIONS.get()
    folder = base.folder(directory)
    if base.commit is None and not Path(folder).is_dir():
        raise ConfigError(f"{directory} holds adapters of the model in {folder}, where there is none now. Put it back there.")
    dtype = getattr(torch, base.dtype)
    quantized = quantization(base.quantized, dtype, base.whole)
    with loading(**{"dtype": dtype, **quantized, **given}):
        model = load_model(auto_class, folder, config, base.commit)
    load_adapter(model, directory, is_as_trained=given.keys().isdisjoint(quantized))
    if (directory / CONFIG[1]).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    for value in chain(model.parameters(), model.buffers()):  # not model.float(), which refuses weights of 4 bits
        if value.dtype in (torch.bfloat16, torch.float16):
            value.data = value.data.float()
    return model


def quantization(kind: str | None, dtype: torch.dtype, whole: Sequence[str] = (), device: str = "cpu") -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that keep linear layers but the head in 4 bits; none if ``kind`` is None.

    Args:
        dtype: in which they compute, and the other weights are kept.
        whole: names, or ends of names, of further modules that stay as they are.
        device: on which they get their 4 bits; their layout there may differ.
    """
    if kind is None:
        return {}
    settings = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=[*whole], **settings)
    return {"quantization_config": config, "device_map": {"": device}}


def _initialize(auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    from_config = getattr(auto_class, "from_config", None) or auto_class._from_config  # which from_config calls
    return from_config(config) if dtype is None else from_config(config, dtype=dtype)


def load_tokenizer(model: str, key: str = "task.model", commit: str | None = None, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. If it has no padding token, as GPT-2, the end token is used for padding.

    Args:
        key: key of the recipe that names the model.
        options: of the tokenizer's class, such as add_prefix_space.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    folder = folder_of(model, commit, TOKENIZER, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={model} has no tokenizer that can be loaded: {message_of(error)}.") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def with_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str] | None) -> PreTrainedTokenizerBase:
    """Add tokens to a tokenizer, in place, or raise ConfigError if it has one of them already."""
    if known := [token for token in tokens or () if token in tokenizer.get_vocab()]:
        raise ConfigError(f"task.new_tokens: {known[0]!r} is a token of the tokenizer already. Leave it out.")
    tokenizer.add_tokens([*(tokens or ())])
    return tokenizer


def add_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Give new tokens rows in the input and output embeddings of a model: the means of those of the tokenizer's other tokens.

    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models". transformers' ``mean_resizing`` adds
    noise to the mean, and leaves the rows that a model has in reserve, and which are used first, as they are.
    """
    count = len(tokenizer)
    if count > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(count, mean_resizing=False)
    new = tokenizer.convert_tokens_to_ids([*tokens])
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    values = (getattr(module, name, None) for module in modules for name in ("weight", "bias"))
    for value in dict.fromkeys(value for value in values if value is not None and value.device.type != "meta"):
        is_known = torch.ones(count, dtype=torch.bool)
        is_known[new] = False
        with torch.no_grad():
            value[new] = value[:count][is_known].float().mean(0).to(value.dtype)


def load_processor(model: str, commit: str | None = None) -> Any:
    """Load the processor of a model of images with text, with its tokenizer. Images are read by Pillow.

    Raises:
        ConfigError: the model has no processor.
    """
    folder = folder_of(model, commit, TOKENIZER)
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        if hasattr(processor, "image_processor"):  # by its name, as a processor of videos has no such backend
            processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        how = "" if find_spec("torchvision") else ' If it needs torchvision: pip install "hftune[vision]".'
        raise ConfigError(f"task.model={model} has no processor that can be loaded: {message_of(error)}.{how}") from error
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        raise ConfigError(f"task.model={model} has a {type(processor).__name__}, and no processor of pictures and texts.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    return processor


def new_processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, image_token: str) -> Any:
    """Return the processor of a new LLaVA: it scales images to the squares that its vision tower takes."""
    vision, half = config.vision_config, [0.5, 0.5, 0.5]
    size = {"height": vision.image_size, "width": vision.image_size}
    images = transformers.LlavaImageProcessorPil(size=size, do_center_crop=False, image_mean=half, image_std=half)
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=image_token,
        num_additional_image_tokens=int(vision.model_type == "clip_vision_model"),  # which has one for the whole image
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that a model has positions for; None if there is no maximum, as for XLNet."""
    config = model.config
    if not hasattr(config, "max_position_embeddings"):  # as of a model with a vision tower beside the one of texts
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 0:
        return None
    # RoBERTa and related models count positions from padding_idx + 1.
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    taken = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return positions - max(taken, default=0)


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> dict[str, int]:
    """Train the vocabulary of BERT's uncased WordPiece tokenizer. The same texts give the same one on every machine.

    By itself, the trainer gives a different vocabulary each time: it numbers the ##letters in the order of a hash map, and ties
    between merges are broken by number (huggingface/tokenizers#1794, open as of tokenizers 0.23). So number them in advance.
    """
    from tokenizers import BertWordPieceTokenizer

    texts = list(texts)
    trainer = BertWordPieceTokenizer(lowercase=True)
    letters = sorted(letter for letter in set().union(*map(trainer.normalize, texts)) if not letter.isspace())
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{letter}" for letter in letters)]
    trainer.train_from_iterator(
        texts, vocab_size=vocab_size, special_tokens=first, limit_alphabet=len(letters), show_progress=False
    )
    return trainer.get_vocab()


def wordpiece_tokenizer(vocabulary: Mapping[str, int]) -> PreTrainedTokenizerBase:
    """Return BERT's uncased WordPiece tokenizer with this vocabulary."""
    return transformers.BertTokenizer(vocab=dict(vocabulary), do_lower_case=True)


def wrong_value(error: StrictDataclassError) -> str:
    """Return what a config has refused, a part of a sentence."""
    return str(error).splitlines()[-1].strip().removeprefix("TypeError: ").rstrip(".")
