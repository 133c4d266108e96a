"""Tries what goes with what, and writes docs/composition.md: each two features are trained together, and each task with some.

``python -m tests.support.composition > docs/composition.md`` takes some minutes. A cell says yes only if two steps and an
evaluation were trained with both, both were in effect, and the losses are what they should be: those without a feature that
only changes how they are computed, and others with a feature that changes what is learned. Anything but that and a refusal is
a fault, and there is no page.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from tests.support.runs import FSDP, Group

TINY = (
    *("eval.every=epoch", "eval.metric=loss", "eval.batch_size=4", "eval.show_samples=0"),
    *("task.max_train_samples=16", "task.max_eval_samples=4", "train.batch_size=8", "train.micro_batch_size=2"),
    *("train.micro_batch_tokens=null", "train.epochs=1", "train.max_steps=2", "train.packing=off", "train.head_loss=whole"),
    *("train.schedule=constant", "train.warmup_ratio=0", "train.log_every=1", "train.mixed_precision=no"),
)
"""Two steps of four micro-batches; nothing of what is tried is on."""
SIZES = (
    "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
    "max_position_embeddings: 128, initializer_range: 0.1, tie_word_embeddings: false"
)
ROUTED = "num_local_experts: 2, num_experts_per_tok: 1, output_router_logits: true"
BEGINNINGS = {
    "base": f"task.model_config={{model_type: llama, {SIZES}}}",
    "experts": f"task.model_config={{model_type: mixtral, {SIZES}, {ROUTED}}}",
    "teacher": f"task.model_config={{model_type: llama, {SIZES}}} seed=1",
}
"""Chat models that trainings begin with, and a teacher."""
NO_DROPOUT = ("task.model_config.hidden_dropout_prob=0", "task.model_config.attention_probs_dropout_prob=0")
TASKS: dict[str, tuple[str, ...]] = {
    "text_classification": NO_DROPOUT,
    "token_classification": NO_DROPOUT,
    "question_answering": (),
    "multiple_choice": (),
    "masked_lm": (),
    "language_modeling": (),
    "wikitext2": (),
    "seq2seq": (),
    "bigbird": (),
    "chats": (),
    "vision_chats": (),
    "dpo": (),
    "kto": (),
    "reward": (),
    "process_reward": (
        "replace=[task.model_config]",
        "task.model_config={model_type: gpt_neox, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        "num_attention_heads: 2, classifier_dropout: 0.0, max_position_embeddings: 128}",
    ),
    "embeddings": NO_DROPOUT,
    "reranking": (),
    "image_classification": (),
    "mnist": ("task.dropout=0",),
    "segmentation": ("task.model_config.classifier_dropout_prob=0", "task.model_config.drop_path_rate=0"),
    "detection": (),
    "restoration": (),
    "audio_classification": NO_DROPOUT,
    "ctc": ("task.model_config.hidden_dropout=0", "task.model_config.attention_dropout=0"),
    "speech_to_text": ("task.model_config.dropout=0",),
}
"""The demo recipes of the tasks, and the words that switch dropout off, which differs between micro-batches."""


@dataclass(frozen=True)
class Feature:
    """Something that can be switched on.

    Args:
        words: that do so; {folder} holds the models that trainings begin with.
        is_on: says whether it is, of a hftune.milestones.Run after its last step.
        learns: whether losses are others with it. False: it only changes how they are computed.
        group: of features of which a training has one.
        tolerance: relative, of losses that are to be the same.
        auto: the key with which it is on only where it can be, which then need not be refused.
        resumes: whether the first step is taken on one process, by another run.
    """

    name: str
    words: tuple[str, ...]
    is_on: Callable[[Any], bool]
    learns: bool = False
    group: str = ""
    processes: int = 1
    variables: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-5
    auto: str = ""
    resumes: bool = False


def model_of(run: Any) -> Any:
    return run.strategy.sharding.model


def has_parameter(part: str) -> Callable[[Any], bool]:
    return lambda run: any(part in name for name, _ in model_of(run).named_parameters())


def strategy(name: str, kind: str, *words: str, **options: Any) -> Feature:
    def is_on(run: Any) -> bool:
        return type(run.strategy).__name__ == kind and run.strategy.num_processes == 2

    return Feature(name, words, is_on, group="strategy", processes=2, **options)


def optimizer(name: str, kind: str, learns: bool = True, tolerance: float = 1e-5) -> Feature:
    def is_on(run: Any) -> bool:
        return type(run.strategy.sharding.bare_optimizer).__name__ == kind

    return Feature(name, (f"train.optimizer={name}",), is_on, learns, "optimizer", tolerance=tolerance)


def checkpoints_activations(run: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model_of(run).modules())


def has_moved(run: Any) -> bool:
    from hftune.replay.audit import audit

    starts = audit(Path(run.recipe.output_dir)).starts
    return run.strategy.num_processes == 2 and starts[-1]["after_step"] == 1


def is_compiled(run: Any) -> bool:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"] > 0


HOW = (
    strategy("DDP", "DataParallel"),
    strategy("FSDP", "FullySharded", variables=tuple(FSDP.items())),
    strategy("pipeline", "Pipeline", "parallel.pipeline_stages=2"),
    Feature(
        "context",
        ("parallel.context=2", "train.packing=auto"),
        lambda run: run.strategy.together == 2,
        group="strategy",
        processes=2,
    ),
    Feature("no padding", ("train.packing=auto",), lambda run: run.plan.packed, auto="train.packing"),
    Feature("loss in chunks", ("train.head_loss=auto",), lambda run: run.strategy.scores_head, auto="train.head_loss"),
    Feature("checkpointing", ("train.gradient_checkpointing=true",), checkpoints_activations),
    Feature("compile", ("train.compile=true",), is_compiled),
    Feature("bf16", ("train.mixed_precision=bf16",), lambda run: run.strategy.precision == "bf16", tolerance=0.02),
    Feature("size found", ("train.micro_batch_size=auto",), lambda run: run.plan.micro_batch_size != 2),
    Feature("resumed on 2", ("resume=auto",), has_moved, processes=2, resumes=True),
)
"""What changes how losses are computed, and not the losses."""
WHAT = (
    Feature("LoRA", ("adapter.type=lora",), has_parameter("lora_A"), True, "adapter"),
    Feature("DoRA", ("adapter.type=dora",), has_parameter("magnitude"), True, "adapter"),
    Feature(
        "4 bits",
        ("adapter.type=lora", "adapter.quantize=nf4"),
        lambda run: any(type(module).__name__ == "Linear4bit" for module in model_of(run).modules()),
        True,
        "adapter",
        tolerance=1e-3,  # a CPU rounds what quantises the weights to bf16 in a first forward pass for an evaluation
    ),
    Feature("teacher", ("train.teacher={folder}/teacher",), lambda run: run.strategy.teacher is not None, True),
    Feature("NEFTune", ("train.neftune_alpha=5",), lambda run: hasattr(model_of(run), "neftune"), True),
    Feature("EMA", ("train.ema_decay=0.9",), lambda run: run.strategy.sharding.average is not None, True),
    Feature(
        "freeze",
        ("train.freeze=[embed_tokens]",),
        lambda run: not all(value.requires_grad for value in model_of(run).parameters()),
        True,
    ),
    Feature(
        "layer decay",
        ("train.layer_decay=0.5",),
        lambda run: len({group.get("lr_scale", 1.0) for group in run.strategy.sharding.optimizer.param_groups}) > 1,
        True,
    ),
    Feature(
        "experts",
        ("task.model={folder}/experts/model", "task.model_config.output_router_logits=true"),
        lambda run: getattr(model_of(run), "load_balancing", None) is not None,
        True,
    ),
    optimizer("sgd", "SGD"),
    optimizer("muon", "Muon"),
    optimizer("adafactor", "Adafactor"),
    optimizer("lion", "Lion"),
    optimizer("schedule_free", "AdamWScheduleFree"),
    optimizer("adamw_8bit", "AdamW8bit", learns=False, tolerance=1e-3),  # of few weights, it keeps all bits
)
"""What changes what is learned."""
FEATURES = {feature.name: feature for feature in (*HOW, *WHAT)}
OF_TASKS = tuple(
    FEATURES[name]
    for name in ("DDP", "FSDP", "pipeline", "context", "no padding", "loss in chunks", "LoRA", "teacher", "NEFTune")
)


@dataclass(frozen=True)
class Cell:
    """A training with some features on.

    Args:
        task: the recipe, without _demo; "": a chat model with all sizes that everything asks for.
    """

    features: tuple[Feature, ...] = ()
    task: str = ""

    @property
    def layout(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """Number of processes, and their environment."""
        processes = max([1, *(feature.processes for feature in self.features)])
        return processes, tuple(pair for feature in self.features for pair in feature.variables)

    @property
    def begun(self) -> Cell | None:
        """The training of the first step, if the second is another one's."""
        if not any(feature.resumes for feature in self.features):
            return None
        return Cell(
            tuple(feature for feature in self.features if not feature.resumes and feature.group != "strategy"), self.task
        )

    def without(self, feature: Feature) -> Cell:
        return Cell(tuple(other for other in self.features if other is not feature), self.task)

    def __str__(self) -> str:
        return " + ".join(filter(None, [self.task, *(feature.name for feature in self.features)])) or "nothing"


