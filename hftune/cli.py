"""The ``hftune`` command: training, and what is done around it. Thin: a command checks its arguments and calls one function.

The arguments are checked before torch is imported, which takes seconds.
Exit codes: 0 done; 1 an audit, a plan or the doctor found something; 2 it cannot be done as asked; ``train`` as hftune.run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from hftune import __version__
from hftune.config.shipped_files import recipe_names
from hftune.errors import ConfigError, DataError, did_you_mean
from hftune.tracking.console import print_any_character
from hftune.tracking.jsonl import strict_json

CLOSED = 141
"""Exit code where nobody reads the output any more, as in ``hftune configs | head -1``: 128 + SIGPIPE, as other programs."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    print_any_character()
    try:
        options = parse(argv)
        code = options.command(options)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError) as error:
        print(f"hftune: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"hftune: {error.filename} cannot be opened: {error.strerror}.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more at its end
        return CLOSED


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments; options may stand between the words of a recipe, which argparse alone refuses.

    Raises:
        ConfigError: there is no such command.
    """
    argv = sys.argv[1:] if argv is None else argv
    root = parser()
    check_command(argv, root)
    options, more = root.parse_known_args(argv)
    takes_words = hasattr(options, "words")
    if unknown := [word for word in more if word.startswith("-") or not takes_words]:
        root.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_words:
        options.words += more
    return options


def check_command(argv: list[str], root: argparse.ArgumentParser) -> None:
    """Refuse a command that does not exist with the one that was meant, or raise ConfigError."""
    word = argv[0] if argv else "-"
    commands = list(next(action.choices for action in root._actions if isinstance(action, argparse._SubParsersAction)))
    if word.startswith("-") or word in commands:
        return
    if word.startswith("recipe="):
        hint = f" To train, say: hftune train {' '.join(argv)}"
    elif word in recipe_names():
        hint = f" To train, say: hftune train recipe={' '.join(argv)}"
    else:
        hint = " Did you mean 'train'?" if word in ("run", "fit", "launch") else did_you_mean(word, commands)
    raise ConfigError(f"{word!r} is not a command. Commands: {', '.join(commands)}.{hint}")


def find_modules_here() -> None:
    """Let modules of the user's own be found in the current folder: last, so that none of them hides an installed one."""
    if "" not in sys.path:
        sys.path.append("")


def parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    root = argparse.ArgumentParser(
        prog="hftune",
        description="Train by recipe, and what is done around it. On several machines: accelerate launch -m hftune.run "
        "recipe=NAME (python -m hftune.run --help).",
    )
    root.add_argument("--version", action="version", version=f"hftune {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train a recipe; the same as python -m hftune.run")
    command.set_defaults(command=train)
    command.add_argument("words", nargs="*", metavar="recipe=NAME [section.key=value ...]", help="as for hftune.run")
    command.add_argument("--processes", type=int, help="processes to start on this machine (default: train in this one)")

    command = commands.add_parser("recipes", help="list the shipped recipes")
    command.set_defaults(command=recipes)

    command = commands.add_parser("show", help="print a recipe with all its keys as YAML, bases and overrides applied")
    command.set_defaults(command=show)
    command.add_argument("words", nargs="+", metavar="recipe=NAME [section.key=value ...]", help="as for hftune.run")

    command = commands.add_parser("plan", help="what a run would do, and the memory and disk it would take; trains nothing")
    command.set_defaults(command=plan)
    command.add_argument("words", nargs="*", metavar="recipe=NAME [section.key=value ...]", help="as for hftune.run")
    command.add_argument("--processes", type=int, default=1, help="that would train, on all machines (default %(default)s)")
    command.add_argument("--gpus-per-machine", type=int, help="processes of one machine (default: all of them)")
    command.add_argument("--device", choices=("cpu", "cuda"), help="to estimate memory for (default: what this machine has)")
    command.add_argument("--json", action="store_true", help="print one JSON object; docs/plan-and-doctor.md lists its keys")

    command = commands.add_parser("predict", help="answer texts or images with a trained model, such as a title for an article")
    command.set_defaults(command=predict)
    command.add_argument("folder", help="output folder of a run, such as outputs/bigbird, or a model in it")
    command.add_argument("--text", action="append", default=[], help="a text; may be given several times")
    command.add_argument("--text-file", action="append", default=[], help="a UTF-8 file that is one text; - reads the input")
    command.add_argument("--input", nargs="+", action="extend", default=[], type=Path, help="images, or folders of them")
    command.add_argument("--masks", type=Path, help="of the images to restore: a folder, by the images' names (or a file)")
    command.add_argument("--output", type=Path, help="folder for the pictures that come out")
    command.add_argument("--batch-size", type=int, default=8, help="inputs at a time (default %(default)s)")
    command.add_argument("--json", action="store_true", help="print one JSON object an input")
    command.add_argument("--trust-code", action="store_true", help=TRUST_CODE)

    command = commands.add_parser(
        "evaluate",
        help="evaluate a run's model again",
        description="Evaluate a run's model on its recipe's evaluation data; any key can be overridden. Many processes share "
        "the work as they share training: accelerate launch -m hftune.cli evaluate recipe=...",
    )
    command.set_defaults(command=evaluate)
    command.add_argument("words", nargs="+", metavar="recipe=PATH", help="outputs/NAME/recipe.yaml, and section.key=value")
    command.add_argument("--checkpoint", type=Path, help="evaluate this checkpoint instead of the model")
    command.add_argument("--split", choices=("eval", "test"), default="eval", help="split to evaluate on (default %(default)s)")
    command.add_argument("--output", type=Path, help="write the metrics into this file, as JSON")
    command.add_argument("--trust-code", action="store_true", help=TRUST_CODE)

    command = commands.add_parser("configs", help="list, print or copy launch configurations for accelerate launch")
    command.set_defaults(command=configs)
    command.add_argument("name", nargs="?", help="print this one, such as 4gpu")
    command.add_argument("--copy", nargs="?", const=Path(), type=Path, metavar="PATH", help="copy it (default ./NAME.yaml)")
    command.add_argument("--force", action="store_true", help="let the copy overwrite a file")

    command = commands.add_parser("slurm", help="write the batch script that trains a recipe on nodes of a SLURM cluster")
    command.set_defaults(command=slurm)
    command.add_argument("words", nargs="*", metavar="recipe=NAME [section.key=value ...]", help="as for hftune.run")
    command.add_argument("--nodes", required=True, help="number of nodes; 1-2: as many of up to two as are free")
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=int, help="GPUs of each node, with a process on each")
    where.add_argument("--cpu", action="store_true", help="train on CPUs, on a cluster without GPUs")
    command.add_argument("--processes", type=int, help="processes on each node, with --cpu (default 1)")
    command.add_argument(
        *("--cpus-per-gpu", "--cpus-per-process"),
        type=int,
        dest="cores",
        help="CPU cores of each process (default: 2, with --cpu 1; and train.num_workers)",
    )
    command.add_argument("--time", default="24:00:00", help="time limit, at which the job is requeued (default %(default)s)")
    command.add_argument("--partition", help="partition to submit to")
    command.add_argument("--account", help="account to charge")
    command.add_argument("--job-name", dest="name", help="name of the job and its log (default: the recipe's)")
    command.add_argument("--config", help="launch configuration, such as fsdp_2node or a .yaml file (default: plain DDP)")
    command.add_argument("--grace-s", type=int, default=120, help="seconds to finish a step and save (default %(default)s)")

    command = commands.add_parser("audit", help="prove that every sample was used exactly once an epoch")
    command.set_defaults(command=audit)
    command.add_argument("folder", help="output folder of a run, such as outputs/yelp")

    command = commands.add_parser("doctor", help="examine this machine; under a launcher, -m hftune.doctor examines the group")
    command.set_defaults(command=doctor)
    command.add_argument("words", nargs="*", metavar="recipe=NAME", help="and section.key=value: look at this recipe, too")

    command = commands.add_parser("vocab", help="train the vocabulary of a Chinese model on a corpus")
    command.set_defaults(command=vocab)
    command.add_argument("files", nargs="+", metavar="FILE", help=".txt, a text a line; or .json, .jsonl, .csv, .parquet")
    command.add_argument("--columns", nargs="+", default=["content", "title"], help="of the texts (default content title)")
    command.add_argument("--size", type=int, default=40_000, help="most tokens (default %(default)s)")
    command.add_argument("--output", required=True, type=Path, help="folder to write; task.vocabulary takes it")
    return root


