"""Several data sets with weights: what an epoch takes from each, how that is proven, and what is refused."""

import json
from collections import Counter
from itertools import chain
from math import fsum, inf
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hftune import ConfigError, DataError
from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.commands import audit as audit_command
from hftune.config import Recipe
from hftune.data import notices
from hftune.data.mixture import Mixture, load_mixture, mixed_weights
from hftune.data.sources import mixture_source
from hftune.replay.audit import audit
from hftune.tasks import Chats, LanguageModeling, SequenceClassification
from hftune.tracking.ledger import Ledger, plan_facts
from tests.support.events import step_taken

CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def plan(mixture, **fields):
    return BatchPlan(sum(count for count, _ in mixture), **{"batch_size": 4, "seed": 1, "mixture": mixture, **fields})


def samples(batches, epoch):
    return [sample for step in batches.epoch(epoch) for micro_batch in step for sample in micro_batch.samples.tolist()]


def write(path, texts, labels, **names):
    text, label = names.get("text", "text"), names.get("label", "label")
    path.write_text("".join(f"{json.dumps({text: one, label: other})}\n" for one, other in zip(texts, labels, strict=True)))
    return str(path)


def task(**fields):
    return SequenceClassification(model=None, model_config=CONFIG, vocab_size=100, **fields)


@pytest.fixture
def files(tmp_path):
    """Two files: 20 rows, and 8 with other names of the columns."""
    first = write(tmp_path / "first.jsonl", [f"first text {n}" for n in range(20)], [n % 2 for n in range(20)])
    others = {"text": "review", "label": "stars"}
    second = write(tmp_path / "second.jsonl", [f"second text {n}" for n in range(8)], [n % 2 for n in range(8)], **others)
    return [
        {"data_files": first, "weight": 0.5},
        {"data_files": second, "weight": 2, "columns": {"text": "review", "label": "stars"}},
    ]


def test_an_epoch_takes_of_each_data_set_as_its_weight_says():
    batches = plan([(20, 0.5), (8, 2), (3, 0.1), (5, 1)])
    assert batches.samples_per_epoch == 10 + 16 + 1 + 5 and batches.num_steps == 8
    used = Counter()
    for epoch in range(6):
        drawn = samples(batches, epoch)
        parts = [[sample for sample in drawn if low <= sample < high] for low, high in ((0, 20), (20, 28), (28, 31), (31, 36))]
        assert [*map(len, parts)] == [10, 16, 1, 5]
        assert set(Counter(parts[1]).values()) == {2} and set(Counter(parts[3]).values()) == {1}
        used += Counter(drawn)
    assert {used[sample] for sample in range(20)} == {3} and {used[sample] for sample in range(28, 31)} == {2}
    mixed, plain = plan([(20, 1), (9, 1.0)]), BatchPlan(29, 4, seed=1)
    assert all(samples(mixed, epoch) == samples(plain, epoch) for epoch in range(3))
    with pytest.raises(ValueError, match="do not add up to 30 samples"):
        BatchPlan(30, 4, mixture=[(20, 1)])


def test_passes_run_on_across_epochs_in_a_new_order_each():
    batches = plan([(10, 0.6)])
    epochs = [sorted(samples(batches, epoch)) for epoch in range(5)]  # three passes over ten samples
    assert set(Counter(chain.from_iterable(epochs)).values()) == {3} and epochs[0] != epochs[1]
    assert sorted(samples(plan([(10, 0.6)], seed=2), 0)) != epochs[0]


def written(folder, batches, steps, swap=False):
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.start(0, {"world_size": 2, **plan_facts(batches)})
    for step in range(steps):
        epoch, place = divmod(step, batches.num_steps)
        own = np.concatenate([micro_batch.samples for micro_batch in batches.epoch(epoch)[place]])
        if swap and step == steps - 1:
            own = own.copy()
            own[0] = (own[0] + 1) % batches.num_samples
        results = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "num_items": 4.0}
        digest = format_digest(*samples_digest(own))
        ledger.on_step(step_taken(step + 1, (epoch, place), num_samples=len(own), digest=digest, **results))
    ledger.file.close()
    return audit(folder)


