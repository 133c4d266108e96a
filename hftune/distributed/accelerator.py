"""Joins the processes of a job: from a launcher's settings and a recipe to an Accelerator. Independent of task and data."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
)
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin
from accelerate.utils.environment import parse_flag_from_env
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from hftune.config.sections import TrainConfig
from hftune.distributed.devices import agreed_precision
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rendezvous import CONNECT, JOIN, init_method
from hftune.errors import ConfigError


def asks_for_fsdp() -> bool:
    """Say whether the launcher's config has distributed_type: FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def on_cpu() -> bool:
    """Say whether to compute on the CPU: no GPU is there, or the launcher was told not to use it."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def start_accelerator(train: TrainConfig) -> Accelerator:
    """Join the other processes of the job.

    Raises:
        ConfigError: the number of processes that joined is not what the launcher announced, or FSDP is not available.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # a notebook may train twice, with a different precision
    set_numerics(train)
    process = ProcessInfo.from_environment()
    expected = process.world_size
    is_elastic = process.round is not None and process.agent_has_store and on_cpu()
    group = InitProcessGroupKwargs(init_method=init_method(), timeout=CONNECT if is_elastic else JOIN)
    state = PartialState(cpu=on_cpu(), **group.to_kwargs())
    if is_elastic and torch.distributed.is_initialized():
        _get_default_store().set_timeout(JOIN)
        _set_pg_timeout(JOIN)
    if asks_for_fsdp() and state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate 1.15 knows FSDP on GPUs only, and silently makes plain DDP of it on CPUs: AcceleratorState.__init__ has
        # a list of types. FSDP itself works over Gloo. Remove this once that list has MULTI_CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        cpu=on_cpu(),
        mixed_precision=agreed_precision(train.mixed_precision, state.device),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # The backward multiplies by the number of processes (see DataParallel): fp16 overflows at the same loss on all.
            GradScalerKwargs(init_scale=2.0**16 / expected),
            group,
        ],
        fsdp_plugin=fsdp_plugin(),
        # The recipe decides these two. If they were left out, an environment variable of the launcher would.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        step_scheduler_with_optimizer=False,
    )
    is_last = process.round is not None and expected == 1  # of an elastic job, with nothing to shard over
    if asks_for_fsdp() and accelerator.distributed_type != DistributedType.FSDP and not is_last:
        raise ConfigError(
            f"The launcher asks for FSDP, but Accelerate chose {accelerator.distributed_type.value}: nothing would be sharded. "
            "Start the processes with accelerate launch --config_file accelerate_configs/fsdp.yaml."
        )
    if accelerator.num_processes != expected:
        raise ConfigError(
            f"The launcher announced {expected} processes, but {accelerator.num_processes} joined. On machines without "
            "GPUs, start them with accelerate_configs/2cpu.yaml or torchrun."
        )
    return accelerator


def set_numerics(config: TrainConfig) -> None:
    """Set how GPUs compute, before CUDA starts; what the recipe has as false is turned off, whatever torch's default is.

    For ``deterministic``, attention needs nothing else: torch's flash and memory-efficient kernels have deterministic backward
    passes, which this selects, and cuDNN's attention is then not used (torch 2.13).
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made


@contextmanager
def explained_determinism() -> Iterator[None]:
    """Turn the error of an operation that ``deterministic`` forbids into one that names the setting.

    Raises:
        ConfigError: it has no deterministic implementation on this device.
    """
    try:
        yield
    except RuntimeError as error:
        operation, is_forbidden, _ = str(error).partition(" does not have a deterministic implementation")
        if not is_forbidden:
            raise
        raise ConfigError(
            f"train.deterministic=true: the model needs {operation}, which has no implementation that gives the same "
            "bits every time. Set train.deterministic=false."
        ) from error


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """Return the launcher's FSDP settings, except those that the recipe decides; None if it does not ask for FSDP."""
    if not asks_for_fsdp():
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy  # a second of imports that other runs need not wait for

    return FullyShardedDataParallelPlugin(
        mixed_precision_policy=MixedPrecisionPolicy(),  # autocast does it, as under DDP: see FullySharded
        cpu_ram_efficient_loading=False,  # the launcher's default is true; FullySharded sends the main process's weights
    )


def leave_group() -> None:
    """Close the process group at the interpreter's end: if it is left open, Gloo may abort and NCCL complains.

    Not at the end of ``train``, which may be called again.
    """
    if torch.distributed.is_initialized():
        gc.collect()  # DDP's reducers, in cycles with their modules, also hold the group
        torch.distributed.destroy_process_group()
