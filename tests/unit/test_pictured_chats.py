"""Chats with pictures: what is read of rows, what processors make of them, and what does not fit together."""

import json
import os
import re
import shutil

import pytest
import torch
from transformers import AutoProcessor, pipeline

from hftune import build
from hftune.config import Recipe
from hftune.data.messages import ChatError
from hftune.data.pictures import pictured_chat
from hftune.errors import ConfigError, DataError
from hftune.tasks import VisionChats
from tests.support.vision import FAMILIES, QwenChats, pictures_on_disk, qwen_processor, tiny_model


def asks(*parts):
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]}


def says(text):
    return {"role": "assistant", "content": text}


def task_of(folder, rows, model, **fields):
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kind = QwenChats if "qwen" in str(model) else VisionChats
    task = kind(
        model=str(model),
        data_files={"train": str(folder / "chats.jsonl")},
        image_folder=str(folder),
        **{"max_length": 400, **fields},
    )
    task.evaluates = False
    return task


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model(family, folder) for family in FAMILIES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    pictures_on_disk(folder)
    return folder


IMAGE = {"type": "image"}
CHATS = [
    {
        "messages": [asks(IMAGE, "what is this?"), says("a red circle."), asks("and ", IMAGE, " this?"), says("a blue ring.")],
        "images": ["red.png", "blue.png"],
    },
    {"messages": [asks("what is this?"), says("a circle.")], "images": []},
    {"messages": [asks(IMAGE, IMAGE, "what are these?"), says("a ring.")], "images": ["green.png", "red.png"]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_losses_are_those_of_the_processor_and_of_the_models_own_head(family, models, folder):
    task = task_of(folder, CHATS, models[family], freeze_vision=False)
    samples, model = task.datasets()["train"], task.build_model().eval()
    processor = (
        qwen_processor(models[family]) if "qwen" in family else AutoProcessor.from_pretrained(models[family], backend="pil")
    )
    alone = []
    for row, sample in zip(CHATS, samples, strict=True):
        paths = iter(row["images"])
        chat = [
            {**message, "content": [{**part, "path": str(folder / next(paths))} if part == IMAGE else part for part in content]}
            if isinstance(content := message["content"], list)
            else {**message, "content": [{"type": "text", "text": content}]}
            for message in row["messages"]
        ]
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        theirs = processor.apply_chat_template(chat, **how)
        ids = [*sample["input_ids"].tolist(), int(sample["labels"][-1])]
        assert ids == theirs["input_ids"][0, : len(ids)].tolist()
        labels = torch.tensor([[-100, *sample["labels"].tolist()]])
        cut = {
            name: theirs[name][:, : len(ids)] for name in ("input_ids", "attention_mask", "mm_token_type_ids") if name in theirs
        }
        with torch.no_grad():
            expected = float(model(**{**theirs, **cut}, labels=labels).loss) * int((labels != -100).sum())
            batch = task.collate([sample])
            alone.append(float(task.loss(model(**task.inputs(batch)), task.target(batch))))
        assert alone[-1] == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        batch = task.collate([*samples])
        together = float(task.loss(model(**task.inputs(batch)), task.target(batch)))
    assert together == pytest.approx(sum(alone), rel=1e-5)
    swapped = task.collate([{**samples[2], "images": samples[2]["images"][::-1]}])
    with torch.no_grad():
        assert float(task.loss(model(**task.inputs(swapped)), task.target(swapped))) != pytest.approx(alone[2], rel=1e-3)
    shown = "".join(text for text, _ in task.marked(samples[2]))
    counted = [int(number) for number in re.findall(r"<image x (\d+)>", shown)]
    assert sum(counted) == int((samples[2]["input_ids"] == task.chat_format.image_id).sum())


TEXT = {"type": "text", "text": "what?"}
LAYOUTS = {
    "parts": {"messages": [asks(IMAGE, "what?"), says("red")], "images": ["a.png"]},
    "parts with nulls": {
        "messages": [{"role": "user", "content": [{**IMAGE, "text": None}, {**TEXT, "index": None}]}, says("red")],
        "images": ["a.png"],
    },
    "placeholders": {"messages": [asks("<image>\nwhat?"), says("red")], "images": ["a.png"]},
    "LLaVA's": {
        "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "red"}],
        "image": "a.png",
    },
    "no place": {"messages": [{"role": "user", "content": "what?"}, says("red")], "images": ["a.png"]},
    "prompt": {"prompt": "what?", "completion": "red", "image": "a.png"},
    "path in the message": {"messages": [asks({**IMAGE, "path": "a.png"}, "what?"), says("red")]},
    "OpenAI's": {"messages": [asks({"type": "image_url", "image_url": {"url": "a.png"}}, "what?"), says("red")]},
    "JSON text": {"messages": json.dumps([asks(IMAGE, "what?"), says("red")]), "images": ["a.png"]},
}


def read(row):
    fields = {"messages": "messages_column", "conversations": "messages_column", "prompt": "prompt_column"}
    fields |= {"completion": "completion_column", "images": "image_column", "image": "image_column"}
    return pictured_chat(row, {fields[name]: name for name in row})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_the_same_chat(layout):
    messages, _, pictures = read(LAYOUTS[layout])
    assert pictures == ["a.png"]
    assert [(message["role"], message["content"], message["parts"]) for message in messages] == [
        ("user", "what?", [IMAGE, TEXT]),
        ("assistant", "red", [{"type": "text", "text": "red"}]),
    ]


BAD = {
    "Its messages have 2 places for pictures (<image>, or a part of the type image), and column 'images' has 1.": {
        "messages": [asks(IMAGE, IMAGE, "what?"), says("red")],
        "images": ["a.png"],
    },
    "Its messages have 1 place for pictures (<image>, or a part of the type image), and column 'images' has 2.": {
        "messages": [asks("<image>what?"), says("red")],
        "images": ["a.png", "b.png"],
    },
    "Its messages have 1 place for pictures (<image>, or a part of the type image), and there are 0.": {
        "messages": [asks("<image>what?"), says("red")]
    },
    "Message 1 is an answer with a picture. Models write text only.": {
        "messages": [asks("what?"), {"role": "assistant", "content": [IMAGE]}],
        "images": ["a.png"],
    },
    "Message 0 has its picture at https://a.b/c.png. Give the path of a file instead.": {
        "messages": [asks("what?"), says("red")],
        "images": ["https://a.b/c.png"],
    },
    "Message 0 has content of the type video. Only text and images can be trained on.": {
        "messages": [asks({"type": "video"}), says("red")]
    },
}


@pytest.mark.parametrize("sentence", BAD)
def test_places_and_pictures_that_do_not_fit_are_refused(sentence):
    with pytest.raises(ChatError) as error:
        read(BAD[sentence])
    assert str(error.value) == sentence


def test_pictures_that_cannot_be_read_are_refused_with_their_row(models, folder):
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:60])
    (folder / "text.png").write_text("no image")
    for name, reason in {
        "none.png": f"Picture 0 ({folder}/none.png): there is no such file.",
        "broken.png": f"Picture 0 ({folder}/broken.png) cannot be read: ",
        "text.png": f"Picture 0 ({folder}/text.png) is not an image that can be read.",
    }.items():
        rows = [CHATS[1], {"messages": [asks(IMAGE, "what is this?"), says("a ring.")], "images": [name]}]
        with pytest.raises(DataError) as error:
            task_of(folder, rows, models["llava"]).datasets()
        assert str(error.value).startswith(f"The train split cannot be trained on, at row 1: {reason}")


