"""``hftune sky``: print the task that trains a recipe on machines that SkyPilot finds."""

from __future__ import annotations

import argparse

from hftune.commands.arguments import add_job, add_recipe, write_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``hftune.launchers.manifests.SkyJob`` is made of, under the names of its fields."""
    add_recipe(parser)
    parser.add_argument("--image", help="image with hftune (default: installed from the current folder, a clone of it)")
    parser.add_argument("--gpu-type", help="name of the GPUs, such as H100")
    add_job(parser)


def run(options: argparse.Namespace) -> int:
    """Print the task, or write it; notices about it go to stderr."""
    from hftune.launchers.manifests import SkyJob, task

    return write_job(options, SkyJob, task)
