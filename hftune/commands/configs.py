"""``hftune configs``: list, print or copy the shipped launch configurations."""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.config.shipped_files import config_names, config_path, copy_config
from hftune.errors import ConfigError
from hftune.tracking.console import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="configuration to print, such as 4gpu (default: list all)")
    parser.add_argument(
        "--copy", nargs="?", const=Path(), type=Path, metavar="PATH", help="file to copy it to (default ./NAME.yaml)"
    )
    parser.add_argument("--force", action="store_true", help="let --copy overwrite an existing file")


def run(options: argparse.Namespace) -> int:
    """List the configurations, print one, or copy one."""
    if options.name is None:
        if options.copy is not None:
            raise ConfigError(f"--copy needs the name of a launch configuration: {', '.join(config_names())}.")
        lines = {name: config_path(name).read_text(encoding="utf-8").partition("\n")[0] for name in config_names()}
        print(table({name: line.removeprefix("# ") for name, line in lines.items()}))
    elif options.copy is None:
        print(config_path(options.name).read_text(encoding="utf-8"), end="")
    else:
        target = copy_config(options.name, options.copy, options.force)
        print(f"Edit {target}, then: accelerate launch --config_file {target} -m hftune.run recipe=NAME")
    return 0
