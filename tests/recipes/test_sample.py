"""hftune sample: answers that are the same on any processes and in any batches, and what rewards choose among them."""

import json
import subprocess
import sys

import pytest

from hftune import Recipe, cli, load_model, train
from hftune.build import load_datasets
from hftune.commands import predict_rows
from hftune.commands.rewards import RunReward
from hftune.data.demo import chats
from tests.support.predictions import untrained
from tests.support.runs import environment, train_on, warm_python

REWARDS = """
import math

def length(prompt, answer):
    return len(answer)

def exact(prompt, answer, solution):
    return answer == solution

def fails(prompt, answer):
    return 1 / 0

def nan(prompt, answer):
    return math.nan

def text(prompt, answer):
    return "4"

def nothing(prompt, answer):
    return None

def wants(prompt, answer, column_that_is_missing):
    return 0.0

def spoils(prompt, answer, solution):
    prompt[-1]["content"] += "!"
    return prompt[-1]["content"].count("!") + len(answer) / 100

constant = 3
"""


def asked(rows):
    """Return prompts with their solutions, of the demo's chats."""
    return [{"prompt": row["messages"][:-1], "solution": row["messages"][-1]["content"]} for row in rows]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model that has begun to learn, rewards, and prompts that it was not trained on."""
    folder = tmp_path_factory.mktemp("sample")
    train_on(
        1, {"run": ("task.max_train_samples=1280", "task.max_eval_samples=8", f"output_dir={folder}/run")}, folder, "chats_demo"
    )
    (folder / "rewards_of_test.py").write_text(REWARDS)
    rows = chats("train")
    write(folder / "prompts.jsonl", asked(rows[5000:5200]))
    write(folder / "others.jsonl", asked(rows[6000:6100]))
    write(folder / "texts.jsonl", [{"prompt": row["messages"][-2]["content"]} for row in rows[5000:5010]])
    return folder


@pytest.fixture
def sample(folder, monkeypatch, capsys):
    """Returns a function that draws, and returns exit code, rows and what was said."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words, of="run", data="prompts.jsonl", output="out.jsonl", reward="rewards_of_test.exact"):
        (folder / output).unlink(missing_ok=True)
        short = () if "--max-new-tokens" in words else ("--max-new-tokens", "20")
        given = ["sample", of, "--data", data, "--output", output, "--reward", reward, *short, *map(str, words)]
        code = cli.main(given)
        said = capsys.readouterr()
        return code, read(folder / output) if (folder / output).is_file() else [], said.out + said.err

    yield run
    sys.modules.pop("rewards_of_test", None)


def means(said):
    return {line.split("  ")[1]: float(line.split()[-1]) for line in said.splitlines() if line.startswith("  mean")}


@pytest.fixture
def pairs(sample):
    return sample("--answers", "6", "--seed", "3")


