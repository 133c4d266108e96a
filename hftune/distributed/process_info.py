"""Which process this is, as its launcher says: the only reader of RANK, WORLD_SIZE, MASTER_ADDR and TORCHELASTIC_*."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

import psutil

from hftune.distributed.rounds import present_round
from hftune.errors import ConfigError

RANKS = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
FLAGS = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    *("ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"),
)
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
"""The spellings of a boolean that accelerate accepts."""
SIBLINGS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "an MPI launcher": "PMI_SIZE"}
"""For each launcher that sets no WORLD_SIZE: the variable with the number of processes it started."""


@dataclass(frozen=True)
class ProcessInfo:
    """This process among the others."""

    rank: int = 0
    """From 0; process 0 is the main process, which alone prints and writes."""
    world_size: int = 1
    """Processes of the job, on all nodes."""
    local_rank: int = 0
    """From 0 on each node."""
    local_world_size: int | None = None
    """Processes on this node; None if the launcher does not say."""
    host: str = ""
    num_nodes: int = 1
    has_agent: bool = False
    """A torchrun agent started the process, as it does for accelerate launch: the processes of a node share its process ids."""
    main_address: str | None = None
    """Host of the launcher's store."""
    main_port: int | None = None
    agent_has_store: bool = False
    """The launcher itself holds the store, so the store exists before there is a process group."""
    may_restart: bool = False
    """The launcher restarts the group after a failure."""
    run_id: str | None = None
    """torchrun's name for the job; None without torchrun."""
    error_file: str | None = None
    """Where torchrun expects the reason of a failure."""
    round: int | None = None
    """Of an elastic job, whose machines come and go: 0 for the first set of them, equal on all. None: it is not elastic."""

    @classmethod
    def from_environment(cls) -> ProcessInfo:
        """Read what accelerate launch, torchrun and TorchDistributor set; without a launcher, a process alone."""
        return cls(
            rank=_number("RANK", 0),
            world_size=_number("WORLD_SIZE", 1),
            local_rank=_number("LOCAL_RANK", 0),
            local_world_size=_number("LOCAL_WORLD_SIZE", 0) or None,
            host=socket.gethostname(),
            num_nodes=_number("GROUP_WORLD_SIZE", 1),
            has_agent="GROUP_RANK" in os.environ,
            main_address=os.environ.get("MASTER_ADDR"),
            main_port=_number("MASTER_PORT", 0) or None,
            agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            may_restart=os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
            run_id=os.environ.get("TORCHELASTIC_RUN_ID"),
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
            round=present_round(),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.rank == 0

    @property
    def node_ranks(self) -> range:
        """The ranks on this node."""
        first = self.rank - self.local_rank
        return range(first, first + max(self.local_world_size or 1, self.local_rank + 1))

    @property
    def store_address(self) -> str:
        """Host and port of the launcher's store."""
        return f"{self.main_address}:{self.main_port}"

    @property
    def name(self) -> str:
        """The process as messages name it."""
        return f"Process {self.rank} (host {self.host}, pid {os.getpid()})"


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def check_environment() -> None:
    """Reject variables that no launcher sets like this, before anything relies on them.

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
    for starter, name in SIBLINGS.items() if "WORLD_SIZE" not in os.environ else ():
        if (count := os.environ.get(name, "")).isdecimal() and int(count) > 1:
            how = (
                "`hftune slurm` writes a script for it; or start one launcher on each node: srun --ntasks-per-node=1 torchrun."
                if starter == "srun"
                else "Start them with torchrun --nproc_per_node N, or accelerate launch."
            )
            raise ConfigError(
                f"{starter} started {count} processes ({name}={count}) that are not connected: each would train alone. {how} "
                "To train in separate processes on purpose, set WORLD_SIZE=1."
            )
    if (size := _number("WORLD_SIZE", 1)) <= 1:
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment says that this is one of {size} processes, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start all with accelerate launch or torchrun --nproc_per_node N; "
            "to train in one process, unset WORLD_SIZE."
        )
    if (rank := _number("RANK", 0)) >= size:
        raise ConfigError(f"RANK={rank} in the environment must be below WORLD_SIZE={size}: ranks count from 0.")


def launcher() -> str | None:
    """Identify this process's launcher across restarts of its group, unlike any other launcher; None without torchrun.

    TORCHELASTIC_RESTART_COUNT cannot say whether this is the first attempt: each torchrun agent counts only its own failures,
    and does not count the restarts that failures on other machines cause. But an agent keeps one log folder for all attempts.
    """
    process = ProcessInfo.from_environment()
    if process.run_id is None:
        return None
    logs = re.fullmatch(r"(.+)/attempt_\d+/\d+/error\.json", process.error_file or "")
    try:
        parent = psutil.Process().parent()
        agent = logs[1] if logs else f"{parent.pid} since {parent.create_time()}"
    except (psutil.Error, AttributeError):  # it has ended, or this user may not look
        return None
    return f"{process.host} {process.run_id} {agent}"