def test_the_ledger_proves_how_often_each_row_was_used(tmp_path, capsys):
    batches = plan([(20, 0.5), (8, 2)])
    found = written(tmp_path, batches, 14)
    assert found.problems == [] and (found.whole_epochs, found.samples) == (2, 52)
    assert found.mixture == [
        {"rows": 20, "weight": 0.5, "samples": 10, "used": 20},
        {"rows": 8, "weight": 2, "samples": 16, "used": 32},
    ]
    assert audit_command.run(type("Options", (), {"folder": str(tmp_path)})) == 0
    said = capsys.readouterr().out
    assert "  task.datasets[1]: 8 rows x 2 = 16 samples an epoch, 32 used in all\n" in said
    assert "as many of each data set as its weight says, and each of its rows equally often, give or take one." in said
    assert written(tmp_path, batches, 3, swap=True).problems == ["Step 3 was computed from other samples than its plan says."]


def test_a_plan_that_uses_rows_unequally_is_found(tmp_path, monkeypatch):
    batches = plan([(20, 0.5), (8, 2)])
    monkeypatch.setattr("hftune.batch_plan.order", lambda *args: np.zeros(batches.samples_per_epoch, np.int32))
    problems = written(tmp_path, batches, 1).problems
    assert "The plan does not use the samples of data set 0 equally often up to epoch 0." in problems
    assert "The plan of epoch 0 uses 0 samples of data set 1, not as weight 2 says." in problems


def test_data_sets_are_brought_to_the_same_columns(files):
    loaded = task(datasets_=files, eval_share=0.25)
    assert loaded.validate() == []
    data = loaded.datasets()
    assert {split: len(rows) for split, rows in data.items()} == {"train": 20, "eval": 8}  # 3.5 of each class, rounded
    sizes = [size for size, _ in loaded.mixture(data["train"])]
    assert sum(sizes) == 20 and sizes[0] == sum(text.startswith("first") for text in loaded.rows["train"]["text"])
    assert [weight for _, weight in loaded.mixture(data["train"])] == [0.5, 2.0]
    (said,) = notices.mixed(loaded.mixed.use([(20, 0.5), (8, 2)], None))
    assert "takes 10 from first.jsonl (20 rows x 0.5, 38%) and 16 from second.jsonl (8 rows x 2, 62%)." in said


def test_a_recipe_with_data_sets_is_equal_after_a_round_trip(files, tmp_path):
    (path := tmp_path / "mixed.yaml").write_text(
        f"base: yelp_demo\ntask: {{dataset: null, label_names: null, ordinal: false, eval_share: 0.25, datasets: {json.dumps(files)}}}\n"
    )
    recipe = Recipe.load(path)
    recipe.validate()
    assert recipe.task.datasets_ == files and recipe.to_dict()["task"]["datasets"] == files
    (again := tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert Recipe.load(again) == Recipe.load(path, "recipe=mixed")


def test_messages_name_the_data_set_and_its_row(files, tmp_path):
    files[1]["data_files"] = write(tmp_path / "bad.jsonl", ["a text", " ", "text"], [0, 1, 1], text="review", label="stars")
    with pytest.raises(DataError, match=r"The train \(bad\.jsonl\) split has an empty text in column 'text' at row 1\. "):
        task(datasets_=files, eval_share=0.2).datasets()
    files[1]["data_files"] = write(tmp_path / "odd.jsonl", ["a text", "b", "c"], [0, 1, 7], text="review", label="stars")
    with pytest.raises(DataError, match=r"Row 2 of odd\.jsonl of the train split has the label 7; "):
        _never(task(datasets_=files, label_names=["no", "yes"])).datasets()


def _never(own):
    own.evaluates = False
    return own


def test_columns_that_do_not_fit_together_are_refused(files, tmp_path):
    with pytest.raises(DataError, match=r"task\.datasets: no column is in all of them: first\.jsonl has text, label; second"):
        _never(task(datasets_=[files[0], {"data_files": files[1]["data_files"]}])).datasets()
    with pytest.raises(DataError, match=r"\[1\]\.columns\.text=revew is not a column of second.*Did you mean 'review'"):
        _never(task(datasets_=[files[0], {**files[1], "columns": {"text": "revew"}}])).datasets()
    words = write(tmp_path / "words.jsonl", ["a text", "b"], ["good", "bad"])
    with pytest.raises(DataError, match=r"Column 'label' holds int64 in first\.jsonl, but string in words\.jsonl\. The data"):
        _never(task(datasets_=[files[0], {"data_files": words}])).datasets()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weigth": 2}, ".weigth is not a key. Keys: dataset, dataset_config, "),
        ({"weight": 0}, ".weight=0 must be a number above 0"),
        ({"columns": {"text": 1}}, ".columns={'text': 1} must say the name of each column there, such as "),
        ({"columns": {"a": "b", "c": "b"}}, ".columns={'a': 'b', 'c': 'b'} gives b two names. Name each column once."),
        ({"data_files": "nowhere.jsonl"}, ".data_files=nowhere.jsonl: there is no such file."),
        ({"data_files": {"train": "f"}}, ".data_files={'train': 'f'} must be a path, a glob or a list of them: "),
        ({"data_files": None}, " names no data: give it data_files or dataset."),
        ({"dataset_revision": 1e9}, ".dataset_revision=1000000000.0 is not a text. Quote it as it is meant."),
    ],
)
def test_a_wrong_entry_is_refused(files, change, problem):
    (said,) = task(datasets_=[{**files[0], **change}, files[1]], eval_share=0.1).validate()
    assert said.startswith(f"task.datasets[0]{problem}")


