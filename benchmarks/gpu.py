"""Try hftune on the NVIDIA GPUs of this machine: losses, SIGKILL and resumption, and speed beside Trainer.

    make gpu        or: python benchmarks/gpu.py [recipe ...] [--parts losses speed] [--loss-steps 12] [--only WORDS]

It ends with a Markdown table, for README or an issue, and exits with 0 if all is within its bound. ``all`` means all demos.

Losses: each recipe trains for --loss-steps steps with dropout off, as masks are drawn by each device itself, and is evaluated:
on the CPU in float32; on a GPU in float32 (no TF32) and in bf16, both with train.deterministic; once more in bf16, killed with
SIGKILL as soon as the first checkpoint is complete, then started again. Where there are two GPUs, two processes do the same in
float32. "float32", "bf16" and "two" are the largest relative differences of a logged training or evaluation loss to the CPU's.
"old CPU" is that of the same CPU computing without AVX: how far a change of last bits goes in these steps. A GPU changes more
of them: a hundred times as much is allowed where that is more than the bound.
"resumed" says whether all weights of the last model and all logged values are those of the run that was left alone; where a
model needs kernels that do not repeat their bits, it says how far the losses are apart.

Speed: tokens a second, model FLOPs utilisation and memory, see gpu_speed.py, whose settings --only chooses.
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

import numpy as np
from record import HERE, parse_options, print_table, save, versions

from hftune import Callback

DEMOS = sorted(path.stem for path in (HERE.parent / "recipes").glob("*_demo.yaml"))
FEW = ("yelp_demo", "chats_demo", "seq2seq_demo", "image_classification_demo")
BERT = ("task.model_config.hidden_dropout_prob=0", "task.model_config.attention_probs_dropout_prob=0")
DROPOUT_OFF = {
    **dict.fromkeys(("multi_label_demo", "pairs_demo", "regression_demo", "text_classification_demo"), BERT),
    **dict.fromkeys(("token_classification_demo", "embeddings_demo", "audio_classification_demo"), BERT),
    "ctc_demo": ("task.model_config.hidden_dropout=0", "task.model_config.attention_dropout=0"),
    "mnist_demo": ("task.dropout=0",),
    "process_reward_demo": (  # the heads that transformers has for Llamas drop out a tenth, whatever their config says
        "replace=[task.model_config]",
        "task.model_config={model_type: gpt_neox, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        "num_attention_heads: 2, classifier_dropout: 0.0, max_position_embeddings: 128}",
    ),
    "segmentation_demo": ("task.model_config.classifier_dropout_prob=0", "task.model_config.drop_path_rate=0"),
    "speech_to_text_demo": ("task.model_config.dropout=0",),
}
"""A GPU draws dropout from a generator of its own: only without it are its losses the CPU's."""
NEEDS = {
    "chats_lora_demo": ("chats_demo", "task.model={}/model"),
    "distillation_demo": ("language_modeling_demo", "train.teacher={}"),
}
"""Demos that begin with the model of another one, that one, and the word for its folder."""
UNREPEATABLE = {"detection_demo"}
"""Sampling from a grid, which deformable attention does, adds up in another order each time: the table alone has them."""
REPEATABLE = ("train.deterministic=true", "train.cudnn_benchmark=false")
EXACT = ("train.mixed_precision=no", "train.tf32=false")
BF16 = ("train.mixed_precision=bf16",)
OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
"""For PyTorch, oneDNN and MKL: no AVX. On other processors than x86-64 it changes little."""
FLOAT32_BOUND, BF16_BOUND, AS_FAR = 1e-5, 2e-2, 100
"""Of bf16: weights and losses have 8 bits, so that a loss near 1 is right to 4e-3; a dozen steps add to that."""


