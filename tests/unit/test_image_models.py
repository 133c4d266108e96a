"""Image classifiers of transformers: their image processors in two halves, heads for the user's classes, and bad input."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import ExifTags, Image
from transformers import AutoImageProcessor, BertConfig, ViTConfig, ViTForImageClassification, pipeline

from hftune import ConfigError, DataError, Recipe
from hftune.config.keys import problems_of
from hftune.data.demo.drawings import SHAPES, shapes
from hftune.data.images import Uncropped
from hftune.models.image_processor import Preparation
from hftune.tasks import ImageClassification

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TINY |= {"image_size": 32, "patch_size": 8}
PICTURES = [row["image"] for row in shapes("train", 6)]


def fields(**changed):
    few = {"max_train_samples": 60, "max_eval_samples": 10}
    return {"dataset": "hftune.data.demo:shapes", "model_config": {"model_type": "vit", **TINY}, **few, **changed}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A ViT for three classes with its image processor, which crops: it keeps the aspect, as many do."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(1)
    names = {0: "cat", 1: "dog", 2: "emu"}
    config = ViTConfig(**TINY, id2label=names, label2id={b: a for a, b in names.items()})
    ViTForImageClassification(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    statistics = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    transformers.BitImageProcessorPil(**sizes, **statistics).save_pretrained(folder)
    return folder


def of(folder, **changed):
    return ImageClassification(**fields(model=str(folder), model_config={}, **changed))


def refused(task, error=ConfigError):
    assert task.validate() == []
    with pytest.raises(error) as caught:
        task.datasets()
        task.build_model()
    return str(caught.value)


@pytest.mark.parametrize("name", ["ViT", "ConvNext", "Bit", "MobileViT", "EfficientNet", "DeiT", "Siglip"])
def test_both_halves_together_are_what_the_image_processor_returns(name):
    processor = getattr(transformers, f"{name}ImageProcessorPil")()
    preparation = Preparation(processor, name)
    for image in PICTURES[:3]:
        expected = processor(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(preparation.normalized(preparation.pixels(image, name)), expected, atol=1e-5)


def test_batches_are_those_of_the_image_processor_and_the_head_is_new(pretrained):
    task = of(pretrained)
    data = task.datasets()
    model = task.build_model()
    batch = task.collate([data["eval"][index] for index in range(10)])
    images = [row["image"] for _, row in zip(range(200), shapes("eval"), strict=True)]
    rows = [task.row_of("eval")(index) for index in range(10)]
    expected = AutoImageProcessor.from_pretrained(pretrained, backend="pil")([images[row] for row in rows], return_tensors="pt")
    torch.testing.assert_close(batch["pixel_values"], expected["pixel_values"], atol=1e-5, rtol=0)
    assert model.classifier.out_features == len(SHAPES) and list(model.config.id2label.values()) == list(SHAPES)
    said = "\n".join(task.notices(data, model))
    assert (
        "Training on 60 of 1,000 images: task.max_train_samples=60; null takes all.\nEvaluating on 10 of 200 images: " in said
    )
    assert (
        f"task.model={pretrained}: images are RGB, 32 x 32 pixels, as its image processor prepares them; mean 0.4, 0.5," in said
    )
    assert f"task.model={pretrained} gets a new head, for 6 classes instead of 3." in said


def test_size_mean_and_std_of_the_recipe_take_precedence(pretrained):
    preparation = of(pretrained, image_size=64, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])._form
    assert preparation.shape == (64, 64, 3) and preparation.mean == pytest.approx([0.5] * 3, abs=1e-6)
    assert dict(preparation.processor.size)["shortest_edge"] == 72


def test_export_is_a_pipeline_of_transformers_and_answers_alike(pretrained, tmp_path):
    trained = of(pretrained)
    trained.datasets()
    trained.save(trained.build_model(), tmp_path)
    fresh = of(pretrained)
    answers = fresh.predict(fresh.load(tmp_path).eval(), PICTURES)
    assert "_sources" not in vars(fresh)  # no data was loaded for it
    theirs = pipeline("image-classification", model=str(tmp_path), device="cpu")(PICTURES)
    assert [answer["label"] for answer in answers] == [found[0]["label"] for found in theirs]
    assert [answer["probability"] for answer in answers] == pytest.approx([found[0]["score"] for found in theirs], abs=1e-5)


def test_crops_are_cut_from_whole_images_with_their_own_aspect(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
    wide = Image.fromarray(np.random.RandomState(0).randint(0, 256, (60, 150, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    wide.save(tmp_path / "train" / "cat" / "wide.png")
    wide.save(tmp_path / "train" / "cat" / "turned.jpg", exif=exif)
    Image.new("L", (20, 30), 80).save(tmp_path / "train" / "dog" / "small.png")
    for name in ("cat", "dog"):
        wide.save(tmp_path / "test" / name / "0.png")
    own = {"dataset": "imagefolder", "eval_split": "test", "augmentation": {"crop": 0.5}, "data_dir": str(tmp_path)}
    task = ImageClassification(**fields(**own, max_train_samples=None))
    data = task.datasets()
    assert [sample["image"].shape for sample in data["train"]] == [(92, 37, 3), (37, 92, 3), (30, 20, 3)]
    assert (data["train"][1]["image"] == Uncropped(37, 3).pixels(wide, "")).all()
    assert data["eval"][0]["image"].shape == (32, 32, 3)
    assert task.augment(data["train"][0], np.random.RandomState(0))["image"].shape == (32, 32, 3)
    (tmp_path / "train" / "dog" / "small.png").write_bytes(b"no image")
    assert refused(ImageClassification(**fields(**own)), DataError).endswith("small.png) is not an image that can be read.")


def test_many_classes_have_a_top5_accuracy():
    task = ImageClassification(**fields(label_names=[f"class {number}" for number in range(12)]))
    logits = torch.zeros(3, 12)
    logits[:, :8] = torch.arange(8, 0, -1)
    rows = task.predictions(logits, None, {"labels": torch.tensor([0, 4, 5])})
    assert [row["rank"] for row in rows] == [0, 4, 5]
    assert task.metrics(rows)["top5_accuracy"] == pytest.approx(2 / 3)


def test_top5_accuracy_of_a_model_that_finds_all_classes_equally_probable_is_that_of_five_guesses():
    task = ImageClassification(**fields(label_names=[f"class {number}" for number in range(12)]))
    rows = task.predictions(torch.zeros(12, 12), None, {"labels": torch.arange(12)})
    assert [row["rank"] == 0 for row in rows] == [row["prediction"] == row["label"] for row in rows]
    assert task.metrics(rows)["top5_accuracy"] == pytest.approx(5 / 12)


# What is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"network": "a.b.C"}, "task.network=a.b.C and task.model_config exclude each other. Set one of them to null."),
        ({"model_config": {"hidden_size": 8}}, "task.model=null builds a new model: set task.model_config.model_type (such as vit) and its sizes."),
        ({"width": 2}, "task.width=2 is for hftune's ConvNet, but task.model_config is set. Leave it out, or use task.model_config."),
        ({"mean": [0.1], "std": [0.3]}, "task.mean=[0.1] is for grey images, but task.model_config is given RGB. Give three numbers, or null."),
        ({"mean": [0.1] * 3}, "task.mean=[0.1, 0.1, 0.1] and task.std=None must both hold one number (grey) or three (red, green, blue)."),
        ({"mixup": -1.0}, "task.mixup=-1.0 must be at least 0."),
        ({"label_smoothing": 1.0}, "task.label_smoothing=1.0 must be in [0, 1)."),
        ({"augmentation": {"flip": 2}}, "task.augmentation.flip=2 must be a number from 0 to 1."),
        ({"augmentation": {"shift": -1}}, "task.augmentation.shift=-1 must be a number that is not negative."),
        ({"augmentation": {"shift": 40}, "image_size": 32}, "task.augmentation.shift=40 must be a number from 0 to 32."),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(changed, message):
    task = ImageClassification(**fields(**changed))
    assert [*problems_of(task, "task"), *task.validate()] == [message]


def test_images_of_transformers_may_be_shifted_by_more_than_those_of_mnist():
    assert ImageClassification(**fields(augmentation={"shift": 40})).validate() == []


def test_model_that_does_not_classify_images_is_refused_before_data_are_read(tmp_path):
    BertConfig(hidden_size=16).save_pretrained(tmp_path)
    said = refused(of(tmp_path, dataset="nowhere:function"))
    assert said.startswith(f"task.model={tmp_path} is a bert model, which does not classify images. Name one that does,")


def test_model_without_image_processor_needs_size_mean_and_std(tmp_path):
    ViTConfig(**TINY).save_pretrained(tmp_path)
    said = refused(of(tmp_path))
    assert said.startswith(f"task.model={tmp_path} has no image processor (preprocessor_config.json). Copy that file")
    assert "or set task.image_size, task.mean and task.std" in said
    half = [0.5, 0.5, 0.5]
    assert of(tmp_path, image_size=32, mean=half, std=half)._form.shape == (32, 32, 3)


def test_size_that_the_model_does_not_take_is_refused(pretrained):
    said = refused(of(pretrained, image_size=64))
    assert said.startswith(f"task.model={pretrained} does not take images of 64 x 64 pixels: ")
    assert said.endswith(" Correct task.image_size, or set it to null.")


def test_image_processor_that_does_something_else_is_refused(pretrained, tmp_path):
    (tmp_path / "config.json").write_text((pretrained / "config.json").read_text())
    settings = json.loads((pretrained / "preprocessor_config.json").read_text())
    settings.update(do_center_crop=False)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert "returns (3, 36, 48) and (3, 43, 36) for two images, not RGB images of one size." in refused(of(tmp_path))


def test_label_that_only_the_evaluation_has_is_named(tmp_path):
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "emu")):
        (tmp_path / split / name).mkdir(parents=True)
        PICTURES[0].save(tmp_path / split / name / "0.png")
    task = ImageClassification(**fields(dataset="imagefolder", eval_split="test"), data_dir=str(tmp_path))
    said = refused(task, DataError)
    assert said.startswith(
        "Row 1 of the eval split has the label 'emu', which none of the images of the train split has. Add training"
    )


def test_columns_are_chosen_where_there_is_one_way_and_said():
    task = ImageClassification(**fields())
    assert "task.image_column=image, chosen from the columns image, label." in task.notices(task.datasets(), None)
    said = refused(ImageClassification(**fields(dataset="tests.support.tasks:two_images")), DataError)
    assert said.endswith("several columns would do: after, before. Set it to one of the columns: after, before, kind.")
    task = ImageClassification(**fields(dataset="tests.support.tasks:two_images", image_column="after"))
    assert len(task.datasets()["train"]) == 4 and task.labels == ["a", "b"]


# Recipes


def test_mnist_builds_on_image_classification_and_is_what_it_was():
    task, plain = Recipe.load("mnist").task, Recipe.load("mnist")
    assert (task.model, task.model_config, task.augmentation) == (None, {}, None)
    assert task.mixup == task.cutmix == task.label_smoothing == 0
    assert (task.dataset, task.image_size, task.mean, task.std, task.resize) == ("ylecun/mnist", 28, [0.1307], [0.3081], False)
    train = plain.train
    assert (train.warmup_ratio, train.mixed_precision, train.num_workers, train.weight_decay) == (0.0, "no", 0, 0.0)
    assert (train.micro_batch_size, train.micro_batch_tokens, plain.eval.batch_size) == (25, None, 500)
    assert Recipe.load("mnist_best").task.augmentation == {"shift": 2, "rotate": 10}


def test_recipe_for_ones_own_images_names_no_data_set():
    task = Recipe.load("image_classification", "task.data_dir=.").task
    assert (task.dataset, task.label_names, task.max_train_samples) == ("imagefolder", None, None)
    said = Recipe.load("image_classification").task.validate()
    assert "task.dataset=imagefolder needs a folder: set task.data_dir=..." in said
