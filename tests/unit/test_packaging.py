"""What a user gets from ``pip install``: the recipes travel with the code."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_holds_the_recipes_and_finds_them(tmp_path):
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *command], check=True, timeout=120)
    (wheel,) = tmp_path.glob("hftune-*.whl")
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
