"""``hftune vocab``: train the vocabulary of a Chinese model."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="corpus: .txt with one text per line, or .json, .jsonl, .csv, .parquet"
    )
    parser.add_argument(
        "--columns", nargs="+", default=["content", "title"], help="columns that hold the texts (default content title)"
    )
    parser.add_argument("--size", type=int, default=40_000, help="maximum number of tokens (default %(default)s)")
    parser.add_argument("--output", required=True, type=Path, help="folder to write it to, the value for task.vocabulary")


def run(options: argparse.Namespace) -> int:
    """Write a vocabulary, and print how well it fits the corpus."""
    from hftune.data.files import check_corpus

    check_corpus(options.files)
    from hftune.data.vocabulary import write_vocabulary  # takes seconds to import: only once the files are known to be there
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    fit = write_vocabulary(options.files, options.columns, options.size, options.output)
    print(
        f"{options.output}: {fit['tokens']:,} tokens, {fit['characters_per_token']:.2f} characters per token, "
        f"{fit['unknown_share']:.2%} unknown.\n"
        f"Train with it: recipe=bigbird task.model=null task.vocabulary={options.output} task.model_config={{hidden_size: ...}}"
    )
    return 0
