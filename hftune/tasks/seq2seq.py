"""Sequence to sequence, such as translation or summarization, with an encoder-decoder of transformers: T5, BART, mBART, Marian.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import TEXTS, Role
from hftune.errors import ConfigError, DataError, did_you_mean
from hftune.metrics.records import directions
from hftune.tasks.text import MAX_SHOWN, NO_LABEL, TokenTask, check_inputs, pieces, score_names, text_scores

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hftune.task import Batch, Direction

SOURCES = ("source", "document", "article", "dialogue", "text", "input", "question")
"""Usual names of a column of source texts."""
TARGETS = ("target", "summary", "highlights", "title", "output", "answer", "translation")
"""Usual names of a column of target texts."""
SCORES = ("rouge", "bleu", "chrf")
"""What ``task.scores`` may name."""
HAN_OR_KANA = "[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"


@dataclass
class SourceToTarget(TokenTask):
    """Base of tasks that write a target text for a source text. An item is a token of the target, its end token included.

    Samples have the tokens of both texts, ``source`` and ``target_name``, and ``index``, their row. Texts are generated from
    the cache of the forward pass that computes the loss, so that an evaluation reads each source once.
    """

    source_column: str | None = None
    """Column of the source texts."""
    target_column: str | None = None
    """Column of the target texts."""
    max_source_length: int = key(512, ge=3)
    """Maximum length of a source in tokens; longer sources are truncated at the end."""
    max_target_length: int = key(128, ge=2)
    """Maximum length of a target in tokens, for references and generated texts."""
    generation: dict[str, Any] = key(dict, changes="output")
    """Generation settings, such as num_beams or length_penalty: fields of transformers' GenerationConfig."""

    target_name: ClassVar[str] = "target"
    """Name of a target in samples and in the rows of an evaluation."""
    source_shown: ClassVar[int] = MAX_SHOWN
    """Characters of a source in the rows of an evaluation."""
    libraries = (*TokenTask.libraries, "hftune.models.generation")
    scored_head = True
    columns: ClassVar[Mapping[str, Role]] = {
        "source": Role("text", SOURCES, usual_inputs=TEXTS),
        "target": Role("text", TARGETS, optional_in={"predict"}),
    }
    length_keys = ("max_source_length", "max_target_length")
    prepares_as_needed = True

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if (count := self.generation.get("num_return_sequences")) not in (None, 1):
            yield f"task.generation.num_return_sequences={count} must be 1: each source has one target."
        if self.source_column is not None and self.source_column == self.target_column:
            yield f"task.source_column and task.target_column are both {self.source_column}. Name the column of the targets."

    def source_ids(self, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Return the tokens of each source as the model reads them, and whether they were truncated."""
        from hftune.data.tokenized import to_ids

        return to_ids(texts, self.text_tokenizer, self.max_source_length)

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        return self.places_of(split)

    def empty_target(self) -> dict[str, Any]:
        """Return what a sample has besides its source and index, with a target without words."""
        raise NotImplementedError

    def prompt(self, batch: Batch) -> dict[str, Tensor]:
        """Return what ``model.generate`` is given of a batch: the sources, and what else a target begins with."""
        raise NotImplementedError

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data.tokenized import cut_notices

        limit = f"task.max_source_length={self.max_source_length}"
        sources = cut_notices(datasets, "source_cut", f"Sources longer than {limit} tokens")
        limit, what = f"task.max_target_length={self.max_target_length}", f"{self.target_name.capitalize()}s"
        targets = cut_notices(datasets, f"{self.target_name}_cut", f"{what} longer than {limit} tokens")
        return [*super().notices(datasets, model), *sources, *targets]

    def lengths(self, dataset: Any) -> np.ndarray:
        """Return the tokens that the model reads of each sample, source and target together."""
        return self.sizes(dataset).sum(1, dtype="int32")

    def sizes(self, dataset: Any) -> np.ndarray:
        """Return the tokens of source and target, (N, 2), which ``collate`` pads independently."""
        from hftune.data.tokenized import sizes_of

        return sizes_of(dataset, ["source", self.target_name])

    def evaluation_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return ``inputs``, and keep the cache: texts are generated from it, so that sources are read once."""
        return {**self.inputs(batch), "use_cache": True}

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        source, target = (list(map(int, example[name])) for name in ("source", self.target_name))
        return pieces(self.text_tokenizer, source + target, [False] * len(source) + [True] * len(target))

    def set_generation(self, config: GenerationConfig) -> GenerationConfig:
        """Change generation settings, in place, as the recipe says.

        Raises:
            ConfigError: task.generation has an unknown key, or values that cannot be used together.
        """
        from hftune.models.generation import changed, tidy

        return changed(tidy(config, self.generation), {"max_new_tokens": self.max_target_length, **self.generation})

    @property
    def rows_per_sample(self) -> int:
        return int(self.generation.get("num_beams") or 1)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Generate texts. Return rows of the target in the data, generated, and source (its beginning)."""
        rows = self.rows_of(batch)
        sources, targets = (rows[self.read_columns[f"{name}_column"]] for name in ("source", "target"))
        columns = zip(targets, self._generate(outputs, model, batch), sources, strict=True)
        return [
            {self.target_name: target, "generated": text, "source": source[: self.source_shown]}
            for target, text, source in columns
        ]

    def _generate(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[str]:
        """Generate texts, going on from what the model returned for ``evaluation_inputs``, whose cache this uses up."""
        from hftune.models.generation import continued

        prompt = self.prompt(batch)
        ids = model.generate(**prompt, **continued(outputs, batch["labels"].shape[1], model.generation_config))
        if not model.config.is_encoder_decoder:
            ids = ids[:, prompt["input_ids"].shape[1] :]
        return self.text_tokenizer.batch_decode(ids, skip_special_tokens=True)

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return a row for each text, whose ``generated`` is its target."""
        check_inputs(inputs)
        sources, _ = self.source_ids(inputs)
        batch = self.collate([{**self.empty_target(), "source": ids, "index": 0} for ids in sources])
        batch = {name: value.to(model.device) for name, value in batch.items()}
        outputs = model(**self.evaluation_inputs(batch))
        return [{"generated": text} for text in self._generate(outputs, model, batch)]


@dataclass
class Seq2Seq(SourceToTarget):
    """Write a target text for a source text. The loss is cross-entropy; an item is a token of the target, its end included."""

    model: str | None = key("google-t5/t5-small", changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a byte-level
    tokenizer trained on the texts."""
    source_column: str | None = None
    """Column of the source texts, such as document, or translation.en of rows with a text for each language. null: the only
    column that can be it."""
    target_column: str | None = None
    """Column of the target texts, such as summary or translation.de. null: the only column that can be it."""
    prefix: str | None = None
    """Text before each source, such as "summarize: ", which tells a model like T5 what to do. null: none."""
    source_language: str | None = None
    """Language code of the sources, for models of several languages: en_XX for mBART, eng_Latn for NLLB, en for M2M100."""
    target_language: str | None = None
    """Language code of the targets, likewise. A generated text starts with it."""
    language: str = "en"
    """Language of the targets (ISO 639-1), by which metrics cut words. en: stemmed words for ROUGE; zh: characters and jieba's
    words; others: words as they are, or characters in scripts without spaces."""
    scores: list[str] = key(lambda: ["rouge"], choices=SCORES, changes="output")
    """Metrics of the generated texts: rouge (in [0, 1]), bleu (sacreBLEU) and chrf (both 0 to 100)."""

    auto_class = "AutoModelForSeq2SeqLM"
    sample_fields = ("source", "target", "generated")

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on scores and language
        return directions("exact_match", *score_names(self.scores, SCORES, self.language))

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if (self.source_language is None) != (self.target_language is None):
            missing = "source" if self.source_language is None else "target"
            yield f"task.{missing}_language is missing: set both languages or none."
        if re.fullmatch("[a-z]{2,3}", self.language) is None:
            yield f"task.language={self.language} is not a code of ISO 639-1, such as en, de or zh."

    def flat(self, rows: Dataset) -> Dataset:
        """Give each text of a column with several, such as translation, a column of its own: translation.en."""
        from datasets import Translation

        has_parts = any(isinstance(kind, (dict, Translation)) for kind in rows.features.values())
        return rows.flatten() if has_parts else rows

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._for_languages(super().text_tokenizer)

    def new_tokenizer(self, cached: Callable[[Callable[[], Any]], Any]) -> PreTrainedTokenizerBase:
        from hftune.data.byte_tokenizer import byte_tokenizer, train_bytes

        return byte_tokenizer(cached(lambda: train_bytes(self.training_texts(), self.vocab_size)))

    def _for_languages(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Set the languages of a tokenizer that has some.

        Raises:
            ConfigError: it needs languages that the recipe does not name, has others, or has none.
        """
        given, codes = {"source": self.source_language, "target": self.target_language}, []
        if hasattr(tokenizer, "src_lang"):  # it marks texts with their language, unlike those of T5, BART or Marian
            special = [token for token in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", token)]
            codes = [*(getattr(tokenizer, "lang_code_to_id", None) or special)]
        if not codes:
            if self.source_language is not None:
                raise ConfigError(
                    f"task.source_language={self.source_language}: task.model={self.model} has no language codes. Leave both "
                    "languages out; a model such as T5 is told what to do by task.prefix."
                )
            return tokenizer
        for side, code in given.items():
            if code is None:
                raise ConfigError(
                    f"task.model={self.model} reads and writes several languages: set task.source_language and "
                    f"task.target_language to two of its codes, such as {' and '.join(codes[:2])}."
                )
            if code not in codes:
                hint = did_you_mean(code, codes)
                raise ConfigError(f"task.{side}_language={code} is not a language code of task.model={self.model}.{hint}")
        tokenizer.src_lang, tokenizer.tgt_lang = self.source_language, self.target_language
        return tokenizer

    def datasets(self) -> Mapping[str, Any]:
        """Return the tokenized splits: source, target (tokens), source_cut, target_cut (bool), index (of the row) and split."""
        _ = self.named_config  # refuses a model that is no encoder-decoder before the data are read
        self._check_language()
        return super().datasets()

    def _check_language(self) -> None:
        """Refuse scores that do not see the words of the targets.

        ROUGE for English sees a to z and digits only, and BLEU takes a Chinese or Japanese sentence for a single word.
        """
        from hftune.metrics.translation import CHARACTERS

        targets = self.rows.get("eval", self.rows["train"])[:1000][self.read_columns["target_column"]]
        letters, what = [letter for text in targets for letter in text if letter.isalpha()], None
        if "rouge" in self.scores and self.language == "en":
            is_seen = any(re.search("[A-Za-z0-9]", text) for text in targets)
            if not is_seen or 2 * sum(letter.isascii() for letter in letters) < len(letters):
                what = "few letters from a to z, and ROUGE for English sees no others"
        is_spaceless = 2 * len(re.findall(HAN_OR_KANA, "".join(letters))) > len(letters)
        if what is None and "bleu" in self.scores and is_spaceless and self.language not in CHARACTERS:
            what = "mostly Chinese or Japanese characters, of which BLEU would count whole sentences as words"
        if what is not None:
            example = min(targets, key=lambda text: len(re.findall("[A-Za-z0-9]", text)) / (len(text) or 1))
            raise DataError(
                f"task.language={self.language}, but the targets have {what}: {example[:20]!r}. Set task.language to their "
                "language, such as zh."
            )

    def source_ids(self, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        return super().source_ids([f"{self.prefix or ''}{text}" for text in texts])

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        from hftune.data.tokenized import to_ids

        def as_targets(texts: list[str], **settings: Any) -> Any:
            return self.text_tokenizer(text_target=texts, **settings)

        sources, source_cut = self.source_ids(rows[self.read_columns["source_column"]])
        targets, target_cut = to_ids(rows[self.read_columns["target_column"]], as_targets, self.max_target_length)
        return {"source": sources, "target": targets, "source_cut": source_cut, "target_cut": target_cut}

    def encoded_by(self) -> Any:
        languages = (self.source_language, self.target_language)
        return [self.prefix, *languages, self.max_source_length, self.max_target_length]

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        """The config of the model that the recipe names, or of the new model, without the tokenizer's tokens.

        Raises:
            ConfigError: it is not an encoder-decoder for texts.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

        config = super().named_config
        if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or not config.is_encoder_decoder:
            key = "task.model_config.model_type" if self.model is None else f"task.model={self.model}"
            raise ConfigError(
                f"{key}{'=' if self.model is None else ' is a model of type '}{config.model_type}, which has no encoder and "
                "decoder: Seq2Seq needs both, as google-t5/t5-small, facebook/bart-base or Helsinki-NLP/opus-mt-en-de have."
            )
        return config

    @cached_property
    def _config(self) -> PreTrainedConfig:
        """The config of the model, with the token that starts a target."""
        from hftune.models.pretrained import load_config

        if self.model is None:  # with the tokenizer's special tokens; padding starts a target, as T5's does
            tokens = self.text_tokenizer
            pad, end = tokens.pad_token_id, tokens.eos_token_id
            special = {"pad_token_id": pad, "bos_token_id": pad, "eos_token_id": end}
            special |= {"decoder_start_token_id": pad, "forced_eos_token_id": end}
            special = {name: token for name, token in special.items() if hasattr(self.named_config, name)}
            config = load_config(None, {**self.model_config, **special, "vocab_size": len(tokens)})
            config.decoder_start_token_id = pad  # which T5's config has no field for
        else:
            config = deepcopy(self.named_config)
        code, is_first = self._language_token
        # mBART's first version starts a target with the language code that ends it; its later ones force the code instead.
        given = (self.generation.get("decoder_start_token_id"), None if is_first else code)
        known = (getattr(config, "decoder_start_token_id", None), self.own_generation.decoder_start_token_id)
        config.decoder_start_token_id = next((token for token in (*given, *known) if token is not None), None)
        if config.decoder_start_token_id is None:
            raise ConfigError(
                f"task.model={self.model} does not say which token starts a target: set task.generation.decoder_start_token_id."
            )
        return config

    @cached_property
    def _language_token(self) -> tuple[int | None, bool]:
        """The token of the target language, None if there is none, and whether a target begins with it, or ends."""
        tokens = self.text_tokenizer
        if self.target_language is None:
            return None, False
        ids = tokens(text_target="")["input_ids"]
        (code,) = {token for token in ids if token != tokens.eos_token_id}
        return code, ids[0] == code

    @cached_property
    def _generation_config(self) -> GenerationConfig:
        config = deepcopy(self.own_generation)
        config.update(decoder_start_token_id=self._config.decoder_start_token_id, max_length=None)
        code, is_first = self._language_token
        if is_first:
            config.update(forced_bos_token_id=code)
        return self.set_generation(config)

    @property
    def rows_per_sample(self) -> int:
        return int(self._generation_config.num_beams or 1)

    def build_model(self) -> PreTrainedModel:
        generation = self._generation_config
        model = self.load_model(self._config)
        model.generation_config = generation
        return model

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        own = {key: value for key, value in self._generation_config.to_diff_dict().items() if key in TOLD}
        own = {key: value for key, value in own.items() if key not in self.generation}
        settings = ", ".join(f"{key}={value}" for key, value in own.items())
        said = [f"Texts are generated with the model's own {settings}; task.generation changes that."] if settings else []
        return super().notices(datasets, model) + said

    @cached_property
    def _shift(self) -> Callable[[Tensor], Tensor]:
        """The model's own function from labels to decoder inputs: mBART's puts the last token first, T5's its start token.

        It is a method that needs no more of the model than its config, so an instance without layers has it.
        """
        from torch import nn
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

        def shifted(labels_NT: Tensor) -> Tensor:
            ids_NT = labels_NT.roll(1, 1)
            ids_NT[:, 0] = self._config.decoder_start_token_id
            return ids_NT.masked_fill_(ids_NT == NO_LABEL, self.text_tokenizer.pad_token_id)

        kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(self._config)]
        if not hasattr(kind, "prepare_decoder_input_ids_from_labels"):  # M2M100 and others, which start as T5 does
            return shifted
        model = kind.__new__(kind)
        nn.Module.__init__(model)
        model.config = self._config
        return model.prepare_decoder_input_ids_from_labels

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad sources to the longest, S, and targets to the longest, T.

        Returns:
            input_ids and attention_mask (N, S), decoder_input_ids and labels (N, T): int64. index (N,): row of the split;
            split (N,): its ``number_of``.
        """
        from hftune.data.tokenized import ragged, values

        ids_NS, mask_NS = ragged(examples, "source").padded(self.text_tokenizer.pad_token_id)
        labels_NT = ragged(examples, "target").padded(NO_LABEL)[0]
        batch = {"input_ids": ids_NS, "attention_mask": mask_NS, "decoder_input_ids": self._shift(labels_NT.clone())}
        return {**batch, "labels": labels_NT, "index": values(examples, "index"), "split": values(examples, "split")}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        return {**{name: batch[name] for name in names}, "use_cache": False}

    def prompt(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def empty_target(self) -> dict[str, Any]:
        return {"target": [self.text_tokenizer.eos_token_id], "split": 0}

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with each text's ROUGE-L, or else its chrF, and what it lacks to a perfect score as the error."""
        texts, targets = [row["generated"] for row in rows], [row["target"] for row in rows]
        if "chrf" in self.scores and "rouge" not in self.scores:
            from hftune.metrics.translation import chrf_of_each

            name, top, scores = "chrf", 100, chrf_of_each(texts, targets)
        else:
            from hftune.metrics.rouge import rouge_l_of_each

            top, (name, scores) = 1, rouge_l_of_each(texts, targets, self.language)
        return [
            {**row, name: round(score, 6), "error": round(1 - score / top, 6)} for row, score in zip(rows, scores, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        texts, targets = [row["generated"] for row in rows], [row["target"] for row in rows]
        return text_scores(["exact_match", *self.scores], texts, targets, self.language)

    def load(self, directory: Path) -> PreTrainedModel:
        model = super().load(directory)
        self.text_tokenizer = self._for_languages(self.text_tokenizer)
        self._config = model.config
        self._generation_config = self.set_generation(model.generation_config)  # the recipe's may have changed since
        return model


TOLD = ("num_beams", "length_penalty", "min_length", "max_length", "no_repeat_ngram_size", "early_stopping", "do_sample")
"""Generation settings of a model that a user should know of."""
