"""The model card: README.md beside an exported model, written from the files of its run's output folder. Knows no Hub."""

from __future__ import annotations

import functools
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from hftune.checkpoints.export import read_about
from hftune.config.importing import is_own
from hftune.config.recipe import Recipe, type_name
from hftune.data.sources import is_database
from hftune.task import Task
from hftune.tracking.console import duration, is_number, short
from hftune.tracking.facts import NAME as RUN
from hftune.tracking.jsonl import read_lines, read_object

CARD = "README.md"
"""The card's file in the folder of a model, and in its repository on the Hub, which shows it as the start page."""
RECIPE, RESULT, METRICS = "recipe.yaml", "result.json", "metrics.jsonl"
"""Files of a run's output folder."""
TASKS = {
    "AudioClassification": ("audio-classification", "that classifies recordings"),
    "Chats": ("text-generation", "that answers chats"),
    "Embeddings": ("sentence-similarity", "that embeds texts for retrieval"),
    "ImageClassification": ("image-classification", "that classifies images"),
    "ImageRestoration": ("image-to-image", "that restores images"),
    "KTO": ("text-generation", "that answers chats as people judge to be good"),
    "LanguageModeling": ("text-generation", "that continues texts"),
    "MaskedLanguageModeling": ("fill-mask", "that fills gaps in texts"),
    "MultipleChoice": ("multiple-choice", "that chooses the right one of several texts"),
    "ObjectDetection": ("object-detection", "that finds objects in images"),
    "Preferences": ("text-generation", "that answers chats as people prefer"),
    "ProcessReward": ("token-classification", "that judges the steps of solutions"),
    "QuestionAnswering": ("question-answering", "that finds the answer to a question in a text"),
    "Reranking": ("text-ranking", "that scores texts for a query"),
    "RewardModel": ("text-ranking", "that scores answers to chats"),
    "SemanticSegmentation": ("image-segmentation", "that classifies the pixels of images"),
    "Seq2Seq": ("text2text-generation", "that writes a text for a text"),
    "SequenceClassification": ("text-classification", "that classifies texts"),
    "SpeechRecognition": ("automatic-speech-recognition", "that recognizes speech"),
    "SpeechToText": ("automatic-speech-recognition", "that recognizes speech"),
    "TitleGeneration": ("summarization", "that writes titles for texts"),
    "TokenClassification": ("token-classification", "that tags the words of texts"),
    "VisionChats": ("image-text-to-text", "that answers chats with pictures"),
}
"""The Hub's name of each shipped task, and what its models do, by class."""
INPUTS = {
    "audio-classification": '["recording.wav"]',
    "automatic-speech-recognition": '["recording.wav"]',
    "image-classification": '["image.png"]',
    "image-segmentation": '["image.png"]',
    "image-text-to-text": '[{"messages": [{"role": "user", "content": "What is this?"}], "images": ["image.png"]}]',
    "image-to-image": '[("image.png", "mask.png")]',
    "multiple-choice": '[["A question?", ["A choice.", "Another one."]]]',
    "question-answering": '[["A question?", "A text with the answer."]]',
    "object-detection": '["image.png"]',
    "text-ranking": '[["A question?", "An answer."]]',
    "token-classification": '[["A question?", ["A step.", "Another one."]]]',
}
"""Inputs of ``TrainedModel.predict`` in the example, where they are not texts."""


@dataclass(frozen=True)
class CardFacts:
    """What a card says about a run."""

    recipe: Recipe
    values: dict[str, Any]
    """The recipe as it was written: what comes from an environment variable is its reference."""
    result: dict[str, Any]
    """result.json; of a run that is not finished, as much of it as is known."""
    run: dict[str, Any]
    """run.json; empty in folders of older versions."""
    evaluation: dict[str, float]
    """Metrics of the best model, numbers only."""
    test: dict[str, float]
    """The same of the test."""
    num_evaluations: int
    """From which the best one was chosen; 0 if it is not known."""
    epochs: float | None
    """Passes over the training data until the last line of metrics.jsonl."""
    model_config: dict[str, Any]
    """config.json of the model, if it has one."""
    base: dict[str, Any]
    """base.json of a model that is adapters: the model that they belong to."""

    @property
    def commits(self) -> dict[str, str]:
        return self.result.get("commits", {})

    @property
    def task(self) -> dict[str, Any]:
        """The recipe's ``task:`` section."""
        return self.values["task"]


