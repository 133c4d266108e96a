"""How a transformers model wants its recordings, and what makes its answer for one independent of those beside it.

Independent of tasks and data sets. Shape suffixes: B recordings, T samples, C channels, F frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import FEATURE_EXTRACTOR_MAPPING, AutoFeatureExtractor, PreTrainedConfig, PreTrainedModel

from hftune.data.tokenized import Ragged
from hftune.errors import ConfigError, DataError, message_of
from hftune.models.pretrained import CONFIG, TOKENIZER, folder_of
from hftune.models.trial import trying

FILES = ("preprocessor_config.json", "processor_config.json")
TOLERANCE = 1e-3
"""Largest difference that padding may make to an output, relative to the largest."""


def load_feature_extractor(model: str, commit: str | None) -> Any:
    """Load a model's feature extractor.

    Raises:
        ConfigError: it has none, or one for something else than recordings.
    """
    folder = folder_of(model, commit, (*CONFIG, *FILES))
    if not any((folder / name).is_file() for name in FILES):
        raise ConfigError(
            f"task.model={model} has no feature extractor ({FILES[0]}). Copy that file from the model that it was made of."
        )
    try:
        return AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"task.model={model} has no feature extractor that can be loaded: {message_of(error)}.") from error


def new_feature_extractor(config: PreTrainedConfig) -> Any:
    """Return the feature extractor of a new model, whose sizes are those of its config.

    Raises:
        ConfigError: transformers does not say which one such models have.
    """
    if type(config) not in FEATURE_EXTRACTOR_MAPPING:
        raise ConfigError(
            f"task.model_config.model_type={config.model_type}: transformers knows no feature extractor for such models. Start "
            "from a pretrained one, or use wav2vec2, hubert, audio-spectrogram-transformer or whisper."
        )
    settings: dict[str, Any] = {}
    if (positions := getattr(config, "max_source_positions", None)) and hasattr(config, "num_mel_bins"):  # Whisper
        settings = {"feature_size": config.num_mel_bins, "chunk_length": max(1, positions // 50)}  # 50 positions a second
    elif hasattr(config, "num_mel_bins"):  # AST
        settings = {"num_mel_bins": config.num_mel_bins, "max_length": config.max_length}
    return FEATURE_EXTRACTOR_MAPPING[type(config)](**settings)


def has_tokenizer(model: str, commit: str | None) -> bool:
    """Return whether a model comes with a tokenizer, as those that recognize speech do."""
    folder = folder_of(model, commit, (*CONFIG, *TOKENIZER))
    return any((folder / name).is_file() for name in ("vocab.json", "tokenizer.json", "tokenizer_config.json"))


def character_tokenizer(texts: Iterable[str]) -> Any:
    """Return the tokenizer of CTC models for the characters of some texts, in the order of their numbers in Unicode.

    Raises:
        DataError: a text has the character that stands for a space.
    """
    letters = sorted(set().union(*texts) - {" "})
    if "|" in letters:
        raise DataError(
            'A text of the train split has a "|", which stands for a space in CTC. Set task.ignored_characters="|".'
        )
    with TemporaryDirectory() as folder:  # it reads nothing else
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps({token: number for number, token in enumerate(("[PAD]", "[UNK]", "|", *letters))}))
        tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "word_delimiter_token": "|", "bos_token": None, "eos_token": None}
        return transformers.Wav2Vec2CTCTokenizer(str(path), **tokens)


def whisper_tokenizer(trained: str) -> Any:
    """Return a tokenizer like Whisper's, without languages, of what ``train_bytes`` returns for no special tokens.

    Those come last, as in Whisper's: transformers takes all tokens behind them for times.
    """
    model, end = json.loads(trained)["model"], "<|endoftext|>"
    vocab = dict(model["vocab"])
    special = (end, "<|startoftranscript|>", "<|notimestamps|>")
    vocab |= {token: len(vocab) + place for place, token in enumerate(special)}
    merges = [tuple(pair) for pair in model["merges"]]
    named = {"unk_token": end, "bos_token": end, "eos_token": end, "pad_token": end}
    return transformers.WhisperTokenizer(vocab, merges, **named, additional_special_tokens=list(special[1:]))


class Listener:
    """What a feature extractor makes of recordings: tensors of the model's inputs, with an attention mask if they are padded.

    Args:
        extractor: of transformers.
        name: for messages: "task.model=...".

    Raises:
        ConfigError: it does not take recordings.
    """

    def __init__(self, extractor: Any, name: str):
        self.extractor, self.name = extractor, name
        rate = getattr(extractor, "sampling_rate", None)
        if not isinstance(rate, int):
            raise ConfigError(f"{name}: its feature extractor is a {type(extractor).__name__}, which takes no recordings.")
        self.rate: int = rate
        """Samples a second."""
        self.input: str = extractor.model_input_names[0]
        noise_T = np.random.RandomState(0).randn(rate // 2).astype(np.float32) / 10
        try:
            shapes = [
                self._extracted([noise_T[:count]], return_tensors="pt")[self.input].shape for count in (rate // 4, rate // 2)
            ]
        except (ValueError, RuntimeError, TypeError, ImportError) as error:
            raise ConfigError(f"{name}: its feature extractor cannot be used: {message_of(error)}.") from error
        self.is_fixed, self.shape = shapes[0] == shapes[1], tuple(shapes[0][1:])
        """Whether it pads and cuts all recordings to one length, as those of Whisper and AST do."""
        frames = getattr(extractor, "max_length", 0)  # of AST: one each 10 ms
        self.max_samples: int | None = (
            (getattr(extractor, "n_samples", None) or frames * rate // 100) if self.is_fixed else None
        )

    @property
    def seconds(self) -> float:
        """Length that all recordings are given, if it is one."""
        return (self.max_samples or 0) / self.rate

    def check_fits(self, config: PreTrainedConfig) -> None:
        """Raise ConfigError if the features of recordings of one length are not of the size that a model takes."""
        bins, made = getattr(config, "num_mel_bins", None), self.shape
        frames = 2 * getattr(config, "max_source_positions", 0) or getattr(config, "max_length", None)
        if self.is_fixed and bins is not None and sorted(made) != sorted([bins, frames]):
            raise ConfigError(
                f"{self.name} takes {frames} frames of {bins} frequencies, and its feature extractor makes "
                f"{' x '.join(map(str, made))}. Give it the feature extractor that it was trained with."
            )

    def num_frames(self, config: PreTrainedConfig, lengths_N: Any) -> Any:
        """Return how many frames a model that is given samples makes of recordings of these lengths, (N,); None of others."""
        if self.input != "input_values" or self.is_fixed or not hasattr(config, "conv_kernel"):
            return None
        frames_N = lengths_N
        for size, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            frames_N = (frames_N - size) // stride + 1
        return frames_N

    @staticmethod
    def least_frames(config: PreTrainedConfig) -> int:
        """Return the least frames that a recording must have: those that SpecAugment masks at once."""
        masks = getattr(config, "apply_spec_augment", True) and getattr(config, "mask_time_prob", 0) > 0
        return max(1, getattr(config, "mask_time_length", 1)) if masks else 1

    def _extracted(self, audio: Sequence[np.ndarray], **options: Any) -> Any:
        return self.extractor(list(audio), sampling_rate=self.rate, **options)

    def __call__(self, audio: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return the inputs of recordings, each (T,) float32, at ``rate``, normalized each by itself."""
        if self.is_fixed:
            return {self.input: self._extracted(audio, return_tensors="pt")[self.input]}
        if len(self.shape) == 1:  # still samples: transformers pads, and masks, one after the other
            values_NT, mask_NT = Ragged.of(self._extracted(audio)[self.input]).padded(self.extractor.padding_value)
            return {self.input: values_NT, "attention_mask": mask_NT}
        found = self._extracted(audio, return_tensors="pt", padding=True, return_attention_mask=True)
        return {name: found[name] for name in (self.input, "attention_mask")}


