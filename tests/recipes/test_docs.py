"""The pages of docs/ and the README say what is so: links, commands, keys, messages and code are taken from them and tried."""

import ast
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import hftune
from hftune import Recipe, Task, cli, rows_file, spark
from hftune.commands.sweep_space import parse as parse_sweep
from hftune.config import reference, sections
from hftune.config.shipped_files import config_names
from hftune.hooks import Hooks
from tests.support.pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    commands,
    hftune_words,
    inline,
    launch_config,
    links,
    prepare,
    runnable,
)

COMMANDS = [(page, command) for page, text in PAGES.items() for command in commands(text)]
SITE = {path: text for path, text in PAGES.items() if path.startswith("docs/")}


def test_much_is_found():
    """The tests below take what they find; this one would miss a page that is read wrongly."""
    found = {name for _, command in COMMANDS if (name := (hftune_words(command) or [""])[0])}
    assert {"train", "doctor", "predict", "evaluate", "plan", "vocab", "audit", "spark", *CHEAP} <= found
    assert len(COMMANDS) > 80
    assert sum(len(links(text)) for text in PAGES.values()) > 60
    assert sum(len(KEY.findall(" ".join(inline(text)))) for text in PAGES.values()) > 100
    assert len(QUOTES) > 30 and len(PLANS) >= 3


# Links, files and keys

SECTIONS = {*sections.SECTIONS, "task"}
KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(SECTIONS))})\.[a-z_][\w.]*)")
MAPPINGS = {"task.model_config", "task.generation", "task.network_args", "task.data_files", "task.augmentation", "eval.sets"}
FILES = (".py", ".yaml", ".json", ".jsonl", ".csv", ".txt", ".md")


@pytest.mark.parametrize("page", PAGES)
def test_links_files_and_keys_of_a_page_exist(page):
    known = {*reference.all_keys(), "task.type"}
    for target in links(PAGES[page]):
        path, _, anchor = target.partition("#")
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert found.exists(), target
        assert page not in SITE or found.is_relative_to(ROOT / "docs"), f"the site does not have {target}: use backticks"
        assert not anchor or anchor in anchors(PAGES[found.relative_to(ROOT).as_posix()]), target
    for word in inline(PAGES[page]):
        if re.fullmatch(r"(hftune|tests|benchmarks|examples|accelerate_configs|docs)/[\w./-]*", word):
            assert (ROOT / word).exists(), word
        for key in KEY.findall(word):
            assert key.endswith(FILES) or ".".join(key.split(".")[:2]) in MAPPINGS or key in known, key


def test_every_page_is_in_the_navigation_once():
    def files(entry):
        return [entry] if isinstance(entry, str) else [file for part in entry for title in part for file in files(part[title])]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(path.removeprefix("docs/") for path in SITE)


