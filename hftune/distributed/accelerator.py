"""From what a launcher asks for to an Accelerator: refuses what this machine or hftune cannot do. Knows no task and no data."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

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

from hftune.config import Recipe
from hftune.config.sections import TrainConfig
from hftune.distributed.network import check_interfaces, choose_interface, stay_on_this_machine
from hftune.distributed.preflight import check_num_processes
from hftune.distributed.rendezvous import init_method
from hftune.errors import ConfigError, format_value


def check_launcher(recipe: Recipe) -> None:
    """Refuse what the launcher asks for and hftune does not do, before anything is loaded.

    Raises:
        ConfigError: DeepSpeed, Megatron-LM or a parallelism_config; version 1 of FSDP, or what does not work under it; what
            ``check_options`` refuses.
    """
    for name, variable in (("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"), ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM")):
        if parse_flag_from_env(variable):
            raise ConfigError(
                f"The launcher asks for {name}, which hftune does not have. Use FSDP, which deals weights, gradients and "
                "optimizer out to the processes: accelerate launch --config_file accelerate_configs/fsdp.yaml."
            )
    check_options(recipe.train)
    if recipe.parallel.pipeline_stages > 1:
        check_parallel(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    if not asks_for_fsdp():
        return
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(
            f"The launcher asks for version {version} of FSDP, and hftune has version 2. "
            "Set fsdp_version: 2 in its config, as accelerate_configs/fsdp.yaml does."
        )
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise ConfigError("The launcher's fsdp_offload_params: true is not supported. Set it to false.")
    if parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"):
        raise ConfigError(
            "The launcher's fsdp_activation_checkpointing: true would draw another dropout when it computes anew. "
            "Set it to false, and train.gradient_checkpointing=true in the recipe."
        )
    if on_cpu() and torch.accelerator.is_available():  # torch would deal the weights out to the GPUs all the same
        raise ConfigError("FSDP on the CPUs of a machine with GPUs needs these hidden, such as by CUDA_VISIBLE_DEVICES=''.")
    if recipe.train.micro_batch_size == "auto":
        raise ConfigError(
            "train.micro_batch_size=auto does not work under FSDP: a process that runs out of memory would leave the others "
            "waiting for its part of the weights. Set a number, such as train.micro_batch_size=4, or train.micro_batch_tokens."
        )


def check_options(train: TrainConfig) -> None:
    """Refuse options of the launcher that contradict the recipe, which decides: they would be ignored without a word.

    `accelerate launch` always sets a precision and a backend. "no" is what it sets by itself, and contradicts nothing.

    Raises:
        ConfigError: naming the recipe's key.
    """
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ConfigError(
            "The launcher's parallelism_config is not supported. Pipelines are the recipe's, parallel.pipeline_stages=2; to "
            "shard the model use accelerate_configs/fsdp.yaml. Take it out of the launcher's config."
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", train.mixed_precision):
        set_it = f"Set train.mixed_precision={precision}, or" if precision in ("bf16", "fp16") else "Set"
        raise ConfigError(
            f"The launcher asks for mixed_precision {precision}, and the recipe for train.mixed_precision="
            f"{train.mixed_precision}. The recipe decides. {set_it} mixed_precision: 'no' in the launcher's config."
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in ("no", "inductor" if train.compile else "no"):
        instead = (
            "train.compile=true compiles with inductor."
            if train.compile
            else "Set train.compile=true, which compiles with inductor."
        )
        raise ConfigError(
            f"The launcher asks for dynamo_backend {backend}, and the recipe for train.compile={format_value(train.compile)}. "
            f"The recipe decides. {instead} Set dynamo_backend: 'no' in the launcher's config."
        )


def check_parallel(recipe: Recipe, num_processes: int) -> None:
    """Refuse a pipeline on a number of processes that it does not divide, and what does not work in one.

    Raises:
        ConfigError: saying what to set instead.
    """
    stages, train = recipe.parallel.pipeline_stages, recipe.train
    asked, one = f"parallel.pipeline_stages={stages}", "parallel.pipeline_stages=1"
    if asks_for_fsdp():
        raise ConfigError(
            f"{asked} does not work under FSDP: both deal the model out. Use accelerate_configs/4gpu.yaml, or {one}."
        )
    if train.micro_batch_size == "auto":
        raise ConfigError(
            f"train.micro_batch_size=auto does not work with {asked}: stages need unequal memory. Set a number, such as "
            "train.micro_batch_size=4; hftune plan says what each stage needs."
        )
    if train.mixed_precision == "fp16":
        raise ConfigError(
            f"train.mixed_precision=fp16 does not work with {asked}: its loss scale is one process's. Use bf16 or no."
        )
    if train.compile:
        raise ConfigError(f"train.compile=true does not work with {asked}. Set it to false.")
    if num_processes % stages:
        fitting = ", ".join(str(count) for count in range(1, num_processes + 1) if num_processes % count == 0)
        were = "1 process that was" if num_processes == 1 else f"{num_processes} processes that were"
        raise ConfigError(
            f"{asked} does not divide the {were} started. Start {stages}, or a multiple of it; or set "
            f"parallel.pipeline_stages to one of {fitting}."
        )


def asks_for_fsdp() -> bool:
    """Say whether the launcher's config has distributed_type: FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_hardware(recipe: Recipe) -> None:
    """Refuse what cannot be computed here.

    Raises:
        ConfigError: fp16 without a GPU, bf16 on a GPU without it; or what ``check_launch`` refuses.
    """
    precision = recipe.train.mixed_precision
    if precision == "fp16" and on_cpu():
        raise ConfigError("train.mixed_precision=fp16 needs a GPU, and this runs on CPUs. Use bf16 or no.")
    check_launch()
    on_cuda = torch.cuda.is_available() and not on_cpu()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"train.mixed_precision=bf16 is not supported by {torch.cuda.get_device_name()}. Use fp16 or no.")


