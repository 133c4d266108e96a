"""What no process holds as a whole is saved, exported and loaded in pieces."""

import multiprocessing
from contextlib import suppress
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hftune import TrainingError
from hftune.distributed.collectives import Collectives
from hftune.errors import ElsewhereError
from hftune.models.tensor_file import taken, write_tensors
from hftune.strategies.fully_sharded import ShardedWeights

SIZE = 3


class Plain(Collectives):
    """Without Accelerate's state, whose broadcasts know one process only."""

    def broadcast(self, value):
        torch.distributed.broadcast_object_list(values := [value], src=0)
        return values[0]


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2), nn.BatchNorm1d(2))  # 7 rows are 3, 3 and 1; 2 rows are 1, 1 and none
    made[1].to(torch.bfloat16)
    return made


def work(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE)
    group = Plain(SimpleNamespace(process_index=rank, num_processes=SIZE, device=torch.device("cpu")))
    sharding, mesh = ShardedWeights(SimpleNamespace(), group), init_device_mesh("cpu", (SIZE,))
    spread = {name: distribute_tensor(value.detach(), mesh, [Shard(0)]) for name, value in model().named_parameters()}
    tensors = {"model": spread | dict(model().named_buffers()), "optimizer": {"0.weight/exp_avg": spread["0.weight"]}}
    for target in ("once", "no/such/folder", "again"):  # a disk that is full stops nobody
        saved = sharding.streamed(tensors)
        assert rank == 0 or saved == {}
        with suppress(FileNotFoundError), taken(saved):
            for name, own in saved.items():
                write_tensors(folder / f"{target}-{name}", own)
    empty = model().to("meta")
    whole = sharding.put_together(empty, {name: tensors["model"][name] for name in empty.state_dict()}, folder)
    if rank == 0:
        save_file(whole.state_dict(), folder / "exported")
    try:
        sharding.put_together(empty, dict(spread), folder / "none")
        raise AssertionError
    except (TrainingError, ElsewhereError) as error:
        (folder / f"said-{rank}").write_text(str(error))
    for name, part in spread.items():
        part.to_local().zero_()
        value = model().get_parameter(name).detach() if rank == 0 else None
        sharding.scatter(part, value, part.shape, part.dtype)
    loaded = {name: part.full_tensor() for name, part in spread.items()}
    if rank == SIZE - 1:
        save_file(loaded, folder / "loaded")
    torch.distributed.destroy_process_group()


def test_files_are_those_of_whole_tensors_and_a_failure_to_write_stops_nobody(tmp_path):
    workers = [multiprocessing.get_context("fork").Process(target=work, args=(rank, tmp_path)) for rank in range(SIZE)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * SIZE
    save_file(model().state_dict(), tmp_path / "expected")
    assert (tmp_path / "once-model").read_bytes() == (tmp_path / "expected").read_bytes()
    assert (tmp_path / "again-model").read_bytes() == (tmp_path / "expected").read_bytes()
    moment = load_file(tmp_path / "again-optimizer")["0.weight/exp_avg"]
    assert torch.equal(moment, model().get_parameter("0.weight"))
    expected = model().state_dict()
    for name, value in (load_file(tmp_path / "exported") | load_file(tmp_path / "loaded")).items():
        assert torch.equal(value, expected[name]) and value.dtype == expected[name].dtype
    assert (tmp_path / "said-0").read_text().startswith(f"{tmp_path}/none cannot be written: No such file or directory.")
    assert "The main process failed" in (tmp_path / "said-1").read_text()
