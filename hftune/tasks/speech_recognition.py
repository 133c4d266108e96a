"""Speech recognition: by connectionist temporal classification (CTC), or by an encoder-decoder such as Whisper.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: N recordings, F frames, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.config.keys import key
from hftune.data.columns import AUDIO, FILES, Role
from hftune.errors import ConfigError, DataError
from hftune.metrics.records import directions
from hftune.tasks.audio import AudioTask
from hftune.tasks.late_rows import late_rows
from hftune.tasks.text import NO_LABEL, number_of, split_of, token_loss

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.audio import Recordings
    from hftune.task import Batch

TRANSCRIPTS = ("text", "sentence", "transcription", "transcript", "transcripts")
"""Usual names of a column of what is said."""


@dataclass
class Transcription(AudioTask):
    """Base of tasks that write what a recording says. An item is a token of the text.

    Samples have ``audio``, ``labels`` (tokens) and ``index``, their row.
    """

    text_column: str | None = None
    """Column of what the recordings say. null: the only one that can be it."""
    case: Literal["keep", "lower", "upper"] = "keep"
    """Whether the texts are in lower or upper case for training and metrics; keep: as they are."""
    ignored_characters: str = ""
    """Characters that are left out of the texts for training and metrics, such as ",.?!"."""
    max_seconds: float = key(30.0, gt=0)
    """Maximum length of a recording in seconds. A longer one is refused, as its text cannot be cut to fit."""

    columns: ClassVar[Mapping[str, Role]] = {
        "audio": Role("recording", AUDIO, usual_inputs=FILES),
        "text": Role("text", TRANSCRIPTS, optional_in={"predict"}),
    }
    metric_directions = directions("wer", "cer")
    sample_fields = ("target", "generated")
    does = "recognize speech so"
    libraries = (*AudioTask.libraries, "hftune.models.pretrained")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if find_spec("jiwer") is None:  # the first evaluation would find it missing
            yield f'task.type={type(self).__name__} needs jiwer, which is not installed: pip install "hftune[audio]".'

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        from hftune.data.rows import check_texts

        super().check_rows(rows)
        for split, own in rows.items():
            check_texts(own, self.read_columns["text_column"], split)

    def normalized(self, text: str) -> str:
        """Return a text as ``case`` and ``ignored_characters`` say, its words separated by single spaces."""
        text = {"lower": text.lower(), "upper": text.upper()}.get(self.case, text)
        return " ".join(text.translate(dict.fromkeys(map(ord, self.ignored_characters))).split())

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        """The normalized texts of each split.

        Raises:
            DataError: one has only characters that are left out.
        """
        column, found = self.read_columns["text_column"], {}
        for split, rows in self.rows.items():
            found[split] = [self.normalized(text) for text in rows[column][:]]
            if "" in found[split]:
                row = self.row_of(split)(found[split].index(""))
                raise DataError(
                    f"Row {row} of the {split} split has no characters in column {column!r} but those of "
                    f"task.ignored_characters={self.ignored_characters!r}. Remove it, or keep some of them."
                )
        return found

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or, for a new one, one made of the training texts."""
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text that the model learns to write."""
        raise NotImplementedError

    def datasets(self) -> dict[str, Recordings]:
        """Return the splits. A sample has ``audio`` (T,) float32, ``labels`` (tokens) and ``index``."""
        from hftune.data.audio import Recordings
        from hftune.data.tokenized import Ragged

        rate = self.listener.rate  # refuses a model that does not recognize speech before the data are read
        found = {}
        for split, texts in self.texts.items():
            audio, row_of = self.audio[split], self.row_of(split)
            if (long := audio.lengths > self.longest).any():
                index = int(long.argmax())
                limit = f"task.max_seconds={self.max_seconds:g}"
                if self.longest == self.listener.max_samples:
                    limit = f"the {self.listener.seconds:.3g} s that {self._model_name} hears at once"
                raise DataError(
                    f"Row {row_of(index)} of the {split} split is a recording of {audio.lengths[index] / rate:.3g} s, longer "
                    f"than {limit}. Cut it, and its text, into parts, or remove it."
                )
            labels = Ragged.of(self.encode(texts))
            found[split] = Recordings(
                audio, {"labels": labels, "index": range(len(texts)), "split": [number_of(split)] * len(texts)}
            )
            self.check_labels(found[split], split)
        return found

    def check_labels(self, dataset: Recordings, split: str) -> None:
        """Raise DataError if a text does not fit its recording, or the model."""

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the model's inputs, see ``heard``; labels (N, T) int64, padded with NO_LABEL; index (N,), the row
        of the split; and split (N,), its ``number_of``."""
        from hftune.data.tokenized import ragged, values

        labels_NT, _ = ragged(examples, "labels").padded(NO_LABEL)
        return {**self.heard(examples), "labels": labels_NT, **{name: values(examples, name) for name in ("index", "split")}}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {name: batch[name] for name in (self.listener.input, "attention_mask") if name in batch}

    def rows_of(self, texts: Sequence[str], batch: Batch) -> list[dict[str, Any]]:
        """Return rows of the text in the data, target, and of what the model has written, generated."""
        own = self.texts[split_of(self.rows, batch)]
        pairs = zip(batch["index"].tolist(), texts, strict=True)
        return [{"target": own[index], "generated": self.normalized(text)} for index, text in pairs]

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with their character error rates, which are the errors, too."""
        from hftune.metrics.speech import character_errors

        rates = character_errors([row["generated"] for row in rows], [row["target"] for row in rows])
        return [{**row, "cer": round(rate, 6), "error": round(rate, 6)} for row, rate in zip(rows, rates, strict=True)]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.speech import error_rates

        return error_rates([row["generated"] for row in rows], [row["target"] for row in rows])

    def read_inputs(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        found, rate = super().read_inputs(inputs), self.listener.rate
        for index, example in enumerate(found):
            if len(example["audio"]) > self.longest:
                seconds, most = len(example["audio"]) / rate, self.longest / rate
                raise DataError(
                    f"Input {index} is a recording of {seconds:.3g} s, and the most is {most:.3g} s. Cut it into parts."
                )
        return found

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model, feature extractor and tokenizer for ``from_pretrained``."""
        super().save(model, directory)
        self.text_tokenizer.save_pretrained(directory)

    def load(self, directory: Path) -> PreTrainedModel:
        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        return super().load(directory)

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "automatic-speech-recognition"}


