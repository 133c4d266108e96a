"""The loss computed together with the head: the loss and the gradient of whole logits, without the logits."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    LlamaForCausalLM,
)

import hftune.models.transformer_lm  # noqa: F401 - registers the classes
from hftune import Recipe, Task, train
from hftune.models import scored_head
from hftune.models.bigbird import PrefixLM, PrefixLMConfig
from hftune.models.scored_head import Head, ScoredOutput, install
from hftune.planning.plan import make_plan
from hftune.strategies.packing import reads_scores
from hftune.strategies.trial import head_problem
from hftune.tasks.language_modeling import LanguageModeling
from hftune.tasks.text import head_loss, head_losses
from tests.support.runs import Run

WORDS = 97
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
DECODERS = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8},
    "gpt2": {},
    "transformer_lm": {},  # its head has a bias
    "gemma2": {"final_logit_softcapping": 0.5, "num_key_value_heads": 1, "head_dim": 8},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}
PAIRS = {
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
}


def decoder(kind, **settings):
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "max_position_embeddings": 64}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **ends, **{**DECODERS[kind], **settings}))


def pair(kind):
    torch.manual_seed(0)
    if kind == "encoder_decoder":
        parts = [
            BertConfig(**SIZES, max_position_embeddings=64, is_decoder=last, add_cross_attention=last) for last in (False, True)
        ]
        return EncoderDecoderModel(encoder=BertModel(parts[0]), decoder=BertLMHeadModel(parts[1]))
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2} if kind == "bart" else {}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, vocab_size=WORDS, **PAIRS[kind], **heads))
    if kind == "bart":
        model.final_logits_bias.normal_()
    return model


def batch(model, share=0.6):
    """Inputs of 3 rows of 11 tokens, and targets, a share of which is to be predicted."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, WORDS, (3, 11), generator=generator) for _ in range(2))
    labels[torch.rand(3, 11, generator=generator) > share] = -100
    if model.config.is_encoder_decoder:
        return {"input_ids": ids[:, :7], "decoder_input_ids": ids, "use_cache": False}, labels
    if isinstance(model, PrefixLM):
        types = (torch.arange(11) > 5).long().expand(3, 11)
        return {"input_ids": ids, "token_type_ids": types, "logits_to_keep": 5, "use_cache": False}, labels[:, 6:]
    return {"input_ids": ids, "use_cache": False}, labels


def whole_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def losses_and_gradients(model, share=0.6, scale=0.125):
    """Loss, each token's loss, and all gradients: from the logits, and in chunks of 4 rows."""
    inputs, labels = batch(model, share)
    found = []
    for chunks in (False, True):
        model.zero_grad()
        undo = install(model, at_once=4 * WORDS) if chunks else lambda: None
        given = {**inputs, "targets": labels} if chunks else inputs
        outputs = model(**given)
        assert isinstance(outputs, ScoredOutput) == chunks
        loss = outputs.loss_sum if chunks else whole_loss(outputs.logits, labels)
        (loss * scale).backward()
        with torch.no_grad():
            each = head_losses(model(**given), labels)
        undo()
        gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
        found.append((loss.detach(), each, gradients))
    return found


def same(found, tolerance):
    (loss, each, gradients), (chunked, each_chunked, found_gradients) = found
    assert chunked.dtype == loss.dtype and abs(chunked - loss) <= tolerance * max(1, abs(loss))
    assert each_chunked.shape == each.shape and (each_chunked - each).abs().max() <= 10 * tolerance
    assert gradients.keys() == found_gradients.keys() and gradients
    most = max(value.abs().max() for value in gradients.values())
    for name, value in gradients.items():
        assert (found_gradients[name] - value).abs().max() <= tolerance * max(1, most), name


@pytest.mark.parametrize("kind", [*DECODERS, *PAIRS, "encoder_decoder", "prefix_lm"])
def test_chunks_give_loss_and_gradient_of_whole_logits(kind):
    if kind == "prefix_lm":
        model = PrefixLM(PrefixLMConfig.warm_start(BertConfig(**SIZES, max_position_embeddings=64)))
    else:
        model = decoder(kind) if kind in DECODERS else pair(kind)
    same(losses_and_gradients(model.eval()), 2e-6)
    if kind == "gpt2":  # float64 throughout, where others have norms in float32
        same(losses_and_gradients(model.double()), 1e-12)


