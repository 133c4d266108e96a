"""The shipped recipes from a Hub on loopback, as typed: nothing is overridden but sizes. And what is said if the Hub fails."""

import shutil
from collections import Counter

import pytest

from hftune.data.demo import pictures
from tests.support.hub import Hub
from tests.support.hub_contents import bert, fill, yelp
from tests.support.runs import Group, Run, start_worker, train_on

SHORT = ("train.max_steps=2", "train.log_every=1")
SMALL = {
    "yelp": (*SHORT, "train.batch_size=8", "train.micro_batch_size=4", "task.max_eval_samples=8"),
    "mnist": (*SHORT, "task.max_eval_samples=50"),
    "mnist_best": (*SHORT, "task.max_eval_samples=50"),
    "wikitext2": (
        *SHORT,
        *(f"task.model_config.{name}=32" for name in ("hidden_size", "intermediate_size")),
        *("task.model_config.num_hidden_layers=1", "task.max_eval_samples=20", "task.max_test_samples=20"),
    ),
    "bigbird": (
        *SHORT,
        *("train.batch_size=8", "task.max_source_length=100", "task.max_target_length=8", "task.max_eval_samples=4"),
    ),
    "restoration": (*SHORT, "task.width=8", "task.depth=1", "task.crop=16", "train.num_workers=0"),
}
"""Steps and samples that take seconds; the learning rates, columns, splits and names are the recipes'."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = Hub(tmp_path_factory.mktemp("hub"))
    hub.commits = fill(hub)
    hub.rename("models", "somebody/bert", "google-bert/bert-base-cased")
    hub.address = hub.start()
    home = tmp_path_factory.mktemp("home")
    online = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets")}
    hub.online = {**online, "HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    hub.offline = {**online, "HF_HUB_OFFLINE": "1"}
    for variables in (hub.online, hub.offline):
        start_worker(tuple(sorted(variables.items())))  # their imports take longer than most of the tests
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for split, part in (("train", "train"), ("test", "eval")):
        (folder / split).mkdir()
        for number, row in enumerate(pictures(part, 8)):
            row["image"].save(folder / split / f"{number}.png")
    return {
        name: (f"recipe={name}", *words, *([f"task.data_dir={folder}"] if name == "restoration" else []))
        for name, words in SMALL.items()
    }


@pytest.fixture(scope="module")
def runs(hub, jobs, tmp_path_factory):
    return train_on(2, jobs, tmp_path_factory.mktemp("runs"), variables=hub.online)


def test_every_recipe_runs_from_the_hub_and_fetches_each_file_once(hub, runs):
    names = {
        "models/google-bert/bert-base-cased": ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
        "models/Lowin/chinese-bigbird-base-4096": ["config.json", "pytorch_model.bin", "vocab.txt"],
        "datasets/Yelp/yelp_review_full": ["README.md", *parts("yelp_review_full", "train", "test")],
        "datasets/ylecun/mnist": ["README.md", *parts("mnist", "train", "test")],
        "datasets/Salesforce/wikitext": ["README.md", *parts("wikitext-2-v1", "train", "validation", "test")],
        "datasets/csebuetnlp/xlsum": [f"chinese_simplified/{split}/0000.parquet" for split in ("train", "validation", "test")],
    }
    assert hub.fetched() == Counter({f"{name}/{file}": 1 for name, files in names.items() for file in files})
    assert not [path for _, path, _ in hub.requests() if "/discussions" in path or "/commits/" in path]  # of a conversion


def parts(config, *splits):
    return [f"{config}/{split}-00000-of-00001.parquet" for split in splits]


def test_commits_that_were_loaded_stand_in_the_result(hub, runs):
    model, data = hub.commits["google-bert/bert-base-cased"], hub.commits["Yelp/yelp_review_full"]
    assert runs["yelp"].result["commits"] == {"task.model": model, "task.dataset": data}
    assert runs["bigbird"].result["commits"]["task.dataset"] == hub.commits["csebuetnlp/xlsum"]
    assert runs["mnist"].result["commits"] == {"task.dataset": hub.commits["ylecun/mnist"]}
    assert runs["restoration"].result["commits"] == {}


def test_a_second_start_offline_asks_for_nothing_and_trains_the_same(hub, jobs, runs, tmp_path):
    hub.forget()
    again = train_on(2, jobs, tmp_path, variables=hub.offline)
    assert hub.requests() == []
    for name, run in runs.items():
        assert again[name].logged("train/loss") == run.logged("train/loss"), name
        assert again[name].result["commits"] == run.result["commits"]


def test_an_export_does_not_tell_where_the_model_was_cached(hub, runs):
    for name in ("yelp", "bigbird"):
        for path in (runs[name].folder / "model").glob("*.json"):
            assert hub.online["HF_HOME"] not in path.read_text(), path


def typed(hub, folder, *words, variables=None):
    """Return the exit codes of two processes and all that they said."""
    log = folder / "said.log"
    log.unlink(missing_ok=True)
    codes = Group(
        2, [(words[0].removeprefix("recipe="), list(words[1:]), None, {})], log, variables or hub.online, as_typed=True
    )
    return codes.wait(), log.read_text()


def test_a_table_of_the_hub_is_predicted(hub, runs, tmp_path):
    output, log = tmp_path / "out.csv", tmp_path / "said.log"
    for data, code in (("Yelp/yelp_review_full:test", 0), ("Yelp/yelp_review_full:tests", 2)):
        words = ["predict", str(runs["yelp"].folder), "--data", data, "--output", str(output), "--columns", "label_given,label"]
        assert Group(1, [("hftune.cli", words, None, {})], log, hub.online, as_typed=True).wait() == [code], log.read_text()
    head, *rows = output.read_text().splitlines()
    assert head == "label_given,label" and len(rows) > 8 and {row.partition(",")[0] for row in rows} <= set("01234")
    assert "hftune: --data Yelp/yelp_review_full cannot be loaded: Unknown split" in log.read_text()


def test_a_resume_with_another_commit_is_refused_and_the_old_one_can_be_pinned(hub, runs, tmp_path):
    out = shutil.copytree(runs["yelp"].folder, tmp_path / "out")
    command = ("recipe=yelp", *SMALL["yelp"], "train.max_steps=3", f"output_dir={out}")
    old, new = hub.commits["Yelp/yelp_review_full"], yelp(hub, "Yelp/yelp_review_full", skip=10)
    try:
        codes, said = typed(hub, tmp_path, *command)
        assert all(codes) and 2 in codes
        assert f"was trained with commit {old} of task.dataset, and commit {new} was loaded now" in said
        assert f"task.dataset_revision={old} resumes with the old one; resume=never starts over." in said
        codes, said = typed(hub, tmp_path, *command, f"task.dataset_revision={old}")
        assert codes == [0, 0], said
        assert "Resuming from step 2 of 3" in said and Run(out).result["commits"]["task.dataset"] == old
    finally:
        assert yelp(hub, "Yelp/yelp_review_full") == old


def test_an_old_commit_that_is_not_the_newest_in_the_cache_is_never_mixed_up_offline(hub, runs, tmp_path):
    """datasets by itself takes the newest that it has."""
    old, new = hub.commits["Yelp/yelp_review_full"], yelp(hub, "Yelp/yelp_review_full", skip=20)
    command = ("recipe=yelp", *SMALL["yelp"], f"output_dir={tmp_path / 'out'}")
    try:
        assert typed(hub, tmp_path, *command)[0] == [0, 0]
        codes, said = typed(hub, tmp_path, *command, f"task.dataset_revision={old}", "resume=never", variables=hub.offline)
    finally:
        yelp(hub, "Yelp/yelp_review_full")
    assert 2 in codes and f"the cache has commit {new}, but commit {old} is needed." in said


def test_a_renamed_repository_and_a_connection_that_is_cut_once_are_no_trouble(hub, tmp_path):
    bert(hub, "other/shaky", seed=1)
    hub.break_("models", "other/shaky", "cut once")
    hub.forget()
    for name in ("somebody/bert", "other/shaky"):
        codes, said = typed(
            hub, tmp_path, "recipe=yelp", *SMALL["yelp"], f"task.model={name}", f"output_dir={tmp_path / 'out'}"
        )
        assert codes == [0, 0], said
        shutil.rmtree(tmp_path / "out")
    assert hub.fetched()["models/other/shaky/model.safetensors"] == 2  # once in vain


def test_a_loading_script_is_not_run_and_its_conversion_is_pointed_to(hub, runs, tmp_path):
    words = ("recipe=yelp", *SMALL["yelp"], "task.dataset=csebuetnlp/xlsum", f"output_dir={tmp_path / 'out'}")
    codes, said = typed(hub, tmp_path, *words)
    assert all(codes) and 2 in codes
    (line,) = [
        line for line in said.splitlines() if line.startswith("hftune: task.dataset=csebuetnlp/xlsum has a loading script")
    ]
    assert "set task.dataset_revision=refs/convert/parquet, and task.data_dir=..." in line


FAULTS = {
    "model missing": ("the Hub has no such model, or it is private.", "log in with `hf auth login`."),
    "model gated": ("its owner requires agreement to terms. Accept them at AT/NAME", "on each machine."),
    "model cut": ("the Hub (AT) closed the connection (", "HF_HUB_OFFLINE=1 uses the cache only.", "task.model=FOLDER."),
    "dataset missing": ("the Hub has no such data set, or it is private.", "log in with `hf auth login`."),
    "dataset gated": ("its owner requires agreement to terms. Accept them at AT/datasets/NAME", "on each machine."),
    "dataset slow": (
        "the Hub (AT) does not answer in time.",
        "HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer",
        "task.data_files.train=",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_had_is_one_sentence_that_says_what_to_do(hub, runs, tmp_path, case):
    kind, fault = case.split()
    name = f"other/{fault}"
    if fault != "missing":
        bert(hub, name, seed=2) if kind == "model" else yelp(hub, name)
        hub.break_(f"{kind}s", name, fault)
    codes, said = typed(hub, tmp_path, "recipe=yelp", *SMALL["yelp"], f"task.{kind}={name}", f"output_dir={tmp_path / 'out'}")
    assert all(codes) and 2 in codes
    (line,) = [line for line in said.splitlines() if line.startswith("hftune: ")]
    assert line.startswith(f"hftune: task.{kind}={name} cannot be loaded: ") and "Traceback" not in said
    for part in FAULTS[case]:
        assert part.replace("AT", hub.address).replace("NAME", name) in line
