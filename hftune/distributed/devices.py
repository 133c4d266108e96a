"""What a process's device computes: its precisions, and how fast it could at best. Independent of models and recipes."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from hftune.config.sections import TrainConfig

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "tf32": 1125, "float32": 75},
    "H200": {"bf16": 989, "tf32": 495, "float32": 67},
    "GH200": {"bf16": 989, "tf32": 495, "float32": 67},
    "H100": {"bf16": 989, "tf32": 495, "float32": 67},
    "H100 NVL": {"bf16": 835, "tf32": 418, "float32": 60},
    "H100 PCIe": {"bf16": 756, "tf32": 378, "float32": 51},
    "A100": {"bf16": 312, "tf32": 156, "float32": 19.5},
    "A800": {"bf16": 312, "tf32": 156, "float32": 19.5},
    "A40": {"bf16": 150, "tf32": 75, "float32": 37.4},
    "A30": {"bf16": 165, "tf32": 82, "float32": 10.3},
    "A10": {"bf16": 125, "tf32": 62.5, "float32": 31.2},
    "L40S": {"bf16": 362, "tf32": 183, "float32": 91.6},
    "L40": {"bf16": 181, "tf32": 90.5, "float32": 90.5},
    "L4": {"bf16": 121, "tf32": 60, "float32": 30.3},
    "V100": {"fp16": 125, "float32": 15.7},
    "T4": {"fp16": 65, "float32": 8.1},
}
"""Dense matrix products, in 10^12 floating-point operations a second, by words of the GPU's name. fp16 is as fast as bf16.
From NVIDIA's data sheets, which also give rates for sparse matrices, twice as high; unless the name says otherwise, of the
fastest form of a GPU (SXM)."""


def computes_bf16(device: torch.device) -> bool:
    """Say whether this is a GPU that computes bf16 products itself, without emulating them."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def agreed_precision(wanted: str, device: torch.device) -> str:
    """Return the precision that ``train.mixed_precision`` stands for, equal on all processes. Collective if it is auto."""
    if wanted != "auto":
        return wanted
    can = torch.tensor(int(computes_bf16(device)), device=device)
    if dist.is_initialized():
        dist.all_reduce(can, dist.ReduceOp.MIN)
    return "bf16" if can.item() else "no"


def precision_notices(config: TrainConfig, precision: str, device: torch.device) -> list[str]:
    """Say what ``train.mixed_precision=auto`` chose on GPUs, and that a GPU could compute faster than float32.

    On CPUs it is always float32, which the first lines of a run name anyway.
    """
    if device.type == "cpu":
        return []
    if config.mixed_precision == "auto":
        chosen = {"bf16": "bf16, which the GPUs of all processes compute", "no": "float32, as a GPU of this job has no bf16"}
        return [f"train.mixed_precision=auto: {chosen[precision]}."]
    if precision != "no" or config.tf32 or not computes_bf16(device):
        return []
    name = torch.cuda.get_device_name(device)
    rates = known_tflops(name) or {}
    times = f"about {rates['bf16'] / rates['float32']:.0f} times" if "bf16" in rates else "many times"
    return [f"This GPU ({name}) computes bf16 {times} as fast as float32: set train.mixed_precision=bf16, or auto."]


def known_tflops(name: str) -> dict[str, float] | None:
    """Return the row of PEAK_TFLOPS for a GPU's name; None for one that is not there."""
    found = [words for words in PEAK_TFLOPS if all(re.search(rf"\b{word}\b", name) for word in words.split())]
    return PEAK_TFLOPS[max(found, key=len)] if found else None


def peak_flops(device: torch.device, precision: str, tf32: bool = False) -> float | None:
    """Return how many floating-point operations a second a device computes at best; None if it is no GPU of the table.

    Args:
        precision: no, bf16 or fp16.
        tf32: whether a GPU computes float32 products in TF32.
    """
    rates = None if device.type != "cuda" else known_tflops(torch.cuda.get_device_name(device))
    if rates is None:
        return None
    kind = {"no": "tf32" if tf32 else "float32"}.get(precision, "bf16")
    tflops = rates.get(kind) or rates.get({"bf16": "fp16", "tf32": "float32"}.get(kind, kind))
    return None if tflops is None else 1e12 * tflops
