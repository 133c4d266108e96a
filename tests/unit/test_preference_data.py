"""Preference pairs as people have them: what is compared of each layout, and what is refused or counted."""

import json

import pytest

from hftune import Recipe
from hftune.build import load_datasets
from hftune.data.preferences import pair_of
from hftune.errors import DataError

ASK, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2+2?\n\nAssistant:"
HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "train": False}]
LAYOUTS = {
    "texts": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, []),
    "TRL's messages": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, []),
    "whole conversations": ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, []),
    "UltraFeedback": ({"prompt": "2+2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score_chosen": 9.0}, []),
    "JSON text": ({"prompt": "2+2?", "chosen": json.dumps([ASK, GOOD]), "rejected": json.dumps([ASK, BAD])}, []),
    "HH-RLHF": ({"chosen": f"{HH} 4", "rejected": f"{HH} 5"}, HI),
    "HH-RLHF with prompts": ({"prompt": HH, "chosen": " 4", "rejected": " 5"}, HI),
    "Orca": (
        {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"},
        [{"role": "system", "content": "Be brief."}],
    ),
}


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""

    def make(*rows, words=()):
        (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = ("eval.every=never", "eval.metric=loss", "task.max_train_samples=null", f"output_dir={tmp_path}/out", *words)
        return Recipe.load("dpo_demo", "task.dataset=null", f"task.data_files.train={tmp_path}/pairs.jsonl", *words)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_hub_are_the_same_pair(own, layout):
    row, before = LAYOUTS[layout]
    task = own(row).task
    chosen, rejected = pair_of(row, task.find_columns(task.unchecked_rows["train"]))
    plain = [{**message, "content": message["content"].strip()} for message in chosen]
    assert plain == [*before, ASK, GOOD]
    assert [message["content"].strip() for message in rejected] == [message["content"] for message in (*before, ASK, BAD)]
    (pair,) = task.datasets()["train"]
    compared = [piece.strip() for piece, is_compared in task.marked(pair) if is_compared]
    assert compared == ["4<|im_end|>", "5<|im_end|>"]


def test_what_is_compared_begins_where_the_conversations_part(own):
    tail = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    task = own({"chosen": [ASK, GOOD, *tail], "rejected": [ASK, BAD, *tail]}).task
    (pair,) = task.datasets()["train"]
    compared = [piece for piece, is_compared in task.marked(pair) if is_compared]
    assert compared == ["4<|im_end|>", "yes<|im_end|>", "5<|im_end|>", "yes<|im_end|>"]


ROWS = (
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    {"prompt": "2+2?", "chosen": "4", "rejected": "4"},
    {"prompt": "2+2?", "chosen": "", "rejected": "5"},
    {"prompt": "2+2?", "chosen": "4", "rejected": "  "},
    {"prompt": "2+2? " * 40, "chosen": "4", "rejected": "5"},
    {"prompt": "3+3?", "chosen": "6", "rejected": "7"},
)
COUNTS = "1 pair with equal answers, 2 pairs with an empty answer and 1 pair longer than task.max_length=96 tokens"


def test_pairs_that_cannot_be_compared_are_refused_with_their_counts(own):
    with pytest.raises(DataError) as refused:
        load_datasets(own(*ROWS))
    assert str(refused.value) == (
        f"The train split has {COUNTS}; the first at row 1. Set task.bad_pairs=drop to leave them out."
    )


def test_or_dropped_and_counted_and_the_others_stay_as_they_are(own):
    recipe = own(*ROWS, words=("task.bad_pairs=drop",))
    pairs = load_datasets(recipe)["train"]
    assert [int(pair["row"]) for pair in pairs] == [0, 5]
    assert f"Dropped of the 6 rows of the train split: {COUNTS}." in recipe.task.notices({"train": pairs}, None)
    texts = ["".join(piece for piece, _ in recipe.task.marked(pair)) for pair in pairs]
    assert "2+2?" in texts[0] and "6<|im_end|>" in texts[1] and "7<|im_end|>" in texts[1]
    assert recipe.task.lengths(pairs).tolist() == [len(pair["chosen"]) + len(pair["rejected"]) for pair in pairs]


def test_a_row_that_is_no_chat_is_refused_with_its_number_or_dropped(own):
    bad = {"prompt": "2+2?", "chosen": "4<|im_end|>", "rejected": "5"}
    with pytest.raises(DataError, match=r"The train split cannot be trained on, at row 1: .*special token"):
        load_datasets(own(ROWS[0], bad))
    recipe = own(ROWS[0], bad, words=("task.bad_pairs=drop",))
    pairs = load_datasets(recipe)["train"]
    assert "1 pair that cannot be written as chats." in recipe.task.notices({"train": pairs}, None)[-1]


def test_a_row_whose_messages_are_out_of_order_is_dropped_as_well(own):
    bad = {"prompt": [ASK], "chosen": [GOOD, {"role": "system", "content": "x"}, GOOD], "rejected": [BAD]}
    pairs = load_datasets(own(LAYOUTS["TRL's messages"][0], bad, words=("task.bad_pairs=drop",)))["train"]
    assert len(pairs) == 1 and pairs[0]["dropped"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "3+3?"}, BAD]}, "whose prompts differ"),
        ({"prompt": None, "chosen": "4", "rejected": "5"}, "with an empty prompt"),
        ({"prompt": " ", "chosen": "4", "rejected": "5"}, "with an empty prompt"),
        ({"chosen": [{**ASK, "content": ""}, GOOD], "rejected": [{**ASK, "content": ""}, BAD]}, "with an empty prompt"),
    ],
)
def test_answers_to_nothing_or_to_different_prompts_are_not_compared(own, row, problem):
    good = next(LAYOUTS[name][0] for name in ("texts", "whole conversations") if LAYOUTS[name][0].keys() == row.keys())
    with pytest.raises(DataError, match=f"has 1 pair {problem}; the first at row 1"):
        load_datasets(own(good, row))


def test_where_no_pair_is_left_nothing_is_trained(own):
    with pytest.raises(DataError, match=r"has 1 pair with equal answers; the first at row 0\. Remove them\."):
        load_datasets(own(ROWS[1], words=("task.bad_pairs=drop",)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "4", "rejected": "5"}, "Its answers have no prompt. Set task.prompt_column."),
        ({"prompt": "2+2?", "better": "4", "rejected": "5"}, "task.chosen_column=chosen is not a column of the train split"),
        ({"prompt": "2+2?", "chosen": [ASK], "rejected": [ASK, BAD]}, "There is no message of the assistant to train on."),
    ],
)
def test_data_without_pairs_are_refused_in_words(own, row, message):
    with pytest.raises(DataError) as refused:
        load_datasets(own(row))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("task.method=dpo",), "task.method='dpo' is not one of sigmoid, robust"),
        (
            ("task.label_smoothing=0.1", "task.method=ipo"),
            "task.label_smoothing=0.1 needs task.method=sigmoid, robust or cpo, not ipo.",
        ),
        (("task.divergence=js", "task.method=hinge"), "task.divergence='js' needs task.method=sigmoid, not hinge."),
        (("task.label_smoothing=0.5",), "task.label_smoothing=0.5"),
        (("task.prepare=as_needed",), "task.prepare=as_needed is not for Preferences"),
    ],
)
def test_keys_without_a_meaning_are_refused(words, message):
    with pytest.raises(Exception, match=message.replace("(", r"\(")):
        Recipe.load("dpo_demo", *words).validate()