def cells_of_features() -> list[Cell]:
    """Return each feature alone, and each two of them that a training can ask for."""
    pairs = [pair for pair in combinations(FEATURES.values(), 2) if not pair[0].group or pair[0].group != pair[1].group]
    return [Cell(), *(Cell((feature,)) for feature in FEATURES.values()), *map(Cell, pairs)]


def cells_of_tasks(tasks: Iterable[str] = TASKS) -> list[Cell]:
    return [Cell(features, task) for task in tasks for features in ((), *((feature,) for feature in OF_TASKS))]


class Trial(Group):
    """Processes that try cells."""

    program = "tests.support.composition"


@dataclass
class Tried:
    """What came of cells: by their names, what ``try_one`` returns. Trains in a folder of its own."""

    folder: Path
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def base(self) -> Path:
        """The recipe of the chat model."""
        for name, words in BEGINNINGS.items():
            model, _, seed = words.rpartition(" seed=")
            given = [
                *TINY,
                model or words,
                f"seed={seed if model else 0}",
                "task.vocab_size=300",
                f"output_dir={self.folder}/{name}",
            ]
            self.train("chats_demo", given, name)
        path = self.folder / "chat.yaml"
        path.write_text(
            f"base: chats_demo\nreplace: [task.model_config]\ntask: {{model: {self.folder}/base/model, generation: null}}\n"
        )
        return path

    def train(self, recipe: str, words: Sequence[str], name: str) -> None:
        log = self.folder / f"{name}.log"
        codes = Group(1, [[recipe, words, None, {}]], log).wait()
        assert codes == [0], log.read_text()

    def job(self, cell: Cell) -> dict[str, Any]:
        """Return what a process needs to know to try a cell."""
        from hftune import Recipe

        recipe, words, folder = str(self.base), TINY, self.folder
        if cell.task:
            recipe, words, folder = f"{cell.task}_demo", (*TINY, *TASKS[cell.task]), self.folder / cell.task
            has_teacher = hasattr(type(Recipe.load(recipe).task), "item_logits")
            if FEATURES["teacher"] in cell.features and has_teacher and not folder.exists():
                folder.mkdir()
                self.train(recipe, [*words, "seed=1", f"output_dir={folder}/teacher"], f"{cell.task}-teacher")
        words = (*words, *(word.format(folder=folder) for feature in cell.features for word in feature.words))
        return {"recipe": recipe, "words": words, "features": [feature.name for feature in cell.features]}

    def try_all(self, cells: Iterable[Cell]) -> None:
        """Try those of the cells that have not been tried: those of one layout one after the other, in the same processes."""
        left = sorted({str(cell): cell for cell in cells if str(cell) not in self.found}.values(), key=lambda cell: cell.layout)
        for layout, group in groupby(left, key=lambda cell: cell.layout):
            pending = list(group)
            while pending:
                pending = pending[self._try_some(pending[:30], *layout) :]

    def _try_some(self, cells: list[Cell], processes: int, variables: tuple[tuple[str, str], ...]) -> int:
        """Try cells up to the first that is refused once the processes have joined; return how many it were."""
        out = Path(tempfile.mkdtemp(dir=self.folder))
        jobs = [{**self.job(cell), "out": str(out / str(place))} for place, cell in enumerate(cells)]
        begun = [
            self.job(cell.begun) | {"out": job["out"], "begins": True}
            for cell, job in zip(cells, jobs, strict=True)
            if cell.begun
        ]
        if begun:
            Trial(1, [begun, {}], out / "log").wait()
        codes = Trial(processes, [jobs, dict(variables)], out / "log").wait()
        for place, cell in enumerate(cells):
            found = [json.loads(path.read_text()) for path in sorted(out.glob(f"{place}.*.json"))]
            if (wrong := [one for one in found if "refused" in one]) or (wrong := [one for one in found if "crashed" in one]):
                self.found[str(cell)] = wrong[0]
                return place + 1
            if len(found) < processes:
                self.found[str(cell)] = {"crashed": f"exit codes {codes}\n{(out / 'log').read_text()[-4000:]}"}
                return place + 1
            self.found[str(cell)] = found[0]
        return len(cells)

    def verdict(self, cell: Cell) -> str:
        """Return "yes", "no: SENTENCE" or "off: SENTENCE". It and what it is made of have been tried.

        Raises:
            AssertionError: it failed in any other way, a feature is silently ignored, or losses are not what they should be.
        """
        found = self.found[str(cell)]
        assert "crashed" not in found, f"{cell}: {found['crashed']}"
        if "refused" in found:
            return f"no: {said(' '.join(found['refused']))}"
        for feature in cell.features:
            if feature.name not in found["on"]:
                assert feature.auto, f"{cell}: {feature.name} is not on, and nothing was said. {found['notices']}"
                why = [notice for notice in found["notices"] if re.search(r"because|cannot", notice)]
                return f"off: {said(why[0]) if why else f'No effect here, as `{feature.auto}` says.'}"
            if "losses" not in (alone := self.found[str(cell.without(feature))]):
                continue
            pairs = [*zip(found["losses"], alone["losses"], strict=True)]
            difference = max(abs(one - other) / max(abs(other), 1e-3) for one, other in pairs)
            most = max(TOLERANCE.get(cell.task, 0.0), *(each.tolerance for each in cell.features))
            if feature.learns:
                assert difference > 1e-6, f"{cell}: {feature.name} changes nothing: {pairs}"
            else:
                assert difference <= most, f"{cell}: {feature.name} changes losses by {difference:.2g}: {pairs}"
        return "yes"


