"""Object detection: boxes and what is wrong with them, losses beside those of transformers' heads, mAP beside the plain formula."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForObjectDetection, pipeline

from hftune import ConfigError, DataError
from hftune.data.demo import scenes
from hftune.data.detection_images import cut_boxes
from hftune.metrics.detection import detection_metrics
from hftune.models.detection_loss import sum_over_boxes
from hftune.tasks import ObjectDetection

RESNET = {
    **{"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"},
    "out_features": ["stage2", "stage3", "stage4"],
}
SIZES = {"d_model": 32, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
RT_DETR = {
    **{
        "model_type": "rt_detr",
        "backbone_config": {"model_type": "rt_detr_resnet", **RESNET},
        "encoder_in_channels": [8, 16, 16],
    },
    **{"encoder_hidden_dim": 16, "encoder_ffn_dim": 16, "decoder_in_channels": [16, 16, 16], "decoder_ffn_dim": 16},
    **{**SIZES, "num_queries": 6},
}
BACKBONE = {"backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage4"]}}
DETR = {**SIZES, **BACKBONE, "encoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 6}
DETR |= {"auxiliary_loss": True}
YOLOS = {
    **{"model_type": "yolos", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
    **{"image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 6},
}
MODELS = {
    **{"rt_detr": RT_DETR, "rt_detr_v2": {**RT_DETR, "model_type": "rt_detr_v2"}, "yolos": YOLOS},
    **{name: {**DETR, "model_type": name} for name in ("detr", "conditional_detr")},
    "deformable_detr": {**DETR, "model_type": "deformable_detr", "num_feature_levels": 1},
}


def task_of(**changed):
    own = {"dataset": "hftune.data.demo:scenes", "model_config": RT_DETR, "image_size": 64}
    return ObjectDetection(**{**own, "max_train_samples": 12, "max_eval_samples": 5, **changed})


@pytest.fixture
def folder(tmp_path):
    """Four scenes with COCO's json beside them, and two to evaluate on with it in COCO's own place."""
    (tmp_path / "annotations").mkdir()
    for split, path in (("train", "train/_annotations.coco.json"), ("valid", "annotations/instances_valid.json")):
        (tmp_path / split).mkdir()
        found = {"images": [], "annotations": [], "categories": [{"id": 0, "name": "things"}]}
        found["categories"] += [{"id": 7, "name": "square"}, {"id": 3, "name": "disc"}, {"id": 5, "name": "triangle"}]
        numbers = {one["name"]: one["id"] for one in found["categories"]}
        for place, row in enumerate(scenes("train", {"train": 4, "valid": 2}[split])):
            row["image"].save(tmp_path / split / f"{place}.png")
            found["images"].append({"id": place + 10, "file_name": f"{place}.png"})
            for box, name in zip(row["objects"]["bbox"], row["objects"]["category"], strict=True):
                number = len(found["annotations"])
                own = {"id": number, "image_id": place + 10, "bbox": box, "category_id": numbers[name], "iscrowd": 0}
                found["annotations"].append(own)
        (tmp_path / path).write_text(json.dumps(found))
    return tmp_path


def in_folder(folder, **changed):
    return task_of(dataset="coco", data_dir=str(folder), eval_split="valid", max_train_samples=None, **changed)


def changed_json(folder, change):
    path = folder / "train" / "_annotations.coco.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def refused(task):
    assert task.validate() == []
    with pytest.raises(DataError) as caught:
        task.datasets()
    return str(caught.value)


# Samples


def test_boxes_of_coco_s_json_are_those_of_the_column_of_objects(folder):
    task, rows = in_folder(folder), [*scenes("train", 4)]
    data = task.datasets()
    assert task.labels == ["disc", "triangle", "square"]  # in the order of their numbers, and without the class of no box
    for index, row in enumerate(rows):
        sample = data["train"][index]
        width, height = row["image"].size
        boxes = np.array(row["objects"]["bbox"])
        assert sample["image"].shape == (64, 64, 3) and sample["size"] == (height, width)
        assert sample["boxes"][:, :2] * [width, height] == pytest.approx(boxes[:, :2], abs=1e-4)
        assert (sample["boxes"][:, 2:] - sample["boxes"][:, :2]) * [width, height] == pytest.approx(boxes[:, 2:], abs=1e-4)
        assert [task.labels[label] for label in sample["labels"]] == row["objects"]["category"]
    assert sum(task.class_counts(data["train"]).values()) == data["train"].num_boxes


def test_image_and_boxes_are_augmented_alike_by_seed_epoch_and_sample():
    task = task_of(augmentation={"crop": 0.3, "flip": 0.5})
    image = np.zeros((80, 120, 3), np.uint8)
    image[20:40, 30:60] = 255
    box = np.array([[30 / 120, 20 / 80, 60 / 120, 40 / 80]], np.float32)
    example = {"image": image, "boxes": box, "labels": np.array([1]), "crowd": np.array([False]), "size": (80, 120)}
    for seed in range(30):
        once, again = (task.augment(example, np.random.RandomState(seed)) for _ in range(2))
        assert (once["image"] == again["image"]).all() and (once["boxes"] == again["boxes"]).all()
        assert once["image"].shape == (64, 64, 3) and once["labels"].tolist() == [1]
        rows, columns = (once["image"][..., 0] > 127).any(1).nonzero()[0], (once["image"][..., 0] > 127).any(0).nonzero()[0]
        seen = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        assert once["boxes"][0] * 64 == pytest.approx(seen, abs=1.0)


def test_a_crop_keeps_the_objects_whose_centre_it_shows():
    sample = {"boxes": np.array([[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]], np.float32), "labels": np.array([3, 4])}
    shown = cut_boxes({**sample, "crowd": np.array([False, True])}, (0, 0, 60, 60), (100, 100))
    assert shown["labels"].tolist() == [3] and shown["boxes"] == pytest.approx(np.array([[0, 0, 50 / 60, 50 / 60]]))


# Loss and metrics


def labels_of(counts):
    rng = torch.Generator().manual_seed(1)

    def draw(count):
        return torch.cat([part + 0.2 * torch.rand(count, 2, generator=rng) for part in (0.4, 0.1)], 1)

    return [{"class_labels": torch.arange(count) % 3, "boxes": draw(count)} for count in counts]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_images_adds_up_to_that_of_the_model_s_own_head(name):
    config = AutoConfig.for_model(**MODELS[name])
    config.num_labels, config.num_denoising = 3, 0
    torch.manual_seed(0)
    model = AutoModelForObjectDetection.from_config(config).eval().requires_grad_(False)
    pixels, labels = torch.randn(3, 3, 64, 64), labels_of([2, 1, 3])
    theirs = float(model(pixels, labels=labels).loss)
    sum_over_boxes(model, 2.0, "task.model_config")  # the mean of these images
    assert float(model(pixels, labels=labels).loss.sum()) / 6 == pytest.approx(theirs, rel=1e-5)
    labels = labels_of([2, 0, 3])
    together = model(pixels, labels=labels).loss
    alone = [model(pixels[index : index + 1], labels=labels[index : index + 1]).loss for index in range(3)]
    assert together.tolist() == pytest.approx(torch.cat(alone).tolist(), rel=1e-5) and together[1] > 0


def test_items_are_boxes_but_crowds_and_an_image_without_any_is_one():
    target = {"labels": torch.tensor([[0, 1, -100], [2, -100, -100], [-100, -100, -100]])}
    target["crowd"] = torch.tensor([[False, False, False], [True, False, False], [False, False, False]])
    assert task_of().num_items(target) == 2 + 1 + 1


def plain_average_precision(rows, label, threshold):
    """COCO's: the highest precision at each of 101 recalls or beyond, from the surest box to the least sure one."""
    taken, hits = set(), []
    boxes = [
        (score, image, (x, y, w, h))
        for image, row in enumerate(rows)
        for x, y, w, h, own, score in row["found"]
        if own == label
    ]
    count = sum(own == label for row in rows for *_, own, _ in row["boxes"])
    for _, image, (x, y, w, h) in sorted(boxes, key=lambda box: -box[0]):
        best, best_iou = None, threshold
        for number, (a, b, c, d, own, _) in enumerate(rows[image]["boxes"]):
            inner = max(0, min(x + w, a + c) - max(x, a)) * max(0, min(y + h, b + d) - max(y, b))
            iou = inner / (w * h + c * d - inner)
            if own == label and (image, number) not in taken and iou >= best_iou:
                best, best_iou = number, iou
        hits.append(best is not None)
        taken.add((image, best))
    right = np.cumsum(hits)
    precision, recall = right / np.arange(1, len(hits) + 1), right / count
    return np.mean([precision[recall >= level - 1e-12].max(initial=0) for level in np.linspace(0, 1, 101)])


