"""Train each kind of task beside the trainer that people use for it, with the same settings: the metric, and samples a second.

    python benchmarks/against_trainer.py [--data FOLDER] [--tasks reviews tags speech chats ...] [--rounds 5] [--processes 2]

FOLDER holds the real data, in the folders yelp and images; without it, and where it has none for a task, samples are generated.
Both start from the same new weights, with the same optimizer, schedule, clipping and batch, in float32. transformers' Trainer
shuffles, pads and prepares images in every epoch as it does by default, with the model as transformers builds it; a model is
scored by its task's own metrics. Each round has another seed. The two train in processes of their own and take turns after
each step. "samples/s" are those of training alone on one thread a process, from the end of the second step to the end of the
last, without evaluations, saving and the loading of libraries. hftune checks or decodes images once, before the training: the
CPU time of that counts, too. Both decode recordings before the training. With --processes 2, both train with DDP over Gloo on
the same global batch; sentence-transformers' negatives are then those of a process, and hftune's those of the batch.

chats: TRL's SFTTrainer packs whole chats by best fit into rows of task.max_length tokens, its default, and starts positions
again with each chat. On a CPU, transformers makes a mask of that, so that no chat sees another, and SDPA computes all scores of
a row. A step accumulates as many rows, one a forward pass, as hold about as many tokens as hftune's 16 chats.
embeddings: sentence-transformers' trainer and its MultipleNegativesRankingLoss tokenize texts when a step comes.
A row whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from bert_on_reviews import quiet
from contest import Stopwatch, side_by_side
from record import parse_options, print_table, save
from sft_scale import shifted

SMALL_BERT = (
    "task.model_config={model_type: bert, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 512, initializer_range: 0.05}"
)
SMALL_RESNET = (
    "task.model_config={model_type: resnet, layer_type: basic, embedding_size: 32, hidden_sizes: [32, 64, 128], "
    "depths: [1, 1, 1]}"
)
COMMON = (
    *("train.micro_batch_tokens=null", "train.batch_size=32", "train.micro_batch_size=32", "train.mixed_precision=no"),
    *("train.log_every=50", "checkpoint.every=never", "train.num_workers=0", "resume=never"),
)
SMALL_LLAMA = (
    "task.model_config={model_type: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 512, initializer_range: 0.1, "
    "tie_word_embeddings: false}"
)
TRAINERS = {"transformers": "Trainer", "trl": "SFTTrainer", "sentence_transformers": "SentenceTransformerTrainer"}
"""What each library calls its trainer."""
INSTALL = 'pip install "trl==1.16.*" sentence-transformers'


@dataclass(frozen=True)
class Case:
    """A training that both do."""

    recipe: str
    metric: str
    settings: tuple[str, ...]
    real: tuple[str, ...] = ()
    """Settings for the real data, with {} for their folder."""
    samples: int = 2000
    """Training samples, at most."""
    library: str = "transformers"
    """Whose trainer hftune is compared with: a key of TRAINERS."""


CASES = {
    "reviews": Case(
        "text_classification_demo",
        "accuracy",
        (
            *("task.model=null", SMALL_BERT, "task.vocab_size=8192", "task.max_length=256", "train.epochs=1", "train.lr=5e-4"),
            *("train.batch_size=16", "train.micro_batch_size=16"),
        ),
        ("task.data_files.train={}/yelp/train.jsonl", "task.data_files.eval={}/yelp/test.jsonl", "task.label_column=label"),
        samples=1200,
    ),
    "tags": Case("token_classification_demo", "f1", ("train.epochs=2", "eval.every=2 epochs")),
    "sentences": Case("seq2seq_demo", "chrf", ("train.epochs=3", "eval.every=3 epochs")),
    "questions": Case(
        "question_answering_demo",
        "f1",
        (
            *("task.model_config.hidden_dropout_prob=0.1", "task.model_config.attention_probs_dropout_prob=0.1"),  # as BERT has
            *("train.epochs=2", "eval.every=2 epochs", "eval.batch_tokens=null"),
        ),
    ),
    "images": Case(
        "image_classification",
        "accuracy",
        (
            *("task.model=null", SMALL_RESNET, "task.augmentation=null", "task.image_size=160", "train.lr=1e-3"),
            *("train.epochs=3", "train.batch_size=16", "train.micro_batch_size=16", "eval.every=3 epochs"),
        ),
        samples=400,
    ),
    "masks": Case(
        "masked_lm_demo",
        "perplexity",
        (
            *("task.dataset=hftune.data.demo:reviews", SMALL_BERT, "task.vocab_size=8192", "task.join_texts=true"),
            *("task.masking=tokens", "task.mlm_probability=0.15", "task.block_length=128", "train.epochs=1", "train.lr=2e-3"),
            *("train.batch_size=8", "train.micro_batch_size=8"),
        ),
        ("task.data_files.train={}/yelp/train.jsonl", "task.data_files.eval={}/yelp/test.jsonl", "task.text_column=text"),
        samples=700,
    ),
    "segmentation": Case(
        "segmentation_demo",
        "mean_iou",
        (
            *("task.augmentation=null", "train.batch_size=8", "train.micro_batch_size=8"),
            *("train.epochs=5", "eval.every=5 epochs"),
        ),
    ),
    "speech": Case(
        "ctc_demo", "wer", ("train.batch_size=16", "train.micro_batch_size=16", "train.epochs=8", "eval.every=8 epochs")
    ),
    "audio": Case("audio_classification_demo", "accuracy", ("train.epochs=5", "eval.every=5 epochs")),
    "chats": Case(
        "chats_demo",
        "perplexity",
        (
            *("task.dataset=null", SMALL_LLAMA, "replace=[task.model_config]", "task.vocab_size=2048", "task.max_length=512"),
            *("task.too_long=drop", "task.generation=null", "eval.metric=perplexity", "train.epochs=1"),
            *("train.batch_size=16", "train.micro_batch_size=16"),
        ),
        samples=1000,
        library="trl",
    ),
    "embeddings": Case(
        "embeddings_demo",
        "recall_at_1",
        ("train.batch_size=64", "train.micro_batch_size=64", "eval.every=3 epochs"),
        library="sentence_transformers",
    ),
}


def main() -> None:
    options = parse()
    names = [name for name in options.tasks if is_installed(name)]
    if not names:
        raise SystemExit(2)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    quiet()
    rows, measured = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            case = CASES[name]
            contenders = ("hftune", TRAINERS[case.library])
            turns = [
                side_by_side(
                    (train_ours, train_theirs),
                    turn,
                    folder,
                    name,
                    words_of(name, options, Path(folder), turn),
                    processes=options.processes,
                    quick=options.smoke,
                )
                for turn in range(options.rounds)
            ]
            (scores, speeds), (their_scores, their_speeds) = (zip(*found, strict=True) for found in zip(*turns, strict=True))
            ratios = [ours / theirs for ours, theirs in zip(speeds, their_speeds, strict=True)]
            ratio = f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            for who, found, fast in zip(contenders, (scores, their_scores), (speeds, their_speeds), strict=True):
                spread = f"{min(found):.3f} to {max(found):.3f}"
                compared = ratio if who == "hftune" else ""
                rows.append((name, who, case.metric, f"{mean(found):.3f}", spread, f"{median(fast):.0f}", compared))
            where = "" if options.processes == 1 else f" on {options.processes} processes"
            measured[f"{name}{where}: {case.metric} of hftune, of {TRAINERS[case.library]}; samples a second against its"] = (
                f"{mean(scores):.3f}, {mean(their_scores):.3f}; {ratio}"
            )
    on = "one process" if options.processes == 1 else f"{options.processes} processes"
    title = f"The same training by hftune and by other trainers, {options.rounds} seeds, {on} of one thread"
    header = ("task", "", "metric", "mean", "from ... to", "samples/s", "ratio (from ... to)")
    save(__file__, options, [print_table(title, header, rows)], measured)


def is_installed(name: str) -> bool:
    """Return whether the library is there that a row is compared with, and say so if not."""
    library = CASES[name].library
    if find_spec(library) is None:
        print(f"{name} is left out: {library} is not installed. {INSTALL} has all.", file=sys.stderr)
        return False
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the real data; default: generated samples")
    parser.add_argument("--tasks", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=5, help="seeds (default %(default)s)")
    parser.add_argument("--train", type=int, default=2000, help="training samples of each task, at most")
    parser.add_argument("--evaluate", type=int, default=200, help="evaluation samples (default %(default)s)")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2), help="of each trainer (default %(default)s)")
    parser.add_argument("--max-epochs", type=int, help="fewer epochs than each task has")
    return parse_options(parser, smoke={"rounds": 1, "train": 192, "evaluate": 32, "max_epochs": 1})


def words_of(name: str, options: argparse.Namespace, folder: Path, turn: int) -> list[str]:
    """Write the files that both read, and return the settings of the recipe that both train, with a seed for each round."""
    case = CASES[name]
    words = [*COMMON, *case.settings, *(word.format(options.data) for word in case.real if options.data), f"seed={1 + turn}"]
    if name == "images":
        words += [f"task.data_dir={image_folder(options, folder)}", "task.eval_split=test"]
    if name == "chats":
        words += [f"task.data_files.{split}={path}" for split, path in chat_files(options, folder).items()]
    words += [f"task.max_train_samples={min(case.samples, options.train)}", f"task.max_eval_samples={options.evaluate}"]
    if options.processes > 1:
        words.append(f"train.parts={options.processes}")
    if options.max_epochs:
        words += [f"train.epochs={options.max_epochs}", f"eval.every={options.max_epochs} epochs"]
    return words


def recipe_of(folder: str, name: str, words: list[str]) -> Any:
    """Return the recipe, in a process that computes on one thread and has a cache of its own: it prepares all by itself."""
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(dir=folder)
    import torch

    from hftune import Recipe

    quiet()
    torch.set_num_threads(1)
    return Recipe.load(CASES[name].recipe, *words)


def image_folder(options: argparse.Namespace, folder: Path) -> Path:
    """Return a folder with train/CLASS/*.png and test/CLASS/*.png: the real photographs, or generated shapes."""
    from hftune.data.demo import shapes

    images = folder / "images"
    if images.exists():
        return images
    counts = {"train": options.train // 2, "test": options.evaluate // 2}
    for split, count in counts.items():
        if options.data:
            for path in sorted((options.data / "images" / "flowers" / split).glob("*.png")):
                link = images / split / path.name.partition("_")[0] / path.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
        else:
            for index, row in enumerate(shapes({"train": "train", "test": "eval"}[split], count)):
                path = images / split / row["label"] / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                row["image"].save(path)
    return images


def chat_files(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write chats in which reviews are the answers, real or generated ones; return their files by split."""
    from hftune.data.demo import reviews

    files = {split: folder / f"chats.{split}.jsonl" for split in ("train", "eval")}
    for split, path in files.items():
        if options.data:
            text = (options.data / "yelp" / f"{'train' if split == 'train' else 'test'}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()] if options.data else reviews(split)
        chats = ({"prompt": f"Write a review with {row['label'] + 1} stars.", "completion": row["text"]} for row in rows)
        path.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    return files


def train_ours(stopwatch: Stopwatch, folder: str, name: str, words: list[str]) -> tuple[float, float]:
    """Train with hftune; return the last metric, and samples a second."""
    from hftune import Callback, train

    class Steps(Callback):
        on_all_processes = True

        def on_step(self, step: Any) -> None:
            stopwatch.end_step()

    recipe = recipe_of(folder, name, words)
    _ = recipe.task.rows  # generated or listed before the clock starts, as for the others
    import transformers.models.auto.image_processing_auto  # noqa: F401  libraries are loaded before, too

    began = time.process_time()
    num_samples = len(recipe.task.datasets()["train"])  # decodes images
    if hasattr(recipe.task, "image_column"):
        stopwatch.seconds = time.process_time() - began
    recipe.output_dir = f"{folder}/{name}-{recipe.seed}"  # one for all processes
    result = train(recipe, [Steps()])
    return result.metrics[CASES[name].metric], speed(stopwatch, num_samples * recipe.train.epochs)


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def speed(stopwatch: Stopwatch, num_samples: int) -> float:
    return num_samples * (1 - stopwatch.WARM_UP / stopwatch.steps) / stopwatch.seconds


def train_theirs(stopwatch: Stopwatch, folder: str, name: str, words: list[str]) -> tuple[float, float]:
    """Train with the other trainer from the same weights; return the metric, by the task's rules, and samples a second."""
    import torch
    from transformers import TrainerCallback

    from hftune.build import load_datasets

    class Steps(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopwatch.end_step()

    recipe = recipe_of(folder, name, words)
    datasets, config = load_datasets(recipe), recipe.train
    torch.manual_seed(recipe.seed)
    built = recipe.task.build_model()
    model = type(built)(built.config)  # as transformers has it, without what hftune attaches
    model.load_state_dict(built.state_dict())
    with tempfile.TemporaryDirectory() as output:
        settings = {
            "output_dir": output,
            "seed": recipe.seed,
            "per_device_train_batch_size": config.batch_size // num_processes(),
            "num_train_epochs": config.epochs,
            "learning_rate": config.lr,
            "lr_scheduler_type": config.schedule,
            "warmup_steps": config.warmup_ratio,  # below 1, a share
            "weight_decay": config.weight_decay,
            "max_grad_norm": config.clip_norm,
            "optim": "adamw_torch_fused",
            "activation_checkpointing": False,
            "bf16": False,
            "remove_unused_columns": False,
            "use_cpu": True,
            "ddp_backend": "gloo" if num_processes() > 1 else None,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        trainer, model = trainer_of(recipe, model, datasets["train"], settings, Path(output))
        trainer.add_callback(Steps())
        trainer.train()
    found = score(recipe.task, model, datasets["eval"])[CASES[name].metric]
    return found, speed(stopwatch, len(datasets["train"]) * config.epochs)


def trainer_of(recipe: Any, model: Any, dataset: Any, settings: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Return the trainer of the library that a task is compared with, and the model that it trains."""
    task = recipe.task
    if recipe.recipe == "chats_demo":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rows = Dataset.from_list([shifted(dataset[index]) for index in range(len(dataset))])
        packs = recipe.train.batch_size // num_processes() * mean(map(len, rows["input_ids"])) / task.max_length
        settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": max(1, round(packs))}
        arguments = SFTConfig(**settings, packing=True, max_length=task.max_length)
        return SFTTrainer(model, arguments, train_dataset=rows, processing_class=task.text_tokenizer), model
    if recipe.recipe == "embeddings_demo":
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        task.save(model, folder / "model")
        embedder = SentenceTransformer(str(folder / "model"), device="cpu")
        rows = task.rows["train"].select_columns([task.read_columns[f"{name}_column"] for name in ("anchor", "positive")])
        arguments, loss = (
            SentenceTransformerTrainingArguments(**settings),
            MultipleNegativesRankingLoss(embedder, scale=task.scale),
        )
        return SentenceTransformerTrainer(embedder, arguments, train_dataset=rows, loss=loss), embedder[0].auto_model
    from transformers import Trainer, TrainingArguments

    rows, collate = theirs(recipe, model, dataset, folder)
    return Trainer(model, TrainingArguments(**settings), collate, rows), model


def theirs(recipe: Any, model: Any, dataset: Any, folder: Path) -> tuple[Any, Callable[[list], dict[str, Any]] | None]:
    """Return the data set that Trainer reads, and how it makes batches: None for its own way."""
    task = recipe.task
    if recipe.recipe in ("image_classification", "segmentation_demo"):  # the model computes its loss
        return prepared_images(task, model, folder), None
    if recipe.recipe == "ctc_demo":  # as run_speech_recognition_ctc.py, with recordings in memory rather than in Arrow files
        model.config.ctc_loss_reduction = "mean"
        return speech(task, dataset)
    if recipe.recipe == "question_answering_demo":  # windows as in run_qa.py; the model computes its loss
        return dataset, lambda rows: inputs_and_positions(task, task.collate(rows))
    if recipe.recipe == "seq2seq_demo":  # the model makes decoder inputs and loss of the labels
        names = ("input_ids", "attention_mask", "labels")
        return dataset, lambda rows: {name: value for name, value in task.collate(rows).items() if name in names}
    if recipe.recipe == "masked_lm_demo":  # as the example script run_mlm.py does, whose collator masks anew in every epoch
        from transformers import DataCollatorForLanguageModeling

        tokenizer, special = task.text_tokenizer, set(task.text_tokenizer.all_special_ids)
        rows = [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
        rows = [{"input_ids": ids, "special_tokens_mask": [int(token in special) for token in ids]} for ids in rows]
        return rows, DataCollatorForLanguageModeling(tokenizer, mlm_probability=task.mlm_probability)
    return dataset, task.collate


def inputs_and_positions(task: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {**task.inputs(batch), "start_positions": batch["start"], "end_positions": batch["end"]}


def prepared_images(task: Any, model: Any, folder: Path) -> Any:
    """Return the images as transformers' documentation prepares them: decoded and scaled whenever one is read."""
    from transformers import AutoImageProcessor

    task.save(model, folder)  # with the image processor
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prepare(rows: dict[str, list]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        if "mask" in rows:
            return dict(processor(images, rows["mask"], return_tensors="pt"))
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    return task.rows["train"].with_transform(prepare)


def speech(task: Any, dataset: Any) -> tuple[list[dict[str, Any]], Callable[[list], dict[str, Any]]]:
    """Return extracted features with labels, and a collator that pads both; feat_extract_norm=layer needs the mask."""
    extractor, tokenizer = task.listener.extractor, task.text_tokenizer
    samples = [dataset[index] for index in range(len(dataset))]
    rows = [
        {**extractor(sample["audio"], sampling_rate=extractor.sampling_rate), "labels": sample["labels"]} for sample in samples
    ]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        features = [{"input_values": row["input_values"][0]} for row in rows]
        labels = tokenizer.pad([{"input_ids": row["labels"]} for row in rows], return_tensors="pt")
        return {
            **extractor.pad(features, padding=True, return_attention_mask=True, return_tensors="pt"),
            "labels": labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100),
        }

    return rows, collate


def score(task: Any, model: Any, dataset: Any, at_once: int = 64) -> dict[str, Any]:
    """Evaluate a model by its task."""
    import torch

    model.eval()
    rows = []
    for start in range(0, len(dataset), at_once):
        batch = task.collate([dataset[index] for index in range(start, min(start + at_once, len(dataset)))])
        with torch.no_grad():
            rows += task.predictions(model(**task.evaluation_inputs(batch)), model, batch)
    return task.metrics(rows)


if __name__ == "__main__":
    main()