TRUST_CODE = "import the code that the recipe names beside hftune's own, such as a task of yours"


def train(options: argparse.Namespace) -> int:
    """``hftune train``: exit codes as those of hftune.run."""
    from hftune.run import fail, main

    find_modules_here()
    if options.processes is None:
        return main(options.words)
    check_at_least_1(options, "processes")
    try:
        from hftune.config import Recipe

        recipe, count = Recipe.from_argv(options.words), options.processes
        recipe.validate()
        print(f"hftune {__version__}: recipe {recipe.recipe}; starting {count} process{'es' * (count > 1)} ...", flush=True)
        from hftune.launchers.local import launch

        launch(recipe, count)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 0


def recipes(options: argparse.Namespace) -> int:
    """``hftune recipes``: each recipe with the first line of its file."""
    from hftune.config.shipped_files import recipe_path
    from hftune.tracking.console import table

    lines = {name: recipe_path(name).read_text(encoding="utf-8").partition("\n")[0] for name in recipe_names()}
    print(table({name: line.removeprefix("# ") for name, line in lines.items()}))
    return 0


def show(options: argparse.Namespace) -> int:
    """``hftune show``: what a run would write into recipe.yaml."""
    find_modules_here()
    from hftune.config import Recipe

    print(Recipe.from_argv(options.words).to_yaml(), end="")
    return 0


