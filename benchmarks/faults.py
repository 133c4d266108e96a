"""Break a job of two machines in every way that we know, and see what each machine says, and how soon both have ended.

    python benchmarks/faults.py [NAME ...] [--bound 15]

Two network namespaces with host names of their own, accelerate launch with 2node.yaml in each, one process a machine. --bound:
seconds to wait for a machine that does not come (HFTUNE_JOIN_TIMEOUT_S), and after which a silent process counts as dead
(train.dead_after_s). "seconds": from the fault (or the start, where it is there from the start) to the end of the last
launcher. A fault is "named" where a line of each machine that was started matches what it should say.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from record import parse_options, print_table, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.machines import Machine, NotAllowed, two_machines  # noqa: E402

SIZES = "{model_type: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64}"
TINY = (f"task.model_config={SIZES}", "task.vocab_size=300", "task.max_length=64", "train.batch_size=16", "train.log_every=1")
WORDS = (
    *("recipe=yelp_demo", *TINY, "task.max_train_samples=320", "task.max_eval_samples=32"),
    "train.epochs=200",
    "eval.every=2000",
)
WAIT_S = 120.0


@dataclass
class Setting:
    """What one machine is given: words of the launcher, words of the recipe, variables, a folder to start in."""

    launcher: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    is_started: bool = True


@dataclass
class Job:
    """A running job, as the injected fault finds it."""

    machines: list[Machine]
    processes: list[subprocess.Popen | None]
    output_dir: Path

    def kill(self, place: int, launcher_too: bool) -> None:
        """SIGKILL the training process of a machine, or all of its processes at once."""
        import psutil

        root = psutil.Process(self.processes[place].pid)
        family = [root, *root.children(recursive=True)]
        for process in family if launcher_too else family[-1:]:
            process.kill()


@dataclass
class Fault:
    """A way to break it. ``says``: what each started machine must say, as a regular expression."""

    name: str
    says: str
    prepare: Callable[[list[Setting], Path], None] = lambda settings, folder: None
    strike: Callable[[Job], None] | None = None
    """Called once training has logged three steps."""
    also: Callable[[Machine], subprocess.Popen] | None = None
    """What runs on the main machine beside it."""


def missing(place: int) -> Callable:
    def prepare(settings: list[Setting], folder: Path) -> None:
        settings[place].is_started = False

    return prepare


def launcher(*words: str, places: tuple[int, ...] = (0, 1)) -> Callable:
    def prepare(settings: list[Setting], folder: Path) -> None:
        for place in places:
            settings[place].launcher += words

    return prepare


def words(*given: str, places: tuple[int, ...] = (0, 1)) -> Callable:
    def prepare(settings: list[Setting], folder: Path) -> None:
        for place in places:
            settings[place].words += [word.format(folder=folder) for word in given]

    return prepare


def variable(name: str, value: str) -> Callable:
    def prepare(settings: list[Setting], folder: Path) -> None:
        settings[1].variables[name] = value

    return prepare


def other_code(settings: list[Setting], folder: Path) -> None:
    shutil.copytree(ROOT / "hftune", folder / "hftune", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / "hftune" / name)
    with (folder / "hftune" / "loop.py").open("a") as file:
        file.write("\n# edited on this machine only\n")
    settings[1].variables["PYTHONPATH"], settings[1].folder = str(folder), folder


def other_version(settings: list[Setting], folder: Path) -> None:
    info = folder / "transformers-5.22.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.22.0\n")
    settings[1].variables["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"


def other_data(settings: list[Setting], folder: Path) -> None:
    for setting, name in zip(settings, "AB", strict=True):
        setting.folder = folder / name
        setting.folder.mkdir()
        for part in ("train", "eval"):
            rows = [f'{{"text": "review {place} of {part}", "label": {place % 5}}}' for place in range(40)]
            if (part, name) == ("train", "B"):
                rows[7] = rows[7].replace("review", "preview")
            (setting.folder / f"{part}.jsonl").write_text("\n".join(rows))
    words("task.dataset=json", "task.data_files.train=train.jsonl", "task.data_files.eval=eval.jsonl")(settings, folder)


def full_disk(settings: list[Setting], folder: Path) -> None:
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small], check=True)
    settings[0].words += [f"output_dir={small / 'out'}", "eval.every=3"]
    settings[1].words += [f"output_dir={small / 'out'}", "eval.every=3"]


def listener(machine: Machine) -> subprocess.Popen:
    script = "import socket, time; s = socket.create_server(('', 29500)); c = s.accept(); time.sleep(600)"
    return subprocess.Popen([*machine.prefix, sys.executable, "-c", script])


FAULTS = (
    Fault("machine B missing", r"1 of 2 machines is here: machineA .* 1 more must be started", missing(1)),
    Fault("machine A missing", r"Nothing answers at 10\.77\.0\.1:29500 \(.*\); this machine is machineB", missing(0)),
    Fault(
        "other port on B",
        r"1 of 2 machines is here|Nothing answers at 10\.77\.0\.1:29501",
        launcher("--main_process_port", "29501", places=(1,)),
    ),
    Fault("port taken on A", r"[Pp]ort .?29500.* (taken by another program|another process is utilizing it)", also=listener),
    Fault("wrong address", r"Nothing answers at 10\.77\.0\.9:29500", launcher("--main_process_ip", "10.77.0.9")),
    Fault("address in no network", r"This machine has no route to 10\.88\.0\.1", launcher("--main_process_ip", "10.88.0.1")),
    Fault("unknown name", r"'nodeX' does not resolve to an address", launcher("--main_process_ip", "nodeX")),
    Fault(
        "other number of machines",
        r"was started for 3 machines, and machineA .* for 2",
        launcher("--num_machines", "3", "--num_processes", "3", places=(1,)),
    ),
    Fault("other code on B", r"Process 1 on machineB has another code: hftune/loop\.py\.", other_code),
    Fault("other version on B", r"has another version: transformers 5\.22\.0 instead of 5\.", other_version),
    Fault("other data on B", r"has another data set: train data", other_data),
    Fault("other recipe on B", r"has another recipe: train\.lr 0\.1 instead of", words("train.lr=0.1", places=(1,))),
    Fault("unknown key", r"train\.speed is not a key", words("train.speed=1")),
    Fault("GPU asked for on B", r"CUDA_VISIBLE_DEVICES=0 asks for GPUs", variable("CUDA_VISIBLE_DEVICES", "0")),
    Fault(
        "no such interface on B",
        r"GLOO_SOCKET_IFNAME=eth7: this machine has no such interface",
        variable("GLOO_SOCKET_IFNAME", "eth7"),
    ),
    Fault("output folder cannot be written", r"output_dir=/proc/out cannot be written", words("output_dir=/proc/out")),
    Fault("disk full in the run", r"No space left on device", full_disk),
    Fault("link cut in the run", r"no sign of life|does not answer", strike=lambda job: job.machines[1].cut()),
    Fault(
        "process killed on B",
        r"Process 1 \(host machineB, pid \d+\) (has given no sign of life|exited unexpectedly)|SIGKILL",
        strike=lambda job: job.kill(1, False),
    ),
    Fault(
        "machine B dies",
        r"Process 1 \(host machineB, pid \d+\) has given no sign of life",
        strike=lambda job: job.kill(1, True),
    ),
    Fault("machine A dies", r"launcher's store at 10\.77\.0\.1:29500 does not answer", strike=lambda job: job.kill(0, True)),
)


def main() -> int:
    options, rows = parse(), []
    for fault in FAULTS:
        if options.names and fault.name not in options.names:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, two_machines() as machines:
                row = break_job(fault, machines, Path(folder), options.bound)
        except NotAllowed as error:
            print(f"benchmarks/faults.py {error}.", file=sys.stderr)
            return 2
        rows.append(row)
        print(*row, sep="  ", flush=True)
    header = ("fault", "seconds", "codes", "named", "last words")
    table = print_table(f"{len(rows)} faults on two machines, bound {options.bound:g} s", header, rows)
    named = sum(row[3] == "yes" for row in rows)
    what = f"a job of two machines, broken in {len(rows)} ways"
    slowest = max(int(row[1]) for row in rows)
    figure = f"{named} named, with an exit code that is not 0; at most {slowest} s with bounds of {options.bound:g} s"
    save(__file__, options, [table], {what: figure})
    return 0 if named == len(rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of faults; all by default")
    parser.add_argument("--bound", type=float, default=15.0)
    options = parse_options(parser, smoke={"names": ["unknown key"]})
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}. Choose from: {', '.join(fault.name for fault in FAULTS)}")
    return options


def break_job(fault: Fault, machines: list[Machine], folder: Path, bound_s: float) -> tuple:
    settings = [Setting(), Setting()]
    fault.prepare(settings, folder)
    beside = fault.also(machines[0]) if fault.also else None
    time.sleep(1.0 if beside else 0.0)
    began, logs = time.monotonic(), [folder / f"{machine.name}.log" for machine in machines]
    processes = [
        start(machine, setting, folder / "out", log, bound_s) if setting.is_started else None
        for machine, setting, log in zip(machines, settings, logs, strict=True)
    ]
    try:
        if fault.strike is not None:
            wait_for_steps(folder / "out" / "metrics.jsonl", processes)
            began = time.monotonic()
            fault.strike(Job(machines, processes, folder / "out"))
        ends = [0.0] * 2

        def watch(place: int) -> None:
            processes[place].wait(WAIT_S)
            ends[place] = time.monotonic() - began

        threads = [Thread(target=watch, args=[place]) for place, process in enumerate(processes) if process]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for process in [*processes, beside]:
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL) if process is not beside else process.kill()
        subprocess.run(["umount", folder / "small"], capture_output=True)
    codes = [process.returncode for process in processes if process]
    texts = [log.read_text() for log, process in zip(logs, processes, strict=True) if process]
    survivors = [text for text, code in zip(texts, codes, strict=True) if code != -signal.SIGKILL]
    named = all(re.search(fault.says, text) for text in survivors) and 0 not in codes
    if not named:
        print(*texts, sep="\n---\n", file=sys.stderr)
    return fault.name, f"{max(ends):.0f}", "/".join(map(str, codes)), "yes" if named else "NO", last_words(survivors[0])


def start(machine: Machine, setting: Setting, output_dir: Path, log: Path, bound_s: float) -> subprocess.Popen:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HFTUNE_JOIN_TIMEOUT_S": f"{bound_s:g}",
        **setting.variables,
    }
    config = ["--config_file", str(ROOT / "accelerate_configs" / "2node.yaml"), "--num_processes", "2"]
    bounds = ["resume=never", f"output_dir={output_dir}", f"train.dead_after_s={bound_s:g}"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *config, *setting.launcher, "-m", "hftune.run"]
    with log.open("w") as file:
        return subprocess.Popen(
            [*machine.prefix, *command, *WORDS, *bounds, *setting.words],
            env=environment,
            cwd=setting.folder or ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def wait_for_steps(path: Path, processes: list[subprocess.Popen | None]) -> None:
    until = time.monotonic() + WAIT_S
    while not (path.is_file() and len(path.read_text().splitlines()) >= 3):
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            sys.exit("Training did not begin.")
        time.sleep(0.1)


def last_words(text: str) -> str:
    """Return hftune's own last line, shortened."""
    said = [line.strip() for line in text.splitlines() if "hftune: " in line]
    return said[-1][said[-1].index("hftune: ") + 8 :][:110] if said else "(nothing)"


if __name__ == "__main__":
    sys.exit(main())
