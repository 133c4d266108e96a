"""``hftune slurm``: print the batch script that trains a recipe on a SLURM cluster."""

from __future__ import annotations

import argparse

from hftune.commands.arguments import add_job, add_recipe, write_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``hftune.launchers.slurm.SlurmJob`` is made of, under the names of its fields."""
    add_recipe(parser)
    add_job(parser)
    parser.add_argument("--time", default="24:00:00", help="time limit; the job is requeued when it ends (default %(default)s)")
    parser.add_argument("--partition", help="SLURM partition")
    parser.add_argument("--account", help="SLURM account to charge")


def run(options: argparse.Namespace) -> int:
    """Print the script, or write it."""
    from hftune.launchers.slurm import SlurmJob, batch_script

    return write_job(options, SlurmJob, batch_script)
