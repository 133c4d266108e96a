"""Starts real training runs on 1, 2 or 4 processes and reads what they wrote."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from tests.support.warm import Fork

TINY = (
    "task.model_config={model_type: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
    "hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, initializer_range: 0.2}",  # ten times BERT's, so that every sample has a loss of its own and no mistake can hide
    "task.vocab_size=300",
    "task.max_length=64",
)
"""A model whose step takes milliseconds."""
DATA = ("task.max_train_samples=100", "task.max_eval_samples=37")
SMALL = (
    *TINY,
    *DATA,
    "train.batch_size=16",
    "train.log_every=1",
    "train.lr=5e-5",
    "train.micro_batch_tokens=null",
    "train.parts=4",
)
"""100 samples in batches of 16: six whole steps and a last one of 4, an epoch. The learning rate is that of yelp."""
NO_DROPOUT = ("task.model_config.hidden_dropout_prob=0.0", "task.model_config.attention_probs_dropout_prob=0.0")
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""What ``accelerate launch --config_file accelerate_configs/fsdp.yaml`` puts into the environment, as far as it matters."""

QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Java for Spark's processes, which live for seconds here: they never gain what the second compiler and the collector's threads cost."""

TIMEOUT_S = 540.0
NATIVE_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
"""One in some ten thousand forks died of glibc's "double free or corruption" in the midst of saving, which could not be repeated."""


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as a jsonl file."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def recipe_for_rows(
    recipe: str, folder: Path, *rows: Mapping[str, Any], words: Iterable[str] = (), name: str = "rows.jsonl"
) -> Any:
    """Return a Recipe that trains on rows, which are written into a file, and evaluates nothing."""
    from hftune import Recipe  # pytest's first process imports this module, and not hftune

    files = ("task.dataset=null", f"task.data_files.train={write_jsonl(folder / name, rows)}")
    return Recipe.load(recipe, *files, "eval.every=never", "eval.metric=loss", f"output_dir={folder}/out", *words)


