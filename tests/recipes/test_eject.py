"""``hftune eject``: the plain loop has the losses of the run, and what it cannot write is refused."""

import re
import shutil

import pytest

from hftune.cli import main
from tests.support.runs import NO_DROPOUT, Group, train_on

FEW = ("task.max_train_samples=30", "task.max_eval_samples=4", "train.batch_size=8", "train.epochs=2", "train.log_every=1")
FEW += ("train.max_steps=7", "eval.every=never", "eval.metric=loss")
RUNS = {
    "text_classification_demo": (*NO_DROPOUT, "train.schedule=cosine", "train.min_lr=1e-5", "train.warmup_ratio=0.3"),
    "language_modeling_demo": ("train.optimizer=sgd", "train.momentum=0.9", "train.lr=0.1", "train.schedule=constant"),
    "chats_demo": ("train.packing=auto", "train.clip_norm=null"),
}


@pytest.mark.parametrize("recipe", RUNS)
def test_the_plain_loop_has_the_losses_of_the_run(recipe, tmp_path, capsys):
    run = train_on(1, {"run": (*FEW, *RUNS[recipe])}, tmp_path, recipe)["run"]
    assert main(["eject", str(run.folder)]) == 0
    script, log = run.folder / "ejected" / "train.py", tmp_path / "ejected.log"
    assert f"python {script}" in capsys.readouterr().out and "import hftune" not in script.read_text()
    assert Group(1, [[str(script), [], None, {}]], log).wait() == [0], log.read_text()
    for name in ("loss", "grad_norm"):
        found = [float(value) for value in re.findall(rf"^step .*{name} (\S+)", log.read_text(), flags=re.MULTILINE)]
        expected = run.logged("train/loss_step" if name == "loss" else "train/grad_norm")
        assert len(found) == 7 and found == pytest.approx(expected, rel=1e-5 if name == "loss" else 1e-4)
    assert main(["eject", str(run.folder)]) == 2
    assert "ejected exists. Remove it, or name a new folder with --output." in capsys.readouterr().err


REFUSED = {
    "and this run has task.type=ImageClassification.": ("mnist_demo",),
    "train.optimizer=muon, train.schedule=wsd": ("yelp_demo", "train.optimizer=muon", "train.schedule=wsd"),
    "train.neftune_alpha=5.0, adapter.type=lora": ("yelp_demo", "train.neftune_alpha=5", "adapter.type=lora"),
    "task.label_smoothing=0.1": ("text_classification_demo", "task.label_smoothing=0.1"),
    "task.problem_type=regression, only classes": ("regression_demo",),
    "models of transformers": ("wikitext2_demo", "train.schedule=linear"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_trainings_are_refused_by_name(what, finished, capsys):
    from hftune import Recipe

    shutil.rmtree(finished / "model")
    recipe, *words = REFUSED[what]
    (finished / "recipe.yaml").write_text(Recipe.load(recipe, *words).to_yaml())
    assert main(["eject", str(finished)]) == 2
    assert what in capsys.readouterr().err.replace("\n", " ") and not (finished / "ejected").exists()
