"""What a process computes on, as far as it decides the last bits of a result: devices, kernels, threads.

Independent of models.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that choose kernels without torch knowing."""


def hardware(device: torch.device) -> dict[str, Any]:
    """Return what this process computes on, and how: plain values, the same for two processes that compute the same bits."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        found |= {
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def cpu_name() -> str:
    """Return the model of the processor, such as "AMD EPYC 9554"; its architecture where the system does not tell."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(errors="replace").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def of_all(ranked: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the hardware of all processes: that of the first, and under ``others``, by rank, of those that have another.

    Args:
        ranked: rank and hardware of each process, in order.
    """
    (_, first), *rest = ranked
    others = {str(rank): own for rank, own in rest if own != first}
    return first | ({"others": others} if others else {})
