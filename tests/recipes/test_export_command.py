"""``hftune export``: what it writes answers as the run does, and what does not is refused and not left there."""

import json
import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput

from hftune import Recipe, TrainingError, cli
from hftune.commands import export_check
from hftune.commands.export_check import Pair, problem, said
from hftune.inference import load_export
from tests.support.predictions import untrained
from tests.support.runs import NO_DROPOUT, TINY

needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason='onnx is not installed: pip install "hftune[onnx]"',
)
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason='openvino is not installed: pip install "hftune[openvino]"'
)
ROUNDING = 1e-5  # float32, of outputs around 1


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """The command chooses the CPU, and one thread of it, for its whole process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", os.environ.get("TRANSFORMERS_VERBOSITY", "warning"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Texts of many lengths, in batches of 4 whose last one is a single text."""
    return untrained("yelp_demo", tmp_path_factory.mktemp("classifier") / "out", *TINY, *NO_DROPOUT, "eval.batch_size=4")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return untrained("chats_demo", tmp_path_factory.mktemp("chats") / "out")


def answers_of_torch(run, texts):
    recipe = Recipe.load(run / "recipe.yaml")
    model = load_export(recipe.task, run / "model").eval()
    with torch.no_grad():
        return [model(**recipe.task.text_tokenizer(text, return_tensors="pt")).logits for text in texts]


def check_graph(run, output):
    """The folder is enough to answer texts of lengths that no batch had, alone and together."""
    from transformers.exporters import ExportedModel

    texts = ["good", "what a place , and what a dreadful night we had there with all of our friends from the city !"]
    tokens = AutoTokenizer.from_pretrained(output)
    model = ExportedModel.from_pretrained(output, device="cpu")  # OpenVINO may compute in bfloat16
    close = ROUNDING if model.export_format == "onnx" else 0.03
    for text, expected in zip(texts, answers_of_torch(run, texts), strict=True):
        alone = model(**tokens(text, return_tensors="pt")).logits
        together = model(**tokens([text, *texts], return_tensors="pt", padding=True)).logits[:1]
        torch.testing.assert_close(alone, expected, atol=close, rtol=0)
        torch.testing.assert_close(together, expected, atol=close, rtol=0)


@needs_onnx
def test_an_onnx_graph_answers_as_the_run_does_for_other_lengths_and_batches(classifier, tmp_path, capsys):
    assert cli.main(["export", str(classifier), "--format", "onnx"]) == 0
    output = classifier / "model_onnx"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(output) and "equal answers  100 %" in printed
    found = json.loads((output / "comparison.json").read_text())
    assert found["largest_difference"] < ROUNDING and found["samples"] == 9 and found["shapes"] >= 3
    assert found["metrics"]["accuracy"][0] == found["metrics"]["accuracy"][1]
    assert not [*output.glob("*.safetensors")]
    check_graph(classifier, output)
    assert cli.main(["export", str(classifier), "--format", "onnx"]) == 2
    assert f"{output} is there already. Remove it" in capsys.readouterr().err

    eight = tmp_path / "eight"
    words = ["export", str(classifier), "--format", "onnx", "--quantize", "int8", "--output", str(eight)]
    assert cli.main([*words, "--max-drop", "0.5"]) == 0
    assert json.loads((eight / "comparison.json").read_text())["largest_difference"] > 10 * ROUNDING
    weights = [sum(file.stat().st_size for file in folder.glob("*.data")) for folder in (eight, output)]
    assert weights[0] < weights[1] / 2


@needs_openvino
def test_an_openvino_graph_answers_as_the_run_does(classifier, capsys):
    assert cli.main(["export", str(classifier), "--format", "openvino"]) == 0
    assert 'config={"INFERENCE_PRECISION_HINT": "f32"}' in capsys.readouterr().out
    check_graph(classifier, classifier / "model_openvino")


def test_a_folder_for_vllm_is_whole_and_answers_as_the_run_does(chats, capsys):
    assert cli.main(["export", str(chats), "--format", "vllm-ready"]) == 0
    output = chats / "model_vllm"
    assert "equal answers  100 %" in capsys.readouterr().out
    tokens = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id is not None
    assert "hello" in tokens.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert cli.main(["export", str(chats), "--format", "vllm-ready", "--dtype", "bf16", "--output", str(chats / "bf16")]) == 0
    assert AutoModelForCausalLM.from_pretrained(chats / "bf16").dtype == torch.bfloat16


