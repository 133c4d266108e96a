"""``hftune slurm``: print the batch script that trains a recipe on a SLURM cluster."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from hftune.commands.arguments import add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``hftune.launchers.slurm.Job`` is made of, under the names of its fields."""
    add_recipe(parser)
    parser.add_argument(
        "--nodes",
        required=True,
        help="number of nodes, or a range: 1-4 takes up to four free nodes and goes on without lost ones",
    )
    hardware = parser.add_mutually_exclusive_group(required=True)
    hardware.add_argument("--gpus", type=int, help="number of GPUs per node; each gets one process")
    hardware.add_argument("--cpu", action="store_true", help="training on CPUs, for a cluster without GPUs")
    parser.add_argument("--processes", type=int, help="number of processes per node with --cpu (default 1)")
    parser.add_argument(
        *("--cpus-per-gpu", "--cpus-per-process"),
        type=int,
        dest="cores",
        help="number of CPU cores per process (default: 2, or 1 with --cpu, plus train.num_workers)",
    )
    parser.add_argument("--time", default="24:00:00", help="time limit; the job is requeued when it ends (default %(default)s)")
    parser.add_argument("--partition", help="SLURM partition")
    parser.add_argument("--account", help="SLURM account to charge")
    parser.add_argument("--job-name", dest="name", help="name of the job and its log (default: the recipe's)")
    parser.add_argument(
        "--config", help="launch configuration: a name such as fsdp_2node, or a .yaml file (default: plain DDP)"
    )
    parser.add_argument(
        "--grace-s",
        type=int,
        default=120,
        help="seconds before the time limit to finish a step and write a checkpoint (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the script; notices about it go to stderr."""
    from hftune.launchers.slurm import Job, batch_script

    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(Job)}
    text, notices = batch_script(options.words, Job(**fields))
    for notice in notices:
        print(f"hftune: {notice}", file=sys.stderr)
    print(text, end="")
    return 0
