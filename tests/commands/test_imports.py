"""What a command has imported by the time it answers: no torch before a recipe has been checked."""

import shutil
import subprocess
import sys

import pytest

from hftune import Recipe, __version__, run
from tests.support.runs import environment

HEAVY = ("torch", "transformers", "datasets", "accelerate")


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=60)


def imported(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the names of the packages that it has imported by then."""
    done = python("-c", f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_a_recipe_is_read_and_checked_before_torch_is_imported():
    packages = imported("from hftune import Recipe; Recipe.from_argv(['recipe=yelp_demo', 'train.lr=1']).validate()")
    assert "yaml" in packages
    assert not packages & {"omegaconf", *HEAVY}


@pytest.mark.parametrize("word", ["train.lr=abc", "train.batch_size=0", "eval.metric=acuracy", "task.model=./nowhere"])
def test_a_recipe_is_refused_before_torch_is_imported(word):
    packages = imported(f"from hftune.run import main; assert main(['recipe=yelp_demo', '{word}']) == 2")
    assert "yaml" in packages
    assert not packages & {"omegaconf", *HEAVY}


def test_importing_hftune_imports_nothing_heavy():
    packages = imported("import hftune")
    assert "hftune" in packages
    assert not packages & {"omegaconf", "numpy", *HEAVY}


def test_help_imports_nothing_heavy():
    done = python("-X", "importtime", "-m", "hftune.run", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("hftune ")
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hftune" in packages
    assert not packages & {"omegaconf", "numpy", *HEAVY}


def test_a_name_without_its_owner_is_refused_before_torch_is_imported():
    code = (
        "import sys; from hftune.run import main; "
        "print(main(['recipe=yelp', 'task.model=bert-base-cased']), 'torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["2", "False", "False"], said.stderr


def test_help_is_shown_and_needs_no_torch():
    code = "import sys; from hftune.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_arguments_of_every_command_are_refused_before_torch_is_imported(finished, tmp_path):
    recipe = f"recipe={finished}/recipe.yaml"
    sample, mine = ("sample", "nope", "--data", "x", "--reward", "a.b"), ("mine", "nope", "--data", "x", "--output", "x.csv")
    refusals = {
        ("train", "recipe=yelp_demo", "--processes", "0"): "--processes 0 must be at least 1.",
        ("train", "recipe=yelp_demo", "--processes", "4-1"): "--processes 4-1: the least number exceeds the most, 1. ",
        ("train", "recipe=yelp_demo", "--processes", "few"): "--processes few is neither a number, such as 4, nor ",
        ("train", "recipe=yelp_demo", "train.lr=0"): "train.lr=0.0 must be above 0.",
        ("show", "recipe=yelp_demo", "seed=x"): "seed='x' is not a whole number, such as 42.",
        ("plan", "recipe=yelp_demo", "--processes", "0"): "--processes 0 must be at least 1.",
        ("plan", "recipe=yelp_demo", "eval.metric=x"): "eval.metric='x' is not computed by SequenceClassification. ",
        ("doctor", "recipe=nope"): "recipe=nope: there is no such recipe.",
        ("evaluate", "recipe=yelp_demo", "--checkpoint", "nope"): "--checkpoint nope: there is no such folder.",
        ("evaluate", f"recipe={tmp_path}/none.yaml"): f"recipe={tmp_path}/none.yaml: there is no such file",
        ("evaluate", "recipe=yelp_demo", f"output_dir={tmp_path}/x"): f"{tmp_path}/x/model: there is no model yet.",
        ("evaluate", f"{tmp_path}/none"): f"{tmp_path}/none: there is no such folder. Name the output folder of a run, ",
        ("evaluate", str(tmp_path)): f"{tmp_path} holds no recipe.yaml. Name the output folder of a run, ",
        ("evaluate", recipe, "--output", "/none/x.json"): "--output /none/x.json cannot be written: No such file or directory.",
        ("predict", "nope", "--text", "x"): "nope: there is no such folder.",
        ("predict", str(finished), "--text", "x", "--batch-size", "0"): "--batch-size 0 must be at least 1.",
        ("predict", f"{finished}/checkpoints", "--text", "x"): f"{finished}/checkpoints is not the folder of a model. Those of "
        f"this run are {finished}/model and model_last.",
        ("predict", f"{finished}/checkpoints/step_00000005", "--text", "x"): f"{finished}/checkpoints/step_00000005 is a "
        "checkpoint, which a run resumes from. ",
        ("predict", str(finished), "--data", "nope.csv", "--output", "x.csv"): "--data nope.csv: there is no such file.",
        ("predict", str(finished), "--data", "nope.csv", "--output", "x"): "--output x: its name does not end in one of .csv, ",
        (*sample, "--answers", "1"): "--answers 1: a pair needs 2 answers at least.",
        (*sample, "--output", "x"): "--output x: its name does not end in one of ",
        (*mine, "--range-max", "2"): "--range-max 2 leaves 2 ranks after --range-min 0, too few for --negatives 3.",
        mine: "nope: there is no such folder.",
        ("sweep", "recipe=yelp_demo", "train.lr=1e-5"): "Nothing varies. ",
        ("sweep", "recipe=yelp_demo", "train.lr=1e-5,x"): "train.lr='x' is not a number, such as 5e-05.",
        ("push", str(finished), "bert"): "bert is not USER/NAME or ORGANIZATION/NAME, as models on the Hub are called.",
        ("push", "nope", "me/bert"): "nope: there is no such folder.",
        ("push", f"{finished}/model", "me/bert"): f"{finished}/model is a single model. Name the output folder of its run, ",
        ("push", str(finished), "me/bert"): "HF_HUB_OFFLINE is set, and nothing can be pushed without the Hub. Unset it.",
        ("export", "nope", "--format", "vllm-ready"): "nope: there is no such folder.",
        ("export", "nope", "--format", "vllm-ready", "--samples", "0"): "--samples 0 must be at least 1.",
        ("export", "nope", "--format", "vllm-ready", "--quantize", "int8"): "--quantize int8 is for --format onnx, not for ",
        ("export", str(finished), "--format", "vllm-ready", "--output", str(tmp_path)): f"{tmp_path} is there already. ",
        ("compare", "nope", "nope"): "nope: there is no such folder. ",
        ("audit", "nope"): "nope holds no ledger.jsonl: name the output folder of a run.",
        ("receipt", "nope"): "nope holds no ledger.jsonl: name the output folder of a run.",
        ("verify", "nope.json"): "nope.json: there is no such file. hftune receipt RUN writes one.",
        ("vocab", "nope.txt", "--output", "words"): "nope.txt: there is no such file.",
        ("slurm", "recipe=nope", "--nodes", "1", "--gpus", "2"): "recipe=nope: there is no such recipe.",
        ("k8s", "recipe=nope", "--image", "x", "--nodes", "1", "--cpu"): "recipe=nope: there is no such recipe.",
        ("sky", "recipe=nope", "--nodes", "1", "--cpu"): "recipe=nope: there is no such recipe.",
        ("configs", "nope"): "nope: there is no such launch configuration.",
    }
    code = "import sys; from hftune import cli; from pathlib import Path\n"
    code += "for words in eval(sys.argv[1]):\n    print(cli.main(list(words)), 'torch' in sys.modules, flush=True)\n"
    code += "    sys.stderr.write('---')\n    sys.stderr.flush()"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(list(refusals))], env=environment(), cwd=tmp_path, capture_output=True, text=True
    )
    for (words, expected), said in zip(refusals.items(), done.stderr.split("---"), strict=False):
        assert said.startswith(f"hftune: {expected}"), (words, said)
    assert done.stdout.splitlines() == ["2 False"] * len(refusals)
    assert not (tmp_path / "words").exists()


def test_pages_and_comparisons_of_runs_are_made_without_torch(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "other")
    folders = [str(finished), str(tmp_path / "other")]
    code = f"from hftune import cli; folders = {folders}\n"
    packages = imported(
        f"{code}assert [cli.main(['report', *folders, '--output', folders[1] + '.html']), cli.main(['compare', *folders])] == [0, 0]"
    )
    assert "numpy" in packages and not packages & set(HEAVY)


def test_first_line_comes_before_torch_and_from_the_main_process_alone(capsys, monkeypatch):
    code = "import os, sys; from hftune import run; real = run.announce\n"
    code += "def said(recipe):\n    real(recipe)\n    print('torch' in sys.modules, flush=True)\n    os._exit(0)\n"
    code += "run.announce = said; run.main(['recipe=yelp_demo'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == f"hftune {__version__}: recipe yelp_demo, 1 process; loading libraries ...\nFalse\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run.announce(Recipe.load("yelp_demo"))
    assert capsys.readouterr().out == f"hftune {__version__}: recipe yelp_demo, 2 processes; loading libraries ...\n"


def test_command_that_starts_processes_does_not_import_torch_itself():
    code = "import sys; from hftune import cli; from hftune.launchers import local\n"
    code += "def show(command, env):\n    print(*command[1:4], 'torch' in sys.modules, 'numpy' in sys.modules, flush=True); raise OSError\n"
    code += (
        "local.run_and_show = show\nfor count in ('2', '2-4'): cli.main(['train', 'recipe=yelp_demo', '--processes', count])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    _, alone, _, replaced = done.stdout.splitlines()
    for command in (alone, replaced):
        assert command.startswith("-m hftune.launchers.forks {") and command.endswith("} False False"), done.stderr


def test_what_is_imported_before_the_fork_starts_no_thread_and_asks_for_no_gpu():
    code = """
import importlib, os, torch
from hftune.tasks import LanguageModeling, TitleGeneration

def refuse(*arguments):
    raise AssertionError("asked for a GPU before the fork")

for module in (torch.cuda, torch.accelerator):
    module.is_available = module.device_count = refuse
for name in ("hftune.training", *LanguageModeling.libraries, *TitleGeneration.libraries):
    importlib.import_module(name)
threads = {open(f"/proc/self/task/{number}/comm").read().strip() for number in os.listdir("/proc/self/task")}
print(len(threads - {"jemalloc_bg_thd"}), torch.cuda.is_initialized())
"""  # pyarrow's allocator starts its thread again in a fork
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1 False\n", done.stderr


def test_help_of_a_section_imports_nothing_heavy():
    code = "import sys; from hftune.run import main; main(['--help', 'train']); main(['--help', 'task'])"
    code += "; print(sorted({'torch', 'transformers', 'datasets', 'omegaconf'} & set(sys.modules)), file=sys.stderr)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == "[]\n"


@pytest.mark.parametrize(("recipe", "every"), [("mnist_demo", "epoch"), ("restoration_demo", "never")])  # torchmetrics does
def test_training_a_network_imports_no_module_of_transformers(recipe, every, tmp_path):
    words = [f"recipe={recipe}", f"output_dir={tmp_path / recipe}", "train.max_steps=1", f"eval.every={every}"]
    code = f"from hftune.run import main; assert main({words}) == 0; import sys"
    done = python("-c", f"{code}; print([name for name in sys.modules if name.partition('.')[0] == 'transformers'])")
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