class ValidGroupNorm(nn.GroupNorm):
    """GroupNorm with a group for each channel, over the frames of the recording itself: not those of its padding.

    So a recording is normalized as if it were alone. transformers pads such models with zeros and gives them no mask, by which
    a recording's output depends on the longest one of its batch.
    """

    num_frames_B: Tensor | None = None
    """Of the recordings that come next, without padding; None: there is no padding."""

    def forward(self, input: Tensor) -> Tensor:
        if self.num_frames_B is None:
            return super().forward(input)
        x_BCF = input.float() if input.dtype != torch.float64 else input
        inside_B1F = (torch.arange(x_BCF.shape[-1], device=x_BCF.device) < self.num_frames_B[:, None])[:, None]
        count_B11 = self.num_frames_B[:, None, None]
        x_BCF = x_BCF - (x_BCF * inside_B1F).sum(-1, keepdim=True) / count_B11
        x_BCF = x_BCF * inside_B1F
        x_BCF = x_BCF * (x_BCF.square().sum(-1, keepdim=True) / count_B11 + self.eps).rsqrt()
        return (x_BCF * self.weight[:, None] + self.bias[:, None]).to(input.dtype)


def prepare_encoders(model: nn.Module) -> None:
    """Let the feature encoders of wav2vec 2.0 and its kin compute nothing in vain, in place.

    Those with ``feat_extract_norm=group`` leave out padding. None computes a gradient of the recordings, for which transformers
    (5.23) asks in the interest of reentrant checkpoints: that took a third of a step of ``ctc_demo``, and, if the encoder is
    frozen, takes a backward pass through all convolutions.
    """
    for module in model.modules():
        layers = getattr(getattr(module, "feature_extractor", None), "conv_layers", None)
        if layers is None:
            continue
        layers[0].register_forward_pre_hook(_without_gradient)
        if type(getattr(layers[0], "layer_norm", None)) is nn.GroupNorm:
            layers[0].layer_norm.__class__ = ValidGroupNorm  # keeps its weights, its place and everything that refers to it
            module.register_forward_pre_hook(_count_frames, with_kwargs=True)


