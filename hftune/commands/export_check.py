"""Writes the model of ``hftune export``, runs it beside the run's, and refuses it if the answers are too far apart."""

from __future__ import annotations

import argparse
import io
import logging
import math
from collections.abc import Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from operator import eq
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns
from time import process_time
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hftune.atomic import atomic_path, explain_write_errors
from hftune.checkpoints.export import readable
from hftune.commands.merge import DTYPES
from hftune.config.recipe import Recipe, type_name
from hftune.errors import ConfigError, TrainingError, first_line, is_number
from hftune.evaluation import plan_evaluation
from hftune.models.adapter_files import is_adapter, plain_model, read_base
from hftune.reevaluation import Score, evaluate
from hftune.task import Task
from hftune.tasks.chats import Chats
from hftune.tracking.console import hide_reports, note, short, table
from hftune.tracking.jsonl import strict_json

BOUND = 1e-3
"""Furthest that an output of float32 may be from the run's, as a share of the largest one."""
COMPARISON = "comparison.json"
"""File in the exported folder: what the comparison found."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "adapter", "adapter_config.json", "base", "base.json", "model_config")
ABOUT = ("config.json", "generation_config.json", "README.md")
"""Files of the run's model that an export leaves out: weights, and what is about them. Tokenizers and processors it takes."""
SHARES = ("equal_answers", "equal_next_tokens")
BF16 = (
    "OpenVINO (2026.4) computes in bfloat16 on CPUs that can, whatever the graph says. Here it computes in float32: for the "
    'same answers load the model with config={"INFERENCE_PRECISION_HINT": "f32"}.'
)
WRITES = (
    "The evaluation lets the model write texts. A graph of onnx or openvino has no cache, and would compute a text again for "
    "each of its tokens. Use --format vllm-ready."
)


