"""One process, no accumulation: the case in which transformers.Trainer is right, and hftune must agree with it."""

import pytest
import torch

from hftune import Recipe, train
from hftune.build import load_datasets
from tests.support.runs import NO_DROPOUT, TINY, Run
from tests.support.trainer import losses_of_trainer, planned_batches

OVERRIDES = (
    *(*TINY, *NO_DROPOUT, "task.max_train_samples=320", "task.max_eval_samples=16", "train.batch_size=16", "train.epochs=1"),
    *(
        "train.micro_batch_size=16",
        "train.micro_batch_tokens=null",
        "train.lr=5e-4",
        "train.weight_decay=0.1",
        "train.warmup_ratio=0.2",
        "train.log_every=1",
    ),
)


@pytest.mark.parametrize(
    ("recipe", "word", "spread"),
    [
        *(("yelp_demo", f"train.schedule={schedule}", 0.05) for schedule in ("linear", "cosine")),
        *(
            (f"{problem}_demo", "train.schedule=linear", 0.005)
            for problem in ("multi_label", "regression", "pairs", "token_classification")
        ),
    ],
)
def test_twenty_steps_equal_those_of_trainer(tmp_path, recipe, word, spread):
    recipe = Recipe.load(recipe, *OVERRIDES, word, f"output_dir={tmp_path}/ours")
    ours = Run(train(recipe).output_dir).logged("train/loss")

    theirs = losses_of_trainer(recipe, tmp_path / "theirs", planned_batches(recipe, load_datasets(recipe)["train"]))
    assert len(ours) == 20 and torch.tensor(ours).std() > spread
    assert ours == pytest.approx(theirs, rel=1e-5)
