"""Every process holds the whole model: one process, or DDP through Accelerate. Knows no epoch, no metric, no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import tee
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, send_to_device
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hftune.batch_plan import MicroBatch, balance, samples_digest, spell_digest
from hftune.errors import TrainingError
from hftune.progress import Progress
from hftune.strategies.base import StepBatch, StepReport, Strategy, seed_forward
from hftune.task import Task


class DataParallel(Strategy):
    """Deal the micro-batches of a step to the processes by cost; all-reduce the gradient once, with the last of them."""

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None):
        self.accelerator, self.task, self.progress = accelerator, task, progress or Progress()
        self.process_index, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self._exact = torch.float32 if self.device.type == "mps" else torch.float64  # Metal has no float64
        self._micro_losses: list[Tensor] = []
        self._host: dict[str, dict[str, Tensor]] = {}

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model = self._inner = self.accelerator.unwrap_model(self._wrapped)
        self._checked_gradients = False
        self._wrapped.train()

    def rehearse(self, dataset: Any, micro_batch: MicroBatch) -> None:
        """Compute a gradient on all processes and throw it away.

        DDP lays out its all-reduce anew after the first one, and sums are added up in an order that follows the layout: a run
        that goes on in a new process would otherwise differ in the last bits from one that never stopped (watched with 4
        processes and Gloo, torch 2.13).
        """
        if self.num_processes == 1:
            return
        self._compute_in_vain(self._wrapped, dataset, micro_batch.samples)

    def _compute_in_vain(self, model: nn.Module, dataset: Any, samples: np.ndarray) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in self._inner.buffers()]
        (loaded,) = self._loader(dataset, [samples.tolist()], num_workers=0)
        inputs = send_to_device(loaded, self.device)
        try:
            self.task.loss(model(**self.task.inputs(inputs)), self.task.target(inputs)).backward()
            self._check_gradients()
        finally:
            self.optimizer.zero_grad()
            for buffer, before in buffers:  # running statistics
                buffer.copy_(before)

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        parameters = [parameter for parameter in self._inner.parameters() if parameter.requires_grad]
        failed = False
        try:
            # The optimizer's moments come with its first step; Adam has two of each parameter's size, others at most one.
            missing = 0 if self._bare_optimizer().state else 2
            moments = [torch.empty_like(value) for value in parameters for _ in range(missing)]
            self._compute_in_vain(self._inner, dataset, samples)  # past DDP, whose forward is collective
            del moments
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not should_reduce_batch_size(error):
                raise
            failed = True
        clear_device_cache(garbage_collection=True)
        return not self.any_process(failed)

    def batches(
        self, dataset: Any, steps: Sequence[list[MicroBatch]], first_step: int, num_workers: int
    ) -> Iterator[StepBatch]:
        # The loader runs ahead of the steps where it has workers.
        dealt, ahead = tee(self._deal(steps[index]) for index in range(first_step, len(steps)))
        samples = (micro_batch.samples.tolist() for batch in ahead for micro_batch in batch.mine)
        loaded = iter(self._loader(dataset, samples, num_workers))
        for batch in dealt:
            for micro_batch in batch.mine:
                self.progress.on(micro_batch.samples)
                batch.batches.append(next(loaded))
            yield batch

    def _deal(self, step: list[MicroBatch]) -> StepBatch:
        places = balance([micro_batch.cost for micro_batch in step], self.num_processes)[self.process_index]
        if places:
            return StepBatch(step, [step[place] for place in places], [1] * len(places))
        return StepBatch(step, [stand_in(step)], [0])  # for the all-reduce of the gradient

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        places = balance([micro_batch.cost for micro_batch in micro_batches], self.num_processes)[self.process_index]
        mine = [micro_batches[place] for place in places]
        loaded = iter(self._loader(dataset, [micro_batch.samples.tolist() for micro_batch in mine], num_workers))
        with self._evaluating():
            for micro_batch in mine:
                self.progress.on(micro_batch.samples)
                batch = send_to_device(next(loaded), self.device, non_blocking=True)
                seed_forward(0, 0, micro_batch.index, self.device)
                yield micro_batch, batch

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Have ``model`` in evaluation mode and the same on all processes."""
        self._share_statistics()
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def _share_statistics(self) -> None:
        """Give all processes the main one's running statistics, which are also those that are exported."""
        if self.num_processes > 1:
            for buffer in self._inner.buffers():
                if buffer.is_floating_point():
                    torch.distributed.broadcast(buffer, src=0)

    def _loader(self, dataset: Any, samples: Any, num_workers: int) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=samples,
            collate_fn=self.task.collate,
            num_workers=num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def forward_backward(self, batch: StepBatch, seed: int, step: int, stop: bool = False) -> StepReport:
        counts = [float(self.task.num_items(self.task.target(loaded))) for loaded in batch.batches]
        counted = sum(count * weight for count, weight in zip(counts, batch.weights, strict=True))
        samples = [micro_batch.samples for micro_batch, weight in zip(batch.mine, batch.weights, strict=True) if weight]
        mine = np.concatenate(samples) if samples else np.array([], int)
        own = [counted, len(mine), *samples_digest(mine), stop]
        sums = self._sum(torch.tensor(own, dtype=self._exact, device=self.device))
        items = self._items = sums[0]
        # DDP and FSDP average the processes' gradients: times num_processes it is their sum, over all items the global mean.
        scale = self.num_processes / items
        self._micro_losses = []
        for place, (micro_batch, weight, loaded) in enumerate(zip(batch.mine, batch.weights, batch.batches, strict=True)):
            self.progress.on(micro_batch.samples)
            seed_forward(seed, step, micro_batch.index, self.device)
            inputs = send_to_device(loaded, self.device, non_blocking=True)
            is_last = place == len(batch.mine) - 1
            with nullcontext() if is_last else self._between(), self._naming_memory(inputs, step):
                loss = self.task.loss(self._wrapped(**self.task.inputs(inputs)), self.task.target(inputs))
                self.accelerator.backward(loss * (scale * weight).to(loss.dtype))
            self._micro_losses.append(loss.detach() * weight)
            self._check_gradients()
        loss = self._sum(torch.stack(self._micro_losses).sum(dtype=self._exact)) / items
        loss, _, num_samples, low, high, stops = torch.cat([loss[None], sums]).tolist()  # the device is waited for once
        if self.num_processes == 1:
            _, num_samples, low, high, stops = own  # exact even on a device without float64
        return StepReport(loss, int(num_samples), spell_digest(low, high), stops > 0)

    def _between(self) -> AbstractContextManager:
        """Return the context of all micro-batches but a step's last one: nothing is sent."""
        return self.accelerator.no_sync(self._wrapped)

    @contextmanager
    def _naming_memory(self, inputs: dict[str, Tensor], step: int) -> Iterator[None]:
        """Turn an error of memory into one that says what it was too much for."""
        try:
            yield
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not should_reduce_batch_size(error):
                raise
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items() if value.ndim > 1)
            raise TrainingError(
                f"Out of memory in step {step + 1} on process {self.process_index}, in a micro-batch of {shapes}. "
                "Lower train.micro_batch_size or train.micro_batch_tokens: the steps stay the same. "
                "train.micro_batch_size=auto finds what fits; train.gradient_checkpointing=true and "
                "train.mixed_precision=bf16 need less memory, too."
            ) from error

    def _check_gradients(self) -> None:
        """After the first backward: refuse parameters without a gradient. DDP would wait for them, and reduce nothing."""
        if self._checked_gradients:
            return
        self._checked_gradients = True
        if unused := without_gradient(self._inner):
            raise TrainingError(
                f"{len(unused)} parameters get no gradient: {', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}. "
                "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."
            )

    def _sum(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, reduction="sum")

    def not_finite(self, batch: StepBatch) -> list[str]:
        if self._items == 0:
            return ["task.num_items is 0 for all its samples"]
        culprits = [
            f"process {self.process_index}: samples {micro_batch.samples.tolist()}"
            for micro_batch, loss in zip(batch.mine, self._micro_losses, strict=True)
            if not torch.isfinite(loss)
        ]
        return self.broadcast(self.gather_to_main(culprits))

    def clip_grad_norm(self, max_norm: float | None) -> float:
        norm = self.accelerator.clip_grad_norm_(self._wrapped.parameters(), float("inf") if max_norm is None else max_norm)
        return self._whole(norm).item()

    def optimizer_step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < 2.0**-14:  # halved at each of 30 skipped steps and more
            raise TrainingError("fp16: the gradient overflows however small the loss is scaled. Use bf16 or no.")

    def forward(self, batch: dict[str, Tensor]) -> Any:
        with torch.no_grad():  # past DDP, whose forward is collective: processes have unequal numbers of batches here
            return self.model(**self.task.inputs(batch))

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        for name, group in checkpoint_tensors(self._inner, self._bare_optimizer()).items():
            kept = self._host.setdefault(name, {})
            for key, value in group.items():
                whole = self._whole(value)
                if self.is_main:
                    if key not in kept:
                        kept[key] = torch.empty_like(whole, device="cpu", memory_format=torch.contiguous_format)
                    kept[key].copy_(whole)
        if not self.is_main:
            return None
        scaler = self.accelerator.scaler
        if scaler is None:
            return self._host, {}
        values = scaler.state_dict()  # of a loss that is multiplied by the number of processes
        return self._host, {"scaler": {**values, "scale": values["scale"] * self.num_processes}}

    def _whole(self, value: Tensor) -> Tensor:
        """Return all of a tensor of which this process may keep a part. Collective."""
        return value

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def load_state(self, saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None) -> None:
        model, optimizer = self._inner, self._bare_optimizer()
        parameters, own = dict(model.named_parameters()), checkpoint_tensors(model, optimizer)["model"]

        def describe() -> dict[str, Any]:
            """Check what was saved against this model, and say which tensors are to come."""
            tensors, values = saved
            check_names(tensors["model"], own)
            optimizer_s = [(key, tuple(value.shape), value.dtype) for key, value in tensors["optimizer"].items()]
            if unknown := [key for key, *_ in optimizer_s if key.rpartition("/")[0] not in parameters]:
                raise ValueError(f"the optimizer's {unknown[0]} belongs to no parameter")
            return {"optimizer": optimizer_s, **values}

        expected = self.on_main(describe)
        for name, value in own.items():
            self._receive(value, saved and saved[0]["model"][name])
        for key, shape, dtype in expected["optimizer"]:
            name, _, moment = key.rpartition("/")
            parameter = parameters[name]
            if shape == tuple(parameter.shape):  # laid out, and dealt to the processes, as the parameter is
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:  # the counter of steps, which fused optimizers, as ours are, want beside the parameter
                value = torch.empty(shape, dtype=dtype, device=self.device)
            self._receive(value, saved and saved[0]["optimizer"][key])
            optimizer.state[parameter][moment] = value
        if self.accelerator.scaler is not None and "scaler" in expected:
            values = expected["scaler"]
            self.accelerator.scaler.load_state_dict({**values, "scale": values["scale"] / self.num_processes})

    def _receive(self, value: Tensor, saved: Tensor | None) -> None:
        """Put the main process's ``saved``, which is whole, into ``value`` on all."""
        if saved is not None:
            value.copy_(saved)
        if self.num_processes > 1:
            torch.distributed.broadcast(value, src=0)

    def unwrap(self) -> nn.Module:
        return self._inner

    def gather_to_main(self, rows: list) -> list | None:
        if self.num_processes == 1:
            return rows
        parts: list | None = [None] * self.num_processes if self.is_main else None
        torch.distributed.gather_object(rows, parts)
        return [row for part in parts for row in part] if parts is not None else None

    def any_process(self, flag: bool) -> bool:
        return bool(self._sum(torch.tensor(float(flag), device=self.device)))

    def broadcast(self, value: Any) -> Any:
        return broadcast_object_list([value])[0]


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of the parameters that should have been given a gradient by the last backward, and were not."""
    return [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]


def checkpoint_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return what a checkpoint holds, live, by group and name. Shared parameters have one name, the first."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    moments = {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    detached = {name: parameter.detach() for parameter, name in names.items()}
    return {"model": detached | buffers, "optimizer": moments}


def stand_in(step: list[MicroBatch]) -> MicroBatch:
    """Return the shortest sample of a step as a micro-batch that costs next to nothing and is not to be counted."""
    cheapest = step[-1]
    return MicroBatch(cheapest.index, cheapest.samples[-1:], 0)


def check_names(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare the names and shapes of saved tensors with those that are to take their values.

    Raises:
        ValueError: naming the first that is missing, too many, or of another shape.
    """
    for name in sorted({*found, *expected}):
        if name not in found:
            raise ValueError(f"it has no {name}")
        if name not in expected:
            raise ValueError(f"it has {name}, which this model lacks")
        shapes = [tuple(tensors[name].shape) for tensors in (found, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} is {shapes[0]} there and {shapes[1]} here")