class Pair(nn.Module):
    """A run's model and its export: called as one model, it compares what they compute, and returns what the export does."""

    def __init__(self, model: nn.Module, exported: Any):
        super().__init__()
        self.model, self.exported = model, exported
        self.is_graph = not isinstance(exported, nn.Module)
        self.outputs: dict[int, tuple[float, float]] = {}
        """Of each output, the largest difference, and the largest value of the run's model."""
        self.tokens, self.same_tokens = 0, 0
        """Places with logits, and those where both are largest for the same token."""
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self.seconds: list[tuple[float, float]] = []
        """Of each batch, CPU time of the run's model and of its export."""

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        start = process_time()
        expected = self.model(**inputs)
        middle = process_time()
        try:
            found = self.exported(**(tensors if self.is_graph else inputs))
        except Exception as error:  # whatever a runtime raises, such as for a size that became a constant of the graph
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
            raise TrainingError(
                f"The exported model fails where the run's does not, for {shapes}: {first_line(error)}"
            ) from error
        self.seconds.append((middle - start, process_time() - middle))
        self.shapes.add(tuple(tuple(value.shape) for value in tensors.values()))
        self.compare(expected, found, inputs.get("attention_mask"))
        return found

    def compare(self, expected: Any, found: Any, mask: Tensor | None) -> None:
        """Note how far the outputs of a batch are apart. Those of padding do not count: no runtime need compute them.

        Raises:
            TrainingError: they have different shapes.
        """
        ours, theirs = numbers(expected), numbers(found)
        if [value.shape for value in ours] != [value.shape for value in theirs] or not ours:
            raise TrainingError("The exported model's outputs do not have the shapes of the run's. Nothing was written.")
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if mask is not None and one.shape[:2] == mask.shape:
                one, other = one[mask.bool()], other[mask.bool()]
            furthest, largest = self.outputs.get(index, (0.0, 0.0))
            difference = torch.cat([(one - other).abs().flatten(), one.new_tensor([furthest])]).max()  # NaN if any is
            self.outputs[index] = difference.item(), max(largest, one.abs().max().item() if one.numel() else 0.0)
            if ours[index].ndim == 3 and ours[index] is getattr(expected, "logits", None):
                self.tokens += one[..., 0].numel()
                self.same_tokens += int((one.argmax(-1) == other.argmax(-1)).sum())

    def distance(self) -> tuple[float, float]:
        """Return largest difference and largest value of the output where the one is the largest share of the other."""
        return max(self.outputs.values(), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / (pair[1] or 1.0))

    def speed(self) -> tuple[float, float]:
        """Return CPU seconds of the run's model and of its export; without the first batches, in which both warm up."""
        ours, theirs = zip(*(self.seconds[2:] or self.seconds[-1:]), strict=True)
        return sum(ours), sum(theirs)

    def __getattr__(self, name: str) -> Any:
        """Return what the export has, such as its config and, if it writes texts, ``generate``: tasks ask the model for it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.exported, name)


def numbers(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def export(recipe: Recipe, folder: Path, run: Path, output: Path, options: argparse.Namespace) -> None:
    """Export a run's model into a new folder, and print how its answers compare with the run's.

    Args:
        folder: of the model.
        run: folder with its recipe.

    Raises:
        ConfigError: the model has no such form, or it cannot be exported.
        TrainingError: the answers are too far apart. There is then no such folder.
    """
    task, source = recipe.task, readable(folder)
    if is_adapter(source) and read_base(source).quantized:
        raise ConfigError(f"{folder} has a base of 4 bits. Merge it first, and export the folder that hftune merge writes.")
    is_graph = options.format != "vllm-ready"
    writes = isinstance(task, Chats) and task.generation is not None  # or asks for a cache to write with
    if is_graph and (writes or hasattr(type(task), "evaluation_inputs")):
        raise ConfigError(WRITES)
    hide_reports()
    torch.set_num_threads(1)
    recipe = replace(recipe, train=replace(recipe.train, mixed_precision="no", compile=False, head_loss="whole"))
    pairs: list[Pair] = []
    with explain_write_errors(output), atomic_path(output) as temporary:

        def exported(model: nn.Module, dataset: Any) -> nn.Module:
            dtype = getattr(torch, DTYPES[options.dtype]) if options.dtype else next(model.parameters()).dtype
            model = model.float().eval()
            plain = plain_model(model, merged=True) if is_adapter(source) else deepcopy(model)
            plan = plan_evaluation(task, dataset, recipe.eval.batch_size, recipe.eval.batch_tokens)
            longest, shortest = plan[0].samples.tolist(), plan[-1].samples.tolist()
            batches = [
                task.evaluation_inputs(task.collate([dataset[sample] for sample in samples]))
                for samples in (longest, shortest, shortest[:1])
            ]
            if is_graph:
                pair = Pair(model, write_graph(task, plain, batches, temporary, options))
            else:
                pair = Pair(model, write_folder(task, plain, temporary, dtype))
            pair(**batches[-1])  # one sample alone, as it will be served
            pairs.append(pair)
            return pair

        copytree(source, temporary, ignore=ignore_patterns(*WEIGHTS, *ABOUT))
        theirs = evaluate(recipe, folder, split=options.split, instead=exported)
        ours = evaluate(recipe, folder, split=options.split)
        found = summary(ours, theirs, *pairs)
        print(report(found), flush=True)
        is_exact = options.quantize is None and getattr(pairs[0].exported, "dtype", torch.float32) == torch.float32
        if (reason := problem(recipe, found, is_exact, options.max_drop)) is not None:
            raise TrainingError(f"The exported model does not answer as the run's does. {reason} {output} was not written.")
        (temporary / COMPARISON).write_text(strict_json(found, indent=1) + "\n", encoding="utf-8")
        copyfile(run / "recipe.yaml", temporary / "recipe.yaml")


def write_graph(task: Task, model: nn.Module, batches: list[Any], folder: Path, options: argparse.Namespace) -> Any:
    """Write a graph of onnx or openvino, and return it as it was read back, to run on one thread of the CPU.

    Args:
        batches: inputs of the evaluation, the first two as different as they come: what differs in shape may vary in the graph.
    """
    from torch.export import Dim
    from transformers import CONFIG_MAPPING, exporters

    example = dict(batches[0])
    tensors = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    shapes = {
        name: {
            axis: Dim.AUTO
            for axis in range(value.ndim)
            if axis == 0 or value.shape[axis] != batches[1][name].shape[axis] or (axis == 1 and value.ndim == 2)
        }
        for name, value in tensors.items()
    }
    if len(next(iter(tensors.values()))) == 1:  # of which the exporter would make a constant
        example |= {name: torch.cat([value, value]) for name, value in tensors.items()}
    given: dict[str, Any] = {"dynamic_shapes": shapes}
    if options.quantize:
        from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

        given["quantizer"] = OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig())
    config = {"onnx": exporters.OnnxConfig, "openvino": exporters.OpenVINOConfig}[options.format](**given)
    if options.format == "openvino":
        print(note(BF16), flush=True)
        runtime: dict[str, Any] = {"config": {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}}
    else:
        import onnxruntime

        runtime = {"session_options": onnxruntime.SessionOptions()}
        runtime["session_options"].intra_op_num_threads = 1
    logging.disable(logging.WARNING)  # of optional packages that are not there, and of advice
    try:
        with redirect_stdout(io.StringIO()), catch_warnings(action="ignore"):
            graph = exporters.AutoHfExporter.from_config(config).export(model, example, config)
            if getattr(graph.config, "model_type", None) not in CONFIG_MAPPING:
                graph.config = None  # of a network of one's own: it could not be read back
            graph.save_pretrained(folder)
            return exporters.ExportedModel.from_pretrained(folder, device="cpu", **runtime)
    except OSError:  # a full disk
        raise
    except Exception as error:  # whatever torch.export, a converter or a runtime stumbles over
        kind = type(model).__name__
        whose = f"{kind} of {type_name(type(task))}"
        raise ConfigError(f"transformers cannot export {whose} to {options.format}: {first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)


def write_folder(task: Task, model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Write the plain model as vLLM loads it, and return it as transformers loads it afresh, by what its config names."""
    import transformers

    kind = type(model)
    known = getattr(transformers, kind.__name__, None)
    if known is None or not kind.can_generate():
        raise ConfigError(f"--format vllm-ready is for decoders of transformers that write texts, and not for {kind.__name__}.")
    if not kind.is_backend_compatible():
        print(note(f"vLLM needs code of its own for {kind.__name__}: it cannot replace the attention of transformers' there."))
    task.save(model.to(dtype), folder)
    return known.from_pretrained(folder, dtype="auto").eval()


