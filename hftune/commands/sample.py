"""``hftune sample``: draw answers from a finished chat model, score them, and write those to train on.

Checked here, before torch is imported. ``commands/sample_rows.py`` computes it, on all processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hftune.commands.arguments import add_table, add_trust_code, check_at_least_1
from hftune.commands.predict_chat import check_chats
from hftune.commands.predict_data import Job, compute, prepare
from hftune.commands.rewards import Reward, reward_of
from hftune.data.table import WRITTEN
from hftune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

SETTINGS = ("temperature", "top_k", "top_p", "max_new_tokens")
"""Options that are settings of the model's generation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run of a chat model, such as outputs/sft, or its address")
    add_table(parser, "table of prompts, texts or lists of messages", is_required=True)
    parser.add_argument("--answers", type=int, default=8, help="answers to draw to each prompt (default %(default)s)")
    parser.add_argument(
        "--reward",
        required=True,
        help="what scores an answer: a function of prompt and answer, such as my_module.score, or the output folder of a run "
        "that gives scores, such as outputs/reward",
    )
    parser.add_argument(
        "--keep",
        choices=("pairs", "best"),
        default="pairs",
        help="pairs: the best and the worst answer to each prompt, for recipe=dpo. best: the best one, for recipe=sft (default "
        "%(default)s)",
    )
    parser.add_argument("--threshold", type=float, help="leave out prompts whose best answer has a lower score")
    parser.add_argument("--output", type=Path, help=f"file for the rows to train on ({', '.join(WRITTEN)})")
    parser.add_argument("--seed", type=int, default=0, help="of the draws: another one for each round (default %(default)s)")
    parser.add_argument("--temperature", type=float, help="of the draws (default: the model's own, or 1)")
    parser.add_argument("--top-k", type=int, help="draw among as many tokens; 0: among all (default: the model's own, or all)")
    parser.add_argument("--top-p", type=float, help="draw among tokens of this probability (default: the model's own, or 1)")
    parser.add_argument("--max-new-tokens", type=int, help="tokens of an answer (default: the model's own, or 1024)")
    parser.add_argument(
        "--batch-size", type=int, help="answers in a batch (default: that of the training's evaluations, times --answers)"
    )
    add_trust_code(parser)


@dataclass
class Samples(Job):
    """What to draw, to the prompts that are the rows."""

    num_answers: int
    at_once: int
    """Answers that are generated together."""
    seed: int
    settings: dict[str, Any]
    """Of the model's generation, by names of transformers."""
    reward: Reward
    keep: Literal["pairs", "best"]
    threshold: float

    def compared(self) -> dict[str, Any]:
        return {**self.options, "reward": self.reward.compared}

    def predict(self, model: nn.Module, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return prompt, answers and their scores for each row; no score for an answer that is empty, or cut for its length."""
        import torch

        prompts, rows = self.inputs(numbers), self.table.rows.select(numbers)
        device = next(model.parameters()).device.type
        keys = [[(self.seed, number, draw) for draw in range(self.num_answers)] for number in numbers]
        found = []
        for place, drawn in enumerate(self.recipe.task.sample(model, prompts, keys, self.settings, self.at_once)):
            whole = list(dict.fromkeys(text for text, is_whole in drawn if is_whole and text.strip()))
            try:
                with torch.autocast(device, enabled=False):  # which is for the model of the answers
                    scores = dict(zip(whole, self.reward(prompts[place], whole, rows[place]), strict=True)) if whole else {}
            except DataError as error:
                raise DataError(f"Input {place}: {error}") from error
            found.append(
                {
                    "prompt": prompts[place],
                    "answers": [text for text, _ in drawn],
                    "scores": [scores.get(text) if is_whole else None for text, is_whole in drawn],
                }
            )
        return found


def run(options: argparse.Namespace) -> int:
    """Write the rows, and print what was drawn. Under a launcher every process calls it."""
    check_at_least_1(options, "answers", "max_new_tokens", "batch_size", "processes")
    for name, is_good, bounds in (
        ("temperature", lambda value: 0 < value < inf, "a finite number above 0"),
        ("top_k", lambda value: value >= 0, "0, for all tokens, or more"),
        ("top_p", lambda value: 0 < value <= 1, "above 0, and 1 at most"),
        ("seed", lambda value: 0 <= value < 2**32, "0 or more, and below 2**32"),  # a word of a key of KeyedDraws
        ("threshold", isfinite, "a finite number"),
    ):
        if (value := getattr(options, name)) is not None and not is_good(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be {bounds}.")
    if options.keep == "pairs" and options.answers < 2:
        raise ConfigError(f"--answers {options.answers}: a pair needs 2 answers at least. Or keep the best one: --keep best.")
    return compute(job_of(options), options, "hftune.commands.sample_rows")


def job_of(options: argparse.Namespace) -> Samples:
    """Check run, prompts and reward.

    Raises:
        ConfigError, DataError: no answers can be drawn, or not be scored.
    """
    vars(options).update(probabilities=False, columns=None, empty="refuse")
    at_once, options.batch_size = options.batch_size, options.batch_size and max(1, options.batch_size // options.answers)
    job = prepare(options)
    check_chats(job.recipe.task, "hftune sample")
    reward = reward_of(options.reward, job.table, options.trust_code)
    settings = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    job.options = {"answers": options.answers, "seed": options.seed, **settings, "reward": reward.digest}
    return Samples(
        **vars(job),
        num_answers=options.answers,
        at_once=at_once or job.batch_size * options.answers,
        seed=options.seed,
        settings=settings,
        reward=reward,
        keep=options.keep,
        threshold=options.threshold if options.threshold is not None else float("-inf"),
    )