def three_files(folder: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[Path, Path, Path]:
    """Write a file of all rows, one of the first three quarters, and one of the rest."""
    parts = {"all": rows, "many": rows[: 3 * len(rows) // 4], "few": rows[3 * len(rows) // 4 :]}
    whole, many, few = (write_jsonl(folder / f"{name}.jsonl", own) for name, own in parts.items())
    return whole, many, few


@dataclass
class Run:
    """The output folder of a finished run."""

    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    def logged(self, name: str) -> list[float]:
        """All values of one metric, in the order of the steps."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line[name] for line in lines if name in line]

    def weighed(self, rank: int) -> dict[str, int]:
        """Bytes of weights, gradient and moments that a process of train_on had after a step."""
        return json.loads(self.folder.with_name(f"{self.folder.name}-bytes-{rank}.json").read_text())

    @property
    def has_copied(self) -> bool:
        """Whether a process of train_on has gathered a whole copy on every process, under FSDP."""
        return self.folder.with_name(f"{self.folder.name}-copied").exists()

    @property
    def predictions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "predictions.jsonl").read_text().splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: CPU only, one thread, found from the checkout."""
    root = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **extra}


def started(*command: str | Path, **variables: str) -> subprocess.Popen:
    """Start a command in a session of its own; ``all_ended`` waits for it."""
    env = environment(TORCH_CPP_LOG_LEVEL="ERROR", **variables)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)


def all_ended(*processes: subprocess.Popen, timeout_s: float = 150.0) -> list[tuple[int, str, str]]:
    """Wait for all; return exit code, output and errors of each. If one hangs, all are killed.

    Raises:
        AssertionError: one hangs.
    """
    ended, until = [], time.monotonic() + timeout_s
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(until - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            for other in processes:
                with suppress(ProcessLookupError):
                    os.killpg(other.pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {process.communicate()}") from None
        ended.append((process.returncode, out, err))
    return ended


def train_on(
    world_size: int,
    jobs: dict[str, tuple[str, ...]],
    folder: Path,
    recipe: str = "yelp_demo",
    stops: dict[str, tuple[int, int]] | None = None,
    sharded: Collection[str] = (),
    variables: Mapping[str, str] | None = None,
    group: type[Group] | None = None,
) -> dict[str, Run]:
    """Train a recipe once for each named set of overrides, all in one group of ``world_size`` processes.

    Overrides may name their own output_dir and recipe. ``stops``: (optimizer steps taken, rank) after which a job gets SIGTERM;
    it is checked that this interrupts it, and that a later job with its output_dir resumes.
    ``sharded``: the jobs that train under FSDP. ``variables``: as for Group; ``group``: a subclass of it. If a process crashes in native code, all is trained
    once more, and a warning shows the stacks.
    """

    def given(name: str, key: str, default: Any) -> Any:
        return ([word.split("=", 1)[1] for word in jobs[name] if word.startswith(f"{key}=")] or [default])[-1]

    folders = {name: Path(given(name, "output_dir", folder / f"{name}-on-{world_size}")) for name in jobs}
    listed = [
        [
            given(name, "recipe", recipe),
            [*(word for word in overrides if not word.startswith("recipe=")), f"output_dir={folders[name]}"],
            (stops or {}).get(name),
            FSDP if name in sharded else {},
        ]
        for name, overrides in jobs.items()
    ]
    log = folder / f"{Path(recipe).stem}-{world_size}.log"
    are_new = not any(path.exists() for path in folders.values())
    group = group or Group
    codes = group(world_size, listed, log, variables).wait()
    if are_new and not NATIVE_CRASHES.isdisjoint(codes):
        warnings.warn(f"A process crashed; the jobs are trained again.\n{log.read_text()}", stacklevel=2)
        for path in folders.values():
            shutil.rmtree(path, ignore_errors=True)
        codes = group(world_size, listed, log, variables).wait()
    assert not any(codes), f"{codes}\n{log.read_text()}"
    for path in {folders[name] for name in stops or {} if name in jobs}:
        assert_resumed(path, [name for name in jobs if folders[name] == path], stops or {})
    return {name: Run(path) for name, path in folders.items()}


def assert_resumed(folder: Path, jobs: list[str], stops: Collection[str]) -> None:
    """Check that a folder was trained by all of its jobs, each from where the one before was stopped, and ended only if none was."""
    from hftune.replay.audit import audit  # as above

    starts = [start["after_step"] for start in audit(folder).starts][-len(jobs) :]
    assert len(starts) == len(jobs) and all(starts[1:]), f"{folder} was trained from steps {starts} by {jobs}"
    assert (folder / "result.json").exists() == (jobs[-1] not in stops), folder


class Group:
    """Processes that do these jobs, each of them what tests/support/worker.py does. What they say goes into ``log``.

    One group at a time: whichever a failed test has left behind is killed.

    Args:
        errors: the file for standard error; by default ``log``.
        variables: environment from the interpreter's start on, as libraries read it when they are imported.
        as_typed: each job is what ``python -m hftune.run`` does, down to its last words and its exit code.
    """

    running: ClassVar[list[Group]] = []
    program: ClassVar[str] = "tests.support.worker"

    def __init__(
        self,
        world_size: int,
        jobs: list[Any],
        log: Path,
        variables: Mapping[str, str] | None = None,
        as_typed: bool = False,
        errors: Path | None = None,
    ):
        python = warm_python(tuple(sorted((variables or {}).items())))
        variables = dict(variables or {})
        if world_size > 1:
            from torch.distributed import TCPStore  # not at the top: xdist's controller imports this module and needs no torch

            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            variables |= group_variables(world_size, self.store.port)
        while Group.running:
            Group.running[0].kill()
        self._forks: list[Fork] = []
        Group.running.append(self)
        # Once a process has failed, the others end by themselves; or, as typed, a launcher would end them.
        self._last_words_s = 1.0 if as_typed else 10.0
        words = ["-m", self.program, json.dumps({"jobs": jobs, "as_typed": as_typed})]
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {} for rank in range(world_size)]
        for rank in ranks:
            self._forks.append(Fork(python, words, environment(**variables, **rank), log, errors or log))

    @property
    def pids(self) -> list[int]:
        return [fork.pid for fork in self._forks]

    def wait(self) -> list[int]:
        """Return the exit code of each process; where one fails or nobody comes to an end, the others are killed."""
        until = time.monotonic() + TIMEOUT_S
        while self.poll() is None:
            left = [fork for fork in self._forks if fork.code is None]
            if any(fork.code for fork in self._forks):
                until = min(until, time.monotonic() + self._last_words_s)
            if time.monotonic() > until:
                kill_all(left)
            left[0].poll(0.02)
        return self.poll()

    def kill(self) -> None:
        """Kill what still runs, and wait for the end."""
        kill_all(self._forks)
        self.wait()

    def poll(self) -> list[int] | None:
        """Return the exit codes; None where there are none yet."""
        codes = [fork.poll() for fork in self._forks]
        if None in codes:
            return None
        if self in Group.running:
            Group.running.remove(self)
        return codes


def kill_all(forks: Iterable[Fork]) -> None:
    for fork in forks:
        if fork.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)


class Command(Group):
    """What ``python -m MODULE WORDS`` does, or torchrun with several processes, in forks of the warm interpreter; like a Popen.

    Args:
        module: hftune.run, hftune.cli or hftune.doctor.
        variables: more of the environment, known only when everything has been imported.
    """

    def __init__(self, world_size: int, *words: str, module: str = "hftune.run", **variables: str):
        folder = Path(tempfile.mkdtemp(dir=os.environ["HF_DATASETS_CACHE"]))  # which tests/conftest.py removes
        self._out, self._err = folder / "out", folder / "err"
        super().__init__(world_size, [[module, words, None, variables]], self._out, as_typed=True, errors=self._err)

    @property
    def returncode(self) -> int:
        """0 if all processes ended well, otherwise the code of one that failed by itself: those that are killed then count last."""
        return max(self.wait(), key=lambda code: (code > 0, code < 0))

    def send_signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return what was printed, and the errors."""
        self.wait()
        return self._out.read_text(), self._err.read_text()


def group_variables(world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for all processes of a group on this machine whose agent's store is at this port."""
    count = str(world_size)
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **{"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid4().hex,
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
    }


def warm_python(variables: tuple[tuple[str, str], ...] = ()) -> str:
    """Return a program that does what sys.executable does, and has imported everything; commands are beside it.

    See tests/support/warm.py. Under xdist there is one for all of its processes, themselves forks of it: see tests/conftest.py.

    Args:
        variables: environment from the interpreter's start on.
    """
    shared = None if variables else os.environ.get("TESTS_WARM_PYTHON")
    return shared or start_worker(variables).executable


class Worker(subprocess.Popen):
    """The interpreter that processes are forks of."""

    @cached_property
    def executable(self) -> str:
        """Its program, once it has imported everything."""
        return self.stdout.readline().decode().strip()


@cache
def start_worker(variables: tuple[tuple[str, str], ...]) -> Worker:
    """Start the one interpreter with these variables; it ends with the tests."""
    worker = Worker(
        [sys.executable, "-m", "tests.support.worker", tempfile.mkdtemp(dir=os.environ["HF_DATASETS_CACHE"])],
        cwd=Path(__file__).parents[2],
        env=environment(TORCH_CPP_LOG_LEVEL="ERROR", **dict(variables)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(worker.communicate)
    return worker