def test_a_model_that_answers_otherwise_is_refused_and_not_left(chats, tmp_path, capsys, monkeypatch):
    written = export_check.write_folder

    def spoilt(*args):
        model = written(*args)
        nn.init.normal_(model.lm_head.weight)
        return model

    monkeypatch.setattr(export_check, "write_folder", spoilt)
    assert cli.main(["export", str(chats), "--format", "vllm-ready", "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "The exported model does not answer as the run's does. Its outputs are up to " in said.err
    assert "equal answers" in said.out and not [*tmp_path.iterdir()]


def test_what_cannot_be_exported_is_refused(classifier, chats, capsys):
    def refused(run, *words):
        assert cli.main(["export", str(run), *words]) == 2
        return capsys.readouterr().err

    assert "--dtype bf16 is for --format vllm-ready, not for onnx." in refused(chats, "--format", "onnx", "--dtype", "bf16")
    assert "is for decoders of transformers that write texts" in refused(classifier, "--format", "vllm-ready")
    assert not (classifier / "model_vllm").exists()


@needs_onnx
def test_a_model_that_writes_texts_in_its_evaluation_is_refused_as_a_graph(chats, capsys):
    assert cli.main(["export", str(chats), "--format", "onnx"]) == 2
    assert "has no cache" in capsys.readouterr().err


def test_a_missing_library_is_named(classifier, capsys, monkeypatch):
    monkeypatch.setattr("hftune.commands.export.find_spec", lambda name: None)
    assert cli.main(["export", str(classifier), "--format", "openvino"]) == 2
    assert 'needs openvino, which is not installed: pip install "hftune[openvino]".' in capsys.readouterr().err


class Off(nn.Module):
    """Returns logits (B, T, K) that are off by so much, and by far more at the last place."""

    def __init__(self, off=0.0, at_the_end=0.0):
        super().__init__()
        self.off, self.at_the_end = off, at_the_end

    def forward(self, input_ids, attention_mask):
        logits_BTK = nn.functional.one_hot(input_ids, 5).float() + self.off
        logits_BTK[:, -1] += self.at_the_end * torch.tensor([0, 0, 0, 0, 1.0])
        return SequenceClassifierOutput(logits=logits_BTK)


@pytest.mark.parametrize(
    ("exported", "mask", "expected"),
    [
        (Off(0.25), [1, 1, 1], (0.25, 1.0)),
        (Off(at_the_end=9.0), [1, 1, 1], (9.0, 1.0)),
        (Off(at_the_end=9.0), [1, 1, 0], (0.0, 1.0)),  # padding
    ],
)
def test_the_difference_is_the_largest_of_what_is_no_padding(exported, mask, expected):
    pair = Pair(Off(), exported)
    pair(input_ids=torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([mask]))
    pair(input_ids=torch.tensor([[1, 2]]), attention_mask=torch.tensor([mask[1:]]))
    assert pair.distance() == expected
    assert pair.same_tokens == pair.tokens - (2 if expected[0] == 9.0 else 0) and len(pair.shapes) == 2


def fails(**inputs):
    raise RuntimeError("too long")


def test_outputs_that_are_no_numbers_or_of_another_shape_are_no_rounding():
    pair = Pair(Off(), Off(float("nan")))
    inputs = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2)}
    pair(**inputs)
    found = dict(zip(("largest_difference", "largest_output"), pair.distance(), strict=True))
    assert "Its outputs are up to nan from the run's" in problem(None, found, True, 0.0)
    with pytest.raises(TrainingError, match=r"fails where the run's does not, for input_ids \(1, 2\), .*: too long"):
        Pair(Off(), fails)(**inputs)
    with pytest.raises(TrainingError, match="do not have the shapes"):
        pair.compare(pair.model(**inputs), SequenceClassifierOutput(logits=torch.zeros(1, 2, 4)), None)


@pytest.mark.parametrize(
    ("metric", "ours", "theirs", "share"),
    [("accuracy", 0.8, 0.79, None), ("accuracy", 0.8, 0.9, None), ("accuracy", 0.8, 0.7, "12.5%"), ("loss", 2.0, 2.2, "10.0%")],
)
@pytest.mark.parametrize("chosen", ["{}", "shifted/{}", "shifted/accuracy"])  # of another set, whose metrics it compares
def test_fewer_bits_may_cost_so_much_of_the_metric_and_no_more(metric, ours, theirs, share, chosen):
    recipe = Recipe.load("yelp_demo", f"eval.metric={chosen.format(metric)}", "eval.sets.shifted.eval_split=test")
    reason = problem(recipe, {"metrics": {metric: [ours, theirs]}}, False, 0.02)
    assert reason is None if share is None else f": {share} worse, and --max-drop is 2.0%." in reason


def test_answers_are_what_a_row_predicts_or_writes_and_no_number():
    assert said({"label": 1, "prediction": [0, 1]}) == [0, 1] and said({"generated": "a"}) == "a"
    assert said({"prediction": 0.5}) is None and said({"loss": 1.0, "tokens": 3}) is None
