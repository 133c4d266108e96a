"""What this process can learn about the launcher that started it. Knows no training.

How many processes `accelerate launch` was asked for is not in the environment: `accelerate launch --cpu --num_processes 2`
starts ONE and says nothing, and so it does for distributed_type MULTI_CPU and NO (huggingface/accelerate#2741). But in these
cases, as in all others, the launcher is the parent process, and its command line still says what was asked.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import psutil

from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

LAUNCHERS = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
"""The words that start it, the first as a program in some folder or after ``python -m``."""


def check_num_processes() -> None:
    """Refuse to train on fewer or more processes than the launcher was asked for, or with another batch.

    Not noticed: a launcher with a shell script or another program between itself and this process.

    Raises:
        ConfigError: naming what was asked for, and what to use instead.
    """
    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # it has ended, or this user may not look
        return
    options, started = launch_options(command), ProcessInfo.from_environment().world_size
    if options is None:
        return
    if (options.gradient_accumulation_steps or 1) > 1:  # which hands it on to DeepSpeed only
        raise ConfigError(
            f"accelerate launch was asked for --gradient_accumulation_steps {options.gradient_accumulation_steps}, and the "
            "recipe decides that: train.batch_size is the global batch, train.micro_batch_size what a process computes at once."
        )
    asked = options.num_processes or None
    if asked is None or asked == started:
        return
    if started == 1:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started only this one: with --cpu, without --multi_gpu, or "
            "with distributed_type NO or MULTI_CPU it does so whatever num_processes says. Use --config_file "
            f"accelerate_configs/2cpu.yaml --num_processes {asked}, or torchrun --nproc_per_node {asked}."
        )
    raise ConfigError(
        f"accelerate launch was asked for {asked} processes, and {started} were started: num_processes counts those of all "
        "machines, and has to be a multiple of num_machines."
    )


def launch_options(command: Sequence[str]) -> Namespace | None:
    """Return what a command line asks of `accelerate launch`; None if it is another command.

    ``num_processes`` counts those on all machines; it is falsy if that is left to the launcher. Read with accelerate's own
    parser, as the options may be spelled in several ways and default to a file.
    """
    words = [Path(word).name for word in command[:5]]
    ends = [i + len(name) for name in LAUNCHERS for i in range(len(words)) if words[i : i + len(name)] == name]
    if not ends:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(list(command[min(ends) :]))
    if options.num_processes is None and (options.config_file or (Path(default_config_file).is_file() and not options.cpu)):
        options.num_processes = load_config_from_file(options.config_file).num_processes
    return options
