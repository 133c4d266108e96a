"""``python -m hftune.elastic.newcomer WORDS``: what a machine does before it asks to be let into a job that runs.

The machines that train stop for a newcomer, and wait until its processes are as far as theirs. So everything that a process
does by itself is done once here, and kept in caches: downloads, and preparing the data. What fails here disturbs nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hftune.build import build
from hftune.config import Recipe
from hftune.distributed.consistency import data_digests
from hftune.distributed.progress import Progress
from hftune.distributed.signals import follow_launcher
from hftune.errors import ConfigError, DataError


def main(words: Sequence[str]) -> int:
    """Load data and model of a recipe; return an exit code as ``hftune.run`` does."""
    follow_launcher()
    try:
        recipe = Recipe.from_argv(list(words))
        recipe.validate()
        data_digests(recipe.task, build(recipe, Progress()).datasets)
    except (ConfigError, DataError) as error:
        print(f"hftune: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
