"""Pictures to restore: how folders are put together, what is drawn, and the sentence for each thing that can be wrong."""

import re

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from hftune.batch_plan import BatchPlan
from hftune.config import Recipe
from hftune.data.damage import draw_mask
from hftune.errors import ConfigError, DataError
from hftune.metrics.restoration import measure, psnr, summarise
from hftune.models.unet import AnySize, UNet, from_around
from hftune.tasks.image_restoration import ImageRestoration
from hftune.tracking.predictions import grid


def image(width=40, height=32, seed=0, mode="RGB"):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def mask(width=40, height=32, value=255):
    pixels = np.zeros((height, width), np.uint8)
    pixels[4:12, 6:20] = value
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path):
    """Two pairs for each split, and a file that is no picture's business."""
    for split in ("train", "test"):
        for name, drawn in (("image", image), ("mask", mask), ("target", image)):
            (tmp_path / split / name).mkdir(parents=True)
            for stem in ("a", "b"):
                drawn().save(tmp_path / split / name / f"{stem}.png")
        (tmp_path / split / "image" / "notes.txt").write_text("none")
    return tmp_path


def task(folder, **fields):
    columns = {"mask_column": "mask", "target_column": "target"}
    return ImageRestoration(**{"data_dir": str(folder), "eval_split": "test", "crop": 16, **columns, **fields})


def refusal(folder, **fields):
    with pytest.raises(DataError) as caught:
        task(folder, **fields).datasets()
    return str(caught.value)


def test_the_best_network_is_not_chosen_on_the_test_images(folder):
    own = task(folder, eval_split=None, crop=None)
    data = own.datasets()
    assert {split: len(pictures) for split, pictures in data.items()} == {"train": 1, "eval": 1}
    (said,) = [line for line in own.notices(data, own.build_model()) if "nothing uses" in line]
    assert said.startswith("The data set has the split test, too")
    tested = task(folder, eval_split=None, test_split="test").datasets()
    assert {split: len(pictures) for split, pictures in tested.items()} == {"train": 1, "eval": 1, "test": 2}


def test_folders_are_put_together_by_name_whatever_the_suffix(folder):
    image(seed=5).save(folder / "train" / "image" / "c.jpg")
    mask().save(folder / "train" / "mask" / "c.png")
    image(seed=6).save(folder / "train" / "target" / "c.png")
    train = task(folder).datasets()["train"]
    assert len(train) == 3
    assert (train[2]["target"] == np.asarray(image(seed=6))).all() and train[2]["mask"].sum() == 8 * 14


def classes():
    """A mask of numbered classes, as VOC has it: black, dark red, white."""
    drawn = Image.new("P", (40, 32), 0)
    drawn.putpalette([0, 0, 0, 128, 0, 0, 255, 255, 255])
    drawn.paste(1, (4, 3, 12, 4))
    return drawn


A, B = "train/image/a.png", "test/image/b.png"
CLEAR = Image.new("RGBA", (40, 32), (255, 255, 255, 0))
FAULTS = {
    "test/mask/b.png": (mask(width=30), f"Row 1 of the eval split ({B}) is 40 x 32 pixels, but its mask is 30 x 32."),
    "train/mask/b.png": (None, ": train/image/b.png has no match of the same name in train/mask."),
    "train/mask/c.png": (mask(), ": train/mask/c.png has no match of the same name in train/image."),
    "train/target/a.png": (b"no image", "Row 0 of the train split (train/target/a.png) is not an image that can be read."),
    A: (500, f"Row 0 of the train split ({A}) cannot be read: image file is truncated"),
    f"./{A}": (
        Image.new("I;16", (40, 32)),
        f"Row 0 of the train split ({A}) has more than 8 bits per channel (Pillow mode I;16).",
    ),
    "test/image/*": (None, ": test/image has no images (.png, .jpg, "),
    "train/mask/a.png": (mask(value=100), "(train/mask/a.png) has an empty mask, so there is nothing to restore."),
    "./train/mask/a.png": (CLEAR, "(train/mask/a.png) has an empty mask"),
    "train//mask/a.png": (classes(), "(train/mask/a.png) is a mask with a palette of colours, such as (128, 0, 0), "),
}
"""What becomes of a file: another image, other bytes, its first so many bytes, or nothing."""


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_restored_is_named_before_training(folder, name):
    content, message = FAULTS[name]
    for path in folder.glob(name) if "*" in name else [folder / name]:
        if content is None:
            path.unlink()
        elif isinstance(content, Image.Image):
            content.save(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:content])
    assert message in refusal(folder).replace(f"{folder}/", "")


