"""What a shell completes: asked as the shell asks, and typed into a terminal."""

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from hftune import cli
from hftune.config import reference
from hftune.config.shipped_files import recipe_names

PARAMETERS = {
    "hftune sh": ["show"],
    "hftune show re": ["recipe=", "replace=", "resume="],
    "hftune show recipe=yelp": ["recipe=yelp", "recipe=yelp_demo"],
    "hftune show recipe=mi": ["recipe=mine.yaml"],
    "hftune show tra": ["track.", "train."],
    "hftune show train.mi": ["train.micro_batch_size=", "train.micro_batch_tokens=", "train.min_lr=", "train.mixed_precision="],
    "hftune show train.mixed_precision=": [f"train.mixed_precision={name}" for name in ("no", "bf16", "fp16", "auto")],
    "hftune show train.tf32=t": ["train.tf32=true"],
    "hftune show track.with=[w": ["track.with=[wandb]"],
    "hftune show recipe=mnist task.w": ["task.weights=", "task.width="],
    "hftune show recipe=mine.yaml task.w": ["task.weights=", "task.width="],  # its base is mnist
    "hftune show recipe=typed.yaml task.or": ["task.ordinal="],
    "hftune show recipe=yelp task.wi": [],
    "hftune show task.tokenizer_": ["task.tokenizer_revision="],  # of any task
    "hftune show recipe=yelp task.data_fi": ["task.data_files."],
    "hftune show recipe=yelp eval.metric=m": [f"eval.metric={name}" for name in ("macro_f1", "mcc", "micro_f1", "mae")],
    "hftune train --p": ["--processes"],
    "hftune train --help ch": ["checkpoint"],
    "hftune plan --device c": ["cpu", "cuda"],
    "hftune slurm --config fsdp_2": ["fsdp_2node"],
    "hftune configs 2c": ["2cpu"],
    "hftune plan --processes ": [],  # a number; not the keys of recipes
    "hftune audit mine": [],  # left to the shell: files
}
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in ("bash", "zsh", "fish")
]
ASK = {
    "bash": 'ask() { COMP_LINE=$1; COMP_POINT=${#1}; COMP_WORDBREAKS=; _hftune; printf "%s\\n" "${COMPREPLY[@]}"; }',
    "zsh": "compdef() { }; compset() { }; _files() { for file in ${PREFIX#*=}*.yaml(N); [[ $1 == -g ]] && print recipe=$file }\n"
    '_describe() { local -a found=("${(@P)4}"); print -rl -- ${found%%:*} }\n'
    'ask() { words=("${(@s: :)1}"); CURRENT=$#words; PREFIX=$words[-1]; _hftune }',
    "fish": "function ask; set -g line (string split ' ' -- $argv); __hftune_words | string replace -r '\\t.*' ''; end\n"
    "function commandline; if test $argv[1] = -ct; echo $line[-1]; else; printf '%s\\n' $line[1..-2]; end; end",
}
"""How a function of the shell, ask, has the words for a line printed."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with recipes."""
    (tmp_path / "mine.yaml").write_text("base: mnist\ntask: {width: 2}\n")
    (tmp_path / "typed.yaml").write_text("train: {lr: 1}\ntask:\n  model_type: base\n  type: SequenceClassification\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_words_that_a_shell_is_given(shell, capsys, folder):
    (folder / "script").write_text("\n".join([ASK[shell] + "\n", script(shell, capsys)]))
    asked = "\n".join(f"echo '> {line}'; ask '{line}'" for line in PARAMETERS)
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *options, "-c", f"source ./script\n{asked}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    said = dict(part.split("\n", 1) for part in done.stdout.split("> ")[1:])
    found = {line: words.split() for line, words in said.items()}
    assert {line: sorted(words) for line, words in found.items()} == {line: sorted(words) for line, words in PARAMETERS.items()}


@pytest.mark.parametrize("shell", SHELLS[:2])
def test_line_that_is_typed_into_a_terminal(shell, capsys, folder):
    (folder / "script").write_text(script(shell, capsys))
    setup = {"bash": "", "zsh": "autoload -U compinit; compinit -u -D; "}[shell]
    options = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    process, terminal = pty.fork()
    if process == 0:
        os.execvp(shell, [shell, *options])
    try:
        type_in(terminal, f"{setup}. ./script; hftune() {{ echo \"<$*>\"; }}; echo rea''dy\n", until="ready")
        line = "hftune tra\trecipe=yelp_d\ttask.ord\tt\ttrain.mixed_precision=f\tresume=typed\toutput_dir=a\n"
        said = type_in(terminal, line, until="<train")
        assert "<train recipe=yelp_demo task.ordinal=true train.mixed_precision=fp16 resume=typed.yaml output_dir=a>" in said
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def type_in(terminal, text, until):
    """Type a text, and return what the terminal shows up to a word and the rest of its line."""
    os.write(terminal, text.encode())
    said, deadline = "", time.monotonic() + 60
    while until not in said or "\n" not in said.partition(until)[2]:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], said
        said += os.read(terminal, 65536).decode()
    return said


def test_bash_is_told_only_what_follows_the_equals_sign(capsys, folder):
    """Of train.schedule=li, bash takes li to be the word unless COMP_WORDBREAKS has been changed."""
    ask = 'COMP_LINE="hftune show train.schedule=li"; COMP_POINT=${#COMP_LINE}; _hftune; echo "${COMPREPLY[@]}"'
    (folder / "script").write_text(script("bash", capsys))
    done = subprocess.run(["bash", "--norc", "-c", f"source ./script; {ask}; COMP_WORDBREAKS=:; {ask}"], capture_output=True)
    assert done.stdout.decode().splitlines() == ["linear", "train.schedule=linear"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_has_every_command_recipe_and_key(shell, capsys):
    text = script(shell, capsys)
    assert [name for name in cli.COMMANDS if f"commands|{name}|" not in text] == []
    assert [name for name in recipe_names() if f"recipe=|recipe={name}|" not in text] == []
    assert [key for key in reference.all_keys() if "." in key and f"|{key}=|" not in text and f"|{key}.|" not in text] == []


def test_shell_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "tcsh"])
    assert ended.value.code == 2 and "choose from bash, zsh, fish" in capsys.readouterr().err.replace("'", "")
