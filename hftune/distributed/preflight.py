"""Refuses what a launcher asks for and this machine or hftune cannot do, before anything is loaded. Independent of data.

How many processes `accelerate launch` was asked for is not in the environment: `accelerate launch --cpu --num_processes 2`
starts ONE and says nothing, and so it does for distributed_type MULTI_CPU and NO (huggingface/accelerate#2741). But in these
cases, as in all others, the launcher is the parent process, and its command line still says what was asked.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from accelerate.utils.environment import parse_flag_from_env

from hftune.config import Recipe
from hftune.config.sections import UNSHARDED, TrainConfig
from hftune.distributed.accelerator import asks_for_fsdp, on_cpu
from hftune.distributed.network import check_interfaces, choose_interface, stay_on_this_machine
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rounds import present_round
from hftune.errors import ConfigError, format_value

LAUNCHERS = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
"""The words that start it; the first is a program in some folder or follows ``python -m``."""


def check_launcher(recipe: Recipe) -> None:
    """Reject what the launcher asks for and hftune does not support, before anything is loaded.

    Raises:
        ConfigError: DeepSpeed, Megatron-LM or a parallelism_config; FSDP version 1, or what does not work under FSDP; options
            that contradict the recipe.
    """
    for name, variable in (("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"), ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM")):
        if parse_flag_from_env(variable):
            raise ConfigError(
                f"The launcher asks for {name}, which is not supported. Use FSDP, which shards weights, gradients and "
                "optimizer state over the processes: accelerate launch --config_file accelerate_configs/fsdp.yaml."
            )
    check_options(recipe.train)
    if recipe.parallel.pipeline_stages > 1:
        check_parallel(recipe, ProcessInfo.from_environment().world_size)
    check_context(recipe, ProcessInfo.from_environment().world_size)
    if asks_for_fsdp():
        _check_fsdp(recipe)
    elif recipe.train.fsdp_gather != "float32":
        raise ConfigError(
            f"train.fsdp_gather={recipe.train.fsdp_gather} needs FSDP, which the launcher does not ask for. Launch with "
            "accelerate_configs/fsdp.yaml, or set train.fsdp_gather=float32."
        )
    elif recipe.parallel.replicas > 1:
        raise ConfigError(
            f"parallel.replicas={recipe.parallel.replicas} needs FSDP, which the launcher does not ask for. Launch with "
            "accelerate_configs/fsdp.yaml, or set parallel.replicas=1: without FSDP each process is a replica."
        )


def check_context(recipe: Recipe, world_size: int) -> None:
    """Reject what does not work where several processes compute a micro-batch together.

    Raises:
        ConfigError: naming it.
    """
    context, train = recipe.parallel.context, recipe.train
    if context == 1 or world_size == 1:
        return
    if world_size % context:
        raise ConfigError(f"parallel.context={context} does not divide the number of processes, {world_size}.")
    wrong = {
        f"parallel.pipeline_stages={recipe.parallel.pipeline_stages}": recipe.parallel.pipeline_stages > 1,
        f"train.packing={train.packing}": train.packing != "auto",
        "train.compile=true": train.compile,
    }
    if found := next((key for key, is_so in wrong.items() if is_so), None):
        raise ConfigError(f"parallel.context={context} does not work with {found}. Leave out one of them.")
    if asks_auto := auto_key(train):
        raise ConfigError(
            f"{asks_auto}=auto does not work with parallel.context={context}: a process that runs out of memory would leave "
            "the others waiting in its layers. Set a number, such as train.micro_batch_size=1, or train.micro_batch_tokens."
        )


def _check_fsdp(recipe: Recipe) -> None:
    """Reject what does not work under FSDP, or raise ConfigError."""
    if recipe.task.needs_whole == "always":
        raise ConfigError(
            f"FSDP does not work with {type(recipe.task).__name__}, whose models it cannot shard. Launch without it: each "
            "process has the whole model."
        )
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(
            f"The launcher asks for FSDP version {version}, and hftune supports version 2. "
            "Set fsdp_version: 2 in its config, as accelerate_configs/fsdp.yaml does."
        )
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise ConfigError("The launcher's fsdp_offload_params: true is not supported. Set it to false.")
    if parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"):
        raise ConfigError(
            "The launcher's fsdp_activation_checkpointing: true would draw different dropout masks when it recomputes. "
            "Set it to false, and train.gradient_checkpointing=true in the recipe."
        )
    if on_cpu() and torch.accelerator.is_available():  # torch would shard the weights over the GPUs all the same
        raise ConfigError(
            "FSDP on the CPUs of a machine with GPUs works only if the GPUs are hidden: set CUDA_VISIBLE_DEVICES=''."
        )
    replicas, world_size = recipe.parallel.replicas, ProcessInfo.from_environment().world_size
    if world_size > 1 and world_size % replicas:  # the last process of an elastic job trains alone
        raise ConfigError(
            f"parallel.replicas={replicas} does not divide the number of processes, {world_size}. Set it to the number of "
            "machines, or to 1."
        )
    if recipe.adapter.quantize is not None:
        raise ConfigError(
            f"adapter.quantize={recipe.adapter.quantize} does not work under FSDP, which cannot shard weights of 4 bits. "
            "Launch without FSDP, or leave it out: adapter.base_dtype=bf16 takes half the memory of float32."
        )
    if reason := UNSHARDED.get(recipe.train.optimizer):
        raise ConfigError(
            f"train.optimizer={recipe.train.optimizer} does not work under FSDP: it {reason}. Train without FSDP, or choose "
            "adamw, muon, lion or schedule_free."
        )
    if asks_auto := auto_key(recipe.train):
        raise ConfigError(
            f"{asks_auto}=auto does not work under FSDP: a process that runs out of memory would leave the others "
            "waiting for its shard of the weights. Set a number, such as train.micro_batch_size=4, or train.micro_batch_tokens."
        )


def auto_key(train: TrainConfig) -> str | None:
    """Return the key that asks for micro-batches as large as fit, if there is one."""
    names = [name for name in ("micro_batch_size", "micro_batch_tokens") if getattr(train, name) == "auto"]
    return f"train.{names[0]}" if names else None


def check_options(train: TrainConfig) -> None:
    """Reject options of the launcher that contradict the recipe, which decides: they would be silently ignored.

    `accelerate launch` always sets a precision and a backend. "no" is its default and contradicts nothing.

    Raises:
        ConfigError: naming the recipe's key.
    """
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ConfigError(
            "The launcher's parallelism_config is not supported. Remove it from the launcher's config. For a pipeline, set "
            "parallel.pipeline_stages=2 in the recipe; to shard the model, use accelerate_configs/fsdp.yaml."
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
    """Reject a pipeline on a number of processes that it does not divide, and what does not work in one.

    Raises:
        ConfigError: with what to set instead.
    """
    stages, train = recipe.parallel.pipeline_stages, recipe.train
    asked, one = f"parallel.pipeline_stages={stages}", "parallel.pipeline_stages=1"
    if asks_for_fsdp():
        raise ConfigError(
            f"{asked} does not work under FSDP: both split the model. Use accelerate_configs/4gpu.yaml, or {one}."
        )
    if asks_auto := auto_key(train):
        raise ConfigError(
            f"{asks_auto}=auto does not work with {asked}: stages need different amounts of memory. Set a number, "
            "such as train.micro_batch_size=4; hftune plan shows what each stage needs."
        )
    if train.mixed_precision == "fp16":
        raise ConfigError(
            f"train.mixed_precision=fp16 does not work with {asked}: each process has its own loss scale. Use bf16 or no."
        )
    if train.compile:
        raise ConfigError(f"train.compile=true does not work with {asked}. Set it to false.")
    if recipe.parallel.schedule == "zero_bubble" and torch.__version__ < "2.13":
        raise ConfigError(
            f"parallel.schedule=zero_bubble needs torch 2.13 or newer, not {torch.__version__}, which computes wrong gradients "
            "of weights that a stage uses twice. Set parallel.schedule=1f1b or interleaved."
        )
    if num_processes % stages:
        fitting = ", ".join(str(count) for count in range(1, num_processes + 1) if num_processes % count == 0)
        were = "1 process that was" if num_processes == 1 else f"{num_processes} processes that were"
        raise ConfigError(
            f"{asked} does not divide the {were} started. Start {stages} or a multiple of it, or set "
            f"parallel.pipeline_stages to one of {fitting}."
        )


def check_hardware(recipe: Recipe) -> None:
    """Reject what this machine cannot compute.

    Raises:
        ConfigError: fp16 without a GPU, bf16 on a GPU that does not support it; or what ``check_launch`` rejects.
    """
    precision = recipe.train.mixed_precision
    if precision == "fp16" and on_cpu():
        raise ConfigError("train.mixed_precision=fp16 needs a GPU, and this runs on CPUs. Use bf16 or no.")
    check_launch()
    on_cuda = torch.cuda.is_available() and not on_cpu()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"train.mixed_precision=bf16 is not supported by {torch.cuda.get_device_name()}. Use fp16 or no.")


def check_launch() -> None:
    """Reject what the launcher asks of this machine and cannot have; point the backends at the right network.

    Raises:
        ConfigError: the launcher started a different number of processes than asked for, there is no such network interface
            or no route to the main machine, or there are more processes than GPUs.
    """
    check_num_processes()
    process = ProcessInfo.from_environment()
    if process.world_size > 1:
        check_interfaces()
        if process.local_world_size is not None:  # else nobody says where the others are
            is_one_machine = process.local_world_size >= process.world_size
            stay_on_this_machine() if is_one_machine else choose_interface(process.main_address)
    asked, here = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return
    if asked not in ("", "-1") and here == 0 and not torch.accelerator.is_available():
        built = "finds none: is the driver running, and are these their numbers (nvidia-smi)?"
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={asked} asks for GPUs, but PyTorch {torch.__version__} "
            f"{built if torch.version.cuda else 'was built without CUDA: install the build for GPUs.'} "
            "ACCELERATE_USE_CPU=true trains on CPUs."
        )
    started = process.local_world_size or 1
    if 0 < here < started:
        raise ConfigError(
            f"{started} processes were started on {process.host}, which has {here} GPU{'s' if here > 1 else ''}. "
            "Set num_processes, which counts all machines, to one per GPU."
        )


def check_writable(folder: Path) -> None:
    """Raise ConfigError if the output folder cannot be written, or files in it cannot be appended to, as logs are.

    The folder is not created, as the run may still be rejected: its nearest existing parent is tested instead.
    """
    probe = folder
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        probe = existing / f".probe-{os.getpid()}"
        with probe.open("w") as file:
            file.write("a new file\n")
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be written: {error.strerror}. Set output_dir=... to a different folder."
        ) from error
    try:
        with probe.open("a") as file:
            file.write("and one more line\n")
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} accepts new files, but not appending to one: {error.strerror}. Mounted object storage "
            "behaves like that. Set output_dir=... to a folder on a disk, and copy it afterwards."
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def check_num_processes() -> None:
    """Refuse to train on fewer or more processes than the launcher was asked for, or with a different batch.

    Does not notice a launcher that starts this process through a shell script or another program.

    Raises:
        ConfigError: with what was asked for, and what to use instead.
    """
    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # it has ended, or this user may not look
        return
    options, started = launch_options(command), ProcessInfo.from_environment().world_size
    if options is None:
        return
    if (options.gradient_accumulation_steps or 1) > 1:  # which only DeepSpeed would get
        raise ConfigError(
            f"accelerate launch was asked for --gradient_accumulation_steps {options.gradient_accumulation_steps}, but the "
            "recipe decides that: train.batch_size is the global batch, train.micro_batch_size what a process computes at once."
        )
    asked = options.num_processes or None
    if asked is None or asked == started or (present_round() is not None and started < asked):
        return  # an elastic job may be smaller than the most that was asked for
    if started == 1:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started only one: with --cpu, without --multi_gpu, or "
            "with distributed_type NO or MULTI_CPU it does so whatever num_processes says. Use --config_file "
            f"accelerate_configs/2cpu.yaml --num_processes {asked}, or torchrun --nproc_per_node {asked}."
        )
    raise ConfigError(
        f"accelerate launch was asked for {asked} processes and started {started}: num_processes counts those of all machines, "
        "and has to be a multiple of num_machines."
    )


def launch_options(command: Sequence[str]) -> Namespace | None:
    """Return the options of an `accelerate launch` command line; None for any other command.

    ``num_processes`` counts those on all machines; it is falsy if the launcher decides. Parsed with accelerate's own
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
