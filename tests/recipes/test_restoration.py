"""Image restoration from the command line to a folder of restored pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hftune import Recipe, load_model, train
from hftune.cli import main
from hftune.config.sections import TrainConfig
from hftune.data.damage import draw_mask
from hftune.data.demo import pictures
from hftune.distributed.accelerator import set_numerics
from hftune.errors import ConfigError, DataError, TrainingError
from tests.support.runs import Command, Run

ROOT = Path(__file__).parents[2]
QUICK = ("task.max_train_samples=12", "task.max_eval_samples=5", "train.epochs=1", "train.micro_batch_size=6")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's own command, cut to 120 steps, on two processes."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    words = ("train.max_steps=120", "train.micro_batch_size=3", "task.max_eval_samples=7", "eval.every=60")
    command = Command(2, "recipe=restoration_demo", *words, "track.with=[tensorboard]", f"output_dir={folder}")
    out, err = command.communicate()
    assert command.returncode == 0, out + err
    return Run(folder), out


@pytest.fixture
def damaged(tmp_path):
    """Two damaged pictures of different sizes with their masks."""
    for name in ("image", "mask"):
        (tmp_path / "in" / name).mkdir(parents=True)
    for place, row in enumerate(pictures("eval", 2)):
        whole_HWC = np.asarray(row["image"])
        mask_HW = draw_mask(*whole_HWC.shape[:2], np.random.RandomState([place]))
        Image.fromarray(np.where(mask_HW[..., None], np.uint8(0), whole_HWC)).save(tmp_path / "in" / "image" / f"{place}.png")
        Image.fromarray(mask_HW.astype(np.uint8) * 255).save(tmp_path / "in" / "mask" / f"{place}.png")
    return tmp_path / "in"


def test_demo_restores_better_than_without_training(demo):
    task = Recipe.load(demo[0].folder / "recipe.yaml").task
    samples, untrained = task.datasets()["eval"], task.build_model().eval()
    rows = []
    for place in range(len(samples)):
        batch = task.collate([samples[place]])
        with torch.no_grad():
            rows += task.predictions(untrained(**task.inputs(batch)), untrained, batch)
    assert demo[0].result["best"]["value"] > task.metrics(rows)["psnr_inside"] + 0.2


def test_demo_says_how_it_trains_and_evaluates(demo):
    assert (
        "note: Training on random squares of 32 x 32 pixels; evaluation on whole images, padded to multiples of 4.\n" in demo[1]
    )


def test_predictions_hold_numbers_and_no_pixels(demo):
    lines = (demo[0].folder / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 7 and max(map(len, lines)) < 500
    row = json.loads(lines[0])
    assert row["pixels"] == row["pixels_inside"] + row["pixels_outside"] and 0 < row["ssim"] <= 1


def test_pictures_are_kept_of_every_evaluation(demo):
    files = sorted(path.name for path in (demo[0].folder / "samples").iterdir())
    assert files == ["step_00000060", "step_00000060.png", "step_00000120", "step_00000120.png"]
    sizes = [row["image"].size for row in pictures("eval")]
    kept = sorted(np.random.default_rng(42).permutation(24)[:7])[:3]
    shown = Image.open(demo[0].folder / "samples" / files[1])
    assert shown.width == 4 * max(sizes[place][0] for place in kept)
    assert shown.height == sum(sizes[place][1] for place in kept) + 2 * 4
    singles = [Image.open(demo[0].folder / "samples" / files[0] / f"{index}.png").size for index in range(3)]
    assert singles == [(4 * sizes[place][0], sizes[place][1]) for place in kept]


def test_pictures_go_to_tensorboard(demo):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(demo[0].folder / "tensorboard" / "hftune"), size_guidance={"images": 0}).Reload()
    assert events.Tags()["images"] == [f"eval/images/{index}" for index in range(3)]
    assert [event.step for event in events.Images("eval/images/2")] == [60, 120]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(demo[0].logged("train/loss"))


@pytest.fixture
def all_marked(tmp_path):
    """Words for a recipe whose masks mark every pixel: nothing is outside of them."""
    for split in ("train", "test"):
        for name, value in (("image", 90), ("mask", 255)):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16), (value,) * 3).save(tmp_path / split / name / "0.png")
    words = ("task.dataset=imagefolder", f"task.data_dir={tmp_path}", "task.mask_column=mask", "task.crop=null")
    return (*words, "task.eval_split=test", "task.depth=1", "train.epochs=1", f"output_dir={tmp_path / 'out'}")


def test_a_metric_without_a_value_is_null_and_stops_nothing(all_marked, tmp_path):
    train(Recipe.load("restoration_demo", *all_marked))
    result = json.loads((tmp_path / "out" / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["metrics"]["psnr_outside"] is None and result["metrics"]["psnr_inside"] > 0


def test_a_metric_without_a_value_cannot_pick_the_best_model(all_marked):
    with pytest.raises(TrainingError, match=r"psnr_outside is null, .* Set eval.metric to one of: loss, l1, psnr,"):
        train(Recipe.load("restoration_demo", *all_marked, "eval.metric=psnr_outside"))


def test_the_export_restores_as_the_evaluation_did(demo):
    model = load_model(demo[0].folder / "model_last")  # whose predictions are there
    sample = model.recipe.task.datasets()["eval"][0]
    (answer,) = model.predict([(sample["image"], Image.fromarray(sample["mask"]))])
    batch = model.recipe.task.collate([sample])
    with torch.no_grad():
        (row,) = model.recipe.task.predictions(model.model(**model.recipe.task.inputs(batch)), model.model, batch)
    assert row["l1"] == pytest.approx(demo[0].predictions[0]["l1"], rel=1e-4)
    restored_HWC = np.asarray(answer["image"]) / 255
    assert np.abs(restored_HWC - sample["image"] / 255).mean() == pytest.approx(row["l1"], abs=1 / 255)  # of bytes
    assert answer["image"].size == (sample["mask"].shape[1], sample["mask"].shape[0])


def test_a_folder_of_images_is_restored(demo, damaged, tmp_path, capsys):
    for words in ([str(damaged)], [str(damaged / "image"), "--masks", str(damaged / "mask")]):
        output = tmp_path / f"out{len(words)}"
        assert main(["predict", str(demo[0].folder), "--input", *words, "--output", str(output)]) == 0
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert lines == [[str(damaged / "image" / f"{place}.png"), str(output / f"{place}.png")] for place in (0, 1)]
        for place in (0, 1):
            before, after = (Image.open(path / f"{place}.png") for path in (damaged / "image", output))
            assert before.size == after.size and before.tobytes() != after.tobytes()


def refusal(capsys, *words):
    assert main(["predict", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_restored_is_named(demo, damaged, tmp_path, capsys):
    folder, images, masks = demo[0].folder, damaged / "image", damaged / "mask"
    out = ("--output", tmp_path / "out")
    assert "Name a folder for them: --output FOLDER." in refusal(capsys, folder, "--input", damaged)
    said = refusal(capsys, folder, "--input", damaged, "--output", images)
    assert f"--output {images} is the folder of the inputs, which would be overwritten." in said
    said = refusal(capsys, folder, "--input", images, *out)
    assert "Input 0 is a PosixPath, not a pair of an image and a mask. For `hftune predict`, set --masks." in said
    said = refusal(capsys, folder, "--input", images, "--masks", tmp_path / "none", *out)
    assert f"--masks {tmp_path}/none: there is no such file or folder." in said
    said = refusal(capsys, folder, "--input", damaged, images / "0.png", *out)
    assert said == f"hftune: --input {images}/0.png/image: there is no such file or folder.\n"
    (masks / "1.png").unlink()
    said = refusal(capsys, folder, "--input", damaged, *out)
    assert f"--input {damaged}: {images}/1.png has no match of the same name in {masks}." in said


def test_a_pair_that_cannot_be_restored_is_named(demo, damaged):
    model, picture = load_model(demo[0].folder), Image.new("RGB", (40, 32))
    with pytest.raises(DataError, match=r"^Input 0 is 40 x 32 pixels, but its mask is 32 x 40\."):
        model.predict([(picture, Image.new("L", (32, 40), 255))])
    with pytest.raises(DataError, match=r"^Input 0 has an empty mask, so there is nothing to restore\. Paint"):
        model.predict([(picture, Image.new("L", (40, 32)))])


def test_a_grey_image_is_restored_with_a_warning(demo):
    with pytest.warns(UserWarning, match="Some images are not RGB and are converted to it."):
        (row,) = load_model(demo[0].folder).predict([(Image.new("L", (40, 32), 90), Image.new("L", (40, 32), 255))])
    assert row["image"].mode == "RGB"


def test_a_network_of_ones_own_trains_on_folders_and_loads_again(damaged, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / split).symlink_to(damaged)
    words = ("task.network=tests.support.tasks.Blend", "task.network_args.start=0.25", "task.mask_column=mask", "task.crop=32")
    words += (
        "task.dataset=imagefolder",
        f"task.data_dir={tmp_path / 'data'}",
        "train.batch_size=2",
        "train.micro_batch_size=2",
    )
    result = train(Recipe.load("restoration_demo", *QUICK, *words, f"output_dir={tmp_path / 'run'}", "train.max_steps=1"))
    assert result.steps == 1
    loaded = load_model(result.output_dir, trust_code=True)
    assert loaded.model.network.share.item() != 0.25 and type(loaded.model.network).__name__ == "Blend"
    loaded.recipe.task.network_args["start"] = 0.5
    with pytest.raises(
        ConfigError, match=r"task.network_args={'start': 0.25}, but the recipe has task.network_args={'start': 0.5}"
    ):
        loaded.recipe.task.load(result.model_dir)


def test_float32_is_exact_unless_the_recipe_says_tf32():
    set_numerics(TrainConfig(tf32=True, cudnn_benchmark=True))
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert matmul.allow_tf32 and cudnn.allow_tf32 and cudnn.benchmark
    set_numerics(TrainConfig())
    assert not (matmul.allow_tf32 or cudnn.allow_tf32 or cudnn.benchmark)
