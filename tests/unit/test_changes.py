"""What hftune bisect can change one by one: keys of a recipe, lines of a data file."""

import pytest

from hftune import ConfigError, Recipe
from hftune.replay.key_search import DataFiles, changed_keys, override

BAD = (
    "train.lr=0.1",
    "train.betas=[0.9,0.99]",
    "train.clip_norm=null",
    "train.log_every=3",
    "eval.batch_size=7",
    "task.model_config.hidden_dropout_prob=0.3",
    "output_dir=elsewhere",
    "seed=7",
)


def recipes(*words):
    return Recipe.load("yelp_demo"), Recipe.load("yelp_demo", *words)


def test_keys_that_can_change_a_loss_are_changes_of_their_own():
    good, bad = recipes(*BAD)
    found = changed_keys(good.to_dict(), bad.to_dict())
    assert sorted(map(str, found)) == [
        "seed=7",
        "task.model_config.hidden_dropout_prob=0.3",
        "train.betas=[0.9, 0.99]",
        "train.clip_norm=null",
        "train.lr=0.1",
    ]


@pytest.mark.parametrize(
    "words",
    [
        BAD,
        ("replace=[task.model_config]", "task.model_config={model_type: bert, hidden_size: 64}"),
        ("train.optimizer=sgd", "train.schedule=step", "train.gamma=0.5"),
        ("train.optimizer_args={amsgrad: true}", "train.groups=[{match: '[.]bias$', lr: 1e-05}]"),
        ("recipe=mnist_demo",),
    ],
)
def test_all_changes_together_make_the_bad_recipe_and_none_the_good_one(words, tmp_path):
    good, bad = recipes(*words) if words != ("recipe=mnist_demo",) else (Recipe.load("yelp_demo"), Recipe.load("mnist_demo"))
    changes = changed_keys(good.to_dict(), bad.to_dict())
    (tmp_path / "good.yaml").write_text(good.to_yaml())
    for made, wanted in (changes, bad), ([], good):
        mixed = Recipe.load(tmp_path / "good.yaml", override(made))
        assert changed_keys(mixed.to_dict(), wanted.to_dict()) == []


@pytest.mark.parametrize(("suffix", "between"), [("csv", ","), ("tsv", "\t")])
def test_lines_of_a_data_file_are_mixed(tmp_path, suffix, between):
    good, bad, mixed = (tmp_path / f"{name}.{suffix}" for name in ("good", "bad", "mixed"))
    good.write_text("text,label\na,0\nb\r,1\nc,0\nd,1\n".replace(",", between))
    bad.write_text("text,label\na,1\nb\r,1\nc,1\nd,0".replace(",", between))
    files = DataFiles(good, bad)
    assert [change.number for change in files.changes] == [2, 4, 5]
    files.write(files.changes[1:2], mixed)
    mixed_lines = "text,label\na,0\nb\n,1\nc,1\nd,1\n"  # read_text makes \n of \r
    assert mixed.read_text() == mixed_lines.replace(",", between)
    files.write(files.changes, mixed)
    assert mixed.read_text() == bad.read_text() + "\n"


@pytest.mark.parametrize(
    ("name", "good", "bad", "said"),
    [
        ("x.csv", "a,b\n1,2\n", "a,c\n1,2\n", "different columns"),
        ("x.tsv", "a\tb\n1\t2\n", "a\tc\n1\t2\n", "different columns"),
        ("x.csv", 'a\n"1\n2"\n', 'a\n"1\n3"\n', "line 2 has a cell of several lines"),
        ("x.json", "[\n1]", "[\n2]", "it is one JSON list"),
        ("x.jsonl", "{}\n", "{}\n{}\n", "has 1 lines and .* has 2[.] Then no step has the samples it had"),
        ("x.parquet", "", "", "needs two files of one format"),
        ("x.jsonl.gz", "", "", "needs two files of one format"),
    ],
)
def test_files_that_cannot_be_mixed_are_refused(tmp_path, name, good, bad, said):
    (tmp_path / f"good-{name}").write_text(good)
    (tmp_path / f"bad-{name}").write_text(bad)
    with pytest.raises(ConfigError, match=said):
        DataFiles(tmp_path / f"good-{name}", tmp_path / f"bad-{name}")


def test_keys_that_comparisons_know_to_change_no_loss_are_not_tried():
    words = ("task.generation={num_beams: 4}", "task.scores=[bleu]", "train.ema_decay=0.99", "task.max_eval_samples=10")
    words += ("adapter.export=merged", "train.log_every=7", "train.cudnn_benchmark=true", "train.lr=1e-4")
    good, bad = (Recipe.load("seq2seq_demo", *given).to_dict() for given in ((), words))
    assert [change.key for change in changed_keys(good, bad)] == ["train.lr"]
