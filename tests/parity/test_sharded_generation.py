"""Under FSDP, texts are generated on the sharded model: the same ones as under DDP, on any number of processes."""

import json

import pytest

from hftune.checkpoints.run_folder import open_run
from hftune.inference import load_for_all
from tests.support.runs import FSDP, SMALL, Command, train_on, write_jsonl

FEW = ("train.max_steps=2", "train.batch_size=16", "train.micro_batch_tokens=400", "train.log_every=1", "eval.batch_size=4")
FEW = (*FEW, "task.max_train_samples=64", "task.max_eval_samples=12", "train.mixed_precision=no", "task.vocab_size=400")
# Weights differ by 1e-6 between DDP and FSDP after two steps, which may tip a draw: of 10 rows, one of "sampled" is so close to
# a border, while each of the two models gives the same texts on one process and on shards. Of these 12, none is.
SHORT = ("task.model_config.max_position_embeddings=40", "task.max_length=40")
T5 = "{model_type: t5, d_model: 32, d_kv: 8, d_ff: 48, num_layers: 2, num_heads: 4, dropout_rate: 0.0, initializer_factor: 3.0}"
JOBS = {
    # Of the model's 40 positions, prompts of 24 tokens leave room for 16. They are answered apart from those of 23 tokens.
    "chats": ("recipe=chats_demo", *FEW, *SHORT, "task.generation={do_sample: true, top_k: 20, max_new_tokens: 17}"),
    "beams": ("recipe=seq2seq_demo", *FEW, f"task.model_config={T5}", "task.generation={num_beams: 3, min_new_tokens: 4}"),
    "sampled": ("recipe=seq2seq_demo", *FEW, f"task.model_config={T5}", "task.generation={num_beams: 2, do_sample: true}"),
}

ROUNDED = (*JOBS["beams"], "train.mixed_precision=bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """Each job on one process, on two under DDP and FSDP, and on four under FSDP; by what, where and on how many."""
    ways = {1: {"alone": ()}, 2: {"ddp": (), "fsdp": ()}, 4: {"fsdp": (), "replicas": ("parallel.replicas=2",)}}
    found = {}
    for count, more in ways.items():
        jobs = {f"{name} {way}": (*words, *more[way]) for name, words in JOBS.items() for way in more}
        if count == 2:
            jobs |= {"rounded ddp": ROUNDED, "rounded fsdp": (*ROUNDED, "train.fsdp_gather=bf16")}
        sharded = [name for name in jobs if name.split()[1] in ("fsdp", "replicas")]
        made = train_on(count, jobs, folder, "chats_demo", sharded=sharded)
        found |= {(*name.split(), count): run for name, run in made.items()}
    return found


@pytest.mark.parametrize(("way", "count"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("replicas", 4)])
@pytest.mark.parametrize("name", JOBS)
def test_the_texts_are_those_of_one_process(runs, name, way, count):
    run, alone = runs[name, way, count], runs[name, "alone", 1]
    texts, expected = ([row["generated"] for row in one.predictions] for one in (run, alone))
    assert texts == expected and len({*texts}) > 4
    assert run.logged("eval/loss") == pytest.approx(alone.logged("eval/loss"), rel=1e-5)
    assert not run.has_copied


def test_gathers_in_bf16_change_no_text(runs):
    """The parts of a block are gathered by themselves then, also while another process needs the block."""
    texts, expected = ([row["generated"] for row in runs["rounded", way, 2].predictions] for way in ("fsdp", "ddp"))
    assert texts == expected and len({*texts}) > 4


def said_by(count, *words):
    """What the main process of a command on so many processes prints, under FSDP if there are several."""
    done = Command(count, *words, module="hftune.cli", **(FSDP if count > 1 else {}))
    assert done.returncode == 0, done.communicate()[1]
    return done.communicate()[0]


@pytest.mark.parametrize("name", ["chats", "beams"])
def test_commands_evaluate_and_predict_on_shards(runs, tmp_path, name):
    run, column = runs[name, "fsdp", 2], {"chats": "messages", "beams": "source"}[name]
    rows = [{column: f"ann has {number} cups. how many{' of them' * (number % 3)}?"} for number in range(7)]
    table, answers = write_jsonl(tmp_path / "table.jsonl", rows), {}
    for count in (1, 2, 4) if name == "chats" else (1, 2):
        said = said_by(count, "evaluate", str(run.folder), "--output", f"{tmp_path}/score.json")
        assert ("note: FSDP: process 0 keeps" in said) == (count > 1)
        assert json.loads((tmp_path / "score.json").read_text())["metrics"] == pytest.approx(run.result["metrics"], rel=1e-5)
        words = ("--data", str(table), "--map", f"{'prompt' if name == 'chats' else 'source'}={column}", "--batch-size", "2")
        said = said_by(count, "predict", str(run.folder), *words, "--output", f"{tmp_path}/{count}.jsonl")
        assert ("note: FSDP: process 0 keeps" in said) == (count > 1)
        answers[count] = (tmp_path / f"{count}.jsonl").read_text()
    assert len({*answers.values()}) == 1 and len({*answers[1].splitlines()}) == 7


def test_each_process_reads_its_part_of_an_export(runs, monkeypatch):
    folder = runs["chats", "fsdp", 2].folder
    recipe, model = open_run(folder)
    assert not any(value.is_meta for value in load_for_all(recipe, model).parameters())
    for name, value in {**FSDP, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert all(value.is_meta for value in load_for_all(recipe, model).parameters())


def test_a_checkpoint_is_evaluated_on_shards(runs, tmp_path):
    run = runs["chats", "fsdp", 2]
    (checkpoint,) = (run.folder / "checkpoints").glob("step_*")
    said = said_by(2, "evaluate", str(run.folder), "--checkpoint", str(checkpoint), "--output", f"{tmp_path}/score.json")
    assert "note: FSDP: process 0 keeps" in said
    assert json.loads((tmp_path / "score.json").read_text())["metrics"] == pytest.approx(run.result["metrics"], rel=1e-5)


def test_a_task_with_a_predict_of_its_own_has_the_whole_model(tmp_path):
    words = (
        *SMALL,
        "task.type=tests.support.tasks.Weighed",
        "task.dataset=tests.support.tasks:few_reviews",
        "train.max_steps=1",
        "train.micro_batch_tokens=auto",  # which FSDP refuses, where a model is trained
    )
    run = train_on(1, {"own": words}, tmp_path)["own"]
    assert "FSDP" in said_by(2, "evaluate", str(run.folder), "--trust-code", "--output", f"{tmp_path}/score.json")
    table = write_jsonl(tmp_path / "table.jsonl", [{"text": "good"}, {"text": "bad"}, {"text": "fine"}])
    words = ("predict", str(run.folder), "--trust-code", "--data", str(table), "--batch-size", "1", "--output")
    said = {count: said_by(count, *words, f"{tmp_path}/{count}.jsonl") for count in (1, 2)}
    assert "note: FSDP: Weighed.predict is your own: each process has the whole model for it.\n" in said[2]
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "2.jsonl").read_text()
