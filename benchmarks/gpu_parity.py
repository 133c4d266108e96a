"""Train every demo recipe on one NVIDIA GPU and on the CPU: do losses agree, and resumed runs to the bit?

    python benchmarks/gpu_parity.py [recipe ...] [--steps 12] [--jobs 2]

Each recipe trains for --steps steps with dropout off, as masks are drawn by each device itself, and is evaluated: on the CPU in
float32; on the GPU in float32 (no TF32) and in bf16; and on the GPU in bf16 with train.deterministic, once left alone and once
killed with SIGKILL as soon as the first checkpoint is complete, then started again.

"float32" and "bf16" are the largest relative differences of a logged training or evaluation loss to the CPU's. "resumed" says
whether all weights of the last model and all logged values are those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu import device_name, missing_gpu
from record import HERE, parse_options, print_table, save

from hftune import Callback

DEMOS = sorted(path.stem for path in (HERE.parent / "recipes").glob("*_demo.yaml"))
BERT = ("task.model_config.hidden_dropout_prob=0.0", "task.model_config.attention_probs_dropout_prob=0.0")
DROPOUT_OFF = {
    **dict.fromkeys(("embeddings_demo", "multi_label_demo", "pairs_demo", "regression_demo"), BERT),
    **dict.fromkeys(("text_classification_demo", "token_classification_demo"), BERT),
    "mnist_demo": ("task.dropout=0.0",),
}
NEEDS = {
    "chats_lora_demo": ("chats_demo", "task.model"),
    "distillation_demo": ("language_modeling_demo", "train.teacher"),
}
"""Demos that need the model of another one, with the key that names it."""
CPU = {"ACCELERATE_USE_CPU": "true"}
EXACT = ("train.tf32=false", "train.cudnn_benchmark=false")
DETERMINISTIC = (*EXACT, "train.mixed_precision=bf16", "train.deterministic=true", "checkpoint.every=4")


class KilledAtCheckpoint(Callback):
    """Ends the process with SIGKILL when its first checkpoint is complete."""

    def on_checkpoint(self, checkpoint: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    options = parse()
    if (why_not := missing_gpu(options)) is not None:
        print(f"benchmarks/gpu_parity.py {why_not}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(lambda demo: row_of(demo, options, Path(name)), options.demos):
            rows.append(row)
            print(*row, file=sys.stderr, flush=True)
    title = f"{device_name()}; losses of {options.steps} steps and an evaluation against the CPU's"
    table = print_table(title, ("recipe", "float32", "bf16", "resumed"), rows)
    trained = [row for row in rows if row[1] != "failed"]
    worst = [max((float(row[column]) for row in trained), default=float("nan")) for column in (1, 2)]
    equal = sum(row[3] == "bit-equal" for row in trained)
    what = f"{len(trained)} demo recipes on one {device_name()}"
    figures = {
        f"{what}: largest relative difference of a loss to the CPU's": f"float32 {worst[0]:.1e}, bf16 {worst[1]:.1e}",
        f"{what}, killed with SIGKILL and resumed in bf16": f"{equal} bit-equal",
    }
    save(__file__, options, [table], figures)
    return 0 if equal == len(rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demos", nargs="*", metavar="recipe", default=DEMOS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=2, help="recipes at a time, in four processes each")
    return parse_options(parser, smoke={"demos": ["mnist_demo"], "steps": 5})


def row_of(demo: str, options: argparse.Namespace, folder: Path) -> tuple[str, str, str, str]:
    words = (*DROPOUT_OFF.get(demo, ()), f"train.max_steps={options.steps}")
    module = Path(__file__).stem

    def killed_and_resumed() -> tuple:
        killed = f"callbacks=[{module}.KilledAtCheckpoint]"
        run(demo, folder / f"{demo}-killed", *words, *DETERMINISTIC, killed, expected=-signal.SIGKILL)
        if not any((folder / f"{demo}-killed" / "checkpoints").glob("step_*")):
            raise RuntimeError("the killed run left no checkpoint")
        return run(demo, folder / f"{demo}-killed", *words, *DETERMINISTIC)

    try:
        if demo in NEEDS:
            needed, key = NEEDS[demo]
            run(needed, folder / f"{demo}-needs", f"train.max_steps={options.steps}")
            words = (*words, f"{key}={folder / f'{demo}-needs' / 'model'}")
        with ThreadPoolExecutor() as pool:
            runs = (
                pool.submit(run, demo, folder / f"{demo}-cpu", *words, "train.mixed_precision=no", **CPU),
                pool.submit(run, demo, folder / f"{demo}-float32", *words, "train.mixed_precision=no", *EXACT),
                pool.submit(run, demo, folder / f"{demo}-whole", *words, *DETERMINISTIC),
                pool.submit(killed_and_resumed),
            )
            cpu, float32, whole, resumed = (each.result() for each in runs)
        differences = (f"{furthest(each, cpu):.1e}" for each in (float32, whole))
        return demo, *differences, "bit-equal" if resumed == whole else "differs"
    except RuntimeError as error:
        print(f"\n{demo}: {error}", file=sys.stderr, flush=True)
        return demo, "failed", "", ""


def run(demo: str, folder: Path, *words: str, expected: int = 0, **environment: str) -> tuple[list[dict[str, Any]], bytes]:
    """Train; return what was logged, without times, and the weights of the last model. RuntimeError if it fails."""
    words = (f"recipe={demo}", f"output_dir={folder}", "train.log_every=1", "task.max_eval_samples=64", *words)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "hftune.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != expected:
        raise RuntimeError(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout[-2500:]}")
    if expected:
        return [], b""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
    return logged, b"".join(path.read_bytes() for path in sorted((folder / "model_last").glob("*.safetensors")))


def furthest(found: tuple, reference: tuple) -> float:
    """Return the largest relative difference of a loss."""
    pairs = [
        (here[name], there[name])
        for here, there in zip(found[0], reference[0], strict=True)
        for name in ("train/loss", "eval/loss")
        if name in there
    ]
    return max(abs(here - there) / abs(there) for here, there in pairs)


if __name__ == "__main__":
    sys.exit(main())
