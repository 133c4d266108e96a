"""The names of metrics for people: their titles and units, and the charts that they are drawn in. Knows no page."""

from __future__ import annotations

import re

WORDS = {
    "auroc": "AUROC", "bleu": "BLEU", "cpu": "CPU", "f1": "F1", "gpu": "GPU", "grad": "gradient", "l1": "L1", "l2": "L2",
    "lr": "learning rate", "mae": "MAE", "mcc": "MCC", "mse": "MSE", "psnr": "PSNR", "rmse": "RMSE", "rouge": "ROUGE",
    "ssim": "SSIM",
}  # fmt: skip
"""Parts of metric names that are not written as they are spelled."""
TITLES = {
    "train/loss": "Training loss",
    "train/loss_step": "Loss of single steps",
    "train/grad_norm": "Gradient norm before clipping",
    "eval/loss": "Evaluation loss",
    "perf/step_s": "Time of a step",
    "perf/samples_per_s": "Training speed",
    "perf/tokens_per_s": "Training speed in tokens",
    "perf/padding_share": "Share of padding",
    "perf/mfu": "Useful share of what the devices can compute (MFU)",
    "perf/memory_gb": "Most memory of a process",
    "perf/data_wait_s": "Wait for data in a step",
    "perf/checkpoint_s": "Wait for checkpoints",
    "perf/data_share": "Wait for data",
    "perf/wait_share": "Wait for the slowest process",
    "perf/imbalance": "Imbalance of the processes",
    "perf/slowest_rank": "Slowest process",
    "perf/*/cpu_percent": "CPU load",
    "perf/*/memory_gib": "Memory in use",
    "perf/*/process_memory_gib": "Memory of the training processes",
    "perf/*/disk_free_gib": "Free disk space",
    "perf/*/gpu*_percent": "GPU load",
    "perf/*/gpu*_memory_gib": "GPU memory reserved",
    "perf/*/gpu*_peak_gib": "GPU memory needed at the peak",
}
"""Titles of metrics whose names alone do not say enough; * stands for the number of a host or a GPU."""
UNITS = {"s": "s", "ms": "ms", "share": "%", "bytes": "B", "gb": "GB", "gib": "GiB", "w": "W", "percent": "percent"}
"""Units by the last part of a name, which is how metrics are named here. "%" is of shares, from 0 to 1."""


def chart_key(key: str) -> str:
    """Return the key of the chart that a curve is drawn in: "perf/*/gpu*_power_w" for "perf/host1/gpu0_power_w"."""
    first, *between, last = key.split("/") if "/" in key else ("", key)
    return f"{first}/*/{re.sub('^gpu[0-9]+_', 'gpu*_', last)}" if between else key


def place_of(key: str) -> str:
    """Return which host or process, and which GPU, a curve is of: "host1 gpu0" for "perf/host1/gpu0_power_w"; "" if none."""
    between, last = key.split("/")[1:-1], key.rpartition("/")[2]
    gpu = re.match("gpu[0-9]+(?=_)", last)
    return " ".join([*between, gpu[0]] if gpu and between else between)


def title_of(key: str) -> str:
    """Name a metric for a reader: "eval/rouge_l_char" is "ROUGE-L char"."""
    key = chart_key(key)
    if key in TITLES:
        return TITLES[key]
    words = [WORDS.get(word, word) for word in key.rpartition("/")[2].replace("gpu*", "gpu").split("_")]
    if len(words) > 1 and words[-1] in UNITS and words[-1] != "share" and words[-2] != "per":
        words.pop()
    title = re.sub(r"\bROUGE (\w)\b", lambda found: f"ROUGE-{found[1].upper()}", " ".join(words))
    return title[:1].upper() + title[1:]


def unit_of(key: str) -> str:
    """Return the unit that the end of a metric's name says; "" if it says none."""
    name = key.rpartition("/")[2]
    if name.startswith("psnr"):
        return "dB"
    if key == "perf/mfu":
        return "%"
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s').rpartition('_')[2]}/s"
    return UNITS.get(name.rpartition("_")[2], "") if "_" in name else ""
