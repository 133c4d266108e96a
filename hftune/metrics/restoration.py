"""How close a restored image is to its target: L1, PSNR and SSIM, also inside and outside the mask. Independent of tasks.

Shape suffixes: H and W height and width; values of images are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from hftune.metrics.records import REGIONS

MAX_DB = 100.0
"""PSNR of equal images, instead of infinity, which JSON and plots do not have."""


def measure(output_3HW: Tensor, target_3HW: Tensor, mask_HW: Tensor) -> dict[str, Any]:
    """Compare one image with its target; see ``row_of``."""
    return row_of(numbers_of(output_3HW, target_3HW, mask_HW).tolist())


def numbers_of(output_3HW: Tensor, target_3HW: Tensor, mask_HW: Tensor) -> Tensor:
    """Return, of each of REGIONS, the number of its pixels and three means over them, L1, MSE and SSIM: (3, 4) float64.

    They stay where the images are: nothing waits for a GPU. The means of an empty region are NaN.
    """
    difference_3HW = output_3HW.double() - target_3HW.double()
    _, similarity_13HW = structural_similarity_index_measure(
        output_3HW[None].float(), target_3HW[None].float(), data_range=1.0, return_full_image=True
    )
    maps = [difference_3HW.abs().mean(0), difference_3HW.square().mean(0), similarity_13HW[0].mean(0).double()]
    inside_HW = mask_HW.bool()
    regions_31HW = torch.stack([torch.ones_like(inside_HW), inside_HW, ~inside_HW])[:, None]
    sums_34 = torch.stack([torch.ones_like(maps[0]), *maps]).where(regions_31HW, 0.0).sum((2, 3))
    return torch.cat([sums_34[:, :1], sums_34[:, 1:] / sums_34[:, :1]], dim=1)


def row_of(numbers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Name what ``numbers_of`` returned.

    Returns:
        ``pixels``, and for each region ``l1``, ``mse`` and ``ssim``, means over its pixels; None if it has none.
    """
    by_region = dict(zip(REGIONS, numbers, strict=True))
    return {f"pixels{name}": int(count) for name, (count, *_) in by_region.items()} | {
        f"{metric}{name}": mean if count else None
        for name, (count, *means) in by_region.items()
        for metric, mean in zip(("l1", "mse", "ssim"), means, strict=True)
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the means over all pixels of all images, from the rows of ``measure``. The sums are exact, in any order.

    PSNR, in dB of values in [0, 1], is that of the mean over all pixels of the squared error; None if a region is empty.
    """
    metrics: dict[str, float | None] = {}
    for region in REGIONS:
        full = [row for row in rows if row[f"pixels{region}"]]
        count = sum(row[f"pixels{region}"] for row in full)

        def mean(metric: str, region: str = region, full: list = full, count: int = count) -> float | None:
            return math.fsum(row[f"{metric}{region}"] * row[f"pixels{region}"] for row in full) / count if count else None

        mse = mean("mse")
        values = {"l1": mean("l1"), "psnr": None if mse is None else psnr(mse), "ssim": mean("ssim")}
        metrics |= {f"{metric}{region}": value for metric, value in values.items()}
    return metrics


def psnr(mse: float) -> float:
    """Return the peak signal-to-noise ratio in dB, at most MAX_DB, of a mean squared error of values in [0, 1]."""
    return MAX_DB if mse == 0 else min(-10 * math.log10(mse), MAX_DB)  # in this order NaN stays NaN