def check_at_least_1(options: argparse.Namespace, *names: str) -> None:
    """Refuse a number below 1, or raise ConfigError."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")


def plan(options: argparse.Namespace) -> int:
    """``hftune plan``: exit code 1 where training would refuse the model."""
    check_at_least_1(options, "processes", "gpus_per_machine")
    find_modules_here()
    from hftune.config import Recipe

    recipe = Recipe.from_argv(options.words)
    recipe.validate()
    from hftune.planning.plan import make_plan
    from hftune.planning.report import plan_text
    from hftune.tracking.console import hide_progress_bars  # only now: a mistyped key should not wait for torch

    hide_progress_bars()
    found = make_plan(recipe, options.processes, options.gpus_per_machine, options.device)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if options.json else plan_text(found))
    return 1 if found.unused_parameters else 0


def predict(options: argparse.Namespace) -> int:
    """``hftune predict``: print one line for each text or image; images after their paths."""
    inputs = [*options.text, *map(read_text, options.text_file), *image_inputs(options.input, options.masks)]
    if not inputs:
        raise ConfigError("Nothing to answer: give --text, --text-file or --input.")
    check_at_least_1(options, "batch_size")
    if options.trust_code:
        find_modules_here()
    from hftune.checkpoints.run_folder import check_answers, open_run

    recipe, _ = open_run(options.folder, options.trust_code)
    check_answers(recipe.task)
    from hftune.commands.predict import keep_pictures, named, output_names

    names = output_names(inputs, options.output)
    from hftune.inference import load_model
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    model = load_model(options.folder, trust_code=options.trust_code)
    for value, name, row in zip(inputs, names, model.answers(inputs, options.batch_size), strict=True):
        said = {**named(value), **keep_pictures(row, name)}
        print(strict_json(said, ensure_ascii=False) if options.json else "\t".join(map(str, said.values())), flush=True)
    return 0


def image_inputs(inputs: list[Path], masks: Path | None) -> list[Any]:
    """Return image files; or pairs of image and mask by name: with ``masks``, or from folders that hold image/ and mask/.

    Raises:
        ConfigError: there is no such path, or the folder is empty. DataError: an image or a mask has no partner.
    """
    folders = [folder for folder in inputs if (folder / "image").is_dir() and (folder / "mask").is_dir()]
    if masks is None and not folders:
        return [file for path in inputs for file in files_of(path)]
    from hftune.data.pictures import paired

    pairs = []
    for path in inputs:
        image, mask = (path, masks) if masks is not None else (path / "image", path / "mask")
        if not image.exists() or not mask.exists():
            missing = f"--masks {mask}" if image.exists() else f"--input {image}"
            raise ConfigError(f"{missing}: there is no such file or folder.")
        if image.is_dir():
            found = paired({"image": image, "mask": mask}, f"--input {path}")
            pairs += zip(found["image"], found["mask"], strict=True)
        else:
            pairs.append((image, mask))
    return pairs


def files_of(path: Path) -> list[Path]:
    """Return a file itself, and of a folder the files in it and below, in the order of their names; hidden ones left out.

    Raises:
        ConfigError: there is no such path, or the folder is empty.
    """
    if not path.exists():
        raise ConfigError(f"--input {path}: there is no such file or folder.")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ConfigError(f"--input {path} is an empty folder.")
    return files


def evaluate(options: argparse.Namespace) -> int:
    """``hftune evaluate``: print a table of the metrics. Under a launcher every process calls it."""
    from hftune.run import fail

    if options.trust_code:
        find_modules_here()
    try:
        from hftune.checkpoints.run_folder import check_checkpoint, check_model
        from hftune.config import Recipe

        words = options.words
        if not any(word.startswith("replace=") for word in words):
            words = [*words, "replace=[track]"]  # dashboards are of no use here, and may name variables of another machine
        recipe = Recipe.from_argv(words, options.trust_code)
        recipe.validate()
        model = model_of(options.words, recipe.output_dir)
        if options.checkpoint is None:
            check_model(model)
        else:
            check_checkpoint(options.checkpoint)
        if options.output is not None and os.environ.get("RANK", "0") == "0":
            check_output(options.output)
        from hftune.commands.evaluate import evaluate
        from hftune.tracking.console import hide_progress_bars, is_number, short, table

        hide_progress_bars()
        found = evaluate(recipe, model, options.checkpoint, options.split)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    if found.is_main:
        rows = {name: short(value) for name, value in found.metrics.items() if is_number(value)}
        print(table({**rows, "samples": f"{found.num_samples:,}", "model": found.model}), flush=True)
        if options.output is not None:
            values = {name: getattr(found, name) for name in ("metrics", "model", "num_samples", "world_size")}
            write_output(options.output, values)
    return 0


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written before hours are spent on what it is for, or raise ConfigError."""
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error