def test_data_sets_beside_other_data_are_refused(files):
    def said(**fields):
        return " ".join(task(datasets_=files, **fields).validate())

    assert said().startswith("task.datasets names training data only. Name evaluation data (task.data_files.eval=...), ")
    file = files[0]["data_files"]
    assert said(data_files={"eval": file}) == ""
    assert "task.dataset=own:rows and task.datasets both" in said(dataset="own:rows", eval_share=0.1)
    assert "Make the files an entry of task.datasets." in said(data_files={"train": file, "eval": file})
    assert "there is no such file" in said(data_files={"eval": "nowhere.jsonl"})
    assert task(datasets_=[], eval_share=0.1).validate()[0].startswith("task.datasets is empty. List the data sets: [{")


def test_code_that_a_data_set_names_needs_trust(files, tmp_path):
    (path := tmp_path / "mixed.yaml").write_text(
        "base: yelp_demo\ntask: {dataset: null, eval_share: 0.1, datasets: [{dataset: 'own_module:rows'}]}\n"
    )
    with pytest.raises(ConfigError, match=r"task\.datasets=own_module:rows .* is not hftune's own code"):
        Recipe.load(path, trust_code=False)


def test_blocks_of_a_mixture_have_tokens_of_one_data_set_and_the_end_of_each_is_held_out(tmp_path):
    for name, count in (("first", 40), ("second", 20)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number} line\n" for number in range(count)))
    entries = [{"data_files": str(tmp_path / "first.txt")}, {"data_files": str(tmp_path / "second.txt"), "weight": 3}]
    fields = {"model_config": {"model_type": "gpt2"}, "datasets_": entries, "eval_share": 0.1}
    loaded = LanguageModeling(tokenizer="words", block_length=7, test_split=None, **fields)
    assert loaded.validate() == []
    held_out = loaded.rows["eval"]["text"]
    assert held_out == [f"{name} {n} line" for name, ns in (("first", range(36, 40)), ("second", range(18, 20))) for n in ns]
    train = loaded.datasets()["train"]
    first, second = loaded.text_tokenizer.convert_tokens_to_ids(["first", "second"])
    kinds = [{first, second} & {*block["input_ids"].tolist()} for block in train]
    assert len(train) == len(train.lengths) == 21 + 11 and kinds == [{first}] * 21 + [{second}] * 10 + [set()]  # a rest
    assert loaded.mixture(train) == [(21, 1.0), (11, 3.0)]
    tokens = [token for part in train.datasets for token in part.stream.tolist()]
    assert train.share_of(first) == pytest.approx(tokens.count(first) / len(tokens))
    assert train.lengths.sum() == 36 * 4 - 1 + 18 * 4 - 1  # every token but the first of each is predicted once
    entries[1].pop("weight")
    equal = LanguageModeling(
        tokenizer="words", block_length=7, test_split=None, mixing={"by": "tokens", "temperature": 1e5}, **fields
    )
    assert [weight for _, weight in equal.mixture(equal.datasets()["train"])] == pytest.approx([0.75, 1.5], rel=0.02)
    limited = LanguageModeling(max_train_samples=5, **fields).validate()
    assert "task.max_train_samples=5 and task.datasets: give the data sets smaller weights." in limited