def check_launch() -> None:
    """Refuse what the launcher asks of this machine and cannot have; point the backends at the right network.

    Raises:
        ConfigError: another number of processes than it was asked for, no such network interface, no way to the main
            machine, more processes than GPUs.
    """
    check_num_processes()
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1:
        check_interfaces()
    if num_processes > int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)):
        choose_interface(os.environ["MASTER_ADDR"])
    elif num_processes > 1 and "LOCAL_WORLD_SIZE" in os.environ:  # else nobody says that all are on this machine
        stay_on_this_machine()
    check_gpus()


def check_gpus() -> None:
    """Refuse more processes than GPUs, and GPUs that were asked for and are not there, or raise ConfigError."""
    asked, here = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return
    if asked not in ("", "-1") and here == 0 and not torch.accelerator.is_available():
        built = "finds none: is the driver running, and are these their numbers (nvidia-smi)?"
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={asked} asks for GPUs, and PyTorch {torch.__version__} "
            f"{built if torch.version.cuda else 'was built without CUDA: install the build for GPUs.'} "
            "ACCELERATE_USE_CPU=true trains on CPUs."
        )
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < here < started:
        raise ConfigError(
            f"{started} processes were started on {socket.gethostname()}, which has {here} GPU{'s' if here > 1 else ''}. "
            "Set num_processes (over all machines) to one a GPU."
        )


def on_cpu() -> bool:
    """Say whether to compute on the CPU: no GPU is there, or the launcher was told not to use it."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def check_writable(folder: Path) -> None:
    """Try to create a file in the output folder, and to append to it, as logs are written. Raise ConfigError if it fails.

    The folder is not created, as the run may yet be refused: its nearest parent is tried in its place.
    """
    probe = folder
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        probe = existing / f".probe-{os.getpid()}"
        with probe.open("w") as file:
            file.write("a new file\n")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}. Set output_dir=... to another.") from error
    try:
        with probe.open("a") as file:
            file.write("and one more line\n")
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} takes new files, but no lines at the end of one: {error.strerror}. Folders that are object "
            "storage in disguise refuse that. Set output_dir=... to a folder on a disk, and copy it afterwards."
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def start_accelerator(train: TrainConfig) -> Accelerator:
    """Join the other processes of the job.

    Raises:
        ConfigError: another number of processes joined than the launcher announced, or they cannot do FSDP as it asks.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # a notebook may train twice, with another precision
    set_float32(train)
    set_deterministic(train)
    expected = int(os.environ.get("WORLD_SIZE", 1))
    # One machine may still download what another has. The default, 10 minutes under NCCL, is short for that.
    group = InitProcessGroupKwargs(init_method=init_method(), timeout=timedelta(hours=1))
    state = PartialState(cpu=on_cpu(), **group.to_kwargs())
    if asks_for_fsdp() and state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate 1.15 knows FSDP on GPUs only, and makes plain DDP of it on CPUs, without a word: AcceleratorState.__init__
        # looks at a list of kinds. FSDP itself works over Gloo. Needless once that list has MULTI_CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        cpu=on_cpu(),
        mixed_precision=train.mixed_precision,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # The backward multiplies by the number of processes (see DataParallel): fp16 overflows at the same loss on all.
            GradScalerKwargs(init_scale=2.0**16 / expected),
            group,
        ],
        fsdp_plugin=fsdp_plugin(),
        # The recipe decides these two. Left out, an environment variable of the launcher would.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        step_scheduler_with_optimizer=False,
    )
    if asks_for_fsdp() and accelerator.distributed_type != DistributedType.FSDP:
        raise ConfigError(
            f"FSDP is asked for, and Accelerate came up with {accelerator.distributed_type.value}: nothing would be sharded. "
            "Start the processes with accelerate launch --config_file accelerate_configs/fsdp.yaml."
        )
    if accelerator.num_processes != expected:
        raise ConfigError(
            f"The launcher announced {expected} processes, but {accelerator.num_processes} joined. On machines without "
            "GPUs start them with accelerate_configs/2cpu.yaml or torchrun."
        )
    return accelerator


def set_float32(config: TrainConfig) -> None:
    """Choose how GPUs compute float32, and convolutions at all; what is false is turned off, whatever torch's default is."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def set_deterministic(config: TrainConfig) -> None:
    """Choose whether GPUs may only use algorithms that give the same bits each time; before CUDA starts.

    Attention needs nothing more: torch's flash and memory-efficient kernels have deterministic backward passes, which this
    chooses, and cuDNN's is left out (torch 2.13).
    """
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """Return the launcher's settings of FSDP, but for those that the recipe decides; None where it does not ask for FSDP."""
    if not asks_for_fsdp():
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy  # with its imports, a second that others need not wait

    return FullyShardedDataParallelPlugin(
        mixed_precision_policy=MixedPrecisionPolicy(),  # autocast does it, as under DDP: see FullySharded
        cpu_ram_efficient_loading=False,  # the launcher's default is true; FullySharded sends the main process's weights
    )


def leave_group() -> None:
    """Close the process group at the interpreter's end: Gloo may abort, and NCCL complains, where it is left open.

    Not at the end of ``train``, which may be called again.
    """
    gc.collect()  # DDP's reducers, in cycles with their modules, hold the group, too
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