@dataclass
class SpeechRecognition(Transcription):
    """Recognize speech by CTC. The loss is that of all ways to align a text with the frames; an item is a character.

    Source: Graves et al., "Connectionist Temporal Classification" (2006), section 4.
    """

    vocabulary: Literal["auto", "model", "texts"] = key("auto", changes="model")
    """The characters that the model writes. model: those of its tokenizer; texts: those of the training texts, sorted, with a
    new head unless they are the model's; auto: of its tokenizer, if it has one."""

    auto_class = "AutoModelForCTC"
    examples = "facebook/wav2vec2-base, facebook/hubert-large-ll60k or microsoft/wavlm-large"

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.vocabulary == "model" and self.model is None:
            yield "task.vocabulary=model: a new model has no tokenizer. Set it to texts."

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        from hftune.models.audio import character_tokenizer
        from hftune.models.pretrained import load_tokenizer

        if self._keeps_vocabulary:
            return load_tokenizer(str(self.model), commit=self.model_commit)
        return character_tokenizer(self.texts["train"])

    @cached_property
    def _keeps_vocabulary(self) -> bool:
        from hftune.models.audio import has_tokenizer

        if self.model is None or self.vocabulary == "texts":
            return False
        return self.vocabulary == "model" or has_tokenizer(self.model, self.model_commit)

    @property
    def _own_vocabulary(self) -> dict[str, int] | None:
        """Numbers of the tokens of the model's own tokenizer, if it has one."""
        from hftune.models.audio import has_tokenizer
        from hftune.models.pretrained import load_tokenizer

        model, commit = str(self.model), self.model_commit
        return load_tokenizer(model, commit=commit).get_vocab() if has_tokenizer(model, commit) else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.text_tokenizer([*texts])["input_ids"]

    def check_labels(self, dataset: Recordings, split: str) -> None:
        import torch

        labels, unknown = dataset.columns["labels"], self.text_tokenizer.unk_token_id
        if split == "train" and unknown is not None and (labels.flat == unknown).any():
            index = next(index for index, tokens in enumerate(labels.rows()) if (tokens == unknown).any())
            known = {*self.text_tokenizer.get_vocab(), " "}
            text = self.texts[split][index]
            missing = "".join(sorted({*text} - known)) or text
            raise DataError(
                f"Row {self.row_of(split)(index)} of the train split has characters that the tokenizer of {self._model_name} "
                f"does not know: {missing!r}. Set task.case=upper or lower, name them in task.ignored_characters, or learn the "
                "characters of the texts: task.vocabulary=texts."
            )
        if self.listener.input != "input_values":
            self._check_dense(dataset, split)
        else:
            for start in range(0, len(dataset), 1000):
                chunk = range(start, min(start + 1000, len(dataset)))
                labels_NT, _ = labels.take(chunk).padded(NO_LABEL)
                frames_N = self._num_frames(torch.from_numpy(dataset.audio.lengths[chunk.start : chunk.stop].astype("int64")))
                names = [f"Row {self.row_of(split)(index)} of the {split} split" for index in chunk]
                self._check_frames(frames_N, labels_NT, names.__getitem__)

    def _check_dense(self, dataset: Recordings, split: str) -> None:
        """Check the frames of a model that is given features: of recordings that may have too few, as features take long.

        Those have less than twice the frames that their texts need, by the share of a long recording's that is theirs.
        """
        import numpy as np

        labels, audio = dataset.columns["labels"], dataset.audio
        frames = int(self._frames(self.listener([np.zeros(self.longest, np.float32)]))[0])
        repeats = (labels.flat[1:] == labels.flat[:-1]).astype(np.int64)  # also between two texts: at most too many
        needed_N = labels.lengths + np.add.reduceat(np.append(repeats, 0), labels.offsets[:-1])
        for index in (needed_N * 2 * self.longest > frames * audio.lengths).nonzero()[0].tolist():
            self.collate([dataset[index]])

    @staticmethod
    def _check_frames(frames_N: Tensor, labels_NT: Tensor, name: Callable[[int], str]) -> None:
        """Raise DataError if a text needs more frames than its recording has: one for each character, and one between equals.

        Its loss would be infinite, or, with the zero_infinity of others, left out in silence.
        """
        is_label_NT = labels_NT != NO_LABEL
        needed_N = is_label_NT.sum(1) + ((labels_NT[:, 1:] == labels_NT[:, :-1]) & is_label_NT[:, 1:]).sum(1)
        if (short_N := needed_N > frames_N).any():
            place = int(short_N.int().argmax())
            raise DataError(
                f"{name(place)} has a text that needs {int(needed_N[place])} frames, and a recording of {int(frames_N[place])}:"
                " CTC cannot align them. Correct or remove it."
            )

    @cached_property
    def _num_frames(self) -> Callable[[Tensor], Tensor]:
        """The model's own function from lengths of inputs to frames of logits, of an instance without layers."""
        from torch import nn
        from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING

        kind = MODEL_FOR_CTC_MAPPING[type(self.named_config)]
        model = kind.__new__(kind)
        nn.Module.__init__(model)
        model.config = self.named_config
        names = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
        found = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        if found is None:
            raise ConfigError(f"{self._model_name}: transformers does not say how many frames a {kind.__name__} makes.")
        return found

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Add ``frames`` (N,) int64, those of each recording without its padding."""
        batch = super().collate(examples)
        batch["frames"] = self._frames(batch)
        self._check_frames(batch["frames"], batch["labels"], lambda place: self._name_of(batch, place))
        return batch

    def _frames(self, batch: Batch) -> Tensor:
        """Return the frames of logits, (N,) int64, of what the model is given."""
        inputs = batch[self.listener.input]
        lengths_N = (
            batch["attention_mask"].sum(-1) if "attention_mask" in batch else inputs.new_full((len(inputs),), inputs.shape[1])
        )
        return self._num_frames(lengths_N.long()).long()

    def _name_of(self, batch: Batch, place: int) -> str:
        split = split_of(self.rows, batch)
        return f"Row {self.row_of(split)(int(batch['index'][place]))} of the {split} split"

    def build_model(self) -> PreTrainedModel:
        from hftune.models.audio import check_padding
        from hftune.models.kinds import drawn_parameters
        from hftune.models.pretrained import loading

        tokens, config = self.text_tokenizer, deepcopy(self.named_config)
        config.pad_token_id = tokens.pad_token_id
        for name in ("bos_token_id", "eos_token_id"):
            setattr(config, name, getattr(tokens, name))
        if not self._keeps_vocabulary:
            config.vocab_size = len(tokens)
        has_new_head = self.model is not None and not self._keeps_vocabulary and tokens.get_vocab() != self._own_vocabulary
        with loading(**({"unread": False} if has_new_head else {})):
            model = self.load_model(config)
        for name, child in model.named_children() if has_new_head else ():
            # transformers keeps a head for as many other characters
            if child is not model.base_model and hasattr(child, "reset_parameters"):
                child.reset_parameters()
                drawn = {*drawn_parameters(model), *(f"{name}.{own}" for own, _ in child.named_parameters())}
                model.drawn_parameters = sorted(drawn)
        check_padding(model, self.listener)
        return model

    def target(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("labels", "frames")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return int((target["labels"] != NO_LABEL).sum())

    def loss(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        return self.sample_losses(outputs, target).sum()

    def sample_losses(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Return the negative log-probability of each text, (N,) float32 or float64.

        It is computed on the CPU, also for logits elsewhere: on GPUs, torch adds its gradients up in any order.
        """
        import torch
        from torch.nn.functional import ctc_loss

        logits_NFV, labels_NT = outputs.logits, target["labels"]
        logits_NFV = logits_NFV if logits_NFV.dtype == torch.float64 else logits_NFV.float()
        counts_N = (labels_NT != NO_LABEL).sum(1)
        log_probs_FNV = logits_NFV.log_softmax(-1).transpose(0, 1)
        given = (labels_NT.clamp(min=0), target["frames"], counts_N)
        labels_NT, frames_N, counts_N = (value.to("cpu", non_blocking=value.is_cuda) for value in given)
        log_probs_FNV = log_probs_FNV.cpu()  # waits for those before it, too
        blank = self.text_tokenizer.pad_token_id
        return ctc_loss(log_probs_FNV, labels_NT, frames_N, counts_N, blank, reduction="none").to(logits_NFV.device)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of target and generated: the most probable token of each frame, without repetitions and blanks."""
        own = {name: batch[name] for name in ("frames", "index", "split") if name in batch}
        rows = lambda ids_NF, own: self.rows_of(self._decoded(ids_NF, own["frames"]), own)  # noqa: E731
        return late_rows(rows, outputs.logits.argmax(-1), own)

    def _decoded(self, ids_NF: Tensor, frames_N: Tensor) -> list[str]:
        pairs = zip(ids_NF.tolist(), frames_N.tolist(), strict=True)
        return [self.text_tokenizer.decode(ids[:frames]) for ids, frames in pairs]

    def predict(self, model: PreTrainedModel, inputs: list) -> list[dict[str, Any]]:
        """Return a row for each path, array or {array, sampling_rate}, whose ``generated`` is what is said."""
        batch = self.answer_inputs(model, inputs)
        frames_N = self._num_frames(batch["attention_mask"].sum(-1))
        return [{"generated": text} for text in self._decoded(model(**batch).logits.argmax(-1), frames_N)]


@dataclass
class SpeechToText(Transcription):
    """Recognize speech with an encoder-decoder such as Whisper. The loss is cross-entropy; an item is a token of the text, its
    end included, but not those that tell language and task."""

    language: str | None = None
    """Language of the texts, for models of several: a code such as de, which the model is told in training and afterwards."""
    max_target_length: int = key(225, ge=4)
    """Maximum length of a text in tokens. A longer one is refused."""
    vocab_size: int = key(1024, ge=100)
    """Vocabulary size of the tokenizer that is trained on the texts if model is null."""
    generation: dict[str, Any] = key(dict, changes="output")
    """Generation settings, such as num_beams or length_penalty: fields of transformers' GenerationConfig."""

    auto_class = "AutoModelForSpeechSeq2Seq"
    examples = "openai/whisper-small or distil-whisper/distil-large-v3"
    libraries = (*Transcription.libraries, "hftune.models.generation")

    # Texts

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        from hftune.models.pretrained import load_tokenizer

        if self.model is None:
            from hftune.data.byte_tokenizer import train_bytes
            from hftune.models.audio import whisper_tokenizer

            return whisper_tokenizer(train_bytes(self.texts["train"], self.vocab_size, special_tokens=()))
        return self._for_language(load_tokenizer(self.model, commit=self.model_commit))

    def _for_language(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Set the language of a tokenizer that has some.

        Raises:
            ConfigError: it has none, or not this one.
        """
        if self.language is None:
            return tokenizer
        if not hasattr(tokenizer, "set_prefix_tokens") or f"<|{self.language}|>" not in tokenizer.get_vocab():
            raise ConfigError(f"task.language={self.language} is not a language code of {self._model_name}, such as en or de.")
        tokenizer.set_prefix_tokens(language=self.language, task="transcribe", predict_timestamps=False)
        return tokenizer

    @cached_property
    def start(self) -> list[int]:
        """The tokens that each text begins with: the decoder's start token, and those of language and task."""
        prefix = [int(token) for token in getattr(self.text_tokenizer, "prefix_tokens", ())]
        first = self._generation_config.decoder_start_token_id
        return prefix if prefix[:1] == [first] else [first, *prefix]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokens = self.text_tokenizer
        ids = tokens([*texts], add_special_tokens=False)["input_ids"]
        return [[*found, tokens.eos_token_id] for found in ids]

    def check_labels(self, dataset: Recordings, split: str) -> None:
        lengths_N = dataset.columns["labels"].lengths
        if (long := lengths_N > self.max_target_length).any():
            index = int(long.argmax())
            raise DataError(
                f"Row {self.row_of(split)(index)} of the {split} split has a text of {lengths_N[index]} tokens, more than "
                f"task.max_target_length={self.max_target_length}. Cut it and its recording, remove it, or raise that."
            )

    # Model

    @cached_property
    def _generation_config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        from hftune.models.generation import changed, tidy
        from hftune.models.pretrained import CONFIG, folder_of

        if self.model is None:
            tokens = self.text_tokenizer
            start, times = tokens.prefix_tokens
            config = GenerationConfig(pad_token_id=tokens.pad_token_id, eos_token_id=tokens.eos_token_id)
            config.decoder_start_token_id, config.no_timestamps_token_id = start, times
            config.is_multilingual = False
        elif (folder_of(self.model, self.model_commit, CONFIG) / CONFIG[1]).is_file():
            config = GenerationConfig.from_pretrained(folder_of(self.model, self.model_commit, CONFIG))
        else:
            config = GenerationConfig.from_model_config(self.named_config)
        if self.language is None and getattr(config, "is_multilingual", False):
            raise ConfigError(
                f"{self._model_name} writes several languages: set task.language to that of the texts, such as de."
            )
        if self.language is not None:
            config.language, config.task = self.language, "transcribe"
        config.update(max_length=None, forced_decoder_ids=None)
        return changed(tidy(config, self.generation), {"max_new_tokens": self.max_target_length, **self.generation})

    def build_model(self) -> PreTrainedModel:
        import torch

        from hftune.models.audio import check_padding

        config = deepcopy(self.named_config)
        if self.model is None:
            tokens = self.text_tokenizer
            special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokens.eos_token_id)
            config.update({**special, "decoder_start_token_id": self.start[0], "vocab_size": len(tokens)})
        model = self.load_model(config)
        positions, needed = getattr(config, "max_target_positions", None), len(self.start) + self.max_target_length
        if positions is not None and positions < needed:
            raise ConfigError(
                f"task.max_target_length={self.max_target_length}, and the {len(self.start)} tokens before a text, exceed the "
                f"decoder's {positions} positions. Lower it."
            )
        model.generation_config = deepcopy(self._generation_config)
        check_padding(model, self.listener, decoder_input_ids=torch.tensor([self.start], device=model.device))
        return model

    def lengths(self, dataset: Recordings) -> np.ndarray:
        return self.sizes(dataset).sum(1)

    def sizes(self, dataset: Recordings) -> np.ndarray:
        """Return the samples of recording and the tokens of text, (N, 2), which ``collate`` pads independently; of a feature
        extractor that makes all recordings equally long, those samples."""
        import numpy as np

        labels_N, audio_N = dataset.columns["labels"].lengths, super().lengths(dataset)
        return np.stack([np.full(len(dataset), self.longest) if audio_N is None else audio_N, labels_N], 1)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Add decoder_input_ids: the start of each text and the text, without its last token, (N, S + T - 1) int64; the labels
        of the start are NO_LABEL."""
        import torch

        batch = super().collate(examples)
        labels_NT, start_S = batch["labels"], torch.tensor(self.start)
        start_NS = start_S.expand(len(labels_NT), -1)
        texts_NT = labels_NT.masked_fill(labels_NT == NO_LABEL, self.text_tokenizer.pad_token_id)
        batch["decoder_input_ids"] = torch.cat([start_NS, texts_NT[:, :-1]], 1)
        batch["labels"] = torch.cat([torch.full_like(start_NS[:, 1:], NO_LABEL), labels_NT], 1)
        return batch

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {**super().inputs(batch), "decoder_input_ids": batch["decoder_input_ids"], "use_cache": False}

    def evaluation_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return ``inputs``, and keep the cache: texts are generated from it, so that recordings are heard once."""
        return {**self.inputs(batch), "use_cache": True}

    @property
    def rows_per_sample(self) -> int:
        return int(self._generation_config.num_beams or 1)

    def num_items(self, target: Tensor) -> int:
        return int((target != NO_LABEL).sum())

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return token_loss(outputs.logits, target)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Generate texts. Return rows of target and generated."""
        return self.rows_of(self._generate(outputs, model, batch), batch)

    def _generate(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[str]:
        """Generate texts, going on from what the model returned for ``evaluation_inputs``, whose cache this uses up."""
        import torch
        from transformers import GenerationMixin

        from hftune.models.generation import continued

        prompt = Transcription.inputs(self, batch)
        start_NS = torch.tensor(self.start, device=model.device).expand(len(batch["labels"]), -1)
        given = continued(outputs, batch["labels"].shape[1], model.generation_config)
        # Whisper's own generate is for recordings of any length, and finds out language and task, which are known here.
        ids = GenerationMixin.generate(model, **prompt, **given, decoder_input_ids=start_NS)
        return self.text_tokenizer.batch_decode(ids[:, len(self.start) :], skip_special_tokens=True)

    def predict(self, model: PreTrainedModel, inputs: list) -> list[dict[str, Any]]:
        """Return a row for each path, array or {array, sampling_rate}, whose ``generated`` is what is said."""
        end = [self.text_tokenizer.eos_token_id]
        examples = [{**example, "labels": end, "index": 0, "split": 0} for example in self.read_inputs(inputs)]
        batch = {name: value.to(model.device) for name, value in self.collate(examples).items()}
        outputs = model(**self.evaluation_inputs(batch))
        return [{"generated": text} for text in self._generate(outputs, model, batch)]

    def load(self, directory: Path) -> PreTrainedModel:
        from hftune.models.generation import changed, tidy

        model = super().load(directory)
        self.text_tokenizer = self._for_language(self.text_tokenizer)
        settings = {"max_new_tokens": self.max_target_length, **self.generation}  # the recipe's may have changed since
        self._generation_config = changed(tidy(model.generation_config, self.generation), settings)
        return model
