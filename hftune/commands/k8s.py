"""``hftune k8s``: print the manifest that trains a recipe on a Kubernetes cluster."""

from __future__ import annotations

import argparse

from hftune.commands.arguments import add_job, add_recipe, write_job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``hftune.launchers.manifests.PodJob`` is made of, under the names of its fields."""
    add_recipe(parser)
    parser.add_argument("--image", required=True, help="image with hftune, such as one of its Dockerfile")
    parser.add_argument(
        "--kind",
        choices=("job", "jobset", "trainjob"),
        default="job",
        help="Job, JobSet, or Kubeflow's TrainJob with its runtime (default %(default)s)",
    )
    add_job(parser)
    parser.add_argument("--queue", help="local queue of Kueue that the job waits in")
    parser.add_argument(
        "--claim", default="outputs", help="PersistentVolumeClaim for output_dir, if that is no address (default %(default)s)"
    )
    parser.add_argument("--memory", help="memory of a pod, such as 64Gi")


def run(options: argparse.Namespace) -> int:
    """Print the manifest, or write it; notices about it go to stderr."""
    from hftune.launchers.manifests import PodJob, manifest

    return write_job(options, PodJob, manifest)
