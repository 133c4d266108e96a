"""Extractive question answering on 1, 2 and 4 processes, stopped and resumed; its loss, spans and scores against others' rules."""

import ast
import json
import re
from functools import partial

import pytest
import torch
from torchmetrics.functional.text import squad
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DebertaV2Tokenizer, XLMRobertaTokenizer

import hftune
from hftune import ConfigError, DataError, Recipe, cli
from hftune.build import load_datasets
from hftune.data.demo import facts
from hftune.data.spans import best_spans, ranked, windows_of
from hftune.metrics.squad import answer_scores, split_scores
from tests.parity.test_fully_sharded import same
from tests.support.runs import NO_DROPOUT, TINY, recipe_for_rows, train_on

WHOLE = (
    *("replace=[task.model_config]", *TINY, "task.max_train_samples=50", "task.max_eval_samples=23", "task.max_length=40"),
    *("train.batch_size=12", "train.epochs=1", "train.log_every=1", "train.micro_batch_tokens=null", "train.clip_norm=0.5"),
    *("train.micro_batch_size=4", "eval.every=epoch", "eval.batch_size=5", "eval.batch_tokens=null", "train.parts=4"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("runs"), "question_answering_demo"
    again = (*WHOLE, "checkpoint.every=2", f"output_dir={folder}/resumed")
    alone = {"whole": (*WHOLE, "adapter=null"), "lora": (*WHOLE, "adapter.type=lora", "adapter.rank=2")}
    alone |= {f"micro {size}": (*WHOLE, *NO_DROPOUT, f"train.micro_batch_size={size}") for size in (5, 12)}
    found = {f"{job} on 1": run for job, run in train_on(1, alone, folder, name).items()}
    two = {"whole": WHOLE, "sharded": WHOLE, "stopped": again, "resumed": again, "lora": alone["lora"]}
    found |= train_on(2, two, folder, name, stops={"stopped": (3, 0)}, sharded=["sharded"])
    return found | {"whole on 4": train_on(4, {"whole": WHOLE}, folder, name)["whole"]}


@pytest.mark.parametrize("name", ["whole", "whole on 4", "sharded"])
def test_losses_gradient_norms_and_answers_are_those_of_one_process_with_dropout(runs, name):
    same(runs[name], runs["whole on 1"])
    one, many = (runs[run].result["metrics"] for run in ("whole on 1", name))
    assert many == pytest.approx(one, rel=1e-4, abs=1e-4)
    assert [row["prediction"] for row in runs[name].predictions] == [
        row["prediction"] for row in runs["whole on 1"].predictions
    ]


def test_so_are_those_of_adapters_and_other_micro_batches(runs):
    same(runs["lora"], runs["lora on 1"])
    same(runs["micro 5 on 1"], runs["micro 12 on 1"])


def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    assert runs["resumed"].logged("train/loss") == runs["whole"].logged("train/loss")
    assert runs["resumed"].result["metrics"] == runs["whole"].result["metrics"]
    assert runs["resumed"].predictions == runs["whole"].predictions


def windows_as_in_transformers_guide(tokenizer, row):
    """Return the inputs of each window, its first and last token of the answer, and where its tokens are, by offsets alone."""
    encoded = tokenizer(
        *(row["question"], row["context"]),
        **{"truncation": "only_second", "max_length": 40, "stride": 16, "return_overflowing_tokens": True},
        **{"return_offsets_mapping": True, "return_tensors": None},
    )
    for index in range(len(encoded["input_ids"])):
        inside = [side == 1 for side in encoded.sequence_ids(index)]
        offsets = [
            place if of_context else (-1, -1)
            for place, of_context in zip(encoded["offset_mapping"][index], inside, strict=True)
        ]
        first, last = inside.index(True), len(inside) - 1 - inside[::-1].index(True)
        start = end = 0
        if row["answers"]["text"]:
            begin = row["answers"]["answer_start"][0]
            stop = begin + len(row["answers"]["text"][0])
            if offsets[first][0] <= begin and offsets[last][1] >= stop:
                start = max(place for place in range(first, last + 1) if offsets[place][0] <= begin)
                end = min(place for place in range(first, last + 1) if offsets[place][1] >= stop)
        inputs = {name: torch.tensor([encoded[name][index]]) for name in ("input_ids", "token_type_ids", "attention_mask")}
        yield inputs, start, end, offsets


def test_loss_and_answers_are_those_of_transformers_heads_window_by_window(runs):
    run = runs["whole on 1"]
    model = AutoModelForQuestionAnswering.from_pretrained(run.folder / "model_last").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model_last")
    rows = Recipe.load("question_answering_demo", *WHOLE).task.rows["eval"]
    losses, counts = [], []
    for row, ours in zip(rows, run.predictions, strict=True):
        spans, nulls = {}, []
        for inputs, start, end, offsets in windows_as_in_transformers_guide(tokenizer, row):
            with torch.no_grad():
                found = model(**inputs, start_positions=torch.tensor([start]), end_positions=torch.tensor([end]))
            losses.append(float(found.loss))
            starts, ends = found.start_logits[0].tolist(), found.end_logits[0].tolist()
            nulls.append(starts[0] + ends[0])
            for i, (begin, _) in enumerate(offsets):
                for j in range(i, min(len(offsets), i + 30)):
                    if begin >= 0 and offsets[j][0] >= 0:
                        place = (begin, offsets[j][1])
                        spans[place] = max(spans.get(place, -1e9), starts[i] + ends[j])
        counts.append(len(nulls))
        (begin, stop), score = max(spans.items(), key=lambda item: item[1])
        lead = min(nulls) - score
        assert ours["null_score_diff"] == pytest.approx(lead, abs=1e-4)
        assert ours["prediction"] == ("" if lead > 0 else row["context"][begin:stop])
        assert ours["n_best"][0][0] == row["context"][begin:stop] and len(ours["n_best"]) == 5
        assert ours["answers"] == row["answers"]["text"]
    assert max(counts) > 1 and len(losses) > len(rows)
    assert run.logged("eval/loss")[-1] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_answers_of_a_further_set_are_shown_with_its_own_contexts(tmp_path):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in facts("eval")[30:33]))
    task = Recipe.load("question_answering_demo", *WHOLE, f"eval.sets.few={tmp_path}/few.jsonl").task
    dataset, model = task.datasets()["eval/few"], task.build_model().eval()
    batch = task.collate([dataset[index] for index in range(3)])
    with torch.no_grad():
        rows = task.predictions(model(**task.inputs(batch)), model, batch)
    vars(task)["described"] = "eval/few"
    assert [row["context"] for row in task.describe(rows)] == [row["context"] for row in facts("eval")[30:33]]


