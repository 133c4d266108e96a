"""Any image classifier of transformers: what augmentation and loader workers change, and Trainer's losses."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor

from hftune import Recipe, train
from hftune.build import load_datasets, plan_batches
from hftune.data.demo import shapes
from tests.support.runs import Run, train_on
from tests.support.trainer import losses_of_trainer

VIT = (
    "task.model_config={model_type: vit, image_size: 32, patch_size: 8, hidden_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 2, intermediate_size: 64, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}"
)
DEMO = "image_classification_demo"
FEW = (
    *("task.max_train_samples=100", "task.max_eval_samples=37", "train.epochs=2", "train.lr=1e-3", "train.batch_size=16"),
    *("train.micro_batch_size=4", "train.log_every=1", "train.warmup_ratio=0", "eval.every=epoch", "eval.batch_size=5"),
)
"""100 images in batches of 16: six whole steps and a last one of 4, an epoch."""


@pytest.fixture(scope="module")
def tiny_vit(tmp_path_factory):
    """The recipe with a ViT, whose config has nothing of the demo's ResNet."""
    path = tmp_path_factory.mktemp("recipe") / "tiny_vit.yaml"
    path.write_text(
        "base: image_classification\n"
        "task: {model: null, image_size: 32, dataset: 'hftune.data.demo:shapes'}\n"
        "train: {num_workers: 0}\n"
    )
    return str(path)


EVERYTHING = (
    *(*FEW, VIT, "task.mixup=0.3", "task.cutmix=1.0", "task.label_smoothing=0.1"),
    "task.augmentation={crop: 0.4, flip: 0.5, rand_augment: 9, color: 0.3, shift: 2, rotate: 10, erase: 0.3}",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_vit):
    short = (*EVERYTHING, "train.max_steps=2")
    jobs = {"all": short, "still": (*short, "task.augmentation=null"), "workers": (*short, "train.num_workers=2")}
    return train_on(1, jobs, tmp_path_factory.mktemp("runs"), tiny_vit)


def test_workers_load_the_same_images_and_augmentation_changes_them(runs):
    losses = runs["all"].logged("train/loss")
    assert runs["workers"].logged("train/loss") == losses and len(losses) == 2
    assert runs["still"].logged("train/loss")[0] != pytest.approx(losses[0], rel=1e-4)


def prepared_batches(recipe, processor):
    """Yield the batches of the plan, with images that transformers itself prepares."""
    task, rows = recipe.task, list(shapes("train"))
    for step in plan_batches(recipe, task.datasets()["train"]).epoch(0):
        chosen = [rows[task.row_of("train")(index)] for micro_batch in step for index in micro_batch.samples]
        images = processor([row["image"] for row in chosen], return_tensors="pt")
        yield {**images, "labels": torch.tensor([task.labels.index(row["label"]) for row in chosen])}


def test_twenty_steps_equal_those_of_trainer(tmp_path, tiny_vit):
    overrides = (
        *(*FEW, VIT, "task.model_config.hidden_dropout_prob=0", "task.model_config.attention_probs_dropout_prob=0"),
        *("task.augmentation=null", "task.max_train_samples=320", "train.micro_batch_size=16", "train.epochs=1"),
        *("train.weight_decay=0.1", "eval.every=20"),
    )
    recipe = Recipe.load(tiny_vit, *overrides, f"output_dir={tmp_path}/ours")
    output = train(recipe).output_dir
    ours = Run(output).logged("train/loss")

    load_datasets(recipe)
    processor = AutoImageProcessor.from_pretrained(output / "model", backend="pil")
    batches = DataLoader([*prepared_batches(recipe, processor)], batch_size=None)
    theirs = losses_of_trainer(recipe, tmp_path / "theirs", batches)
    assert len(ours) == 20 and torch.tensor(ours).std() > 0.01
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_demo_learns_its_shapes(tmp_path):
    run = train_on(1, {"demo": ("train.epochs=2",)}, tmp_path, DEMO)["demo"]
    assert run.result["metrics"]["accuracy"] > 0.5  # one of six classes by chance
