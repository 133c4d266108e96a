"""``hftune merge``: add the adapters of a run to the weights they belong to, and write the plain model."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from hftune.commands.arguments import add_trust_code, local_path
from hftune.errors import ConfigError

MERGED = "model_merged"
"""The folder beside that of the adapters, unless there is another --output."""
DTYPES = {"float32": "float32", "bf16": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=local_path, help="output folder of a run with adapters, or one of its models")
    parser.add_argument("--output", type=Path, help=f"new folder for the plain model (default: {MERGED} in the output folder)")
    parser.add_argument("--dtype", choices=[*DTYPES], help="precision to write it in (default: that of the base in training)")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Merge, and print how far the answers of the merged model are from those before, and where it is."""
    from hftune.checkpoints.export import readable
    from hftune.checkpoints.run_folder import open_run

    recipe, folder = open_run(options.folder, options.trust_code)
    if not (readable(folder) / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} holds no adapters but a whole model: there is nothing to merge.")
    run_folder = folder if (folder / "recipe.yaml").is_file() else folder.parent
    output = options.output or run_folder / MERGED
    check_output(output, folder)
    import torch  # takes seconds: only once the arguments are known to be valid

    from hftune.checkpoints.export import export, read_about
    from hftune.inference import load_export
    from hftune.models.adapter_files import answers, merge, read_base
    from hftune.models.pretrained import loading
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    base = read_base(folder)
    model = load_export(recipe.task, folder)
    before = answers(model)
    if base.quantized:  # a load of its weights as they were in training has found them to be the same
        with loading(quantization_config=None):
            model = load_export(recipe.task, folder)
    merge(model)
    model.to(getattr(torch, DTYPES[options.dtype] if options.dtype else base.dtype))
    after = answers(model)
    export(recipe.task, model, output, read_about(folder))
    shutil.copyfile(run_folder / "recipe.yaml", output / "recipe.yaml")  # so that the folder can be taken elsewhere
    said = "Its answers were not compared: the model takes neither tokens nor images."
    if before is not None and after is not None:  # those of base and adapters were computed apart in float32
        furthest, largest = (before - after).abs().max().item(), before.abs().max().item()
        said = f"Its outputs are up to {furthest:.1e} from those with adapters, which are up to {largest:.2g}."
    print(f"Merged, in {str(model.dtype).removeprefix('torch.')}. {said}")
    print(output, flush=True)
    return 0


def check_output(output: Path, folder: Path) -> None:
    """Refuse to write over the adapters, over their base, or over anything but an earlier model, or raise ConfigError."""
    from hftune.checkpoints.export import readable
    from hftune.models.adapter_files import read_base

    if output.resolve() == folder.resolve():
        raise ConfigError(f"--output {output} is the folder of the adapters. Name a different one.")
    base = read_base(readable(folder)).folder(readable(folder))
    if output.resolve() == Path(base).resolve():
        raise ConfigError(f"--output {output} is the base of the adapters. Name a different one.")
    if output.exists() and not (output / "config.json").is_file() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already, and is no model. Name a new folder.")
