"""``accelerate launch -m hftune.run recipe=<name> [section.key=value ...]``: from arguments to an exit code.

Exit codes: 0 all done and saved; 2 the recipe or the data cannot be trained on; 1 training failed; 75 a signal stopped it after
a checkpoint, and the same command goes on; 130 interrupted at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from hftune import __version__
from hftune.config.shipped_files import recipe_names
from hftune.distributed.heartbeat import INTERRUPTED, PATIENCE_S, STOPPED, Heartbeat, Report, exit_code, is_known, say_last
from hftune.distributed.preflight import check_environment, number
from hftune.distributed.progress import Progress
from hftune.errors import TrainingError
from hftune.tracking.console import print_any_character

if TYPE_CHECKING:
    from hftune.config import Recipe

HELP = f"""hftune {__version__}: fine-tune by recipe, on one process or many, with the same result.

  accelerate launch [--config_file F] -m hftune.run recipe=NAME [section.key=value ...]
  torchrun --nproc_per_node N         -m hftune.run recipe=NAME [section.key=value ...]
  python                              -m hftune.run recipe=NAME [section.key=value ...]
  hftune train [--processes N] recipe=NAME ...    the same; N processes of this machine

  recipe=NAME        a shipped recipe: {", ".join(recipe_names())}
  recipe=PATH.yaml   your own; `base: NAME` in it builds on another one, whose sections and mappings are merged with it;
                     `replace: [task.model_config]` takes over nothing of that key

  task.*    what is learned: model, dataset, columns        task.max_length=256
  train.*   epochs, batch_size (global), lr, schedule, ...  train.lr=3e-5 train.micro_batch_size=4
  eval.*    when to evaluate, which metric picks the best   eval.every=100 eval.metric=accuracy
  track.*   dashboards                                      track.with=[wandb]
  checkpoint.*  how often to save what a run goes on from   checkpoint.every=200
  parallel.*  pipeline stages                               parallel.pipeline_stages=2
  seed, output_dir, resume                                  output_dir=outputs/mine resume=never

--help train (task, eval, checkpoint, parallel, track) lists the keys of a section with their defaults.
A key that does not exist is refused with the nearest one that does."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code. Every process of the job calls it."""
    print_any_character()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(help_text(argv[1:]))
        return 0 if argv else 2
    try:
        from hftune.config import Recipe

        recipe = Recipe.from_argv(argv)
        recipe.validate()
        check_environment()
        say_start(recipe)
        from hftune.training import train  # only now: a mistyped key should not wait for torch

        train(recipe)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 0


def say_start(recipe: Recipe) -> None:
    """Print the first line, on the main process: importing the libraries takes seconds, on a cold disk a minute."""
    if os.environ.get("RANK", "0") == "0":
        count = os.environ.get("WORLD_SIZE") or "1"
        processes = "1 process" if count == "1" else f"{count} processes"
        print(f"hftune {__version__}: recipe {recipe.recipe}, {processes}; loading libraries ...", flush=True)


def help_text(sections: list[str]) -> str:
    """Return the help, or the keys of the sections named after ``--help``."""
    if not sections:
        return HELP
    from hftune.config.reference import section_text

    return "\n\n".join(
        section_text(name) or f"{name} is not a section: task, train, eval, checkpoint, parallel, track." for name in sections
    )


def fail(error: BaseException) -> int:
    """Say what went wrong, here and in the launcher's own last words, once on each machine; return the exit code."""
    if not hasattr(error, "report") and number("GROUP_WORLD_SIZE") > 1:
        # From before training, which gives one to the errors that leave it. Other machines may have come further, and wait.
        with suppress(type(error), TrainingError), Heartbeat(Progress(), dead_after_s=60, stall_after_s=None):
            raise error
    report = getattr(error, "report", None)
    if report is None:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        text = f"hftune: {error}" if is_known(error) else traceback.format_exc().rstrip()
        kind = type(error).__name__
        report = Report(text, exit_code(error), is_spoken_here=is_first or not is_known(error), kind=kind)
    if report.is_spoken_here:
        say_last(report.text, report.kind)
    elif report.code not in (INTERRUPTED, STOPPED):  # which end all by themselves
        time.sleep(PATIENCE_S)  # a launcher ends the whole group as soon as any process ends: the one that speaks
    return report.code


def leave(code: int) -> None:
    """Exit; at once where many processes failed, as their broken group may hang or abort at the interpreter's own end."""
    if code and number("WORLD_SIZE") > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
