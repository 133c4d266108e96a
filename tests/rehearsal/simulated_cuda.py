"""Makes a PyTorch that was built for CPUs believe that it has NVIDIA GPUs: builds simulated_cuda.cpp and stands in for torch.cuda.

Call ``install`` before anything asks for GPUs. ``watch`` is told of each wait of the host; ``notes`` and ``launches`` count.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

SOURCE = Path(__file__).with_suffix(".cpp")
NAME, CAPABILITY, NUM_BYTES = "NVIDIA H200", (9, 0), 139 * 2**30
native: Any = None
"""The extension; see its last lines."""
_kernels = None
"""torch forgets kernels of a library that nobody holds."""


class CannotBuild(Exception):
    """There is no C++ compiler, or it is too old; or this PyTorch has real GPUs."""


def build() -> Path:
    """Compile the extension, once for each version of its source and of torch, and return its file.

    Raises:
        CannotBuild: naming what was tried.
    """
    if torch.version.cuda or torch.version.hip:
        raise CannotBuild("this PyTorch is built for GPUs; the simulated ones need the build for CPUs")
    from torch.utils.cpp_extension import include_paths, library_paths

    text = SOURCE.read_bytes() + f"{torch.__version__} {sys.version_info[:2]}".encode()
    path = Path(__file__).parents[2] / ".cache" / "simulated_cuda" / hashlib.sha256(text).hexdigest()[:16] / "simulated_cuda.so"
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise CannotBuild(f"no C++ compiler was found: {compiler or 'c++, g++ or clang++'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    python = importlib.import_module("sysconfig").get_paths()["include"]
    options = [
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    options += ["-DTORCH_EXTENSION_NAME=simulated_cuda", *(f"-I{folder}" for folder in (*include_paths(), python))]
    libraries = [*(f"-L{folder}" for folder in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run([compiler, *options, str(SOURCE), "-o", str(made), *libraries], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{compiler} could not compile {SOURCE.name}:\n{done.stderr[-2000:]}")
    made.replace(path)
    return path


def install() -> None:
    """Let torch have simulated GPUs; ``set_device_count`` says how many, at first one."""
    global native
    spec = importlib.util.spec_from_file_location("simulated_cuda", build())
    native = importlib.util.module_from_spec(spec)
    with quiet_stderr():  # torch warns that kernels are replaced
        spec.loader.exec_module(native)
    stand_in_for_torch_cuda()
    add_attention_kernels()
    add_nccl()


def set_device_count(count: int) -> None:
    native.set_device_count(count)
    torch.cuda.default_generators = tuple(map(native.default_generator, range(count)))


def watch(function: Callable[[str, str, int], None] | None) -> None:
    """Call a function with kind (wait, copy, race or collective), what, and bytes of each event; None: no longer."""
    native.watch(function)


def notes() -> dict[str, int]:
    """Return how often each event happened."""
    return native.notes()


def launches() -> dict[str, int]:
    """Return how often each kernel was launched."""
    return native.launches()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept), os.close(null)


# torch.cuda, which is Python over functions that a build for CPUs does not have


def index_of(device: Any = None) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return native.current_device() if index is None or index < 0 else index


def named(device: Any = None) -> torch.device:
    return torch.device("cuda", index_of(device))


class Event:
    def __new__(cls, enable_timing: bool = False, **kwargs: Any) -> Any:
        return torch.Event(device="cuda", enable_timing=True)  # elapsed_time takes no subclass


class Stream:
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        return torch.Stream(device=named(device), priority=priority)


class CurrentDevice:
    def __init__(self, device: Any):
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = native.current_device()
        native.set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        native.set_device(self.before)


class CurrentStream:
    def __init__(self, stream: Any):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        **{"name": NAME, "major": CAPABILITY[0], "minor": CAPABILITY[1], "total_memory": NUM_BYTES, "warp_size": 32},
        **{"multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536},
        **{"is_integrated": False, "is_multi_gpu_board": False, "gcnArchName": "", "uuid": f"GPU-{index_of(device)}"},
        **{"shared_memory_per_block_optin": 232448, "L2_cache_size": 62914560},
    )


def memory_stats(device: Any = None) -> dict[str, int]:
    now, peak, count = native.memory(index_of(device))
    both = {
        f"{kind}_bytes.all.{name}": value
        for kind in ("allocated", "reserved")
        for name, value in (("current", now), ("peak", peak))
    }
    return {**both, "allocation.all.allocated": count, "num_alloc_retries": 0}


def refuse(*args: Any, **kwargs: Any) -> None:
    raise ModuleNotFoundError("pynvml")


def stand_in_for_torch_cuda() -> None:
    cuda, generator = torch.cuda, lambda device=None: native.default_generator(index_of(device))

    def each(change: Callable[[Any], Any]) -> None:
        for own in cuda.default_generators:
            change(own)

    memory = {
        "memory_stats": memory_stats,
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: native.memory(index_of(device))[0]),
        **dict.fromkeys(
            ("max_memory_allocated", "max_memory_reserved"), lambda device=None: native.memory(index_of(device))[1]
        ),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: (NUM_BYTES - native.memory(index_of(device))[0], NUM_BYTES),
        "empty_cache": lambda: None,
    }
    random = {
        "manual_seed": lambda seed: generator().manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: each(lambda own: own.manual_seed(int(seed))),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "initial_seed": lambda: generator().initial_seed(),
    }
    streams = {"Event": Event, "Stream": Stream}
    rest = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index_of(device)),
        "device": CurrentDevice,
        **dict.fromkeys(("init", "_lazy_init", "ipc_collect"), lambda: None),
        "_lazy_call": lambda function, **kwargs: function(),
        "_is_in_bad_fork": lambda: False,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: native.wait("torch.cuda.synchronize"),
        **dict.fromkeys(
            ("current_stream", "default_stream"), lambda device=None: torch.accelerator.current_stream(named(device))
        ),
        "set_stream": torch.accelerator.set_stream,
        **dict.fromkeys(("stream", "StreamContext"), CurrentStream),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state_all": lambda: [own.get_state() for own in cuda.default_generators],
        **dict.fromkeys(("utilization", "power_draw", "temperature"), refuse),
    }
    nccl = importlib.import_module("torch.cuda.nccl")
    replaced = {
        cuda: {**memory, **random, **streams, **rest},
        cuda.memory: memory,
        cuda.random: random,
        cuda.streams: streams,
        cuda.graphs: {"is_current_stream_capturing": lambda: False},
        nccl: {"version": lambda: (2, 29, 7)},
        torch.backends.cuda: {"is_built": lambda: True},
        torch.accelerator: {"empty_cache": lambda: None},
        torch._C: {"_cuda_getCurrentRawStream": lambda index: 0, "_cuda_getArchFlags": lambda: "sm_90"},
    }
    for owner, functions in replaced.items():
        for name, function in functions.items():
            setattr(owner, name, function)
    set_device_count(1)
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return original(self, size)
        with CurrentDevice(self.device):
            native.resize_bytes(self, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_
    begin = torch.profiler.profile.__init__

    def without_kernels(self: Any, *, activities: Any = None, **options: Any) -> None:  # there are none to be traced
        begin(self, activities=[torch.profiler.ProfilerActivity.CPU], **options)

    torch.profiler.profile.__init__ = without_kernels


def add_nccl() -> None:
    """Let "nccl" be Gloo with NCCL's rules."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return native.make_nccl(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)

    dist.Backend.register_backend("simulatednccl", create, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = "simulatednccl"
    originals = {name: getattr(c10d, name) for name in ("init_process_group", "new_group", "get_backend")}

    def renamed(backend: Any) -> Any:
        return backend if backend is None or "simulated" in str(backend) else str(backend).replace("nccl", "simulatednccl")

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return originals["init_process_group"](renamed(backend), *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return originals["new_group"](*args, **{**kwargs, "backend": renamed(kwargs.get("backend"))})

    def get_backend(*args: Any, **kwargs: Any) -> str:
        return str(originals["get_backend"](*args, **kwargs)).replace("simulated", "")

    for function in (init_process_group, new_group, get_backend):
        for module in (c10d, dist):
            setattr(module, function.__name__, function)
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True


# Kernels that only GPUs have, computed text by text in float32: right, not fast.
# Shapes: N tokens of all texts, t and s of the queries and keys of one, H heads, d width of a head.


@contextlib.contextmanager
def one_kernel(name: str) -> Iterator[None]:
    """Count what is computed within as the launch of one kernel, and no waits."""
    native.quiet(1)
    try:
        yield
    finally:
        native.quiet(-1)
        native.note_launch(name)


class Varlen:
    """Attention of texts of unequal length, as flash and memory-efficient attention of torch are asked for it.

    Args:
        sides: how many tokens to the left and to the right a query sees; None or -1: all. ``causal`` counts from the last key.
        seed: of dropout.
    """

    def __init__(
        self,
        q: Tensor,
        cum_q: Tensor,
        cum_k: Tensor,
        p: float,
        causal: bool,
        scale: float | None,
        seed: int,
        *sides: int | None,
    ):
        self.starts_q, self.starts_k = cum_q.tolist(), cum_k.tolist()
        self.p, self.seed, self.scale = p, seed, q.shape[-1] ** -0.5 if scale is None else scale
        left, right = (None if side is None or side < 0 else side for side in (*sides, None, None)[:2])
        self.left, self.right = left, 0 if causal else right

    def texts(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, tuple[Tensor, ...]]]:
        """Yield, for each text, its queries and keys, then q, k, v (H, t, d), attention (H, t, s) and what dropout leaves."""
        repeats = q.shape[1] // k.shape[1]
        for number, (start, end) in enumerate(zip(self.starts_q, self.starts_q[1:], strict=False)):
            rows, columns = slice(start, end), slice(self.starts_k[number], self.starts_k[number + 1])
            qi, ki, vi = q[rows], k[columns].repeat_interleave(repeats, 1), v[columns].repeat_interleave(repeats, 1)
            qi, ki, vi = (part.transpose(0, 1).float() for part in (qi, ki, vi))
            t, s = qi.shape[1], ki.shape[1]
            distance = torch.arange(s, device=q.device) - torch.arange(s - t, s, device=q.device)[:, None]
            hidden = torch.zeros(t, s, dtype=torch.bool, device=q.device)
            if self.left is not None:
                hidden |= distance < -self.left
            if self.right is not None:
                hidden |= distance > self.right
            attention = (qi @ ki.mT * self.scale).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
            kept = torch.ones(())
            if self.p:
                generator = torch.Generator().manual_seed(self.seed * 1000003 + number)
                kept = (torch.rand(attention.shape, generator=generator) >= self.p).float() / (1 - self.p)
            yield rows, columns, (qi, ki, vi, attention, kept.to(q.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for rows, _, (_, _, vi, attention, kept) in self.texts(q, k, v):
            out[rows] = (attention * kept @ vi).transpose(0, 1).to(q.dtype)
        return out

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(part) for part in (q, k, v)]
        for rows, columns, (qi, ki, vi, attention, kept) in self.texts(q, k, v):
            gi = grad[rows].transpose(0, 1).float()
            of_attention = (gi @ vi.mT) * kept
            of_scores = attention * (of_attention - (of_attention * attention).sum(-1, keepdim=True)) * self.scale
            found[0][rows] = (of_scores @ ki).transpose(0, 1).to(q.dtype)
            for total, value in ((found[1], of_scores.mT @ qi), (found[2], (attention * kept).mT @ gi)):
                total[columns] = value.transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)
        return tuple(found)


def add_attention_kernels() -> None:
    global _kernels

    def drawn(p: float) -> int:
        return (
            int(torch.randint(2**31, (), generator=native.default_generator(native.current_device()), device="cuda"))
            if p
            else 0
        )

    def nothing(like: Tensor) -> Tensor:
        return torch.empty(0, device=like.device)

    def flash_forward(
        q,
        k,
        v,
        cum_q,
        cum_k,
        max_q,
        max_k,
        p,
        causal,
        debug,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
        **rest,
    ):
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if q.shape[-1] % 8 or q.shape[-1] > 256 or cum_q is None:
            raise RuntimeError("head_size should be a multiple of 8 and at most 256")
        with one_kernel("flash attention"):
            seed = drawn(p)
            out = Varlen(q, cum_q, cum_k, p, causal, scale, seed, window_size_left, window_size_right).forward(q, k, v)
            lse = torch.zeros(q.shape[-2], q.shape[0], device=q.device)
            return out, lse, torch.tensor(seed, device=q.device), nothing(q), nothing(q)

    def flash_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        p,
        causal,
        state,
        unused,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
    ):
        with one_kernel("flash attention backward"):
            return Varlen(q, cum_q, cum_k, p, causal, scale, int(state), window_size_left, window_size_right).backward(
                grad, q, k, v
            )

    def efficient_forward(
        q, k, v, bias, cum_q, cum_k, max_q, max_k, p, mask_type, needs_lse=False, *, scale=None, seqlen_k=None, window_size=None
    ):
        if mask_type == 1 or bias is not None or cum_q is None:
            raise RuntimeError("simulated: neither a bias nor causal from the top left")
        with one_kernel("memory-efficient attention"):
            seed = drawn(p)
            out = Varlen(q, cum_q, cum_k, p, mask_type > 0, scale, seed).forward(q[0], k[0], v[0])
            lse = torch.zeros(len(cum_q) - 1, q.shape[2], max_q, device=q.device)
        return out[None], lse, torch.tensor(seed), torch.tensor(0), max_q, max_k

    def efficient_backward(
        grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, p, seed, offset, mask_type, bias_grad, *, scale=None, **rest
    ):
        with one_kernel("memory-efficient attention backward"):
            found = Varlen(q, cum_q, cum_k, p, mask_type > 0, scale, int(seed)).backward(grad[0], q[0], k[0], v[0])
            return (*(part[None] for part in found), nothing(grad))

    _kernels = torch.library.Library("aten", "IMPL", "CUDA")
    _kernels.impl("_flash_attention_forward", flash_forward)
    _kernels.impl("_flash_attention_backward", flash_backward)
    _kernels.impl("_efficient_attention_forward", efficient_forward)
    _kernels.impl("_efficient_attention_backward", efficient_backward)
