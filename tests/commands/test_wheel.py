"""What a user gets from ``pip install``, and what travels with the source."""

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hftune

ROOT = Path(__file__).parents[2]
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
"""Files of the root that travel with the source."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *command], check=True, timeout=120)
    (path,) = folder.glob("hftune-*.whl")
    return path


def test_wheel_holds_the_recipes_and_finds_them(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from hftune import Recipe; import hftune; print(hftune.__file__, Recipe.load('yelp').train.batch_size)"
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    ).stdout
    assert said.split() == [str(tmp_path / "site" / "hftune" / "__init__.py"), "128"]
    command = [sys.executable, "-m", "hftune.cli", "configs", "2cpu"]
    said = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert said == (ROOT / "accelerate_configs" / "2cpu.yaml").read_text()


def test_wheel_says_its_licence_and_that_it_is_typed(wheel):
    files = zipfile.ZipFile(wheel)
    info = f"hftune-{hftune.__version__}.dist-info"
    assert files.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "hftune/py.typed" in files.namelist()
    of_reports = (
        "assets/report.js",
        "assets/report.css",
        "assets/uPlot.LICENSE",
        "templates/page.html",
        "templates/blocks.html",
    )
    assert {f"hftune/reporting/{name}" for name in of_reports} <= {*files.namelist()}
    metadata = email.message_from_bytes(files.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"  # MIT: uPlot
    assert metadata.get_all("License-File") == ["LICENSE", "hftune/reporting/assets/uPlot.LICENSE"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_sdist_holds_what_its_tests_and_its_readers_need(tmp_path):
    code = f"from hatchling.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
    (path,) = tmp_path.glob("hftune-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, "hftune/py.typed", "examples/README.md", "Makefile", "constraints.txt", "pyproject.toml"} <= names
    assert {
        "recipes/yelp.yaml",
        "accelerate_configs/4gpu.yaml",
        "tests/conftest.py",
        "docs/configuration.md",
        "mkdocs.yml",
    } <= names
    assert {".github/workflows/check.yml", ".pre-commit-config.yaml", "Dockerfile", ".dockerignore"} <= names
