"""Every process holds the whole model: one process, or DDP through Accelerate. Knows no epoch, no metric, no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import tee
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hftune.batch_plan import MicroBatch, balance
from hftune.errors import TrainingError
from hftune.progress import Progress
from hftune.strategies.base import StepBatch, Strategy, seed_forward
from hftune.task import Task


class DataParallel(Strategy):
    """Deal the micro-batches of a step to the processes by cost; all-reduce the gradient once, with the last of them."""

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None):
        self.accelerator, self.task, self.progress = accelerator, task, progress or Progress()
        self.process_index, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self._exact = torch.float32 if self.device.type == "mps" else torch.float64  # Metal has no float64
        self._micro_losses: list[Tensor] = []

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self._whole_model = self.accelerator.unwrap_model(self.model)
        self._checked_gradients = False
        self.model.train()

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
            return StepBatch(step, [step[place] for place in places], [])
        cheapest = step[-1]
        return StepBatch(step, [MicroBatch(cheapest.index, cheapest.samples[-1:], 0)], [], weight=0)

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        places = balance([micro_batch.cost for micro_batch in micro_batches], self.num_processes)[self.process_index]
        mine = [micro_batches[place] for place in places]
        loaded = iter(self._loader(dataset, [micro_batch.samples.tolist() for micro_batch in mine], num_workers))
        self._share_statistics()
        self._whole_model.eval()
        try:
            for micro_batch in mine:
                self.progress.on(micro_batch.samples)
                batch = send_to_device(next(loaded), self.device, non_blocking=True)
                seed_forward(0, 0, micro_batch.index, self.device)
                yield micro_batch, batch
        finally:
            self._whole_model.train()

    def _share_statistics(self) -> None:
        """Give all processes the main one's running statistics, which are also those that are exported."""
        if self.num_processes > 1:
            for buffer in self._whole_model.buffers():
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

    def forward_backward(self, batch: StepBatch, seed: int, step: int) -> float:
        counted = sum(float(self.task.num_items(self.task.target(loaded))) for loaded in batch.batches)
        items = self._items = self._sum(torch.tensor(counted * batch.weight, dtype=self._exact, device=self.device))
        # DDP averages the processes' gradients: times num_processes it is their sum, over all items the global mean.
        scale = batch.weight * self.num_processes / items
        self._micro_losses = []
        for place, (micro_batch, loaded) in enumerate(zip(batch.mine, batch.batches, strict=True)):
            self.progress.on(micro_batch.samples)
            seed_forward(seed, step, micro_batch.index, self.device)
            inputs = send_to_device(loaded, self.device, non_blocking=True)
            is_last = place == len(batch.mine) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self.task.loss(self.model(**self.task.inputs(inputs)), self.task.target(inputs))
                self.accelerator.backward(loss * scale.to(loss.dtype))
            self._micro_losses.append(loss.detach() * batch.weight)
            self._check_gradients()
        return (self._sum(torch.stack(self._micro_losses).sum(dtype=self._exact)) / items).item()

    def _check_gradients(self) -> None:
        """After the first backward: refuse parameters without a gradient. DDP would wait for them, and reduce nothing."""
        if self._checked_gradients:
            return
        self._checked_gradients = True
        unused = [name for name, value in self._whole_model.named_parameters() if value.requires_grad and value.grad is None]
        if unused:
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
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), float("inf") if max_norm is None else max_norm)
        return norm.item()

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
            return self._whole_model(**self.task.inputs(batch))

    def unwrap(self) -> nn.Module:
        return self._whole_model

    def gather_to_main(self, rows: list) -> list | None:
        if self.num_processes == 1:
            return rows
        parts: list | None = [None] * self.num_processes if self.is_main else None
        torch.distributed.gather_object(rows, parts)
        return [row for part in parts for row in part] if parts is not None else None

    def broadcast(self, value: Any) -> Any:
        return broadcast_object_list([value])[0]