def test_data_files_may_be_null_and_numbers_have_to_fit(tmp_path):
    def number(name, value, kind):
        rows = datasets.Dataset.from_dict({"text": ["a"], "label": [value]}).cast_column("label", datasets.Value(kind))
        rows.to_parquet(path := str(tmp_path / f"{name}.parquet"))
        return {"data_files": path}

    def loaded(*entries):
        sources = [mixture_source(entry, index, "", {}) for index, entry in enumerate(entries)]
        return load_mixture(entries, sources, lambda source, split: None).sources

    (mixed,) = loaded({"dataset": "hftune.data.demo:reviews", "data_files": None})
    assert "text" in mixed.column_names
    entries = [number("small", 1, "int8"), number("large", 300, "int64")]
    assert loaded(*entries[::-1])[1]["label"][0] == 1
    with pytest.raises(DataError, match=r"^large\.parquet: its values do not fit into the columns of the first .*300"):
        loaded(*entries)


def test_a_data_set_of_which_nothing_is_left_is_refused(files, tmp_path):
    one = {"data_files": write(tmp_path / "one.jsonl", ["a text"], [0])}
    data = _never(own := task(datasets_=[files[0], one], max_train_samples=3)).datasets()
    with pytest.raises(DataError, match=r"task\.datasets: no row of one\.jsonl is left to train on\."):
        own.mixture(data["train"])
    mixed = SimpleNamespace(sizes=lambda rows: [3, 2], names=["short.jsonl", "long.jsonl"])
    chats = SimpleNamespace(mixed=mixed, rows={"train": None}, max_length=64, too_long="drop", later=())
    assert Chats.samples_of_each(chats, SimpleNamespace(column=lambda name: [0, 2, 2, 4])) == [3, 1]
    with pytest.raises(DataError, match=r"no row of long\.jsonl has at most task\.max_length=64 tokens"):
        Chats.samples_of_each(chats, SimpleNamespace(column=lambda name: [0, 2]))


SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=5)
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests may be using the cores


@QUIET
@given(SIZES, st.floats(0.1, 100), st.one_of(st.just(inf), st.floats(1, 50)))
def test_epoch_is_as_long_as_all_data_sets_together_and_repeats_are_bounded(sizes, temperature, most):
    weights = mixed_weights(sizes, None, temperature, most)
    assert fsum(weight * size for weight, size in zip(weights, sizes, strict=True)) == pytest.approx(sum(sizes), rel=1e-6)
    assert max(weights) <= most * (1 + 1e-8)
    # Below the bound, the parts of the epoch are to each other as the sizes to the power of 1 / temperature.
    free = [place for place, weight in enumerate(weights) if weight < most * (1 - 1e-6)]
    asked = [(sizes[place] / max(sizes)) ** (1 / temperature) for place in free]
    used = [weights[place] * sizes[place] for place in free]
    if sum(asked) > 1e-200:
        assert [one / sum(asked) for one in asked] == pytest.approx([one / sum(used) for one in used], rel=1e-6, abs=1e-200)


@QUIET
@given(SIZES)
def test_temperature_of_one_uses_every_sample_once_and_a_great_one_takes_equal_parts(sizes):
    assert mixed_weights(sizes) == [1.0] * len(sizes)
    parts = [weight * size for weight, size in zip(mixed_weights(sizes, None, 1e9), sizes, strict=True)]
    assert parts == pytest.approx([sum(sizes) / len(sizes)] * len(sizes), rel=1e-6)


def test_what_the_bound_cuts_off_goes_to_the_others_in_proportion():
    assert mixed_weights([100, 10, 10], [1, 1, 2], max_repeats=4) == [0.4, 4, 4]
    assert mixed_weights([100, 80, 20], [1, 1, 2], max_repeats=2) == [0.8, 1, 2]  # 40 of the 100 for the third remain


