"""``hftune export``: write a run's model in the format of another runtime, and compare its answers with the run's own.

Checked here, before torch is imported. ``commands/export_check.py`` writes and compares.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hftune.commands.arguments import add_trust_code, check_at_least_1, check_single, local_path
from hftune.commands.merge import DTYPES
from hftune.errors import ConfigError

FORMATS = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "openvino": ("openvino",), "vllm-ready": ()}
"""Each with the packages that write it and run it here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=local_path, help="output folder of a run, such as outputs/yelp, or one of its models")
    parser.add_argument("--format", required=True, choices=FORMATS, help="what to write")
    parser.add_argument("--output", type=Path, help="new folder for it (default: model_FORMAT in the output folder)")
    parser.add_argument("--quantize", choices=["int8"], help="weights of 8 bits (onnx)")
    parser.add_argument("--dtype", choices=[*DTYPES], help="precision of vllm-ready (default: that of the run's own model)")
    parser.add_argument(
        "--max-drop",
        type=float,
        default=0.02,
        help="most that fewer bits may worsen eval.metric, as a share of it; a larger loss is refused (default %(default)s)",
    )
    parser.add_argument(
        "--split", default="eval", help="split to compare the answers on: eval, test or eval/NAME of eval.sets (default eval)"
    )
    parser.add_argument("--samples", type=int, help="compare on so many of its samples only (default: all)")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Export, compare, and print what the comparison found and where the model is. One that differs is not left there."""
    check_single("hftune export")
    check_at_least_1(options, "samples")
    if options.quantize and options.format != "onnx":
        raise ConfigError(f"--quantize {options.quantize} is for --format onnx, not for {options.format}.")
    if options.dtype and options.format != "vllm-ready":
        raise ConfigError(f"--dtype {options.dtype} is for --format vllm-ready, not for {options.format}.")
    if missing := [package for package in FORMATS[options.format] if find_spec(package) is None]:
        extra = options.format
        raise ConfigError(f'--format {extra} needs {missing[0]}, which is not installed: pip install "hftune[{extra}]".')
    from hftune.checkpoints.run_folder import open_run

    recipe, folder = open_run(options.folder, options.trust_code)
    run_folder = folder if (folder / "recipe.yaml").is_file() else folder.parent
    name = f"model_{options.format.removesuffix('-ready')}{f'_{options.quantize}' if options.quantize else ''}"
    output = options.output or run_folder / name
    if output.exists():
        raise ConfigError(f"{output} is there already. Remove it, or name a new folder: --output.")
    if options.samples is not None:
        task: Any = recipe.task
        if not hasattr(task, "max_eval_samples") or options.split == "test":
            raise ConfigError(f"--samples {options.samples} needs a task with max_eval_samples, and a split that it counts.")
        task.max_eval_samples = options.samples
    os.environ["ACCELERATE_USE_CPU"] = "true"  # both models are compared, and timed, on the same device
    from hftune.commands.export_check import export  # imports torch: only once the arguments are known to be valid

    export(recipe, folder, run_folder, output, options)
    print(output, flush=True)
    return 0
