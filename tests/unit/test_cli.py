"""The hftune command: what it refuses, and how."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hftune import Interrupted, Recipe, __version__, cli, run
from hftune.commands import recipes
from hftune.commands.arguments import argv_of_one, check_output
from hftune.config.shipped_files import recipe_names, recipe_path
from hftune.distributed.preflight import launch_options
from hftune.launchers.slurm import time_s

CONFIGS = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))


def refused(capsys, *arguments):
    assert cli.main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.removeprefix("hftune: ").rstrip("\n")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"content": "北京大学的报告。", "title": "报告"}\n' * 3, encoding="utf-8")
    return path


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"hftune {__version__}\n"


@pytest.mark.parametrize(("words", "code"), [("predict run --data a.csv", 1), ("predict run --text a", 141)])
def test_a_broken_pipe_of_a_long_command_is_not_taken_for_its_readers(words, code, monkeypatch):
    def broken(options):
        raise BrokenPipeError

    monkeypatch.setattr("hftune.commands.predict.run", broken)
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    assert cli.main(words.split()) == code


@pytest.fixture
def here(tmp_path, monkeypatch, corpus):
    """A folder with a run that has no model yet, one whose task predicts nothing, and files that cannot be read."""
    monkeypatch.chdir(tmp_path)
    for folder, recipe in {"early": "base: yelp_demo\n", "tagging": "task: {type: tests.support.tasks.Tagging}\n"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "recipe.yaml").write_text(recipe)
    (tmp_path / "tagging" / "model").mkdir()
    (tmp_path / "gb.txt").write_bytes("文章".encode("gb18030"))
    (tmp_path / "corpus.md").write_text("x")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "english.txt").write_text("an English text\n" * 5)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "deepspeed.yaml").write_text("distributed_type: DEEPSPEED\n")


SLURM = ("slurm", "recipe=yelp", "--nodes", "2", "--gpus", "2")
JOBS = {
    "slurm": SLURM,
    "k8s": ("k8s", *SLURM[1:], "--image", "hftune"),
    "sky": ("sky", *SLURM[1:], "--gpu-type", "H100"),
}
REFUSED = {
    "predict .": "There is no input. Give --data, --text, --text-file, --messages, --chat or --input.",
    "predict . --text-file none.txt": "--text-file none.txt: No such file or directory.",
    "predict . --text-file gb.txt": "--text-file gb.txt is not UTF-8: 'utf-8' codec can't decode byte 0xce in position 0",
    "predict none --text x": "none: there is no such folder. Name the output folder of a run, such as outputs/bigbird.",
    "predict . --text x": ". holds no recipe.yaml, nor does the folder above. Name the output folder of a run.",
    "predict early --text x": "early holds no model yet: the first evaluation of its run writes it, or its end.",
    "predict tagging --text x --trust-code": "tests.support.tasks.Tagging cannot predict from raw inputs.",
    "vocab none.txt --output words": "none.txt: there is no such file.",
    "vocab corpus.md --output words": "corpus.md has none of the known suffixes: .json, .jsonl, .csv, .tsv, .parquet,",
    "vocab corpus.jsonl --columns text --output words": "corpus.jsonl has no column 'text', only content, title. Set --columns",
    "vocab blank.txt --output words": "blank.txt: there is no text.",
    "vocab english.txt --size 60 --output words": "60 tokens are too few for these texts, or they are not Chinese. The vocabulary",
    "configs 4gpus": "4gpus: there is no such launch configuration. Did you mean '4gpu'?",
    "configs --copy": "--copy needs the name of a launch configuration: ",
    "configs 2cpu --copy none/2cpu.yaml": "none/2cpu.yaml cannot be written: No such file or directory.",
    "evaluat recipe=yelp": "'evaluat' is not a command. Did you mean 'evaluate'?",
    "nothing": "'nothing' is not a command. Commands: train, recipes, show, schema, plan, predict, sample, mine,",
    "evaluate2 recipe=yelp": "Did you mean 'evaluate'?",
    "run recipe=yelp": "Did you mean 'train'?",
    "recipe=yelp train.lr=1": "To train: hftune train recipe=yelp train.lr=1",
    "yelp train.lr=1": "To train: hftune train recipe=yelp train.lr=1",
    **{f"train recipe=yelp_demo --processes={text}": f"--processes {text} is neither a number" for text in ("--5", "-", "x")},
    "slurm --nodes 2-1": "--nodes 2-1 starts with the larger number.",
    "slurm --nodes 0": "--nodes 0 is neither a number of nodes, such as 2, nor a range, such as 1-2.",
    "slurm --cpus-per-gpu 0": "--cpus-per-gpu 0 must be at least 1.",
    "slurm --grace-s 10": "--grace-s 10 must be at least 40.",
    "slurm --job-name a:b#": "has characters that are not allowed in an #SBATCH line.",
    "slurm --time 2h": "--time '2h' is not a SLURM time: MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS.",
    "slurm --gpus 1 --nodes 1-2 --config 4gpu": "--config 4gpu is for several processes, but --nodes 1-2 --gpus 1 may be one.",
    "slurm --config cpu": "--config cpu has distributed_type NO: accelerate launch would start only one process per node.",
    "slurm --config broken.yaml": "--config broken.yaml cannot be read: ",
    "slurm --config list.yaml": "--config list.yaml is not a launch configuration: ",
    "slurm --processes 2": "--processes 2 is for --cpu. With --gpus there is one process per GPU.",
    "slurm train.lrr=1": "train.lrr is not a key of a recipe. Did you mean 'train.lr'?",
    "slurm resume=never": "resume=never would start over each time the job is started again. Leave it out.",
    "slurm --nodes 1-4 --gpus 1 parallel.pipeline_stages=2": "parallel.pipeline_stages=2 does not divide the number of processes:",
    "k8s --nodes 1-4 --gpus 3 parallel.context=2": "parallel.context=2 does not divide the number of processes: 3 with --nodes 1-4 --gpus 3.",
    "k8s --nodes 3 --gpus 1 parallel.pipeline_stages=2": "does not divide the number of processes: 3 with --nodes 3 --gpus 1.",
    "k8s train.lrr=1": "train.lrr is not a key of a recipe. Did you mean 'train.lr'?",
    "k8s resume=never": "resume=never would start over each time the job is started again. Leave it out.",
    "k8s --nodes 0": "--nodes 0 is neither a number of nodes, such as 2, nor a range, such as 1-2.",
    "k8s --queue Team": "--queue 'Team' has characters that Kubernetes does not allow there.",
    "k8s --memory lots": "--memory 'lots' has characters that Kubernetes does not allow there.",
    "k8s --job-name a_b": "--job-name a_b must be a host name: at most 40 lower-case letters, digits and hyphens, a letter first.",
    "k8s --config cpu": "--config cpu has distributed_type NO: accelerate launch would start only one process per node.",
    "k8s --config deepspeed.yaml": "--config deepspeed.yaml has distributed_type DEEPSPEED; MULTI_GPU and FSDP can be written",
    "k8s output_dir=here": "output_dir=here is in the pod, and goes with it. Name /outputs/yelp, on the volume of --claim outputs,",
    "k8s --output none/x.yaml": "--output none/x.yaml cannot be written: No such file or directory.",
    "sky train.lrr=1": "train.lrr is not a key of a recipe. Did you mean 'train.lr'?",
    "sky --nodes 1-2": "--nodes 1-2: SkyPilot starts all machines of a job or none. Give one number.",
    "sky --gpu-type=": "--gpus needs --gpu-type, such as H100: the GPU's name for SkyPilot.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_that_cannot_be_run_as_given_says_why(capsys, here, line):
    words = line.split()
    assert REFUSED[line] in refused(capsys, *JOBS.get(words[0], words[:1]), *words[1:])
    assert not Path("words").exists()


def test_folder_with_something_else_is_not_written_into(capsys, tmp_path, corpus):
    said = refused(capsys, "vocab", corpus, "--output", tmp_path)
    assert said.startswith(f"{tmp_path} contains files other than a vocabulary. Choose a different folder,")


def test_vocabulary_is_written_from_lines_of_text_and_over_an_earlier_one(capsys, tmp_path):
    (tmp_path / "corpus.txt").write_text("北京大学的报告。\n上海的地铁 Linux\n" * 5, encoding="utf-8")
    for size in (60, 50):
        words = Path(tmp_path / "words")
        assert cli.main(["vocab", str(tmp_path / "corpus.txt"), "--size", str(size), "--output", str(words)]) == 0
        listed = (words / "vocab.txt").read_text(encoding="utf-8").splitlines()
        assert len(listed) <= size and "的" in listed


@pytest.mark.parametrize("name", ["corpus.tsv", "corpus.csv.gz"])
def test_vocabulary_is_written_from_tables_with_tabs_and_compressed_ones(name, tmp_path):
    separator = "\t" if name.endswith("tsv") else ","
    lines = [f"id{separator}text", *(f"{row}{separator}北京大学的报告 上海的地铁" for row in range(5))]
    raw, words = "\n".join(lines).encode(), tmp_path / "words"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert cli.main(["vocab", str(tmp_path / name), "--columns", "text", "--size", "60", "--output", str(words)]) == 0
    assert "北京大学" in (words / "vocab.txt").read_text(encoding="utf-8").splitlines()


def test_vocabulary_wants_texts_which_may_begin_with_blank_lines(capsys, tmp_path):
    (tmp_path / "blank.csv").write_text(
        "id,text\n" + "1,' '\n".replace("'", '"') * 1001 + "1,北京大学的报告\n" * 5, encoding="utf-8"
    )
    words = ("vocab", str(tmp_path / "blank.csv"), "--size", "60", "--output", str(tmp_path / "words"), "--columns")
    assert refused(capsys, *words, "id") == f"{tmp_path / 'blank.csv'}: column 'id' holds int64, not text. Set --columns ..."
    assert cli.main([*words, "text"]) == 0


def test_configs_are_listed_with_their_first_line_and_printed_whole(capsys):
    assert cli.main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.stem for path in CONFIGS}
    assert listed["2cpu"] == "Two processes on the CPUs of one machine, over Gloo."
    for path in CONFIGS:
        assert cli.main(["configs", path.stem]) == 0
        assert capsys.readouterr().out == path.read_text()


def test_config_is_copied_and_overwrites_nothing_unasked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "2cpu", "--copy"]) == 0
    assert "then: accelerate launch --config_file 2cpu.yaml -m hftune.run recipe=NAME\n" in capsys.readouterr().out
    whole = Path("2cpu.yaml").read_text()
    Path("2cpu.yaml").write_text("mine")
    assert "2cpu.yaml exists. Name a different file with --copy PATH, or" in refused(capsys, "configs", "2cpu", "--copy")
    assert Path("2cpu.yaml").read_text() == "mine"
    for arguments in (["--copy", "--force"], ["--copy", "other.yaml"]):
        assert cli.main(["configs", "2cpu", *arguments]) == 0
    assert Path("2cpu.yaml").read_text() == Path("other.yaml").read_text() == whole


def test_recipes_are_listed_by_problem_with_their_first_sentence(capsys):
    assert cli.main(["recipes"]) == 0
    listed, _, _ = capsys.readouterr().out.partition("\nA recipe at the left margin")
    names = [words[0] for line in listed.splitlines() if (words := line.split()) and words[0] != "Columns:"]
    assert sorted(names) == recipe_names()
    problems = [block.splitlines() for block in listed.split("\n\n")]
    about = next(lines for lines in problems if lines[0].startswith("language_modeling "))
    assert about[1].strip().startswith("Columns: text") and about[2].startswith("  language_modeling_demo ")
    assert about[3].startswith("    distillation_demo ")
    assert about[4].startswith("  wikitext2 ") and about[5].startswith("    wikitext2_demo ")
    assert all(lines[1].strip().startswith("Columns: ") for lines in problems if not lines[0].startswith(("yelp", "mnist")))


@pytest.mark.parametrize("width", [80, 140])
def test_the_list_of_recipes_fits_into_a_terminal(width):
    listed = {name: recipes.read(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}
    lines = recipes.listing(listed, width).splitlines()
    assert max(map(len, lines)) <= width and sum(line.strip().split(" ")[0] in listed for line in lines) >= len(listed)


def test_a_recipe_says_all_of_its_first_sentence():
    said = recipes.read(
        "# yaml-language-server: x\n# Embeddings: a sentence of\n# two lines.\n# More.\n# Columns: a, b\ntask: {}\n"
    )
    assert said == ("Embeddings: a sentence of two lines.", "a, b", None)


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ({"review": "good", "stars": 4}, ["text_classification: text=review, label=stars", "masked_lm: text=review"]),
        (
            {"prompt": "a?", "chosen": "b", "rejected": "c"},
            [f"{name}: prompt=prompt, chosen=chosen, rejected=rejected" for name in ("dpo", "reward")],
        ),
    ],
)
def test_the_recipes_that_fit_a_file_are_named_with_what_they_would_read(tmp_path, capsys, row, fits):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    assert cli.main(["recipes", "--for", str(file)]) == 0
    said, _, others = capsys.readouterr().out.partition("\nThese do not:\n")
    lines = said.rstrip().splitlines()
    assert lines[0] == f"These fit {file}, and would read:"
    assert [
        f"{one.split(':')[0].strip()}: {other.strip()}" for one, other in zip(lines[1::2], lines[2::2], strict=True)
    ] == fits
    assert "  ctc: task.audio_column is not set, and no column of the train split would do.\n" in others
    command = others.splitlines()[-1].removeprefix("  hftune train ").split()
    assert command[0] == f"recipe={fits[0].split(':')[0]}" and Recipe.from_argv(command).task.data_files == {"train": str(file)}


@pytest.mark.parametrize(
    ("row", "said"),
    [(None, "there is no such file."), ({"number": 1.5}, "task.text_column is not set, and no column of the train")],
)
def test_data_that_no_recipe_fits_are_refused_with_the_reasons(tmp_path, capsys, row, said):
    file = tmp_path / "rows.jsonl"
    if row is not None:
        file.write_text(f"{json.dumps(row)}\n" * 3)
    assert cli.main(["recipes", "--for", str(file)]) == 2
    assert said in (shown := capsys.readouterr().err) and shown.count("there is no such file") == (row is None)


def test_the_page_on_recipes_for_columns_is_what_the_recipes_say():
    page = (recipe_path("yelp").parent.parent / "docs" / "which-recipe.md").read_text(encoding="utf-8")
    listed = {name: recipes.read(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}
    rows = [f"| {about.columns} | `{name}` |" for name, about in recipes.with_own_data(listed)]
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == sorted(rows)


def test_show_prints_a_recipe_that_loads_and_no_secret(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cr3t")
    words = ["train.lr=0.25", "track.run_name=${oc.env:A_TOKEN}"]
    assert cli.main(["show", "recipe=yelp_demo", *words]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    assert Recipe.load(tmp_path / "shown.yaml") == Recipe.load("yelp_demo", *words)
    assert "s3cr3t" not in shown


def test_output_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "old.json").write_text("mine")
    for name in ("old.json", "new.json"):
        check_output(tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "mine")]


def test_code_of_a_run_s_folder_is_not_imported_unless_it_is_trusted(capsys, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (finished / "recipe.yaml").write_text("task: {type: evil_payload.Evil}")
    (finished / "evil_payload.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for words in (["predict", ".", "--text", "x"], ["evaluate", "recipe=recipe.yaml"]):
        said = refused(capsys, *words)
        assert said.startswith("task.type=evil_payload.Evil (recipe.yaml) is not hftune's own code") and "--trust-code" in said
        assert not (finished / "ran").exists()
        assert refused(capsys, *words, "--trust-code").startswith("task.type=evil_payload.Evil cannot be imported: ")
        assert (finished / "ran").exists()
        (finished / "ran").unlink()
        del sys.modules["evil_payload"]


@pytest.fixture
def unreadable(tmp_path):
    """A folder that this user may not look into, root neither."""
    (tmp_path / "locked").mkdir()
    path = tmp_path / "locked" / "run"
    path.parent.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield path
    if is_root:
        os.seteuid(0)
    path.parent.chmod(0o700)


def test_folder_that_may_not_be_read_is_named(capsys, unreadable):
    assert refused(capsys, "predict", unreadable, "--text", "x") == f"{unreadable} cannot be opened: Permission denied."
    assert refused(capsys, "predict", "x", "--input", unreadable).endswith("cannot be opened: Permission denied.")
    assert refused(capsys, "audit", unreadable) == f"{unreadable}/ledger.jsonl cannot be opened: Permission denied."
    assert f"{unreadable}.yaml cannot be read: Permission denied." in refused(capsys, "plan", f"recipe={unreadable}.yaml")


def test_help_of_train_shows_the_keys_of_the_sections_that_are_named(capsys):
    for words, expected in {
        (): "usage: hftune train [-h ",
        ("eval",): "  eval.every=",
        ("task", "train"): "task.type: ",
        ("trian",): "trian is not a section. Sections: task, train, eval, checkpoint, parallel, track. Did you mean 'train'?",
    }.items():
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "--help", *words])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and shown.startswith(expected)
        assert not words or shown == f"{run.help_text([*words])}\n"


def test_recipe_that_is_a_folder_says_so(capsys, finished):
    finished.rename(folder := finished.with_name("out.yaml"))
    assert refused(capsys, "show", f"recipe={folder}") == f"recipe={folder} is a folder. Name the recipe file in it."
    folder.rename(finished)
    assert f" Did you mean recipe={finished}/recipe.yaml?" in refused(capsys, "show", f"recipe={finished}")


def test_train_is_hftune_run_and_with_processes_the_local_launcher(capsys, monkeypatch):
    from hftune.launchers import local

    asked = []
    monkeypatch.setattr(run, "main", lambda words: asked.append(words) or 7)
    assert cli.main(["train", "recipe=yelp_demo", "train.lr=1"]) == 7
    assert asked.pop() == ["recipe=yelp_demo", "train.lr=1"]
    monkeypatch.setattr(local, "start_training", lambda recipe, count: asked.append((recipe.train.lr, count)))
    assert cli.main(["train", "--processes", "2", "recipe=yelp_demo", "train.lr=1"]) == 0
    assert cli.main(["train", "--processes", "2-4", "recipe=yelp_demo", "train.lr=2", "output_dir=x"]) == 0
    assert asked == [(1, 2), (2, (2, 4))]
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"hftune {__version__}: recipe yelp_demo; starting 2 processes ..." and "starting 2 to 4 proc" in second

    def stop(recipe, count):
        raise Interrupted("SIGTERM: stopped.")

    monkeypatch.setattr(local, "start_training", stop)
    assert cli.main(["train", "recipe=yelp_demo", "--processes", "2"]) == 75
    assert capsys.readouterr().err == "hftune: SIGTERM: stopped.\n"


def test_time_limit_that_would_requeue_for_ever_without_training_is_refused(capsys):
    """SLURM may send its signal a minute early, and imports and data take time before the first step."""
    said = refused(capsys, *SLURM, "--time", "3")
    assert said.startswith("--time 3 is 180 s and must be at least 240 s: ") and said.endswith("2 hours are 2:00:00.")
    assert cli.main([*SLURM, "--time", "4"]) == 0
    assert cli.main([*SLURM, "--time", "3", "--grace-s", "60"]) == 0


def test_options_that_argparse_refuses_are_named(capsys):
    for words, message in {
        (): "one of the arguments --gpus --cpu is required",
        ("--gpus", "1", "--cpu"): "argument --cpu: not allowed with argument --gpus",
    }.items():
        with pytest.raises(SystemExit):
            cli.main(["slurm", "recipe=yelp", "--nodes", "2", *words])
        assert message in capsys.readouterr().err
    for words, message in {
        ("--image", "a", "--kind", "pod"): "argument --kind: invalid choice: 'pod' (choose from 'job', 'jobset', 'trainjob')",
        (): "the following arguments are required: --image",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            cli.main(["k8s", *SLURM[1:], *words])
        assert message in capsys.readouterr().err


def test_job_on_cpus_asks_for_no_gpu_and_trains_on_none(capsys):
    assert cli.main(["slurm", "recipe=yelp", "--nodes", "2", "--cpu", "--processes", "3", "--cpus-per-process", "4"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --cpus-per-task=12" in script and "gpus" not in script
    assert "\nexport ACCELERATE_USE_CPU=true\nexport OMP_NUM_THREADS=4\n" in script
    assert "--num_processes $((SLURM_JOB_NUM_NODES * 3))" in script


@pytest.mark.parametrize(
    ("asked", "cores", "notice"),
    [
        (("--gpus", "4"), 8, "The job asks for 2 CPU cores for each GPU. --cpus-per-gpu N asks for more."),
        (("--gpus", "1", "train.num_workers=3"), 5, "5 CPU cores for each GPU, 3 of them for train.num_workers=3. --cpus"),
        (("--cpu", "--processes", "3"), 3, "The job asks for 1 CPU core for each process. --cpus-per-process N asks"),
    ],
)
def test_each_process_gets_a_core_and_the_user_is_told_how_many(capsys, asked, cores, notice):
    """SLURM's own default is one core for all processes of a node together."""
    assert cli.main(["slurm", "recipe=yelp", "--nodes", "2", *asked]) == 0
    said = capsys.readouterr()
    assert f"#SBATCH --cpus-per-task={cores}" in said.out and notice in said.err
    assert cli.main([*SLURM, "--cpus-per-gpu", "8"]) == 0
    assert capsys.readouterr().err == ""


