"""The ``hftune`` command: find the subcommand, call its module in ``hftune/commands/``, turn errors into an exit code.

Exit codes: 0 success; 1 an audit, a plan or the doctor found a problem; 2 the command cannot be run as given; ``train`` and
``evaluate`` use those of hftune.run.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hftune import __version__
from hftune.commands import completion
from hftune.config.shipped_files import recipe_names
from hftune.distributed.signals import follow_launcher
from hftune.errors import ConfigError, did_you_mean
from hftune.run import fail, leave, outlive_readers
from hftune.tracking.console import print_any_character

COMMANDS = {
    "train": "train a recipe; the same as python -m hftune.run",
    "recipes": "list the shipped recipes",
    "show": "print a recipe with all its keys as YAML, with bases and overrides applied",
    "schema": "print the JSON schema of recipes, with which editors complete keys and mark errors, or write it to a file",
    "plan": "show the steps, memory and disk space that a run would need, without training",
    "predict": (
        "run a finished model on texts or images, such as titles for articles, or on a table. Under a launcher all processes "
        "share the rows of a table: accelerate launch -m hftune.cli predict outputs/yelp --data test.csv --output labels.csv"
    ),
    "sample": (
        "draw several answers to each prompt from a finished chat model, score them, and write the best ones, or pairs, to "
        "train on. Under a launcher all processes share the prompts: accelerate launch -m hftune.cli sample outputs/sft ..."
    ),
    "mine": (
        "find hard negatives for pairs of texts with a finished embedding model, and write them as rows to train on. Under a "
        "launcher all processes share the texts: accelerate launch -m hftune.cli mine outputs/embeddings ..."
    ),
    "evaluate": (
        "evaluate a run's model again on its evaluation data; any key can be overridden. Under a launcher all processes share "
        "the work, as in training: accelerate launch -m hftune.cli evaluate recipe=..."
    ),
    "folds": (
        "train once for each fold of the data, for scores with mean and deviation and a prediction of every row. Under a "
        "launcher all processes share the work: accelerate launch -m hftune.cli folds recipe=..."
    ),
    "sweep": (
        "train a recipe with several values of some keys, and compare. A comma separates values, train.lr=1e-5,3e-5, unless it "
        "is inside brackets, braces or quotes; the same command again goes on where it was stopped"
    ),
    "eject": "write a run's training as one plain Python file of torch and transformers, with its samples and first weights",
    "merge": "add a run's adapters to the weights of their base model, and write the plain model",
    "export": "write a run's model for ONNX Runtime, OpenVINO or vLLM, and compare its answers with the run's own",
    "push": "publish a run's best model on the Hugging Face Hub, with its model card, recipe and result",
    "report": "write the page that shows a run, or compares several: curves, predictions, confusion matrix, images",
    "compare": "say at which step runs diverge and why, and what their losses and metrics differ by beyond chance",
    "configs": "list, print or copy configurations for accelerate launch",
    "slurm": "write a batch script that trains a recipe on the nodes of a SLURM cluster",
    "k8s": "write the manifest that trains a recipe on a Kubernetes cluster: a Job, a JobSet or a TrainJob",
    "sky": "write the task that trains a recipe on machines that SkyPilot finds",
    "meeting": "serve the place where the machines of elastic jobs meet, on a host that stays",
    "audit": "prove that every epoch used each sample exactly once",
    "replay": (
        "compute past steps of a run again and compare them with its ledger, or with other keys, or without some rows. Under a "
        "launcher all processes share the work: accelerate launch -m hftune.cli replay outputs/yelp --step 137"
    ),
    "bisect": (
        "find what made a run bad, a recipe key or a line of a data file, by replaying a few steps. For example hftune bisect "
        "outputs/good outputs/bad"
    ),
    "bisect-step": (
        "compute one past step again, for git bisect run. Exit code 0 if its loss is still the same, 1 if not, and 125 if it "
        "cannot be computed: git bisect run hftune bisect-step outputs/yelp --step 137"
    ),
    "receipt": "write what a finished run was and what came out of it into one file that can be signed",
    "verify": (
        "check a receipt against a run's folder, and compute random parts of the run again. Under a launcher all processes "
        "share the work, as in training: accelerate launch -m hftune.cli verify receipt.json"
    ),
    "doctor": "examine this machine; under a launcher, -m hftune.doctor examines all nodes",
    "vocab": "train the vocabulary of a Chinese model on a corpus",
    "completion": "print a script that completes commands, recipes, keys and values in a shell",
}
"""What each command does: the first sentence in the list of commands, all of it in its own help. Its module has its name."""

LONG = ("train", "sample", "mine", "evaluate", "export", "sweep", "folds", "replay", "verify")
"""Commands that go on if the reader of their output exits, or their terminal is closed; predict does so with ``--data``."""
CLOSED = 141
"""Exit code of the others if the reader has gone, as in ``hftune configs | head -1``: 128 + SIGPIPE, as for other programs."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    follow_launcher()
    print_any_character()
    is_long = False
    try:
        try:
            if completion.ASKED in os.environ:
                return completion.answer(COMMANDS, parser_of)
            options = parse(argv)
            if is_long := options.command in LONG or (options.command == "predict" and options.data is not None):
                outlive_readers()
            if getattr(options, "trust_code", hasattr(options, "words")) and "" not in sys.path:
                sys.path.append("")  # the user's own modules: last, so that none of them hides an installed one
            return options.run(options)
        finally:  # --help exits from parse
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not is_long:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more when it exits
            return CLOSED
        if isinstance(error, PermissionError) and error.filename and not is_long:
            print(f"hftune: {error.filename} cannot be opened: {error.strerror}.", file=sys.stderr)
            return 2
        return fail(error)  # of a long command, what fails is not its reader, and a process may have been named


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. Options may come between the recipe's words, which argparse alone does not allow.

    Raises:
        ConfigError: there is no such command.
    """
    argv = sys.argv[1:] if argv is None else argv
    word = argv[0] if argv else "-"
    if not word.startswith("-") and word not in COMMANDS:
        hint = " Did you mean 'train'?" if word in ("run", "fit", "launch") else did_you_mean(word, COMMANDS)
        if word.startswith("recipe="):
            hint = f" To train: hftune train {' '.join(argv)}"
        elif word in recipe_names():
            hint = f" To train: hftune train recipe={' '.join(argv)}"
        raise ConfigError(f"{word!r} is not a command.{hint or ' Commands: ' + ', '.join(COMMANDS) + '.'}")
    root = parser(argv[0] if argv else None)
    options, rest = root.parse_known_args(argv)
    takes_recipe = hasattr(options, "words")
    if unknown := [word for word in rest if word.startswith("-") or not takes_recipe]:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_recipe:
        options.words += rest
    for name, value in vars(options).items():
        setattr(options, name, [*map(expanded, value)] if isinstance(value, list) else expanded(value))
    options.argv = argv
    return options


def expanded(value: Any) -> Any:
    """Return a path with the user's folder for ``~``, as no shell expands that of ``--output=~/x``; all else as it is."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111 - Path's raises for ~nobody


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Describe the command line: with the arguments of one command, whose module alone is imported, or of all."""
    root = argparse.ArgumentParser(
        prog="hftune",
        description="Fine-tune by recipe. To train on several machines: accelerate launch -m hftune.run recipe=NAME "
        "(see python -m hftune.run --help).",
    )
    root.add_argument("--version", action="version", version=f"hftune {__version__}")
    root.set_defaults(refuse=root.error)  # of an option before the command; each command has its own
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        summary, description = purpose.partition(". ")[0], f"{purpose[0].upper()}{purpose[1:]}"
        # "resolve" lets train have a --help of its own.
        added = commands.add_parser(name, help=summary, description=description, conflict_handler="resolve")
        if command in (None, name):
            module = import_module(f"hftune.commands.{name.replace('-', '_')}")
            module.add_arguments(added)
            added.set_defaults(command=name, run=module.run, refuse=added.error)
    return root


def parser_of(command: str) -> argparse.ArgumentParser | None:
    """Return the parser of one command; None if there is no such command."""
    if command not in COMMANDS:
        return None
    (choices,) = (action.choices for action in parser(command)._actions if isinstance(action.choices, dict))
    return choices[command]


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # python -m puts the current folder there, whose modules would hide installed ones
    leave(main())
