"""Semantic segmentation: masks and what is wrong with them, the loss of transformers' heads, metrics of torchmetrics, exports."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from transformers import pipeline

from hftune import ConfigError, DataError
from hftune.data import segmentation_images
from hftune.data.demo import landscapes
from hftune.data.demo.drawings import LANDSCAPE
from hftune.data.images import open_stored
from hftune.data.segmentation_images import IGNORED, MaskNumbers, cut_mask, read_mask, to_image
from hftune.tasks import SemanticSegmentation, semantic_segmentation

SEGFORMER = {
    "model_type": "segformer",
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 1, 1],
    "decoder_hidden_size": 8,
}
SMALL_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"}
UPERNET = {
    "model_type": "upernet",
    "backbone_config": {"model_type": "resnet", **SMALL_RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "hidden_size": 8,
}
BEIT = {
    **{"model_type": "beit", "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 4},
    **{"num_attention_heads": 2, "intermediate_size": 16, "out_indices": [1, 2, 3, 4]},
    **{"semantic_loss_ignore_index": -100, "add_fpn": True},
}
MODELS = {"segformer": SEGFORMER, "upernet": UPERNET, "beit": BEIT}


def task_of(**changed):
    own = {"dataset": "hftune.data.demo:landscapes", "model_config": SEGFORMER, "image_size": 32, "label_names": [*LANDSCAPE]}
    return SemanticSegmentation(**{**own, "max_train_samples": 12, "max_eval_samples": 5, **changed})


@pytest.fixture
def folder(tmp_path):
    """Three landscapes, two of them to evaluate on; the masks have a palette, and 255 in a corner."""
    for split, count in (("train", 3), ("validation", 2)):
        for kind in ("image", "mask"):
            (tmp_path / split / kind).mkdir(parents=True)
        for place, row in enumerate(landscapes("train" if split == "train" else "eval", count)):
            mask = np.asarray(row["mask"]).copy()
            mask[:4, :4] = 255
            row["image"].save(tmp_path / split / "image" / f"{place}.jpg")
            image = Image.fromarray(mask)
            image.putpalette([*range(256)] * 3)
            image.save(tmp_path / split / "mask" / f"{place}.png")
    return tmp_path


def in_folder(folder, **changed):
    own = {"dataset": "imagefolder", "data_dir": str(folder), "eval_split": "validation", "max_train_samples": None}
    return task_of(**{**own, **changed})


def refused(task):
    assert task.validate() == []
    with pytest.raises(DataError) as caught:
        task.datasets()
    return str(caught.value)


# Samples


def test_masks_in_files_have_palettes_and_ignored_pixels_and_their_own_size(folder):
    task = in_folder(folder)
    data = task.datasets()
    sample, row = data["eval"][1], [*landscapes("eval", 2)][1]
    assert sample["image"].shape == (32, 32, 3)
    assert sample["mask"].shape == (row["image"].height, row["image"].width)
    assert (sample["mask"][:4, :4] == IGNORED).all()
    expected = np.asarray(row["mask"])
    assert (sample["mask"][4:] == expected[4:]).all()
    assert data["train"][0]["mask"].shape == (32, 32)
    assert task.class_counts(data["train"])["sky"] == 3


def test_images_are_decoded_once_unless_they_are_to_be_cropped(folder, monkeypatch):
    cropped = in_folder(folder, augmentation={"crop": 0.5}).datasets()
    assert cropped["train"].decoded is None and cropped["train"][0]["image"].shape != (32, 32, 3)
    data, opened = in_folder(folder).datasets(), []
    monkeypatch.setattr(segmentation_images, "open_stored", lambda *args: opened.append(args[0]) or open_stored(*args))
    sample = data["train"][0]
    assert sample["image"].shape == (32, 32, 3) and sample["mask"].shape == (32, 32)
    assert [stored["path"] for stored in opened] == [str(folder / "train" / "mask" / "0.png")]


def test_reduced_labels_begin_with_one():
    numbers = MaskNumbers(ignore_index=255, reduce_labels=True)
    labels = numbers.labels(np.array([[0, 1, 2, 255]], np.uint8))
    assert labels.tolist() == [[IGNORED, 0, 1, IGNORED]]
    theirs = transformers.SegformerImageProcessorPil(do_reduce_labels=True).reduce_label(np.array([[0, 1, 2, 255]], np.uint8))
    assert np.where(labels == IGNORED, 255, labels).tolist() == theirs.tolist()
    assert np.asarray(to_image(np.array([[0, 1]]), numbers)).tolist() == [[1, 2]]


def test_masks_are_scaled_as_pillow_takes_the_nearest_pixel():
    mask_HW = np.random.RandomState(0).randint(0, 9, (37, 53)).astype(np.uint8)
    box = (3, 5, 30, 41)
    expected = Image.fromarray(mask_HW).resize((24, 16), Image.Resampling.NEAREST, (5, 3, 46, 33))
    assert (cut_mask(mask_HW, box, (16, 24)) == np.asarray(expected)).all()


def test_image_and_mask_are_augmented_alike_by_seed_epoch_and_sample():
    task = task_of(augmentation={"crop": 0.3, "flip": 0.5})
    task.datasets()
    yy, xx = np.mgrid[:60, :80]
    coded = {
        "image": np.stack([yy * 4, xx * 3, yy * 0], -1).astype(np.uint8),
        "mask": (yy // 10 * 8 + xx // 10).astype(np.int32),
    }
    for seed in range(20):
        once, again = (task.augment(coded, np.random.RandomState(seed)) for _ in range(2))
        assert (once["image"] == again["image"]).all() and (once["mask"] == again["mask"]).all()
        row, column = once["mask"] // 8, once["mask"] % 8
        assert np.abs(once["image"][..., 0] / 40 - 0.5 - row).max() < 0.8  # bilinear against nearest: a pixel or two
        assert np.abs(once["image"][..., 1] / 30 - 0.5 - column).max() < 0.9
    assert once["mask"].shape == (32, 32)


def test_crops_show_a_pixel_with_a_class():
    task = task_of(augmentation={"crop": 0.1})
    task.datasets()
    mask = np.full((64, 64), IGNORED, np.int32)
    mask[40:48, :8] = 1
    example = {"image": np.zeros((64, 64, 3), np.uint8), "mask": mask}
    assert all((task.augment(example, np.random.RandomState(seed))["mask"] == 1).any() for seed in range(30))


# Loss and metrics


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_model_s_own_head_and_adds_up(name, monkeypatch):
    monkeypatch.setattr(semantic_segmentation, "AT_ONCE", 3 * len(LANDSCAPE) * 32 * 32)  # three samples of four
    task = task_of(model_config=MODELS[name])
    data = task.datasets()
    torch.manual_seed(0)
    model = task.build_model().eval().requires_grad_(False)
    examples = [data["train"][index] for index in range(4)]
    examples[0]["mask"][:9] = IGNORED
    batch = task.collate(examples)
    target, outputs = task.target(batch), model(**task.inputs(batch))
    model.config.loss_ignore_index = model.config.semantic_loss_ignore_index = IGNORED
    theirs = model(**task.inputs(batch), labels=batch["labels"]).loss
    assert task.num_items(target) == 4 * 32 * 32 - 9 * 32
    assert float(task.loss(outputs, target) / task.num_items(target)) == pytest.approx(float(theirs), rel=1e-5)
    mixed = [data["eval"][index] for index in range(5)]  # of several sizes
    together = task.collate(mixed)
    assert "size" in together
    alone = [task.collate([example]) for example in mixed]
    losses = [float(task.loss(model(**task.inputs(one)), task.target(one))) for one in alone]
    assert float(task.loss(model(**task.inputs(together)), task.target(together))) == pytest.approx(sum(losses), rel=1e-5)
    assert sum(task.num_items(task.target(one)) for one in alone) == task.num_items(task.target(together))


def test_metrics_are_those_of_torchmetrics_over_all_pixels():
    task = task_of(label_names=["a", "b", "c", "never"])
    rng, rows = np.random.RandomState(0), []
    jaccard = MulticlassJaccardIndex(4, average="none", ignore_index=IGNORED)
    accuracy = MulticlassAccuracy(4, average="micro", ignore_index=IGNORED)
    for height, width in ((32, 32), (16, 48), (8, 8)):
        labels = torch.from_numpy(rng.choice([0, 1, 2, IGNORED], (1, height, width)))
        logits = torch.from_numpy(rng.normal(size=(1, 3, height, width)))
        logits = torch.cat([logits, torch.full((1, 1, height, width), -9.0)], 1)
        rows += task.predictions(type("Outputs", (), {"logits": logits}), None, {"labels": labels, "pixel_values": None})
        jaccard.update(logits.argmax(1), labels)
        accuracy.update(logits.argmax(1), labels)
    found = task.metrics(rows)
    theirs = jaccard.compute().tolist()
    assert [found["per_class"][name]["iou"] for name in "abc"] == pytest.approx(theirs[:3], rel=1e-6)
    assert found["per_class"]["never"] == {"iou": None, "accuracy": None, "support": 0}
    assert found["mean_iou"] == pytest.approx(sum(theirs[:3]) / 3, rel=1e-6)
    assert found["pixel_accuracy"] == pytest.approx(float(accuracy.compute()), rel=1e-6)
    assert np.sum(found["confusion_matrix"]) == sum(row["pixels"] for row in task.describe(rows))


# Exports


def test_an_export_answers_as_the_pipeline_of_transformers(folder, tmp_path):
    task = in_folder(folder)
    task.datasets()
    torch.manual_seed(0)
    task.save(task.build_model().eval(), tmp_path / "model")
    fresh = in_folder(folder)
    model = fresh.load(tmp_path / "model").eval()
    paths = sorted((folder / "validation" / "image").iterdir())
    with torch.no_grad():
        answers = fresh.predict(model, paths)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    theirs = pipeline("image-segmentation", model=str(tmp_path / "model"), image_processor=processor, device="cpu")
    for path, answer in zip(paths, answers, strict=True):
        assert answer["mask"].size == Image.open(path).size and answer["mask"].mode == "P"
        numbers = read_mask(answer["mask"], "")
        for found in theirs(str(path), subtask="semantic"):
            is_there = numbers == LANDSCAPE.index(found["label"])
            assert (is_there == (np.asarray(found["mask"]) > 0)).all()
            assert answer["classes"][found["label"]] == pytest.approx(is_there.mean(), abs=1e-4)


def test_images_are_not_cropped_even_if_the_processor_would(tmp_path):
    torch.manual_seed(0)
    task = task_of()
    task.datasets()
    task.build_model().save_pretrained(tmp_path)
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
    transformers.MobileNetV2ImageProcessorPil(**sizes).save_pretrained(tmp_path)
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (60, 90, 3)).astype(np.uint8))
    form = task_of(model=str(tmp_path), model_config={}, image_size=None)._form
    expected = np.asarray(image.resize((32, 32), Image.Resampling(form.resample)))
    assert np.abs(form.pixels(image, "").astype(int) - expected).max() <= 1


# Bad input


def test_masks_that_cannot_be_used_are_named(folder):
    path = folder / "train" / "mask" / "1.png"
    good = Image.open(path).copy()
    name = f"({path})"
    good.crop((0, 0, 20, 20)).save(path)
    assert "its mask is 20 x 20. They must have the same size." in refused(in_folder(folder))
    wrong = np.asarray(good).copy()
    wrong[10, 10:13] = 7
    Image.fromarray(wrong).save(path)
    assert refused(in_folder(folder)) == (
        "The mask of row 1 of the train split has 3 pixels of class 7; there are 3 classes, 0 to 2 (sky, sun, hill), and 255 "
        "for no class (task.ignore_index). Correct the mask, or task.label_names."
    )
    assert in_folder(folder, label_names=[*"abcdefgh"]).datasets()
    Image.fromarray(np.full_like(wrong, 255)).save(path)
    assert "The mask of row 1 of the train split has no pixel with a class: all are ignored." in refused(in_folder(folder))
    good.convert("RGB").save(path)
    said = refused(in_folder(folder))
    assert name in said and "is a mask in colours (Pillow mode RGB)" in said
    path.unlink()
    assert "1.jpg has no match of the same name in" in refused(in_folder(folder))
    good.convert("L").save(path.with_suffix(".jpg"))
    assert "is a mask in JPEG, which changes class numbers. Save masks as PNG." in refused(in_folder(folder))


def test_one_class_and_other_tasks_models_are_refused(folder):
    for path in (folder / "train" / "mask").iterdir():
        Image.new("L", Image.open(path).size, 0).save(path)
    assert "All pixels have the class '0', but segmentation needs at least two classes." in refused(
        in_folder(folder, label_names=None, eval_split=None)
    )
    with pytest.raises(ConfigError, match="does not classify pixels"):
        task_of(model_config={"model_type": "vit"}).datasets()


def test_keys_that_do_not_fit_are_refused_before_the_data_are_read():
    assert task_of(augmentation={"rotate": 5}).validate() == [
        "task.augmentation.rotate is not a key of a recipe. Keys: crop, flip, color."
    ]
    assert task_of(dataset="idx", data_dir=".").validate()[-1] == (
        "task.dataset=idx has images and labels, but no masks. Use imagefolder."
    )