def test_frozen_heads_and_frozen_bodies_get_the_gradients_that_they_should():
    model = decoder("transformer_lm").eval()
    model.lm_head.requires_grad_(False)
    same(losses_and_gradients(model), 2e-6)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    (_, _, gradients), _ = found = losses_and_gradients(model)
    assert gradients.keys() == {"lm_head.weight"}
    same(found, 2e-6)


def test_gradient_checkpointing_and_autocast_change_nothing_more_than_they_do_anyway():
    model = decoder("llama")
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    same(losses_and_gradients(model), 2e-6)
    with torch.autocast("cpu", torch.bfloat16):
        same(losses_and_gradients(model), 2e-2)


@pytest.mark.parametrize("targets", ["lm_head", "all"])
def test_an_adapter_on_the_head_is_differentiated(targets):
    peft = pytest.importorskip("peft")
    model = decoder("llama")
    names = ["lm_head"] if targets == "lm_head" else ["lm_head", "q_proj", "down_proj"]
    model.add_adapter(peft.LoraConfig(r=3, target_modules=names, init_lora_weights=False))
    (_, _, gradients), _ = found = losses_and_gradients(model)
    assert all("lora_" in name for name in gradients)
    same(found, 2e-6)


@pytest.mark.parametrize("chunk", [4, 10_000])
def test_rows_without_a_target_never_meet_the_head(chunk):
    """Not in micro-batches of less than a chunk either, if most have none."""
    model = decoder("llama")
    inputs, labels = batch(model, share=0.3)
    rows = []
    install(model, at_once=chunk * WORDS)
    linear = model.lm_head.forward
    model.lm_head.forward = lambda hidden: rows.append(len(hidden)) or linear(hidden)
    model(**inputs, targets=labels).loss_sum.backward()
    num_targets = int((labels != -100).sum())
    assert sum(rows) == num_targets and max(rows) == min(chunk, num_targets)


def test_without_any_target_loss_and_gradient_are_zero():
    model = decoder("transformer_lm")
    (loss, _, _), (chunked, _, gradients) = losses_and_gradients(model, share=-1)
    assert loss == chunked == 0
    assert not any(value.any() for value in gradients.values()) and "lm_head.weight" in gradients


def test_small_micro_batches_keep_their_bits_and_generation_its_arguments():
    model = decoder("llama").eval()
    inputs, labels = batch(model)
    expected = model(**inputs)
    undo = install(model, at_once=labels.numel() * WORDS)
    found = model(**inputs, targets=labels)
    assert torch.equal(found.logits, expected.logits) and torch.equal(head_loss(found, labels), head_loss(expected, labels))
    text = model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    undo()
    assert "forward" not in vars(model)
    assert torch.equal(text, model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False))


def test_a_second_backward_pass_is_refused_and_not_scaled_twice():
    model = decoder("llama")
    inputs, labels = batch(model)
    install(model, at_once=4 * WORDS)
    loss = model(**inputs, targets=labels).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", DECODERS)
