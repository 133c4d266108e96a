"""hftune compare on real runs: of eight planted causes each is named first, and equal runs are equal to the bit."""

import json

import pytest

from hftune import cli
from hftune.data.demo import reviews
from hftune.replay.comparison import compare
from hftune.replay.run_record import read_run
from tests.support.runs import SMALL, train_on, write_jsonl

OWN_OPTIMIZER = "import torch\n\n\nclass Mine(torch.optim.AdamW):\n    def __init__(self, params, lr):\n        super().__init__(params, lr, eps={eps})\n"
PLANTED = {
    "lr": (2, "recipe", "train.lr: 0.001 | 0.0009"),
    "seed": (1, "recipe", "seed: 42 | 1"),
    "row": (None, "data", "train: row 30 differs; it is first used in step "),
    "dropout": (1, "recipe", "task.model_config.hidden_dropout_prob: 0.1 | 0.12"),
    "micro_batches": (1, "recipe", "train.micro_batch_size: 8 | 4"),
    "eps": (3, "recipe", "train.eps: 1e-08 | 1e-06"),
    "processes": (None, "processes", "processes 1 | 2"),
}
"""What is planted: the step at which the run diverges, and what is named."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = reviews("train")[:130]
    clean = write_jsonl(folder / "rows.jsonl", rows[:100])
    flipped = write_jsonl(
        folder / "flipped.jsonl",
        [row | {"label": 4 - row["label"]} if index == 30 else row for index, row in enumerate(rows[:100])],
    )
    base = (
        *(word for word in SMALL if not word.startswith(("task.max_", "train.parts"))),
        *("task.dataset=null", "task.max_train_samples=null", "task.max_eval_samples=null", "train.micro_batch_size=8"),
        *(f"task.data_files.train={clean}", f"task.data_files.eval={write_jsonl(folder / 'eval.jsonl', rows[100:])}"),
        *("train.lr=1e-3", "train.max_steps=8", "train.warmup_ratio=0.3", "eval.every=8", "checkpoint.every=never"),
    )
    (folder / "own.yaml").write_text("base: yelp_demo\ntrain: {optimizer: mine.Mine}\n")
    own = (*base, f"recipe={folder / 'own.yaml'}")
    (folder / "mine.py").write_text(OWN_OPTIMIZER.format(eps=1e-8))
    found = train_on(1, {"own": own}, folder)
    # Of another length: Python trusts compiled code of the same second and length.
    (folder / "mine.py").write_text(OWN_OPTIMIZER.format(eps="0.000001"))
    jobs = {
        "base": base,
        "same": base,
        "lr": (*base, "train.lr=9e-4"),
        "seed": (*base, "seed=1"),
        "row": (*base, f"task.data_files.train={flipped}"),
        "dropout": (*base, "task.model_config.hidden_dropout_prob=0.12"),
        "micro_batches": (*base, "train.micro_batch_size=4"),
        "eps": (*base, "train.eps=1e-6"),
        "code": own,
        "stopped": base,
        "resumed": (*base, f"output_dir={folder / 'stopped-on-1'}", "train.lr=5e-4"),
    }
    found |= train_on(1, jobs, folder, stops={"stopped": (4, 0)})
    return found | train_on(2, {"processes": (*base, "train.micro_batch_size=4")}, folder)


def pair(runs, a, b):
    (found,) = compare([read_run(runs[name].folder) for name in (a, b)]).pairs
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_named_first(runs, name):
    step, kind, text = PLANTED[name]
    divergence = pair(runs, "micro_batches" if name == "processes" else "base", name).divergence
    first, *others = divergence.causes
    assert (first.kind, first.verdict) == (kind, "likely") and first.text.startswith(text)
    assert not any(cause.is_likely for cause in others)
    assert divergence.step == (step if name != "row" else int(first.text.rpartition(" ")[2]))


def test_changed_code_file_is_named_first(runs):
    divergence = pair(runs, "own", "code").divergence
    assert (divergence.step, divergence.causes[0].kind, divergence.causes[0].text, divergence.causes[0].verdict) == (
        3,
        "code",
        "mine.py",
        "likely",
    )


def test_equal_runs_are_equal_to_the_bit_and_processes_differ_by_rounding_alone(runs):
    found = pair(runs, "base", "same")
    assert found.divergence.step is None and found.divergence.causes == [] and found.divergence.num_steps == 8
    assert found.training.mean == 0 and found.training.is_paired
    assert all(one.a == one.b and one.interval.half_width == 0 for one in found.evaluation.metrics)
    rounded = pair(runs, "micro_batches", "processes").divergence
    assert rounded.step is None and 0 < rounded.rounding < 1e-6


def test_command_prints_it_and_its_json_parses(runs, capsys):
    assert cli.main(["compare", str(runs["base"].folder), str(runs["row"].folder)]) == 0
    said = capsys.readouterr().out
    assert "Equal to the bit up to step" in said and "likely   data    train: row 30 differs" in said
    assert "no sign  recipe  task.data_files.train" in said and "accuracy" in said
    folders = f"{runs['base'].folder} {runs['row'].folder}"
    assert said.endswith(f"hftune bisect {folders}\nLook at the step:  hftune replay {runs['row'].folder} --step 5 --worst 5\n")
    assert cli.main(["compare", str(runs["own"].folder), str(runs["code"].folder)]) == 0
    assert f"git bisect run hftune bisect-step {runs['own'].folder} --step 3" in capsys.readouterr().out
    assert cli.main(["compare", *(str(runs[name].folder) for name in ("base", "lr", "seed")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [pair["divergence"]["causes"][0]["name"] for pair in found["pairs"]] == ["train.lr", "seed"]


def test_keys_that_changed_on_a_resume_are_told(runs, capsys):
    assert cli.main(["compare", str(runs["base"].folder), str(runs["resumed"].folder)]) == 0
    said = capsys.readouterr().out
    assert "from step 6 on, after a resume: train.lr: 0.001 -> 0.0005" in said
    assert "Equal to the bit up to step 5. They diverge in step 6: learning rate" in said