@pytest.mark.parametrize("how", ["parts", "text"])
def test_all_files_that_rows_name_are_looked_at_again_each_time(how, models, folder, tmp_path):
    for name in ("red.png", "blue.png"):
        shutil.copy(folder / name, tmp_path)
    asked = [asks({**IMAGE, "path": "red.png"}, IMAGE, "what are these?"), says("a ring.")]
    rows = [{"messages": asked if how == "parts" else json.dumps(asked), "images": ["blue.png"]}]
    rows += [{"messages": [asks("what is this?"), says("a ring.")], "images": ["blue.png"]}] if how == "parts" else []
    task = task_of(tmp_path, rows, models["llava"])
    task.datasets()
    states = [task.depends_on("train")]
    for name in ("red.png", "blue.png"):
        shutil.copy(folder / "green.png", tmp_path / name)
        os.utime(tmp_path / name, (1, len(states)))
        states.append(task.depends_on("train"))
    assert states[0] != states[1] != states[2] != states[0]
    (tmp_path / "red.png").unlink()
    assert task.depends_on("train") != states[2]


def test_pictures_that_are_too_large_for_max_length_are_counted(models, folder):
    with pytest.raises(
        DataError, match=r"has 2 chats longer than .*; the longest has 87, 32 of them of its pictures, at row 0"
    ):
        task_of(folder, CHATS, models["llava"], max_length=40).datasets()
    kept = task_of(folder, CHATS, models["llava"], max_length=50, too_long="cut").datasets()["train"]
    assert [len(sample["images"]) for sample in kept] == [1, 0]  # a turn goes with its picture


def test_a_processor_that_does_not_fit_the_model_is_refused_before_training(models, folder, tmp_path):
    other = shutil.copytree(models["llava"], tmp_path / "llava")
    settings = json.loads((other / "processor_config.json").read_text())
    (other / "processor_config.json").write_text(json.dumps({**settings, "patch_size": 4}))
    task = task_of(folder, CHATS, other)
    task.datasets()
    with pytest.raises(DataError) as error:
        task.build_model()
    assert str(error.value) == (
        f"The train split cannot be trained on, at row 0: the processor of task.model={other} writes 128 image tokens for its "
        "pictures, and the model makes 32 features of them. The two do not fit: copy the processor from the model that it was "
        "made of."
    )
    config = json.loads((models["llava"] / "config.json").read_text())
    shutil.copy(models["llava"] / "processor_config.json", other)
    (other / "config.json").write_text(json.dumps({**config, "image_token_id": 5}))
    task = task_of(folder, CHATS, other)
    task.datasets()
    with pytest.raises(ConfigError, match="its processor writes token 3 for pictures, and the model reads 5"):
        task.build_model()