def test_each_loss_has_a_gradient_of_its_own_where_that_is_asked_for(kind):
    model, found = decoder(kind).double().eval(), []
    inputs, labels = batch(model)
    weights = torch.randn(labels.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for chunks in (False, True):
        model.zero_grad()
        if chunks:
            install(model, at_once=4 * WORDS, each=True)
        losses = head_losses(model(**inputs, targets=labels) if chunks else model(**inputs), labels)
        (losses * weights).sum().backward()
        found.append(
            (losses.sum().detach(), losses.detach(), {name: value.grad.clone() for name, value in model.named_parameters()})
        )
    same(found, 1e-12)


@pytest.mark.parametrize("recipe", ["dpo_demo", "kto_demo"])
def test_preferences_are_learned_the_same_in_chunks(recipe, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        scored_head, "checkpoint", lambda *args, **more: seen.append(args[1].shape[0]) or checkpoint(*args, **more)
    )
    runs = {}
    for how in ("whole", "auto"):
        monkeypatch.setattr(scored_head, "AT_ONCE", 2**12)
        few = ("task.max_train_samples=48", "task.max_eval_samples=16", "train.max_steps=3", "train.log_every=1")
        train(Recipe.load(recipe, *few, f"train.head_loss={how}", f"output_dir={tmp_path / how}", "train.micro_batch_size=4"))
        assert bool(seen) == (how == "auto")
        runs[how] = Run(tmp_path / how)
    assert max(seen) <= 2**12 // 300
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert runs["auto"].logged(name) == pytest.approx(runs["whole"].logged(name), rel=1e-5)


@dataclass
class Tokens(Task):
    """The next of 97 tokens."""

    scored_head = True

    def datasets(self):
        return {}

    def build_model(self):
        return decoder("llama")

    def collate(self, examples):
        return torch.utils.data.default_collate(examples)

    def loss(self, outputs, target):
        return head_loss(outputs, target)

    def predictions(self, outputs, model, batch):
        return [{} for _ in batch["labels"]]


@dataclass
class OwnLoss(Tokens):
    def loss(self, outputs, target):
        return whole_loss(outputs.logits, target)


@dataclass
class OwnPredictions(Tokens):
    def predictions(self, outputs, model, batch):
        return outputs.logits.argmax(-1).tolist()


@pytest.fixture
def samples():
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


def tried(task, model, samples):
    found = head_problem(model, task, samples, 1, torch.device("cpu"))
    assert "forward" not in vars(model)  # the trial leaves no trace
    return found


def test_the_trial_lets_a_model_through_that_computes_the_same(samples):
    assert tried(Tokens(), decoder("llama"), samples) is None
    assert tried(Tokens(), decoder("gemma2"), samples) is None


def test_a_base_in_bf16_with_a_head_in_float32_is_tried_as_it_is_trained(samples):
    model = decoder("llama").bfloat16()
    model.lm_head.float()
    found = head_problem(model, Tokens(), samples, 1, torch.device("cpu"), torch.bfloat16)
    assert found is None


class Halved(LlamaForCausalLM):
    def forward(self, *args, **inputs):
        outputs = super().forward(*args, **inputs)
        outputs.logits = outputs.logits / 2
        return outputs


def test_the_trial_finds_what_a_model_does_behind_its_head(samples):
    model = Halved(decoder("llama").config)
    assert "chunks give another loss of a sample" in tried(Tokens(), model, samples)


class Capped(LlamaForCausalLM):
    def forward(self, *args, **inputs):
        outputs = super().forward(*args, **inputs)
        outputs.logits = 30 * torch.tanh(outputs.logits / 30)
        return outputs


def test_the_trial_finds_what_changes_nothing_before_training(samples):
    """As the soft-capping of xLSTM, whose config names it otherwise."""
    config = decoder("llama").config
    config.initializer_range = 0.02
    model = Capped(config)
    assert "a sample whose logits are 64 times as large" in tried(Tokens(), model, samples)
    assert not model.lm_head._forward_pre_hooks


def test_the_trial_finds_a_loss_that_needs_logits(samples):
    assert "chunks fail" in tried(OwnLoss(), decoder("llama"), samples)


def test_a_subclass_with_predictions_of_its_own_is_given_logits():
    assert reads_scores(Tokens()) and reads_scores(LanguageModeling()) and not reads_scores(OwnPredictions())


def test_a_model_without_a_head_for_tokens_has_none():
    assert Head.of(nn.Linear(2, 2)) is None


def test_a_plan_counts_the_chunks(monkeypatch):
    monkeypatch.setattr(scored_head, "AT_ONCE", 2**14)
    together = ("train.micro_batch_size=20", "train.parts=1")
    plans = [make_plan(Recipe.load("wikitext2_demo", *together, f"train.head_loss={how}")) for how in ("whole", "auto")]
    whole, chunks = (plan.memory.activations_bytes for plan in plans)
    words = len(Recipe.load("wikitext2_demo").task.text_tokenizer)
    assert plans[0].memory.samples == 20 and whole - chunks > 4 * 20 * 35 * words  # at least a tensor of all logits
    assert plans[0].unused_parameters == plans[1].unused_parameters == []


def test_chunks_stay_in_the_cache_of_a_cpu_and_keep_a_gpu_busy():
    rows = {words: [scored_head.rows_at_once(words, is_cuda) for is_cuda in (False, True)] for words in (2048, 150_000, 2**25)}
    assert rows == {2048: [512, 8192], 150_000: [111, 512], 2**25: [1, 512]}


def test_only_tokens_with_a_label_meet_the_head_of_a_micro_batch_of_more_than_a_chunk(monkeypatch):
    model = decoder("llama")
    install(model)
    seen, losses = [], Head.losses
    monkeypatch.setattr(Head, "losses", lambda self, hidden, *rest: seen.append(len(hidden)) or losses(self, hidden, *rest))
    ids = torch.arange(1200).remainder(WORDS)[None]
    for length, expected in ((512, []), (1200, [512, 94])):
        model(input_ids=ids[:, :length], targets=torch.where(ids % 2 == 0, ids, -100)[:, :length])
        assert seen == expected