def write_output(path: Path, values: dict[str, Any]) -> None:
    """Write JSON into a file, or raise ConfigError."""
    try:
        path.write_text(strict_json(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error


def model_of(words: list[str], output_dir: str) -> Path:
    """Return where a run's model lies: beside the recipe that it wrote, wherever that is now; else in its output folder."""
    source = next(word for word in words if word.startswith("recipe=")).partition("=")[2]
    beside = Path(source).expanduser().with_name("model")
    return beside if source.endswith(".yaml") and beside.is_dir() else Path(output_dir) / "model"


def read_text(path: str) -> str:
    """Read a UTF-8 file, or the standard input where ``path`` is "-".

    Raises:
        ConfigError: there is no such file, or it is not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--text-file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text-file {path} is not UTF-8: {error}. Convert it.") from error


def configs(options: argparse.Namespace) -> int:
    """``hftune configs``: list the shipped launch configurations, print one, or copy one."""
    from hftune.config.shipped_files import config_names, config_path, copy_config
    from hftune.tracking.console import table

    if options.name is None:
        if options.copy is not None:
            raise ConfigError(f"--copy what? Name a launch configuration: {', '.join(config_names())}.")
        summaries = {name: config_path(name).read_text(encoding="utf-8").partition("\n")[0] for name in config_names()}
        print(table({name: line.removeprefix("# ") for name, line in summaries.items()}))
    elif options.copy is None:
        print(config_path(options.name).read_text(encoding="utf-8"), end="")
    else:
        target = copy_config(options.name, options.copy, options.force)
        print(f"Edit {target}, then: accelerate launch --config_file {target} -m hftune.run recipe=NAME")
    return 0


def slurm(options: argparse.Namespace) -> int:
    """``hftune slurm``: print a batch script."""
    find_modules_here()
    from hftune.launchers.slurm import Job, batch_script

    asked = {item.name: getattr(options, item.name) for item in dataclasses.fields(Job)}
    script = batch_script(options.words, Job(**asked))
    for notice in script.notices:
        print(f"hftune: {notice}", file=sys.stderr)
    print(script.text, end="")
    return 0


def audit(options: argparse.Namespace) -> int:
    """``hftune audit``: exit code 1 where the ledger does not prove it."""
    from hftune.tracking.ledger import audit

    found = audit(options.folder)
    for start in found.starts:
        began = f"went on after step {start['after_step']:,}" if start["after_step"] else "began"
        print(f"  {began} on {start['world_size']} process{'es' if start['world_size'] > 1 else ''}")
    whole = f"{found.whole_epochs} whole epoch{'' if found.whole_epochs == 1 else 's'}"
    print(f"{options.folder}: {found.steps:,} steps, {found.samples:,} samples, {whole}.")
    for problem in found.problems:
        print(f"  {problem}")
    proven = "Every step used the samples of its plan, each exactly once an epoch." if found.steps else "No step was taken yet."
    print("Not proven." if found.problems else proven)
    return 1 if found.problems else 0


def doctor(options: argparse.Namespace) -> int:
    """``hftune doctor``: the same as python -m hftune.doctor."""
    find_modules_here()
    if options.words:
        from hftune.config import Recipe

        Recipe.from_argv(options.words).validate()
    from hftune.doctor import main

    return main(options.words)


def vocab(options: argparse.Namespace) -> int:
    """``hftune vocab``: write a vocabulary and say how well it fits."""
    from hftune.data.files import check_corpus

    check_corpus(options.files)
    from hftune.data.vocabulary import write_vocabulary
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    found = write_vocabulary(options.files, options.columns, options.size, options.output)
    print(
        f"{options.output}: {found['tokens']:,} tokens, {found['characters_per_token']:.2f} characters a token, "
        f"{found['unknown_share']:.2%} unknown.\n"
        f"Train on it: recipe=bigbird task.model=null task.vocabulary={options.output} task.model_config={{hidden_size: ...}}"
    )
    return 0


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # python -m puts the current folder there, whose modules would hide installed ones
    from hftune.run import leave

    leave(main())