def test_shares_and_temperature_become_weights_by_rows_or_tokens(tmp_path):
    paths = [
        write(tmp_path / "short.jsonl", ["a b c"] * 30, [0, 1] * 15),
        write(tmp_path / "long.jsonl", ["a b c d e f g h i j k l m"] * 10, [0, 1] * 5),
    ]

    def mixed(mixing, *shares, **fields):
        entries = [{"data_files": path} for path in paths]
        entries = [{**entry, "share": share} for entry, share in zip(entries, shares, strict=True)] if shares else entries
        own = _never(task(datasets_=entries, mixing=mixing, **fields))
        assert own.validate() == []
        return own, own.mixture(data := own.datasets()["train"]), data

    assert mixed({"by": "rows"})[1] == [(30, 1.0), (10, 1.0)]
    assert mixed({}, 1, 3)[1] == [(30, pytest.approx(1 / 3)), (10, 3.0)] == mixed({}, 10**9, 3 * 10**9)[1]
    assert mixed({"temperature": 2})[1][1][1] == pytest.approx(40 / 10 / (1 + 3**0.5))
    assert mixed({"max_repeats": 2}, 1, 3)[1] == [(30, pytest.approx(2 / 3)), (10, 2.0)]
    own, plan_, data = mixed({"by": "tokens"}, 50, 50)
    lengths = own.lengths(data)  # with [CLS] and [SEP]
    assert [lengths[:30].sum(), lengths[30:].sum()] == [150, 150] and plan_ == [(30, 1.0), (10, 1.0)]
    (said,) = own.mixture_notices(data)
    assert said.endswith(
        "short.jsonl (30 rows x 1, 75%, 50% of the tokens) and 10 from long.jsonl (10 rows x 1, 25%, 50% of the tokens)."
    )
    assert mixed({"by": "tokens"}, 1, 3)[1] == [(30, 0.5), (10, 1.5)] == mixed({"by": "tokens"}, 1, 3, prepare="as_needed")[1]


@pytest.mark.parametrize(
    ("mixing", "shares", "problem"),
    [
        ({"by": "words"}, (), "task.mixing.by='words' is not one of rows, tokens."),
        (
            {"temprature": 2},
            (),
            "task.mixing.temprature is not a key. Keys: by, temperature, max_repeats. Did you mean 'temperature'?",
        ),
        ({"temperature": 0}, (), "task.mixing.temperature=0 must be a number of at least 0.1."),
        ({"max_repeats": 0.5}, (), "task.mixing.max_repeats=0.5 must be a number of at least 1."),
        (
            {"temperature": 2},
            (1, 2),
            "task.mixing.temperature makes shares of sizes, and task.datasets has shares. Leave one of",
        ),
        ({}, (1, None), "task.datasets[1] has no share, but others have. Give each of them one, or none."),
        ({}, (1, "much"), "task.datasets[1].share=much must be a number above 0: its part of an epoch, compared to the"),
    ],
)
def test_wrong_mixing_is_refused(files, mixing, shares, problem):
    for entry, share in zip(files, shares or (None, None), strict=True):
        del entry["weight"]
        entry.update({} if share is None else {"share": share})
    (said,) = task(datasets_=files, mixing=mixing, eval_share=0.1).validate()
    assert said.startswith(problem)


def test_mixing_beside_weights_or_without_data_sets_is_refused(files):
    said = task(datasets_=files, mixing={"temperature": 2}, eval_share=0.1).validate()
    assert said[0] == "task.datasets[0].weight and task.mixing both say how often its rows are used. Leave one of them out."
    (said,) = task(data_files={"train": files[0]["data_files"]}, eval_share=0.1, mixing={"by": "rows"}).validate()
    assert said == "task.mixing={'by': 'rows'} has an effect only with task.datasets. Leave it out."


def test_data_set_without_a_usable_row_among_those_surveyed_is_named():
    mixed = Mixture(["good.jsonl", "bad.jsonl"], [], mixing={"by": "tokens"})
    with pytest.raises(
        DataError, match=r"task\.datasets: none of 2 rows of bad\.jsonl that were looked at can be trained on\."
    ):
        mixed.plan([2, 2], np.array([3, 5, -1, -1]))
    assert mixed.plan([2, 2], np.array([3, 5, -1, 4])) == [(2, 1.0), (2, 1.0)]
    with pytest.raises(ConfigError, match=r"task\.mixing\.by=tokens needs a task whose samples have lengths\."):
        mixed.plan([2, 2], None)
