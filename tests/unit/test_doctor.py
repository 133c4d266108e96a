"""What the doctor finds on one machine."""

import os
import socket
import sys
from collections import namedtuple

import pytest
import torch

from hftune import doctor
from hftune.doctor import FAULT, NOTICE, OK, Finding, main


def found(*names, output_dir="outputs"):
    from pathlib import Path

    return [finding for finding in doctor.examine_machine(Path(output_dir)) if finding.what in names]


def test_this_machine_is_fit_and_everything_was_looked_at(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    places = (
        "machine",
        "Python",
        "packages",
        "GPUs",
        "collectives",
        "launcher",
        "disk, outputs",
        "disk, cache",
        "shared memory",
    )
    for name in (*places, "open files", "network", "port", "Hub", "W&B"):
        assert f"{name:<16}" in said, name
    assert "This machine is fit to train" in said.splitlines()[-1]


def test_a_recipe_that_cannot_be_trained_on_is_refused(capsys):
    assert main(["recipe=yelp_demo", "train.lr=-1"]) == 2
    assert "train.lr=-1.0 must be above 0." in capsys.readouterr().err


def test_a_recipe_that_cannot_be_trained_on_here_is_refused(capsys):
    assert main(["recipe=yelp_demo", "train.mixed_precision=fp16"]) == 2
    assert "train.mixed_precision=fp16 needs a GPU" in capsys.readouterr().err


def test_a_package_that_is_too_old_is_named_with_what_to_install(monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "1.2.0" if name == "accelerate" else real(name))
    assert Finding("packages", "accelerate 1.2.0", FAULT, 'pip install "accelerate<2,>=1.15"') in found("packages")


def test_a_taken_port_names_who_has_it():
    with socket.create_server(("", 0)) as taken:
        port, old = taken.getsockname()[1], doctor.PORT
        doctor.PORT = port
        try:
            (finding,) = found("port")
        finally:
            doctor.PORT = old
    assert finding.level == NOTICE and finding.found.startswith(f"{port}: Address already in use (")
    assert finding.todo == "the shipped configs use it; choose a different one with --main_process_port"


def test_a_small_disk_and_little_shared_memory_are_notices(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(2**29, 0, 2**29))
    assert {finding.level for finding in found("disk, outputs", "disk, cache", "shared memory")} == {NOTICE}


def test_a_gpu_build_without_a_driver_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = found("GPUs")
    assert finding.level == FAULT and finding.todo == "install the build for GPUs"


def test_a_missing_rendezvous_backend_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    (finding,) = found("launcher")
    assert finding == Finding(
        "launcher", "rdzv_backend hftune is not registered", FAULT, "reinstall hftune (2node.yaml needs it)"
    )


def test_an_examination_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    def hub():
        raise PermissionError(13, "Permission denied", "/nobody/.cache")

    monkeypatch.setattr(doctor, "_hub", hub)
    failed, _ = found("Hub", "W&B")
    assert failed == Finding(
        "Hub", "cannot be examined: PermissionError: [Errno 13] Permission denied: '/nobody/.cache'", FAULT
    )


def test_a_home_that_nobody_can_write_to_is_a_fault_of_the_cache(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    (fault,) = found("disk, cache")
    assert fault.level == FAULT and fault.todo == "set HF_HOME to a different folder"


def test_faults_make_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "examine_machine", lambda folder: [Finding("disk", "full", FAULT, "empty it"), Finding("a", "b", OK)]
    )
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  FAULT  disk            full",
        f"{'':<25}-> empty it",
        "  ok     a               b",
        "This machine has 1 fault.",
    ]


@pytest.mark.parametrize("word", ("--help", "-h"))
def test_help_is_the_first_paragraph(capsys, word):
    assert main([word]) == 0
    assert "python -m hftune.doctor" in capsys.readouterr().out


def test_an_examination_outlives_the_reader_of_its_output(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        assert main(["--help"]) == 0
        sys.stdout.flush()
