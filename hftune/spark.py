"""``hftune.spark.launch(recipe, num_processes=2)``: train on the executors of a Spark cluster, or on the driver's machine.

python -m hftune.spark recipe=yelp [section.key=value ...] [--num-processes 2] [--local] [--use-gpu] [--master URL]
"""

from __future__ import annotations

import argparse
import sys

from hftune.config import Recipe
from hftune.distributed.failure_report import exit_code
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError

# What Spark pickles must not belong to __main__, which executors do not have: it is all in this other module.
from hftune.launchers.spark import check_installed, launch, session

__all__ = ["launch", "main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code, as ``hftune.run``."""
    options, words = parser().parse_known_args(argv)
    try:
        recipe = Recipe.from_argv(words)
        recipe.validate()
        check_installed()
        session(options.master or ("local[1]" if options.local else None))
        launch(recipe, options.num_processes, options.local, options.use_gpu)
    except (ConfigError, DataError, TrainingError, Interrupted) as error:
        print(f"hftune: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; the words it does not know are the recipe's."""
    root = argparse.ArgumentParser(
        prog="python -m hftune.spark", usage="%(prog)s recipe=NAME [section.key=value ...] [options]", allow_abbrev=False
    )
    root.add_argument(
        "--num-processes", type=int, default=2, help="number of Spark tasks that train together (default %(default)s)"
    )
    root.add_argument("--local", action="store_true", help="start the processes on the driver's machine, not on executors")
    root.add_argument("--use-gpu", action="store_true", help="one GPU per process")
    root.add_argument("--master", help="address of the cluster, such as spark://host:7077 (default: as Spark is configured)")
    return root


if __name__ == "__main__":
    sys.exit(main())
