"""What each process holds of weights, gradients and optimizer state, and how the parts are put together.

Independent of steps, epochs and files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hftune.atomic import explain_write_errors
from hftune.distributed.collectives import Collectives
from hftune.errors import ConfigError, TrainingError
from hftune.models.adapters import base_tensors, has_adapter, is_packed, trained_names
from hftune.models.tensor_file import Pieces, in_file_order, on_disk, taken
from hftune.models.weights import weights_digest
from hftune.strategies.averages import MovingAverage, averaged_names, averages_itself, part_here, to_training
from hftune.strategies.optimizer_state import changed_options, check_optimizer, options_of, plain_state
from hftune.strategies.whole_model import materialize

Tensors = dict[str, dict[str, Tensor]]
"""By group and name: "model" has parameters and buffers; "optimizer" has moments, named ``parameter/moment``; "ema" has moving
averages of the model's tensors, if training keeps them."""
SavedState = tuple[Tensors, dict[str, Any]]
"""Tensors, and plain values (the gradient scaler's)."""
Piece = tuple[str, torch.Size, int, Tensor]
"""Name and shape of a whole tensor, the first row that this process has of it, and its rows."""


class Sharding:
    """What this process holds of a model and its optimizer: here everything, as with one process or DDP through Accelerate.

    Saving and loading are written once, by the names of the whole model; so a checkpoint can be loaded under any other
    sharding. Subclasses say what else a process may hold (``parameters``, ``tensors``, ``expected``), what of it is saved
    (``pieces``) and how whole tensors are loaded (``scatter``).
    """

    model: nn.Module
    """What this process holds, without wrappers, after ``prepare``."""
    wrapped: nn.Module
    """What a training forward pass calls."""
    optimizer: torch.optim.Optimizer
    """Of what this process holds, possibly wrapped by Accelerate."""
    initial_options: list[dict[str, Any]]
    """Of the optimizer's parameter groups before the first step: a checkpoint holds those that the optimizer has changed."""
    keeps_gradient = False
    """Whether the gradient has its memory between steps, too."""
    average: MovingAverage | None = None
    """Of what this process holds, with ``train.ema_decay``."""
    is_spread = False
    """Whether other processes than the main one have pieces of what is saved."""

    def __init__(self, accelerator: Accelerator, group: Collectives):
        self.accelerator, self.group = accelerator, group
        self._host: Tensors = {}
        self._sender: Thread | None = None
        self._channel: Any = None
        """A group of processes of its own for the threads that send and write pieces."""
        self._to_come = Semaphore(0)
        self._num_to_come = 0
        """Tensors of the last ``streamed`` that arrive in pieces, and those of them that have."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep this process's part of a model that all processes have built, with the main process's weights. Collective.

        Sets ``model``, ``wrapped``, ``optimizer`` and ``initial_options``.

        Raises:
            ConfigError: the optimizer cannot be saved, or spread in this way; see ``check_optimizer``.
        """
        check_optimizer(optimizer, self.accelerator.device)
        self.initial_options = options_of(optimizer)
        # DDP's, of convolutions on images whose channels are last, and with kernels of 1 x 1: it copies a gradient.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model = self.accelerator.unwrap_model(self.wrapped)
        takes_choice = "set_to_none" in signature(self.bare_optimizer.zero_grad).parameters  # not every class of one's own
        self.keeps_gradient = isinstance(self.wrapped, DistributedDataParallel) and takes_choice

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of which this process holds at least a part, by their names in the whole model. Local."""
        return dict(self.model.named_parameters())

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """What this process holds of the parameters that have gradients: found once, for a step looks at them repeatedly."""
        return [value for value in self.model.parameters() if value.requires_grad]

    def tensors(self) -> Tensors:
        """Return everything on this process that belongs in a checkpoint: the live tensors, not copies. Local.

        Tied parameters have one name, the first.
        """
        return checkpoint_tensors(self.model, self.bare_optimizer)

    def plain_state(self) -> dict[str, Any]:
        """Return, on the main process, what the optimizer's state holds besides tensors, for the whole model. Collective."""
        return plain_state(self.bare_optimizer, {value: name for name, value in self.parameters().items()})

    def expected(self) -> Mapping[str, Tensor]:
        """Return the parameters and buffers of the whole model by name; only their shapes are read. Local."""
        return self.tensors()["model"]

    def pieces(self, group: Mapping[str, Tensor]) -> Iterator[Piece]:
        """Yield what this process adds to the whole tensors of one group of ``tensors``. Local.

        Together the processes yield each row once, and the main one yields all names of which no other process yields the first
        row. A tensor without rows is one row.
        """
        if self.group.is_main:
            yield from ((name, value.shape, 0, value) for name, value in group.items())

    def scatter(self, part: Tensor | None, whole: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        """Copy the main process's ``whole`` tensor into this process's ``part`` of it. Collective.

        Args:
            part: None if this process holds nothing of it.
            whole: None on all processes but the main one.
        """
        if part is None:  # no process has it
            return
        if whole is not None:
            part.copy_(whole)
        self.group.broadcast_tensor(part)

    def share_statistics(self) -> None:
        """Give all processes the main process's running statistics, which are also those that are exported. Collective."""
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                self.group.broadcast_tensor(buffer)

    def unwrap(self, folder: Path) -> nn.Module:
        """Return a plain, whole model with the current weights on the main process. Elsewhere its values may be missing.

        Collective.

        Args:
            folder: in which weights that no process has as a whole are put together in a file, which goes with the model.

        Raises:
            TrainingError: the file cannot be written.
        """
        return self.model

    @contextmanager
    def on_host(self, model: nn.Module) -> Iterator[None]:
        """Let the model that ``unwrap`` returned have its weights on the host while it is saved. Local.

        From a GPU they are copied at once, where saving would wait for one after the other. They take the place of the copies
        for checkpoints, of which none may be being written.
        """
        if self.is_spread or self.group.device.type != "cuda" or not self.group.is_main:
            yield
            return
        is_kept = "model" in self._host
        copies = self.streamed({"model": self.tensors()["model"]})["model"]
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        live, copied = dict[str, Any](named), dict[int, Any]()  # tied ones stay tied
        for name, copy in copies.items():
            is_parameter = isinstance(live[name], nn.Parameter)
            copied[id(live[name])] = nn.Parameter(copy, live[name].requires_grad) if is_parameter else copy
        # Not value.data = copy: that would part parameters from the nodes of the graph that DDP's hooks are on.
        places = [(*name.rpartition(".")[::2], value) for name, value in named if id(value) in copied]
        try:
            for parent, name, value in places:
                setattr(model.get_submodule(parent), name, copied[id(value)])
            yield
        finally:
            for parent, name, value in places:
                setattr(model.get_submodule(parent), name, value)
            if not is_kept:
                self.forget("model")

    def begin_training(self, keeps_average: bool) -> None:
        """Get ready for optimizer steps, after ``prepare``; with a moving average of the weights, if asked for. Local.

        Raises:
            ConfigError: the optimizer or the weights cannot be averaged.
        """
        to_training(self.bare_optimizer)
        if keeps_average and averages_itself(self.bare_optimizer):
            name = type(self.bare_optimizer).__name__
            raise ConfigError(f"train.ema_decay: {name} averages the weights itself. Set train.ema_decay to null.")
        if keeps_average:
            tensors = self.tensors()["model"]
            self.average = MovingAverage({name: tensors[name] for name in averaged_names(self.parameters(), tensors)})

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the weights to evaluate and to export; then those in training again, to the bit. Local.

        The former are the moving averages, or what an optimizer averages itself; without either, they are the same.
        """
        if self.average is not None:
            self.average.exchange()
            try:
                yield
            finally:
                self.average.exchange()
        elif averages_itself(optimizer := self.bare_optimizer):
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            kept = [part_here(parameter.detach()).clone() for parameter in own]
            optimizer.eval()
            try:
                yield
            finally:
                optimizer.train()
                for parameter, before in zip(own, kept, strict=True):  # to the bit: the way there and back rounds
                    part_here(parameter.detach()).copy_(before)
        else:
            yield

    def average_weights(self, decay: float) -> None:
        """Take the weights after a step into their moving average, if there is one. Local."""
        if self.average is not None:
            self.average.update(decay)

    def clear_gradient(self) -> None:
        """Clear the gradient after a step. Local."""
        if self.keeps_gradient:
            # Gradients are views of DDP's buckets. Set to None, they would come about once more beside these.
            self.optimizer.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()

    def accumulating(self) -> AbstractContextManager:
        """Return the context of all backward passes of a step but its last one. Local."""
        return self.accelerator.no_sync(self.wrapped)

    def whole(self, value: Tensor) -> Tensor:
        """Return all of a tensor of which this process may hold a part. Collective."""
        return value

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def state(self) -> SavedState | None:
        """Return what a checkpoint holds of model and optimizer on the main process, None elsewhere. Collective.

        The tensors are whole and on the host. They are copies, which the next call overwrites.
        """
        saved = self.snapshot()
        if saved is None:
            return None
        tensors, values = saved
        return {group: {name: whole(value) for name, value in own.items()} for group, own in tensors.items()}, values

    def snapshot(self) -> tuple[dict[str, dict[str, Tensor | Pieces]], dict[str, Any]] | None:
        """Return what ``state`` does, but tensors as ``streamed``, so that no process ever holds the whole. Collective."""
        averages = {} if self.average is None else {"ema": self.average.values}
        tensors, plain = self.streamed(self.tensors() | averages), self.plain_state()
        values: dict[str, Any] = {}
        if not self.group.is_main:
            return None
        if plain:
            values["optimizer_plain"] = plain
        if any(changed := changed_options(self.bare_optimizer, self.initial_options)):
            values["optimizer_options"] = changed
        if (scaler := self.accelerator.scaler) is not None:
            scaled = scaler.state_dict()  # of a loss that is multiplied by the number of processes
            values["scaler"] = {**scaled, "scale": scaled["scale"] * self.group.num_processes}
        return tensors, values

    def streamed(self, tensors: Tensors) -> dict[str, dict[str, Tensor | Pieces]]:
        """Copy this process's pieces to the host, from where a thread sends them to the main process. Collective.

        Returns:
            On the main process, copies on the host, or pieces that arrive as they are taken. They must all be taken, group by
            group and in the order of their names here. The next call waits for that, and overwrites the copies.
        """
        self.await_sent()
        listed, mine, rank = [], list[dict[str, Tensor]](), self.group.process_index
        for number, (name, group) in enumerate(tensors.items()):
            copies = self._host.setdefault(name, {})
            mine.append({})
            for key, shape, first, piece in self.pieces(group):
                if key not in copies or copies[key].shape != piece.shape:
                    copies[key] = empty_on_host(piece)
                mine[number][key] = copies[key].copy_(piece, non_blocking=True)
                listed.append((number, key, shape, piece.dtype, first, rank, piece.nbytes))
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)  # until then the copies are under way
        if self.is_spread and self.group.num_processes > 1:
            self._channel = self._channel or torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=1))
            listed = self.group.gather_to_main(listed) or []
        if not self.group.is_main:
            if not self.is_spread:
                return {}
            self._sender = Thread(target=self._send, args=(mine,), name="send pieces")
            self._sender.start()
            return {}
        owners = [dict[str, list[tuple]]() for _ in tensors]
        for number, key, *where in listed:
            owners[number].setdefault(key, []).append(tuple(where))
        return {
            name: {
                key: self._arriving(owners[number][key], mine[number].get(key))
                for key in in_file_order({key: where[0][1] for key, where in owners[number].items()})
            }
            for number, name in enumerate(tensors)
        }

    def digest(self) -> str:
        """Return the digest of what a checkpoint holds of the model on the main process, see ``weights_digest``. Collective."""
        return self._digest(self.tensors()["model"], self.expected())

    def base_digest(self) -> str | None:
        """Return that of the frozen weights beside adapters on the main process; None without adapters. Collective."""
        frozen = base_tensors(self.model) if has_adapter(self.model) else None
        return None if frozen is None else self._digest(frozen, frozen, is_packed)

    def _digest(
        self, tensors: Mapping[str, Tensor], names: Iterable[str], leaves_out: Callable[[Any], bool] = lambda value: False
    ) -> str:
        def arriving() -> Iterator[tuple[str, Tensor | Pieces]]:
            for name in names:  # one at a time, as they take memory on the host
                own = {name: tensors[name]} if name in tensors else {}
                yield from self.streamed({"digest": own}).get("digest", {}).items()
                self.forget("digest")

        return weights_digest(arriving(), leaves_out)

    def put_together(self, meta_model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
        """Return a copy of a model without values that has them on the main process: in a file, not in memory. Collective.

        Raises:
            TrainingError: the file cannot be written.
        """
        arriving, values = self.streamed({"whole": dict(tensors)}), dict[str, Tensor]()

        def write() -> None:
            with taken(arriving), explain_write_errors(folder):
                values.update(on_disk(arriving["whole"], folder))

        self.group.on_main(write)
        self.forget("whole")
        return materialize(meta_model, values.items())

    def forget(self, group: str) -> None:
        """Free the copies of a group of ``streamed``, once they are sent. Local."""
        self.await_sent()
        del self._host[group]

    def await_sent(self) -> None:
        """Wait until the main process has taken all pieces. Local."""
        for _ in range(self._num_to_come):
            self._to_come.acquire()
        self._num_to_come = 0
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def _send(self, mine: Sequence[Mapping[str, Tensor]]) -> None:
        with suppress(RuntimeError):  # the main process has ended, which others find out as well
            for group in mine:
                for key in in_file_order({key: value.dtype for key, value in group.items()}):
                    torch.distributed.send(as_bytes(group[key]), dst=0, group=self._channel)

    def _arriving(self, owners: Sequence[tuple], own: Tensor | None) -> Tensor | Pieces:
        """Return a tensor from the processes that have pieces of it: shape and type of the whole, first row, rank and bytes."""
        shape, dtype, *_ = owners[0]
        if own is not None and len(owners) == 1:
            return own

        def pieces() -> Iterator[Tensor]:
            try:
                for _, _, _, rank, size in sorted(owners, key=lambda owner: owner[2]):
                    if rank == self.group.process_index:
                        assert own is not None
                        yield own
                    else:
                        received = torch.empty(size, dtype=torch.uint8)
                        torch.distributed.recv(received, src=rank, group=self._channel)
                        yield received.view(dtype)
            finally:
                self._to_come.release()

        self._num_to_come += 1
        return Pieces(shape, dtype, pieces())

    def load_state(self, saved: SavedState | None) -> None:
        """Load what ``state`` returned, under any sharding and number of processes. Collective.

        Args:
            saved: on the main process; None elsewhere.

        Raises:
            ValueError: on all processes, if names or shapes are not those of this model; the message names the first.
        """
        parameters, own, state = self.parameters(), self.tensors()["model"], self.bare_optimizer.state
        incoming, groups = self.group.on_main(lambda: self._describe(saved)), self.bare_optimizer.param_groups
        # As in Optimizer.load_state_dict: the counter of steps is on the CPU unless the step is fused or captured.
        on_device = {value for group in groups if group.get("fused") or group.get("capturable") for value in group["params"]}
        tensors: Tensors = {"model": {}, "optimizer": {}} if saved is None else saved[0]
        for name, shape, dtype in incoming["model"]:
            self.scatter(own.get(name), tensors["model"].get(name), shape, dtype)
        for key, shape, dtype in incoming["optimizer"]:
            name, _, moment = key.rpartition("/")
            parameter, value = parameters.get(name), None
            if parameter is not None and shape == parameter.shape:  # laid out and sharded like the parameter
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            elif parameter is not None:  # a counter of steps, or rows and columns of a factored moment
                value = torch.empty(shape, dtype=dtype, device=self.group.device)
            self.scatter(value, tensors["optimizer"].get(key), shape, dtype)
            if parameter is not None:
                state[parameter][moment] = value.cpu() if moment == "step" and parameter not in on_device else value
        if self.average is not None and "ema" not in incoming:
            self.average.restart()
        elif self.average is not None:
            for name, shape, dtype in incoming["ema"]:
                self.scatter(self.average.values.get(name), tensors.get("ema", {}).get(name), shape, dtype)
        for key, value in incoming.get("optimizer_plain", {}).items():
            name, _, moment = key.rpartition("/")
            if name in parameters:
                state[parameters[name]][moment] = value
        for group, changed in zip(groups, incoming.get("optimizer_options", [{}] * len(groups)), strict=True):
            group.update(changed)
        scaler = self.accelerator.scaler
        if scaler is not None and "scaler" in incoming:
            values = incoming["scaler"]
            scaler.load_state_dict({**values, "scale": values["scale"] / self.group.num_processes})

    def _describe(self, saved: SavedState) -> dict[str, Any]:
        """Check a saved state against this model; return names, shapes and types of the tensors to come, and the values."""
        tensors, values = saved
        model, expected = tensors["model"], self.expected()
        for name in sorted({*model, *expected}):
            if name not in model:
                raise ValueError(f"it has no {name}")
            if name not in expected:
                raise ValueError(f"it has {name}, which this model lacks")
            if model[name].shape != expected[name].shape:
                raise ValueError(f"{name} is {tuple(model[name].shape)} there and {tuple(expected[name].shape)} here")
        if unknown := [key for key in tensors["optimizer"] if key.rpartition("/")[0] not in expected]:
            raise ValueError(f"the optimizer's {unknown[0]} belongs to no parameter")
        listed = {name: [(key, value.shape, value.dtype) for key, value in group.items()] for name, group in tensors.items()}
        return {**listed, **values}


def empty_on_host(whole: Tensor) -> Tensor:
    """Return memory for a copy, pinned if the tensor is on a GPU: the copy is then several times as fast, and may overlap."""
    copy = partial(torch.empty_like, whole, device="cpu", memory_format=torch.contiguous_format)
    try:
        return copy(pin_memory=whole.is_cuda)
    except RuntimeError:  # the machine does not allow so much pinned memory
        return copy()


def as_bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def whole(value: Tensor | Pieces) -> Tensor:
    return value if isinstance(value, Tensor) else value.whole()


def start_equal(model: nn.Module, group: Collectives) -> None:
    """Give all processes the main process's parameters and buffers, one at a time, if they are there. Collective."""
    with torch.no_grad():
        for value in (value for value in chain(model.parameters(), model.buffers()) if not value.is_meta):
            on_device = value.to(group.device)
            group.broadcast_tensor(on_device)
            value.copy_(on_device)


def without_gradient(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of the trainable parameters that the last backward pass gave no gradient."""
    return [name for name, value in parameters.items() if value.requires_grad and value.grad is None]


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradients of a step that are missing to zero, as they are where any process has one: layers may be dropped."""
    for value in parameters:
        if value.requires_grad and value.grad is None:
            value.grad = torch.zeros_like(value)


def refuse_unused(names: Sequence[str]) -> None:
    """Raise TrainingError if there are any parameters, given by their names, without a gradient."""
    if names:
        raise TrainingError(
            f"{len(names)} parameters get no gradient: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. "
            "Freeze them in build_model (requires_grad_(False)), or leave them out of the model."
        )


def checkpoint_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return what a checkpoint holds of a whole model and its optimizer: the live tensors."""
    return {"model": model_tensors(model), "optimizer": moments(dict(model.named_parameters()), optimizer)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model: the live tensors. Tied parameters have one name, the first.

    Of a model with adapters, only what is trained, and buffers: the frozen weights are where the run began from, too.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if has_adapter(model):
        trained = trained_names(model)
        parameters = {name: value for name, value in parameters.items() if name in trained}
    persistent = model.state_dict(keep_vars=True)
    return parameters | {name: value for name, value in model.named_buffers() if name in persistent}


def moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps for these parameters, live, named ``parameter/moment``."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