def test_training_samples_are_the_windows_of_transformers_guide():
    task = Recipe.load("question_answering_demo", *WHOLE).task
    samples = load_datasets(Recipe.load("question_answering_demo", *WHOLE))["train"]
    expected = [
        (index, inputs["input_ids"][0].tolist(), [start], [end])
        for index, row in enumerate(task.rows["train"])
        for inputs, start, end, _ in windows_as_in_transformers_guide(task.text_tokenizer, row)
    ]
    names = ("input_ids", "start", "end")
    assert [(int(sample["row"]), *(sample[name].tolist() for name in names)) for sample in samples] == expected
    assert len(expected) > 50 and {start for *_, (start,), _ in expected} > {0}
    answered = next(sample for sample in samples if sample["start"][0] > 0)
    of_answer = [text.strip() for text, is_answer in task.marked(answered) if is_answer]
    assert of_answer == task.rows["train"][int(answered["row"])]["answers"]["text"]


@pytest.mark.parametrize(
    ("prediction", "truths"),
    [
        ("The Boat.", ["a boat"]),
        ("the old boat", ["boat", "an old, old boat"]),
        ("", []),
        ("boat", []),
        ("", ["boat"]),
        ("in Rome on Monday", ["on monday in rome"]),
        ("tent", ["boat"]),
    ],
)
def test_an_answer_is_scored_as_by_squads_script(prediction, truths):
    target = {"answers": {"text": truths or [""], "answer_start": [0]}, "id": "0"}
    found = squad([{"prediction_text": prediction, "id": "0"}], [target])  # a copy of it
    assert answer_scores(prediction, truths) == pytest.approx({name: float(score) / 100 for name, score in found.items()})


