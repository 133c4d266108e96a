"""A launch that starts other processes than it was asked for is refused; the launch configurations start what they say."""

import re
import socket
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from hftune.distributed.preflight import launch_options
from tests.support.runs import Run, all_ended, started, warm_python

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
FAULTY = f"recipe={ROOT}/tests/support/faulty.yaml"


def start(*options, folder, python=sys.executable):
    """Start `accelerate launch` with these options; return the process, whose output is one stream."""
    launch = (Path(python).with_name("accelerate"), "launch", *options)
    return started(*launch, "-m", "hftune.run", FAULTY, f"output_dir={folder}")


def end(job):
    """Return exit code and output; a job that hangs is killed, and fails the test."""
    ((code, out, err),) = all_ended(job)
    return code, out + err


def refusals(said):
    return [line for line in said.splitlines() if line.startswith("hftune:")]


def test_launch_that_starts_one_process_for_two_is_refused(tmp_path):
    """Options on the launcher's command line, such as --cpu --num_processes 2, are read below."""
    (tmp_path / "multi_cpu.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n")
    code, said = end(start("--config_file", str(tmp_path / "multi_cpu.yaml"), folder=tmp_path / "out"))
    assert code != 0
    assert refusals(said) == [
        "hftune: accelerate launch was asked for 2 processes and started only one: with --cpu, without --multi_gpu, or "
        "with distributed_type NO or MULTI_CPU it does so whatever num_processes says. Use --config_file "
        "accelerate_configs/2cpu.yaml --num_processes 2, or torchrun --nproc_per_node 2."
    ]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_processes_that_do_not_divide_among_the_machines_are_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    options = ["--multi_gpu", "--num_machines", "2", "--num_processes", "3", "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(port), "--machine_rank"]
    for job in [start(*options, rank, folder=tmp_path / "out") for rank in "01"]:
        code, said = end(job)
        assert code != 0
        assert [line for line in refusals(said) if "This launcher has started no process for" not in line] == [
            "hftune: accelerate launch was asked for 3 processes and started 2: num_processes counts those of all machines, "
            "and has to be a multiple of num_machines."
        ]


def test_one_process_config_starts_one(tmp_path):
    """What 2cpu.yaml starts is told by test_routes.py."""
    code, said = end(
        start("--config_file", f"{ROOT}/accelerate_configs/cpu.yaml", folder=tmp_path / "out", python=warm_python())
    )
    assert code == 0, said
    assert Run(tmp_path / "out").result["world_size"] == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_launch_configuration_is_one_of_accelerates_and_says_first_what_it_is_for(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig) and config.num_processes >= config.num_machines >= 1
    assert re.fullmatch(r"# [A-Z].*\.", path.read_text().splitlines()[0])


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("python /bin/accelerate launch --cpu --num_processes 2 script.py", 2),
        ("python /bin/accelerate launch --num-processes=3 -m hftune.run x=1 --num_processes 9", 3),
        ("python -m accelerate.commands.launch --num_processes 2 script.py", 2),
        ("python -u -m accelerate.commands.accelerate_cli launch --num_processes 2 script.py", 2),
        ("python /bin/accelerate-launch --config_file accelerate_configs/4gpu.yaml script.py", 4),
        ("python /bin/accelerate-launch --config_file accelerate_configs/4gpu.yaml --num_processes 2 script.py", 2),
        ("python /bin/accelerate launch --cpu script.py", None),
        ("python /bin/accelerate config", None),
        ("python -m torch.distributed.run --nproc_per_node 2 -m hftune.run", None),
        ("bash", None),
        ("", None),
    ],
)
def test_number_of_processes_is_read_from_the_launchers_command_line(command, asked, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = launch_options(command.split())
    assert (options.num_processes or None if options else None) == asked
