"""Reads README.md and the pages of docs/: commands, blocks of code, links, headings; prepares the files that commands name."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
"""Text by path."""
STARTS = ("hftune", "python", "accelerate", "torchrun", "make", "pip", "sbatch")
MODULES = ("hftune.run", "hftune.cli", "hftune.doctor", "hftune.spark", "hftune.config.reference")
SYNOPSIS = re.compile(r"\[--|\[section|\[recipe|\b(?!RUN_ID)[A-Z]=|<")
"""What describes a command instead of giving one."""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a page: in blocks of code, and between backticks.

    One whose refusal is shown below it is left out, as are synopses.
    """
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced.findall(text) if language in ("", "bash", "sh", "console", "shell")]
    comments = [block.partition("\n")[0] for language, block in fenced.findall(text) if language in ("python", "yaml")]
    rest = fenced.sub("", text)
    blocks += re.findall(r"(?:^ {4}.*\n?)+", rest, flags=re.MULTILINE)
    inline = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^ {4}.*", "", rest, flags=re.MULTILINE))
    lines = [line for block in blocks for line in _lines(block)]
    lines += [" ".join(line.split()) for line in inline if " " in line]
    lines += [comment.split(maxsplit=2)[2] for comment in comments if len(comment.split()) > 2 and comment.startswith("# ")]
    for line in lines:
        line = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
        first = line.partition(" ")[0]
        if first in STARTS and not SYNOPSIS.search(line) and not re.match(r"hftune doctor \d", line):
            words = shlex.split(line, comments=True)
            yield words[: next((place for place, word in enumerate(words) if word in (">", "|", "<")), None)]


def _lines(block: str) -> Iterator[str]:
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if not after.strip().startswith("hftune: "):
            yield line


def hftune_words(command: list[str]) -> tuple[str, list[str]] | None:
    """Return the subcommand of hftune that a command amounts to, and its words; None for other commands."""
    if command[0] == "hftune":
        return command[1], command[2:]
    module = next((word for word in command if word in MODULES), None)
    if module is None:
        return None
    words = command[command.index(module) + 1 :]
    if module == "hftune.cli":
        return words[0], words[1:]
    return {"hftune.run": "train"}.get(module, module.removeprefix("hftune.")), words


def launch_config(command: list[str]) -> str | None:
    """Return the name of the launch configuration that a command uses."""
    return Path(command[command.index("--config_file") + 1]).stem if "--config_file" in command else None


def prepare(words: list[str], page: str) -> list[str]:
    """Make the files that the words of a recipe name, in the current folder; return the words, with placeholders filled in."""
    ready = []
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or word.startswith("-") or value == "...":
            ready.append("recipe=yelp_demo" if word == "recipe=..." else word)
            continue
        if key == "recipe":
            value = {"NAME": "yelp_demo"}.get(value, value)
            _write_recipe(value, page)
        elif key.startswith("task.data_files.") and "://" not in value:
            Path(value).touch()
        elif key in ("task.data_dir", "task.image_folder"):
            Path(value).mkdir(exist_ok=True)
            if "task.dataset=idx" in words:
                for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
                    (Path(value) / f"{name}-ubyte").touch()
        elif key == "task.vocabulary":
            Path(value).mkdir(exist_ok=True)
            (Path(value) / "vocab.txt").touch()
        elif key == "task.model" and value.count("/") > 1:
            Path(value).mkdir(parents=True, exist_ok=True)
            (Path(value) / "config.json").write_text("{}")
        ready.append(f"{key}={value}")
    return [word for word in ready if word != "..." and not word.endswith("=...")]


def _write_recipe(value: str, page: str) -> None:
    from hftune import Recipe
    from hftune.config.shipped_files import recipe_names

    path = Path(value)
    if path.suffix != ".yaml" or path.exists():
        return
    if path.parts[0] == "outputs":  # what a run of that name has written
        own, name = Path(f"{path.parent.name}.yaml"), path.parent.name
        _write_recipe(str(own), page)
        path.parent.mkdir(parents=True, exist_ok=True)
        source = own if own.is_file() else name if name in recipe_names() else "yelp_demo"
        path.write_text(Recipe.load(source).to_yaml())
        return
    for name in (path.name, f"{path.stem}.py"):
        for block in re.findall(r"```(?:yaml|python)\n(.*?)```", page, flags=re.DOTALL):
            if block.startswith(f"# {name}"):
                Path(name).write_text(block)
    if path.exists():
        files = (yaml.safe_load(path.read_text()).get("task") or {}).get("data_files") or {}
        for file in files.values():
            Path(file).touch()


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def runnable(text: str) -> list[str]:
    """Return the blocks of Python that stand below the comment ``<!-- runs -->``."""
    return re.findall(r"^<!-- runs -->\n+```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Return a page without its fenced blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def inline(text: str) -> list[str]:
    """Return what stands between backticks, outside of blocks."""
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose(text))]


def links(text: str) -> list[str]:
    """Return the targets of the links and images that lead to no other host."""
    found = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "``", prose(text)))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def anchors(text: str) -> set[str]:
    """Return what links may point to in a page, as the site and as GitHub name its headings, where both agree."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(text), flags=re.MULTILINE)
    return {_site_anchor(heading) for heading in headings} & {_github_anchor(heading) for heading in headings}


def _site_anchor(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _github_anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