def _without_gradient(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in args)


def _count_frames(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    layer, mask_BT = module.feature_extractor.conv_layers[0], kwargs.get("attention_mask")
    size, stride = layer.conv.kernel_size[0], layer.conv.stride[0]
    layer.layer_norm.num_frames_B = None if mask_BT is None else (mask_BT.sum(-1) - size) // stride + 1


def check_padding(model: PreTrainedModel, listener: Listener, **inputs: Tensor) -> None:
    """Compare a recording alone with the same one beside a longer one, unless all are padded to one length anyway.

    Args:
        inputs: what the model is given of each besides, (1, T).

    Raises:
        ConfigError: the model cannot take it, or its output depends on the other one, as it then would on the micro-batches.
    """
    if listener.is_fixed or next(model.parameters()).device.type == "meta":
        return
    noise_T = np.random.RandomState(0).randn(listener.rate).astype(np.float32) / 10
    short_T = noise_T[: listener.rate * 3 // 5]
    try:
        with trying(model):
            alone, beside = (
                model(**listener(audio), **{name: value.repeat(len(audio), 1) for name, value in inputs.items()})
                .logits[0]
                .float()
                for audio in ([short_T], [short_T, noise_T])
            )
    except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(f"{listener.name} does not take what its feature extractor makes: {message_of(error)}.") from error
    difference = float((alone - beside[: len(alone)]).abs().max()) / max(1.0, float(alone.abs().max()))
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"{listener.name}: what this {type(model).__name__} answers for a recording depends on how long the ones beside it "
            f"are (by {difference:.2g} in a trial), although they are masked, so that a loss would depend on micro-batches and "
            "processes. Use a model that masks its padding, such as facebook/wav2vec2-base, or one with recordings of a fixed "
            "length, such as openai/whisper-tiny."
        )
