"""FlexAttention, compiled, gives what gathered blocks give. No unit test: torch.compile starts g++, which takes seconds."""

import shutil

import pytest
import torch

from hftune.models import bigbird_attention
from tests.support.big_bird import load_encoder, right_padded, save_big_bird


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_big_bird(tmp_path_factory.mktemp("big_bird"))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="hftune refuses it there")
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention on the CPU is compiled by g++")
@pytest.mark.parametrize("lengths", [[64, 29, 33, 50], [127, 31]])
def test_flex_attention_gives_what_gathered_blocks_give(lengths, pretrained, monkeypatch):
    monkeypatch.setattr(bigbird_attention, "FLEX_TOKENS", 256)
    gathered = load_encoder(pretrained).eval()
    flex = load_encoder(pretrained, block_sparse_kernel="flex").eval()
    assert flex.state_dict().keys() == gathered.state_dict().keys()
    ids, mask = right_padded(lengths)
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=mask).last_hidden_state[mask.bool()] for model in (flex, gathered))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
