"""What is written in one go is the old contents or the new, whatever ends the writer."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hftune import atomic
from hftune.atomic import atomic_path, restore, set_aside
from tests.support.runs import environment


def write(path, kind, text):
    """Write a file, or a folder with one file in it."""
    if kind == "folder":
        path.mkdir()
        path = path / "weights"
    path.write_text(text)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["file", "folder"])
def kind(request):
    return request.param


def test_a_kill_while_writing_leaves_the_earlier_contents_and_the_next_write_succeeds(tmp_path, kind):
    write(tmp_path / "model", kind, "earlier")
    before = contents(tmp_path)
    code = "import os, signal, sys; from pathlib import Path; from hftune.atomic import atomic_path\n"
    code += "from tests.commands.test_atomic import write\n"
    code += "with atomic_path(Path(sys.argv[1])) as temporary:\n"
    code += "    write(temporary, sys.argv[2], 'half'); os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", code, str(tmp_path / "model"), kind]
    done = subprocess.run(command, env=environment(), cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    killed = contents(tmp_path)
    assert {name: text for name, text in killed.items() if name in before} == before
    assert "half" in killed.values()  # the kill came in the middle
    with atomic_path(tmp_path / "model") as temporary:
        write(temporary, kind, "later")
    assert contents(tmp_path) == dict.fromkeys(before, "later")


def test_an_error_while_writing_leaves_the_earlier_contents_alone(tmp_path, kind):
    write(tmp_path / "model", kind, "earlier")
    before = contents(tmp_path)
    with pytest.raises(OSError, match="full"), atomic_path(tmp_path / "model") as temporary:
        write(temporary, kind, "half")
        raise OSError("full")
    assert contents(tmp_path) == before


def test_a_folder_set_aside_by_a_killed_replacement_gets_its_name_back(tmp_path):
    write(set_aside(tmp_path / "model"), "folder", "earlier")
    restore(tmp_path / "model")
    assert contents(tmp_path) == {"model/weights": "earlier"}


def test_contents_are_on_the_disk_before_they_get_their_name_and_a_cache_waits_for_none(tmp_path, monkeypatch, kind):
    events = []
    monkeypatch.setattr(atomic, "flush", lambda path: events.append(("flush", path.name)))
    for name in ("rename", "replace"):
        real = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda path, to, real=real: events.append(("rename", path.name)) or real(path, to))
    with atomic_path(tmp_path / "model") as temporary:
        write(temporary, kind, "new")
    on_disk, renamed = ("flush", ".model.writing"), ("rename", ".model.writing")
    folder = [("flush", "weights"), on_disk, renamed, ("flush", tmp_path.name)]
    assert events == ([on_disk, renamed] if kind == "file" else folder)
    events.clear()
    with atomic_path(tmp_path / "cached", is_shared=True) as temporary:
        temporary.write_text("new")
    assert events == [("rename", temporary.name)]


def test_shared_files_have_a_temporary_name_each(tmp_path):
    with atomic_path(tmp_path / "cached", is_shared=True) as first, atomic_path(tmp_path / "cached", is_shared=True) as second:
        assert first != second
        first.write_text("same")
        second.write_text("same")
    assert contents(tmp_path) == {"cached": "same"}
