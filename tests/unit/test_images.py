"""Images: the network, the draws of augmentation, what is read from which source, and what is said of images that are none."""

from __future__ import annotations

import gzip
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from hftune import ConfigError, DataError, Recipe
from hftune.commands.evaluate import with_evaluation
from hftune.config import EvalConfig
from hftune.config.keys import problems_of
from hftune.data.augmentation import Augmented, augmented
from hftune.data.demo import digits
from hftune.data.image_augmentation import move
from hftune.models.convnet import ConvNet
from hftune.tasks import ImageClassification
from hftune.tasks.image_classification import MIN_SIDE
from tests.support.tasks import Tagging

NAMES = [str(number) for number in range(10)]
IMAGES = np.random.RandomState(0).randint(0, 256, (12, 28, 28)).astype(np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_idx(folder: Path, images: np.ndarray = IMAGES, labels: np.ndarray = LABELS, ending: str = "") -> Path:
    """Write four idx files; both splits are the same."""
    folder.mkdir(exist_ok=True)
    for prefix in ("train", "t10k"):
        for name, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            raw = idx_bytes(values)
            (folder / f"{prefix}-{name}{ending}").write_bytes(gzip.compress(raw) if ending else raw)
    return folder


def of_idx(folder: Path, **fields: Any) -> ImageClassification:
    return ImageClassification(
        **{"dataset": "idx", "data_dir": str(folder), "eval_split": "test", "label_names": NAMES, **fields}
    )


def write_folder(folder: Path, size: tuple[int, int] = (28, 28), mode: str = "L") -> Path:
    """Write a folder of images as imagefolder wants it: three classes, two images each, train and test."""
    for split in ("train", "test"):
        for number, name in enumerate(("cat", "dog", "emu")):
            (folder / split / name).mkdir(parents=True)
            for index in range(2):
                image = Image.fromarray(IMAGES[number * 2 + index]).resize(size).convert(mode)
                image.save(folder / split / name / f"{index}.png")
    return folder


def of_folder(folder: Path, **fields: Any) -> ImageClassification:
    return ImageClassification(**{"dataset": "imagefolder", "data_dir": str(folder), "eval_split": "test", **fields})


def refused(task: ImageClassification) -> str:
    assert task.validate() == []
    with pytest.raises(DataError) as caught:
        task.datasets()
    return str(caught.value)


# The network


def test_network_has_the_published_number_of_parameters():
    model = ConvNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 21_840
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1]
    assert shapes == [(10, 1, 5, 5), (20, 10, 5, 5), (50, 320), (10, 50)]


@pytest.mark.parametrize("size", [MIN_SIDE, 28, 29, 32])
def test_network_takes_images_of_its_size_in_grey_and_colour(size):
    for channels in (1, 3):
        model = ConvNet(image_size=size, in_channels=channels, num_classes=7, width=2)
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


# Augmentation


@pytest.mark.parametrize("channels", [1, 3])
def test_turn_is_counter_clockwise_about_the_middle_and_a_shift_leaves_black_behind(channels):
    image = np.stack([IMAGES[0]] * channels, axis=-1)
    inner = (slice(1, -1), slice(1, -1))  # at the rim, rounding decides whether black comes in
    assert np.abs(move(image, 90.0, 0, 0)[inner].astype(int) - np.rot90(image)[inner]).max() <= 1
    assert (move(image, 0.0, 0, 0) == image).all()
    moved = move(image, 0.0, 2, 1)
    assert (moved[1:, 2:] == image[:-1, :-2]).all() and not moved[:1].any() and not moved[:, :2].any()  # black behind it


@pytest.fixture(scope="module")
def moving(tmp_path_factory) -> tuple[ImageClassification, Any]:
    task = of_idx(write_idx(tmp_path_factory.mktemp("idx")), augmentation={"shift": 2, "rotate": 10})
    return task, task.datasets()["train"]


def test_sample_depends_on_seed_and_epoch_and_not_on_what_was_loaded_before(moving):
    task, data = moving
    first = Augmented(data, task, seed=1, epoch=0)
    images = [first[place]["image"] for place in range(len(data))]
    backwards = [first[place]["image"] for place in reversed(range(len(data)))]
    together = pickle.loads(pickle.dumps(first)).__getitems__(list(range(len(data))))
    for place, image in enumerate(images):
        assert (image == backwards[-1 - place]).all() and (image == together[place]["image"]).all()
        assert together[place]["label"] == data[place]["label"]
    for other in (Augmented(data, task, seed=2, epoch=0), Augmented(data, task, seed=1, epoch=1)):
        assert all((image != other[place]["image"]).any() for place, image in enumerate(images))
    expected = task.augment(data[5], np.random.RandomState([1, 3, 5]))
    assert (Augmented(data, task, seed=1, epoch=3)[5]["image"] == expected["image"]).all()
    assert (data.pixels[..., 0] == IMAGES).all()  # the data set itself is never changed


