"""Prompts that two texts begin with are computed once: the same losses and gradients from fewer tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hftune import Recipe, train
from hftune.models.packing import NotPackable, Packing, install, without_masks
from tests.support.runs import Run

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 97}
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
SHARED = torch.arange(2).repeat(2), torch.tensor([0, 0, 3, 1])
"""The third text begins with three tokens of the first one, the fourth with one of the second."""


def test_what_is_computed_and_what_is_taken_from_where():
    packing = Packing.of(MASK).sharing(*SHARED)
    assert packing.lengths == (2, 3, 4, 5) and packing.shape == (4, 5)  # texts by length
    which, computed = (tensor.tolist() for tensor in packing.shared)
    assert which == [1, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 8, 9]
    assert computed == [1, 2, 3, 4, 5, 6, 7, 8, 12, 13]
    assert packing.indices_N.tolist() == Packing.of(MASK).indices_N[computed].tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_hidden_states_and_gradients_are_those_of_whole_texts(kind):
    torch.manual_seed(0)
    more = {"mistral": {"sliding_window": 2, "num_key_value_heads": 1, "head_dim": 8}}.get(kind, {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more)).double().eval()
    ids = torch.randint(3, 97, MASK.shape)
    ids[2, :3], ids[3, :1] = ids[0, :3], ids[1, :1]
    weights = torch.randn(*MASK.shape, 97, dtype=torch.float64)
    install(model)
    packing, found = Packing.of(MASK).sharing(*SHARED), []
    seen = packing.unpack(torch.ones(1, len(packing.indices_N))).bool()
    assert seen.sum() == MASK.sum() - 4
    for one in (Packing.of(MASK), packing):
        model.zero_grad()
        with without_masks():
            logits = model(input_ids=ids, attention_mask=MASK, packing=one, use_cache=False).logits
        (logits * weights)[seen].sum().backward()
        found.append((logits[seen].detach(), [value.grad.clone() for value in model.parameters()]))
    (logits, gradients), (shared, others) = found
    torch.testing.assert_close(shared, logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(others, gradients, rtol=0, atol=1e-5)  # of float32 in norms


def test_texts_that_see_what_follows_share_nothing():
    model = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES))
    install(model)
    with without_masks(), pytest.raises(NotPackable, match="not causal"):
        model(input_ids=torch.ones_like(MASK), attention_mask=MASK, packing=Packing.of(MASK).sharing(*SHARED))


@pytest.mark.parametrize("recipe", ["dpo_demo", "kto_demo", "reward_demo"])
def test_trainings_share_prompts_and_are_those_with_padding(recipe, tmp_path, monkeypatch):
    counts, original = [], Packing.sharing

    def sharing(self, *shared):
        counts.append((len(self.indices_N), len((found := original(self, *shared)).indices_N)))
        return found

    monkeypatch.setattr(Packing, "sharing", sharing)
    few = (
        "task.max_train_samples=48",
        "task.max_eval_samples=16",
        "train.epochs=1",
        "train.warmup_ratio=0",
        "train.log_every=1",
    )
    runs = {}
    for how in ("auto", "off"):
        train(Recipe.load(recipe, *few, "train.batch_size=16", f"train.packing={how}", f"output_dir={tmp_path / how}"))
        runs[how] = Run(tmp_path / how)
        assert len(counts) == 4  # a trial and three steps, all of them without padding
    assert all(shared < 0.7 * every for every, shared in counts)
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert runs["auto"].logged(name) == pytest.approx(runs["off"].logged(name), rel=1e-5)