def test_metrics_are_those_of_the_plain_formula_over_the_whole_split():
    rng, rows = np.random.RandomState(0), []
    for _ in range(12):
        true = [[*rng.uniform(0, 60, 2), *rng.uniform(10, 30, 2), int(rng.randint(2)), False] for _ in range(rng.randint(0, 4))]
        found = [[*(np.array(box[:4]) + rng.normal(0, 1.5, 4)), box[4], rng.rand()] for box in true if rng.rand() < 0.8]
        found += [[*rng.uniform(0, 60, 2), *rng.uniform(10, 30, 2), int(rng.randint(2)), rng.rand() / 2]]
        rows.append({"boxes": true, "found": found})
    found = detection_metrics(rows, ["a", "b", "never"])
    for name, threshold in (("map_50", 0.5), ("map_75", 0.75)):
        plain = [plain_average_precision(rows, label, threshold) for label in (0, 1)]
        assert found[name] == pytest.approx(np.mean(plain), abs=1e-9) and 0.05 < found[name] < 0.99
    thresholds = np.linspace(0.5, 0.95, 10)
    plain = [plain_average_precision(rows, label, threshold) for label in (0, 1) for threshold in thresholds]
    assert found["map"] == pytest.approx(np.mean(plain), abs=1e-9)
    assert found["per_class"]["never"] == {"ap": None, "support": 0}


