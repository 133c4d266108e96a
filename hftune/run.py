"""``accelerate launch -m hftune.run recipe=<name> [section.key=value ...]``: from arguments to an exit code.

Exit codes: 0 training finished and everything was saved; 1 training failed; 2 the recipe or the data cannot be trained on;
75 a signal stopped training after a checkpoint, and the same command resumes it; 130 interrupted immediately.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune import __version__
from hftune.config.shipped_files import recipe_names
from hftune.distributed.failure_report import (
    GOT_SIGTERM,
    INTERRUPTED,
    PATIENCE_S,
    STOPPED,
    Report,
    exit_code,
    is_known,
    say_last,
)
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.process_info import ProcessInfo, check_environment
from hftune.distributed.progress import Progress
from hftune.distributed.rounds import REFUSED, has_trained, wait_for_agent
from hftune.distributed.signals import follow_launcher
from hftune.errors import TrainingError, did_you_mean
from hftune.tracking.console import print_any_character

if TYPE_CHECKING:
    from hftune.config import Recipe

HELP = f"""hftune {__version__}: fine-tune by recipe, on one process or many, with the same result.

  accelerate launch [--config_file F] -m hftune.run recipe=NAME [section.key=value ...]
  torchrun --nproc_per_node N         -m hftune.run recipe=NAME [section.key=value ...]
  python                              -m hftune.run recipe=NAME [section.key=value ...]
  hftune train [--processes N] recipe=NAME ...    the same, with N processes on this machine

  recipe=NAME        a shipped recipe: {", ".join(recipe_names())}
  recipe=PATH.yaml   your own recipe. `base: NAME` in it names the recipe that it extends: sections and mappings are merged.
                     `replace: [task.model_config]` discards the base's value of that key instead of merging it.

  task.*        model, dataset, columns                         task.max_length=256
  train.*       epochs, global batch_size, lr, schedule, ...    train.lr=3e-5 train.micro_batch_size=4
  eval.*        when to evaluate, which metric picks the best   eval.every=100 eval.metric=accuracy
  track.*       trackers: wandb, mlflow, tensorboard            track.with=[wandb]
  checkpoint.*  how often to save a checkpoint, how many to keep   checkpoint.every=200
  parallel.*    pipeline stages                                 parallel.pipeline_stages=2
  seed, output_dir, resume                                      output_dir=outputs/mine resume=never

--help SECTION, such as --help train or --help task, lists the keys of a section with their defaults.
Unknown keys are rejected, with the nearest valid name."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code. Every process of the job calls it."""
    follow_launcher()
    print_any_character()
    outlive_readers()
    faulthandler.enable(2)  # a crash in a library's native code shows where each thread was
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(help_text(argv[1:]))
        return 0 if argv else 2
    try:
        from hftune.config import Recipe

        recipe = Recipe.from_argv(argv)
        recipe.validate()
        train_valid(recipe)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 0


def train_valid(recipe: Recipe) -> None:
    """Train a recipe that has been validated; raises what ``train`` does."""
    check_environment()
    announce(recipe)
    from hftune.distributed.preflight import check_num_processes  # imports torch: only once the recipe is known to be valid

    check_num_processes()  # here, too: the rest takes twice as long to import
    from hftune.training import train

    train(recipe)


def announce(recipe: Recipe) -> None:
    """Print the first line, on the main process: importing the libraries takes seconds, or a minute on a cold disk."""
    info = ProcessInfo.from_environment()
    if info.is_main:
        processes = "1 process" if info.world_size == 1 else f"{info.world_size} processes"
        print(f"hftune {__version__}: recipe {recipe.recipe}, {processes}; loading libraries ...", flush=True)


class _OptionalOutput(io.FileIO):
    """A file descriptor that discards what is written after its reader has gone, and what a full disk has no room for."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # it may have room again
                return len(data)
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: of a terminal that was closed
                raise
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == 1:
                with suppress(OSError):
                    print("hftune: the reader of the output has exited; the run continues.", file=sys.stderr, flush=True)
            return len(data)


def outlive_readers() -> None:
    """Let this run continue if the reader of its output exits, as in ``hftune train ... | head``.

    Hours of training are worth more than their log, which is in metrics.jsonl, too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # a notebook's, a test's, or done already
            continue
        stream.flush()
        raw = _OptionalOutput(stream.fileno(), "w", closefd=False)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        buffer = raw if stream.write_through else io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, **options))


def help_text(sections: list[str]) -> str:
    """Return the help, or the keys of the sections named after ``--help``."""
    if not sections:
        return HELP
    from hftune.config.reference import section_text

    known = ("task", "train", "eval", "checkpoint", "parallel", "track")
    return "\n\n".join(
        section_text(name) or f"{name} is not a section. Sections: {', '.join(known)}.{did_you_mean(name, known)}"
        for name in sections
    )


def fail(error: BaseException) -> int:
    """Report an error here and to the launcher, once per node. Return the exit code."""
    if not hasattr(error, "report") and ProcessInfo.from_environment().num_nodes > 1:
        # It occurred before training, which attaches a report. Processes on other nodes may be ahead of this one, and waiting.
        with suppress(type(error), TrainingError), Heartbeat(Progress(), dead_after_s=60, stall_after_s=None):
            raise error
    report = getattr(error, "report", None)
    if report is None:
        is_first = ProcessInfo.from_environment().local_rank == 0
        text = f"hftune: {error}" if is_known(error) else traceback.format_exc().rstrip()
        kind = type(error).__name__
        report = Report(text, exit_code(error), is_printed_here=is_first or not is_known(error), kind=kind)
    if report.is_printed_here:
        say_last(report.text, report.kind)
    elif report.code not in (INTERRUPTED, STOPPED) and ProcessInfo.from_environment().world_size > 1:
        # After these two every process ends by itself, and `hftune train --processes` has waited for the one that reports.
        GOT_SIGTERM.wait(PATIENCE_S)  # a launcher ends all processes as soon as one ends; that should be the one that reports
    if report.code == REFUSED and has_trained() and wait_for_agent(GOT_SIGTERM.is_set) is not None:
        GOT_SIGTERM.wait(PATIENCE_S)  # the newcomer has left, and the agent ends this process for the round without it
    return report.code


def leave(code: int) -> None:
    """Exit. After a failure among several processes, skip the interpreter's shutdown: their group may hang in it."""
    if code and ProcessInfo.from_environment().world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
