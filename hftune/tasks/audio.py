"""The base of tasks on recordings: keys for model and data, what the model hears, loading and saving.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import KINDS, is_text
from hftune.data.files import local_files, model_folder_problems
from hftune.errors import DataError
from hftune.tasks.folders import Pretrained

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from hftune.data.audio import Recordings
    from hftune.data.tokenized import Ragged
    from hftune.models.audio import Listener
    from hftune.task import Batch


@dataclass
class AudioTask(Pretrained):
    """Base of tasks on recordings, with a model of transformers and its feature extractor.

    Recordings are padded to the longest of a micro-batch, with an attention mask: speech models have no packing.
    """

    model: str | None = key(None, changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config."""
    model_revision: str | None = key(None, changes="model")
    """Commit, tag or branch of the model on the Hub. null: the newest commit."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override, such as mask_time_prob (SpecAugment); if model is null, the whole config of a
    new one, such as {model_type: wav2vec2, ...}."""
    weights: str | None = key(None, changes="model", resume="harmless")
    """Weights of your own to start from, after those of model: a safetensors or PyTorch file, or a folder with one, copied by
    name. null: none."""
    dataset: str | None = key("audiofolder", changes="data")
    """Data set name on the Hub (owner/name); audiofolder with data_dir; the format of data_files; or module:function that
    returns rows."""
    data_dir: str | None = key(None, changes="data")
    """Folder with the recordings of audiofolder, wav, flac, mp3 or ogg files: one folder for each class, or a metadata.csv
    with a column file_name."""
    audio_column: str | None = None
    """Column of the recordings: files, arrays with their rate ({array, sampling_rate}), or paths, also relative to the table's
    folder. null: the only one that can be it."""
    max_seconds: float = key(20.0, gt=0)
    """Maximum length of a recording in seconds."""

    rows_are = "recordings"
    instead_of_hub = "task.dataset=audiofolder task.data_dir=FOLDER, or task.data_files.train=... task.data_files.eval=..."
    libraries: ClassVar[Sequence[str]] = ("hftune.data.rows", "hftune.data.notices", "hftune.data.audio", "hftune.models.audio")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        yield from model_folder_problems(self.model, self.model_config, "wav2vec2")

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        for split, own in rows.items():
            for column in self.columns_for("audio"):
                kind = own.features[column]
                if not (KINDS["recording"](kind) or is_text(kind)):
                    found = getattr(kind, "dtype", kind)
                    raise DataError(
                        f"Column {column!r} of the {split} split holds {found}, neither recordings nor their paths."
                    )

    # What the model hears

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        return self.checked_config()

    @cached_property
    def listener(self) -> Listener:
        """The feature extractor of the model."""
        from hftune.models.audio import Listener, load_feature_extractor, new_feature_extractor

        config = self.named_config
        new = self.model is None
        extractor = new_feature_extractor(config) if new else load_feature_extractor(str(self.model), self.model_commit)
        listener = Listener(extractor, self._model_name)
        listener.check_fits(config)
        return listener

    @property
    def longest(self) -> int:
        """Most samples of a recording that the model is given."""
        most = int(self.max_seconds * self.listener.rate)
        return min(most, self.listener.max_samples or most)

    @cached_property
    def audio(self) -> dict[str, Ragged]:
        """The recordings of each split: samples at the feature extractor's rate.

        Raises:
            DataError: one cannot be read, or is too short for the model.
        """
        from hftune.data.audio import decode_recordings

        column, rate, folders = self.read_columns["audio_column"], self.listener.rate, self._folders
        found = {split: decode_recordings(rows, column, split, rate, folders[split]) for split, rows in self.rows.items()}
        for split, own in found.items():
            frames_N, least = (
                self.listener.num_frames(self.named_config, own.lengths),
                self.listener.least_frames(self.named_config),
            )
            if frames_N is not None and (short := frames_N < least).any():
                index = int(short.argmax())
                raise DataError(
                    f"Row {self.row_of(split)(index)} of the {split} split is a recording of {own.lengths[index] / rate:.3g} s,"
                    f" {max(0, int(frames_N[index]))} frames of the model, which needs {least}. Remove it"
                    + (", or set task.model_config.mask_time_length to less." if least > 1 else ".")
                )
        return found

    @property
    def _folders(self) -> dict[str, list[Path]]:
        """Folders of the tables, to which paths in them are relative, by split."""
        found = {}
        for split in self.rows:
            source = self.source_of(split)
            paths = source.paths(split if split in source.files else "train") if source.kind == "files" else []
            found[split] = sorted({Path(file).parent for path in paths for file in local_files(path)})
        return found

    def lengths(self, dataset: Recordings) -> np.ndarray | None:
        """Return the samples of each recording; None if the feature extractor makes all equally long."""
        return None if self.listener.is_fixed else dataset.audio.lengths.clip(max=self.longest)

    def heard(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the model's inputs for samples: input_values or input_features, and attention_mask unless all are of one
        length, which the feature extractor then gives them."""
        return self.listener([example["audio"][: self.longest] for example in examples])

    def read_inputs(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        """Return samples of raw inputs: paths, arrays at the feature extractor's rate, or {array, sampling_rate}."""
        from hftune.data.audio import read_audio

        return [{"audio": read_audio(value, f"Input {index}", self.listener.rate)} for index, value in enumerate(inputs)]

    def sample_images(self, outputs: Any, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return spectrograms of what the model hears."""
        from hftune.data.audio import spectrogram_picture

        pictures = []
        for index in indices:
            values = batch[self.listener.input][index].float().cpu().numpy()
            if "attention_mask" in batch:
                values = values[: int(batch["attention_mask"][index].sum())]
            is_upright = values.ndim == 1 or values.shape[0] < values.shape[1]  # frames are more than frequencies
            pictures.append(spectrogram_picture(values if is_upright else values.T))
        return pictures

    def notices(self, datasets: Mapping[str, Recordings], model: PreTrainedModel) -> list[str]:
        from hftune.data import notices
        from hftune.data.audio import durations

        rate, info = self.listener.rate, self.rows["train"].info
        messages = [*self.row_notices(), *notices.unused_splits(self, () if self.data_files else info.splits or ())]
        messages += [f"{split}: {durations(own.audio.lengths, rate)}." for split, own in datasets.items()]
        if self.listener.is_fixed:
            messages.append(f"{self._model_name}: its feature extractor pads all recordings to {self.listener.seconds:.3g} s.")
        return [*messages, *notices.shared({split: own.audio for split, own in datasets.items()}, "recordings")]

    # The model

    def load_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Load the model with a config, or build a new one, whose answers for a recording do not depend on those beside it.

        Raises:
            ConfigError: it does not take what its feature extractor makes, or depends on padding.
        """
        import transformers

        from hftune.models.audio import prepare_encoders
        from hftune.models.pretrained import load_model

        model = load_model(getattr(transformers, self.auto_class), self.model, config, self.model_commit)
        prepare_encoders(model)
        return model

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and feature extractor for ``from_pretrained``."""
        from hftune.models.kinds import FILE_SIZE

        model.save_pretrained(directory, max_shard_size=FILE_SIZE)
        self.listener.extractor.save_pretrained(directory)

    def load(self, directory: Path) -> PreTrainedModel:
        import transformers

        from hftune.models.audio import Listener, load_feature_extractor, prepare_encoders
        from hftune.models.pretrained import load_saved, saved_config

        self.listener = Listener(load_feature_extractor(str(directory), None), str(directory))
        self.named_config = saved_config(directory)
        model = load_saved(getattr(transformers, self.auto_class), directory, self.named_config)
        prepare_encoders(model)
        return model

    def answer_inputs(self, model: PreTrainedModel, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Return what the model is given for raw inputs, on its device."""
        return {name: value.to(model.device) for name, value in self.heard(self.read_inputs(inputs)).items()}

    def example_inputs(self) -> list[np.ndarray]:
        return [audio.copy() for audio in self.audio.get("eval", self.audio["train"]).rows()[:2]]
