"""``accelerate launch -m hftune.run recipe=<name> [section.key=value ...]``: from arguments to an exit code.

Exit codes: 0 all done and saved; 2 the recipe or the data cannot be trained on; 1 training failed; 75 a signal stopped it after
a checkpoint, and the same command goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from hftune import __version__
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError
from hftune.resources import recipe_names

HELP = f"""hftune {__version__}: fine-tune by recipe, on one process or many, with the same result.

  accelerate launch [--config_file F] -m hftune.run recipe=NAME [section.key=value ...]
  torchrun --nproc_per_node N         -m hftune.run recipe=NAME [section.key=value ...]
  python                              -m hftune.run recipe=NAME [section.key=value ...]

  recipe=NAME        a shipped recipe: {", ".join(recipe_names())}
  recipe=PATH.yaml   your own; `base: NAME` in it builds on another

  task.*    what is learned: model, dataset, columns        task.max_length=256
  train.*   epochs, batch_size (global), lr, schedule, ...  train.lr=3e-5 train.micro_batch_size=4
  eval.*    when to evaluate, which metric picks the best   eval.every=100 eval.metric=accuracy
  track.*   dashboards                                      track.with=[wandb]
  checkpoint.*  how often to save what a run goes on from   checkpoint.every=200
  seed, output_dir, resume                                  output_dir=outputs/mine resume=never

--help train (task, eval, checkpoint, track) lists the keys of a section with their defaults.
A key that does not exist is refused with the nearest one that does."""

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later

# What a healthy process says when another one has died: its connection is gone.
SECOND_HAND = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "ncclRemoteError", "gloo")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code. Every process of the job calls it."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(help_text(argv[1:]))
        return 0 if argv else 2
    try:
        from hftune.config import Recipe

        recipe = Recipe.from_argv(argv)
        recipe.check()
        from hftune.training import train  # only now: a mistyped key should not wait for torch

        train(recipe)
    except (ConfigError, DataError) as error:
        # All processes meet the same error, and one a machine says it. The others leave the first one the time to speak:
        # a launcher ends the whole group as soon as any process ends.
        return fail(error, code=2, patience_s=0 if local_rank() == 0 else 10)
    except Interrupted as error:
        if local_rank() == 0:
            print(f"hftune: {error}", file=sys.stderr, flush=True)
        return STOPPED
    except KeyboardInterrupt:
        if local_rank() == 0:
            print("hftune: interrupted. What was saved before is whole.", file=sys.stderr, flush=True)
        return 130
    except TrainingError as error:
        return fail(error, code=1, patience_s=0 if local_rank() == 0 else 10)
    except Exception as error:
        second_hand = any(sign in str(error) for sign in SECOND_HAND)
        return fail(error, code=1, patience_s=10 if second_hand else 0, details=traceback.format_exc())
    return 0


def help_text(sections: list[str]) -> str:
    """Return the help, or the keys of the sections named after ``--help``."""
    if not sections:
        return HELP
    from hftune.reference import section_text

    return "\n\n".join(
        section_text(name) or f"{name} is not a section: task, train, eval, checkpoint, track." for name in sections
    )


def fail(error: Exception, code: int, patience_s: float, details: str | None = None) -> int:
    """Say what went wrong, here and in the launcher's own last words; wait first where another process should speak."""
    if patience_s and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        time.sleep(patience_s)  # a launcher ends this process meanwhile
    rank = f"[process {os.environ['RANK']}] " if details and "RANK" in os.environ else ""
    text = f"{rank}{details.rstrip()}" if details else f"hftune: {error}"
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints it below its own table of failures
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": int(time.time())}}}))
    return code


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


if __name__ == "__main__":
    sys.exit(main())
