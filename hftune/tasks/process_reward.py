"""Process reward models: the probability that each step of a solution is right, with AutoModelForTokenClassification.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: N solutions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import Role
from hftune.data.preferences import PROMPTS
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows_each
from hftune.tasks.text import NO_LABEL, TokenTask, beginning

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.task import Batch


@dataclass
class ProcessReward(TokenTask):
    """Judge the steps of solutions. The loss is cross-entropy at the last token of each step; an item is a step."""

    model: str | None = key("HuggingFaceTB/SmolLM2-360M-Instruct", changes="model")
    """Language model, or token classifier: name on the Hub (owner/name) or local folder. null: a new model built from
    model_config, with a byte-level tokenizer trained on the problems and steps."""
    prompt_column: str | None = None
    """Column of the problems. null: prompt, or another usual name."""
    steps_column: str | None = None
    """Column of the solutions, lists of steps. null: completions or steps, or the only column of lists of texts."""
    labels_column: str | None = None
    """Column of lists that say of each step whether it is right: true or false, or 1 or 0. null: labels."""
    step_separator: str = "\n"
    """Text after each step; a step is judged at its last token."""
    max_length: int = key(2048, ge=3)
    """Maximum length of a problem with its steps in tokens. Steps that end beyond it are neither trained nor scored."""

    labels: ClassVar[Sequence[str]] = ("wrong", "right")
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    metric_directions = directions("accuracy", "macro_f1", "mcc", "first_error_accuracy")
    sample_fields = ("prompt", "label", "score")
    prepares_as_needed = True
    columns: ClassVar[Mapping[str, Role]] = {
        "prompt": Role("text", PROMPTS),
        "steps": Role("list of texts", ("completions", "steps")),
        "labels": Role("list of labels", ("labels",), optional_in={"predict"}),
    }

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if not self.step_separator:
            yield "task.step_separator is empty. Set it to what ends a step, such as a new line."

    def _read(self, rows: Any, *names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(rows[self.read_columns[f"{name}_column"]] for name in names), strict=True)

    def training_texts(self) -> Iterator[str]:
        for prompt, steps in self._read(self.rows_to_learn(self.read_columns["steps_column"]), "prompt", "steps"):
            yield from (prompt, *(f"{step}{self.step_separator}" for step in steps or ()))

    def new_tokenizer(self, cached: Callable[[Callable[[], Any]], Any]) -> PreTrainedTokenizerBase:
        from hftune.data.byte_tokenizer import byte_tokenizer, train_bytes

        return byte_tokenizer(cached(lambda: train_bytes(self.training_texts(), self.vocab_size)))

    def targets(self, split: str) -> Mapping[str, Any]:
        """Check steps and labels, which ``encode`` translates."""
        for index, (steps, labels) in enumerate(self._read(self.rows[split], "steps", "labels")):
            wrong = None if _are_steps(steps) else "no steps, or an empty one"
            if wrong is None and (labels is None or len(labels) != len(steps) or any(label not in (0, 1) for label in labels)):
                wrong = f"{len(steps)} steps, and not as many labels that are true or false"
            if wrong is not None:
                raise DataError(f"Row {self.row_of(split)(index)} of the {split} split has {wrong}.")
        return {}

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        found: dict[str, list] = {"input_ids": [], "labels": [], "cut": [], "steps": []}
        for prompt, steps, judged in self._read(rows, "prompt", "steps", "labels"):
            ids, ends = self._tokens(prompt, steps)
            labels = [NO_LABEL] * len(ids)
            for end, is_right in zip(ends, judged, strict=True):
                labels[end - 1] = int(is_right)
            values = ids[: self.max_length], labels[: self.max_length], len(ids) > self.max_length, len(ends)
            for column, value in zip(found.values(), values, strict=True):
                column.append(value)
        return found

    def _tokens(self, prompt: str, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the tokens of a problem with its steps, each tokenized alone, and after how many tokens each step ends."""

        def ids_of(text: str) -> list[int]:
            return self.text_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

        begin, separator, ends = self.text_tokenizer.bos_token_id, ids_of(self.step_separator), []
        ids = ([] if begin is None else [begin]) + ids_of(prompt)
        for step in steps:
            ids += ids_of(step) + separator
            ends.append(len(ids))
        return ids, ends

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Add ``steps`` (N,) int64, the number of steps before any were cut."""
        from hftune.data.tokenized import values

        return {**super().collate(examples), "steps": values(examples, "steps")}

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: value for name, value in super().inputs(batch).items() if name != "steps"}

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        """Add how many solutions have no step that is trained or scored."""
        import numpy as np

        lost = []
        for split in filter(lambda split: split not in self.later, datasets):
            labels = datasets[split].column("labels")
            ends = np.flatnonzero(labels.flat != NO_LABEL)
            if count := len(datasets[split]) - len(np.unique(np.searchsorted(labels.offsets, ends, "right"))):
                lost.append(f"{count:,} of {split}")
        what = f"Solutions that task.max_length={self.max_length} leaves no step: {' and '.join(lost)}."
        return super().notices(datasets, model) + ([what] if lost else [])

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label (0 or 1) and score (the probability that it is right) of each step, but for those cut off; and
        steps, their number with those."""

        def row(labels: list[int], scores: list[float], count: int) -> dict[str, Any]:
            steps = [(y, round(p, 6)) for y, p in zip(labels, scores, strict=True) if y != NO_LABEL]
            return {"label": [y for y, _ in steps], "score": [p for _, p in steps], "steps": count}

        return late_rows_each(row, batch["labels"], _scores(outputs), batch["steps"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of each problem, and the number of misjudged steps as the error."""
        errors = [sum(map(int.__ne__, row["label"], _judged(row))) for row in rows]
        found = zip(self._read(self.rows[self.described], "prompt"), rows, errors, strict=True)
        return [{"prompt": beginning(prompt), **row, "error": error} for (prompt,), row, error in found]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the metrics of all steps as of classes; and the share of solutions whose first wrong step is found, or whose
        steps are all right and said to be. A solution whose first wrong step may have been cut does not count; 0 if none does.
        """
        from hftune.metrics.classification import class_metrics

        true, said = [row["label"] for row in rows], [*map(_judged, rows)]
        firsts = [
            [[*steps, 0].index(0) for steps, row in zip(solutions, rows, strict=True) if _shows_first_error(row)]
            for solutions in (true, said)
        ]
        return {
            **class_metrics([*chain.from_iterable(true)], [*chain.from_iterable(said)], self.labels),
            "first_error_accuracy": sum(map(int.__eq__, *firsts)) / max(1, len(firsts[0])),
        }

    def example_inputs(self) -> list[str]:
        pairs = self._read(self.some_rows(), "prompt", "steps")
        return [f"{prompt}\t{self.step_separator.join(steps)}" for prompt, steps in pairs]

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return of each input the ``scores`` of its steps, the probabilities that they are right, and as ``score`` the least.

        An input is a pair of a problem and a list of steps, or of the text of the steps, each followed by the separator; or one
        text with a tab between the two.
        """
        from hftune.data.tokenized import Ragged
        from hftune.models.pretrained import max_positions

        found, positions = [], max_positions(model)
        for index, value in enumerate(inputs):
            given = value.split("\t", 1) if isinstance(value, str) else value
            prompt, steps = given if isinstance(given, (list, tuple)) and len(given) == 2 else (None, None)
            if isinstance(steps, str):
                steps = [step for step in steps.split(self.step_separator) if step.strip()]
            if not (isinstance(prompt, str) and _are_steps(steps)):
                raise DataError(
                    f"Input {index} is no problem with its steps: give a pair of them, or write a tab between them."
                )
            ids, ends = self._tokens(prompt, steps)
            if positions is not None and len(ids) > positions:
                raise DataError(
                    f"Input {index} has {len(ids):,} tokens, and the model has {positions:,} positions. Shorten it."
                )
            found.append((ids, ends))
        ids_NT, mask_NT = Ragged.of([ids for ids, _ in found]).padded(self.text_tokenizer.pad_token_id)
        scores_NT = _scores(model(input_ids=ids_NT.to(model.device), attention_mask=mask_NT.to(model.device))).tolist()
        of_steps = [[row[end - 1] for end in ends] for row, (_, ends) in zip(scores_NT, found, strict=True)]
        return [{"scores": scores, "score": min(scores)} for scores in of_steps]


def _are_steps(steps: Any) -> bool:
    return isinstance(steps, list) and bool(steps) and all(isinstance(step, str) and step.strip() for step in steps)


def _scores(outputs: Any) -> Tensor:
    """Return the probability of "right" at each token, (N, T)."""
    return outputs.logits.float().softmax(-1)[..., 1]


def _shows_first_error(row: dict[str, Any]) -> bool:
    """Say whether the steps that were kept have the first wrong one, or are all that there are."""
    return 0 in row["label"] or len(row["label"]) == row["steps"]


def _judged(row: dict[str, Any]) -> list[int]:
    """Return 1 for each step of a row that is said to be right, or 0."""
    return [int(score > 0.5) for score in row["score"]]
