"""Runs with adapters, from a base that another run trained to answers, scores, cards and merged models."""

import pytest
from transformers import pipeline

import hftune
from hftune import ConfigError, Recipe, train
from hftune.cli import main
from hftune.reevaluation import evaluate
from tests.support.runs import DATA, NO_DROPOUT, TINY, Run

FEW = (*DATA, "train.batch_size=16", "train.log_every=1", "train.lr=1e-2")
ON = ("replace=[task.model_config]", "task.max_length=64", "train.max_steps=3", "adapter.rank=4")


def trained(folder, *words):
    return Run(train(Recipe.load("yelp_demo", *FEW, *words, f"output_dir={folder}")).output_dir)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = ("task.model_config.hidden_size=64", "task.model_config.intermediate_size=128")  # for the 4 bits of a CPU
    return trained(tmp_path_factory.mktemp("base") / "out", *TINY, *NO_DROPOUT, *sizes, "train.max_steps=2")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    model = f"task.model={base.folder / 'model'}"
    return trained(tmp_path_factory.mktemp("lora") / "out", *ON, "adapter.type=lora", model)


def probabilities(folder, run):
    texts = [row["text"] for row in run.predictions[:5]]
    rows = hftune.load_model(folder, device="cpu").predict(texts, probabilities=True)
    return [[*row["probabilities"].values()] for row in rows]


def test_adapters_answer_score_and_merge_as_in_training(run, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not (run.folder / "model" / "model.safetensors").exists()
    own = probabilities(run.folder, run)
    texts = [row["text"] for row in run.predictions[:5]]
    model = run.folder / "model"
    cut = {"truncation": True, "max_length": 64, "top_k": None}
    theirs = pipeline("text-classification", model=str(model), config=str(model / "model_config"), device="cpu", **cut)
    for ours, answer in zip(own, theirs(texts), strict=True):
        assert sorted(ours) == pytest.approx(sorted(label["score"] for label in answer), abs=2e-6)
    recipe = Recipe.load(run.folder / "recipe.yaml")
    assert evaluate(recipe, model).metrics["loss"] == pytest.approx(run.logged("eval/loss")[-1], rel=1e-6)

    assert main(["merge", str(run.folder)]) == 0
    said, place = capsys.readouterr().out.splitlines()[-2:]
    assert said.startswith("Merged, in float32. Its outputs are up to ") and place == str(run.folder / "model_merged")
    # Probabilities have six digits: a difference in the eighth can move the last of them by one.
    assert probabilities(run.folder / "model_merged", run) == [pytest.approx(row, abs=2e-6) for row in own]
    assert main(["merge", str(run.folder / "model_merged")]) == 2
    assert "model_merged holds no adapters but a whole model" in capsys.readouterr().err

    assert main(["push", str(run.folder), "me/adapters"]) == 2
    assert "hftune merge" in (said := capsys.readouterr().err) and "without which nobody can load them" in said
    about = run.folder / "model_merged" / "hftune.json"
    about.write_text(about.read_text().replace('"step": ', '"step": 4'))
    assert main(["push", str(run.folder), "me/adapters", "--merged"]) == 2
    assert "model_merged was made of the adapters of step 4" in capsys.readouterr().err


def test_card_says_how_the_adapters_are_loaded(run, base):
    card = (run.folder / "model" / "README.md").read_text()
    assert "base_model" not in card.partition("---\n\n")[0]  # a folder of this machine
    assert "PeftModel.from_pretrained(base," in card and "| adapters | lora, rank 4, alpha 32 |" in card
    assert f'.from_pretrained("{base.folder}/model", config=config' in card
    namespace = {}
    exec(card.partition("```python\n")[2].partition("```")[0], namespace)
    assert "label" in namespace["predict"](["A text."])[0]


def test_weights_of_4_bits_are_trained_beside(run, base, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    nf4 = trained(tmp_path / "out", *ON, "adapter.type=dora", "adapter.quantize=nf4", f"task.model={base.folder / 'model'}")
    losses = nf4.logged("train/loss")
    assert losses[0] == pytest.approx(run.logged("train/loss")[0], rel=0.05) and losses[-1] < losses[0]
    assert probabilities(nf4.folder, nf4) == [pytest.approx(row, abs=0.2) for row in probabilities(run.folder, run)]
    assert main(["merge", str(nf4.folder), "--dtype", "bf16"]) == 0
    assert "Merged, in bfloat16" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="adapters merged into 4 bits would be rounded away"):
        Recipe.load(nf4.folder / "recipe.yaml", "adapter.export=merged").validate()


def test_adapters_are_no_base(run):
    with pytest.raises(ConfigError, match=r"task.model=.*/model holds adapters, not a whole model. hftune merge"):
        Recipe.load("yelp_demo", *ON[:1], f"task.model={run.folder / 'model'}").validate()