def summary(ours: Score, theirs: Score, pair: Pair) -> dict[str, Any]:
    """Return what the comparison found, as it is printed and kept beside the model."""
    answers = [[said(row) for row in score.evaluation.rows] for score in (ours, theirs)]
    equal = None if None in answers[0] else sum(map(eq, *answers)) / ours.num_samples
    difference, size = pair.distance()
    return {
        "samples": ours.num_samples,
        "shapes": len(pair.shapes),
        "largest_difference": difference,
        "largest_output": size,
        "equal_answers": equal,
        "equal_next_tokens": pair.same_tokens / pair.tokens if equal is None and pair.tokens else None,
        "metrics": {name: [value, theirs.metrics[name]] for name, value in ours.metrics.items() if is_number(value)},
        "cpu_seconds": pair.speed(),
    }


def said(row: Mapping[str, Any]) -> Any:
    """Return what a row of the evaluation answers; None if that is a number, or nothing, and so never equal or always."""
    found = row.get("prediction", row.get("generated"))
    return None if isinstance(found, float) else found


def report(found: Mapping[str, Any]) -> str:
    """Return what the comparison found as a table."""
    torch_s, exported_s = found["cpu_seconds"]
    shares = {name.replace("_", " "): f"{100 * found[name]:.6g} %" for name in SHARES if found[name] is not None}
    return table(
        {
            "samples": f"{found['samples']:,}, in batches of {found['shapes']} shapes",
            "outputs": f"up to {found['largest_difference']:.1e} from the run's, which are up to {found['largest_output']:.2g}",
            **shares,
            **{name: f"{short(other)}, the run's {short(one)}" for name, (one, other) in found["metrics"].items()},
            "speed": f"{torch_s / exported_s:.2f} times the run's model in torch, in CPU time on one thread",
        }
    )


def problem(recipe: Recipe, found: Mapping[str, Any], is_exact: bool, max_drop: float) -> str | None:
    """Return what keeps an export from being what it should be, a sentence; None: nothing."""
    if is_exact:
        difference, size = found["largest_difference"], found["largest_output"]
        if difference <= BOUND * size:
            return None
        return f"Its outputs are up to {difference:.1e} from the run's; at most {BOUND * size:.1e} is rounding."
    name = recipe.eval.metric_name if recipe.eval.metric_name in found["metrics"] else "loss"
    ours, theirs = found["metrics"][name]
    drop = (ours - theirs if recipe.greater_is_better and name != "loss" else theirs - ours) / (abs(ours) or 1.0)
    if drop <= max_drop:
        return None
    return f"Its {name} is {short(theirs)}, the run's {short(ours)}: {drop:.1%} worse, and --max-drop is {max_drop:.1%}."
