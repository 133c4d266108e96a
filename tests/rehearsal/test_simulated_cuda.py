"""The simulated GPU finds what it is there for: mixed devices, early reads, overwritten memory, waits; and it draws by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.runs import environment

BEGIN = """
import torch
from tests.rehearsal import simulated_cuda

simulated_cuda.install()
simulated_cuda.set_device_count(2)
noted = []
simulated_cuda.watch(lambda kind, what, num_bytes: noted.append(f"{kind}: {what}"))

def refused(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
"""
RULES = {
    "tensors of two devices do not mix": """
        value = torch.ones(2, device="cuda")
        assert "found at least two devices" in refused(lambda: value + torch.ones(2))
        assert "found at least two devices" in refused(lambda: value + torch.ones(2, device="cuda:1"))
        assert (value + torch.tensor(1.0)).device == torch.device("cuda", 0)  # a number may be anywhere
        assert "invalid device ordinal" in refused(lambda: torch.ones(2, device="cuda:2"))
    """,
    "a copy to pinned memory is late": """
        early = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        late = torch.zeros(3, device="cuda").to("cpu", non_blocking=True)
        assert early.is_pinned() and early.isnan().all()
        copied.synchronize()
        assert early.eq(1).all() and late.isnan().all() and noted[-1] == "wait: for an event"
        copied.synchronize()  # it is known to be complete
        assert len([what for what in noted if "wait" in what]) == 1
        torch.cuda.synchronize()
        assert late.eq(0).all()
    """,
    "pinned memory that is overwritten too early is noted": """
        value = torch.ones(3).pin_memory()
        on_device = value.to("cuda", non_blocking=True)
        value.zero_()
        torch.cuda.synchronize()
        assert any(what.startswith("race: ") for what in noted)
    """,
    "what makes the host wait is noted": """
        value = torch.arange(3.0, device="cuda")
        torch.full((2,), 1.0, device="cuda"), torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        assert not [what for what in noted if "wait" in what]
        for wait in (lambda: value.sum().item(), value.tolist, value.nonzero, lambda: value[value > 1], lambda: bool(value.any())):
            noted.clear()
            wait()
            assert any(what.startswith("wait: ") for what in noted), wait
        for copy in (lambda: torch.tensor([1.0], device="cuda"), lambda: torch.ones(2).to("cuda", non_blocking=True)):
            noted.clear()
            copy()
            assert any(what.startswith("wait: copy to the GPU") for what in noted), copy
    """,
    "each device draws from a generator of its own": """
        torch.manual_seed(1)
        first, host = torch.rand(3, device="cuda"), torch.rand(3)
        torch.cuda.manual_seed(1)
        assert torch.equal(torch.rand(3, device="cuda"), first) and not torch.equal(torch.rand(3), host)
        assert "device type for generator" in refused(lambda: torch.rand(3, device="cuda", generator=torch.Generator()))
    """,
    "attention of texts of unequal length is that of each text, both ways": """
        lengths, scale = (3, 5, 1), 0.5
        starts = torch.tensor([0, 3, 8, 9], dtype=torch.int32, device="cuda")
        inputs = [torch.randn(9, 2, 8, device="cuda", requires_grad=True) for _ in range(3)]
        weight = torch.randn(9, 2, 8, device="cuda")
        found = torch.ops.aten._efficient_attention_forward(
            *(part[None] for part in inputs), None, starts, starts, 5, 5, 0.0, 2, True, scale=scale
        )[0][0]
        split = [part.split(lengths) for part in inputs]
        expected = torch.cat([
            torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in text), is_causal=True, scale=scale
            )[0].transpose(0, 1)
            for text in zip(*split)
        ])
        assert torch.allclose(found, expected, atol=1e-6)
        for one, other in zip(torch.autograd.grad(found, inputs, weight), torch.autograd.grad(expected, inputs, weight)):
            assert torch.allclose(one, other, atol=1e-5)
    """,
}


END = """
import os
os._exit(0)  # autograd's threads of simulated devices do not end
"""


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_gpus_holds(rule):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(RULES[rule]) + END],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0


def test_a_micro_batch_launches_hardly_more_kernels_than_the_model_of_transformers():
    """And docs/speed.md says how many."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.launches"],
        env=environment(PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text().splitlines()
    assert len(rows) == 3 and not {*rows} - {*page}, done.stdout
    for row in rows:
        theirs, *ours = map(int, row.strip("| ").split(" | ")[1:])
        assert all(count <= 1.1 * theirs for count in ours), row