def test_a_missing_folder_and_an_image_smaller_than_the_crop_are_named(folder):
    assert refusal(folder, eval_split="valid") == f"task.data_dir={folder}: there is no folder {folder}/valid/image."
    small = f"Row 0 of the train split ({folder}/{A}) is 40 x 32 pixels, smaller than task.crop=33."
    assert refusal(folder, crop=33).startswith(small)


def test_hidden_files_are_no_images(folder):
    for path in ("train/image/.a.png", "train/target/.ipynb_checkpoints/a-checkpoint.png"):
        (folder / path).parent.mkdir(exist_ok=True)
        image().save(folder / path)
    (folder / "train" / "mask" / "._a.png").write_bytes(b"no image")
    assert len(task(folder).datasets()["train"]) == 2


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_images_that_are_not_rgb_are_converted_and_that_is_said_once(folder, mode):
    image(mode=mode).save(folder / "train" / "image" / "a.png")
    recipe = task(folder)
    datasets = recipe.datasets()
    assert datasets["train"][0]["image"].shape == (32, 40, 3)
    assert recipe.notices(datasets, recipe.build_model()) == [
        "Training on random squares of 16 x 16 pixels; evaluation on whole images, padded to multiples of 8.",
        "2 of the 2 images in the eval split are also in the train split: scores will look better than they are.",
        "The masks mark, on average, 8.8% of train, 8.8% of eval.",
        "Converted to RGB: 1 of the images in the train split.",
    ]


def test_orange_marks_damage_and_dark_grey_does_not(folder):
    pixels = np.zeros((32, 40, 3), np.uint8)
    pixels[:2], pixels[2:4] = (255, 165, 0), (60, 60, 60)
    Image.fromarray(pixels).save(folder / "train" / "mask" / "a.png")
    marked = task(folder).datasets()["train"][0]["mask"]
    assert marked[:2].all() and not marked[2:].any()


def test_what_is_transparent_marks_nothing(folder):
    drawing = Image.new("RGBA", (40, 32), (255, 255, 255, 0))  # white, and nothing of it is seen
    drawing.paste((255, 255, 255, 255), (4, 3, 12, 4))
    drawing.save(folder / "train" / "mask" / "a.png")
    drawing.convert("LA").save(folder / "train" / "mask" / "b.png")
    train = task(folder).datasets()["train"]
    for place in (0, 1):
        marked = train[place]["mask"]
        assert marked[3, 4:12].all() and marked.sum() == 8


def test_a_mask_with_a_palette_of_black_and_white_is_read(folder):
    mask().convert("P").save(folder / "train" / "mask" / "a.png")
    assert task(folder).datasets()["train"][0]["mask"].sum() == 8 * 14


@pytest.mark.parametrize(("inverted", "doubt"), [(False, ""), (True, " Are the masks inverted? White marks damage.")])
def test_the_share_that_masks_mark_is_said_and_doubted_where_it_is_large(folder, inverted, doubt):
    if inverted:
        for path in (folder / "train" / "mask").iterdir():
            ImageOps.invert(Image.open(path)).save(path)
    recipe = task(folder)
    datasets = recipe.datasets()
    share = "91.2%" if inverted else "8.8%"
    expected = f"The masks mark, on average, {share} of train, 8.8% of eval.{doubt}"
    assert expected in recipe.notices(datasets, recipe.build_model())


