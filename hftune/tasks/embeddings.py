"""Text embeddings for retrieval, with AutoModel, a pooling and the multiple-negatives ranking loss.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, K texts of each (anchor, positive, hard negatives), N = B K texts, T tokens, D width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import check_column, is_number
from hftune.errors import ConfigError, DataError, did_you_mean
from hftune.metrics.records import directions
from hftune.task import BatchLossTask
from hftune.tasks.compared_texts import ComparedTexts, ids_of
from hftune.tasks.late_rows import late_rows
from hftune.tasks.text import beginning, check_inputs

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.task import Batch, Direction

POOLING = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
"""Values of ``task.pooling``, each with the name that sentence-transformers has for it."""
PREFIXES = ("query", "document")
"""Keys of ``task.prefixes``: those of sentence-transformers' prompts."""
RECALL_AT = (1, 5, 10)
MANY = 20_000
"""Rows of the eval split from which on a notice says that similarities of all with all take long."""


@dataclass
class Embeddings(ComparedTexts, BatchLossTask):
    """Learn embeddings in which an anchor, such as a query, is most similar to its positive, such as its answer.

    The loss of a sample is the cross-entropy of finding its positive among the documents of all samples of the step, by cosine
    similarity: InfoNCE, or multiple-negatives ranking loss. An item is a sample.
    """

    score_column: str | None = None
    """Column of the eval split with a similarity for each pair, as in STS data sets. Evaluations then report Spearman's rank
    correlation with it instead of recall and MRR. The training split has no such column: all its pairs are positive."""
    prefixes: dict[str, str] = key(dict)
    """Texts to put before each anchor (query) and each positive and negative (document): {query: "query: ", document: "passage:
    "} for E5. predict adds none."""
    pooling: str = key("mean", choices=tuple(POOLING))
    """From tokens to an embedding: mean, cls (the first token) or last (the last one, for decoders). It is then normalised."""
    scale: float = key(20.0, gt=0)
    """Factor of the similarities in the loss: 1 / temperature. 20 is usual."""
    symmetric: bool = False
    """Whether the loss is the mean of that of finding each anchor's positive and that of finding each positive's anchor."""
    matryoshka_dims: list[int] = key(list, ge=1)
    """Widths that embeddings may be cut to later, such as [384, 128, 32]: the loss is the sum of those of embeddings that are
    cut to them, and evaluations report each. []: the loss of the whole embeddings."""
    mask_duplicates: bool = True
    """Whether to leave out in-batch negatives that are none: texts equal to the anchor's positive, and positives of equal
    anchors."""
    max_length: int = key(256, ge=3)
    """Maximum length of a text in tokens, its prefix included; longer texts are truncated at the end."""

    auto_class: ClassVar[str] = "AutoModel"

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on score_column
        names = ["spearman"] if self.score_column is not None else [*(f"recall_at_{k}" for k in RECALL_AT), "mrr_at_10"]
        whole = directions(*names)
        return whole | {f"{name}_dim_{dim}": whole[name] for dim in self.matryoshka_dims for name in (names[0], names[-1])}

    @property
    def sample_fields(self) -> Sequence[str]:
        return ("anchor", "positive", *(("score", "similarity") if self.score_column is not None else ("nearest", "rank")))

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        for name in self.prefixes:
            if name not in PREFIXES:
                yield f"task.prefixes.{name} is not one of {', '.join(PREFIXES)}.{did_you_mean(name, PREFIXES)}"

    # Data

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        from hftune.data.tokenized import to_ids

        encoded: dict[str, list] = {"cut": [False] * len(rows[self.text_columns_read[0]])}
        for index, column in enumerate(self.text_columns_read):
            prefix = self.prefixes.get(PREFIXES[min(index, 1)], "")
            encoded[ids_of(index)], cut = to_ids([prefix + text for text in rows[column]], self.text_tokenizer, self.max_length)
            encoded["cut"] = [any(flags) for flags in zip(encoded["cut"], cut, strict=True)]
        return encoded

    def encoded_by(self) -> Any:
        return [self.max_length, self.prefixes, self.score_column]

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        """Return a number for each text, the same for equal texts, (N, K) int64, and the scores, unless it is for training."""
        import numpy as np

        def number_of(text: str) -> int:  # 64 bits of its hash
            return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True)

        rows, column = self.rows[split], self.score_column
        columns = [rows[name][:] for name in self.text_columns_read]
        texts = {"texts": np.stack([[number_of(text) for text in column] for column in columns], axis=1)}
        if split == "train" or column is None:
            return texts
        check_column(rows, "task.score_column", column, split)
        if not is_number(rows.features[column]):
            raise DataError(
                f"task.score_column={column} of the {split} split holds {rows.features[column].dtype}, not numbers."
            )
        scores = np.array([np.nan if score is None else score for score in rows[column]], np.float32)
        if bad := np.flatnonzero(~np.isfinite(scores)).tolist():
            where = f"column {column!r} at row {self.row_of(split)(bad[0])}"
            raise DataError(f"The {split} split has no finite number in {where}. Remove such rows.")
        return {**texts, "score": scores}

    # Model and loss

    def build_model(self) -> PreTrainedModel:
        model = prepared(super().build_model(), self.model)
        width = model.config.get_text_config().hidden_size
        if too_wide := [dim for dim in self.matryoshka_dims if dim > width]:
            raise ConfigError(f"task.matryoshka_dims: {too_wide[0]} is more than the model's width, {width}.")
        return model

    def target(self, batch: Batch) -> dict[str, Tensor]:  # pooling needs the mask, the loss the texts
        return {name: batch[name] for name in ("attention_mask", "rows", "texts")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return len(target["texts"])

    def embed(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings (B, K, D), of length 1."""
        from hftune.tasks.contrastive import pooled

        return pooled(outputs[0], target["attention_mask"], self.pooling)[target["rows"]]

    def batch_labels(self, target: Mapping[str, Tensor]) -> Tensor:
        return target["texts"]

    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        from torch.nn.functional import normalize

        from hftune.tasks.contrastive import ranking_losses

        options = labels, self.scale, self.symmetric, self.mask_duplicates
        if not self.matryoshka_dims:
            return ranking_losses(embeddings, *options)
        return sum(ranking_losses(normalize(embeddings[..., :dim], dim=-1), *options) for dim in self.matryoshka_dims)

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages, count = super().notices(datasets, model), len(datasets.get("eval", ()))
        if count > MANY:
            messages.append(
                f"Each evaluation compares {count:,} anchors with {count:,} documents, on the main process. If that is slow, "
                "lower task.max_eval_samples; ranks are then those among fewer documents."
            )
        return messages

    # Evaluation

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of embeddings (K, D) and texts (K,), arrays that ``metrics`` replaces by what it finds in all rows."""
        import torch

        def rows(vectors_BKD: Tensor, texts_BK: Tensor, *scores_B: Tensor) -> list[dict[str, Any]]:
            columns = [vectors_BKD.numpy().copy(), texts_BK.numpy().copy(), *map(torch.Tensor.tolist, scores_B)]  # not pinned
            return [dict(zip(("vectors", "texts", "score"), row, strict=False)) for row in zip(*columns, strict=True)]

        scores = (batch["score"],) if "score" in batch else ()
        return late_rows(rows, self.embed(outputs, self.target(batch)), batch["texts"], *scores)

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the loss of one batch that holds the whole split, and the retrieval metrics, or Spearman's correlation.

        In each row, similarity and rank take the place of the embeddings.
        """
        import numpy as np
        import torch

        from hftune.metrics.retrieval import mrr_at, rank_positives, recall_at, spearman

        vectors_BKD, texts_BK = (np.stack([row.pop(name) for row in rows]) for name in ("vectors", "texts"))
        with torch.no_grad():
            loss = self.batch_losses(torch.from_numpy(vectors_BKD), torch.from_numpy(texts_BK)).double().mean().item()
        texts, metrics = [texts_BK[:, 0].tolist(), texts_BK[:, 1].tolist()], {"loss": loss}
        for dim in (None, *self.matryoshka_dims):
            pairs_BKD, suffix = vectors_BKD[:, :2, :dim], "" if dim is None else f"_dim_{dim}"
            pairs_BKD = pairs_BKD if dim is None else pairs_BKD / np.linalg.norm(pairs_BKD, axis=-1, keepdims=True)
            similarities_B = pairs_BKD.prod(1).sum(1)
            if dim is None:
                for row, similarity in zip(rows, similarities_B.tolist(), strict=True):
                    row["similarity"] = similarity
            if self.score_column is not None:
                scores_B = np.array([row["score"] for row in rows])
                metrics[f"spearman{suffix}"] = spearman(similarities_B.astype(float), scores_B)
                continue
            found = rank_positives(pairs_BKD[:, 0], pairs_BKD[:, 1], *texts)
            if dim is None:
                for row, rank, nearest in zip(rows, found.ranks_N.tolist(), found.nearest_N.tolist(), strict=True):
                    row |= {"rank": rank, "nearest": nearest, "error": 1 - 1 / rank}
            recalls = {f"recall_at_{k}{suffix}": recall_at(found.ranks_N, k) for k in RECALL_AT[: None if dim is None else 1]}
            metrics |= {**recalls, f"mrr_at_10{suffix}": mrr_at(found.ranks_N, 10)}
        return metrics

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of both texts, and that of the document that is most similar to the anchor."""
        split = self.rows[self.described]
        anchors, positives = (split[self.read_columns[f"{name}_column"]] for name in ("anchor", "positive"))
        described = []
        for row, anchor, positive in zip(rows, anchors, positives, strict=True):
            nearest = {"nearest": beginning(positives[row["nearest"]])} if "nearest" in row else {}
            described.append({"anchor": beginning(anchor), "positive": beginning(positive), **row, **nearest})
        return described

    # The finished model

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and tokenizer for ``from_pretrained``, and what sentence-transformers needs besides."""
        super().save(model, directory)
        width = model.config.get_text_config().hidden_size
        prompts = {name: self.prefixes.get(name, "") for name in PREFIXES}
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        modes = ("mean_tokens", "cls_token", "lasttoken")
        files = {
            "modules.json": [
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
                for index, (name, path) in enumerate(modules)
            ],
            "config_sentence_transformers.json": {
                "prompts": prompts,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
            "sentence_bert_config.json": {"max_seq_length": self.max_length, "do_lower_case": False},
            "1_Pooling/config.json": {
                "word_embedding_dimension": width,
                **{f"pooling_mode_{mode}": mode.startswith(POOLING[self.pooling]) for mode in modes},
                "include_prompt": True,
            },
        }
        (directory / "1_Pooling").mkdir()
        for name, content in files.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def load(self, directory: Path) -> PreTrainedModel:
        return prepared(super().load(directory), str(directory))

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return the embedding of each text as it is, without a prefix: a list of D numbers, of length 1."""
        from hftune.data.tokenized import Ragged, to_ids
        from hftune.tasks.contrastive import pooled

        check_inputs(inputs)
        ids, _ = to_ids(inputs, self.text_tokenizer, self.max_length)
        ids_NT, mask_NT = (tensor.to(model.device) for tensor in Ragged.of(ids).padded(self.text_tokenizer.pad_token_id))
        outputs = model(input_ids=ids_NT, attention_mask=mask_NT)
        return [{"embedding": vector} for vector in pooled(outputs[0], mask_NT, self.pooling).tolist()]


def prepared(model: PreTrainedModel, name: str | None) -> PreTrainedModel:
    """Freeze the pooler that some models have for their pretraining, as the loss does not see it; keep no keys and values.

    Raises:
        ConfigError: the model has an encoder and a decoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        what = "task.model_config" if name is None else f"task.model={name}"
        raise ConfigError(
            f"{what} has an encoder and a decoder. Embeddings take models with one of them, such as BERT or Qwen3."
        )
    if (pooler := getattr(model, "pooler", None)) is not None:
        pooler.requires_grad_(False)
    return model
