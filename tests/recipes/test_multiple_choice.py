"""Multiple choice on 1, 2 and 4 processes, stopped and resumed; the layouts of RACE, SWAG and ARC; transformers' loss."""

import ast
import json
import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

import hftune
from hftune import ConfigError, DataError, Recipe, cli
from hftune.build import load_datasets
from hftune.data.choices import right_choices, sides
from tests.parity.test_fully_sharded import same
from tests.support.runs import NO_DROPOUT, TINY, recipe_for_rows, train_on

WHOLE = (
    *("replace=[task.model_config]", *TINY, "task.max_train_samples=50", "task.max_eval_samples=23", "task.max_length=40"),
    *("train.batch_size=12", "train.epochs=1", "train.log_every=1", "train.micro_batch_tokens=null", "train.clip_norm=0.5"),
    *("train.micro_batch_size=4", "eval.every=epoch", "eval.batch_size=5", "train.parts=4"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("runs"), "multiple_choice_demo"
    again = (*WHOLE, "checkpoint.every=2", f"output_dir={folder}/resumed")
    alone = {f"micro {size}": (*WHOLE, *NO_DROPOUT, f"train.micro_batch_size={size}") for size in (5, 12)}
    found = {f"{job} on 1": run for job, run in train_on(1, {"whole": WHOLE, **alone}, folder, name).items()}
    two = {"whole": WHOLE, "sharded": WHOLE, "stopped": again, "resumed": again}
    found |= train_on(2, two, folder, name, stops={"stopped": (3, 0)}, sharded=["sharded"])
    return found | {"whole on 4": train_on(4, {"whole": WHOLE}, folder, name)["whole"]}


@pytest.mark.parametrize("name", ["whole", "whole on 4", "sharded"])
def test_losses_gradient_norms_and_choices_are_those_of_one_process_with_dropout(runs, name):
    same(runs[name], runs["whole on 1"])
    assert runs[name].result["metrics"] == pytest.approx(runs["whole on 1"].result["metrics"], rel=1e-4)
    assert [row["prediction"] for row in runs[name].predictions] == [
        row["prediction"] for row in runs["whole on 1"].predictions
    ]


def test_so_are_those_of_other_micro_batches(runs):
    same(runs["micro 5 on 1"], runs["micro 12 on 1"])


def test_choices_are_computed_without_padding(runs):
    assert set(runs["whole"].logged("perf/padding_share")) == {0.0}


def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    assert runs["resumed"].logged("train/loss") == runs["whole"].logged("train/loss")
    assert runs["resumed"].result["metrics"] == runs["whole"].result["metrics"]
    assert runs["resumed"].predictions == runs["whole"].predictions


def test_loss_and_choices_are_those_of_transformers_head(runs):
    run = runs["whole on 1"]
    model = AutoModelForMultipleChoice.from_pretrained(run.folder / "model_last").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model_last")
    rows, losses = Recipe.load("multiple_choice_demo", *WHOLE).task.rows["eval"], []
    for row, ours in zip(rows, run.predictions, strict=True):
        count, label = len(row["choices"]), "ABC".index(row["answer"])
        cut = {"truncation": True, "max_length": 40}
        inputs = tokenizer([row["question"]] * count, row["choices"], return_tensors="pt", padding=True, **cut)
        with torch.no_grad():
            found = model(**{name: value[None] for name, value in inputs.items()}, labels=torch.tensor([label]))
        losses.append(float(found.loss))
        shares = found.logits[0].softmax(0).tolist()
        assert ours["label"] == label and ours["prediction"] == shares.index(max(shares))
        assert ours["answer"] == row["choices"][label] and ours["chosen"] == row["choices"][ours["prediction"]]
        assert [ours["probability"], ours["label_probability"]] == pytest.approx([max(shares), shares[label]], abs=1e-5)
    assert {len(row["choices"]) for row in rows} == {2, 3}
    assert run.logged("eval/loss")[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    right = sum(row["label"] == row["prediction"] for row in run.predictions)
    assert run.logged("eval/accuracy")[-1] == pytest.approx(right / len(losses))


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""
    return partial(recipe_for_rows, "multiple_choice_demo", tmp_path)


GOOD = {"question": "who sang?", "choices": ["ida", "leo"], "answer": "B"}
LAYOUTS = {
    "race": {
        "article": "leo sang.",
        "question": "the singer was _ .",
        "options": ["ida", "leo"],
        "answer": "B",
        "example_id": "1",
    },
    "swag": {
        "sent1": "leo sang.",
        "sent2": "the singer",
        "ending0": "was ida",
        "ending1": "was leo",
        "label": 1,
        "fold-ind": "7",
    },
    "hellaswag": {"ctx": "leo sang. the singer", "endings": ["was ida", "was leo"], "label": "1", "activity_label": "singing"},
    "arc": {"id": "3", "question": "who sang?", "choices": {"text": ["ida", "leo"], "label": ["1", "2"]}, "answerKey": "2"},
    "copa": {"premise": "leo sang.", "question": "effect", "choice1": "ida left.", "choice2": "leo was glad.", "label": 1},
    "texts": {"question": "who sang?", "choices": ["ida", "leo"], "answer": "leo"},
}
PAIRS = {
    "race": ("leo sang.", "the singer was leo ."),
    "swag": ("leo sang.", "the singer was leo"),
    "hellaswag": ("leo sang. the singer", "was leo"),
    "arc": ("who sang?", "leo"),
    "copa": ("leo sang.", "effect leo was glad."),
    "texts": ("who sang?", "leo"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_hub_are_read_as_they_are(own, layout):
    task = own(LAYOUTS[layout]).task
    (sample,) = task.datasets()["train"]
    second = sample["input_ids"][sample["texts"][0] :].tolist()
    assert sample["label"] == 1 and second == task.text_tokenizer(*PAIRS[layout])["input_ids"]


FEW = ["x", "y", "z"]


@pytest.mark.parametrize(
    ("answers", "choices", "numbers"),
    [
        (["C", "A"], [FEW] * 2, [2, 0]),
        ([" b ", "a"], [["a", "b"]] * 2, [1, 0]),
        ([2, 0.0], [FEW] * 2, [2, 0]),
        (["0", "2"], [FEW] * 2, [0, 2]),
        (["3", "0"], [["3", "0"]] * 2, [0, 1]),  # 3 is no number of a choice
        (["1", "3"], [["2", "1", "5"], ["3", "4", "5"]], [1, 0]),
        (["1", "0"], [["0", "1"]] * 2, [1, 0]),  # either way
        (["A", "C", "D", "B"], [["B", "A", "AB", "O"]] * 4, [0, 2, 3, 1]),  # blood groups by letters
        (["AB", "A", "B", "O"], [["B", "A", "AB", "O"]] * 4, [2, 1, 0, 3]),  # by texts
        (["2", "1"], [{"text": ["2", "1"], "label": ["1", "2"]}] * 2, [1, 0]),
        ([2], [{"text": ["x", "y"], "label": [1, 2]}], [1]),
    ],
)
def test_all_answers_are_labels_or_letters_or_numbers_or_texts(answers, choices, numbers):
    assert right_choices(answers, choices, "Row {}".format) == numbers


@pytest.mark.parametrize("answer", ["c", "D", 3, -1, None, True, "", 1.9, float("nan")])
def test_what_is_none_of_the_choices_is_refused(answer):
    with pytest.raises(
        DataError, match=re.escape(f"Row 1 has the answer {answer!r}, which is none of its 3 choices: give its")
    ):
        right_choices(["B" if isinstance(answer, str) else 1, answer], [FEW] * 2, "Row {}".format)


@pytest.mark.parametrize(
    ("answers", "choices", "message"),
    [
        (["0", "1"], ["0", "3", "1", "2"], "Row 1 has the answer '1', which is the number of the choice '3' and the text of"),
        (["B", "A"], ["B", "A", "AB", "O"], "Row 0 has the answer 'B', which is the letter of the choice 'A' and the text of"),
    ],
)
def test_answers_that_two_readings_understand_differently_are_refused(answers, choices, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}.*Give them as whole numbers, 0 for the first"):
        right_choices(answers, [choices] * 2, "Row {}".format)


def test_a_choice_stands_in_the_gap_or_at_the_end_of_its_question():
    assert sides("a.", "he _ it, and _ too.", ["\\1 saw"]) == [("a.", "he \\1 saw it, and _ too.")]
    assert sides("a.", "who? ", ["he"]) == [("a.", "who? he")] and sides(None, "a _ b", ["he"]) == [("a _ b", "he")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"answer": "C"},
            "Row 1 of the train split has the answer 'C', which is none of its 2 choices: give its letter from A,",
        ),
        ({"answer": None}, "Row 1 of the train split has the answer None, which is none of its 2 choices"),
        ({"choices": ["ida"]}, "Row 1 of the train split has fewer than two choices."),
        ({"choices": None}, "Row 1 of the train split has fewer than two choices."),
        ({"choices": ["ida", " "]}, "Row 1 of the train split has an empty choice."),
        ({"question": ""}, "The train split has an empty text in column 'question' at row 1."),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(own, row, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        load_datasets(own(GOOD, {**GOOD, **row}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("task.choices_columns=[ending0]",), "task.choices_columns=['ending0'] must be two columns at least."),
        (
            ("task.choices_columns=[a, b]", "task.choices_column=c"),
            "task.choices_column=c and task.choices_columns are both set.",
        ),
        (("task.prepare=as_needed",), "task.prepare=as_needed is not for MultipleChoice"),
    ],
)
def test_keys_that_do_not_fit_are_refused(own, words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        own(GOOD, words=words).validate()


@pytest.mark.parametrize(
    ("words", "context", "asked"),
    [
        (("task.question_column=premise",), "", ["leo sang.", ["ida left.", "leo was glad."]]),
        (("task.context_column=''",), "", ["effect", ["ida left.", "leo was glad."]]),
        ((), "premise", ["leo sang.", "effect", ["ida left.", "leo was glad."]]),
    ],
)
def test_a_context_is_no_column_that_is_something_else_and_may_be_left_out(own, words, context, asked):
    task = own(LAYOUTS["copa"], words=words).task
    (sample,) = task.datasets()["train"]
    second = sample["input_ids"][sample["texts"][0] :].tolist()
    pair = (*asked[:-1], "leo was glad.") if len(asked) == 2 else PAIRS["copa"]
    assert task.context_column == context and second == task.text_tokenizer(*pair)["input_ids"]
    columns = {name: column or task.read_columns[f"{name}_column"] for name, column in task.input_columns().items()}
    assert task.raw_inputs({name: [LAYOUTS["copa"][column]] for name, column in columns.items()}) == [asked]
    assert task.predict(task.build_model().eval(), [asked])[0]["answer"] in asked[-1]


def test_a_choice_column_may_be_empty_where_a_question_has_fewer(own):
    few = {"question": "who sang?", "option_a": "ida", "option_b": "leo", "option_c": None, "answer": "B"}
    task = own(few, {**few, "option_c": "ben", "answer": "C"}).task
    assert [(int(sample["label"]), len(sample["texts"])) for sample in task.datasets()["train"]] == [(1, 2), (2, 3)]
    assert task.raw_inputs({name: [few[name]] for name in few if name != "answer"}) == [["who sang?", ["ida", "leo"]]]
    with pytest.raises(DataError, match=r"Row 1 of the train split has an empty choice\."):
        own(few, {**few, "option_b": None, "option_c": "ben"}).task.datasets()


def test_columns_that_are_missing_are_named(own):
    row = {"question": "who sang?", "answer": "B", "first": "ida", "second": "leo"}
    with pytest.raises(
        DataError, match=re.escape("task.choices_column is not set, and no column of the train split would do.")
    ):
        load_datasets(own(row))
    task = own(row, words=("task.choices_columns=[first, second]",)).task
    assert task.datasets()["train"][0]["label"] == 1


def test_the_longer_of_both_texts_is_cut_and_counted(own):
    recipe = own({**GOOD, "question": "who sang? " * 30}, GOOD)
    datasets = load_datasets(recipe)
    assert max(datasets["train"][0]["texts"]) == 64 and datasets["train"][0]["cut"] and not datasets["train"][1]["cut"]
    assert "Texts longer than task.max_length=64 tokens are truncated at the end: 50.0% of train." in recipe.task.notices(
        datasets, None
    )


def test_a_text_and_a_table_are_answered_as_in_the_evaluation(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run, rows = runs["whole on 1"], Recipe.load("multiple_choice_demo", *WHOLE).task.rows["eval"]
    table, output, folder = tmp_path / "new.jsonl", tmp_path / "chosen.jsonl", str(run.folder / "model_last")
    table.write_text("".join(json.dumps({"question": row["question"], "choices": row["choices"]}) + "\n" for row in rows))
    assert cli.main(["predict", folder, "--data", str(table), "--output", str(output)]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in found] == [row["prediction"] for row in run.predictions]
    assert [row["answer"] for row in found] == [row["chosen"] for row in run.predictions]
    capsys.readouterr()
    assert cli.main(["predict", folder, "--text", "\t".join([rows[0]["question"], *rows[0]["choices"]]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["index"] == found[0]["index"]


@pytest.mark.parametrize("value", ["who sang?", "who sang?\tida", ["who sang?", "ida"], ["who?", ["ida", ""]], ["who?"], 3])
def test_what_has_no_choices_is_not_answered(runs, value):
    with pytest.raises(
        DataError, match="Input 0 is no question and list of two choices or more: give a list of them, or a text"
    ):
        hftune.load_model(runs["whole on 1"].folder).predict([value])


def test_context_and_columns_of_choices_are_asked_for_as_they_were_trained(own, tmp_path):
    recipe = own(LAYOUTS["swag"])
    load_datasets(recipe)
    task, model = recipe.task, recipe.task.build_model().eval()
    assert task.input_columns() == {"context": "sent1", "question": None, "ending0": "ending0", "ending1": "ending1"}
    trained_on = {"question": task.read_columns["question_column"]}
    inputs = task.raw_inputs(
        {name: [LAYOUTS["swag"][column or trained_on[name]]] for name, column in task.input_columns().items()}
    )
    assert inputs == [["leo sang.", "the singer", ["was ida", "was leo"]]]
    of_text = task.predict(model, ["leo sang.\tthe singer\twas ida\twas leo"])
    assert task.predict(model, inputs) == of_text
    with pytest.raises(DataError, match=r"Input 1 is an empty text\."):
        task.predict(model, [*inputs, ["leo sang.", "", ["was ida", "was leo"]]])


def test_the_card_shows_how_choices_are_given(runs):
    model = runs["whole on 1"].folder / "model"
    (line,) = re.findall(r"^trained\.predict\((.*)\)$", (model / "README.md").read_text(), re.MULTILINE)
    (row,) = hftune.load_model(model).predict(ast.literal_eval(line))
    assert {*row} == {"answer", "index", "probability"}