def said(sentence: str) -> str:
    """Return a sentence without what differs between runs and machines: folders, and how much padding there is."""
    return re.sub(r"^\d+%", "A part", re.sub(r"(?<==)/\S*/(\w+)(?=[:. ])", r"outputs/\1", sentence))


@dataclass
class Table:
    """Verdicts as Markdown, with their sentences below."""

    verdict: Callable[[Cell], str]
    notes: list[str] = field(default_factory=list)

    def text_of(self, cell: Cell | None) -> str:
        if cell is None:
            return ""
        kind, _, sentence = self.verdict(cell).partition(": ")
        if sentence and sentence not in self.notes:
            self.notes.append(sentence)
        return {"yes": "✓", "no": "✗", "off": "○"}[kind] + (f" {self.notes.index(sentence) + 1}" if sentence else "")

    def rows(self, names: Iterable[str], columns: Sequence[Feature], cell: Callable[[str, Feature], Cell | None]) -> list[str]:
        lines = [f"| | {' | '.join(column.name for column in columns)} |", f"|---|{'---|' * len(columns)}"]
        for name in names:
            lines.append(f"| {name} | {' | '.join(self.text_of(cell(name, column)) for column in columns)} |")
        return lines


def pair_of(name: str, other: Feature) -> Cell | None:
    """Return the cell of two features; None if a training has one of them, or if it is in the other half of the table."""
    own, places = FEATURES[name], [*FEATURES]
    comes_first = places.index(name) < places.index(other.name)
    if own is other or (own.group and own.group == other.group) or (comes_first and (own in HOW) == (other in HOW)):
        return None
    return Cell((own, other) if comes_first else (other, own))


