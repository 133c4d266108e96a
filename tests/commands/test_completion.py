"""What a shell completes: asked as click's scripts ask, and typed into bash."""

import os
import subprocess
import sys

import pytest

from hftune import cli
from hftune.config import reference
from hftune.config.shipped_files import recipe_names

LINES = {
    "hftune sh": ["show"],
    "hftune show re": ["recipe=", "resume="],
    "hftune show recipe=yelp": ["recipe=yelp", "recipe=yelp_demo"],
    "hftune show recipe=mi": ["recipe=mine.yaml"],
    "hftune show tra": ["track.", "train."],
    "hftune show train.mi": ["train.micro_batch_size=", "train.micro_batch_tokens=", "train.min_lr=", "train.mixed_precision="],
    "hftune show train.mixed_precision=": [f"train.mixed_precision={name}" for name in ("no", "bf16", "fp16", "auto")],
    "hftune show train.tf32=t": ["train.tf32=true"],
    "hftune show eval.every=": ["eval.every=epoch", "eval.every=never"],
    "hftune show track.with=[w": ["track.with=[wandb]"],
    "hftune show recipe=mnist task.w": ["task.weights=", "task.width="],
    "hftune show recipe=mine.yaml task.w": ["task.weights=", "task.width="],  # its base is mnist
    "hftune show recipe=typed.yaml task.or": ["task.ordinal="],
    "hftune show recipe=yelp task.wi": [],
    "hftune show recipe=none.yaml task.tokenizer_": ["task.tokenizer_revision="],  # of any task
    "hftune show recipe=yelp task.data_fi": ["task.data_files."],
    "hftune show recipe=yelp eval.metric=m": [f"eval.metric={name}" for name in ("macro_f1", "mcc", "micro_f1", "mae")],
    "hftune train --p": ["--processes"],
    "hftune train --help ch": ["checkpoint"],
    "hftune plan --device c": ["cpu", "cuda"],
    "hftune slurm --config fsdp_2": ["fsdp_2node"],
    "hftune k8s --config fsdp_2": ["fsdp_2node"],
    "hftune configs 2c": ["2cpu"],
    "hftune plan --processes ": [],  # a number; not the keys of recipes
    "hftune audit mine": [],  # left to the shell: files
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with recipes."""
    (tmp_path / "mine.yaml").write_text("base: mnist\ntask: {width: 2}\n")
    (tmp_path / "typed.yaml").write_text("train: {lr: 1}\ntask:\n  model_type: base\n  type: SequenceClassification\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(line, monkeypatch, capsys, shell="fish"):
    """Return the words that a line is completed to."""
    words = line.split(" ")
    typed = {"COMP_WORDS": line.removesuffix(" "), "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1)}
    for name, value in {"_HFTUNE_COMPLETE": f"{shell}_complete", **typed}.items():
        monkeypatch.setenv(name, value)
    assert cli.main([]) == 0
    return [text.partition(",")[2].partition("\t")[0] for text in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("line", LINES)
def test_words_that_complete_a_line(line, folder, monkeypatch, capsys):
    assert sorted(asked(line, monkeypatch, capsys)) == sorted(LINES[line])


def test_every_command_recipe_and_key_can_be_completed(folder, monkeypatch, capsys):
    assert {*cli.COMMANDS} == {*asked("hftune ", monkeypatch, capsys)}
    assert {f"recipe={name}" for name in recipe_names()} <= {*asked("hftune show recipe=", monkeypatch, capsys)}
    for section in ("train.", "task."):
        found = {word.rstrip("=.") for word in asked(f"hftune show {section}", monkeypatch, capsys)}
        assert {name for name in reference.all_keys() if name.startswith(section)} <= found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_command_prints_the_script_of_a_shell(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert f"_HFTUNE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_bash_completes_keys_and_values_of_the_words_that_it_cuts(folder, capsys):
    """Of train.schedule=li, bash takes li to be the word."""
    assert cli.main(["completion", "bash"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    (folder / "hftune").write_text(f'#!/bin/sh\nexec {sys.executable} -m hftune.cli "$@"\n')
    (folder / "hftune").chmod(0o755)
    ask = (
        '. ./script; ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _hftune_completion hftune; '
        'echo "${COMPREPLY[@]}"; }; ask hftune show train.schedule = li; ask hftune show train.schedule=li'
    )
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == ["linear", "train.schedule=linear"]
