"""Measure how far a run moves when its model is cut into stages, for every schedule, layout and kind of model.

    python benchmarks/pipeline.py [--models gpt2 ...] [--layouts 1x2 2x2 ...] [--schedules 1f1b ...] [--steps 10]

wikitext2_demo with four layers (eight where there are two on each of four processes), SGD at lr 1, dropout on where the model
has it; every cell is a real run over Gloo. A cell holds the largest relative difference to the run of one process: of a step's
loss, of a step's gradient norm, and of a weight to the largest of its tensor after the last step. The last column is the
seconds of a step (median; four processes on two cores say little about pipelines on GPUs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from record import parse_options, print_table, save
from safetensors.torch import load_file

SIZES = "hidden_size: 64, num_attention_heads: 4, max_position_embeddings: 64"
MODELS = {
    "transformer_lm": f"{{model_type: transformer_lm, {SIZES}, intermediate_size: 128, dropout: 0.1",
    "gpt2": f"{{model_type: gpt2, {SIZES}, resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.1",
    "llama": f"{{model_type: llama, {SIZES}, intermediate_size: 128, num_key_value_heads: 4, attention_dropout: 0.1",
}
SETTINGS = ("train.lr=1.0", "train.micro_batch_size=4", "train.batch_size=32", "train.log_every=1", "checkpoint.every=never")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LAYOUTS = {"2x1": (2, 1), "4x1": (4, 1), "1x2": (2, 2), "2x2": (4, 2), "1x4": (4, 4)}
"""Processes, and stages of each pipeline; the names say replicas x stages."""


def run(model: str, folder: Path, steps: int, processes: int, stages: int, schedule: str, layers: int) -> Path:
    """Train once on real processes; return the output folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    out = folder / f"{model}-{processes}-{stages}-{schedule}-{layers}"
    config = f"task.model_config={MODELS[model]}, num_hidden_layers: {layers}}}"
    pipeline = [f"parallel.pipeline_stages={stages}", f"parallel.schedule={schedule}"] if stages > 1 else []
    words = [
        f"recipe={folder / 'bare.yaml'}",
        config,
        *SETTINGS,
        f"train.max_steps={steps}",
        *pipeline,
        f"output_dir={out}",
    ]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, "-m", "hftune.run", *words], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return out


def logged(folder: Path, name: str) -> list[float]:
    """Return one metric of all steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def furthest_apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two equally long curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def weights_apart(found: Path, expected: Path) -> float:
    """Return the largest difference of a weight, by the largest weight of its tensor.

    Left out is the bias of GPT-2's attention, of which the keys' third has no gradient but rounding.
    """
    one, other = (load_file(folder / "model_last" / "model.safetensors") for folder in (found, expected))
    apart = [
        float((one[name] - value).abs().max() / value.abs().max())
        for name, value in other.items()
        if not name.endswith(("c_attn.bias", "in_proj.bias"))
    ]
    return max(apart)


def main() -> None:
    """Run every cell and print a table for each model."""
    options = parse()
    tables, furthest = [], [0.0] * 4
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(model, Path(folder), options)
        furthest = [max(column) for column in zip(furthest, *(apart for _, apart, _ in rows), strict=True)]
        title = f"{model}, {options.steps} steps: largest relative difference to one process (goal: 1e-5)"
        cells = [(name, *(f"{value:.1e}" for value in apart), f"{seconds:.2f}") for name, apart, seconds in rows]
        tables.append(print_table(title, ["", "loss", "gradient norm", "evaluation", "weights", "s a step"], cells))
    schedules = ", ".join(f"`{name}`" for name in options.schedules)
    what = (
        f"pipelines ({schedules}) of {', '.join(options.models)}, {options.steps} steps with dropout, "
        "largest relative difference to one process"
    )
    loss, norm, evaluation, weights = (f"{value:.1e}" for value in furthest)
    figure = f"loss {loss}, gradient norm {norm}, evaluation {evaluation}, weights {weights}"
    save(__file__, options, tables, {what: figure})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="replicas x stages")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=10)
    smoke = {"models": ["transformer_lm"], "layouts": ["1x2"], "schedules": ["1f1b"], "steps": 2}
    return parse_options(parser, smoke)


def compare(model: str, folder: Path, options: argparse.Namespace) -> list[tuple[str, list[float], float]]:
    """Train a model in every layout; return each one's name, its differences to one process, and the seconds of a step."""
    (folder / "bare.yaml").write_text("base: wikitext2_demo\ntask: {model_config: null}\n")
    alone, rows = {}, []
    for layout in options.layouts:
        processes, stages = LAYOUTS[layout]
        for schedule in options.schedules if stages > 1 else ("none",):
            layers = 8 if (stages, schedule) == (4, "interleaved") else 4
            if layers not in alone:
                alone[layers] = run(model, folder, options.steps, 1, 1, "none", layers)
            out, expected = run(model, folder, options.steps, processes, stages, schedule, layers), alone[layers]
            names = ("train/loss", "train/grad_norm", "eval/loss")
            apart = [furthest_apart(logged(out, name), logged(expected, name)) for name in names]
            apart.append(weights_apart(out, expected))
            name = f"data {processes // stages} x stages {stages}" + (f", {schedule}" if stages > 1 else "")
            rows.append((name, apart, median(32 / rate for rate in logged(out, "perf/samples_per_s"))))
    return rows


if __name__ == "__main__":
    main()
