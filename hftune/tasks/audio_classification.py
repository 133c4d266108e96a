"""Audio classification with a pretrained model of transformers: wav2vec 2.0, HuBERT, AST, Whisper's encoder and others.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import AUDIO, FILES, LABELS, Role
from hftune.metrics.records import directions
from hftune.tasks.audio import AudioTask
from hftune.tasks.folders import Classified, head_notice
from hftune.tasks.problems import SingleLabel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from transformers import PreTrainedModel

    from hftune.data.audio import Recordings
    from hftune.task import Batch


@dataclass
class AudioClassification(AudioTask, Classified):
    """Classify recordings. The loss is cross-entropy; an item is a recording."""

    label_column: str | None = None
    """Column of the labels: class names, or class numbers (from 0 if label_names is set). null: the only one that could be
    it."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    max_seconds: float = key(20.0, gt=0)
    """Maximum length of a recording in seconds, at most that of the model's feature extractor. Of a longer one, training takes
    a random part, a different one in each epoch, and an evaluation the beginning."""
    label_smoothing: float = key(0.0, ge=0, lt=1, changes="forward backward")
    """Share of each label that is spread over all classes, in [0, 1), in the losses of training and evaluation."""

    columns: ClassVar[Mapping[str, Role]] = {
        "audio": Role("recording", AUDIO, usual_inputs=FILES),
        "label": Role("label", LABELS, optional_in={"predict"}),
    }
    metric_directions = directions("accuracy", "macro_f1", "mcc")
    auto_class = "AutoModelForAudioClassification"
    does = "classify recordings"
    examples = "facebook/wav2vec2-base, MIT/ast-finetuned-audioset-10-10-0.4593 or openai/whisper-base"

    def datasets(self) -> dict[str, Recordings]:
        """Return the splits. A sample has ``audio`` (T,) float32 and a label, its class number."""
        from hftune.data.audio import Recordings

        _ = self.listener  # refuses a model that does not classify recordings before the data are read
        numbers = self.class_numbers()
        return {split: Recordings(audio, {"label": numbers[split]}) for split, audio in self.audio.items()}

    def numbers_of(self, dataset: Recordings) -> Sequence[int]:
        return dataset.columns["label"]

    def build_model(self) -> PreTrainedModel:
        from hftune.models.audio import check_padding

        names, config = dict(enumerate(self.labels)), deepcopy(self.named_config)
        config.id2label, config.label2id = names, {name: number for number, name in names.items()}
        model = self.load_model(config)
        check_padding(model, self.listener)
        return model

    def notices(self, datasets: Mapping[str, Recordings], model: PreTrainedModel) -> list[str]:
        messages, seconds = [*super().notices(datasets, model), *self._classes.notices()], self.longest / self.listener.rate
        shares = {split: (own.audio.lengths > self.longest).mean() for split, own in datasets.items()}
        if cut := " and ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share):
            messages.append(f"Recordings longer than {seconds:.3g} s are cut (task.max_seconds): {cut}.")
        if self.model is None:
            return messages
        return [*messages, head_notice(self._model_name, self.named_config, self.labels)]

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Take a random part of a recording that is too long."""
        spare = len(example["audio"]) - self.longest
        return example if spare <= 0 else {**example, "audio": example["audio"][rng.randint(spare + 1) :]}

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Return the model's inputs, see ``heard``, and labels (N,) int64."""
        import torch

        return {**self.heard(examples), "labels": torch.tensor([example["label"] for example in examples])}

    def load(self, directory: Path) -> PreTrainedModel:
        """Load the model and the class names that ``save`` wrote."""
        model = super().load(directory)
        self.label_names = [model.config.id2label[number] for number in range(model.config.num_labels)]
        return model

    def predict(self, model: PreTrainedModel, inputs: list, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return the most probable label, by name, and its probability for each path, array or {array, sampling_rate}.

        ``probabilities`` adds those of all classes. Of long recordings, the beginning counts.
        """
        logits_NK = model(**self.answer_inputs(model, inputs)).logits
        return SingleLabel.answers(logits_NK, self.labels, probabilities)

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "audio-classification"}
