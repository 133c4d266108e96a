"""``hftune bisect-step``: compute one past step again and say whether its loss is still what it was, for ``git bisect run``.

The exit codes are git's: 0 the loss is as expected; 1 it is not; 125 it cannot be computed with this revision, which is
skipped; 128 the command cannot be run as given, so the search ends.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hftune.commands.arguments import add_trust_code, check_at_least_1, check_single
from hftune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hftune.replay.engine import ReplayedStep
    from hftune.replay.history import History

GOOD, BAD, SKIPPED, STOP = 0, 1, 125, 128
"""Exit codes, as ``git bisect run`` reads them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="output folder of a run, such as outputs/yelp")
    parser.add_argument("--step", type=int, required=True, help="step to compute again, counted from 1")
    parser.add_argument(
        "--tolerance", type=float, default=2e-6, help="relative difference that counts as equal (default: %(default)s)"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys that differ in this step", dest="keys")
    parser.add_argument("--data", nargs="+", default=[], metavar="PLACE", help="where the data are now, as for hftune replay")
    add_trust_code(parser)
    parser.error = partial(refuse, parser)  # type: ignore[method-assign]


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Exit as argparse does, but for its code: git would read 2 as bad, of every revision."""
    parser.print_usage(sys.stderr)
    parser.exit(STOP, f"{parser.prog}: error: {message}\n")


def run(options: argparse.Namespace) -> int:
    """Print the step's loss beside the expected one, and return the exit code that git reads."""
    sys.dont_write_bytecode = True  # which would pass for that of the next revision, if checked out within the same second
    try:
        history = check(options)
    except (ConfigError, OSError) as error:
        print(f"hftune: {error}", file=sys.stderr)
        return STOP
    try:
        step = compute(history, options)
    except (Exception, SystemExit) as error:  # whatever the code of this revision raises
        print(f"hftune: {error}" if isinstance(error, (ConfigError, DataError)) else traceback.format_exc(), file=sys.stderr)
        return STOP if "--trust-code" in str(error) else SKIPPED
    return judge(history, step, options)


def check(options: argparse.Namespace) -> History:
    """Return the run, or raise ConfigError for what would be wrong with every revision."""
    check_at_least_1(options, "step")
    check_single("hftune bisect-step")
    if not options.tolerance >= 0:
        raise ConfigError(f"--tolerance {options.tolerance} must be 0 or more.")
    from hftune.replay.history import History

    history = History.open(options.run_folder, trust_code=options.trust_code, data=options.data)
    history.check_step(options.step)
    if history.ledger.steps.get(options.step, {}).get("loss") is None:  # skipped, or the step at which the run stopped
        raise ConfigError(f"The ledger of {options.run_folder} has no loss of step {options.step}: name another step.")
    return history


def compute(history: History, options: argparse.Namespace) -> ReplayedStep:
    """Replay up to the step, and return it."""
    from hftune.replay.engine import Replayer
    from hftune.replay.history import Change
    from hftune.tracking.console import hide_reports

    hide_reports()
    with Replayer(history, options.step, Change(overrides=tuple(options.keys), from_step=options.step)) as replayer:
        steps = [*replayer.advance(options.step)]
    if not steps or steps[-1].step != options.step:
        raise ConfigError(f"Step {options.step} is skipped with these keys, so it has no loss.")
    return steps[-1]


def judge(history: History, step: ReplayedStep, options: argparse.Namespace) -> int:
    """Compare a step with the ledger, and print both."""
    from hftune.replay.tolerance import difference

    line, remark = history.ledger.steps[options.step], ""
    found = difference(step, line)
    is_good = found.same_samples and found.largest <= options.tolerance
    if not found.same_samples:
        remark = ", of other samples"
    elif found.loss <= options.tolerance < found.grad_norm:
        remark = f", gradient norm {step.grad_norm!r} and {line['grad_norm']!r}"
    verdict, run = "good" if is_good else "bad", options.run_folder
    print(f"{verdict}: step {step.step} of {run} has loss {step.loss!r}, in its ledger {line['loss']!r}{remark}", flush=True)
    return GOOD if is_good else BAD