class KilledAtCheckpoint(Callback):
    """Ends the process with SIGKILL when its first checkpoint is complete."""

    def on_checkpoint(self, checkpoint: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    options = parse()
    if options.smoke:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    import torch

    from hftune.distributed.accelerator import on_cpu

    if not options.smoke and (on_cpu() or not torch.cuda.is_available()):
        print(
            "benchmarks/gpu.py needs an NVIDIA GPU and PyTorch's build for CUDA; --smoke tries it on the CPU.", file=sys.stderr
        )
        return 2
    device, gpus = ("CPU", 0) if on_cpu() else (torch.cuda.get_device_name(), torch.cuda.device_count())
    tables, rows, fine = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        if "losses" in options.parts:
            tables.append(compare_losses(options, device, gpus, Path(folder)))
            rows, fine = summary(options, tables[0], gpus)
        if "speed" in options.parts:
            import gpu_speed

            table, found = gpu_speed.measure_all(options, device, folder)
            tables.append(table)
            rows += [(what, "", figure) for what, figure in found.items()]
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    print("", *markdown((f"{max(gpus, 1)} x {device}; {used}", "bound", "found"), rows), sep="\n", flush=True)
    save(__file__, options, tables, {f"{what}, on {device}": found for what, _, found in rows})
    return 0 if fine else 1


def parse() -> argparse.Namespace:
    from gpu_speed import add_speed_options

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demos", nargs="*", metavar="recipe", default=FEW)
    parser.add_argument("--parts", nargs="+", choices=("losses", "speed"), default=["losses", "speed"])
    parser.add_argument("--loss-steps", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=2, help="recipes at a time, in several processes each")
    smoke = {"demos": ["mnist_demo"], "loss_steps": 5, **add_speed_options(parser)}
    options = parse_options(parser, smoke)
    options.demos = DEMOS if [*options.demos] == ["all"] else options.demos
    return options


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)]


def compare_losses(options: argparse.Namespace, device: str, gpus: int, folder: Path) -> dict[str, Any]:
    """Train all recipes in all ways; return a table."""
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda demo: row_of(demo, options, gpus, folder), options.demos):
            rows.append(row)
            print(*row, file=sys.stderr, flush=True)
    title = f"{device}; losses of {options.loss_steps} steps and an evaluation against the CPU's"
    return print_table(title, ("recipe", "old CPU", "float32", "bf16", "resumed", "two", "two resumed"), rows)


def row_of(demo: str, options: argparse.Namespace, gpus: int, folder: Path) -> tuple[str, ...]:
    words = (*DROPOUT_OFF.get(demo, ()), f"train.max_steps={options.loss_steps}")
    words = (*words, *(() if demo in UNREPEATABLE else REPEATABLE))

    def train(name: str, *more: str, **others: Any) -> Trained:
        return run(demo, folder / f"{demo}-{name}", *words, *more, **others)

    def killed_and_resumed(name: str, *more: str, **others: Any) -> Trained:
        train(name, *more, f"callbacks=[{Path(__file__).stem}.KilledAtCheckpoint]", is_killed=True, **others)
        return train(name, *more, **others)

    try:
        if demo in NEEDS:
            needed, word = NEEDS[demo]
            run(needed, folder / f"{demo}-needs", f"train.max_steps={options.loss_steps}")
            words = (*words, word.format(folder / f"{demo}-needs"))
        with ThreadPoolExecutor() as pool:
            cpu, old = (
                pool.submit(train, name, "train.mixed_precision=no", ACCELERATE_USE_CPU="true", **variables)
                for name, variables in {"cpu": {}, "old": OLD_CPU}.items()
            )
            one, half = pool.submit(train, "float32", *EXACT), pool.submit(train, "bf16", *BF16)
            resumed = pool.submit(killed_and_resumed, "resumed", *BF16)
            two = [pool.submit(do, do.__name__, *EXACT, processes=2) for do in (train, killed_and_resumed) if gpus > 1]
        found = [f"{furthest(each.result(), cpu.result()):.1e}" for each in (old, one, half, *two[:1])]
        pairs = [(half, resumed), *([two] if two else [])]
        equal = [resemblance(demo, whole.result(), again.result()) for whole, again in pairs]
        return (demo, *found[:3], equal[0], *found[3:], *equal[1:], *([] if two else ["-", "-"]))
    except RuntimeError as error:
        print(f"\n{demo}: {error}", file=sys.stderr, flush=True)
        return demo, *["failed"] * 6


