"""Random changes of training images: what each of them does, and that mixing is what mixup and cutmix are in the literature."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from hftune.data.augmentation import augmented
from hftune.data.demo.drawings import SHAPES, shapes
from hftune.data.image_augmentation import OPERATIONS, crop_box, cut, cutmix, erase, jitter, mixup, rand_augment, vary
from hftune.tasks import ImageClassification

BILINEAR = int(Image.Resampling.BILINEAR)
EVERYTHING = {"crop": 0.3, "flip": 0.5, "rand_augment": 9, "color": 0.4, "shift": 3, "rotate": 10, "erase": 0.5}
PICTURE = np.asarray(next(iter(shapes("train", 1)))["image"])


def rng(*key):
    return np.random.RandomState(key or [0])


@pytest.mark.parametrize("picture", [PICTURE, PICTURE[..., :1]], ids=["colour", "grey"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_each_change_follows_from_its_random_numbers_and_keeps_the_channels(picture, name):
    def varied(number):
        amounts = {name: EVERYTHING[name]}
        return vary(picture, amounts, (24, 20), BILINEAR, [7] * picture.shape[-1], rng(number))

    found = [varied(number) for number in range(8)]
    assert all((varied(number) == image).all() for number, image in enumerate(found))
    size = (24, 20) if name == "crop" else picture.shape[:2]
    assert {image.shape for image in found} == {(*size, picture.shape[-1])} and {image.dtype for image in found} == {
        np.dtype("uint8")
    }
    assert len({image.tobytes() for image in found}) > 1


def test_what_is_zero_changes_nothing():
    nothing = dict.fromkeys(EVERYTHING, 0)
    assert vary(PICTURE, nothing, (24, 20), BILINEAR, [7, 7, 7], rng()) is PICTURE
    assert not ImageClassification(augmentation=nothing).augments


def test_crop_shows_at_least_its_share_with_an_aspect_close_to_square():
    across, down = np.meshgrid(np.arange(200), np.arange(100))
    picture = np.stack([across, down, 0 * down], axis=-1).astype(np.uint8)
    for number in range(50):
        crop = cut(picture, crop_box(picture.shape[:2], 0.25, rng(number)), (50, 50), BILINEAR).astype(int)
        width, height = (np.ptp(crop[..., channel]) + 2 for channel in (0, 1))
        assert width * height > 0.22 * 200 * 100 and 0.7 < width / height < 1.45


def test_strip_that_no_crop_fits_into_is_cut_in_the_middle():
    strip = np.zeros((10, 300, 3), np.uint8)
    strip[:, 143:157] = 255
    assert (cut(strip, crop_box(strip.shape[:2], 0.9, rng()), (8, 8), BILINEAR)[:, 1:-1] == 255).all()


def test_colour_changes_within_its_bounds():
    grey = np.full((8, 8, 3), 100, np.uint8)
    values = [int(jitter(grey, 0.3, rng(number))[0, 0, 0]) for number in range(60)]
    assert 69 <= min(values) < 80 and 120 < max(values) <= 131


def test_erased_box_is_painted_and_no_larger_than_a_third():
    white = np.full((30, 40, 3), 255, np.uint8)
    for number in range(20):
        share = (erase(white, [1, 2, 3], rng(number)) == [1, 2, 3]).all(axis=-1).mean()
        assert 0.01 < share < 0.36
    assert (white == 255).all()


def test_all_operations_of_rand_augment_work_at_all_magnitudes():
    for mode in ("RGB", "L"):
        image = Image.fromarray(PICTURE).convert(mode)
        for operation in OPERATIONS:
            for strength in (-1, -0.5, 0, 0.5, 1):
                found = operation(image, strength)
                assert (found.size, found.mode) == (image.size, mode)
    assert (rand_augment(PICTURE, 10, rng(3)) != PICTURE).any()


# Mixing


def drawn(**fields):
    task = ImageClassification(
        dataset="hftune.data.demo:shapes",
        model_config={"model_type": "vit"},
        image_size=32,
        max_train_samples=40,
        max_eval_samples=10,
        **fields,
    )
    return task, task.datasets()


def test_mixup_is_the_average_of_two_images_and_its_loss_that_of_two_losses():
    """Zhang et al. 2017: x = l a + (1 - l) b, and with the same l the cross-entropy of both labels."""
    task, data = drawn(mixup=0.4)
    samples = [augmented(data["train"], task, 0, 0)[index] for index in range(40)]
    assert len({sample["share"] for sample in samples}) == 40 and all(0 <= sample["share"] <= 1 for sample in samples)
    batch = task.collate(samples)
    plain = task.collate([data["train"][index] for index in range(40)])["pixel_values"]
    for place in (0, 7):
        sample, share = samples[place], samples[place]["share"]
        others = [
            other
            for other in range(40)
            if torch.allclose(batch["pixel_values"][place], share * plain[place] + (1 - share) * plain[other], atol=1e-5)
        ]
        assert [data["train"][other]["label"] for other in others] == [sample["other_label"]]
    logits = torch.randn(40, len(SHAPES), generator=torch.Generator().manual_seed(0))
    share, first, second = (torch.tensor([sample[name] for sample in samples]) for name in ("share", "label", "other_label"))
    expected = share * cross_entropy(logits, first, reduction="none") + (1 - share) * cross_entropy(
        logits, second, reduction="none"
    )
    assert float(task.loss(logits, batch["labels"])) == pytest.approx(float(expected.sum()), rel=1e-6)
    assert task.num_items(batch["labels"]) == 40


def test_cutmix_weighs_labels_by_what_is_seen_of_both():
    black, white = np.zeros((20, 30, 3), np.uint8), np.full((20, 30, 3), 255, np.uint8)
    shares = []
    for number in range(50):
        mixed, share = cutmix(black, white, rng(number).rand(), rng(number, 1))
        assert share == pytest.approx((mixed[..., 0] == 0).mean())
        shares.append(share)
    assert min(shares) < 0.3 and max(shares) > 0.9 and (black == 0).all()
    assert (mixup(white, black, 0.25) == np.float32(63.75)).all()


def test_what_an_image_is_mixed_with_depends_on_seed_epoch_and_sample_only():
    task, data = drawn(mixup=0.2, cutmix=1.0, augmentation={"crop": 0.5, "flip": 0.5})
    whole = augmented(data["train"], task, 0, 1)
    for index in (5, 39, 0):
        again = augmented(data["train"], task, 0, 1)[index]  # alone, in another order
        assert (again["image"] == whole[index]["image"]).all() and again["share"] == whole[index]["share"]
    shares = [[augmented(data["train"], task, *key)[index]["share"] for index in range(40)] for key in ((0, 1), (0, 2), (1, 1))]
    assert shares[0] != shares[1] != shares[2] != shares[0]
    kinds = {augmented(data["train"], task, 0, 1)[index]["image"].dtype for index in range(40)}
    assert kinds == {np.dtype("uint8"), np.dtype("float32")}  # both cutmix and mixup


def test_label_smoothing_is_that_of_torch_for_whole_and_for_mixed_labels():
    task, data = drawn(label_smoothing=0.1)
    batch = task.collate([data["train"][index] for index in range(4)])
    logits = torch.randn(4, len(SHAPES), generator=torch.Generator().manual_seed(0))
    expected = cross_entropy(logits, batch["labels"], label_smoothing=0.1, reduction="sum")
    assert task.loss(logits, batch["labels"]) == expected
    torch.testing.assert_close(task.loss(logits, torch.nn.functional.one_hot(batch["labels"], len(SHAPES)).float()), expected)


def test_evaluation_sees_whole_images_and_whole_labels():
    task, data = drawn(mixup=0.2, cutmix=1.0, augmentation={"crop": 0.5})
    batch = task.collate([data["eval"][index] for index in range(10)])
    assert batch["pixel_values"].shape == (10, 3, 32, 32) and batch["labels"].dtype == torch.int64
