"""Recordings: decoding, what models hear of them, and error rates, against the libraries that others use."""

import itertools
import json
import math
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
import soxr
import torch
import torchmetrics.functional.text as oracle
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForAudioClassification, GenerationMixin, SeamlessM4TFeatureExtractor, pipeline
from transformers.modeling_outputs import CausalLMOutput

import hftune
from hftune import ConfigError, DataError, Recipe
from hftune.cli import main
from hftune.data.audio import decode_recordings, read_audio, spectrogram_picture
from hftune.metrics.speech import error_rates
from hftune.models.audio import Listener, character_tokenizer, check_padding, new_feature_extractor, prepare_encoders
from hftune.models.pretrained import loading
from hftune.tasks import speech_recognition

RATE = 16_000
SIZES = {
    **{"conv_dim": [8, 8], "conv_kernel": [20, 8], "conv_stride": [10, 8], "num_feat_extract_layers": 2, "hidden_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_conv_pos_embeddings": 8},
    **{"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "layerdrop": 0.0, "num_labels": 3},
}
FEW = ("task.max_train_samples=12", "task.max_eval_samples=5")


def noise(seconds, seed=0, rate=RATE):
    return (np.random.RandomState(seed).randn(int(rate * seconds)) / 10).astype(np.float32)


def tiny(kind, **others):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **others})
    model = AutoModelForAudioClassification.from_config(config).eval()
    for value in model.parameters():  # so large that a difference shows
        value.data += 0.1 * torch.randn_like(value)
    return model, Listener(new_feature_extractor(config), kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of recordings: 48 kHz stereo flac, and 16 kHz mono wav; and a table that names them."""
    folder = tmp_path_factory.mktemp("sounds")
    lines = ["path,label,text"]
    for index in range(12):
        name, kind = f"{index}.{'flac' if index % 2 else 'wav'}", ("hum", "hiss")[index % 2]
        rate = (RATE, 48_000)[index % 2]
        (folder / "train" / kind).mkdir(parents=True, exist_ok=True)
        samples = noise(0.3 + index / 50, index, rate)
        soundfile.write(folder / "train" / kind / name, np.stack([samples, samples / 2], 1) if index % 2 else samples, rate)
        lines.append(f"train/{kind}/{name},{kind},{kind} {'a' * (index % 3 + 1)}")
    (folder / "clips.csv").write_text("\n".join(lines))
    return folder


# Decoding


def test_stereo_at_48_khz_is_mixed_and_resampled_and_arrays_and_bytes_are_read_alike(folder):
    path = folder / "train/hiss/1.flac"
    samples_TC, rate = soundfile.read(path, dtype="float32")
    expected = soxr.resample(samples_TC.mean(1), rate, RATE)
    given = [path, str(path), {"bytes": path.read_bytes(), "path": None}, {"array": samples_TC, "sampling_rate": rate}]
    for stored in [*given, {"array": samples_TC.T.tolist(), "sampling_rate": rate}]:
        found = read_audio(stored, "It", RATE)
        assert found.dtype == np.float32 and len(found) == math.ceil(len(samples_TC) / 3)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(read_audio(found, "It", RATE), found)


@pytest.mark.parametrize(("kind", "subtype"), [("int16", "PCM_16"), ("int32", "PCM_32"), ("uint8", "PCM_U8")])
def test_integers_are_scaled_as_those_of_files_are(tmp_path, kind, subtype):
    soundfile.write(tmp_path / "a.wav", noise(0.1), RATE, subtype=subtype)
    expected = read_audio(tmp_path / "a.wav", "It", RATE)
    least, half = (0, 128) if kind == "uint8" else (np.iinfo(kind).min, -np.iinfo(kind).min)
    stored = np.rint(expected.astype(np.float64) * half + least + half).astype(kind)
    for given in (stored, {"array": stored, "sampling_rate": RATE}):
        np.testing.assert_allclose(read_audio(given, "It", RATE), expected, atol=1e-7)
    for array in (stored, np.stack([stored, stored])):
        rows = datasets.Dataset.from_list([{"sound": {"array": array, "sampling_rate": RATE}}])
        assert np.array_equal(decode_recordings(rows, "sound", "train", RATE).flat, read_audio(given, "It", RATE))


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "It has no recording. Remove such rows."),
        ("none.wav", "It (none.wav): there is no such file."),
        ({"bytes": b"RIFF no", "path": "a.wav"}, "It is not a recording that can be read: "),
        (np.zeros(0, np.float32), "It is empty: it has no samples. Remove it."),
        (np.full(9, np.nan), "It has samples that are not finite numbers."),
        ({"array": [0, -20_000], "sampling_rate": RATE}, "It has samples of up to 20000, not within [-1, 1]. Divide them by "),
        (np.array([0.0, 20_000.0]), "It has samples of up to 20000, not within [-1, 1]. Divide them by "),
        ({"array": [0.0, 1.0], "sampling_rate": None}, "It has an array (2,) with sampling_rate=None."),
        (3, "It is a int, not a path, an array, or {array, sampling_rate}."),
    ],
)
def test_what_is_no_recording_is_said(stored, said):
    with pytest.raises(DataError) as error:
        read_audio(stored, "It", RATE)
    assert str(error.value).startswith(said)


def test_rows_are_decoded_once_and_the_first_broken_one_is_named(folder, tmp_path):
    rows = datasets.Dataset.from_dict({"path": ["train/hiss/1.flac", "train/hum/0.wav"], "label": [0, 1]})
    found = decode_recordings(rows, "path", "train", RATE, [folder])
    np.testing.assert_array_equal(found.rows()[1], read_audio(folder / "train/hum/0.wav", "", RATE))
    again = decode_recordings(rows, "path", "train", RATE, [folder])
    assert again.flat.filename == found.flat.filename
    (tmp_path / "broken.wav").write_bytes(b"nothing")
    rows = datasets.Dataset.from_dict({"path": [str(folder / "train/hum/0.wav"), str(tmp_path / "broken.wav")]})
    with pytest.raises(DataError, match=r"^Row 1 of the train split \(.*broken.wav\) is not a recording that can be read"):
        decode_recordings(rows, "path", "train", RATE)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(ConfigError, match=r'^Recordings need soxr, .*: pip install "hftune\[audio\]"$'):
        read_audio({"array": [0.0, 1.0, 2.0], "sampling_rate": 8000}, "It", RATE)


def test_a_picture_shows_low_tones_at_the_bottom():
    time = np.arange(RATE) / RATE
    low, high = (spectrogram_picture(np.sin(2 * np.pi * hertz * time))[..., 0] for hertz in (500, 7000))
    assert low.shape == (128, 124) and low.dtype == np.uint8
    assert low.mean(1).argmin() > 100 > 30 > high.mean(1).argmin()


# What models hear


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat"])
def test_a_recording_is_heard_as_if_it_were_alone_also_where_groups_are_normalized(kind):
    model, listener = tiny(kind)
    audio = [noise(seconds, seed) for seed, seconds in enumerate((0.31, 0.8, 0.5))]
    padded = listener(audio)
    theirs = [model(**listener([own])).logits[0] for own in audio]
    assert (model(padded["input_values"]).logits[0] - theirs[0]).abs().max() > 1e-3  # what transformers does
    with pytest.raises(ConfigError, match="depends on how long the ones beside it are"):
        check_padding(model, listener)
    prepare_encoders(model)
    check_padding(model, listener)
    ours = model(**padded).logits
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)
    ours.square().sum().backward()
    together = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    model.zero_grad()
    sum(model(**listener([own])).logits.square().sum() for own in audio).backward()
    alone = [value.grad for value in model.parameters() if value.grad is not None]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "sew"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_gradient_of_recordings_is_computed_nor_one_of_frozen_convolutions(kind, is_frozen):
    seen, gradients = [], []
    for prepare in (lambda model: None, prepare_encoders):
        torch.manual_seed(0)
        model, listener = tiny(kind, mask_time_prob=0.0, layerdrop=0.0)
        prepare(model)
        encoder = model.base_model.feature_extractor
        encoder.requires_grad_(not is_frozen)
        encoder.conv_layers[0].conv.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
        encoder.register_forward_hook(lambda *given: seen.append(given[-1].requires_grad))
        inputs = listener([noise(0.5)])  # alone, as not all know padding before
        model.train()(**inputs).logits.square().sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert seen == [True, True, False, not is_frozen]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_samples_are_padded_as_their_feature_extractor_pads_them():
    _, listener = tiny("wav2vec2")
    audio = [noise(0.3), noise(0.5, 1) + 0.2, noise(0.1, 2)]
    expected = listener.extractor(audio, sampling_rate=RATE, padding=True, return_attention_mask=True, return_tensors="pt")
    found = listener(audio)
    assert torch.equal(found["input_values"], expected["input_values"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"].long())


def test_layer_norms_need_no_change():
    model, listener = tiny("wav2vec2", feat_extract_norm="layer", do_stable_layer_norm=True)
    check_padding(model, listener)


def test_sew_is_exact_without_its_padding():
    model, listener = tiny("sew", squeeze_factor=2)
    prepare_encoders(model)
    check_padding(model, listener)


@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "seconds"),
    [
        ("audio-spectrogram-transformer", {"num_mel_bins": 32, "max_length": 60, "patch_size": 8}, (60, 32), 0.6),
        ("whisper", {"num_mel_bins": 40, "max_source_positions": 100}, (40, 200), 2.0),
    ],
)
def test_extractors_of_one_length_are_known_and_must_fit(kind, sizes, shape, seconds):
    config = CONFIG_MAPPING[kind](**sizes)
    listener = Listener(new_feature_extractor(config), "task.model=x")
    assert listener.is_fixed and listener.shape == shape and listener.seconds == seconds
    listener.check_fits(config)
    with pytest.raises(ConfigError, match="Give it the feature extractor that it was trained with"):
        listener.check_fits(CONFIG_MAPPING[kind](**{**sizes, "num_mel_bins": 48}))


# Recognition


def quick(recipe, *overrides):
    return Recipe.load(recipe, *FEW, *overrides)


def test_characters_are_sorted_and_a_text_is_decoded_as_it_was():
    tokenizer = character_tokenizer(["ba c", "äz"])
    assert tokenizer.get_vocab() == {"[PAD]": 0, "[UNK]": 1, "|": 2, "a": 3, "b": 4, "c": 5, "z": 6, "ä": 7}
    ids = tokenizer(["ba c"])["input_ids"][0]
    assert ids == [4, 3, 2, 5] and tokenizer.decode([4, 4, 0, 3, 0, 2, 2, 5]) == "ba c"
    with pytest.raises(DataError, match="stands for a space"):
        character_tokenizer(["a|b"])


def test_the_loss_is_that_of_all_alignments_and_of_transformers():
    task = quick("ctc_demo").task
    task.text_tokenizer = character_tokenizer(["ab"])
    logits = torch.randn(2, 5, 5)
    labels, frames = torch.tensor([[3, 3, 4], [4, -100, -100]]), torch.tensor([5, 3])
    found = task.sample_losses(CausalLMOutput(logits=logits), {"labels": labels, "frames": frames})

    def written(path):
        kept = [token for token, _ in itertools.groupby(path)]
        return [token for token in kept if token != 0]

    for place, target in enumerate(([3, 3, 4], [4])):
        shares = logits[place, : frames[place]].softmax(-1).double()
        paths = itertools.product(range(5), repeat=int(frames[place]))
        total = sum(
            math.prod(shares[at, token].item() for at, token in enumerate(path)) for path in paths if written(path) == target
        )
        assert float(found[place]) == pytest.approx(-math.log(total), rel=1e-5)
    assert task.num_items({"labels": labels, "frames": frames}) == 4

    recipe = quick("ctc_demo")
    model, task = recipe.task, recipe.task
    samples = task.datasets()["train"]
    torch.manual_seed(0)
    model = task.build_model().eval()
    model.config.ctc_loss_reduction = "sum"
    batch = task.collate([samples[index] for index in range(6)])
    ours = task.loss(model(**task.inputs(batch)), task.target(batch))
    theirs = model(**task.inputs(batch), labels=batch["labels"]).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("unread", [False, True])
def test_the_head_is_a_new_one_also_for_as_many_other_characters(tmp_path, unread):
    task = quick("ctc_demo").task
    model = task.build_model()
    torch.nn.init.constant_(model.lm_head.weight, 7.0)
    task.save(model, tmp_path / "first")
    given = (f"task.model={tmp_path / 'first'}", "task.model_config=null")
    other = quick("ctc_demo", *given, "task.vocabulary=texts", "task.case=upper").task
    with loading(unread=unread):
        found = other.build_model()
    assert len(other.text_tokenizer) == len(task.text_tokenizer) and {"lm_head.weight", "lm_head.bias"} == {
        *found.drawn_parameters
    }
    assert found.lm_head.weight.abs().max() < 1
    body = {name: value for name, value in model.state_dict().items() if not name.startswith("lm_head")}
    for name, value in body.items():
        torch.testing.assert_close(found.state_dict()[name], value)
    other.save(found, tmp_path / "second")
    again = other.load(tmp_path / "second")
    for name, value in found.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value)
    for vocabulary in ("texts", "auto"):  # the same characters
        same = quick("ctc_demo", *given, f"task.vocabulary={vocabulary}").task
        assert (same.build_model().lm_head.weight == 7).all()


def test_the_loss_of_ctc_is_computed_on_the_cpu_wherever_logits_are(monkeypatch):
    task = quick("ctc_demo").task
    task.text_tokenizer = character_tokenizer(["ab"])
    devices = []
    monkeypatch.setattr(
        "torch.nn.functional.ctc_loss",
        lambda *given, **options: devices.extend(value.device.type for value in given[:4]) or given[0].sum((0, 2)),
    )
    with FakeTensorMode():
        logits = torch.randn(2, 5, 5, device="cuda")
        target = {"labels": torch.full((2, 3), 3, device="cuda"), "frames": torch.full((2,), 5, device="cuda")}
        found = task.sample_losses(CausalLMOutput(logits=logits), target)
    assert devices == ["cpu"] * 4 and found.device.type == "cuda" and found.shape == (2,)


def test_frames_of_features_are_counted_before_training_where_a_text_may_need_more():
    task = quick("ctc_demo").task
    task.named_config = CONFIG_MAPPING["wav2vec2-bert"]()
    task.listener = Listener(SeamlessM4TFeatureExtractor(), "task.model=bert")
    samples, heard = task.datasets()["train"], []
    counted = max(range(12), key=lambda index: len(samples[index]["audio"]))
    task.texts["train"][counted] = "ad" * int(0.45 * len(samples[counted]["audio"]) / RATE * 25)  # of 50 frames a second
    found = task.heard
    task.heard = lambda examples: heard.append(examples) or found(examples)
    task.datasets()
    assert not heard
    task.texts["train"][counted] += "ad" * 40
    with pytest.raises(DataError, match=r"^Row \d+ of the train split has a text that needs .* CTC cannot align them"):
        task.datasets()
    assert len(heard) == 1


def test_an_encoder_decoder_whose_norms_count_padding_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 300}
    sizes |= {
        f"{side}_{name}": count
        for side in ("encoder", "decoder")
        for name, count in (("num_hidden_layers", 1), ("num_attention_heads", 2), ("num_key_value_heads", 2))
    }
    task = quick("speech_to_text_demo").task
    task.named_config = CONFIG_MAPPING["moonshine"](**sizes)
    task.listener = Listener(new_feature_extractor(CONFIG_MAPPING["wav2vec2"]()), "task.model=moonshine")
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=r"this MoonshineForConditionalGeneration answers .* depends on how long"):
        task.build_model()


def test_error_rates_are_those_of_the_whole_split():
    texts, references = ["a b c", "", "x y z w"], ["a d c e", "b", "x y"]
    found = error_rates(texts, references)
    assert found == {
        "wer": pytest.approx(float(oracle.word_error_rate(texts, references))),
        "cer": pytest.approx(float(oracle.char_error_rate(texts, references))),
    }
    assert found["wer"] == pytest.approx((2 + 1 + 2) / 7)


def test_an_encoder_decoder_learns_the_text_and_goes_on_from_its_cache():
    recipe = quick("speech_to_text_demo")
    task = recipe.task
    samples = task.datasets()["train"]
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = task.collate([samples[index] for index in range(4)])
    outputs = model(**task.evaluation_inputs(batch))
    labels, times = batch["labels"], task.start[1]
    assert (labels[:, 0] == -100).all() and task.start == task.text_tokenizer.prefix_tokens
    theirs = model(input_features=batch["input_features"], labels=labels.clone().index_fill_(1, torch.tensor([0]), times))
    torch.testing.assert_close(outputs.logits, theirs.logits)
    expected = torch.nn.functional.cross_entropy(theirs.logits.transpose(1, 2), labels, reduction="sum")
    torch.testing.assert_close(task.loss(outputs, labels), expected)
    assert task.num_items(labels) == sum(len(samples[index]["labels"]) for index in range(4))
    start = torch.tensor(task.start).expand(4, -1)
    ids = GenerationMixin.generate(model, input_features=batch["input_features"], decoder_input_ids=start)
    expected = task.text_tokenizer.batch_decode(ids[:, len(task.start) :], skip_special_tokens=True)
    assert task._generate(outputs, model, batch) == expected
    sizes = task.sizes(samples)
    assert (sizes[:, 0] == 2 * RATE).all() and sizes[0, 1] == len(samples[0]["labels"])


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("ctc_demo", ("task.max_seconds=0.5",), "longer than task.max_seconds=0.5. Cut it, and its text, into parts"),
        ("ctc_demo", ("task.ignored_characters=adeln",), "has no characters in column 'text' but those of"),
        ("ctc_demo", ("task.model_config.conv_stride=[40,8,8]",), "CTC cannot align them. Correct or remove it."),
        (
            "ctc_demo",
            ("task.model_config.mask_time_length=500",),
            "frames of the model, which needs 500. Remove it, or set task.model",
        ),
        ("ctc_demo", ("task.text_column=text", "task.audio_column=text"), "): there is no such file."),
        (
            "speech_to_text_demo",
            ("task.model_config.max_source_positions=50",),
            "longer than the 1 s that task.model_config hears",
        ),
        ("speech_to_text_demo", ("task.max_target_length=4",), "more than task.max_target_length=4."),
        (
            "audio_classification_demo",
            ("task.audio_column=sound",),
            "task.audio_column=sound is not a column of the train split.",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused_with_its_row(recipe, overrides, said):
    with pytest.raises(DataError) as error:
        quick(recipe, *overrides).task.datasets()
    assert said in str(error.value)


def test_a_model_for_something_else_and_a_new_one_with_its_vocabulary_are_refused():
    said = Recipe.load("ctc").task.validate()
    assert any("task.data_dir" in line for line in said)
    assert quick("ctc_demo", "task.vocabulary=model").task.validate() == [
        "task.vocabulary=model: a new model has no tokenizer. Set it to texts."
    ]
    with pytest.raises(
        ConfigError, match=r"task.model_config is a bert model, which does not classify recordings. Name one that does"
    ):
        quick("audio_classification", "task.model=null", "task.model_config={model_type: bert}").task.datasets()
    with pytest.raises(ConfigError, match=r"task.language=de is not a language code of"):
        task = quick("speech_to_text_demo", "task.language=de").task
        task._for_language(task.text_tokenizer)


# Folders, tables, predictions and exports


def small(recipe, *overrides):
    return Recipe.load(
        recipe, "train.max_steps=2", "train.batch_size=4", "train.micro_batch_size=2", "eval.every=2", *overrides
    )


def test_folders_and_tables_of_files_give_the_same_recordings(folder, monkeypatch):
    by_folder = small(
        "audio_classification_demo", "task.dataset=audiofolder", f"task.data_dir={folder}", "task.eval_share=0.25"
    )
    table = (f"task.data_files.train={folder}/clips.csv", "task.dataset=null", "task.eval_share=0.25")
    by_table = small("audio_classification_demo", *table)
    found = [
        sorted(len(own["audio"]) for split in task.datasets().values() for own in split)
        for task in (by_folder.task, by_table.task)
    ]
    assert found[0] == found[1] and len(found[0]) == 12
    assert by_folder.task.labels == by_table.task.labels == ["hiss", "hum"]
    assert by_table.task.read_columns["audio_column"] == "path"


def test_paths_relative_to_tables_in_several_folders_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        soundfile.write(tmp_path / name / "0.wav", noise(0.3, ord(name)), RATE)
        (tmp_path / name / "clips.csv").write_text(f"path,label\n0.wav,{name}\n")
    for tables in (f"[{tmp_path}/a/clips.csv,{tmp_path}/b/clips.csv]", f"{tmp_path}/*/clips.csv"):
        words = ("task.dataset=null", f"task.data_files={{train: {tables}, eval: {tmp_path}/a/clips.csv}}")
        task = small("audio_classification_demo", *words, "task.eval_share=null").task
        with pytest.raises(DataError, match=r"The tables of the train split are in 2 folders, .* such as 0.wav: which folder"):
            task.datasets()
        for name in "ab":
            (tmp_path / name / "clips.csv").write_text(f"path,label\n{tmp_path}/{name}/0.wav,{name}\n")
        first, second = small("audio_classification_demo", *words, "task.eval_share=null").task.audio["train"].rows()
        np.testing.assert_array_equal(first, read_audio(tmp_path / "a/0.wav", "", RATE))
        np.testing.assert_array_equal(second, read_audio(tmp_path / "b/0.wav", "", RATE))
        for name in "ab":
            (tmp_path / name / "clips.csv").write_text(f"path,label\n0.wav,{name}\n")


def test_a_trained_classifier_answers_files_tables_and_in_transformers(folder, tmp_path, capsys):
    recipe = small(
        "audio_classification_demo", "task.dataset=audiofolder", f"task.data_dir={folder}", f"output_dir={tmp_path}/run"
    )
    run = hftune.train(recipe).output_dir
    capsys.readouterr()
    files = sorted(map(str, (folder / "train" / "hiss").iterdir()))
    (folder / "train" / "hiss" / "cover.png").write_bytes(b"")
    assert main(["predict", str(run), "--input", str(folder / "train" / "hiss"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (folder / "train" / "hiss" / "cover.png").unlink()
    assert [row["input"] for row in rows] == files and {row["label"] for row in rows} <= {"hiss", "hum"}
    assert main(["predict", str(run), "--data", str(folder / "clips.csv"), "--output", str(tmp_path / "out.csv")]) == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 13
    classify = pipeline("audio-classification", model=str(run / "model"), device="cpu")
    for row in rows:
        samples = read_audio(row["input"], "", RATE)
        best, *_ = classify({"raw": samples, "sampling_rate": RATE})
        assert best["label"] == row["label"] and best["score"] == pytest.approx(row["probability"], abs=1e-4)
    card = (run / "model" / "README.md").read_text()
    assert "audio-classification" in card


@pytest.mark.parametrize("recipe", ["ctc_demo", "speech_to_text_demo"])
def test_a_trained_recognizer_answers_as_in_transformers(recipe, tmp_path):
    run = hftune.train(small(recipe, *FEW, f"output_dir={tmp_path}/run", "train.lr=1e-2")).output_dir
    model = hftune.load_model(run)
    audio = [read_audio(row["audio"], "", RATE) for row in itertools.islice(hftune.data.demo.melodies("eval"), 3)]
    ours = [row["generated"] for row in model.predict(audio)]
    recognize = pipeline("automatic-speech-recognition", model=str(run / "model"), device="cpu")
    theirs = [recognize({"raw": samples, "sampling_rate": RATE})["text"] for samples in audio]
    assert [text.strip() for text in theirs] == [text.strip() for text in ours]
    with pytest.raises(DataError, match=r"^Input 0 is a recording of "):
        model.predict([noise(40.0)])
    assert Path(run / "model" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("recipe", ["ctc_demo", "speech_to_text_demo"])
def test_a_library_that_the_first_evaluation_needs_is_missed_before_the_data_are_read(recipe, monkeypatch):
    monkeypatch.setattr(speech_recognition, "find_spec", {"jiwer": None}.get)
    with pytest.raises(ConfigError, match=r'needs jiwer, which is not installed: pip install "hftune\[audio\]"'):
        Recipe.load(recipe).validate()