Trained = tuple[list[dict[str, Any]], bytes]
"""What was logged, without times, and the weights of the last model."""


def run(demo: str, folder: Path, *words: str, processes: int = 1, is_killed: bool = False, **environment: str) -> Trained:
    """Train. RuntimeError if it fails; or if it does not, though it is to be killed, or leaves no checkpoint then."""
    words = (
        f"recipe={demo}",
        f"output_dir={folder}",
        "train.log_every=1",
        "task.max_eval_samples=64",
        "checkpoint.every=4",
        *words,
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "hftune.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if is_killed:
        if done.returncode and any((folder / "checkpoints").glob("step_*")):
            return [], b""
        raise RuntimeError(f"{' '.join(words)} was not killed, or before a checkpoint:\n{done.stdout[-2500:]}")
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout[-2500:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
    return logged, b"".join(path.read_bytes() for path in sorted((folder / "model_last").glob("*.safetensors")))


def resemblance(demo: str, whole: Trained, again: Trained) -> str:
    if demo in UNREPEATABLE:
        return f"{furthest(again, whole):.1e}"
    return "bit-equal" if again == whole else "differs"


def furthest(found: Trained, reference: Trained) -> float:
    """Return the largest relative difference of a loss."""
    pairs = [
        (here[name], there[name])
        for here, there in zip(found[0], reference[0], strict=True)
        for name in ("train/loss", "eval/loss")
        if name in there
    ]
    return float(np.max([abs(here - there) / abs(there) for here, there in pairs]))  # NaN is further than anything


def summary(options: argparse.Namespace, table: dict[str, Any], gpus: int) -> tuple[list[tuple[str, str, str]], bool]:
    """Return a row for each promise, with its bound and the worst that was found, and whether all are kept."""
    kept, rows = True, []
    held = [row for row in table["rows"] if row[0] not in UNREPEATABLE or "failed" in row]
    if not held:
        return rows, kept
    columns = dict(zip(table["header"], zip(*held, strict=True), strict=True))
    which = f"{len(options.demos)} demo recipes" if len(options.demos) > 1 else options.demos[0]
    for name, what, bound in (
        ("float32", "float32", FLOAT32_BOUND),
        ("bf16", "bf16", BF16_BOUND),
        ("two", "float32 on two GPUs", FLOAT32_BOUND),
        ("resumed", "bf16", None),
        ("two resumed", "float32 on two GPUs", None),
    ):
        cells = columns[name]
        if name.startswith("two") and gpus < 2:
            found, is_kept = "not tried: one GPU", True
        elif bound is None:
            count = cells.count("bit-equal")
            found, is_kept = f"{count} bit-equal", count == len(cells)
        elif "failed" in cells:
            found, is_kept = f"{cells.count('failed')} failed", False
        else:
            allowed = [max(bound, AS_FAR * float(old)) for old in columns["old CPU"]]
            worst = int(np.argmax([float(cell) / most for cell, most in zip(cells, allowed, strict=True)]))  # NaN, if one is
            beside = "" if allowed[worst] == bound else f", old CPU {columns['old CPU'][worst]}"
            found, is_kept = f"{cells[worst]} ({columns['recipe'][worst]}{beside})", float(cells[worst]) <= allowed[worst]
        said = (
            f"killed with SIGKILL and resumed, {what}"
            if bound is None
            else f"largest relative difference of a loss to the CPU's, {what}"
        )
        rows.append((f"{which}: {said}", "all bit-equal" if bound is None else f"{bound:g}", found))
        kept &= is_kept
    return rows, kept


if __name__ == "__main__":
    sys.exit(main())