def test_task_that_varies_nothing_gets_its_own_data_set_back():
    rows = [1, 2, 3]
    for task in (Tagging(), ImageClassification(), ImageClassification(augmentation={})):
        assert augmented(rows, task, 0, 0) is rows
    assert isinstance(augmented(rows, ImageClassification(augmentation={"shift": 2}), 0, 0), Augmented)


# Where images come from


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_compressed_or_not(tmp_path, ending):
    task = of_idx(write_idx(tmp_path, ending=ending))
    data = task.datasets()["eval"]
    assert [sample["label"] for sample in data] == LABELS.tolist()
    batch = task.collate([data[3], data[7]])
    assert batch["image"].shape == (2, 1, 28, 28) and batch["labels"].tolist() == [3, 7]
    expected = (torch.from_numpy(IMAGES[[3, 7]]).float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(batch["image"][:, 0], expected)


def test_idx_files_with_a_dot_in_their_names_and_the_train_split_for_evaluation(tmp_path):
    write_idx(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    task = of_idx(tmp_path, eval_split="train", max_eval_samples=5)
    assert task.validate() == [] and len(task.datasets()["eval"]) == 5


def test_folder_of_images_gives_its_folders_as_classes(tmp_path):
    task = of_folder(write_folder(tmp_path))
    data = task.datasets()
    assert task.labels == ["cat", "dog", "emu"] and [sample["label"] for sample in data["eval"]] == [0, 0, 1, 1, 2, 2]
    assert all((sample["image"][..., 0] == IMAGES[place]).all() for place, sample in enumerate(data["train"]))


def test_colour_is_kept_where_mean_has_three_numbers(tmp_path):
    fields = {"mean": [0.5, 0.4, 0.3], "std": [1.0, 1.0, 1.0]}
    task = of_folder(write_folder(tmp_path, mode="RGB"), **fields)
    batch = task.collate([task.datasets()["train"][0]])
    assert batch["image"].shape == (1, 3, 28, 28)
    torch.testing.assert_close(
        batch["image"][0, :, 0, 0], torch.full((3,), IMAGES[0][0, 0] / 255) - torch.tensor(fields["mean"])
    )
    assert task.build_model()(**task.inputs(batch)).shape == (1, 3)


def test_images_of_another_size_are_scaled_and_cut_where_asked(tmp_path):
    task = of_folder(write_folder(tmp_path, size=(56, 28)), resize=True)
    assert task.datasets()["train"][0]["image"].shape == (28, 28, 1)


def test_idx_images_of_another_size_are_scaled_where_asked(tmp_path):
    task = of_idx(write_idx(tmp_path, images=np.repeat(np.repeat(IMAGES, 2, axis=1), 2, axis=2)), resize=True)
    found = np.stack([sample["image"][..., 0] for sample in task.datasets()["train"]]).astype(float)
    assert found.shape == (12, 28, 28) and np.abs(found - IMAGES).mean() < 40  # noise, blurred by scaling


def test_demo_function_and_its_cached_pixels_give_the_digits_as_drawn():
    drawn = list(digits("eval", 101))
    for _ in range(2):  # the second time from the file
        task = ImageClassification(dataset="tests.support.tasks:few_digits", label_names=NAMES)
        data = task.datasets()["eval"]
        assert [sample["label"] for sample in data] == [row["label"] for row in drawn]
        assert all((sample["image"][..., 0] == np.asarray(row["image"])).all() for sample, row in zip(data, drawn, strict=True))


# What is refused before anything is loaded


def problems(**fields: Any) -> list[str]:
    task = ImageClassification(**{"dataset": "ylecun/mnist", "eval_split": "test", **fields})
    return [*problems_of(task, "task"), *task.validate()]


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"augmentation": {"shft": 2}}, "task.augmentation.shft is not a key of a recipe."),
        ({"augmentation": {"shft": 2}}, "Keys: crop, flip, rand_augment, color, shift, rotate, erase. Did you mean 'shift'?"),
        ({"augmentation": {"shift": -1}}, "task.augmentation.shift=-1 must be a number from 0 to 28."),
        ({"augmentation": {"shift": 29}}, "task.augmentation.shift=29 must be a number from 0 to 28."),
        ({"augmentation": {"rotate": "far"}}, "task.augmentation.rotate='far' must be a number from 0 to 180."),
        ({"dropout": 1.0}, "task.dropout=1.0 must be in [0, 1)."),
        ({"width": 0}, "task.width=0 must be at least 1."),
        ({"mean": [0.1, 0.2], "std": [0.3]}, "must both hold one number (grey) or three (red, green, blue)."),
        ({"mean": [0.1], "std": [0.0]}, "task.std=[0.0]: each must be above 0."),
        ({"dataset": "idx"}, "task.dataset=idx needs a folder: set task.data_dir=..."),
        ({"dataset": "idx", "data_dir": "HERE/mnst"}, "HERE/mnst: there is no such folder. Did you mean HERE/mnist?"),
        ({"dataset": "idx", "data_dir": "HERE/mnist"}, "HERE/mnist has no file t10k-labels-idx1-ubyte, with or without .gz."),
        ({"dataset": "idx", "data_dir": "HERE/mnist", "eval_split": "dev"}, "idx files have the splits train and test."),
        (
            {"data_dir": "HERE"},
            "task.data_dir=HERE is for task.dataset=coco or idx or imagefolder or audiofolder, not for ylecun/mnist.",
        ),
        ({"image_size": MIN_SIDE - 1}, f"task.image_size={MIN_SIDE - 1} must be at least {MIN_SIDE}."),
    ],
)
def test_keys_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, fields, hint):
    (write_idx(tmp_path / "mnist") / "t10k-labels-idx1-ubyte").unlink()
    (said,) = problems(
        **{key: value.replace("HERE", str(tmp_path)) if key == "data_dir" else value for key, value in fields.items()}
    )
    assert hint in said.replace(str(tmp_path), "HERE")


