"""What the tasks share that write one text for another: columns, lengths, generation, and the rows of an evaluation.

torch and transformers are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.tasks.text import SHOWN, TextTask, count_labels, head_loss, pieces

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel

    from hftune.task import Batch


@dataclass
class SourceToTarget(TextTask):
    """Base of tasks that write a target text for a source text. An item is a token of the target, its end token included.

    Samples have the tokens of both texts, ``source`` and ``target_name``, and ``index``, their row. Texts are generated from
    the cache of the forward pass that computes the loss, so that an evaluation reads each source once.
    """

    source_column: str | None = None
    """Column of the source texts."""
    target_column: str | None = None
    """Column of the target texts."""
    max_source_length: int = 512
    """Maximum length of a source in tokens; longer sources are truncated at the end."""
    max_target_length: int = 128
    """Maximum length of a target in tokens, for references and generated texts."""
    generation: dict[str, Any] = key(dict, changes="output")
    """Generation settings, such as num_beams or length_penalty: fields of transformers' GenerationConfig."""

    target_name: ClassVar[str] = "target"
    """Name of a target in samples and in the rows of an evaluation."""
    source_shown: ClassVar[int] = SHOWN
    """Characters of a source in the rows of an evaluation."""
    libraries = (*TextTask.libraries, "hftune.models.generation")
    scored_head = True
    text_keys = ("source_column", "target_column")
    length_keys = ("max_source_length", "max_target_length")

    def validate(self) -> list[str]:
        return [*super().validate(), *self._generation_problems()]

    def _generation_problems(self) -> Iterator[str]:
        count = self.generation.get("num_return_sequences")
        if count not in (None, 1):
            yield f"task.generation.num_return_sequences={count} must be 1: each source has one target. Leave it out."

    @property
    def _source(self) -> str:
        """Column of the source texts."""
        return self._columns["source_column"]

    @property
    def _target(self) -> str:
        """Column of the target texts."""
        return self._columns["target_column"]

    def source_ids(self, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Return the tokens of each source as the model reads them, and whether they were truncated."""
        from hftune.data.tokenized import to_ids

        return to_ids(texts, self.text_tokenizer, self.max_source_length)

    def empty_target(self) -> dict[str, Any]:
        """Return what a sample has besides its source and index, with a target without words."""
        raise NotImplementedError

    def prompt(self, batch: Batch) -> dict[str, Tensor]:
        """Return what ``model.generate`` is given of a batch: the sources, and what else a target begins with."""
        raise NotImplementedError

    def _cut_notices(self, datasets: Mapping[str, Any], targets: str) -> list[str]:
        """Return notices of truncated texts. ``targets``: what the targets are called, such as Titles."""
        from hftune.data.tokenized import cut_notices

        limit = f"task.max_source_length={self.max_source_length}"
        messages = cut_notices(datasets, "source_cut", f"Sources longer than {limit} tokens")
        limit = f"task.max_target_length={self.max_target_length}"
        return messages + cut_notices(datasets, f"{self.target_name}_cut", f"{targets} longer than {limit} tokens")

    def lengths(self, dataset: Any) -> np.ndarray:
        """Return the tokens that the model reads of each sample, source and target together."""
        return self.sizes(dataset).sum(1, dtype="int32")

    def sizes(self, dataset: Any) -> np.ndarray:
        """Return the tokens of source and target, (N, 2), which ``collate`` pads independently."""
        import numpy as np

        from hftune.data.tokenized import lengths_of

        return np.stack([lengths_of(dataset, "source"), lengths_of(dataset, self.target_name)], axis=1)

    def evaluation_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return ``inputs``, and keep the cache: texts are generated from it, so that sources are read once."""
        return {**self.inputs(batch), "use_cache": True}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return head_loss(outputs, target)

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        source, target = (list(map(int, example[name])) for name in ("source", self.target_name))
        return pieces(self.text_tokenizer, source + target, [False] * len(source) + [True] * len(target))

    def num_items(self, target: Tensor) -> int:
        return count_labels(target)

    def _set_generation(self, config: GenerationConfig) -> GenerationConfig:
        """Change generation settings, in place, as the recipe says."""
        from hftune.models.generation import changed, tidy

        return changed(tidy(config, self.generation), {"max_new_tokens": self.max_target_length, **self.generation})

    @property
    def rows_per_sample(self) -> int:
        return int(self.generation.get("num_beams") or 1)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Generate texts. Return rows of the target in the data, generated, and source (its beginning)."""
        rows = self._rows[self.split_of(batch)][batch["index"].tolist()]
        columns = zip(rows[self._target], self._generate(outputs, model, batch), rows[self._source], strict=True)
        return [
            {self.target_name: target, "generated": text, "source": source[: self.source_shown]}
            for target, text, source in columns
        ]

    def split_of(self, batch: Batch) -> str:
        """Return the split that a batch of an evaluation comes from."""
        return "eval"

    def _generate(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[str]:
        """Generate texts, going on from what the model returned for ``evaluation_inputs``, whose cache this uses up."""
        from hftune.models.generation import continued

        prompt = self.prompt(batch)
        ids = model.generate(**prompt, **continued(outputs, batch["labels"].shape[1], model.generation_config))
        if not model.config.is_encoder_decoder:
            ids = ids[:, prompt["input_ids"].shape[1] :]
        return self.text_tokenizer.batch_decode(ids, skip_special_tokens=True)

    def example_inputs(self) -> list[str]:
        return self._rows.get("eval", self._rows["train"])[:2][self._source]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return a row for each text, whose ``generated`` is its target."""
        from hftune.data.rows import check_inputs

        check_inputs(inputs)
        sources, _ = self.source_ids(inputs)
        batch = self.collate([{**self.empty_target(), "source": ids, "index": 0} for ids in sources])
        batch = {name: value.to(model.device) for name, value in batch.items()}
        outputs = model(**self.evaluation_inputs(batch))
        return [{"generated": text} for text in self._generate(outputs, model, batch)]
