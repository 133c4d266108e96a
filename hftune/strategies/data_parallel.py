"""Every process holds the whole model: one process, or DDP through Accelerate. Knows no epoch, no metric, no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, takewhile, tee
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, send_to_device
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hftune.batch_plan import MicroBatch, balance, samples_digest, spell_digest
from hftune.distributed.progress import Progress
from hftune.errors import TrainingError
from hftune.strategies.base import LayerSeeds, StepBatch, StepReport, Strategy, seed_forward
from hftune.strategies.gathering import gather_in_slices, host_group
from hftune.strategies.optimizer_state import KNOWN, changed_options, check_optimizer, options_of, plain_state
from hftune.strategies.pipeline_stages import layers_of
from hftune.strategies.statistics import RunningStatistics, freeze, kinds_of, named_buffers, restored_buffers
from hftune.task import Task


class DataParallel(Strategy):
    """Deal the micro-batches of a step to the processes by cost; all-reduce the gradient once, with the last of them."""

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None):
        self.accelerator, self.task, self.progress = accelerator, task, progress or Progress()
        self.process_index, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self._replica, self._num_replicas = self.process_index, self.num_processes
        self._seeds = LayerSeeds(self.device)
        self._exact = torch.float32 if self.device.type == "mps" else torch.float64  # Metal has no float64
        self._micro_losses: list[Tensor] = []
        self._host: dict[str, dict[str, Tensor]] = {}
        self._host_group: Any = False  # made when it is first needed

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._check_optimizer(optimizer)
        if model._compiled_call_impl is None:  # a hook would break the graph of a compiled model at each layer
            self._seeds.watch(layers_of(model))
        self._wrapped, self.optimizer = self._wrap(model, optimizer)
        self.model = self._inner = self.accelerator.unwrap_model(self._wrapped)
        self._checked_gradients = False
        self._statistics = RunningStatistics([], self._exact)
        self._wrapped.train()

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that does not work with this strategy; note its options, to find out later which it changes."""
        check_optimizer(optimizer)
        self._options = options_of(optimizer)

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self.accelerator.prepare(model, optimizer)

    def rehearse(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        """Compute a gradient on all processes and throw it away.

        DDP lays out its all-reduce anew after the first one, and sums are added up in an order that follows the layout: a run
        that goes on in a new process would otherwise differ in the last bits from one that never stopped (watched with 4
        processes and Gloo, torch 2.13).
        """
        if self.num_processes == 1 and not named_buffers(self._inner):
            return self._keep_statistics([], frozen)
        changed = self._compute_in_vain(self._wrapped, dataset, micro_batch.samples)
        places = named_buffers(self._inner)
        return self._keep_statistics([places[name] for name in self.broadcast(changed)], frozen)

    def _keep_statistics(self, places: Sequence[tuple[nn.Module, str]], frozen: bool) -> list[str]:
        """Average these buffers over each step, or freeze their modules; return the classes of the modules."""
        if frozen:
            freeze({module: None for module, _ in places})
        self._statistics = RunningStatistics([] if frozen else places, self._exact)
        return kinds_of(places)

    def _compute_in_vain(self, model: nn.Module, dataset: Any, samples: np.ndarray) -> list[str]:
        """Compute a gradient and forget it; return the names of the buffers that changed meanwhile."""
        (loaded,) = self._loader(dataset, [samples.tolist()], num_workers=0)
        inputs = send_to_device(loaded, self.device)
        with restored_buffers(self._inner) as changed:
            try:
                self.task.loss(model(**self.task.inputs(inputs)), self.task.target(inputs)).backward()
                self._check_gradients()
            finally:
                self.optimizer.zero_grad()
        return [*changed]

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        parameters = [parameter for parameter in self._inner.parameters() if parameter.requires_grad]
        failed = False
        try:
            # The optimizer's moments come with its first step: two of each parameter's size for Adam; three with amsgrad, and
            # to be safe for optimizers that are not hftune's.
            optimizer = self._bare_optimizer()
            most = 2 if type(optimizer) in KNOWN and not optimizer.defaults.get("amsgrad") else 3
            missing = 0 if optimizer.state else most
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
                self.progress.samples(micro_batch.samples)
                batch.batches.append(next(loaded))
            yield batch

    def _deal(self, step: list[MicroBatch]) -> StepBatch:
        if mine := self._share(step):
            return StepBatch(step, mine, [1] * len(mine))
        return StepBatch(step, [stand_in(step)], [0])  # for the all-reduce of the gradient

    def _share(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return those of them that this process computes, by cost."""
        places = balance([micro_batch.cost for micro_batch in micro_batches], self._num_replicas)[self._replica]
        return [micro_batches[place] for place in places]

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        mine = self._share(micro_batches)
        loaded = iter(self._loader(dataset, [micro_batch.samples.tolist() for micro_batch in mine], num_workers))
        with self._evaluating():
            for micro_batch in takewhile(lambda _: not should_stop(), mine):
                self.progress.samples(micro_batch.samples)
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
        own = [*self._counts(batch), stop]
        sums = self._sum(torch.tensor(own, dtype=self._exact, device=self.device))
        items = self._items = sums[0]
        self._micro_losses = self._backward(batch, seed, step, items)
        loss = self._sum(torch.stack(self._micro_losses).sum(dtype=self._exact)) / items
        loss, num_items, num_samples, low, high, stops = torch.cat([loss[None], sums]).tolist()  # the device is waited for once
        if self.num_processes == 1:
            num_items, num_samples, low, high, stops = own  # exact even on a device without float64
        return StepReport(loss, num_items, int(num_samples), spell_digest(low, high), stops > 0)

    def _counts(self, batch: StepBatch) -> list[float]:
        """Return the number of items and samples of this process's part, and the two sums of their digest."""
        counts = [float(self.task.num_items(self.task.target(loaded))) for loaded in batch.batches]
        counted = sum(count * weight for count, weight in zip(counts, batch.weights, strict=True))
        samples = [micro_batch.samples for micro_batch, weight in zip(batch.mine, batch.weights, strict=True) if weight]
        mine = np.concatenate(samples) if samples else np.array([], int)
        return [counted, len(mine), *samples_digest(mine)]

    def _backward(self, batch: StepBatch, seed: int, step: int, items: Tensor) -> list[Tensor]:
        """Accumulate the gradient of the mean loss over ``items``; return the loss of each micro-batch of this process."""
        # DDP and FSDP average the processes' gradients: times num_processes it is their sum, over all items the global mean.
        scale, losses = self.num_processes / items, []
        self._statistics.begin()
        for place, (micro_batch, weight, loaded) in enumerate(zip(batch.mine, batch.weights, batch.batches, strict=True)):
            self.progress.samples(micro_batch.samples)
            self._seeds.begin(seed, step, micro_batch.index)
            inputs = send_to_device(loaded, self.device, non_blocking=True)
            is_last = place == len(batch.mine) - 1
            rest = self._statistics.at_rest(weight == 0)
            with nullcontext() if is_last else self._between(), self._naming_memory(inputs, step), rest:
                with self._statistics.micro_batch(weight * len(micro_batch.samples)):
                    outputs = self._wrapped(**self.task.inputs(inputs))
                loss = self.task.loss(outputs, self.task.target(inputs))
                self.accelerator.backward(loss * (scale * weight).to(loss.dtype))
            losses.append(loss.detach() * weight)
            self._check_gradients()
        self._statistics.finish(self._sum)
        return losses

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
        refuse_unused(without_gradient(self._inner))

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
            group["lr"] = lr * group.get("lr_scale", 1.0)  # see Task.parameter_groups
        self.optimizer.step()
        self.optimizer.zero_grad()
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < 2.0**-14:  # halved at each of 30 skipped steps and more
            raise TrainingError("fp16: the gradient overflows however small the loss is scaled. Use bf16 or no.")

    def forward(self, batch: dict[str, Tensor]) -> Any:
        with torch.no_grad():  # past DDP, whose forward is collective: processes have unequal numbers of batches here
            return self.model(**self.task.inputs(batch))

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        for name, group in self._tensors().items():
            kept = self._host.setdefault(name, {})
            for key, whole in self._gathered(group):
                if key not in kept:
                    kept[key] = torch.empty_like(whole, device="cpu", memory_format=torch.contiguous_format)
                kept[key].copy_(whole)
        plain, values = self._plain_state(), {}
        if not self.is_main:
            return None
        if plain:
            values["optimizer_plain"] = plain
        if any(changed := changed_options(self._bare_optimizer(), self._options)):
            values["optimizer_options"] = changed
        if (scaler := self.accelerator.scaler) is not None:
            scaled = scaler.state_dict()  # of a loss that is multiplied by the number of processes
            values["scaler"] = {**scaled, "scale": scaled["scale"] * self.num_processes}
        return self._host, values

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what this process holds of model and optimizer, live, as ``checkpoint_tensors`` does."""
        return checkpoint_tensors(self._inner, self._bare_optimizer())

    def _plain_state(self) -> dict[str, Any]:
        """Return, on the main process, what the optimizer's state holds beside tensors, for the whole model. Collective."""
        return plain_state(self._bare_optimizer(), {value: name for name, value in self._parameters().items()})

    def _gathered(self, group: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of a group on the main process, one at a time, nothing elsewhere. Collective."""
        for key, value in group.items():
            whole = self._whole(value)
            if self.is_main:
                yield key, whole

    def _whole(self, value: Tensor) -> Tensor:
        """Return all of a tensor of which this process may keep a part. Collective."""
        return value

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def load_state(self, saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None) -> None:
        parameters, own, state = self._parameters(), self._tensors()["model"], self._bare_optimizer().state

        def describe() -> dict[str, Any]:
            """Check what was saved against this model, and say which tensors are to come."""
            tensors, values = saved
            expected = self._expected()
            check_names(tensors["model"], expected)
            if unknown := [key for key in tensors["optimizer"] if key.rpartition("/")[0] not in expected]:
                raise ValueError(f"the optimizer's {unknown[0]} belongs to no parameter")
            listed = {
                name: [(key, value.shape, value.dtype) for key, value in group.items()] for name, group in tensors.items()
            }
            return {**listed, **values}

        expected, groups = self.on_main(describe), self._bare_optimizer().param_groups
        # As in Optimizer.load_state_dict: the counter of steps is on the CPU unless the step is fused or captured.
        on_device = {value for group in groups if group.get("fused") or group.get("capturable") for value in group["params"]}
        for name, shape, dtype in expected["model"]:
            self._receive(own.get(name), saved and saved[0]["model"][name], shape, dtype)
        for key, shape, dtype in expected["optimizer"]:
            name, _, moment = key.rpartition("/")
            parameter, value = parameters.get(name), None
            if parameter is not None and shape == parameter.shape:  # laid out, and dealt to the processes, as the parameter is
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            elif parameter is not None:  # a counter of steps, or rows and columns of a factored moment
                value = torch.empty(shape, dtype=dtype, device=self.device)
            self._receive(value, saved and saved[0]["optimizer"][key], shape, dtype)
            if parameter is not None:
                state[parameter][moment] = value.cpu() if moment == "step" and parameter not in on_device else value
        for key, value in expected.get("optimizer_plain", {}).items():
            name, _, moment = key.rpartition("/")
            if name in parameters:
                state[parameters[name]][moment] = value
        for group, changed in zip(groups, expected.get("optimizer_options", [{}] * len(groups)), strict=True):
            group.update(changed)
        if self.accelerator.scaler is not None and "scaler" in expected:
            values = expected["scaler"]
            self.accelerator.scaler.load_state_dict({**values, "scale": values["scale"] / self.num_processes})

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of which this process holds something, by their names in the whole model."""
        return dict(self._inner.named_parameters())

    def _expected(self) -> Mapping[str, Tensor]:
        """Return the parameters and buffers that a checkpoint of the whole model has, with or without values."""
        return self._tensors()["model"]

    def _receive(self, value: Tensor | None, saved: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        """Put the main process's ``saved``, which is whole, into ``value`` on all that have one."""
        if saved is not None:
            value.copy_(saved)
        if self.num_processes > 1:
            torch.distributed.broadcast(value, src=0)

    def unwrap(self) -> nn.Module:
        return self._inner

    def gather_to_main(self, rows: list, at_once: int = 1000) -> list | None:
        if self.num_processes == 1:
            return rows
        if self._host_group is False:
            self._host_group = host_group()
        return gather_in_slices(rows, self._host_group, at_once, self.progress)

    def any_process(self, flag: bool) -> bool:
        return bool(self._sum(torch.tensor(float(flag), device=self.device)))

    def broadcast(self, value: Any) -> Any:
        return broadcast_object_list([value])[0]


def start_equal(model: nn.Module, device: torch.device) -> None:
    """Give all processes the main one's parameters and buffers, one at a time. Collective."""
    with torch.no_grad():
        for value in chain(model.parameters(), model.buffers()):
            on_device = value.to(device)
            torch.distributed.broadcast(on_device, src=0)
            value.copy_(on_device)


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of the parameters that should have been given a gradient by the last backward, and were not."""
    return [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]


def refuse_unused(names: Sequence[str]) -> None:
    """Raise TrainingError where parameters, given by their names, got no gradient."""
    if names:
        raise TrainingError(
            f"{len(names)} parameters get no gradient: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. "
            "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."
        )


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
