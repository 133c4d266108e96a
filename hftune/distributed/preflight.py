"""What this process can learn about the launcher that started it. Knows no training.

How many processes `accelerate launch` was asked for is not in the environment: `accelerate launch --cpu --num_processes 2`
starts ONE and says nothing, and so it does for distributed_type MULTI_CPU and NO (huggingface/accelerate#2741). But in these
cases, as in all others, the launcher is the parent process, and its command line still says what was asked.
"""

from __future__ import annotations

import os
import re
import socket
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import psutil

from hftune.errors import ConfigError

LAUNCHERS = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
"""The words that start it, the first as a program in some folder or after ``python -m``."""


RANKS = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
FLAGS = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    *("ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"),
)
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
"""What accelerate reads as a truth value."""
SIBLINGS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "an MPI launcher": "PMI_SIZE"}
"""By what started it: the variable with the number of processes of which this one is, if it set no WORLD_SIZE."""


def number(name: str) -> int:
    """Return one of RANKS from the environment: if it is not set or no number, that of a process alone."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else int(name.endswith("SIZE"))


def check_environment() -> None:
    """Refuse variables that no launcher sets like this, before anything relies on them.

    Raises:
        ConfigError: naming the variable, and what to do.
    """
    for name in RANKS:
        if (value := os.environ.get(name)) is not None and not value.isdecimal():
            raise ConfigError(
                f"{name}={value!r} in the environment is not a whole number. Launchers such as torchrun set it; to train in "
                "one process, unset it."
            )
    for name in FLAGS:
        if (value := os.environ.get(name)) is not None and value.lower() not in (*TRUE, *FALSE):
            raise ConfigError(f"{name}={value} in the environment is neither true nor false.")
    _check_siblings()
    if (size := number("WORLD_SIZE")) <= 1:
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment says that this is one of {size} processes, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start all with accelerate launch or torchrun --nproc_per_node N; "
            "to train in one process, unset WORLD_SIZE."
        )
    if (rank := number("RANK")) >= size:
        raise ConfigError(f"RANK={rank} in the environment must be below WORLD_SIZE={size}: ranks count from 0.")


def _check_siblings() -> None:
    """Refuse to be one of several processes that do not know of each other, or raise ConfigError."""
    if "WORLD_SIZE" in os.environ:
        return
    for starter, name in SIBLINGS.items():
        if (count := os.environ.get(name, "")).isdecimal() and int(count) > 1:
            how = (
                "`hftune slurm` writes a script for it; or start one launcher on each node: srun --ntasks-per-node=1 torchrun."
                if starter == "srun"
                else "Start them with torchrun --nproc_per_node N, or accelerate launch."
            )
            raise ConfigError(
                f"{starter} has started {count} processes ({name}={count}), and none knows of the others: each would train "
                f"alone. {how} To train alone on purpose, set WORLD_SIZE=1."
            )


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
    options, started = launch_options(command), number("WORLD_SIZE")
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


def launcher() -> str | None:
    """Name the launcher of this process: the same each time that it restarts its group, and no other launcher's; None if none.

    TORCHELASTIC_RESTART_COUNT cannot say whether this is the first attempt: each torchrun agent counts only its own failures,
    and restarts its processes uncounted if those of another machine failed. But an agent keeps one log folder for all attempts.
    """
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return None
    logs = re.fullmatch(r"(.+)/attempt_\d+/\d+/error\.json", os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    try:
        parent = psutil.Process().parent()
        own = logs[1] if logs else f"{parent.pid} since {parent.create_time()}"
    except (psutil.Error, AttributeError):  # it has ended, or this user may not look
        return None
    return f"{socket.gethostname()} {run_id} {own}"