def read_facts(folder: Path, recipe: Recipe, result: Mapping[str, Any] | None = None, model: Path | None = None) -> CardFacts:
    """Read what a card says from a run's output folder, also of a run that is not finished.

    Args:
        result: the contents of result.json before it is written.
        model: folder of the model. None: the run's best one.
    """
    model = model or folder / "model"
    run = read_object(folder / RUN)
    best = {name: value for name, value in read_about(folder / "model").items() if name in ("step", "metric", "value")}
    known = {"best": best, "commits": run.get("commits", {}), "versions": run.get("versions", {})}
    found = {**known, **(result or read_object(folder / RESULT))}
    best, lines = found["best"], read_lines(folder / METRICS)
    evaluation = chosen = {best["metric"]: best["value"]} if "metric" in best else {}
    for line in lines:
        if line.get("step") == best.get("step") and "eval/loss" in line:
            evaluation = {name.removeprefix("eval/"): value for name, value in line.items() if "eval/" in name} | chosen
    return CardFacts(
        recipe,
        recipe.to_dict(),
        found,
        run,
        numbers(evaluation),
        numbers(found.get("test", {})),
        num_evaluations=sum("eval/loss" in line for line in lines),
        epochs=lines[-1].get("epoch") if lines else None,
        model_config=read_object(model / "config.json") or read_object(model / "model_config" / "config.json"),
        base=read_object(model / "base.json"),
    )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are single finite numbers."""
    return {name: value for name, value in metrics.items() if is_number(value) and math.isfinite(value)}


# The card


def card(facts: CardFacts, repository: str | None = None) -> str:
    """Return the card as Markdown below YAML metadata. What is not known is left out.

    Args:
        repository: the model's name on the Hub. None: the card is about the folder on this machine.
    """
    return template().render(context(facts, repository))


def for_repository(text: str, facts: CardFacts, repository: str) -> str:
    """Return a card, which its author may have edited, with the Hub's name of the model in place of the local folder."""
    for block in ("usage", "again"):
        local, pushed = (
            "".join(template().blocks[block](template().new_context(context(facts, name)))) for name in (None, repository)
        )
        text = text.replace(local.strip(), pushed.strip())
    return text