def test_a_crowd_is_neither_missed_nor_found_and_no_box_at_all_is_no_error():
    rows = [
        {
            "boxes": [[0, 0, 10, 10, 0, False], [20, 20, 40, 40, 0, True]],
            "found": [[0, 0, 10, 10, 0, 0.9], [22, 22, 9, 9, 0, 0.95]],
        }
    ]
    assert detection_metrics(rows, ["a"])["map"] == pytest.approx(1)
    assert detection_metrics([{"boxes": [], "found": []}], ["a"])["map"] is None
    assert detection_metrics([{"boxes": rows[0]["boxes"], "found": []}], ["a"])["map"] == 0


# Exports


@pytest.mark.parametrize("name", ["rt_detr", "detr", "yolos"])
def test_an_export_answers_as_the_pipeline_of_transformers(folder, tmp_path, name):
    own = {"model_config": MODELS[name], "threshold": 0.0}
    task = in_folder(folder, **own)
    task.datasets()
    torch.manual_seed(0)
    task.save(task.build_model().eval(), tmp_path / "model")
    fresh = in_folder(folder, **own)
    model = fresh.load(tmp_path / "model").eval()
    paths = [folder / "valid" / f"{place}.png" for place in range(2)]
    with torch.no_grad():
        answers = fresh.predict(model, paths)
    detect = pipeline("object-detection", model=str(tmp_path / "model"), device="cpu")
    for path, answer in zip(paths, answers, strict=True):
        theirs = sorted(detect(str(path), threshold=0.0), key=lambda one: -one["score"])
        assert answer["scores"] == pytest.approx([one["score"] for one in theirs], abs=1e-4)
        assert set(answer["labels"]) <= {"disc", "triangle", "square"}
        ours = sorted(zip(answer["scores"], answer["boxes"], strict=True))[-1][1]
        assert ours == pytest.approx(
            [theirs[0]["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")], abs=1.01
        )  # whole pixels


