"""What is known of each metric by its name: which way is better, its title and its unit. Computes nothing, knows no task."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hftune.task import Direction


@dataclass(frozen=True)
class Metric:
    """A number of a run, as metrics.jsonl names it; one of an evaluation without the eval/ or test/ in front."""

    name: str
    title: str
    better: Direction | None = None
    """None if neither is, as for a length."""
    unit: str = ""
    """"%" is of a share, from 0 to 1."""


REGIONS = {"": "", "_inside": " inside", "_outside": " outside"}
"""Of restored images: all pixels, those inside the mask, those outside."""
METRICS = {
    metric.name: metric
    for metric in (
        # Of evaluations
        Metric("loss", "Loss", "min"),
        Metric("accuracy", "Accuracy", "max"),
        Metric("top5_accuracy", "Top-5 accuracy", "max"),
        Metric("macro_f1", "Macro F1", "max"),
        Metric("micro_f1", "Micro F1", "max"),
        Metric("mcc", "MCC", "max"),
        Metric("auroc", "AUROC", "max"),
        Metric("f1", "F1", "max"),
        Metric("precision", "Precision", "max"),
        Metric("recall", "Recall", "max"),
        Metric("exact_match", "Exact match", "max"),
        Metric("exact_match_folded", "Exact match folded", "max"),
        Metric("has_answer_exact_match", "Exact match of the answerable", "max"),
        Metric("has_answer_f1", "F1 of the answerable", "max"),
        Metric("no_answer_accuracy", "Accuracy of the unanswerable", "max"),
        Metric("best_f1", "F1 with the best threshold", "max"),
        Metric("best_null_threshold", "Best threshold for no answer"),
        Metric("mae", "MAE", "min"),
        Metric("rmse", "RMSE", "min"),
        Metric("pearson", "Pearson", "max"),
        Metric("spearman", "Spearman", "max"),
        Metric("perplexity", "Perplexity", "min"),
        *(Metric(f"recall_at_{k}", f"Recall at {k}", "max") for k in (1, 5, 10)),
        Metric("mrr_at_10", "MRR at 10", "max"),
        Metric("first_error_accuracy", "First error accuracy", "max"),
        *(Metric(f"rouge_{n}", f"ROUGE-{n.upper()}", "max") for n in "12l"),
        *(Metric(f"rouge_{n}_{kind}", f"ROUGE-{n.upper()} {kind}", "max") for kind in ("char", "word") for n in "12l"),
        Metric("bleu", "BLEU", "max"),
        Metric("chrf", "chrF", "max"),
        Metric("wer", "Word error rate", "min", "%"),
        Metric("cer", "Character error rate", "min", "%"),
        Metric("mean_length", "Mean length"),
        Metric("margin", "Margin", "max"),
        Metric("kl", "KL from the reference"),
        *(
            Metric(f"{side}_{what}", f"{side.capitalize()} {what}")
            for what in ("reward", "length")
            for side in ("chosen", "rejected", "desirable", "undesirable")
        ),
        Metric("empty_share", "Empty share", "min", "%"),
        Metric("map", "mAP", "max"),
        Metric("map_50", "mAP at IoU 0.5", "max"),
        Metric("map_75", "mAP at IoU 0.75", "max"),
        Metric("mar_100", "Mean recall of 100 boxes", "max"),
        Metric("mean_iou", "Mean IoU", "max"),
        Metric("pixel_accuracy", "Pixel accuracy", "max"),
        *(Metric(f"l1{region}", f"L1{words}", "min") for region, words in REGIONS.items()),
        *(Metric(f"psnr{region}", f"PSNR{words}", "max", "dB") for region, words in REGIONS.items()),
        *(Metric(f"ssim{region}", f"SSIM{words}", "max") for region, words in REGIONS.items()),
        # Of training
        Metric("train/loss", "Training loss"),
        Metric("train/loss_step", "Loss of single steps"),
        Metric("train/teacher_kl", "Divergence from the teacher"),
        Metric("train/grad_norm", "Gradient norm before clipping"),
        Metric("eval/loss", "Evaluation loss"),
        Metric("perf/step_s", "Time of a step", unit="s"),
        Metric("perf/samples_per_s", "Training speed", unit="samples/s"),
        Metric("perf/tokens_per_s", "Training speed in tokens", unit="tokens/s"),
        Metric("perf/padding_share", "Share of padding", unit="%"),
        Metric("perf/mfu", "Useful share of what the devices can compute (MFU)", unit="%"),
        Metric("perf/memory_gb", "Most memory of a process", unit="GB"),
        Metric("perf/data_wait_s", "Wait for data in a step", unit="s"),
        Metric("perf/checkpoint_s", "Wait for checkpoints", unit="s"),
        Metric("perf/data_share", "Wait for data", unit="%"),
        Metric("perf/wait_share", "Wait for the slowest process", unit="%"),
        Metric("perf/imbalance", "Imbalance of the processes"),
        Metric("perf/slowest_rank", "Slowest process"),
        # Of each host, and of each of its GPUs: * stands for the number
        Metric("perf/*/cpu_percent", "CPU load", unit="percent"),
        Metric("perf/*/memory_gib", "Memory in use", unit="GiB"),
        Metric("perf/*/process_memory_gib", "Memory of the training processes", unit="GiB"),
        Metric("perf/*/disk_free_gib", "Free disk space", unit="GiB"),
        Metric("perf/*/gpu*_percent", "GPU load", unit="percent"),
        Metric("perf/*/gpu*_memory_gib", "GPU memory reserved", unit="GiB"),
        Metric("perf/*/gpu*_peak_gib", "GPU memory needed at the peak", unit="GiB"),
    )
}
"""The metrics of the shipped tasks, and what training logs."""
WORDS = {"cpu": "CPU", "f1": "F1", "gpu": "GPU", "lr": "learning rate", "mae": "MAE", "mse": "MSE", "rmse": "RMSE"}
"""Words in the names of other metrics that are not written as they are spelled."""
UNITS = {"s": "s", "ms": "ms", "share": "%", "bytes": "B", "gb": "GB", "gib": "GiB", "w": "W", "percent": "percent"}
"""Units of other metrics, by the last word of their names."""


def directions(*names: str) -> dict[str, Direction | None]:
    """Return which way is better for each of these metrics."""
    return {name: METRICS[name].better for name in names}


def rouge_names(language: str) -> list[str]:
    """Return the names of the ROUGE scores of texts in a language."""
    units = ("_char", "_word") if language == "zh" else ("",)
    return [f"rouge_{n}{unit}" for unit in units for n in "12l"]


def record_of(key: str) -> Metric:
    """Return what is known of a key of metrics.jsonl; of a metric that is not listed, what its name says.

    The last word may be a unit: "own/peak_bytes" is "Peak", in bytes. "perf/host1/gpu0_power_w" is that of any host and GPU.
    """
    key = chart_key(key)
    last = key.rpartition("/")[2]
    known = METRICS.get(key) or (METRICS.get(last) if key.partition("/")[0] in (last, "eval", "test") else None)
    if known is not None:
        return known
    words = [WORDS.get(word, word) for word in last.replace("gpu*", "gpu").split("_")]
    unit = UNITS.get(words[-1], "") if len(words) > 1 else ""
    if last.endswith("_per_s"):
        unit = f"{words[-3]}/s"
    elif unit not in ("", "%"):
        words.pop()
    title = " ".join(words)
    return Metric(key, title[:1].upper() + title[1:], unit=unit)


def chart_key(key: str) -> str:
    """Return the key of the chart that a curve is drawn in: "perf/*/gpu*_power_w" for "perf/host1/gpu0_power_w".

    Those of ``eval.sets`` are drawn beside that of the eval split.
    """
    first, *between, last = key.split("/") if "/" in key else ("", key)
    if first == "eval":
        return f"eval/{last}"
    return f"{first}/*/{re.sub('^gpu[0-9]+_', 'gpu*_', last)}" if between else key


def title_of(key: str) -> str:
    """Return the title of a metric of an evaluation, with the one of ``eval.sets`` that it is of."""
    place = place_of(key)
    return f"{record_of(key).title}{f' on {place}' if place else ''}"


def place_of(key: str) -> str:
    """Return which host or process, and which GPU, or which of ``eval.sets``, a curve is of; "" if none.

    "host1 gpu0" for "perf/host1/gpu0_power_w".
    """
    between, last = key.split("/")[1:-1], key.rpartition("/")[2]
    gpu = re.match("gpu[0-9]+(?=_)", last)
    return " ".join([*between, gpu[0]] if gpu and between else between)