# Commands


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {' '.join(words)[:90]}" for page, words in COMMANDS])
def test_command_is_understood_and_its_recipe_is_accepted(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("moons", "mine", "votes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if (config := launch_config(command)) is not None:
        assert config in config_names()
    found = hftune_words(command)
    if found is None:
        return check_other(command)
    name, words = found
    if not words:  # spoken of, not given
        return None
    words = prepare(words, PAGES[page])
    if name == "evaluate":  # which takes an output folder, too
        words = ["recipe=yelp_demo" if word.startswith("outputs/") else word for word in words]
    if name in ("evaluate", "plan") and not any(word.startswith("recipe=") for word in words):
        words.insert(0, "recipe=yelp_demo")
    if name == "train" and words[0] in ("--help", "-h"):
        assert all(reference.section_text(section) for section in words[1:])
        return None
    if name == "spark":
        words = spark.parser().parse_known_args(words)[1]
    elif name != "reference":
        options = cli.parse([name, *words])
        words = getattr(options, "words", [])
    if name == "sweep":
        space = parse_sweep(words)
        words = [f"recipe={space.recipe}", *space.fixed, *(f"{key}={value}" for key, value in next(space.corners()).items())]
    if words:
        Recipe.from_argv(words).validate()
    return None


def check_other(command):
    """What is no command of hftune: a target of make, what pip installs, a script."""
    if command[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in command[1:])
    elif command[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in command for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")]
        assert set(asked) <= {*extras}
    elif command[0] == "python" and command[1].endswith(".py"):
        assert (ROOT / command[1]).is_file()


CHEAP = {"configs", "recipes", "show", "slurm", "k8s", "sky"}


def test_commands_that_take_no_time_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = []
    for page, command in COMMANDS:
        name, words = hftune_words(command) or ("", [])
        if name in CHEAP and (words or name in ("configs", "recipes")):
            if "--for" in words:
                (tmp_path / words[-1]).write_text("review,stars\ngood,5\nbad,1\n")
            assert cli.main([name, *prepare(words, PAGES[page])]) == 0, capsys.readouterr().err
            (tmp_path / "2node.yaml").unlink(missing_ok=True)
            (tmp_path / "4gpu.yaml").unlink(missing_ok=True)
            ran.append(name)
    assert {*ran} == CHEAP


def test_recipes_that_fit_are_shown_as_they_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks(PAGES["docs/which-recipe.md"], "text")
    (tmp_path / "reviews.csv").write_text("review,stars\ngood,5\nbad,1\n")
    assert cli.main(["recipes", "--for", "reviews.csv"]) == 0
    said, (first, last) = capsys.readouterr().out, shown.split("  ...\n")
    assert said.startswith(first) and said.rstrip().endswith(last.rstrip())


REFUSALS = [
    (page, block)
    for page, text in PAGES.items()
    for block in blocks(text, "console")
    if block.startswith("$ hftune train") and block.partition("\n")[2].startswith("hftune: ")
]


@pytest.mark.parametrize(("page", "shown"), REFUSALS, ids=[page for page, _ in REFUSALS])
def test_refusal_shown_is_the_one_given(page, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, *lines = shown.splitlines()
    assert cli.main(command.removeprefix("$ hftune ").split()) == 2
    assert capsys.readouterr().err.splitlines() == lines
    if page == "docs/quickstart.md":
        in_readme = shown.replace("$ hftune train", "$ python -m hftune.run")
        assert textwrap.indent(in_readme, "    ") in PAGES["README.md"]


@pytest.mark.parametrize("page", SITE)
def test_page_opens_with_a_command_or_code_and_what_it_prints(page):
    lines = PAGES[page].splitlines()
    starts = [place for place, line in enumerate(lines) if re.match("```[a-z]", line)]
    assert starts and starts[0] <= 20, "no code on the first screen"
    top = "\n".join(lines[:60])
    prompted = re.findall(r"^```console\n(.*?)^```", top, flags=re.DOTALL | re.MULTILINE)
    is_answered = any(re.search(r"^(?!\$ ).+", block, flags=re.MULTILINE) for block in prompted)
    assert is_answered or "```text" in top or "| step |" in top, "nothing that is printed on the first screens"


PLAN = re.compile(r"^```bash\n(hftune plan [^\n]+)\n```\n+```text\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PLANS = [(page, command, shown) for page, text in PAGES.items() for command, shown in PLAN.findall(text)]


@pytest.mark.parametrize(("page", "command", "shown"), PLANS, ids=[f"{page}: {command}" for page, command, _ in PLANS])
def test_plan_shown_is_the_one_made(page, command, shown, capsys):
    assert cli.main([*shlex.split(command)[1:], "--device", "cpu"]) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in shown.splitlines():
        assert line.strip() == "..." or line in printed, f"{page}: the plan has no line {line!r} after those before it"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_evaluations_shown_have_the_metrics_of_the_recipe(page):
    directions = Recipe.load("yelp_demo").task.metric_directions
    found = re.findall(r"^step .+  eval  (.+)  best so far$", PAGES[page], flags=re.MULTILINE)
    for line in found:
        assert [name for name, _ in map(str.split, line.split("  "))] == ["loss", *directions], f"{page}: {line}"
    assert found


# Architecture


def cells(heading, column):
    """The words between backticks in one column of the tables below a heading of docs/architecture.md, by row."""
    section = PAGES["docs/architecture.md"].partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row[column]) for row in rows]


def test_architecture_names_every_file_and_package_at_the_root_once():
    inside = [path for path in (ROOT / "hftune").iterdir() if path.name != "__pycache__"]
    code = [f"{path.name}/" if path.is_dir() else path.name for path in inside if path.is_dir() or path.suffix == ".py"]
    assert sorted(name for row in cells("The packages", 1) for name in row) == sorted(code)


# Messages

QUOTES = re.findall(r"^### `(.+)`$", PAGES["docs/troubleshooting.md"], flags=re.MULTILINE)


@pytest.fixture(scope="module")
def messages():
    """All texts of the source; what an f-string puts in is left out."""
    found = []
    for path in sorted((ROOT / "hftune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("\0".join(part.value if isinstance(part, ast.Constant) else "" for part in node.values))
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return found


@pytest.mark.parametrize("quote", QUOTES)
def test_message_that_troubleshooting_quotes_is_one_of_hftunes(quote, messages):
    for fragment in map(str.strip, quote.split("...")):
        assert any(fragment in text for text in messages), (
            f"{fragment!r} is in no message any more: change docs/troubleshooting.md"
        )


# Python

PYTHON = [(page, block) for page, text in PAGES.items() for block in blocks(text, "python")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{page}: {code.splitlines()[0][:60]}" for page, code in PYTHON])
def test_python_is_valid_and_the_recipes_that_it_loads_are_accepted(page, code):
    names = {"rows_file": rows_file, "rows": [{"text": "Great food.", "label": 1}, {"text": "Never again.", "label": 0}]}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Recipe.load":
            Recipe.load(*(eval(ast.unparse(argument), names) for argument in node.args)).validate()


def test_own_task_of_the_page_is_the_readmes():
    page, readme = (
        next(code for code in blocks(PAGES[path], "python") if code.startswith("# moons.py"))
        for path in ("docs/own-task.md", "README.md")
    )
    assert ast.dump(ast.parse(page)) == ast.dump(ast.parse(readme))


def test_methods_of_a_task_are_listed_with_their_arguments():
    cells = re.findall(r"^\| (`.+?`) \|", PAGES["docs/own-task.md"], flags=re.MULTILINE)
    listed = {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
    public = {name: item for name, item in (vars(Task) | vars(Hooks)).items() if name[0] != "_"}
    own = {
        f"{name}({', '.join([*inspect.signature(item).parameters][1:])})" if inspect.isfunction(item) else name
        for name, item in public.items()
    }
    assert listed == own - {"augments"}


def test_api_page_names_what_can_be_imported_and_leaves_out_no_public_name():
    names = re.findall(r"^::: ([\w.]+)$", PAGES["docs/api.md"], flags=re.MULTILINE)
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    assert {f"hftune.{name}" for name in hftune.__all__} <= {*names}


RUNNABLE = [(page, block) for page, text in PAGES.items() for block in runnable(text)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), RUNNABLE, ids=[page for page, _ in RUNNABLE])
def test_python_that_is_marked_to_run_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for other in blocks(PAGES[page], "python"):  # files that it builds on
        if name := re.match(r"# (\w+)\.py\b", other):
            (tmp_path / f"{name[1]}.py").write_text(other)
            monkeypatch.delitem(sys.modules, name[1], raising=False)
    (tmp_path / "page_code.py").write_text(code)
    runpy.run_path("page_code.py", run_name="page_code")


# The site


FETCHED = re.compile(
    r"""<(?!a\b)\w+ (?![^>]*rel="(?:canonical|prev|next)")[^>]*\b(?:href|src|srcset|data)=["']?(?:https?:)?//[^>]*>"""
)
"""What a browser would fetch from elsewhere to show a page; links that a reader clicks are none."""


@pytest.mark.slow
def test_site_is_built_strictly_and_fetches_nothing(tmp_path):
    for name in ("docs", "hftune"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).parent / "zensical", "build", "--config-file", "mkdocs.yml", "--strict", "--clean"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert {path.removeprefix("docs/").replace(".md", ".html") for path in SITE} <= pages.keys()
    for name, text in pages.items():
        assert not FETCHED.findall(text), name
        assert 'class="mermaid"' not in text, f"{name}: the theme fetches mermaid from the network"
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), f"{style.name} fetches from the network"
    assert "trust_code" in pages["api.html"], "the API page has no signatures"