# Bad input


def test_boxes_that_cannot_be_used_are_named(folder):
    changed_json(folder, lambda found: found["annotations"][0].update(bbox=[-5, 3, 20, 20]))
    said = refused(in_folder(folder))
    assert said.startswith("Row 0 of the train split: the box from (-5, 3) to (15, 23) reaches beyond the image, which is ")
    assert said.endswith("task.bad_boxes=cut, which cuts boxes to their image and leaves out those without an area.")
    changed_json(folder, lambda found: found["annotations"][1].update(bbox=[5, 3, 20, 0]))
    assert "the box from (5, 3) to (25, 3) has no area, which is" in refused(in_folder(folder)).replace(
        "area, which", "area, which"
    )
    task = in_folder(folder, bad_boxes="cut")
    data = task.datasets()
    assert data["train"][0]["boxes"][0, 0] == 0
    said = "task.bad_boxes=cut: 1 boxes of the train split have no area and are left out."
    assert said in task.notices(data, task.build_model())


def test_an_unknown_category_and_a_json_that_is_none_are_named(folder):
    assert "has the label 'square'; there are 2 labels, 0 to 1 (disc, triangle)" in refused(
        task_of(label_names=["disc", "triangle"])
    )
    changed_json(folder, lambda found: found["annotations"][2].update(category_id=99))
    assert refused(in_folder(folder)).endswith("_annotations.coco.json: annotation 2 has the unknown category 99.")
    changed_json(folder, lambda found: found.pop("categories"))
    assert "is not in COCO's layout (images, annotations, categories): KeyError('categories')." in refused(in_folder(folder))
    (folder / "train" / "_annotations.coco.json").unlink()
    assert "there is neither one json file in" in refused(in_folder(folder))


def test_models_and_data_of_other_tasks_are_refused():
    with pytest.raises(ConfigError, match="does not detect objects"):
        task_of(model_config={"model_type": "vit"}).datasets()
    with pytest.raises(ConfigError, match=r"transformers has no image processor for d_fine\. Use RT-DETR"):
        task_of(model_config={"model_type": "d_fine"}).datasets()
    config = AutoConfig.for_model("lw_detr")
    model = type("LwDetrForObjectDetection", (), {"loss_type": "LwDetrForObjectDetection", "config": config})()
    with pytest.raises(ConfigError, match="is not known to be a sum over boxes"):
        sum_over_boxes(model, 1.0, "task.model_config")


def test_images_may_have_no_boxes_and_one_class_is_enough(tmp_path):
    rows = [{**row, "objects": {"bbox": row["objects"]["bbox"][:1], "category": [0]}} for row in scenes("train", 3)]
    rows.append({"image": Image.new("RGB", (60, 60)), "objects": {"bbox": [], "category": []}})
    task = task_of(label_names=["thing"])
    task.unchecked_rows = {"train": Dataset.from_list(rows)}
    task.evaluates = False
    data = task.datasets()
    batch = task.collate([data["train"][index] for index in range(4)])
    assert batch["labels"].tolist() == [[0], [0], [0], [-100]]
    assert task.num_items(task.target(batch)) == 4
    with torch.no_grad():
        outputs = task.build_model().eval()(**task.inputs(batch))
    assert task.loss(outputs, task.target(batch)).isfinite() and task.predictions(outputs, None, batch)[3]["boxes"] == []
