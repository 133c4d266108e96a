"""Trains several recipes one after the other in one process group: starting processes costs more than the small runs."""

import json
import sys
from pathlib import Path

from hftune import Recipe, train


def main() -> None:
    for source, overrides in json.loads(Path(sys.argv[1]).read_text()):
        train(Recipe.load(source, *overrides))


if __name__ == "__main__":
    main()
