"""Single judged answers as people have them: what is scored, which answer is beside each, and what is refused or counted."""

import json
import re
from time import process_time

import numpy as np
import pytest
import torch

from hftune import Recipe
from hftune.build import load_datasets
from hftune.data.unpaired import judged_of, others_of
from hftune.errors import DataError
from hftune.tasks import KTO

ASK, GOOD = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
LAYOUTS = {
    "texts": ({"prompt": "2+2?", "completion": "4"}, []),
    "TRL's messages": ({"prompt": [ASK], "completion": [GOOD]}, []),
    "answers": ({"question": "2+2?", "answer": "4"}, []),
    "whole conversations": ({"messages": [*HI, ASK, GOOD]}, HI),
    "JSON text": ({"messages": json.dumps([ASK, GOOD])}, []),
    "HH-RLHF": ({"completion": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2+2?\n\nAssistant: 4"}, HI),
    "system": ({"system": "Be brief.", "prompt": "2+2?", "completion": "4"}, [{"role": "system", "content": "Be brief."}]),
}


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""

    def make(*rows, words=()):
        (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = ("eval.every=never", "eval.metric=loss", "task.max_train_samples=null", f"output_dir={tmp_path}/out", *words)
        return Recipe.load("kto_demo", "task.dataset=null", f"task.data_files.train={tmp_path}/answers.jsonl", *words)

    return make


def scored(task, sample):
    """Return what is scored of a sample: its own answer, and the one for the baseline."""
    return [piece.removesuffix("<|im_end|>").strip() for piece, is_scored in task.marked(sample) if is_scored]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_the_same_answer(own, layout):
    row, before = LAYOUTS[layout]
    other = {name: "3+3?" if name in ("prompt", "question") else "6" for name in row}
    if not other.keys() & {"prompt", "question"}:
        other = {next(iter(row)): json.dumps([{**ASK, "content": "3+3?"}, {**GOOD, "content": "6"}])}
        row = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
    elif isinstance(row["completion" if "completion" in row else "answer"], list):
        other = {"prompt": [{**ASK, "content": "3+3?"}], "completion": [{**GOOD, "content": "6"}]}
    task = own({**row, "label": True}, {**other, "label": False}).task
    chat = judged_of({**row, "label": True}, task.find_columns(task.unchecked_rows["train"]))
    assert [{**message, "content": message["content"].strip()} for message in chat] == [
        *({**message, "train": False} if message["role"] == "assistant" else message for message in before),
        ASK,
        GOOD,
    ]
    samples = task.datasets()["train"]
    assert [scored(task, sample) for sample in samples] == [["4", "6"], ["6", "4"]]
    assert samples.column("label").tolist() == [True, False]


def test_the_answer_beside_each_is_the_next_one_to_another_prompt(own):
    rows = [
        {"prompt": "2+2?", "completion": "4", "label": True},
        {"prompt": "2+2?", "completion": "5", "label": False},
        {"prompt": "3+3?", "completion": "6", "label": True},
        {"prompt": "4+4?", "completion": "7", "label": False},
    ]
    task = own(*rows).task
    samples = task.datasets()["train"]
    assert [scored(task, sample)[1] for sample in samples] == ["6", "6", "7", "4"]
    for sample in samples:
        start = int(sample["start"])
        assert sample["mismatched"][:start].tolist() == sample["completion"][:start].tolist()
        ids, labels = (sample[f"mismatched{end}"] for end in ("", "_labels"))
        assert len(ids) == len(labels) and labels[start - 1 : -1].tolist() == ids[start:].tolist()
        assert (labels[: start - 1] == -100).all() and (labels[start - 1 :] >= 0).all()


def test_an_answer_that_does_not_fit_behind_the_prompt_is_passed_over():
    starts, sizes, prompts = np.array([2, 2, 2, 6]), np.array([4, 10, 4, 9]), np.array([1, 2, 3, 4])
    assert others_of(starts, sizes, prompts, 10).tolist() == [1, 2, 3, 0]
    assert others_of(starts, sizes, prompts, 8).tolist() == [2, 2, 3, 0]  # the second answer of 8 tokens fits nowhere
    assert others_of(starts, sizes, prompts, 7).tolist() == [2, 2, 3, -1]
    assert others_of(starts, sizes, np.array([1, 1, 1, 1]), 10).tolist() == [-1] * 4


def test_long_runs_of_one_prompt_are_passed_at_once():
    rng, half = np.random.default_rng(0), 60_000
    starts, sizes, prompts = np.full(12, 2), rng.integers(3, 12, 12), np.array([3, 1, 1, 1, 2, 2, 1, 1, 3, 3, 3, 3])
    expected = [
        next((j % 12 for j in range(i, i + 12) if prompts[j % 12] != prompts[i] and sizes[j % 12] <= 8), -1) for i in range(12)
    ]
    assert others_of(starts, sizes, prompts, 8).tolist() == expected
    begun = process_time()
    found = others_of(np.full(2 * half, 2), np.full(2 * half, 4), np.repeat([1, 2], half), 8)
    assert process_time() - begun < 2 and found.tolist() == [half] * half + [0] * half  # one by one, half a minute


ROWS = (
    {"prompt": "2+2?", "completion": "4", "label": True},
    {"prompt": "2+2?", "completion": " ", "label": True},
    {"prompt": "2+2? " * 40, "completion": "4", "label": False},
    {"prompt": "3+3?", "completion": "7", "label": False},
)


def test_answers_that_cannot_be_scored_are_refused_with_their_counts_or_dropped(own):
    counts = "1 sample with an empty answer and 1 sample longer than task.max_length=96 tokens"
    with pytest.raises(DataError, match=f"has {re.escape(counts)}; the first at row 1. Set task.bad_samples=drop"):
        load_datasets(own(*ROWS))
    task = own(*ROWS, words=("task.bad_samples=drop",)).task
    samples = task.datasets()["train"]
    assert [scored(task, sample) for sample in samples] == [["4", "7"], ["7", "4"]]
    assert samples.column("row").tolist() == [0, 3]
    assert samples[0]["dropped"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]


def test_prompts_that_no_other_answer_fits_behind_are_refused_or_dropped(own):
    rows = (
        {"prompt": "2+2?", "completion": "it is four", "label": True},
        {"prompt": "3+3?", "completion": "it is nine", "label": False},
        {"prompt": " ".join(f"{number}+{number % 7}?" for number in range(12)), "completion": "7", "label": False},
    )
    samples = own(*rows).task.datasets()["train"]
    most = len(samples[2]["mismatched"]) - 1  # its prompt with the shorter one of the other answers
    message = (
        rf"1 sample with a prompt behind which no answer to another prompt fits \(task.max_length={most}\); the first at row 2"
    )
    with pytest.raises(DataError, match=message):
        load_datasets(own(*rows, words=(f"task.max_length={most}",)))
    samples = own(*rows, words=(f"task.max_length={most}", "task.bad_samples=drop")).task.datasets()["train"]
    assert samples.column("row").tolist() == [0, 1] and samples[0]["dropped"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            (True, True),
            r"All answers of the train split are desirable \(task.label_column=label\). KTO learns from both kinds.",
        ),
        ((1, 0), "task.label_column=label of the train split holds int64, not true and false."),
        ((True, None), r"has 1 sample without a label; the first at row 1\."),
    ],
)
def test_labels_are_true_and_false(own, labels, message):
    rows = [{"prompt": f"{place}+1?", "completion": "4", "label": label} for place, label in enumerate(labels)]
    with pytest.raises(DataError, match=message):
        load_datasets(own(*rows))


def test_one_prompt_for_all_is_said(own):
    rows = [{"prompt": "2+2?", "completion": answer, "label": answer == "4"} for answer in ("4", "5")]
    for words in ((), ("task.bad_samples=drop",)):
        with pytest.raises(DataError, match=r"All rows of the train split have one prompt\. KTO"):
            load_datasets(own(*rows, words=words))


def test_losses_are_those_of_the_paper():
    """Ethayarajh 2024, eq. 8, written out sample by sample."""
    task = KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    rows = [(0.4, 1.0, True), (-2.0, 0.5, False), (3.0, 0.6, False), (-1.0, -0.9, True)]
    for lower in (0.0, 5.0):  # with a baseline of 0.3, and one that would be below 0
        ratios = torch.tensor([row[:2] for row in rows], dtype=torch.float64) - torch.tensor([0.0, lower])
        baseline = max(0.0, sum(row[1] - lower for row in rows) / 4)
        expected = []
        for ratio, _, desirable in rows:
            value = 1 / (1 + np.exp(-0.3 * ((ratio - baseline) if desirable else (baseline - ratio))))
            expected.append((1.5 if desirable else 0.7) * (1 - value))
        found = task.batch_losses(ratios.requires_grad_(), torch.tensor([row[2] for row in rows]))
        assert found.tolist() == pytest.approx(expected, rel=1e-12)
        (gradient,) = torch.autograd.grad(found.sum(), ratios)
        assert (gradient[:, 1] == 0).all() and (gradient[:, 0] != 0).all()