def turned(path, size=(40, 32)):
    """Save an image that a viewer turns by 90 degrees."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image(*size).save(path, exif=exif)


@pytest.mark.parametrize("suffix", ["tif", "jpg", "png"])
def test_an_image_that_a_camera_turned_is_noted_as_it_is_decoded(tmp_path, suffix):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        turned(tmp_path / split / f"a.{suffix}")
    train = task(tmp_path, mask_column=None, target_column=None).datasets()["train"]
    assert train.sizes.tolist() == [[40, 32]] and train[0]["image"].shape == (40, 32, 3) and train[0]["mask"].shape == (40, 32)


def test_a_turned_tiff_fits_a_mask_of_its_upright_size(folder):
    turned(folder / "train" / "image" / "c.tif")
    for name in ("mask", "target"):
        {"mask": mask, "target": image}[name](width=32, height=40).save(folder / "train" / name / "c.png")
    sample = task(folder).datasets()["train"][2]
    assert sample["image"].shape[:2] == sample["mask"].shape == sample["target"].shape[:2] == (40, 32)


def test_an_image_that_changed_its_size_since_the_start_is_named(folder):
    train = task(folder).datasets()["train"]
    image(width=20).save(folder / "train" / "target" / "b.png")
    with pytest.raises(
        DataError, match=r"^Row 1 .*target/b\.png\): its target is 20 x 32 pixels, but was 40 x 32 when training"
    ):
        train[1]


def test_image_mask_and_target_get_the_same_crop_and_flip(folder):
    recipe = task(folder)
    sample = recipe.datasets()["train"][0]
    place = np.arange(32 * 40).reshape(32, 40)
    sample = {"image": np.stack([place] * 3, -1), "mask": place, "target": np.stack([place] * 3, -1)}
    seen = [recipe.augment(sample, np.random.RandomState(key)) for key in range(8)]
    for cut in seen:
        assert cut["mask"].shape == (16, 16)
        assert (cut["image"][..., 0] == cut["mask"]).all() and (cut["target"][..., 2] == cut["mask"]).all()
    assert {bool(cut["mask"][0, 0] > cut["mask"][0, 1]) for cut in seen} == {True, False}  # flipped and not
    assert len({int(cut["mask"].min()) for cut in seen}) > 4  # from several places


def test_masks_for_the_evaluation_are_always_the_same_and_for_training_always_others():
    recipe = ImageRestoration(dataset="hftune.data.demo:pictures", crop=None, flip=False, max_eval_samples=4)
    pictures = recipe.datasets()["eval"]
    again = recipe.datasets()["eval"]
    assert all((pictures[place]["mask"] == again[place]["mask"]).all() for place in range(4))
    drawn = [recipe.augment(pictures[0], np.random.RandomState([42, epoch, 0]))["mask"] for epoch in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all() and not (drawn[0] == drawn[2]).all()


def test_drawn_masks_are_never_empty_and_never_everything():
    shares = [draw_mask(*size, np.random.RandomState([seed])).mean() for seed in range(100) for size in ((16, 16), (48, 200))]
    assert min(shares) > 0 and max(shares) < 0.8


def test_images_of_several_sizes_are_restored_as_if_each_were_alone():
    torch.manual_seed(0)
    network = UNet(width=8, depth=2)
    torch.nn.init.normal_(network.last.weight)
    model = AnySize(network).eval()
    recipe = ImageRestoration(crop=None)
    samples = [
        {"image": np.asarray(image(width, height, seed)), "mask": np.asarray(mask(width, height)) > 0, "target": None}
        for seed, (width, height) in enumerate([(40, 32), (37, 50), (40, 32)])
    ]
    batch = recipe.collate(samples)
    together = model(**recipe.inputs(batch))
    assert batch["image"].shape == (3, 3, 50, 40) and recipe.num_items(recipe.target(batch)) == 2 * 40 * 32 + 37 * 50
    total = recipe.loss(together, recipe.target(batch))
    alone = []
    for sample, output_3HW in zip(samples, together, strict=True):
        one = recipe.collate([sample])
        output_13HW = model(**recipe.inputs(one))
        height, width = output_13HW.shape[2:]
        torch.testing.assert_close(output_3HW[:, :height, :width], output_13HW[0], rtol=1e-4, atol=1e-5)
        alone.append(recipe.loss(output_13HW, recipe.target(one)))
    torch.testing.assert_close(total, sum(alone), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [(16, 16), (37, 50)])
def test_holes_are_filled_from_around_them_before_anything_is_learned(size):
    damaged = torch.from_numpy(draw_mask(*size, np.random.RandomState([3])))[None, None].float()
    left_to_right = torch.linspace(0, 1, size[1]).expand(1, 3, *size)
    filled = AnySize(UNet(width=8, depth=2))(left_to_right * (1 - damaged), damaged)
    assert (filled - left_to_right).abs().max() < 0.2
    around = from_around(left_to_right * (1 - damaged), 1 - damaged)
    assert torch.equal(around[..., damaged[0, 0] == 0], left_to_right[..., damaged[0, 0] == 0])
    assert 0 < (around - left_to_right).abs().max() < 0.2


def test_metrics_are_means_over_all_pixels_of_all_images():
    target, output = torch.zeros(3, 20, 20), torch.zeros(3, 20, 20)
    inside = torch.zeros(20, 20)
    inside[:4, :5] = 1
    output[:, :4, :5] = 0.1
    rows = [measure(output, target, inside), measure(torch.zeros(3, 40, 15), torch.zeros(3, 40, 15), torch.zeros(40, 15))]
    found = summarise(rows)
    assert found["l1_inside"] == pytest.approx(0.1) and found["psnr_inside"] == pytest.approx(20)
    assert found["l1"] == pytest.approx(0.1 * 20 / 1000) and found["psnr"] == pytest.approx(20 + 10 * np.log10(50))
    assert found["l1_outside"] == 0 and found["psnr_outside"] == 100 and found["ssim"] < 1
    assert rows[1]["l1_inside"] is None and rows[1]["pixels_outside"] == 600


def test_the_psnr_of_equal_images_is_finite_and_that_of_nan_is_nan():
    assert psnr(0.0) == psnr(1e-30) == 100 and np.isnan(psnr(np.nan))


def test_a_grid_holds_pictures_of_several_sizes():
    pixels = grid([np.zeros((2, 6, 3), np.uint8), np.zeros((3, 4, 3), np.uint8)])
    assert pixels.shape == (9, 6, 3) and pixels[2:6].min() == 255 and pixels[6:, 4:].min() == 255 and not pixels[6:, :4].any()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task.width=12", "task.width=12 must be a multiple of 8."),
        ("task.crop=8", "task.crop=8 must be at least 16. null: whole images, as in evaluation."),
        ("task.fill=[0,0]", "task.fill=[0, 0] must be three numbers: red, green and blue."),
        ("task.mask_weight=0", "task.mask_weight=0.0 must be above 0."),
        ("task.target_column=target", "task.target_column=target needs task.mask_column, which marks the damaged pixels."),
        ("task.network_args.depth=4", "task.network_args is for a network of your own: set task.network=package.module.Class."),
        ("train.min_lr=1", "train.min_lr=1.0 must not be above train.lr=0.001: the schedule falls to it."),
        ("train.schedule=constant train.min_lr=1e-6", "train.min_lr=1e-06 needs train.schedule=linear, cosine, wsd, cosine"),
    ],
)
def test_a_wrong_value_is_named(word, message):
    with pytest.raises(ConfigError) as caught:
        Recipe.load("restoration_demo", *word.split(" ")).validate()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "nowhere.Net"}, "cannot be imported: No module named 'nowhere'. Write package.module.Class."),
        ({"network": "hftune.Recipe"}, "is not a subclass of torch.nn.Module."),
        (
            {"network": "hftune.models.unet.UNet", "network_args": {"deep": 3}},
            "cannot be built from task.network_args={'deep': 3}: ",
        ),
        (
            {"network": "torch.nn.Bilinear", "network_args": {"in1_features": 16, "in2_features": 16, "out_features": 2}},
            "for images (1, 3, 16, 16) Bilinear returned (1, 3, 16, 2), not images of the same shape.",
        ),
    ],
)
def test_a_network_that_cannot_be_used_is_named(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ImageRestoration(**fields).build_model()(torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16))


def test_whole_images_of_several_shapes_keep_the_bound_in_pixels(folder):
    for split in ("train", "test"):
        for name, drawn in (("image", image), ("mask", mask), ("target", image)):
            drawn(width=20, height=64).save(folder / split / name / "tall.png")
    recipe = task(folder, crop=None)
    train = recipe.datasets()["train"]
    assert sorted(recipe.lengths(train)) == [1280, 1280, 1280]  # as many pixels each, and yet not the same padded together
    sizes = {"sizes": recipe.sizes(train), "padded_length": recipe.padded_length}
    (step,) = BatchPlan(3, 3, micro_batch_tokens=2560, lengths=recipe.lengths(train), **sizes).epoch(0)
    for micro_batch in step:
        batch = recipe.collate([train[int(sample)] for sample in micro_batch.samples])
        assert batch["mask"].numel() == micro_batch.tokens <= 2560


def test_mlflow_gets_no_example_of_pairs_which_it_could_not_keep(folder):
    task = ImageRestoration(data_dir=str(folder), eval_split="test", crop=16)
    task.datasets()
    assert task.example_inputs() == []