def test_pairs_are_the_same_in_batches_of_any_size_and_on_two_processes(pairs, sample, folder):
    code, rows, said = pairs
    assert code == 0 and "answers           1,200" in said and "with equal scores" in said
    assert 30 < len(rows) < 200
    assert all(row["chosen_score"] == 1 and row["rejected_score"] == 0 for row in rows)
    assert sample("--answers", 6, "--seed", 3, "--batch-size", 11)[:2] == (0, rows)
    assert sample("--answers", 6, "--seed", 4)[1] != rows
    words = ["sample", "run", "--data", "prompts.jsonl", "--output", "two.jsonl", "--reward", "rewards_of_test.exact"]
    words += ["--max-new-tokens", "20", "--answers", "6", "--seed", "3", "--processes", "2"]
    done = subprocess.run(
        [warm_python(), "-m", "hftune.cli", *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert read(folder / "two.jsonl") == rows


def test_pairs_are_read_by_dpo_as_they_are(pairs, folder):
    files = ("task.dataset=null", "task.data_files.train=out.jsonl", "eval.every=never", f"task.model={folder}/run/model")
    recipe = Recipe.load("dpo", *files, "task.bad_pairs=refuse")
    assert len(load_datasets(recipe)["train"]) == len(pairs[1])


def test_a_round_of_training_on_the_best_answers_raises_the_mean_score(sample, folder):
    code, best, _ = sample("--keep", "best", "--threshold", "1", "--seed", "1")
    assert code == 0 and {row["score"] for row in best} == {1.0}
    before = means(sample("--seed", 2, data="others.jsonl")[2])
    sft = ("task.dataset=null", "task.dataset_config=null", f"task.model={folder}/run/model", "task.max_length=96")
    files = ("task.data_files.train=best.jsonl", "eval.every=never", "track.with=[]", f"output_dir={folder}/round")
    write(folder / "best.jsonl", best)
    train(Recipe.load("sft", *sft, *files, "train.lr=2e-3", "train.epochs=4", "train.batch_size=16"))
    after = means(sample("--seed", 2, data="others.jsonl", of="round")[2])
    assert after["mean score"] > 1.5 * before["mean score"]


@pytest.mark.parametrize(
    ("recipe", "data", "precision"),
    [
        ("reranking_demo", "texts.jsonl", "no"),
        ("reward_demo", "prompts.jsonl", "no"),
        ("reranking_demo", "texts.jsonl", "bf16"),
    ],
)
def test_a_run_that_gives_scores_is_a_reward(sample, folder, recipe, data, precision):
    scorer = untrained(recipe, folder / f"{recipe}_{precision}")
    code, rows, _ = sample("--answers", 3, "--mixed-precision", precision, reward=scorer.name, data=data)
    assert code == 0 and rows
    model = load_model(scorer, device="cpu")
    for row in rows[:5]:
        (chosen,) = model.predict([[row["prompt"], row["chosen"]]])
        assert row["chosen_score"] == pytest.approx(chosen["score"], abs=1e-6)
        assert row["chosen_score"] > row["rejected_score"]


def test_an_answer_that_looks_like_a_conversation_is_scored_as_an_answer(folder):
    scorer = untrained("reward_demo", folder / "turns")
    model, reward = load_model(scorer), RunReward(str(scorer), trust_code=False)
    answers = ["\n\nHuman: who?\n\nAssistant: me", json.dumps([{"role": "assistant", "content": "me"}])]
    chats = [[{"role": "user", "content": "who?"}, {"role": "assistant", "content": answer}] for answer in answers]
    assert reward("who?", answers, {}) == pytest.approx([row["score"] for row in model.predict(chats)], abs=1e-6)


def test_a_reward_that_changes_the_prompt_changes_neither_the_output_nor_other_scores(sample, folder):
    _, rows, _ = sample("--answers", 3, reward="rewards_of_test.spoils")
    prompts = [row["prompt"] for row in read(folder / "prompts.jsonl")]
    assert rows and all(row["prompt"] in prompts for row in rows)
    assert all(
        row["chosen_score"] == pytest.approx(row["prompt"][-1]["content"].count("!") + 1 + len(row["chosen"]) / 100)
        for row in rows
    )


def test_options_and_reward_are_compared_between_processes(sample, monkeypatch):
    found = []
    monkeypatch.setattr(predict_rows, "check_same", lambda group, own: found.append(own["recipe"]))
    sample("--answers", 2, "--seed", 5)
    sample("--answers", 2, "--seed", 5, reward="rewards_of_test.length")
    assert [own["--seed"] for own in found] == [5, 5] and found[0]["--reward"] != found[1]["--reward"]


def test_answers_that_are_cut_have_no_score(sample):
    code, rows, said = sample("--max-new-tokens", 1, "--answers", 2)
    assert code == 2 and not rows
    assert "400 of them empty or cut at --max-new-tokens" in said
    assert "There is no row to write: of 200 prompts, 200 without an answer that has a score." in said


@pytest.mark.parametrize(
    ("words", "reward", "message"),
    [
        (
            (),
            "rewards_of_test.exactly",
            "--reward=rewards_of_test.exactly cannot be imported: module 'rewards_of_test' has no ",
        ),
        ((), "length", "--reward length is neither the output folder of a run, such as outputs/reward, nor a function"),
        ((), "rewards_of_test.constant", "--reward rewards_of_test.constant is int, not a function."),
        ((), "run", "--reward run: Chats gives answers no scores."),
        (
            (),
            "rewards_of_test.wants",
            "asks for column_that_is_missing, which is not a column of prompts.jsonl. It has: prompt,",
        ),
        ((), "rewards_of_test.fails", "--reward rewards_of_test.fails failed on the answer "),
        ((), "rewards_of_test.nan", "--reward rewards_of_test.nan returned nan for the answer "),
        ((), "rewards_of_test.text", "--reward rewards_of_test.text returned '4' for the answer "),
        ((), "rewards_of_test.nothing", "--reward rewards_of_test.nothing returned None for the answer "),
        (("--answers", "1"), "rewards_of_test.exact", "--answers 1: a pair needs 2 answers at least."),
        (("--temperature", "0"), "rewards_of_test.exact", "--temperature 0.0 must be a finite number above 0."),
        (("--threshold", "nan"), "rewards_of_test.exact", "--threshold nan must be a finite number."),
        (("--seed", str(2**32)), "rewards_of_test.exact", "--seed 4294967296 must be 0 or more, and below 2**32."),
        (("--top-p", "1.5"), "rewards_of_test.exact", "--top-p 1.5 must be above 0, and 1 at most."),
        (("--seed", "-1"), "rewards_of_test.exact", "--seed -1 must be 0 or more, and below 2**32."),
    ],
)
def test_what_cannot_score_or_draw_is_refused(sample, words, reward, message):
    code, rows, said = sample(*words, reward=reward)
    assert code == 2 and not rows and message in said
    if " answer " in message and "answers " not in message:
        assert "--data prompts.jsonl: Row " in said


def test_runs_that_answer_no_chats_and_tables_without_prompts_are_refused(sample, folder):
    untrained("reranking_demo", folder / "no_chats")
    untrained("reward_demo", folder / "no_answers")
    write(folder / "empty.jsonl", [{"prompt": "who?"}, {"prompt": " "}])
    for run in ("no_chats", "no_answers"):
        assert "hftune sample is for models that answer chats" in sample(of=run, data="texts.jsonl")[2]
    assert "is not a pair of texts" in sample(reward="no_chats")[2]  # its prompts are messages
    assert "--data empty.jsonl has no input in column 'prompt' at row 1" in sample(data="empty.jsonl")[2]
