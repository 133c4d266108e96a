"""What perf/mfu is computed from: the arithmetic of a model, and what a device could do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hftune.batch_plan import MicroBatch
from hftune.callbacks import Wishes
from hftune.config.sections import TrainConfig
from hftune.distributed import devices
from hftune.models.transformer_lm import TransformerLM, TransformerLMConfig
from hftune.strategies.arithmetic import Arithmetic
from hftune.tracking import throughput
from hftune.tracking.throughput import Stopwatch, Throughput
from tests.support.events import step_taken

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}


def bert(**fields):
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **SIZES, **fields))


MODELS = {
    "bert": bert,
    "gpt2": lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2)),
    "llama": lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)),
    "hftune's own": lambda: TransformerLM(TransformerLMConfig(**SIZES)),
}


@pytest.mark.parametrize("name", MODELS)
def test_arithmetic_is_what_torch_counts_operation_by_operation(name):
    model = MODELS[name]().eval()
    ids_NT = torch.arange(60).reshape(3, 20) % 50
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=ids_NT).logits.sum().backward()
    counted = Arithmetic.of(model).flops(np.full(3, 20), num_items=60)
    assert counted == pytest.approx(counter.get_total_flops(), rel=3e-3)  # BERT's pooler, of one token a text, is left out


def frozen():
    model = bert()
    model.bert.encoder.requires_grad_(False)
    return model


NOT_COUNTED = {
    "no transformer": lambda: nn.Sequential(nn.Linear(2, 2)),
    "shared layers": lambda: AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("albert", **SIZES, embedding_size=16)
    ),
    "experts": lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES, num_key_value_heads=2)),
    "encoder and decoder": lambda: AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", d_model=32, num_layers=2)),
    "frozen layers": frozen,
}


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_other_kinds_of_models_are_not_counted(name):
    assert Arithmetic.of(NOT_COUNTED[name]()) is None


def test_utilisation_is_useful_arithmetic_over_what_the_devices_could_do(monkeypatch):
    lengths, wishes = np.array([2, 4, 1]), Wishes({})
    micro_batches = [MicroBatch(0, np.array([1, 0]), 4, 8, 8), MicroBatch(1, np.array([2]), 1, 1, 1)]

    def rates(peak_flops):
        speed = Throughput(arithmetic=Arithmetic(per_token=10, per_square=1, per_item=100), peak_flops=peak_flops)
        speed.on_begin(SimpleNamespace(plan=SimpleNamespace(lengths=lengths)))
        for is_logged in (False, True):
            taken = {"loss": 0.5, "num_samples": 3, "num_items": 3, "seconds": 2.0, "micro_batches": micro_batches}
            speed.on_step(step_taken(1, wishes=wishes, is_logged=is_logged, **taken))
        return wishes.take_values()

    found = rates(1000.0)
    # Per step 7 tokens, of squares 4 + 16 + 1, and 3 items: 391 operations.
    assert found["perf/mfu"] == pytest.approx(2 * 391 / 4 / 1000)
    assert (found["perf/step_s"], found["perf/samples_per_s"], found["perf/tokens_per_s"]) == (2.0, 1.5, 3.5)
    assert "perf/mfu" not in rates(None)


def test_what_is_paused_is_not_training(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: seconds[0])
    clock = Stopwatch()
    with clock.paused():
        seconds[0] += 99
    seconds[0] += 4
    assert (clock.lap(), clock.lap()) == (4.0, 0.0)


@pytest.mark.parametrize(
    ("name", "bf16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA L40S", 362, 91.6),
        ("Tesla T4", None, 8.1),
    ],
)
def test_gpus_are_known_by_words_of_their_names(name, bf16, float32):
    known = devices.known_tflops(name)
    assert (known.get("bf16"), known["float32"]) == (bf16, float32)


def test_a_gpu_that_is_not_in_the_table_is_not_taken_for_another():
    assert devices.known_tflops("NVIDIA A10G") is None  # no A10
    assert devices.known_tflops("NVIDIA GeForce RTX 4090") is None


def pretend_gpu(monkeypatch, name, has_bf16):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    return torch.device("cuda", 0)


def test_the_peak_is_that_of_the_precision(monkeypatch):
    gpu = pretend_gpu(monkeypatch, "NVIDIA H200", True)
    peaks = [devices.peak_flops(gpu, *how) for how in (("bf16",), ("fp16",), ("no",), ("no", True))]
    assert peaks == [989e12, 989e12, 67e12, 495e12]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    assert [devices.peak_flops(gpu, kind, tf32=True) for kind in ("bf16", "no")] == [125e12, 15.7e12]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert devices.peak_flops(gpu, "bf16") is devices.peak_flops(torch.device("cpu"), "bf16") is None


def test_float32_on_a_gpu_with_bf16_gets_one_remark_unless_the_recipe_asks_for_tf32(monkeypatch):
    gpu = pretend_gpu(monkeypatch, "NVIDIA H100 80GB HBM3", True)
    assert devices.precision_notices(TrainConfig(), "no", gpu) == [
        "This GPU (NVIDIA H100 80GB HBM3) computes bf16 about 15 times as fast as float32: set train.mixed_precision=bf16, or auto."
    ]
    assert devices.precision_notices(TrainConfig(tf32=True), "no", gpu) == []
    assert devices.precision_notices(TrainConfig(mixed_precision="bf16"), "bf16", gpu) == []
    assert devices.precision_notices(TrainConfig(), "no", torch.device("cpu")) == []
    assert devices.precision_notices(TrainConfig(), "no", pretend_gpu(monkeypatch, "Tesla T4", False)) == []
    (unknown,) = devices.precision_notices(TrainConfig(), "no", pretend_gpu(monkeypatch, "Some GPU", True))
    assert "computes bf16 many times as fast" in unknown


def test_auto_is_bf16_only_where_the_device_computes_it_and_says_so(monkeypatch):
    auto, cpu = TrainConfig(mixed_precision="auto"), torch.device("cpu")
    assert devices.agreed_precision("auto", cpu) == "no"
    assert devices.agreed_precision("fp16", cpu) == "fp16"
    assert devices.precision_notices(auto, "no", cpu) == []
    gpu = pretend_gpu(monkeypatch, "NVIDIA H200", True)
    assert devices.computes_bf16(gpu)
    assert devices.precision_notices(auto, "bf16", gpu) == [
        "train.mixed_precision=auto: bf16, which the GPUs of all processes compute."
    ]
    old = pretend_gpu(monkeypatch, "Tesla T4", False)
    assert not devices.computes_bf16(old)
    assert devices.precision_notices(auto, "no", old) == [
        "train.mixed_precision=auto: float32, as a GPU of this job has no bf16."
    ]
