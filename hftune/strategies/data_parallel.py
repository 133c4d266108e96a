"""Every process computes complete micro-batches: one process, or DDP through Accelerate. Independent of epochs and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hftune.batch_plan import MicroBatch
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.models.kinds import TARGETS
from hftune.models.trial import named_buffers, restored_buffers, tolerance_of
from hftune.strategies.base import StepBatch, Strategy
from hftune.strategies.optimizer_state import most_moments
from hftune.strategies.packing import compute, given_to, head_targets, inputs_of, install_packing, reads_scores, told_of_padding
from hftune.strategies.pipeline_stages import layers_of
from hftune.strategies.seeds import LayerSeeds
from hftune.strategies.sharding import Sharding, fill_gradients, refuse_unused, without_gradient
from hftune.strategies.statistics import RunningStatistics, class_names, freeze
from hftune.strategies.two_pass import cached_losses
from hftune.task import BatchLossTask, Task

if TYPE_CHECKING:
    from hftune.strategies.context import Context


class DataParallel(Strategy):
    """Assign the micro-batches of a step to the processes by cost; all-reduce the gradient once, with the last of them."""

    computes_alone = True

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None, context: int = 1):
        """Args:
        context: ``parallel.context``, which divides the number of processes; one process computes alone.
        """
        self.context: Context | None = None
        if context > 1 and accelerator.num_processes > 1:
            from hftune.strategies.context import Context  # imports transformers

            self.computes_alone = False
            mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes // context, context))
            self.context = Context(mesh.get_group(1), mesh.get_local_rank(1), context)
        super().__init__(accelerator, task, progress)
        if self.context is not None:
            self.together, self.counts_samples = context, self.context.rank == 0
        self.sharding = Sharding(accelerator, self)
        self._seeds = LayerSeeds(self.device)
        self._checked_gradients = False

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._seeds.noise = getattr(model, "neftune", None)
        if model._compiled_call_impl is None:  # compiled as a whole: a hook would break its graph at each layer
            self._seeds.watch(layers_of(model))
        if self.collate_packed is not None:
            layers = install_packing(model)
            if self.context is not None:
                self.context.watch(layers)
                self._last_layer = layers[-1]
        self.sharding.prepare(model, optimizer)
        self.model = self.sharding.model
        self.sharding.wrapped.train()

    def warm_up(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        # DDP changes the layout of its all-reduce after the first one, and sums are added up in an order that follows the
        # layout. A run resumed in a new process would otherwise differ in the last bits from one that never stopped
        # (watched with 4 processes and Gloo, torch 2.13).
        if self.num_processes == 1 and not named_buffers(self.sharding.model):
            return self._keep_statistics([], frozen)
        missing: list[str] = []

        def note(name: str, parameter: Tensor) -> None:  # by which the backward pass comes in vain
            if parameter.grad is None:  # not yet one that DDP shares out
                missing.append(name)

        trainable = [(name, value) for name, value in self.sharding.model.named_parameters() if value.requires_grad]
        hooks = [value.register_post_accumulate_grad_hook(partial(note, name)) for name, value in trainable]
        with restored_buffers(self.sharding.model) as changed:
            try:
                inputs = self._backward_once(self.sharding.wrapped, dataset, micro_batch.samples)
                self._check_gradients(inputs, missing if self._is_ddp else None)
                if self.context is not None:
                    self._check_context(inputs)
            finally:
                for hook in hooks:
                    hook.remove()
                self.sharding.clear_gradient()
        places = named_buffers(self.sharding.model)
        return self._keep_statistics([places[name] for name in self.broadcast([*changed])], frozen)

    @torch.no_grad()
    def _check_context(self, inputs: dict[str, Any]) -> None:
        """Compare what the layers make of a micro-batch in training mode, dropout included, with one process. Collective.

        Not the loss: in a sum over many tokens, other dropout hardly shows.

        Raises:
            ConfigError: it is something else.
        """
        with self.explained_memory_errors(inputs, 0):
            found, whole = (self._hidden_once(inputs, context) for context in (self.context, None))
        tolerance = tolerance_of(self.device, None if self.precision == "no" else torch.bfloat16)
        differs = bool(whole.isfinite().all()) and not (found - whole).norm() <= tolerance * whole.norm()
        if self.any_process(differs):
            raise ConfigError(
                f"parallel.context={self.together}: with its tokens on several processes, {type(self.sharding.model).__name__} "
                "computes something else. It may mix tokens by more than attention, or draw dropout where it cannot be "
                "divided. Set its dropout to 0, or parallel.context=1."
            )

    def _hidden_once(self, inputs: dict[str, Any], context: Context | None) -> Tensor:
        """Return the hidden states (B, T, C) of a micro-batch behind the last layer, in training mode. Collective."""
        kept: list[Any] = []
        self._seeds.begin(0, 0, 0)
        self.context.tokens = None
        arguments, _, _ = given_to(self.task, inputs, self.scores_head, context)
        handle = self._last_layer.register_forward_hook(lambda module, args, output: kept.append(output))
        try:
            compute(self.sharding.model, **arguments)
        finally:
            handle.remove()
        hidden = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
        is_part = context is not None and context.tokens is not None and not context.gathers
        return context.whole(hidden) if is_part else hidden

    def _keep_statistics(self, places: Sequence[tuple[nn.Module, str]], frozen: bool) -> list[str]:
        """Average these buffers over each step, or freeze their modules; return the class names of the modules."""
        if self.context is not None and places and not frozen:
            raise ConfigError(
                f"parallel.context={self.together}: {', '.join(class_names(places))} would see a part of the tokens only. Set "
                "train.batch_norm=frozen, or parallel.context=1."
            )
        if frozen:
            freeze({module: None for module, _ in places})
        self.statistics = RunningStatistics([] if frozen else places, self.exact)
        if self._is_ddp:  # buffers are constant, or the same sums on all: sent once, which its own option would leave out, too
            self.sharding.wrapped.broadcast_buffers = False
        return class_names(places)

    @property
    def _is_ddp(self) -> bool:
        return isinstance(self.sharding.wrapped, DistributedDataParallel)

    def _backward_once(self, model: nn.Module, dataset: Any, samples: np.ndarray) -> dict[str, Any]:
        """Compute a gradient that will be discarded; return the batch, on the device."""
        (loaded,) = self.loader(dataset, num_workers=0, is_packed=True).read([samples.tolist()])
        inputs = send_to_device(loaded, self.device)
        arguments, target, part = given_to(self.task, inputs, self.scores_head, self.context)
        outputs = compute(model, **arguments)
        loss = self.task.loss(outputs, target) * part
        if self.teacher is not None:
            loss = self.teacher.mixed(loss, outputs, target, arguments)
        self._reaching_all(loss).backward()
        return inputs

    def _reaching_all(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward pass comes by all parameters, for DDP waits for each of them: see ``ReachingAll``."""
        if not self._is_ddp:
            return loss
        return ReachingAll.apply(loss, *self.sharding.trained)

    def notices(self) -> list[str]:
        if self.context is None:
            return []
        return [f"Context: {self.together} processes compute each micro-batch together, each a part of its tokens."]

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        def drop_gradient(parameter: Tensor) -> None:  # as if it had been added to one that is there
            parameter.grad = None

        parameters = self.sharding.trained
        failed, hooks = False, []
        try:
            # The optimizer allocates its moments in its first step.
            optimizer = self.sharding.bare_optimizer
            missing = 0 if optimizer.state else most_moments(optimizer)
            # A second micro-batch finds the gradient of the first. DDP has its buckets for it already.
            missing += not self.sharding.keeps_gradient
            there = [torch.empty_like(value) for value in parameters for _ in range(missing)]
            hooks = [value.register_post_accumulate_grad_hook(drop_gradient) for value in parameters]
            with restored_buffers(self.sharding.model):
                self._backward_once(self.sharding.model, dataset, samples)  # past DDP, whose forward is collective
            del there
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not should_reduce_batch_size(error):
                raise
            failed = True
        finally:
            for hook in hooks:
                hook.remove()
            self.sharding.optimizer.zero_grad()
        clear_device_cache(garbage_collection=True)
        return not self.any_process(failed)

    def num_dummies(self, step: Sequence[MicroBatch], num_mine: int, num_shares: int) -> int:
        return 0 if num_mine else 1  # for the all-reduce of the gradient

    def backward(self, batch: StepBatch, seed: int, step: int, items: Callable[[], Tensor]) -> list[Tensor]:
        # DDP and FSDP average the processes' gradients: times num_processes it is their sum, over all items the global mean.
        total, losses = None, []
        self.statistics.begin()
        if self.teacher is not None:
            self.teacher.total = torch.zeros((), dtype=self.exact, device=self.device)
        loss_of, balance, keeps = self._loss_of(batch, seed, step), self.balance(batch, seed, step), self._keeps_graphs(batch)
        self.times.begin_computing()
        with self.rounding_once():
            for index, (micro_batch, weight, loaded) in enumerate(zip(batch.mine, batch.weights, batch.batches, strict=True)):
                self.progress.samples(micro_batch.samples)
                self._seeds.begin(seed, step, micro_batch.index)
                inputs = send_to_device(loaded, self.device, non_blocking=True)
                is_last = index == len(batch.mine) - 1
                resting = self.statistics.at_rest(weight == 0)
                accumulating = nullcontext() if is_last else self.sharding.accumulating()
                told = told_of_padding(batch.padding[index] if batch.padding else None)
                with accumulating, self.explained_memory_errors(inputs, step), resting, told:
                    arguments, target, part = given_to(self.task, inputs, self.scores_head, self.context)
                    with self.statistics.micro_batch(0 if keeps else weight * len(micro_batch.samples)):
                        outputs = None if keeps else compute(self.sharding.wrapped, **arguments)
                    loss = loss_of(index, outputs, target)
                    loss = loss if part == 1 else loss * part  # not a kernel each way for nothing
                    if self.teacher is not None:
                        loss = self.teacher.mixed(loss, outputs, target, arguments, weight)
                    if total is None:
                        total = items()
                        scale = self.num_processes / total
                    if balance is not None:
                        loss = loss + balance(outputs, inputs) * total.to(loss.dtype)
                    scaled = loss * (scale * weight).to(loss.dtype)
                    if is_last:
                        self.times.end_computing_after(scaled)
                        scaled = self._reaching_all(scaled)
                    self.accelerator.backward(scaled)
                losses.append(loss.detach() * weight)
        self._check_gradients(inputs)
        fill_gradients(self.sharding.trained)
        return losses

    def _loss_of(self, batch: StepBatch, seed: int, step: int) -> Callable[[int, Any, Any], Tensor]:
        """Return the function of index, outputs and target that computes the loss of one of a step's micro-batches.

        A loss that compares samples with each other needs the embeddings of the whole step: see ``two_pass``. Collective.
        """
        if not isinstance(task := self.task, BatchLossTask):
            return lambda index, outputs, target: task.loss(outputs, target)
        if not (keeps := self._keeps_graphs(batch)) and len(batch.plan) <= self.num_processes:  # one micro-batch each

            def exchange(index: int, outputs: Any, target: Any) -> Tensor:
                embeddings = task.embed(outputs, target)
                labels = task.batch_labels(target)
                return cached_losses(task, batch, [embeddings.detach()], [labels], self.sum)(index, embeddings)

            return exchange
        embeddings, labels = self.embed(task, batch, seed, step, keeps)
        cached = cached_losses(task, batch, [values.detach() for values in embeddings], labels, self.sum)
        return lambda index, outputs, target: cached(index, embeddings[index] if keeps else task.embed(outputs, target))

    def _keeps_graphs(self, batch: StepBatch) -> bool:
        """Return whether ``embed`` keeps the graphs of all micro-batches of a step, so that none is computed again.

        They fit if a single micro-batch might hold all of them: ``train.parts`` alone has cut it.
        """
        balances = getattr(self.sharding.model, "load_balancing", None) is not None
        if not isinstance(self.task, BatchLossTask) or self.num_processes > 1 or self.scores_head or self.teacher or balances:
            return False
        all_of_them = sum(len(part.samples) for part in batch.plan), sum(part.tokens for part in batch.plan)
        return all(most is None or count <= most for count, most in zip(all_of_them, self.most, strict=True))

    def balance(self, batch: StepBatch, seed: int, step: int) -> Callable[[Any, dict[str, Any]], Tensor] | None:
        """Return the function of outputs and batch that returns what these add to the mean loss by their choice of experts.

        That takes the choices of the whole step, so each micro-batch is computed twice, unless there is one per process. None:
        experts are not balanced. Collective.
        """
        if (balancing := getattr(self.sharding.model, "load_balancing", None)) is None:
            return None

        def over_step(each: Sequence[Tensor]) -> Tensor:
            weighted = [choices.to(self.exact) * weight for choices, weight in zip(each, batch.weights, strict=True)]
            return self.sum(torch.stack(weighted).sum(0))

        if len(batch.plan) <= self.num_processes:
            return lambda *computed: balancing.loss(*computed, over_step([balancing.choices(*computed)]))
        with torch.no_grad(), self.statistics.micro_batch(0):
            each = [balancing.choices(*self.compute_again(batch, index, seed, step)) for index in range(len(batch.mine))]
        of_step = over_step(each)
        return lambda *computed: balancing.loss(*computed, of_step)

    def embed(
        self, task: BatchLossTask, batch: StepBatch, seed: int, step: int, keeps: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return embeddings and labels of each micro-batch, drawing the dropout that the second pass draws.

        Args:
            keeps: the graphs of the embeddings, as there is no second pass.
        """
        embeddings, labels = [], []
        for index, (micro_batch, weight) in enumerate(zip(batch.mine, batch.weights, strict=True)):
            with torch.set_grad_enabled(keeps), self.statistics.at_rest(weight == 0):
                with self.statistics.micro_batch(len(micro_batch.samples) if keeps else 0):
                    outputs, inputs = self.compute_again(batch, index, seed, step)
                target = task.target(inputs)
                embeddings.append(task.embed(outputs, target))
                labels.append(task.batch_labels(target))
        return embeddings, labels

    def compute_again(self, batch: StepBatch, index: int, seed: int, step: int) -> tuple[Any, dict[str, Any]]:
        """Return what the model makes of one of this process's micro-batches, and the micro-batch on the device.

        The dropout is that of ``backward``. With gradients, the outputs are those of a model that knows no targets: a loss
        computed together with the head is one number for all samples. Buffers change as in training. Not collective.
        """
        self.progress.samples(batch.mine[index].samples)
        self._seeds.begin(seed, step, batch.mine[index].index)
        inputs = send_to_device(batch.batches[index], self.device, non_blocking=True)
        with self.explained_memory_errors(inputs, step), told_of_padding(batch.padding[index] if batch.padding else None):
            scores_head = self.scores_head and not torch.is_grad_enabled()
            return compute(self.sharding.model, **inputs_of(self.task, inputs, scores_head)), inputs  # past DDP

    def _check_gradients(self, inputs: dict[str, Any], missing: Sequence[str] | None = None) -> None:
        """After the first backward pass, refuse parameters that cannot get a gradient.

        Those of layers that are dropped at random in training get one in evaluation mode, when none is dropped.

        Args:
            missing: names of those that got none; None: those that have none.
        """
        if self._checked_gradients:
            return
        self._checked_gradients, model = True, self.sharding.model
        parameters = dict(model.named_parameters())
        missing = without_gradient(parameters) if missing is None else missing
        if missing and self.computes_alone:
            model.eval()
            try:
                with torch.backends.cudnn.flags(enabled=False):  # its RNNs have a backward pass in training mode only
                    outputs = compute(model, **inputs_of(self.task, inputs, self.scores_head))
                    loss = self.task.loss(outputs, self.task.target(inputs))
                    found = torch.autograd.grad(loss, [parameters[name] for name in missing], allow_unused=True)
            finally:
                model.train()
            missing = [name for name, gradient in zip(missing, found, strict=True) if gradient is None]
        refuse_unused(missing)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        if max_norm is not None:
            return self.sharding.whole(self.accelerator.clip_grad_norm_(self.sharding.trained, max_norm))
        self.accelerator.unscale_gradients()
        return self.sharding.whole(
            nn.utils.get_total_norm([value.grad for value in self.sharding.trained if value.grad is not None])
        )

    def forward(self, batch: dict[str, Tensor]) -> Any:
        # Past DDP, whose forward is collective: processes have unequal numbers of batches here.
        with torch.no_grad(), told_of_padding(self._padding):
            return self.model(**self.evaluation_inputs(batch))

    def evaluation_inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the model's keyword arguments in an evaluation. Not collective."""
        inputs = self.task.evaluation_inputs(batch)
        if self.scores_head and reads_scores(self.task):
            inputs = {**inputs, TARGETS: head_targets(self.task.target(batch))}
        return inputs


class ReachingAll(torch.autograd.Function):
    """Passes on a loss, and makes all parameters a part of its graph, without adding anything to their gradients.

    DDP sums a gradient over the processes when the backward pass has come by its parameter, and would wait in vain on a
    process that dropped a layer, or whose samples need no second head: what the others have would then be added to something
    else. Its own remedy, find_unused_parameters, looks at the model's outputs, of which a loss may use a part.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.count
