"""What a person reads where processes do not fit together."""

import pytest

import hftune
from hftune import ConfigError, Recipe
from hftune.config.own_code import hashes_of
from hftune.distributed.consistency import code, differences, disagreement, fingerprint, users_code
from hftune.optim import optimizer_class

MAIN = {
    "host": "nodeA",
    "code": {"hftune/loop.py": "1", "hftune/run.py": "2"},
    "packages": {"torch": "2.13.0", "numpy": "2.1"},
    "recipe": {"train.lr": 0.1, "train.epochs": 3, "task.model": "bert"},
    "data": {"train data": "ab", "eval data": "cd"},
}


def test_equal_processes_have_nothing_to_say():
    assert differences(dict(MAIN, host="nodeB"), MAIN) == {}
    assert disagreement([3], dict(MAIN, host="nodeB"), MAIN) is None


def test_every_kind_of_difference_is_spelled_out_with_what_to_do():
    other = {
        "host": "nodeB",
        "code": {"hftune/loop.py": "1", "hftune/run.py": "9", "mine.py": "3"},
        "packages": {"torch": "2.12.0", "numpy": "2.1"},
        "recipe": {"train.lr": 0.2, "train.epochs": 3, "task.model": None},
        "data": {"train data": "xx", "eval data": "cd"},
    }
    assert disagreement([2, 3], other, MAIN) == (
        "Compared with process 0 on nodeA, processes 2, 3 on nodeB have different code: hftune/run.py, mine.py (extra); different versions: torch 2.12.0 instead of "
        "2.13.0; a different recipe: train.lr 0.2 instead of 0.1, task.model null instead of bert; different data: train data. "
        "Install the same version of hftune on all machines, and use the same task file. Install the "
        "same versions on all machines. Start all processes with the same recipe and the same overrides. Use the same files on all "
        "machines, or the same revision of the data set on the Hub."
    )


@pytest.mark.parametrize("line", ["raise RuntimeError('no')", "import sys; sys.exit(0)"])
def test_code_whose_package_cannot_be_imported_is_left_to_the_message_of_its_key(tmp_path, monkeypatch, line):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(line)
    (tmp_path / "broken" / "optimizers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.load("yelp_demo", "train.optimizer=broken.optimizers.Mine")
    assert users_code(recipe) == {}
    with pytest.raises(ConfigError, match=r"train.optimizer=broken.optimizers.Mine cannot be imported: "):
        optimizer_class(recipe.train)


def test_a_long_list_of_differences_is_cut():
    other = dict(MAIN, host="nodeB", code=dict.fromkeys("abcd", "0"))
    assert differences(other, MAIN) == {
        "code": "different code: hftune/loop.py (missing), hftune/run.py (missing), a (extra), and 3 more"
    }


def test_facts_hold_each_file_of_hftune_and_each_key_of_the_recipe():
    found = fingerprint(Recipe.load("yelp_demo", "train.lr=0.5"))
    assert found["recipe"]["train.lr"] == 0.5 and found["recipe"]["task.type"] == "SequenceClassification"
    assert "hftune/loop.py" in found["code"] and "hftune/tasks/sequence_classification.py" in found["code"]
    assert found["code"] == code() and found["packages"]["torch"].startswith("2.") and hftune.__version__


def test_the_file_of_ones_own_task_counts_as_code():
    found = fingerprint(Recipe.load("tests/support/tagging.yaml"))
    assert "tests/support/tasks.py" in found["code"] and "tests/support/tasks.py" not in code()


def test_packages_that_pip_put_into_a_folder_of_the_user_s_do_not_count_as_code(tmp_path, monkeypatch):
    sources = {"mine/__init__.py": "import installed_aside.deep\nimport beside_it\n", "target/beside_it.py": ""}
    sources |= {"target/installed_aside/__init__.py": "", "target/installed_aside/deep.py": ""}
    for name, source in {**sources, "target/aside-1.dist-info/RECORD": "installed_aside/__init__.py,sha256=x,0\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "target")
    assert hashes_of(["mine"]).keys() == {"mine/__init__.py", "beside_it.py"}


def test_the_files_of_ones_own_optimizer_and_schedule_count_as_code():
    words = ("train.optimizer=tests.support.optimizers.Counted", "train.schedule=tests.unit.test_optim.half")
    found = fingerprint(Recipe.load("tests/support/tagging.yaml", *words))
    assert {"tests/support/optimizers.py", "tests/unit/test_optim.py"} <= found["code"].keys()
    torchs = fingerprint(Recipe.load("tests/support/tagging.yaml", "train.optimizer=torch.optim.RMSprop"))
    assert "tests/unit/test_optim.py" not in torchs["code"]