@functools.cache
def template() -> Template:
    found = Environment(
        loader=PackageLoader("hftune.reporting"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    quoted = functools.partial(json.dumps, ensure_ascii=False)  # a Python literal in double quotes
    found.filters |= {"code": code, "quoted": quoted, "short": short, "count": "{:,}".format, "duration": duration}
    found.filters["link"] = lambda name, kind="": f"[{name}](https://huggingface.co/{kind}{name})"
    return found.get_template("card.md")


def context(facts: CardFacts, repository: str | None) -> dict[str, Any]:
    """Return what the template is filled in with."""
    run, result, task, values, config = facts.run, facts.result, facts.recipe.task, facts.values, facts.model_config
    pipeline, tag = task.transformers_pipeline(), pipeline_tag(facts)
    predicts = type(task).predict is not Task.predict
    pins = [f"{key}_revision={commit}" for key, commit in facts.commits.items() if not facts.task.get(f"{key[5:]}_revision")]
    recipe = RECIPE if repository else f"{values['output_dir']}/{RECIPE}"
    names = config.get("id2label", {})
    return {
        **vars(facts),
        "train": values["train"],
        "is_finished": "steps" in result,
        "metadata": metadata(facts),
        "purpose": purpose(task)[1],
        "task": facts.task,
        "hub": {name: from_hub(facts, name) for name in ("model", "dataset", "tokenizer")},
        "commits": facts.commits,
        "local_data": local_data(facts),
        "scores": {"evaluation": facts.evaluation, **({"test": facts.test} if facts.test else {})},
        "names": [*dict.fromkeys([*facts.evaluation, *facts.test])],
        "best": result["best"],
        "num_steps": result.get("steps") or run.get("num_steps"),
        "repository": repository,
        "model": repository or f"{values['output_dir']}/model",
        "adapters": facts.base if is_of_transformers(facts) else {},
        "architecture": next(iter(config.get("architectures") or []), None),
        "pipeline": pipeline,
        "settings": "".join(f", {name}={value!r}" for name, value in (pipeline or {}).items() if name != "task"),
        "inputs": INPUTS.get(tag or "", '["A text."]' if tag else "inputs") if predicts else None,
        "needs_trust": facts.recipe.needs_trust(),
        "labels": run.get("labels") or [names[key] for key in sorted(names, key=int)] or config.get("label_names") or [],
        "command": shlex.join(["hftune", "train", f"recipe={recipe}", "output_dir=outputs/again", *pins]),
    }


def metadata(facts: CardFacts) -> str:
    """Return the YAML by which the Hub sorts and finds models; with the metrics, if the Hub has a name for the task."""
    from huggingface_hub import EvalResult, ModelCardData

    tag, dataset, task = pipeline_tag(facts), from_hub(facts, "dataset"), facts.task
    scores = [
        EvalResult(
            task_type=tag,
            dataset_type=dataset or "custom",
            dataset_name=dataset or local_data(facts) or "own data",
            dataset_config=task.get("dataset_config") if dataset else None,
            dataset_split=task.get(f"{split}_split", split) if dataset else split,
            dataset_revision=facts.commits.get("task.dataset") if dataset else None,
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
            metric_name=name,
        )
        for split, metrics in (("eval", facts.evaluation), ("test", facts.test))
        for name, value in metrics.items()
        if tag is not None and not name.startswith(tuple(f"{each}/" for each in facts.recipe.eval.sets))  # of other data
    ]
    library = "transformers" if is_of_transformers(facts) else None
    data = ModelCardData(
        model_name=facts.values["recipe"] if scores else None,  # it belongs to them
        base_model=from_hub(facts, "model"),
        datasets=[dataset] if dataset else None,
        library_name="sentence-transformers" if tag == "sentence-similarity" else "peft" if facts.base else library,
        pipeline_tag=tag,
        tags=["hftune"],
        eval_results=scores or None,
    )
    return data.to_yaml()


def purpose(task: Task) -> tuple[str | None, str]:
    """Return the Hub's name of a task, and what a model is for; of a task of the user's own, that of the class it extends."""
    found = next((TASKS[kind.__name__] for kind in type(task).__mro__ if kind.__name__ in TASKS), None)
    return found or (None, f"for the task {code(type_name(type(task)))}")


def pipeline_tag(facts: CardFacts) -> str | None:
    """Return the Hub's name of the task; None for a task of the user's own."""
    options = facts.recipe.task.transformers_pipeline()
    return options["task"] if options else purpose(facts.recipe.task)[0]


def is_of_transformers(facts: CardFacts) -> bool:
    """Return whether ``from_pretrained`` loads the model without hftune."""
    if facts.recipe.task.transformers_pipeline():
        return True
    architectures = facts.model_config.get("architectures")
    if not architectures:
        return False
    import transformers

    return hasattr(transformers, architectures[0])  # dir() takes 0.2 s


def from_hub(facts: CardFacts, name: str) -> str | None:
    """Return the name of the pretrained model, the data set or the tokenizer, if it came from the Hub."""
    value = facts.task.get(name)
    is_named = isinstance(value, str) and not is_reference(value)
    return value if is_named and f"task.{name}" in facts.commits else None


def is_reference(text: str) -> bool:
    """Return whether a text of a recipe stands for another one, such as the value of an environment variable."""
    return "${" in text


def local_data(facts: CardFacts) -> str | None:
    """Name data of a shipped task that are not from the Hub: a function, or files, whose paths are nobody's business, as is the
    URL of a database."""
    dataset = facts.task.get("dataset")
    if not isinstance(dataset, str) or not is_own(f"{type(facts.recipe.task).__module__}."):
        return None
    if is_reference(dataset) or is_database(dataset):
        return None
    return dataset if ":" in dataset and not facts.task.get("data_files") else "own files"


def code(text: Any) -> str:
    """Format a text as code that can stand in a table."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split())}`".replace("|", "\\|")