def test_image_tokens_are_trained_in_no_case(models, folder):
    (sample, *_) = task_of(folder, CHATS, models["llava"], train_on="all").datasets()["train"]
    is_image = sample["input_ids"][1:] == 3
    assert is_image.sum() == 32 and (sample["labels"][:-1][is_image] == -100).all()
    assert (sample["labels"][:-1][~is_image] >= 0).all()


@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_the_export_answers_in_a_pipeline_as_predict_does(family, models, folder, tmp_path):
    task = task_of(folder, CHATS, models[family])
    task.datasets()
    model = task.build_model().eval()
    model.generation_config.max_new_tokens = 6
    task.save(model, tmp_path)
    asked = [asks("and this? ", {**IMAGE, "path": str(folder / "red.png")})]
    inputs = [asked, {"messages": [asks("and this? <image>")], "images": [str(folder / "blue.png")]}, "what is this?"]
    together = task.predict(model, inputs)
    assert [task.predict(model, [value])[0] for value in inputs] == together
    assert together[0] != together[1]
    loaded = task_of(folder, CHATS, models[family])
    assert loaded.predict(loaded.load(tmp_path).eval(), inputs) == together
    answers = pipeline("image-text-to-text", str(tmp_path))(text=asked, max_new_tokens=6, return_full_text=False)
    assert answers[0]["generated_text"] == together[0]["generated"]


def test_a_prompt_that_leaves_less_room_is_answered_as_far_alone_and_beside_a_short_one(models, folder):
    task = task_of(folder, CHATS, models["llava"])
    task.datasets()
    model = task.build_model().eval()
    model.generation_config.update(max_new_tokens=12, eos_token_id=None)
    long, short = ({"messages": [asks(text)], "images": [str(folder / "red.png")]} for text in ("what is this? " * 5, "this?"))
    model.config.text_config.max_position_embeddings = len(task.prompt_ids(0, long)) + 3
    prompts, config = task._prompts(model, [long, short]), model.generation_config
    answers = task._generate(model, prompts, config, beside=task.beside([long, short]))
    assert [*map(len, answers)] == [3, 12]
    for prompt, value, answer in zip(prompts, (long, short), answers, strict=True):
        assert task._generate(model, [prompt], config, beside=task.beside([value])) == [answer]


def test_inputs_that_cannot_be_answered_are_refused(models, folder):
    task = task_of(folder, CHATS, models["llava"])
    task.datasets()
    model = task.build_model()
    for messages, reason in {
        "<image>what?": "Its messages have 1 place for pictures (<image>, or a part of the type image), and column 'images' has 0.",
        "what?": "Picture 0 (none.png): there is no such file.",
    }.items():
        pictures = ["none.png"] if messages == "what?" else []
        task.chat_format.folder = None
        with pytest.raises(DataError) as error:
            task.predict(model, [{"messages": [asks(messages)], "images": pictures}])
        assert str(error.value) == f"Input 0 cannot be answered: {reason}"


def test_layers_behind_the_one_that_is_read_are_frozen_with_a_notice(models, folder):
    task = task_of(folder, CHATS, models["llava"], freeze_vision=False)
    model, datasets = None, task.datasets()
    model = task.build_model()
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen and all("vision_tower" in name and ("layers.1." in name or "post_layernorm" in name) for name in frozen)
    assert any(
        "parameters of the vision tower are behind the layer that is read" in line for line in task.notices(datasets, model)
    )
    model = task_of(folder, CHATS, models["llava"])
    model.datasets()
    trained = {name for name, value in model.build_model().named_parameters() if value.requires_grad}
    assert trained and not any("vision_tower" in name for name in trained) and any("projector" in name for name in trained)


def test_the_same_layers_are_frozen_where_processes_share_out_the_weights(models, folder, monkeypatch):
    words = ("replace=[task.model_config]", f"task.model={models['llava']}", "task.max_length=400", "task.max_train_samples=3")
    frozen = []
    for is_sharded in (False, True):
        monkeypatch.setattr(build, "is_sharded", lambda is_sharded=is_sharded: is_sharded)
        recipe = Recipe.load("vision_chats_demo", *words, "task.max_eval_samples=3")
        recipe.task.datasets()
        model = build.build_model(recipe, leaves_weights=build.may_leave_weights(recipe))
        frozen.append([name for name, value in model.named_parameters() if not value.requires_grad])
    assert frozen[0] and frozen[0] == frozen[1]
    recipe.task.freeze_vision = True
    assert build.may_leave_weights(recipe)
