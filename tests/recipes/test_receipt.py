"""Receipts: an honest run is verified, and each forgery is named by the check that the documentation says finds it.

A forger may do everything here: change a file, and then make every hash anew, up to the receipt.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from hftune import Recipe, cli
from hftune.checkpoints.checkpointer import tensor_hashes
from hftune.commands.verify import NAME_WIDTH
from hftune.data.digest import row_hashes
from hftune.data.row_hashes import root, write_rows
from hftune.replay.history import History, path_of
from hftune.replay.ledger import read_ledger
from hftune.replay.receipt import make_receipt, read_receipt, write_receipt
from hftune.replay.verification import PinnedHistory
from tests.support.runs import SMALL, train_on

WORDS = (
    *SMALL,
    "recipe=text_classification",
    "task.model=null",
    "task.text_column=review",
    "task.label_column=stars",
    "task.max_train_samples=null",
    "task.max_eval_samples=null",
    "train.epochs=4",
    "train.lr=1e-3",
    "checkpoint.keep=99",
)
TOPICS = ("soup", "view", "waiter", "bread", "garden", "bill", "music")
FLIPPED = 40
"""The row whose label a forger changes."""


def reviews(flipped=None):
    for number in range(48):
        stars = (number + (number == flipped)) % 3
        yield {"review": f"{TOPICS[number % 7]} {TOPICS[number % 5]} was {'very ' * (number % 4)}{number % 3}", "stars": stars}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """12 steps on one process, with a checkpoint after every third: four segments, of an epoch each."""
    folder = tmp_path_factory.mktemp("receipt")
    data = write(folder / "honest.jsonl", reviews())
    write(folder / "forged.jsonl", reviews(FLIPPED))
    files = f"task.data_files={{train: {data}, eval: {data}}}"
    return train_on(1, {"run": (*WORDS, files)}, folder)["run"].folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run's folder to forge in."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    shutil.copytree(trained, tmp_path / "run")
    assert cli.main(["receipt", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def verified(run, capsys, *words):
    """Return the exit code of hftune verify, the problems that it found, each after the name of its check, and all it printed."""
    capsys.readouterr()
    code = cli.main(["verify", str(run / "receipt.json"), *words])
    said = capsys.readouterr()
    print(said.out, said.err)
    problems = [line[6:] for line in said.out.splitlines() if line.startswith("  NO")]
    return code, [f"{line[:NAME_WIDTH].rstrip()}: {line[NAME_WIDTH:].lstrip()}" for line in problems], said.out


@contextmanager
def ledger(run, chained=True):
    """Let the lines of a ledger be changed, and make their hashes anew."""
    path, before, texts = run / "ledger.jsonl", "0" * 64, []
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    yield lines
    for line in lines:
        line |= {"prev": before} if chained else {}
        texts.append(json.dumps(line))
        before = sha256(texts[-1].encode()).hexdigest()
    path.write_text("".join(f"{text}\n" for text in texts))


def line_of(lines, kind, number):
    return next(line for line in lines if line.get(kind) == number)


def anew(run):
    """Make the receipt anew."""
    write_receipt(make_receipt(run), run / "receipt.json")


def sign(manifest, folder):
    """Write a manifest with its own hash."""
    manifest.pop("sha256")
    manifest["sha256"] = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@contextmanager
def checkpoint(run, step, name="model"):
    """Let the tensors of a checkpoint be changed, and make all hashes anew."""
    folder = path_of(run, step)
    tensors = load_file(folder / f"{name}.safetensors")
    yield tensors
    save_file(tensors, folder / f"{name}.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / f"{name}.safetensors").read_bytes()
    manifest["files"][f"{name}.safetensors"] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    sign(manifest, folder)
    with ledger(run) as lines:
        line_of(lines, "checkpoint", step).update(tensor_hashes(manifest["files"]))
    anew(run)


def shifted(tensors, by):
    generator = torch.Generator().manual_seed(0)
    for value in tensors.values():
        if value.is_floating_point():
            value += by * torch.randn(value.shape, generator=generator)


def test_honest_run_is_verified_and_the_odds_are_printed(run, capsys):
    code, problems, out = verified(run, capsys, "--segments", "3", "--seed", "a")
    assert (code, problems) == (0, [])
    for line in (
        "  ok  chain          17 lines, each with the hash of the one before",
        "  ok  plan           12 steps, with the samples and learning rates of the recipe",
        "  ok  checkpoints    4, with the hashes that were noted when they were written",
        "  ok  data           48 rows here, each the same as in the run",
        "  ok  steps 1-3      bit-equal",
        "  ok  steps 10-12    bit-equal",
        "; and of the 2 others, drawn with seed a: ",
        "One forged segment among the 2 that were drawn from would have been missed with a chance of 50 %",
        "Verified: what was checked is as the receipt says.",
    ):
        assert line in out, line
    assert "Every step was computed again." in verified(run, capsys, "--all")[2]


def test_line_of_the_ledger(run, capsys):
    with ledger(run, chained=False) as lines:
        (forged := line_of(lines, "step", 5))["loss"] *= 0.99
        number = lines.index(forged) + 1  # a checkpoint's line comes once it is written
    code, problems, _ = verified(run, capsys, "--segments", "0")
    assert code == 1 and problems[0].startswith(f"chain: Line {number + 1} does not follow: line {number} was changed")

    with ledger(run) as lines:  # every hash anew, but for the receipt
        pass
    code, (problem,), _ = verified(run, capsys, "--segments", "0")
    assert "lines were changed or added after the receipt was made" in problem

    anew(run)  # and now the files agree: only computing it again finds the step
    assert verified(run, capsys, "--segments", "0")[:2] == (0, [])
    code, (problem,), _ = verified(run, capsys, "--all")
    assert code == 1 and problem.startswith("steps 4-6: step 5 gives loss ")


def test_weight_of_the_export(run, capsys):
    path = run / "model_last" / "model.safetensors"
    tensors = load_file(path)
    tensors["classifier.weight"][0, 0] += 1e-4
    save_file(tensors, path, metadata={"format": "pt"})
    assert verified(run, capsys, "--segments", "0")[1] == ["export: model_last/model.safetensors is not the receipt's"]
    anew(run)
    assert verified(run, capsys, "--segments", "2")[1] == [
        "weights: model_last: classifier.weight is not that of checkpoint 12"
    ]


def test_weights_of_a_checkpoint(run, capsys):
    with checkpoint(run, 6) as tensors:
        shifted(tensors, 1e-5)
    code, problems, out = verified(run, capsys, "--segments", "2")
    assert (code, problems) == (0, [])  # what was not computed again proves nothing; but the odds are printed
    assert "missed with a chance of 100 %" in out
    code, problems, _ = verified(run, capsys, "--all")
    assert problems[0].startswith("steps 4-6: they do not lead to checkpoint 6: it lies ")
    assert problems[1].startswith("steps 7-9: step ")
    with checkpoint(run, 6) as tensors:
        shifted(tensors, 1e-2)
    code, problems, _ = verified(run, capsys, "--segments", "2")
    assert [problem.split(":")[0] for problem in problems] == ["speed limit"] * 2
    assert "steps 4-6 moved a weight of " in problems[0] and " times as far as AdamW can move it" in problems[0]


def test_checkpoint_that_was_changed_or_is_gone(run, capsys):
    (path_of(run, 3) / "optimizer.safetensors").write_bytes(b"")
    shutil.rmtree(path_of(run, 6))
    _, problems, out = verified(run, capsys, "--all")
    assert problems == [
        "checkpoints: checkpoint 3: optimizer.safetensors is not the one that was noted when it was written",
        "checkpoints: checkpoint 6: model.safetensors is missing",
        "checkpoints: checkpoint 6: optimizer.safetensors is missing",
    ]
    assert "  ok  steps 1-9      bit-equal\n  ok  steps 10-12    bit-equal\n" in out


def test_run_that_is_said_to_have_begun_in_the_middle(run, capsys):
    with ledger(run) as lines:
        lines[:] = [line for line in lines if not 0 < line.get("step", line.get("checkpoint", 0)) <= 3]
    write_receipt(replace(read_receipt(run / "receipt.json"), num_lines=13, end=read_ledger(run).end), run / "receipt.json")
    capsys.readouterr()
    assert cli.main(["verify", str(run / "receipt.json")]) == 2
    assert "has no step 3: the receipt is of another run" in capsys.readouterr().err
    shutil.rmtree(path_of(run, 3))
    anew(run)
    _, problems, out = verified(run, capsys)
    assert problems == ["plan: Line 1 of the steps is step 4 (epoch 1, step 0 of it); step 1 should follow here"]
    assert "Nothing was computed again: the ledger has no step 1." in out


def test_optimizer_state_of_a_checkpoint(run, capsys):
    with checkpoint(run, 6, "optimizer") as tensors:
        tensors["classifier.weight/exp_avg"] *= 1.1
    _, problems, _ = verified(run, capsys, "--all")
    assert problems[0].startswith("steps 4-6: they do not lead to checkpoint 6: it lies ")
    assert "classifier.weight/exp_avg" in problems[0]


def test_recipe(run, capsys):
    with ledger(run) as lines:
        lines[0]["recipe"]["train"]["lr"] = 5e-4
    _, problems, _ = verified(run, capsys, "--segments", "0")
    assert "receipt: recipe.train.lr is 0.0005 in the ledger and 0.001 in the receipt" in problems
    assert any(problem.startswith("plan: step 2 has a learning rate of ") for problem in problems)
    with ledger(run) as lines:
        for line in lines:
            if "lr" in line:
                line["lr"] /= 2
    anew(run)
    assert verified(run, capsys, "--segments", "0")[1] == []
    _, problems, _ = verified(run, capsys, "--segments", "2")
    assert {problem.split(":")[0] for problem in problems} >= {"steps 1-3", "steps 10-12"}


def test_row_of_the_data(run, trained, capsys):
    forged = str(trained.parent / "forged.jsonl")
    with ledger(run) as lines:
        lines[0]["recipe"]["task"]["data_files"] = {"train": "gone.jsonl", "eval": "gone.jsonl"}
    anew(run)
    assert verified(run, capsys, "--segments", "0")[1] == []  # this needs no data
    with ledger(run) as lines:
        lines[0]["recipe"]["task"]["data_files"] = {name: str(trained.parent / "honest.jsonl") for name in ("train", "eval")}
    anew(run)
    _, problems, _ = verified(run, capsys, "--segments", "2", "--data", f"train={forged}")
    assert problems[0].startswith(f"data: train: row {FLIPPED} differs; it is first used in step ")
    first_use = problems[0].rsplit(" ", 1)[1]

    # The forger's own data, with every hash anew: only computing the steps finds it.
    hashes = row_hashes(Recipe.load(run / "recipe.yaml", f"task.data_files.train={forged}").task.datasets()["train"])
    write_rows(run, hashes)
    with ledger(run) as lines:
        lines[0]["data"]["train"]["root"] = root(hashes)
    anew(run)
    assert verified(run, capsys, "--segments", "0")[1] == []
    _, problems, _ = verified(run, capsys, "--all", "--data", f"train={forged}")
    assert problems[0].startswith(f"steps 1-3: step {first_use} gives loss ")
    write_rows(run, hashes[:-1])
    _, problems, _ = verified(run, capsys, "--segments", "2", "--data", f"train={forged}")
    assert "data: train: 47 | 48 rows, 1 only here (47)" in problems


def test_step_that_is_said_to_have_been_left_out(run, capsys):
    with ledger(run) as lines:
        line = line_of(lines, "step", 8)
        kept = {key: line[key] for key in ("step", "epoch", "step_in_epoch")}
        line.clear()
        line.update(kept, skipped=True)
    anew(run)
    _, problems, _ = verified(run, capsys, "--all")
    assert "steps 7-9: step 8 was skipped by the ledger, not by the recipe" in problems


def test_run_of_two_processes_that_was_resumed_with_another_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    data = write(tmp_path / "honest.jsonl", reviews())
    words = (*WORDS, f"task.data_files={{train: {data}, eval: {data}}}", f"output_dir={tmp_path}/run")
    run = train_on(2, {"stopped": words, "resumed": (*words, "train.lr=5e-4")}, tmp_path, stops={"stopped": (4, 0)})["resumed"]
    assert cli.main(["receipt", str(run.folder)]) == 0
    code, problems, out = verified(run.folder, capsys, "--all")
    assert (code, problems) == (0, [])
    assert "12 steps on 2 processes (cpu), resumed 1 time;" in out and "  ok  steps 4-5 " in out


def test_what_cannot_be_verified_is_refused(run, capsys, tmp_path):
    def refused(*words):
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "must be 0, for the files alone, or at least 2" in refused("verify", run / "receipt.json", "--segments", "1")
    assert "there is no such file. hftune receipt RUN writes one" in refused("verify", tmp_path / "none.json")
    assert "is not a receipt that this hftune can read" in refused("verify", run / "result.json")
    shutil.rmtree(path_of(run, 12))
    assert "has no checkpoint of its last step, 12" in refused("receipt", run)
    (run / "result.json").unlink()
    assert "the run has not finished" in refused("receipt", run)


def test_checkpoint_of_which_there_are_two(run):
    """Only the one that the receipt pins counts: neither one that a replay has left, nor another in its place."""
    history = PinnedHistory(run, read_ledger(run), pins=read_receipt(run / "receipt.json").checkpoints)
    shutil.copytree(path_of(run, 12), path_of(history.aside, 12))
    assert history.checkpoint_path(12) == path_of(run, 12) and history.checkpoint_at(12).step == 12
    with checkpoint(run, 12) as tensors:
        shifted(tensors, 1e-3)
    assert history.checkpoint_at(12) is None


def test_checkpoint_that_a_replay_has_left_is_not_exported(run, capsys):
    own, aside = path_of(run, 12), path_of(run.with_name("run_replay"), 12)
    shutil.copytree(own, aside)
    progress, manifest = (json.loads((aside / f"{name}.json").read_text()) for name in ("progress", "manifest"))
    progress["replayed"] = sha256(json.dumps(read_ledger(run).steps[12], sort_keys=True).encode()).hexdigest()
    content = json.dumps(progress).encode()
    (aside / "progress.json").write_bytes(content)
    manifest["files"]["progress.json"] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    sign(manifest, aside)
    assert History(run, read_ledger(run)).checkpoint_at(12) is not None
    (own / "manifest.json").write_text("{}")
    assert History(run, read_ledger(run)).checkpoint_path(12) == aside
    assert verified(run, capsys, "--segments", "2")[1][0].startswith("weights: ")


def test_config_and_code_of_the_export(run, capsys):
    path = run / "model_last" / "config.json"
    config = json.loads(path.read_text())
    names = config["id2label"]
    config["id2label"] = {"0": names["1"], "1": names["0"], "2": names["2"]}
    config["auto_map"] = {"AutoModel": "evil.Model"}
    path.write_text(json.dumps(config))
    (path.parent / "evil.py").write_text("")
    anew(run)
    _, problems, _ = verified(run, capsys, "--segments", "2")
    assert [problem[:35] for problem in problems] == [
        "weights: model_last/config.json: au",
        "weights: model_last/config.json: id",
        "weights: model_last/evil.py is not ",
    ]


def test_numbers_that_compare_as_nothing(run, capsys):
    with checkpoint(run, 6) as tensors:
        shifted(tensors, 1e-2)
        tensors["bert.embeddings.word_embeddings.weight"][-1] = float("nan")
    with ledger(run) as lines:
        line_of(lines, "step", 11)["loss"] = None
        del line_of(lines, "step", 12)["grad_norm"]
    anew(run)
    _, problems, _ = verified(run, capsys, "--all")
    told = [problem for problem in problems if problem.startswith(("speed limit: steps 4-6", "steps 4-6: they do not lead"))]
    assert len(told) == 2
    assert any(problem.startswith("steps 10-12: step 11 gives loss ") for problem in problems)


def test_state_that_is_no_tensor(run, capsys):
    folder = path_of(run, 6)
    progress = json.loads((folder / "progress.json").read_text())
    progress["values"]["optimizer_options"] = [{"weight_decay": 0.5}, {}]
    (folder / "progress.json").write_text(json.dumps(progress))
    assert (
        "steps 4-6: checkpoint 6 states another optimizer_options than its steps lead to" in verified(run, capsys, "--all")[1]
    )


def test_receipt_that_names_other_files(run, capsys):
    receipt = json.loads((run / "receipt.json").read_text())

    def refused(change):
        other = json.loads(json.dumps(receipt))
        change(other)
        (run / "receipt.json").write_text(json.dumps(other))
        code = cli.main(["verify", str(run / "receipt.json")])
        assert code == 2
        return capsys.readouterr().err

    digest = receipt["subject"][0]["digest"]
    for name in ("../x", "/x", "model/../../x", "other/x"):
        assert "is in neither of model and model_last" in refused(
            lambda other, name=name: other["subject"].append({"name": name, "digest": digest})
        )
    assert "it names a file twice" in refused(lambda other: other["subject"].append(other["subject"][0]))
    assert "it says of no training how it started" in refused(lambda other: other["predicate"].update(starts=[]))
    assert "is not a receipt" in refused(lambda other: other["predicate"]["ledger"].update(lines=float("inf")))
    (run / "receipt.json").write_text(json.dumps(receipt))
    (run / "model" / "more").symlink_to(run / "model_last")
    assert cli.main(["verify", str(run / "receipt.json")]) == 2
    assert "is neither a file nor a folder of its own" in capsys.readouterr().err


def test_checkpoint_without_hashes(run, capsys):
    with ledger(run) as lines:
        line_of(lines, "checkpoint", 6).pop("model")
    receipt = read_receipt(run / "receipt.json")
    del receipt.checkpoints[6]["model"]
    write_receipt(replace(receipt, end=read_ledger(run).end), run / "receipt.json")
    _, problems, _ = verified(run, capsys, "--segments", "0")
    assert problems == ["checkpoints: checkpoint 6: no hash of model.safetensors was noted"]
    capsys.readouterr()
    assert cli.main(["receipt", str(run)]) == 2 and "is not as the run left it" in capsys.readouterr().err
