"""One process, no accumulation: the case in which transformers.Trainer is right, and hftune must agree with it."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed

from hftune import Recipe, train
from hftune.build import build_model, load_datasets, plan_batches
from tests.support.runs import NO_DROPOUT, TINY, Run

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


class PlannedTrainer(Trainer):
    """Trainer on the batches of hftune's plan."""

    def __init__(self, recipe, dataset, **kwargs):
        super().__init__(**kwargs)
        steps = plan_batches(recipe, dataset).epoch(0)
        samples = [micro_batch.samples.tolist() for step in steps for micro_batch in step]
        self.loader = DataLoader(dataset, batch_sampler=samples, collate_fn=recipe.task.collate)

    def get_train_dataloader(self):
        return self.loader


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_twenty_steps_equal_those_of_trainer(tmp_path, schedule):
    recipe = Recipe.load("yelp_demo", *OVERRIDES, f"train.schedule={schedule}", f"output_dir={tmp_path}/ours")
    ours = Run(train(recipe).output_dir).logged("train/loss")

    dataset = load_datasets(recipe)["train"]
    set_seed(0)
    config = recipe.train
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        warmup_steps=4,
        lr_scheduler_type=schedule,
        max_grad_norm=config.clip_norm,
        max_steps=20,
        logging_steps=1,
        logging_nan_inf_filter=False,
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PlannedTrainer(recipe, dataset, model=build_model(recipe), args=arguments, train_dataset=dataset)
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    assert len(ours) == 20 and torch.tensor(ours).std() > 0.05
    assert ours == pytest.approx(theirs, rel=1e-5)