def test_the_best_threshold_is_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lead in (torch.randn(40, generator=generator) * 2).round(decimals=1).tolist():  # some are equal
        has, f1 = bool(torch.rand(1, generator=generator) < 0.6), float(torch.rand(1, generator=generator).round(decimals=1))
        score = (f1 if has else 0.0) if lead <= 0 else float(not has)
        rows.append(
            {"answers": ["x"] * has, "null_score_diff": lead, "span_f1": f1 * has, "f1": score, "exact_match": score // 1}
        )

    def f1_with(threshold):
        return sum(row["span_f1"] if row["null_score_diff"] <= threshold else not row["answers"] for row in rows) / len(rows)

    found = split_scores(rows, unanswerable=True)
    assert found["best_f1"] == pytest.approx(max(map(f1_with, [-9.0, *(row["null_score_diff"] for row in rows)])))
    assert f1_with(found["best_null_threshold"]) == pytest.approx(found["best_f1"])
    assert found["f1"] == pytest.approx(f1_with(0.0))
    has, none = ([row for row in rows if bool(row["answers"]) == kind] for kind in (True, False))
    assert found["has_answer_f1"] * len(has) + found["no_answer_accuracy"] * len(none) == pytest.approx(found["f1"] * len(rows))


def test_spans_stay_inside_the_context_and_the_longest_length():
    starts, ends = torch.tensor([[9.0, 5.0, 0.0, 1.0, 9.0]]), torch.tensor([[9.0, 0.0, 3.0, 6.0, 9.0]])
    begins, stops = torch.tensor([[-1, 0, 4, 8, -1]]), torch.tensor([[-1, 3, 7, 11, -1]])
    assert best_spans(starts, ends, begins, stops, longest=3, count=2) == [[(11.0, 0, 11), (8.0, 0, 7)]]
    assert best_spans(starts, ends, begins, stops, longest=2, count=9)[0][:2] == [(8.0, 0, 7), (7.0, 8, 11)]
    spans, nothing, lead = ranked([[(1.0, 0, 3)], [(2.0, 0, 3), (2.0, 4, 7)]], 3.0, "abc def", 5)
    assert [(span["answer"], span["start"], span["end"]) for span in spans] == [("abc", 0, 3), ("def", 4, 7)] and lead == 1.0
    shares = torch.tensor([2.0, 2.0, 3.0]).softmax(0).tolist()
    assert [*(span["probability"] for span in spans), nothing["probability"]] == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize("kind", [DebertaV2Tokenizer, XLMRobertaTokenizer])
def test_answers_begin_and_end_with_their_words_if_tokens_have_the_space_before_them(kind):
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"] if kind is DebertaV2Tokenizer else ["<s>", "<pad>", "</s>", "<unk>"]
    words = ["\u2581", "\u2581Who", "\u2581sang", "?", "\u2581On", "\u2581Monday", "\u2581Ida", "."]
    tokenizer = kind(vocab=[*((name, 0.0) for name in special), *((name, -3.0) for name in words)])
    context = "On Monday  Ida sang."
    found = windows_of(["Who sang?"], [context], [(11, 14)], tokenizer, 30, 5, token_types=False, places=True)
    places = [*zip(found["from"][0], found["to"][0], strict=True)]
    ((first,), (last,)) = found["start"][0], found["end"][0]
    assert (places[first][0], places[last][1]) == (11, 14)
    assert [context[start:end] for start, end in places if start >= 0] == ["On", "Monday", "Ida", "sang", "."]


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""
    return partial(recipe_for_rows, "question_answering_demo", tmp_path)


GOOD = {"question": "who sang?", "context": "on monday ida sang.", "answers": {"text": ["ida"], "answer_start": [10]}}


def nested(*rows):
    """Return rows as SQuAD's own files have them, with what they have besides."""
    paragraphs = []
    for number, row in enumerate(rows):
        answers = [{"text": text, "answer_start": start} for text, start in zip(*row["answers"].values(), strict=True)]
        asked = {"id": f"q{number}", "question": row["question"], "answers": answers, "is_impossible": not answers}
        more = {} if answers else {"plausible_answers": [{"text": "on", "answer_start": 0}]}
        paragraphs.append({"context": row["context"], "qas": [{**asked, **more}]})
    return {"version": "v2.0", "data": [{"title": "Songs", "paragraphs": [part]} for part in paragraphs]}


@pytest.mark.parametrize("indent", [None, 1])
def test_squads_own_files_and_lists_of_answers_are_the_same_rows(own, tmp_path, indent):
    rows = facts("eval")[20:40]
    flat = own(*rows).task
    (tmp_path / "squad.json").write_text(json.dumps(nested(*rows), indent=indent))
    of_squad = own(GOOD, words=(f"task.data_files.train={tmp_path}/squad.json",), name="a.jsonl").task
    listed = own(
        *({**row, "answers": nested(row)["data"][0]["paragraphs"][0]["qas"][0]["answers"]} for row in rows), name="b.jsonl"
    ).task
    expected = [sample["input_ids"].tolist() for sample in flat.datasets()["train"]]
    for task in (of_squad, listed):
        assert [sample["input_ids"].tolist() for sample in task.datasets()["train"]] == expected
        assert task.unanswerable and len(task.rows["train"]) == 20
    assert of_squad.rows["train"][3]["answers"] == rows[3]["answers"] and of_squad.rows["train"][3]["id"] == "q3"


def test_windows_of_several_data_sets_are_mixed(own, tmp_path):
    rows = facts("eval")[:20]
    for name, some in {"few": rows[:5], "many": rows[5:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    mixed = f"task.datasets=[{{data_files: {tmp_path}/few.jsonl}}, {{data_files: {tmp_path}/many.jsonl, weight: 2}}]"
    task = own(GOOD, words=("task.data_files=null", mixed)).task
    train = task.datasets()["train"]
    (few, _), (many, weight) = task.mixture(train)
    assert few == sum(row < 5 for row in train.column("row")) > 5 and few + many == len(train) and weight == 2


def test_answers_that_no_window_has_are_counted(own):
    context = "we heard that " + "very " * 40 + "old song again."
    row = {"question": "what?", "context": context, "answers": {"text": [context[14:]], "answer_start": [14]}}
    recipe = own(GOOD, row)
    notices = recipe.task.notices(load_datasets(recipe), None)
    assert "Answers of train that no window has as a whole, and that are trained as none: 1." in notices
    assert any(re.fullmatch(r"The 2 questions of train are \d windows of task.max_length=48 tokens.", said) for said in notices)
    assert recipe.task.unanswerable is False


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        (
            {"answers": {"text": ["ida"], "answer_start": [9]}},
            (),
            "Row 1 of the train split: the answer 'ida' is not in the context at answer_start=9, where it has ' id'. It is at 10. "
            "Places are counted in characters, from 0.",
        ),
        (
            {"answers": {"text": ["paul"], "answer_start": [10]}},
            (),
            "Row 1 of the train split: the answer 'paul' is not in the context at answer_start=10, where it has 'ida '. The "
            "context does not have it at all. Places are counted in characters, from 0.",
        ),
        (
            {"answers": {"text": [""], "answer_start": [-1]}},
            (),
            "Row 1 of the train split has an empty answer. A question without",
        ),
        (
            {"answers": {"text": ["ida"], "answer_start": []}},
            (),
            "Row 1 of the train split has more texts of answers than places",
        ),
        ({"context": " "}, (), "The train split has an empty text in column 'context' at row 1. Remove these rows"),
        ({"context": None}, (), "The train split has an empty text in column 'context' at row 1. Remove these rows"),
        ({"question": ""}, (), "The train split has an empty text in column 'question' at row 1. Remove these rows"),
        (
            {"question": "who " * 30},
            (),
            "Row 1 of the train split has a question of 30 tokens, which leaves 15 of task.max_length=48 to windows of the context, "
            "and these overlap by task.stride=16. Raise task.max_length, lower task.stride, or shorten the question.",
        ),
        (
            {},
            ("task.max_length=20",),
            "Row 0 of the train split has a question of 3 tokens, which leaves 14 of task.max_length=20",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(own, row, words, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        load_datasets(own(GOOD, {**GOOD, **row}, words=words))


def test_columns_and_keys_that_do_not_fit_are_refused(own):
    with pytest.raises(ConfigError, match=re.escape("task.stride=48 must be below task.max_length=48: windows share")):
        own(GOOD, words=("task.stride=48",)).validate()
    with pytest.raises(DataError, match=re.escape("task.context_column=text is not a column of the train split.")):
        load_datasets(own(GOOD, words=("task.context_column=text",)))
    with pytest.raises(DataError, match=re.escape("Column 'answers' of the train split holds string, not SQuAD answers.")):
        load_datasets(own({**GOOD, "answers": "ida"}))


def test_a_model_of_answerable_questions_always_answers(own):
    recipe = own(GOOD, words=("replace=[task.model_config]", *TINY, "task.null_threshold=-1000"))
    load_datasets(recipe)
    task, model = recipe.task, recipe.task.build_model().eval()
    (answer,) = task.predict(model, [[GOOD["question"], GOOD["context"]]])
    assert answer["answer"] == GOOD["context"][answer["start"] : answer["end"]] != ""
    task.unanswerable = True
    (nothing,) = task.predict(model, [[GOOD["question"], GOOD["context"]]], probabilities=True)
    assert (nothing["answer"], nothing["start"], nothing["end"]) == ("", None, None)
    shares = sum(span["probability"] for span in nothing["n_best"]) + nothing["probability"]
    assert shares == pytest.approx(1, abs=1e-5) and len(nothing["n_best"]) == 5


def test_a_text_and_a_table_of_long_contexts_are_answered_as_in_the_evaluation(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run, rows = runs["whole on 1"], Recipe.load("question_answering_demo", *WHOLE).task.rows["eval"]
    table, output = tmp_path / "new.jsonl", tmp_path / "answers.jsonl"
    table.write_text("".join(json.dumps({"context": row["context"], "question": row["question"]}) + "\n" for row in rows))
    assert cli.main(["predict", str(run.folder / "model_last"), "--data", str(table), "--output", str(output)]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["answer"] for row in found] == [row["prediction"] for row in run.predictions]
    capsys.readouterr()
    text = f"{rows[0]['question']}\t{rows[0]['context']}"
    assert cli.main(["predict", str(run.folder / "model_last"), "--text", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == found[0]["answer"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("who sang?", "Input 0 is not a pair of texts, question and context: give a list of two texts"),
        (["who sang?", " "], "Input 0 is an empty text."),
        (["who " * 30, "ida"], "Input 0 has a question of 30 tokens, which leaves 7 of task.max_length=40"),
    ],
)
def test_what_is_no_question_with_a_context_is_not_answered(runs, value, message):
    with pytest.raises(DataError, match=re.escape(message)):
        hftune.load_model(runs["whole on 1"].folder).predict([value])


def test_the_card_shows_how_questions_are_asked(runs):
    model = runs["whole on 1"].folder / "model"
    card = (model / "README.md").read_text()
    (line,) = re.findall(r"^trained\.predict\((.*)\)$", card, re.MULTILINE)
    (row,) = hftune.load_model(model).predict(ast.literal_eval(line))
    assert {"answer", "start", "end", "probability"} == {*row}
    assert "pipeline_tag: question-answering" in card