def test_script_brings_the_interpreter_that_wrote_it(capsys, tmp_path, monkeypatch):
    """Whatever environment is active where sbatch is called, and whatever --export keeps from the job."""
    python = tmp_path / "its env" / "bin" / "python3.12"
    monkeypatch.setattr(sys, "executable", str(python))
    for gpus, command in {"1": "launch=(python3.12)", "2": "python3.12 -m hftune.launchers.quietly accelerate launch"}.items():
        assert cli.main([*SLURM, "--nodes", "1", "--gpus", gpus]) == 0
        script = capsys.readouterr().out
        assert f"\nexport PATH='{python.parent}':$PATH\n" in script and command in script
        assert "srun --export=ALL " in script


@pytest.mark.parametrize("nodes", (1, 2))
def test_job_on_one_to_two_nodes_starts_as_many_processes_as_it_got(capsys, monkeypatch, nodes):
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    assert cli.main([*SLURM, "--nodes", "1-2", "--gpus", "1"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1-2\n" in script and "#SBATCH --ntasks" not in script  # with which SLURM 22.05 gives one node
    said = before_srun(script, 'printf "%s\\n" "${launch[@]}"', SLURM_JOB_NUM_NODES=str(nodes), SLURM_JOB_ID="7")
    command = said.splitlines()
    if nodes == 1:
        assert command == ["python"]
    else:
        assert launch_options([*command, "-m", "hftune.run"]).num_processes == 2  # as the processes themselves find out
        conf = "min_machines=1,join_timeout=120,meeting=node1:10007"
        assert command[-6:] == ["--rdzv_backend", "hftune", "--rdzv_conf", conf, "--max_restarts", "3"]


def test_only_a_job_on_a_range_of_nodes_goes_on_without_a_lost_one(capsys):
    for nodes, is_elastic in {"2": False, "2-2": False, "2-4": True}.items():
        assert cli.main([*SLURM, "--nodes", nodes]) == 0
        script = capsys.readouterr().out
        for words in ("#SBATCH --no-kill", " --no-kill ", '--rdzv_conf "min_machines=2,', "hftune.cli meeting", "code != 75"):
            assert (words in script) == is_elastic, (nodes, words)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_node_requeues_a_job_that_lost_its_meeting_but_not_one_that_was_cancelled(capsys):
    """SLURM signals all processes of a job that is cancelled, also the meeting's."""
    assert cli.main([*SLURM, "--nodes", "2-4"]) == 0
    wrapper = re.search(r"node=\(bash.*? node\)", capsys.readouterr().out, re.DOTALL)[0]
    for cancelled, said in {"": "requeue 7\n", "kill -TERM $PPID; ": ""}.items():
        task = f'scontrol() {{ echo "$@"; }}; export -f scontrol; {wrapper}; "${{node[@]}}" bash -c \'{cancelled}exit 75\''
        closed = {"SLURM_JOB_ID": "7", "MEETING_HOST": "127.0.0.1", "MEETING_PORT": "1"}
        run = subprocess.run(["bash", "-c", task], capture_output=True, text=True, env={**os.environ, **closed})
        assert (run.stdout, run.returncode) == (said, 75), run.stderr


def before_srun(script, command, **variables):
    """Run what comes before training, and then a command, and return what it prints."""
    first = re.split("# One task per node|# The machines meet here", script)[0]
    text = f"scontrol() {{ echo node1; }}\n{first}\n{command}"
    run = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return run.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-12", 216_000), ("1-0:30", 88_200), ("1-00:00:01", 86_401), ("1h", None)],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert time_s(text) == seconds


def test_batch_script_takes_any_words_as_they_are_and_asks_for_what_was_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["track.with=[wandb]", "task.label_names=[a, 'b \"c\"']", "output_dir=$HOME/`it's` here;exit"]
    assert cli.main([*SLURM, words[0], "--cpus-per-gpu", "8", *words[1:], "--partition", "long", "--config", "4gpu"]) == 0
    script = capsys.readouterr().out
    head = script.split("\n\n")[0].splitlines()
    for line in ("--job-name=yelp", "--nodes=2", "--gpus-per-node=2", "--partition=long", "--cpus-per-task=16"):
        assert f"#SBATCH {line}" in head
    assert f"--config_file {CONFIGS[0].parent / '4gpu.yaml'}" in script
    said = before_srun(script, 'printf "%s\\n" "${words[@]}"', SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7")
    assert said.splitlines() == ["recipe=yelp", *words]


@pytest.mark.parametrize("given", [["--processes", "2"], ["--processes=2"], ["--proc", "2"]])
@pytest.mark.parametrize(
    "words",
    [
        ["predict", "outputs/a #1", "--data=x y.csv", "--map", "text=--odd", "--map=b=c", "--batch-size", "3", "--trust-code"],
        ["replay", "outputs/a", "--steps", "1:3", "--set", "train.lr=1", "track.run_name='- a'", "--skip=2", "--why"],
    ],
)
def test_each_process_gets_the_command_line_but_for_their_number(words, given):
    options = cli.parse([*words[:2], *given, *words[2:]])
    assert options.processes == 2 and argv_of_one(options) == words


def test_a_tilde_is_the_user_s_folder_in_every_path_of_a_command_and_in_output_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.parse(["replay", "a", "--step=1", "--output=~/x"]).output == tmp_path / "x"
    assert cli.parse(["report", "~/a", "b"]).folders == [tmp_path / "a", Path("b")]
    assert cli.parse(["report", "~no-such-user/a"]).folders == [Path("~no-such-user/a")]
    recipe = Recipe.load("yelp_demo", "output_dir=~/x")
    assert recipe.output_dir == str(tmp_path / "x") == Recipe.load("yelp_demo", {"output_dir": Path("~/x")}).output_dir
