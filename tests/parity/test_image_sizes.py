"""The promise of the house for images: the same losses and the same evaluation, however the work is spread and cut."""

import pytest

from tests.support.runs import train_on

SMALL = (
    "task.width=8",
    "task.dataset=tests.support.tasks:few_pictures",
    "train.epochs=1",
    "train.max_steps=3",
    "train.lr=1e-3",
    "train.log_every=1",
    "eval.every=epoch",
)
"""16 pictures in batches of 6: two steps, and one of 4. The evaluation is of several sizes."""
JOBS = {
    **{f"micro{size}": (*SMALL, f"train.micro_batch_size={size}") for size in (1, 2, 3, 6)},
    "eval1": (*SMALL, "eval.batch_size=1"),
    "whole": (*SMALL, "task.crop=null", "train.micro_batch_size=3"),
    "whole1": (*SMALL, "task.crop=null", "train.micro_batch_size=1"),
    "weighted": (*SMALL, "task.mask_weight=4", "train.micro_batch_size=2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    jobs = {1: JOBS, 2: JOBS, 4: {name: JOBS[name] for name in ("micro1", "micro6", "whole")}}
    return {
        (name, size): run
        for size, some in jobs.items()
        for name, run in train_on(size, some, folder, "restoration_demo").items()
    }


CASES = [(f"micro{size}", world_size) for size in (1, 2, 3, 6) for world_size in (1, 2)] + [("micro1", 4), ("micro6", 4)]


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_losses_do_not_depend_on_processes_or_micro_batches(runs, name, world_size):
    losses = runs[name, world_size].logged("train/loss")
    assert len(losses) == 3
    assert losses == pytest.approx(runs["micro6", 1].logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize(("name", "world_size"), [("whole", 2), ("whole", 4), ("whole1", 1), ("whole1", 2)])
def test_whole_images_of_several_sizes_train_as_if_each_were_alone(runs, name, world_size):
    assert runs[name, world_size].logged("train/loss") == pytest.approx(runs["whole", 1].logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize(("name", "world_size"), [("weighted", 2), *CASES])
def test_evaluation_does_not_depend_on_processes(runs, name, world_size):
    metrics, expected = runs[name, world_size].result["metrics"], runs[name, 1].result["metrics"]
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert metrics["psnr_inside"] is not None


@pytest.mark.parametrize("world_size", (1, 2))
def test_evaluation_does_not_depend_on_its_batch_size(runs, world_size):
    rows, expected = runs["eval1", world_size].predictions, runs["micro1", 1].predictions
    assert [row["index"] for row in rows] == list(range(7))
    assert len({row["pixels"] for row in rows}) > 1  # several sizes
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)  # of float32 outputs; mean squares of tiny errors feel their last bits


def test_a_heavier_inside_weighs_more(runs):
    assert runs["weighted", 1].logged("train/loss")[0] == pytest.approx(4 * runs["micro2", 1].logged("train/loss")[0], rel=1e-5)


def test_pictures_are_the_same_whoever_restored_them(runs):
    pictures = [(runs["micro1", size].folder / "samples" / "step_00000003.png").read_bytes() for size in (1, 2, 4)]
    assert pictures[0] == pictures[1] == pictures[2]


MASKS = (
    *("task.max_train_samples=16", "task.max_eval_samples=5", "task.image_size=32", "train.epochs=1", "train.max_steps=3"),
    *("train.batch_size=6", "train.batch_norm=frozen", "train.log_every=1", "eval.every=epoch"),
    *("task.model_config.drop_path_rate=0", "task.model_config.classifier_dropout_prob=0"),
)
LORA = ("train.micro_batch_size=2", "adapter.type=lora", "adapter.targets=[q_proj,v_proj]")


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    jobs = {f"micro{size}": (*MASKS, f"train.micro_batch_size={size}", f"eval.batch_size={size}") for size in (1, 4)}
    jobs |= {"sharded": jobs["micro1"], "lora": (*MASKS, *LORA)}
    return {
        (name, size): run
        for size in (1, 2)
        for name, run in train_on(size, jobs, folder, "segmentation_demo", sharded=("sharded",) if size > 1 else ()).items()
    }


@pytest.mark.parametrize(("name", "world_size"), [("micro1", 1), ("micro1", 2), ("micro4", 2), ("sharded", 2)])
def test_pixels_weigh_the_same_in_any_micro_batch_on_any_process(masks, name, world_size):
    run, expected = masks[name, world_size], masks["micro4", 1]
    assert run.logged("train/loss") == pytest.approx(expected.logged("train/loss"), rel=1e-5)
    assert run.result["metrics"] == {**expected.result["metrics"], "loss": pytest.approx(expected.result["metrics"]["loss"])}


def test_adapters_of_a_segmentation_model_train_alike_on_two_processes(masks):
    losses = [masks["lora", size].logged("train/loss") for size in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    assert (masks["lora", 1].folder / "model" / "adapter_config.json").is_file()


DETR = (
    "{model_type: detr, dropout: 0, d_model: 32, encoder_layers: 1, decoder_layers: 2, encoder_ffn_dim: 32, decoder_ffn_dim: 32, "
    "encoder_attention_heads: 4, decoder_attention_heads: 4, num_queries: 8, backbone_config: {model_type: resnet, "
    "embedding_size: 8, hidden_sizes: [8, 16, 16, 32], depths: [1, 1, 1, 1], layer_type: basic, out_features: [stage4]}}"
)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Of DETR, not of RT-DETR, which chooses among equally good queries by their last bits while it knows nothing."""
    folder = tmp_path_factory.mktemp("boxes")
    words = (
        "replace=[task.model_config]",
        f"task.model_config={DETR}",
        *("task.max_train_samples=16", "task.max_eval_samples=5", "train.epochs=1", "train.max_steps=3", "train.batch_size=6"),
        *("train.log_every=1", "train.lr=1e-4", "eval.every=3"),
    )
    jobs = {f"micro{size}": (*words, f"train.micro_batch_size={size}") for size in (1, 4)}
    return {(name, size): run for size in (1, 2) for name, run in train_on(size, jobs, folder, "detection_demo").items()}


@pytest.mark.parametrize(("name", "world_size"), [("micro1", 1), ("micro1", 2), ("micro4", 2)])
def test_boxes_weigh_the_same_in_any_micro_batch_on_any_process(boxes, name, world_size):
    run, expected = boxes[name, world_size], boxes["micro4", 1]
    assert len(run.logged("train/loss")) == 3
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4)):
        assert run.logged(name) == pytest.approx(expected.logged(name), rel=tolerance)
    assert run.result["metrics"]["loss"] == pytest.approx(expected.result["metrics"]["loss"], rel=1e-5)
