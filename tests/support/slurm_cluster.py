"""A real SLURM of two nodes or more on one machine: each has a network, a host name and a slurmd of its own. CPUs only.

Needs root and the packages slurmctld, slurmd, slurm-client, munge, iproute2 (Debian's names). Everything lives in namespaces
that end with this process, so nothing has to be cleaned up, and several clusters do not see each other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")
NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--net", "--uts")
START_S = 30.0


class NotAllowed(RuntimeError):
    """This machine has no SLURM, or this user cannot make network namespaces."""


@dataclass(frozen=True)
class Cluster:
    """Runs SLURM's commands on the head of the cluster."""

    folder: Path
    """Of configuration, state and logs of the daemons."""
    pid: int
    """Of the first process in the cluster's namespaces, as this process sees it."""

    def run(self, *command: str | Path, folder: str | Path = "/", env: dict[str, str] | None = None) -> str:
        """Run a command on the head and return what it prints.

        Raises:
            RuntimeError: it failed.
            TimeoutExpired: it took a minute.
        """
        enter = ["nsenter", f"--target={self.pid}", "--all", "env", f"--chdir={folder}"]
        variables = {**(os.environ if env is None else env), "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=60, env=variables)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job, such as {"JobState": "RUNNING", "Restarts": "0", "ExitCode": "0:0"}."""
        return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def cut(self, node: int) -> None:
        """Pull the cable of a node: what runs on it goes on, and nobody hears of it."""
        self.run("ip", "link", "set", f"to{node}", "down")

    def mend(self, node: int) -> None:
        """Put the cable back."""
        self.run("ip", "link", "set", f"to{node}", "up")

    def power_off(self, node: int) -> None:
        """End all that runs on a node; nobody hears of it."""
        self.cut(node)
        script = """
            net=$(readlink "/proc/$(pgrep --oldest --full "slurmd -D -N node$1")/ns/net")
            for process in /proc/[0-9]*; do
                [[ $(readlink "$process/ns/net") != "$net" ]] || kill -KILL "${process#/proc/}"
            done
        """
        self.run("bash", "-c", script, "power_off", str(node))


@contextmanager
def slurm_cluster(num_nodes: int = 2) -> Iterator[Cluster]:
    """Yield a cluster whose nodes, at most 9, are idle.

    Raises:
        NotAllowed: saying why.
    """
    search = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=search) is None]:
        raise NotAllowed(f"needs a SLURM; not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise NotAllowed("needs root, to make two machines of one")
    folder = Path(tempfile.mkdtemp(prefix="hftune-slurm-"))  # not in pytest's: munged wants everybody to reach its socket
    folder.chmod(0o755)
    script = Path(__file__).with_suffix(".sh")
    with (folder / "start.log").open("w") as log:
        outer = subprocess.Popen(
            ["unshare", *NAMESPACES, "bash", script, folder, str(num_nodes)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": search},
        )
    try:
        yield _ready(outer, folder, num_nodes)
    finally:
        outer.stdin.close()  # the script ends with its input, and with it all that runs in its namespaces
        outer.wait(timeout=30)
        shutil.rmtree(folder)


def _ready(outer: subprocess.Popen, folder: Path, num_nodes: int) -> Cluster:
    until = time.monotonic() + START_S
    while time.monotonic() < until and outer.poll() is None:
        if children := psutil.Process(outer.pid).children():
            cluster = Cluster(folder, children[0].pid)
            try:
                if cluster.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == str(num_nodes):
                    return cluster
            except RuntimeError:
                pass  # nobody answers yet
        time.sleep(0.2)
    said = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in [folder / "start.log", *folder.glob("log/*")])
    if outer.poll() is not None and "Operation not" in said:  # permitted, or supported
        raise NotAllowed(f"may not make two machines of one: {said}")
    raise RuntimeError(f"SLURM does not start.\n{said}")
