"""``hftune plan``: print what a run would do and need, without training."""

from __future__ import annotations

import argparse
import json

from hftune.commands.arguments import add_recipe, check_at_least_1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--processes", type=int, default=1, help="number of training processes on all nodes (default %(default)s)"
    )
    parser.add_argument("--fsdp", action="store_true", help="the processes share weights, gradients and optimizer state")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to estimate memory for (default: this machine's)")
    parser.add_argument("--json", action="store_true", help="one JSON object as output; docs/plan-and-doctor.md lists its keys")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Exit code 1 if training would refuse the model."""
    check_at_least_1(options, "processes")
    from hftune.config import Recipe

    recipe = Recipe.from_argv(options.words)
    recipe.validate()
    from hftune.planning.plan import make_plan  # imports torch: only once the recipe is known to be valid
    from hftune.planning.report import plan_text
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    plan = make_plan(recipe, options.processes, options.device, options.fsdp)
    print(json.dumps(plan.to_dict(), indent=2, ensure_ascii=False) if options.json else plan_text(plan))
    return 1 if plan.unused_parameters else 0
