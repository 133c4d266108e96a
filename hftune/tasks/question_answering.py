"""Extractive question answering with AutoModelForQuestionAnswering: the span of a context that answers a question, or none.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, N windows of all of them, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import Role, check_kind
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows
from hftune.tasks.text import ManyTexts, TextTask, beginning, check_inputs, pieces, token_loss, with_places

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.task import Batch, Direction


@dataclass
class QuestionAnswering(ManyTexts):
    """Find the answers to questions in their contexts. A long context is read in windows that overlap.

    A training sample is a window, and so is an item. Its loss is the mean of the cross-entropies of the first and the last
    token of the answer among the tokens of the window; both are the null position if the window does not have the answer. In an
    evaluation, a sample is a row of the data with all of its windows.
    """

    model: str | None = key("google-bert/bert-base-cased", changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on questions and contexts."""
    question_column: str | None = None
    """Column of the questions. null: question, or another usual name."""
    context_column: str | None = None
    """Column of the texts that have the answers. null: context, or another usual name."""
    answers_column: str | None = None
    """Column of the answers: for each question a text and answer_start, its first character in the context, or several, or
    none. The first is trained on; any is right in evaluations. null: answers, or the only such column."""
    max_length: int = key(384, ge=8)
    """Maximum length of a window in tokens: question and part of the context together."""
    stride: int = key(128, ge=0)
    """Tokens of the context that two consecutive windows share."""
    max_answer_length: int = key(30, ge=1, changes="output")
    """Maximum length of a predicted answer in tokens."""
    n_best: int = key(5, ge=1, changes="output")
    """Spans of a context that are listed with each prediction. They share the probability 1, with no answer if there may be
    none."""
    unanswerable: bool | None = None
    """Whether questions may have no answer, as in SQuAD 2.0. null: if some of the training data have none."""
    null_threshold: float = key(0.0, changes="output")
    """How much higher than the score of the best span that of no answer must be for none to be predicted."""

    auto_class = "AutoModelForQuestionAnswering"
    sample_fields = ("question", "prediction", "answers")
    samples_are = "windows"
    settled_fields = ("unanswerable",)
    libraries = (*TextTask.libraries, "hftune.data.spans", "hftune.metrics.squad")
    columns: ClassVar[Mapping[str, Role]] = {
        "question": Role("text", ("question", "query")),
        "context": Role("text", ("context", "passage", "document", "paragraph")),
        "answers": Role("SQuAD answer", ("answers",), optional_in={"predict"}),
    }
    padding: ClassVar[Mapping[str, int]] = {"token_type_ids": 0, "from": -1, "to": -1}
    of_each_text = ("null", "start", "end")

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on the data
        of_unanswerable = ("has_answer_exact_match", "has_answer_f1", "no_answer_accuracy", "best_f1", "best_null_threshold")
        return directions("exact_match", "f1", *(of_unanswerable if self.unanswerable in (None, True) else ()))

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.stride >= self.max_length:
            yield f"task.stride={self.stride} must be below task.max_length={self.max_length}: windows share these tokens."

    # Data

    def flat(self, rows: Dataset) -> Dataset:
        from hftune.data.spans import flat_rows

        return flat_rows(rows)

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        super().check_rows(rows)
        for split, own in rows.items():
            check_kind(own, self.read_columns["answers_column"], split, "SQuAD answer")

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or one trained on questions and contexts; it says which characters a token is."""
        return with_places(super().text_tokenizer, self.model, "which characters of a text a token is")

    def _read(self, rows: Any, *names: str) -> list[list[Any]]:
        return [rows[self.read_columns[f"{name}_column"]][:] for name in names]

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        import numpy as np

        from hftune.data.spans import answers_of, check_answers, check_questions

        rows, row_of = self.rows[split], self.row_of(split)
        questions, contexts, answers = self._read(rows, "question", "context", "answers")

        def name(index: int) -> str:
            return f"Row {row_of(index)} of the {split} split"

        check_answers(contexts, answers, name)
        check_questions(questions, self.text_tokenizer, self.max_length, self.stride, name)
        return {**self.places_of(split), "answered": np.array([bool(answers_of(value)) for value in answers])}

    def encoder(self, split: str) -> Callable[[dict[str, list]], dict[str, list]]:
        return partial(self.encode, places=split != "train")

    def encode(self, rows: dict[str, list], places: bool = True) -> dict[str, list]:
        from hftune.data.spans import span_of

        questions, contexts, answers = self._read(rows, "question", "context", "answers")
        spans = [span_of(context, value) for context, value in zip(contexts, answers, strict=True)]
        return self._windows(questions, contexts, spans, self.has_types(self.named_config), places)

    def _windows(
        self, questions: list[str], contexts: list[str], spans: list[Any], types: bool, places: bool
    ) -> dict[str, list]:
        from hftune.data.spans import windows_of

        settings = (self.text_tokenizer, self.max_length, self.stride)
        return windows_of(questions, contexts, spans, *settings, types, places)

    def encoded_by(self) -> Any:
        return [self.max_length, self.stride, self.has_types(self.named_config)]

    def tokenized(self, split: str) -> Any:
        """Return a tokenized split: a window each to train on, a row with all of its windows to evaluate on."""
        from hftune.data.tokenized import cut_apart

        rows = super().tokenized(split)
        if split != "train":
            return rows
        if self.unanswerable is None:
            self.unanswerable = not rows.column("answered").all()
        self._lost = int(rows.column("lost").sum())
        return cut_apart(rows, ("start", "end"))

    def samples_of_each(self, dataset: Any) -> list[int]:
        from hftune.data.mixture import samples_of_rows

        return samples_of_rows(dataset.column("row"), self.mixed.sizes(self.rows["train"]))

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages, train = super().notices(datasets, model), datasets["train"]
        if len(train) > (count := len(self.rows["train"])):
            messages.append(
                f"The {count:,} questions of train are {len(train):,} windows of task.max_length={self.max_length} tokens."
            )
        if self._lost:
            messages.append(f"Answers of train that no window has as a whole, and that are trained as none: {self._lost:,}.")
        return messages

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        (start,), (end,), ids = (list(map(int, example[name])) for name in ("start", "end", "input_ids"))
        return pieces(self.text_tokenizer, ids, [start <= place <= end for place in range(len(ids))])

    # Loss and evaluation

    def config_overrides(self) -> dict[str, Any]:
        return {**super().config_overrides(), "num_labels": 2}  # first and last token

    def target(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("attention_mask", "start", "end", "texts")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return len(target["start"])

    def loss(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of the windows.

        It is that of transformers' heads for a window without padding, to which theirs give a share of the probability.
        """
        return self._losses(outputs, target).sum()

    def sample_losses(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        import torch

        return torch.stack([own.sum() for own in self._losses(outputs, target).split(target["texts"].tolist())])

    def _losses(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each window, (N,)."""
        losses = []
        for name in ("start", "end"):
            logits_NT = outputs[f"{name}_logits"].masked_fill(target["attention_mask"] == 0, float("-inf"))
            losses.append(token_loss(logits_NT[:, None], target[name][:, None], "none"))
        return (losses[0] + losses[1]) / 2

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of question, answers (the right ones), prediction, its probability, its exact_match and f1 and the n_best
        spans; and, if questions may have no answer, null_score_diff and the f1 of the best span."""
        return late_rows(self._rows, outputs.start_logits, outputs.end_logits, batch)

    def _rows(self, starts_NT: Tensor, ends_NT: Tensor, batch: Batch) -> list[dict[str, Any]]:
        from hftune.data.spans import answers_of
        from hftune.metrics.squad import answer_scores

        columns = self._read(self.rows_of(batch), "question", "context", "answers")
        found = self._answers(starts_NT, ends_NT, batch, columns[1])
        rows = []
        for question, _, given, (answer, best, lead) in zip(*columns, found, strict=True):
            answers = [*dict.fromkeys(text for text, _ in answers_of(given))]
            row = {"question": beginning(question), "answers": answers, "prediction": answer["answer"]}
            row |= {"probability": answer["probability"], **answer_scores(answer["answer"], answers)}
            if self.unanswerable:
                span = best[0]["answer"] if best else ""
                row |= {"null_score_diff": lead, "span_f1": answer_scores(span, answers)["f1"]}
            rows.append({**row, "n_best": [[span["answer"], span["probability"]] for span in best]})
        return rows

    def _answers(
        self, starts_NT: Tensor, ends_NT: Tensor, batch: Batch, contexts: Sequence[str]
    ) -> list[tuple[dict[str, Any], list[dict[str, Any]], float]]:
        """Return of each sample the answer, the best spans, and the lead of the null score over the first of them."""
        from hftune.data.spans import best_spans, ranked

        spans = iter(best_spans(starts_NT, ends_NT, batch["from"], batch["to"], self.max_answer_length, self.n_best))
        nulls = iter(
            sum(logits_NT.float().gather(1, batch["null"][:, None])[:, 0] for logits_NT in (starts_NT, ends_NT)).tolist()
        )
        found = []
        for count, context in zip(batch["texts"].tolist(), contexts, strict=True):
            null = min(islice(nulls, count))  # of the window that is surest of an answer
            best, no_answer, lead = ranked(islice(spans, count), null if self.unanswerable else None, context, self.n_best)
            is_none = not best or (self.unanswerable and lead > self.null_threshold)
            found.append((no_answer if is_none else best[0], best, lead))
        return found

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of each context, and what the f1 lacks to 1 as the error."""
        (contexts,) = self._read(self.rows[self.described], "context")
        return [
            {"context": beginning(context), **row, "error": round(1 - row["f1"], 6)}
            for context, row in zip(contexts, rows, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.squad import split_scores

        return split_scores(rows, bool(self.unanswerable))

    # Use

    def predict(self, model: PreTrainedModel, inputs: list[Any], probabilities: bool = False) -> list[dict[str, Any]]:
        """Return the answer to each pair of question and context, a list of two or one text with a tab between them: answer,
        empty if there is none, start and end, its characters in the context, and its probability.

        ``probabilities`` adds the n_best spans, likewise.
        """
        import torch

        from hftune.data.spans import check_questions

        questions, contexts = self.sides(inputs, "question and context")
        check_inputs(questions)
        check_inputs(contexts)
        check_questions(questions, self.text_tokenizer, self.max_length, self.stride, "Input {}".format)
        columns = self._windows(questions, contexts, [None] * len(inputs), self.has_types(model.config), places=True)
        batch = self.collate([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
        parts: dict[str, list[Tensor]] = {"start_logits": [], "end_logits": []}
        for start in range(0, len(batch["input_ids"]), len(inputs)):  # as many windows at once as there are questions
            some = {name: tensor[start : start + len(inputs)] for name, tensor in self.inputs(batch).items()}
            outputs = model(**{name: tensor.to(model.device) for name, tensor in some.items()})
            for name, logits in parts.items():
                logits.append(outputs[name].float().cpu())
        starts_NT, ends_NT = (torch.cat(logits) for logits in parts.values())
        found = self._answers(starts_NT, ends_NT, batch, contexts)
        return [{**answer, **({"n_best": best} if probabilities else {})} for answer, best, _ in found]
