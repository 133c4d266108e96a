"""Several processes compute the tokens of a micro-batch together: the same training again."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hftune import ConfigError, Recipe
from hftune.distributed.preflight import check_launcher
from hftune.models.packing import Packing
from hftune.planning.plan import make_plan
from hftune.settle import check_spreadable
from hftune.strategies.context import Context
from tests.parity.test_fully_sharded import ODD, same
from tests.support.runs import Group, train_on

TWO, FOUR = "parallel.context=2", "parallel.context=4"
REVIEWS = (*ODD, "task.model_config.num_attention_heads=4")
BLOCKS = (
    "recipe=language_modeling",
    "task.model_config={model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, initializer_range: 0.2}",
    *("task.model=null", "task.tokenizer=words", "task.dataset=json", "task.block_length=32", "task.generation=null"),
    *("train.batch_size=8", "train.micro_batch_size=1", "train.epochs=2", "train.log_every=1", "train.clip_norm=0.5"),
)
"""The last block has one token, fewer than there are processes to share it."""
CHATS = (
    "recipe=chats_demo",
    *("task.max_train_samples=40", "task.max_eval_samples=12", "train.batch_size=16", "train.micro_batch_tokens=400"),
    *("adapter.type=lora", "adapter.dropout=0.1", "eval.metric=loss", "train.gradient_checkpointing=true"),
    *("task.generation=null", "train.epochs=2", "train.log_every=1"),
)
PAIRS = ("recipe=dpo_demo", *CHATS[1:-3], *CHATS[-2:])
NAMES = ("reviews", "blocks", "chats", "opt", "pairs")
OPT = "model_type: opt, hidden_size: 32, ffn_dim: 64, num_hidden_layers: 2, num_attention_heads: 4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def files(folder):
    for split, blocks in {"train": 16, "eval": 5}.items():
        words = " ".join(f"word{index * index % 97}" for index in range(32 * blocks + 1))
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": words}))
    return [f"task.data_files.{split}={folder / split}.jsonl" for split in ("train", "eval")]


@pytest.fixture(scope="module")
def runs(folder, files):
    jobs = {"reviews": REVIEWS, "blocks": (*BLOCKS, *files), "chats": CHATS, "pairs": PAIRS}
    adapters = ("adapter.type=lora", "adapter.dropout=0.3", "train.lr=1e-2")  # OPT gives some of them tokens without a batch
    jobs["opt"] = (BLOCKS[0], *BLOCKS[2:], *files, f"task.model_config={{{OPT}, dropout: 0.0}}", *adapters)
    again = (*REVIEWS, TWO, f"output_dir={folder / 'again'}")
    on_two = {f"{name} of two": (*words, TWO) for name, words in jobs.items()}
    on_two |= {"reviews begins": again, "reviews goes on": again}
    on_four = {f"{name} of two on four": (*words, TWO) for name, words in jobs.items()}
    on_four |= {f"{name} of four, sharded": (*words, FOUR) for name, words in jobs.items()}
    sharded = [name for name in on_four if "sharded" in name]
    return (
        train_on(1, {f"{name} of one": (*words, TWO) for name, words in jobs.items()}, folder)
        | train_on(2, on_two, folder, stops={"reviews begins": (3, 1)})
        | train_on(4, on_four, folder, sharded=sharded)
    )


@pytest.mark.parametrize("how", ["two", "two on four", "four, sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradient_norms_are_those_of_one_process(runs, name, how):
    same(runs[f"{name} of {how}"], runs[f"{name} of one"])


def test_a_resumed_run_is_the_same_to_the_bit(runs):
    whole, resumed = (
        load_file(runs[name].folder / "model_last" / "model.safetensors") for name in ("reviews of two", "reviews goes on")
    )
    assert all(whole[name].equal(resumed[name]) for name in whole)
    assert runs["reviews goes on"].logged("train/loss") == runs["reviews of two"].logged("train/loss")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_dropout_that_cannot_be_divided_is_refused_before_the_first_step(folder, files, precision):
    """OPT draws it by torch's function. In the loss of a model that has just been drawn, it hardly shows."""
    name = f"opt in {precision}"
    words = [*BLOCKS[2:], *files, f"task.model_config={{{OPT}, dropout: 0.1}}", TWO, f"output_dir={folder / name}"]
    words += ["task.block_length=128", f"train.mixed_precision={precision}"]
    group = Group(2, [["language_modeling", words, None, {}]], folder / f"{name}.log")
    assert all(group.wait())
    said = (folder / f"{name}.log").read_text()
    assert "parallel.context=2: with its tokens on several processes, OPTForCausalLM computes something else" in said
    assert "train/loss" not in (folder / name / "metrics.jsonl").read_text()


def test_a_plan_counts_a_part_of_the_activations(files):
    plans = [make_plan(Recipe.load("language_modeling", *BLOCKS[1:], *files, f"parallel.context={size}"), 4) for size in (1, 4)]
    whole, part = (plan.memory.activations_bytes for plan in plans)
    assert 0.2 * whole < part < 0.6 * whole
    assert [plan.work.idle_steps for plan in plans] == [1, 0]  # the last step has one micro-batch
    with pytest.raises(ConfigError, match=r"^parallel.context=3 does not divide the number of processes, 4"):
        make_plan(Recipe.load("language_modeling", *BLOCKS[1:], *files, "parallel.context=3"), 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallel.context=3",), "parallel.context=3 does not divide the number of processes, 4."),
        ((TWO, "train.packing=off"), "parallel.context=2 does not work with train.packing=off."),
        ((TWO, "train.compile=true"), "parallel.context=2 does not work with train.compile=true."),
        ((TWO, "parallel.pipeline_stages=2"), "parallel.context=2 does not work with parallel.pipeline_stages=2."),
        ((TWO, "train.micro_batch_size=auto"), "train.micro_batch_size=auto does not work with parallel.context=2:"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(words, said, monkeypatch):
    for variable, value in {"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        check_launcher(Recipe.load("yelp_demo", *words))
    assert str(caught.value).startswith(said)
    monkeypatch.setenv("WORLD_SIZE", "1")  # one process computes alone
    check_launcher(Recipe.load("yelp_demo", "parallel.context=3"))


@pytest.mark.parametrize(
    ("reason", "heads", "said"),
    [
        ("it has 3 stacks of layers", 4, "padding: it has 3 stacks"),
        (None, 6, "its 6 attention heads cannot be shared out"),
        (None, "two stacks", "an encoder-decoder has two kinds of them"),
    ],
)
def test_models_that_cannot_be_spread_are_refused(reason, heads, said):
    config = SimpleNamespace(num_attention_heads=heads)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config, is_encoder_decoder=heads == "two stacks"))
    with pytest.raises(ConfigError, match=said):
        check_spreadable(None, model, 4, reason)


def test_fewer_tokens_than_processes_are_computed_by_each():
    context = Context(None, 1, 4)
    assert context.split(few := Packing.of(torch.ones(1, 3)), gathers=False) is few and context.part(torch.Size([1, 3])) is None
    packing = context.split(Packing.of(torch.ones(2, 5)), gathers=False)
    assert packing.indices_N.tolist() == [3, 4, 5] and context.tokens == [3, 3, 2, 2]
    assert context.part(torch.Size([1, 3, 8])) == (3, 10)
    for shape in ([1, 10, 8], [3, 8]):
        with pytest.raises(ConfigError, match="which has no row for each token"):
            context.part(torch.Size(shape))
    targets = context.own_targets(torch.arange(10).view(2, 5), packing)
    assert targets.tolist() == [[-100] * 3 + [3, 4], [5] + [-100] * 4]