def page(verdict: Callable[[Cell], str]) -> str:
    """Return docs/composition.md."""
    table = Table(verdict)
    names = [feature.name for feature in WHAT]
    parts = [
        INTRODUCTION.replace("@@", "\n".join(f"| {each.name} | {how(each)} |" for each in FEATURES.values())),
        "## How it is computed\n",
        *table.rows([feature.name for feature in HOW[1:]], HOW[:-1], pair_of),
        "\n## What is learned, and how it is computed\n",
        *table.rows(names, HOW, pair_of),
        "\n## What is learned\n",
        *table.rows(names[1:], [feature for feature in WHAT if feature.group != "optimizer"], pair_of),
        "\n## Tasks\n",
        *table.rows(TASKS, OF_TASKS, lambda task, feature: Cell((feature,), task)),
        "\n## Sentences\n",
        *(f"{number}. {note}" for number, note in enumerate(table.notes, start=1)),
    ]
    return "\n".join([*parts, ""])


def how(feature: Feature) -> str:
    """Return how a feature is switched on."""
    words = [re.sub(r"{folder}/(\w+)(/model)?", r"outputs/\1\2", word) for word in feature.words]
    launcher = ["accelerate_configs/fsdp.yaml"] if feature.variables else ["--processes 2"] if feature.name == "DDP" else []
    return " ".join(f"`{word}`" for word in (*launcher, *words))


def verdicts(text: str) -> dict[str, str]:
    """Return the verdicts of a page by the names of their cells, as ``Tried.verdict`` returns them."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, flags=re.MULTILINE))
    kinds, found, columns = {"✓": "yes", "✗": "no", "○": "off"}, {}, []
    for line in text.splitlines():
        if line.startswith("| |"):
            columns = [FEATURES[name.strip()] for name in line.split("|")[2:-1]]
        elif line.startswith("|") and not line.startswith("|--") and columns:
            name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            for column, cell in zip(columns, cells, strict=True):
                if cell:
                    mark, _, number = cell.partition(" ")
                    of = Cell((column,), name) if name in TASKS else pair_of(name, column)
                    found[str(of)] = kinds[mark] + (f": {notes[number]}" if number else "")
    return found


INTRODUCTION = """# What goes with what