def test_hub_that_cannot_be_reached_says_what_to_name_instead():
    said = refused(ImageClassification(dataset="nobody/nothing"))
    assert said.startswith("task.dataset=nobody/nothing cannot be loaded: ")
    assert " Without the Hub, name files: task.dataset=imagefolder task.data_dir=FOLDER, or " in said


# What is refused in the data


def test_broken_idx_files_are_refused(tmp_path):
    path = write_idx(tmp_path / "idx") / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    for raw, message in {
        whole[:-5]: "is truncated: its header announces 9,408 bytes, and 9,403 follow.",
        whole + b"x": "is too long: its header announces 9,408 bytes, and 9,409 follow.",
        whole[:9]: "is truncated: it has fewer than 16 bytes.",
        idx_bytes(LABELS): "begins with 00 00 08 01, not with 00 00 08 03: it is not an idx file of images.",
        b"": "begins with nothing, not with 00 00 08 03: it is not an idx file of images.",
        idx_bytes(IMAGES[1:]): f"holds 11 images, but {path.parent}/train-labels-idx1-ubyte holds 12 labels.",
    }.items():
        path.write_bytes(raw)
        assert refused(of_idx(path.parent)) == f"{path} {message}"
    path = write_idx(tmp_path / "packed", ending=".gz") / "t10k-labels-idx1-ubyte.gz"
    for raw, message in {
        path.read_bytes()[:-12]: "is truncated or broken: ",
        b"<html>": "cannot be read: Not a gzipped",
    }.items():
        path.write_bytes(raw)
        assert refused(of_idx(path.parent)).startswith(f"{path} {message}")


def test_images_of_another_size_are_refused_by_name(tmp_path):
    write_idx(tmp_path / "idx", images=IMAGES[:, 4:, :])
    said = refused(of_idx(tmp_path / "idx"))
    assert said.startswith("Row 0 of the train split is 28 x 24 pixels, but task.image_size=28. ")
    assert "or set task.resize=true" in said
    folder = write_folder(tmp_path / "images")
    path = folder / "test" / "dog" / "1.png"
    Image.new("L", (30, 28)).save(path)
    assert refused(of_folder(folder)).startswith(f"Row 3 of the eval split ({path}) is 30 x 28 pixels, ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no image", "is not an image that can be read."), (None, "cannot be read: image file is truncated")],
)
def test_file_that_is_no_image_is_named(tmp_path, content, reason):
    folder = write_folder(tmp_path)
    path = folder / "train" / "emu" / "0.png"
    path.write_bytes(content or path.read_bytes()[:500])
    assert refused(of_folder(folder)).startswith(f"Row 4 of the train split ({path}) {reason}")


