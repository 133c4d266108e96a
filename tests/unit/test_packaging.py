"""What a user gets from ``pip install``: the recipes travel with the code."""

import re
import tomllib
from pathlib import Path

import yaml

import hftune

ROOT = Path(__file__).parents[2]
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
"""Files of the root that travel with the source."""


def test_licence_is_the_text_that_its_other_users_ship():
    """Word by word, as Apache's own copy begins with an empty line that some leave out."""
    import datasets

    (theirs,) = (Path(datasets.__file__).parents[1]).glob("datasets-*.dist-info/**/LICENSE")
    assert (ROOT / "LICENSE").read_text().split() == theirs.read_text().split()


def test_changelog_and_citation_are_of_this_version():
    versions = re.findall(
        r"^## \[([\d.]+)\] - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    numbers = [tuple(map(int, version.split("."))) for version, _ in versions]
    assert versions[0][0] == hftune.__version__
    assert numbers == sorted(numbers, reverse=True) and len(numbers) > 2
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == hftune.__version__


def test_python_versions_are_those_that_the_checks_run_on():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    check = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    assert check["jobs"]["check"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


def test_pinned_ruff_is_the_same_for_hooks_and_for_make():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (revision,) = (repo["rev"] for repo in hooks["repos"] if repo["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={revision.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_workflows_use_targets_and_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = [
        step["run"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    targets = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert targets == {"check", "test", "gpu-rehearsal", "docs"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []
    assert [file for command in commands for file in re.findall(r"tests/[\w/.]+", command) if not (ROOT / file).is_file()] == []


def test_image_is_built_from_files_that_its_context_has():
    dockerfile, ignored = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    copied = {word for words in re.findall(r"^COPY (.*) \S+$", dockerfile, flags=re.MULTILINE) for word in words.split()}
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert {"LICENSE", "README.md", "hftune", "recipes", "accelerate_configs"} <= copied, "what hatchling builds the wheel from"
