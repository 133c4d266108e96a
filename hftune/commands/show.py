"""``hftune show``: print a recipe with bases and overrides applied, or a few of its training samples."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hftune.commands.arguments import add_recipe, check_at_least_1
from hftune.errors import ConfigError

TRAINED = "bold green"
"""Style of what the model learns to write."""
MARKS = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}", "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
"""Around it where there are no colours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, is_required=True)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="print the first N training samples as the model reads them instead, with the trained tokens in colour",
    )


def run(options: argparse.Namespace) -> int:
    """Print what a run would write to recipe.yaml, or training samples."""
    check_at_least_1(options, "samples")
    from hftune.config import Recipe

    recipe = Recipe.from_argv(options.words)
    if options.samples is None:
        print(recipe.to_yaml(), end="")
        return 0
    recipe.validate()
    show_samples(recipe, options.samples)
    return 0


def show_samples(recipe: Any, count: int) -> None:
    """Print training samples with what the model learns to write of each: in colour on a terminal, elsewhere between MARKS.

    Raises:
        ConfigError: the task's samples are no texts.
    """
    if not hasattr(type(recipe.task), "marked"):
        raise ConfigError(f"--samples: {type(recipe.task).__name__} has no samples that can be shown as text.")
    from rich.console import Console
    from rich.text import Text

    from hftune.build import first_epoch, load_datasets
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    samples = first_epoch(recipe, load_datasets(recipe))
    is_causal = getattr(recipe.task, "auto_class", None) == "AutoModelForCausalLM"  # the last label is no input
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and console.color_system is not None and not console.no_color
    for index in range(min(count, len(samples))):
        example, text = samples[index], Text()
        ids, labels = (list(example.get(name, ())) for name in ("input_ids", "labels"))
        trained = f", {sum(label >= 0 for label in labels):,} trained" if labels else ""
        counts = f" ({len(ids) + is_causal:,} tokens{trained})" if ids else ""
        for piece, is_trained in recipe.task.marked(example):
            marked = f"{MARKS[0]}{piece}{MARKS[1]}" if is_trained and not has_colours else piece
            text.append(marked, TRAINED if is_trained else None)
        console.print(Text(f"sample {index} of {len(samples):,}{counts}", "dim"), text, "", sep="\n")