def test_colours_transparency_and_deep_pixels_are_refused(tmp_path):
    folder = write_folder(tmp_path)
    path = folder / "train" / "cat" / "1.png"
    said = f"Row 1 of the train split ({path}) "
    for image, reason in [
        (Image.new("RGB", (28, 28), (1, 2, 3)), "is in colour, but task.mean has one number, for grey."),
        (Image.new("RGBA", (28, 28), (1, 1, 1, 5)), "has transparent parts. Flatten it onto a background."),
        (Image.new("I;16", (28, 28)), "has more than 8 bits per channel (Pillow mode I;16). Convert it."),
    ]:
        image.save(path)
        assert refused(of_folder(folder)).startswith(said + reason)
    Image.fromarray(IMAGES[1]).convert("RGBA").save(path)  # grey all the same
    assert (of_folder(folder).datasets()["train"][1]["image"][..., 0] == IMAGES[1]).all()


@pytest.mark.parametrize("augmentation", [None, {"crop": 0.5}])
def test_a_file_that_a_function_opens_is_read_again_if_it_has_changed(tmp_path, monkeypatch, augmentation):
    folder = write_folder(tmp_path)
    paths = [folder / "train" / name / "0.png" for name in ("cat", "dog")]
    rows = [{"image": path, "label": index} for index, path in enumerate(paths)]
    monkeypatch.setattr(
        "tests.support.tasks.few_digits", lambda split: [{**row, "image": Image.open(row["image"])} for row in rows]
    )
    fields = {"dataset": "tests.support.tasks:few_digits", "resize": True, "augmentation": augmentation}
    for number in (5, 7):
        Image.fromarray(IMAGES[number]).save(paths[0])
        assert (ImageClassification(**fields).datasets()["train"][0]["image"][..., 0] == IMAGES[number]).all()
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    assert refused(ImageClassification(**fields)).startswith(f"Row 0 of the train split ({paths[0]}) cannot be read: ")


def test_column_that_holds_no_images_is_refused(tmp_path):
    fields = {"dataset": "tests.support.tasks:few_digits", "label_names": NAMES}
    said = refused(ImageClassification(**fields, image_column="label"))
    assert said == "Column 'label' of the train split holds int64, not images."
    said = refused(ImageClassification(**fields, image_column="img"))
    assert said.startswith("task.image_column=img is not a column of the train") and said.endswith("Did you mean 'image'?")


def test_the_best_model_is_not_chosen_on_the_test_images(tmp_path):
    folder = write_folder(tmp_path)
    task = of_folder(folder, eval_split=None)
    assert {split: len(images) for split, images in task.datasets().items()} == {"train": 3, "eval": 3}
    held_out, unused = task.notices(task.datasets(), None)[:2]
    assert held_out.startswith("task.eval_share=0.1: a share of the 6 images of the train split is held out")
    assert unused.startswith("The data set has the split test, too, which nothing uses: task.eval_split names")
    tested = of_folder(folder, eval_split=None, test_split="test")
    assert {split: len(images) for split, images in tested.datasets().items()} == {"train": 3, "eval": 3, "test": 6}
    assert not any("nothing uses" in line for line in tested.notices(tested.datasets(), None))


def test_images_are_held_out_only_if_nothing_else_is_said(tmp_path):
    of_function = {"dataset": "tests.support.tasks:few_digits", "label_names": NAMES, "data_dir": None}
    assert of_folder(tmp_path, eval_split=None).held_out_share == 0.1
    assert of_folder(tmp_path).held_out_share is None
    assert of_folder(tmp_path, **of_function, eval_split=None).held_out_share is None
    assert of_folder(tmp_path, data_files={"train": "a.parquet", "eval": "b.parquet"}).held_out_share is None
    assert of_folder(tmp_path, eval_split=None, eval_fold=[0, 2]).held_out_share is None
    assert of_folder(tmp_path, **of_function, eval_split=None, eval_share=0.5).held_out_share == 0.5
    never = Recipe(task=of_folder(write_folder(tmp_path), eval_split=None), eval=EvalConfig(every="never"))
    assert never.task.held_out_share is None and never.task.datasets().keys() == {"train"}
    with pytest.raises(ConfigError, match=r"This run has no evaluation data .* Name some: task.eval_split="):
        with_evaluation(never)
    (said,) = of_folder(tmp_path, eval_share=0.5).validate()
    assert said.startswith("task.eval_share=0.5 takes evaluation images from the training images, but task.eval_split=test")


