"""Reward models: a score of answers to chats, with AutoModelForSequenceClassification, learned from pairs of answers.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B pairs, S = 2 sides (chosen, rejected), N = S B texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import Role
from hftune.data.messages import ChatError, messages_of, tools_of
from hftune.data.preferences import PROMPTS, SIDES, conversation_of
from hftune.errors import DataError
from hftune.hooks import Hooks
from hftune.tasks.answer_pairs import AnswerPairs

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from hftune.task import Batch

CHATS = ("messages", "conversations", "conversation", "chat")


@dataclass
class RewardModel(AnswerPairs):
    """Learn a score, the reward, that is higher for the better one of two answers to a prompt (Bradley-Terry).

    The model has a single output, read at the last token of a chat as its template writes it. An item is a pair.
    """

    model: str | None = key("HuggingFaceTB/SmolLM2-360M-Instruct", changes="model")
    """Language model, or reward model, with a chat template: name on the Hub (owner/name) or local folder. null: a new model
    built from model_config, with a byte-level tokenizer trained on the chats."""
    margin_column: str | None = None
    """Column of numbers by which the chosen answer's reward should be ahead, such as a difference of ratings. null: 0."""
    center: float = key(0.0, ge=0, changes="forward backward")
    """Factor of (sum of both rewards) ** 2 in the loss, which keeps rewards around 0. 0.01 is usual."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    generates = False
    columns: ClassVar[Mapping[str, Role]] = {
        "prompt": Role("text or messages", PROMPTS, optional_in={"train"}, usual_inputs=CHATS),
        "answer": Role("text or messages", ("completion", "response"), optional_in={"train"}, usual_inputs=CHATS),
    }

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        found = super().find_columns(rows)
        return found if self.margin_column is None else {**found, "margin_column": self.margin_column}

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Add ``margin`` (B,) float32."""
        from hftune.data.tokenized import values

        return {**super().collate(examples), "margin": values(examples, "margin")}

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        """The config of the model: with one output, which pipelines leave as it is, and padding, before which it is read."""
        config = super().named_config
        config.id2label, config.label2id, config.problem_type = {0: "reward"}, {"reward": 0}, "regression"
        config.get_text_config().pad_token_id = self.text_tokenizer.pad_token_id
        return config

    def target(self, batch: Batch) -> Tensor:
        return batch["margin"]

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return self.sample_losses(outputs, target).sum()

    def sample_losses(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the losses of the pairs, (B,).

        Source: Bradley and Terry (1952); Touvron et al., "Llama 2" (2023), section 3.2.2, for margins; Eisenstein et al.,
        "Helping or Herding?" (2023), for centring.
        """
        from torch.nn.functional import logsigmoid

        chosen_B, rejected_B = _rewards(outputs).T
        return -logsigmoid(chosen_B - rejected_B - target) + self.center * (chosen_B + rejected_B).square()

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        return self.pair_rows(batch, self.sample_losses(outputs, self.target(batch)), _rewards(outputs))

    # Use

    def input_columns(self) -> dict[str, str | None]:
        """Return the columns of prompts and answers; or twice that of whole conversations, as a table with no other has."""
        return {"prompt": self.prompt_column, "answer": None}

    def raw_inputs(self, rows: Mapping[str, list]) -> list:
        return Hooks.raw_inputs(self, rows)

    def example_inputs(self) -> list[str]:
        chats = [self.messages_of(row) for row in self.some_rows()]
        return ["\t".join(message["content"] for message in chat[-2:]) for chat in chats if chat]

    def prompt_ids(self, index: int, value: Any) -> list[int]:
        """Return the tokens of a raw input, a chat that ends with an answer; see ``predict``.

        Raises:
            DataError: it cannot be scored.
        """
        given = value.split("\t", 1) if isinstance(value, str) and "\t" in value else value
        if isinstance(given, str):
            raise DataError(f"Input {index} is no answer to a prompt: write a tab between the two, or give messages.")
        is_pair = isinstance(given, (list, tuple)) and len(given) == 2 and not isinstance(given[0], Mapping)
        row = {"messages": given} if not isinstance(given, Mapping) else given
        columns = {"answer": "messages"}
        if is_pair:
            row, columns = dict(zip(("prompt", "messages"), given, strict=True)), {**columns, "prompt_column": "prompt"}
        try:
            messages = messages_of({"messages": conversation_of(row, columns, "answer")})
            if messages[-1]["role"] != "assistant":
                raise ChatError(f"The last message is the {messages[-1]['role']}'s, no answer.")
            return self.chat_format.whole(messages, tools_of(row, "tools", as_written=True)).input_ids
        except ChatError as error:
            raise DataError(f"Input {index} cannot be scored: {error}") from error

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the ``score`` of each input: a prompt and its answer, as a pair of texts or messages, or one text with a tab
        between them; or the messages of a chat that ends with an answer, or {messages, tools}."""
        from hftune.data.tokenized import Ragged

        ids_NT, mask_NT = Ragged.of(self._prompts(model, inputs)).padded(self.text_tokenizer.pad_token_id)
        batch = self.inputs({"input_ids": ids_NT.to(model.device), "attention_mask": mask_NT.to(model.device)})
        return [{"score": score} for score in model(**batch).logits.float().flatten().tolist()]


def _rewards(outputs: Any) -> Tensor:
    """Return the rewards (B, S), float32 or float64."""
    import torch

    logits_N = outputs.logits.flatten()
    return logits_N.to(torch.promote_types(logits_N.dtype, torch.float32)).view(len(SIDES), -1).T
