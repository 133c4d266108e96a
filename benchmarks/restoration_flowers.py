"""Restores damaged photographs of flowers, and sets a small U-Net beside three ways that need no training.

    python benchmarks/restoration_flowers.py FOLDER [--output_dir outputs/flowers] [section.key=value ...]

FOLDER has train/ and test/ with whole RGB images. The damage is that of the recipe's evaluation. OpenCV's two ways appear
if it is installed (pip install opencv-python-headless). A second call goes on where the first was stopped, or only measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from record import parse_options, print_table, save

from hftune import Recipe, load_model, train
from hftune.data.augmentation import augmented
from hftune.metrics.restoration import measure, summarise

SETTINGS = (
    "task.test_split=test",
    "task.width=16",
    "train.micro_batch_size=6",
    "train.lr=2e-3",
    "train.clip_norm=1.0",
    "train.num_workers=0",
    "train.log_every=50",
    "eval.every=6 epochs",
)
SHOWN = ("psnr_inside", "ssim_inside", "l1_inside", "psnr", "ssim")


def mean_colour(image_HWC: np.ndarray, mask_HW: np.ndarray) -> np.ndarray:
    """Fill the damage with the mean of what is left of the image."""
    return np.where(mask_HW[..., None], image_HWC[~mask_HW].mean(0).round(), image_HWC).astype(np.uint8)


def inpainters() -> dict:
    """Return the ways to compare with, by name: each takes image (H, W, 3) uint8 and mask (H, W) bool."""
    ways = {"damaged": lambda image_HWC, mask_HW: image_HWC, "mean colour": mean_colour}
    if importlib.util.find_spec("cv2"):
        import cv2

        for name, method in (("Telea", cv2.INPAINT_TELEA), ("Navier-Stokes", cv2.INPAINT_NS)):
            ways[name] = lambda image_HWC, mask_HW, method=method: cv2.inpaint(
                image_HWC, mask_HW.astype(np.uint8), inpaintRadius=3, flags=method
            )
    return ways


def compare(recipe: Recipe, model_dir: Path) -> dict[str, dict[str, float]]:
    """Return each way's metrics over the test images."""
    trained, pictures = load_model(model_dir), recipe.task.datasets()["test"]
    untrained = recipe.task.build_model().eval()
    rows: dict[str, list] = {}
    for place in range(len(pictures)):
        sample = pictures[place]
        whole_HWC, mask_HW = sample["image"], sample["mask"]
        damaged_HWC = np.where(mask_HW[..., None], np.uint8(recipe.task.fill), whole_HWC)
        restored = {name: way(damaged_HWC, mask_HW) for name, way in inpainters().items()}
        given = [(damaged_HWC, mask_HW.astype(np.uint8) * 255)]
        for name, (answer,) in (("untrained", recipe.task.predict(untrained, given)), ("hftune", trained.predict(given))):
            restored[name] = np.asarray(answer["image"])
        for name, output_HWC in restored.items():
            pair = [torch.from_numpy(np.array(pixels)).permute(2, 0, 1) / 255 for pixels in (output_HWC, whole_HWC)]
            rows.setdefault(name, []).append(measure(*pair, torch.from_numpy(mask_HW)))
    return {name: summarise(found) for name, found in rows.items()}


def loading_share(recipe: Recipe, num_steps: int = 10) -> tuple[float, float]:
    """Return seconds of CPU time a step: of decoding, drawing and collating, and of forward and backward."""
    task = recipe.task
    dataset, model = augmented(task.datasets()["train"], task, recipe.seed, 0), task.build_model()
    size, loading, computing = recipe.train.batch_size, 0.0, 0.0
    for step in range(-2, num_steps):  # two to warm up
        began = time.process_time()
        batch = task.collate([dataset[((step + 2) * size + place) % len(dataset)] for place in range(size)])
        loaded = time.process_time()
        task.loss(model(**task.inputs(batch)), task.target(batch)).backward()
        if step >= 0:
            loading, computing = loading + loaded - began, computing + time.process_time() - loaded
    return loading / num_steps, computing / num_steps


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.folder, options.output_dir = paint(Path(folder, "pictures")), Path(folder, "out")
        measure_all(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="with train/ and test/")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/flowers"))
    parser.add_argument("words", nargs="*", default=[], help="of the recipe: section.key=value")
    smoke = {"words": ["task.width=8", "task.crop=24", "train.max_steps=3", "eval.every=epoch"]}
    options = parse_options(parser, smoke)
    if options.folder is None and not options.smoke:
        parser.error("FOLDER is needed")
    return options


def paint(folder: Path) -> Path:
    """Write a few generated pictures where the photographs would be, and return the folder."""
    from hftune.data.demo import pictures

    for part, name, count in (("train", "train", 12), ("eval", "test", 4)):
        (folder / name).mkdir(parents=True)
        for index, row in enumerate(pictures(part, count)):
            row["image"].save(folder / name / f"{index}.png")
    return folder


def measure_all(options: argparse.Namespace) -> None:
    """Train, and compare what the network makes of the test images with the other ways."""
    words = [*SETTINGS, f"task.data_dir={options.folder}", f"output_dir={options.output_dir}", *options.words]
    recipe = Recipe.load("restoration", *words)
    result = train(recipe)
    print(f"\n{result.steps} steps in {result.seconds:.0f} s on {result.world_size} process(es)")
    found = compare(recipe, result.model_dir)
    rows = [(way, *(f"{metrics[name]:.3f}" for name in SHOWN)) for way, metrics in found.items()]
    counts = {part: len(data) for part, data in recipe.task.datasets().items()}
    epochs = result.steps / -(-counts["train"] // recipe.train.batch_size)
    title = f"{counts['test']} images of {options.folder.name}, {epochs:.1f} epochs on {counts['train']} others"
    table = print_table(title, ("", *SHOWN), rows)
    loading, computing = loading_share(recipe)
    print(f"A step of {recipe.train.batch_size}: loading {loading * 1e3:.1f} ms, forward and backward {computing * 1e3:.1f} ms")
    inside = {way: f"{metrics['psnr_inside']:.2f}" for way, metrics in found.items()}
    what = f"PSNR inside the masks of {counts['test']} images ({options.folder.name})"
    what += f", {epochs:.0f} epochs on {counts['train']} others"
    others = ", ".join(f"{way} {number}" for way, number in inside.items() if way not in ("hftune", "damaged"))
    save(__file__, options, [table], {what: f"{inside['hftune']} dB; {others}"})


if __name__ == "__main__":
    main()