@pytest.mark.parametrize("split", ["eval", "test"])
def test_a_split_that_a_folder_lacks_is_refused(tmp_path, split):
    instead = "hold out a share of the training rows (task.eval_share=" if split == "eval" else "or to null."
    said = refused(of_folder(write_folder(tmp_path), **{f"{split}_split": "last"}))
    assert f"Should be one of ['train', 'test']. Set task.{split}_split to one of them, {instead}" in said


# What a model answers


@pytest.fixture
def finished(tmp_path) -> tuple[ImageClassification, Path]:
    """A task that has read its recipe and the folder that another one saved, and no data."""
    trained = of_folder(write_folder(tmp_path / "images"))
    (tmp_path / "model").mkdir()
    torch.manual_seed(0)
    trained.save(trained.build_model(), tmp_path / "model")
    return of_folder(tmp_path / "images"), tmp_path / "model"


def test_model_answers_paths_images_and_arrays_alike_with_the_names_that_were_saved(finished, tmp_path):
    task, folder = finished
    model = task.load(folder).eval()
    path = tmp_path / "images" / "test" / "dog" / "0.png"
    rows = task.predict(model, [path, str(path), Image.open(path), IMAGES[2]])
    assert rows[0]["label"] in ("cat", "dog", "emu") and 1 / 3 <= rows[0]["probability"] <= 1
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert "rows" not in vars(task)  # no data was loaded for it


def test_an_opened_image_is_turned_as_its_file_is(finished, tmp_path):
    task, folder = finished
    path, exif = tmp_path / "turned.png", Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(IMAGES[2]).save(path, exif=exif)
    model = task.load(folder).eval()
    whole, opened = task.predict(model, [path, Image.open(path)])
    assert whole == opened and whole != task.predict(model, [IMAGES[2]])[0]
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"^Input 0 cannot be read: image file is truncated"):
        task.predict(model, [Image.open(path)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere.png", "Input 0 (nowhere.png): there is no such file."),
        (3, "Input 0 is a int, not a path, a Pillow image or an array."),
        (np.zeros((28, 28)), "Input 0 is an array (28, 28) of float64, not (H, W) or (H, W, 3) of uint8."),
    ],
)
def test_what_is_no_image_is_not_answered(finished, value, message):
    task, folder = finished
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        task.predict(task.load(folder), [value])


def test_export_of_another_network_is_refused(finished):
    _, folder = finished
    with pytest.raises(ConfigError, match=r"has a network with task.width=1, but the recipe has task.width=2\."):
        ImageClassification(width=2).load(folder)


def test_shipped_recipes_are_those_of_the_same_task():
    plain, best = Recipe.load("mnist"), Recipe.load("mnist_best")
    assert (plain.train.optimizer, plain.train.lr, plain.train.momentum, plain.train.batch_size) == ("sgd", 1e-3, 0.5, 100)
    assert (plain.train.epochs, plain.train.schedule, plain.train.clip_norm) == (3, "constant", None)
    assert sum(parameter.numel() for parameter in plain.task.build_model().parameters()) == 21_840
    assert type(best.task) is type(plain.task) and best.task.augmentation


def test_a_network_of_ones_own_classifies_and_is_loaded_again(tmp_path):
    fields = {"network": "hftune.models.convnet.ConvNet", "network_args": {"width": 2, "num_classes": 10}}
    task = of_idx(write_idx(tmp_path / "data"), **fields)
    task.datasets()
    model = task.build_model().eval()
    assert model.network.conv1.out_channels == 20
    (folder := tmp_path / "model").mkdir()
    task.save(model, folder)
    fresh = of_idx(tmp_path / "data", **fields)
    loaded = fresh.load(folder).eval()
    with torch.no_grad():
        assert fresh.predict(loaded, [IMAGES[0]]) == task.predict(model, [IMAGES[0]])
    with pytest.raises(
        ConfigError, match=r"network_args={'width': 2, .*}, but the recipe has task.network_args={'num_classes': 10}"
    ):
        of_idx(tmp_path / "data", network=fields["network"], network_args={"num_classes": 10}).load(folder)


def test_a_network_with_another_number_of_classes_is_refused(tmp_path):
    fields = {"network": "hftune.models.convnet.ConvNet", "network_args": {"num_classes": 11}}
    task = of_idx(write_idx(tmp_path / "data"), **fields)
    batch = task.collate([task.datasets()["train"][0]])
    with pytest.raises(ConfigError, match=r"ConvNet returned \(1, 11\), not logits \(1, 10\), one for each class\."):
        task.build_model()(**task.inputs(batch))