```console
$ hftune train recipe=chats_demo adapter.type=lora parallel.pipeline_stages=2
hftune: adapter.type=lora does not work with parallel.pipeline_stages=2. Leave it at 1: DDP and FSDP train adapters.
```

This page is made by trying: `python -m tests.support.composition > docs/composition.md` trains two steps and an evaluation with
each two features, and with each task and some features, on CPUs and models of a few thousand weights. A part of it is tried
again by `make test`.

- **✓** Both were trained together and were in effect, and the losses were what they should be: within 1e-5 of those without a
  feature that only changes how they are computed (bf16: 2e-2; 4 bits and adamw_8bit: 1e-3; detection: 0.1), and different ones
  with a feature that changes what is learned.
- **✗** Refused before the first step, with the sentence of this number below.
- **○** Trained without one of them, which is on only where it can be; the sentence says why.

| feature | switched on by |
|---|---|
@@

Two optimizers, strategies or kinds of adapters are never together. The pairs are tried with a Llama that learns from chats.
`compile` is tried with torch's backend aot_eager, which does all but generate code. GPUs, and more than two features, are not
tried here. Machines that [come and go](elastic.md) are what "resumed on 2" tries: the first step is taken on one process, and the
second one on two, from the checkpoint.
"""


TOLERANCE = {"detection": 0.1}
"""RT-DETR chooses among equally good queries while it knows nothing."""


def try_here(jobs: list[dict[str, Any]], variables: dict[str, str]) -> None:
    """Be one process of a trial."""
    from hftune.reporting import callbacks

    for kind in (callbacks.Card, callbacks.Report):  # half of the time, and nothing that depends on features
        for name in {"on_evaluation", "on_end"} & vars(kind).keys():
            setattr(kind, name, lambda self, event: None)
    before = {**os.environ, **variables}
    for job in jobs:
        os.environ.clear()  # accelerate writes there, too
        os.environ.update(before)
        found = try_one(job)
        if "begins" in job:
            continue
        Path(f"{job['out']}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        if "losses" not in found:
            os._exit(3)  # a session that failed may have left something behind


def try_one(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and return which features were on, losses and notices; or the refusal, or the traceback."""
    import torch
    from torch._dynamo.utils import counters

    import hftune.training
    from hftune import ConfigError, Recipe, train
    from hftune.models import scored_head

    found, original_fit, original_compile, limit = {}, hftune.training.fit, torch.compile, scored_head.AT_ONCE

    def fit(run: Any) -> None:
        original_fit(run)
        found["on"] = [name for name in job["features"] if FEATURES[name].is_on(run)]

    hftune.training.fit = fit
    scored_head.AT_ONCE = 1  # so few logits would be computed as a whole
    torch.compile = lambda *given, **options: original_compile(
        *given, **{**options, "backend": "aot_eager"}
    )  # Inductor is slow
    torch._dynamo.reset()
    counters.clear()
    try:
        recipe = Recipe.load(
            job["recipe"], *job["words"], f"output_dir={job['out']}", *["train.max_steps=1"] * ("begins" in job)
        )
        train(recipe)
        lines = [json.loads(line) for line in Path(job["out"], "metrics.jsonl").read_text().splitlines()]
        steps, evaluations = ([line[name] for line in lines if name in line] for name in ("train/loss", "eval/loss"))
        found["losses"] = [*steps, evaluations[-1]]
        found["notices"] = json.loads(Path(job["out"], "run.json").read_text())["notices"]
    except ConfigError as error:
        found["refused"] = error.problems
    except Exception:
        found["crashed"] = traceback.format_exc()[-4000:]
    finally:
        hftune.training.fit, torch.compile, scored_head.AT_ONCE = original_fit, original_compile, limit
    return found


def main() -> None:
    """Try everything, and print the page."""
    with tempfile.TemporaryDirectory() as folder:
        (cache := Path(folder, "cache")).mkdir()
        os.environ |= {
            "HF_DATASETS_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TESTS_UNIT": "1",
        }
        tried = Tried(Path(folder))
        tried.try_all([*cells_of_features(), *cells_of_tasks()])
        print(page(tried.verdict), end="")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        try_here(*json.loads(sys.argv[1])["jobs"])
    else:
        main()
