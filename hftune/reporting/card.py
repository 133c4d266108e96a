"""The model card: README.md beside an exported model, written from the files of its run's output folder. Knows no Hub."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftune.checkpoints.export import read_about
from hftune.config.importing import is_own
from hftune.config.recipe import Recipe, type_name
from hftune.task import Task
from hftune.tracking.console import is_number, short
from hftune.tracking.facts import NAME as RUN
from hftune.tracking.jsonl import read_lines

CARD = "README.md"
"""The card's file in the folder of a model, and in its repository on the Hub, which shows it as the start page."""
RECIPE, RESULT, METRICS = "recipe.yaml", "result.json", "metrics.jsonl"
"""Files of a run's output folder."""
TASKS = {
    "Chats": ("text-generation", "that answers chats"),
    "Embeddings": ("sentence-similarity", "that embeds texts for retrieval"),
    "ImageClassification": ("image-classification", "that classifies images"),
    "ImageRestoration": ("image-to-image", "that restores images"),
    "LanguageModeling": ("text-generation", "that continues texts"),
    "Seq2Seq": ("text2text-generation", "that writes a text for a text"),
    "SequenceClassification": ("text-classification", "that classifies texts"),
    "TitleGeneration": ("summarization", "that writes titles for texts"),
    "TokenClassification": ("token-classification", "that tags the words of texts"),
}
"""The Hub's name of each shipped task, and what its models do, by class."""
INPUTS = {"image-classification": '["image.png"]', "image-to-image": '[("image.png", "mask.png")]'}
"""Inputs of ``TrainedModel.predict`` in the example, where they are not texts."""
MAX_LABELS = 50
"""Labels that the card lists; ImageNet's thousand would hide the rest."""


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
    num_evaluations: int
    """From which the best one was chosen; 0 if it is not known."""
    epochs: float | None
    """Passes over the training data until the last line of metrics.jsonl."""
    model_config: dict[str, Any]
    """config.json of the model, if it has one."""
    base: dict[str, Any]
    """base.json of a model that is adapters: the model that they belong to."""
    needs_trust: bool
    """Whether the recipe names code that is not hftune's."""

    @property
    def is_finished(self) -> bool:
        return "steps" in self.result

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
    run = read_json(folder / RUN)
    best = {name: value for name, value in read_about(folder / "model").items() if name in ("step", "metric", "value")}
    known = {"best": best, "commits": run.get("commits", {}), "versions": run.get("versions", {})}
    found = {**known, **(result or read_json(folder / RESULT))}
    lines = read_lines(folder / METRICS)
    return CardFacts(
        recipe,
        recipe.to_dict(),
        found,
        run,
        evaluation=evaluation_of(found["best"], lines),
        num_evaluations=sum("eval/loss" in line for line in lines),
        epochs=lines[-1].get("epoch") if lines else None,
        model_config=read_json(model / "config.json") or read_json(model / "model_config" / "config.json"),
        base=read_json(model / "base.json"),
        needs_trust=recipe.needs_trust(),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def evaluation_of(best: Mapping[str, Any], lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics that were logged for the best model; at least the one that chose it."""
    logged = [line for line in lines if line.get("step") == best.get("step") and "eval/loss" in line]
    named = {name.removeprefix("eval/"): value for line in logged[-1:] for name, value in line.items() if "eval/" in name}
    chosen = {best["metric"]: best["value"]} if "metric" in best else {}
    return numbers({**named, **chosen})


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are single finite numbers."""
    return {name: value for name, value in metrics.items() if is_number(value) and math.isfinite(value)}


# The card


def card(facts: CardFacts, repository: str | None = None) -> str:
    """Return the card as Markdown below YAML metadata. What is not known is left out.

    Args:
        repository: the model's name on the Hub. None: the card is about the folder on this machine.
    """
    sections = [
        f"# {facts.values['recipe']}",
        summary(facts),
        results(facts),
        usage(facts, repository),
        training(facts),
        again(facts, repository),
    ]
    return f"---\n{metadata(facts)}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def for_repository(text: str, facts: CardFacts, repository: str) -> str:
    """Return a card, which its author may have edited, with the Hub's name of the model in place of the local folder."""
    for section in (usage, again):
        text = text.replace(section(facts, None), section(facts, repository))
    return text


def metadata(facts: CardFacts) -> str:
    """Return the YAML by which the Hub sorts and finds models."""
    from huggingface_hub import ModelCardData

    dataset, scores = hub_dataset(facts), eval_results(facts)
    data = ModelCardData(
        model_name=facts.values["recipe"] if scores else None,  # it belongs to them
        base_model=hub_model(facts),
        datasets=[dataset] if dataset else None,
        library_name=library(facts),
        pipeline_tag=pipeline_tag(facts),
        tags=["hftune"],
        eval_results=scores or None,
    )
    return data.to_yaml()


def eval_results(facts: CardFacts) -> list[Any]:
    """Return the metrics of the best model as the Hub's model index has them; none for a task that the Hub has no name for."""
    from huggingface_hub import EvalResult

    tag, dataset = pipeline_tag(facts), hub_dataset(facts)
    if tag is None:
        return []
    return [
        EvalResult(
            task_type=tag,
            dataset_type=dataset or "custom",
            dataset_name=dataset or local_data(facts) or "own data",
            dataset_config=facts.task.get("dataset_config") if dataset else None,
            dataset_split=facts.task.get(f"{split}_split", split) if dataset else split,
            dataset_revision=facts.commits.get("task.dataset") if dataset else None,
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
            metric_name=name,
        )
        for split, metrics in (("eval", facts.evaluation), ("test", numbers(facts.result.get("test", {}))))
        for name, value in metrics.items()
    ]


def purpose(task: Task) -> tuple[str | None, str]:
    """Return the Hub's name of a task, and what a model is for; of a task of the user's own, that of the class it extends."""
    found = next((TASKS[kind.__name__] for kind in type(task).__mro__ if kind.__name__ in TASKS), None)
    return found or (None, f"for the task {code(type_name(type(task)))}")


def pipeline_tag(facts: CardFacts) -> str | None:
    """Return the Hub's name of the task; None for a task of the user's own."""
    options = facts.recipe.task.transformers_pipeline()
    return options["task"] if options else purpose(facts.recipe.task)[0]


def library(facts: CardFacts) -> str | None:
    """Return the Hub's name of the library that loads the model without hftune, if there is one."""
    if pipeline_tag(facts) == "sentence-similarity":
        return "sentence-transformers"
    if facts.base:
        return "peft"
    return "transformers" if is_of_transformers(facts) else None


def is_of_transformers(facts: CardFacts) -> bool:
    """Return whether ``from_pretrained`` loads the model without hftune."""
    if facts.recipe.task.transformers_pipeline():
        return True
    architectures = facts.model_config.get("architectures")
    if not architectures:
        return False
    import transformers

    return hasattr(transformers, architectures[0])  # dir() takes 0.2 s


def hub_model(facts: CardFacts) -> str | None:
    """Return the name of the pretrained model, if it came from the Hub."""
    return _from_hub(facts, "model")


def hub_dataset(facts: CardFacts) -> str | None:
    """Return the name of the data set, if it came from the Hub."""
    return _from_hub(facts, "dataset")


def _from_hub(facts: CardFacts, name: str) -> str | None:
    value = facts.task.get(name)
    is_named = isinstance(value, str) and not is_reference(value)
    return value if is_named and f"task.{name}" in facts.commits else None


def is_shipped(task: Task) -> bool:
    """Return whether a task is hftune's own."""
    return is_own(f"{type(task).__module__}.")


def is_reference(text: str) -> bool:
    """Return whether a text of a recipe stands for another one, such as the value of an environment variable."""
    return "${" in text


def local_data(facts: CardFacts) -> str | None:
    """Name data of a shipped task that are not from the Hub: a function, or files, whose paths are nobody's business."""
    dataset = facts.task.get("dataset")
    if not isinstance(dataset, str) or is_reference(dataset) or not is_shipped(facts.recipe.task):
        return None
    return dataset if ":" in dataset and not facts.task.get("data_files") else "own files"


# Its sections


def summary(facts: CardFacts) -> str:
    """Return one sentence on what the model is."""
    version = facts.result["versions"].get("hftune", "")
    return f"A model {purpose(facts.recipe.task)[1]}, {origin(facts)} with hftune {version}".rstrip() + "."


def origin(facts: CardFacts) -> str:
    """Say what the model was made from: "trained from scratch on ..."."""
    base, dataset, local = hub_model(facts), hub_dataset(facts), local_data(facts)
    if base:
        start = f"fine-tuned from {link(base)}"
    elif facts.task.get("model"):
        start = "fine-tuned from a local model"
    else:
        start = "trained from scratch" if "model" in facts.task else "trained"
    if dataset:
        return f"{start} on {link(dataset, 'datasets/')}"
    return f"{start} on {code(local) if ':' in local else local}" if local else start


def results(facts: CardFacts) -> str:
    """Return the metrics of the best model, and which one it is."""
    test = numbers(facts.result.get("test", {}))
    names = [*facts.evaluation, *(name for name in test if name not in facts.evaluation)]
    if not names:
        return ""
    best, metrics = facts.result["best"], {"evaluation": facts.evaluation, **({"test": test} if test else {})}
    head = [f"| metric | {' | '.join(metrics)} |", f"|---|{'---|' * len(metrics)}"]
    rows = [[code(name), *(short(found[name]) if name in found else "" for found in metrics.values())] for name in names]
    table_ = "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])
    num_steps = facts.result.get("steps") or facts.run.get("num_steps")
    chosen = f"This is the model after step {best['step']:,}" + (f" of {num_steps:,}" if num_steps else "")
    if facts.num_evaluations > 1:
        chosen += f", the best of {facts.num_evaluations} evaluations by {code(best['metric'])}"
    unfinished = "" if facts.is_finished else " Its training was not finished when this card was written."
    return f"## Results\n\n{table_}\n\n{chosen}.{unfinished}"


def usage(facts: CardFacts, repository: str | None) -> str:
    """Return how to load the model, and its labels."""
    options = facts.recipe.task.transformers_pipeline()
    if facts.base and is_of_transformers(facts):
        example = adapter_example(facts, repository or f"{facts.values['output_dir']}/model", options)
    elif options:
        example = pipeline_example(options, repository or f"{facts.values['output_dir']}/model")
    else:
        example = hftune_example(facts, repository)
    needs = "It needs code that is not part of hftune: the modules that `recipe.yaml` names." if facts.needs_trust else ""
    parts = ["## How to use it", f"```python\n{example}\n```", "" if "transformers" in example else needs, vectors(facts)]
    parts += [labels(facts)]
    return "\n\n".join(filter(None, parts))


def adapter_example(facts: CardFacts, model: str, options: Mapping[str, Any] | None) -> str:
    """Return Python that loads base and adapters, and merges them. peft does so for all kinds; see ``vectors``."""
    kind, base = facts.model_config["architectures"][0], facts.base["name"] or f"{model}/base"
    commit = f", revision={quoted(facts.base['commit'])}" if facts.base["commit"] else ""
    task = f'"{options["task"]}"' if options else None
    settings = "".join(f", {name}={value!r}" for name, value in options.items() if name != "task") if options else ""
    names = ["AutoConfig", *(["AutoTokenizer", "pipeline"] if options else []), kind]
    lines = [
        "from peft import PeftModel",
        f"from transformers import {', '.join(sorted(names, key=lambda name: (name.islower(), name)))}\n",
        f"folder = {quoted(model)}",
        'config = AutoConfig.from_pretrained(folder, subfolder="model_config")',
        f"base = {kind}.from_pretrained({quoted(base)}{commit}, config=config, ignore_mismatched_sizes=True)",
        "model = PeftModel.from_pretrained(base, folder).merge_and_unload()",
    ]
    if options:
        lines += [
            f"predict = pipeline({task}, model=model, tokenizer=AutoTokenizer.from_pretrained(folder){settings})",
            'predict(["A text."])',
        ]
    return "\n".join(lines)


def vectors(facts: CardFacts) -> str:
    """Say what else looks as if it loaded DoRA's adapters, and does not."""
    if not facts.base or facts.values["adapter"]["type"] != "dora":
        return ""
    return (
        "Load it with peft, as here, or with hftune. `AutoModel.from_pretrained` of transformers (5.23) leaves DoRA's vectors "
        "out without a word."
    )


def pipeline_example(options: Mapping[str, Any], model: str) -> str:
    """Return Python that loads the model as a transformers pipeline."""
    settings = "".join(f", {name}={value!r}" for name, value in options.items() if name != "task")
    return (
        "from transformers import pipeline\n\n"
        f'predict = pipeline("{options["task"]}", model={quoted(model)}{settings})\n'
        'predict(["A text."])'
    )


def hftune_example(facts: CardFacts, repository: str | None) -> str:
    """Return Python that loads the model with hftune."""
    imports = "import hftune" + ("\nfrom huggingface_hub import snapshot_download" if repository else "")
    place = f"snapshot_download({quoted(repository)})" if repository else quoted(facts.values["output_dir"])
    trust = ", trust_code=True" if facts.needs_trust else ""
    inputs = INPUTS.get(pipeline_tag(facts) or "", '["A text."]' if pipeline_tag(facts) else "inputs")
    predicts = type(facts.recipe.task).predict is not Task.predict
    last = f"trained.predict({inputs})" if predicts else "trained.model  # a torch.nn.Module"
    return f"{imports}\n\ntrained = hftune.load_model({place}{trust})\n{last}"


def labels(facts: CardFacts) -> str:
    """Return a sentence with the names of the classes, if there are any."""
    config = facts.model_config
    named = [config["id2label"][key] for key in sorted(config["id2label"], key=int)] if "id2label" in config else None
    names = facts.run.get("labels") or named or config.get("label_names") or []
    if not names:
        return ""
    more = f" and {len(names) - MAX_LABELS} more" if len(names) > MAX_LABELS else ""
    return f"Labels: {', '.join(code(name) for name in names[:MAX_LABELS])}{more}."


def training(facts: CardFacts) -> str:
    """Return a table of what the training depends on."""
    rows = {**dict(data_rows(facts)), **dict(recipe_rows(facts)), **dict(run_rows(facts))}
    lines = [f"| {name} | {value} |".replace("\n", " ") for name, value in rows.items()]
    return "\n".join(["## How it was trained", "", "| | |", "|---|---|", *lines])


def data_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows on the model and the data that training started from."""
    for name, title in (("model", "base model"), ("dataset", "data set"), ("tokenizer", "tokenizer")):
        if value := _from_hub(facts, name):
            yield (
                title,
                f"{link(value, 'datasets/' if name == 'dataset' else '')}, commit {code(facts.commits[f'task.{name}'])}",
            )
    for split, title in (("train", "training data"), ("eval", "evaluation data"), ("test", "test data")):
        data = facts.run.get("data", {}).get(split, {})
        parts = [f"{data['samples']:,} samples"] if "samples" in data else []
        parts += [f"digest {code(data['digest'])}"] if data.get("digest") else []
        if parts:
            yield title, ", ".join(parts)
    if count := facts.run.get("parameters"):
        trained = facts.run.get("trainable_parameters", count)
        kind = f"{code(facts.run['model'])}, " if facts.run.get("model") else ""
        yield "network", f"{kind}{count:,} parameters" + (f", of which {trained:,} were trained" if trained != count else "")


def recipe_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows on the settings that matter most."""
    train, adapter = facts.values["train"], facts.values.get("adapter", {})
    if kind := adapter.get("type"):
        packed = f", beside weights in {adapter['quantize']}" if adapter["quantize"] else ""
        yield "adapters", f"{kind}, rank {adapter['rank']}, alpha {adapter['alpha']:g}{packed}"
    yield "global batch", f"{train['batch_size']:,} samples"
    if steps := facts.result.get("steps") or facts.run.get("num_steps"):
        epochs = f"{facts.epochs:.3g} epoch{'' if facts.epochs == 1 else 's'}" if facts.epochs and facts.is_finished else ""
        yield "steps", f"{steps:,}{epochs and f' ({epochs})'}"
    yield "optimizer", f"{train['optimizer']}, weight decay {train['weight_decay']:g}"
    warmup = f", warm-up over {100 * train['warmup_ratio']:.3g} % of the steps" if train["warmup_ratio"] else ""
    yield "learning rate", f"{train['lr']:g}, {train['schedule']} schedule{warmup}"
    if train["clip_norm"] is not None:
        yield "gradient clipping", f"norm {train['clip_norm']:g}"
    precision = facts.run.get("precision", train["mixed_precision"])
    yield "precision", "float32" if precision == "no" else f"{precision} (mixed)"
    yield "seed", str(facts.values["seed"])


def run_rows(facts: CardFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows on where it was trained, and with what."""
    run, result = facts.run, facts.result
    if count := result.get("world_size") or run.get("processes"):
        nodes = f", {run['nodes']} machines," if run.get("nodes", 1) > 1 else ""
        yield "processes", f"{count}{nodes}" + (f" on {run['device']}" if run.get("device") else "")
    if seconds := result.get("seconds"):
        yield "time", duration(seconds)
    if versions := result.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if git := run.get("git"):
        yield "code", f"commit {code(git['commit'])}" + (" with changes that are in no commit" if git.get("is_dirty") else "")


def again(facts: CardFacts, repository: str | None) -> str:
    """Return how to train the model again."""
    recipe = RECIPE if repository else f"{facts.values['output_dir']}/{RECIPE}"
    pins = [f"{key}_revision={commit}" for key, commit in facts.commits.items() if not facts.task.get(f"{key[5:]}_revision")]
    command = shlex.join(["hftune", "train", f"recipe={recipe}", "output_dir=outputs/again", *pins])
    where = f"{code(RECIPE)}, beside this file, holds" if repository else f"{code(RECIPE)} holds"
    files = "" if hub_dataset(facts) or local_data(facts) != "own files" else " The data are not included."
    return (
        f"## How to train it again\n\n```bash\n{command}\n```\n\n"
        f"{where} every setting.{files} The result does not depend on the number of processes; `--processes 4` starts four."
    )


# Words


def quoted(text: str) -> str:
    """Return a Python literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def code(text: Any) -> str:
    """Format a text as code that can stand in a table."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split())}`".replace("|", "\\|")


def link(name: str, kind: str = "") -> str:
    """Return a link to a repository on the Hub."""
    return f"[{name}](https://huggingface.co/{kind}{name})"


def duration(seconds: float) -> str:
    """Format a time for reading: 45 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
