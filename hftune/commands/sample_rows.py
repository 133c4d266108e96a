"""Draws answers on the processes of this job, and writes those to train on. Independent of how they are drawn and scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from hftune.commands import predict_rows
from hftune.commands.predict_rows import Parts
from hftune.commands.sample import Samples
from hftune.errors import DataError
from hftune.tracking.console import short, table


def compute(job: Samples) -> bool:
    """Draw, score and write. Collective. Return whether this is the main process.

    Raises:
        ConfigError, DataError, TrainingError: as ``predict_rows.compute``; or there is no row to write.
    """
    return predict_rows.compute(job, Chosen)


class Chosen(Parts):
    """Writes those of the answers that ``--keep`` and ``--threshold`` choose."""

    job: Samples

    def columns(self) -> dict[str, tuple[str, str]]:
        return {}  # those of the table have no place in the output

    def table(self) -> tuple[list[str], Iterator[dict[str, Any]], dict[str, Any]]:
        """Return columns and rows of the output, and print what there was.

        Raises:
            DataError: no prompt has answers to keep.
        """
        scores: list[float] = []
        best: list[float] = []
        num_drawn, left_out, columns = 0, Counter[str](), list[str]()
        for row in filter(None, self.rows()):
            num_drawn += len(row["answers"])
            scores += (own := [score for score in row["scores"] if score is not None])
            best += [max(own)] if own else []
            chosen = self.choose(row)
            if isinstance(chosen, str):
                left_out[chosen] += 1
            else:
                columns = [*chosen]
        reasons = [f"{count:,} {reason}" for reason, count in left_out.most_common()]
        num_prompts = len(self.job.table)
        said = {
            "prompts": f"{num_prompts:,}",
            "answers": f"{num_drawn:,}, {num_drawn - len(scores):,} of them empty or cut at --max-new-tokens",
            "mean score": short(fmean(scores)) if scores else "none",
            "mean of the best": short(fmean(best)) if best else "none",
            "rows": f"{num_prompts - left_out.total():,}",
            "left out": ", ".join(reasons) or "none",
        }
        print(table(said), flush=True)
        if not columns:
            raise DataError(
                f"There is no row to write: of {num_prompts:,} prompts, {', '.join(reasons)}. The answers are kept in "
                f"{self.folder}, for the same command with a different --keep or --threshold."
            )
        return columns, (found for row in filter(None, self.rows()) if not isinstance(found := self.choose(row), str)), {}

    def choose(self, row: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the row to write for a prompt with its answers; or why it has none, to be read after a number."""
        scored = [pair for pair in zip(row["answers"], row["scores"], strict=True) if pair[1] is not None]
        if not scored:
            return "without an answer that has a score"
        (best, high), (worst, low) = (choose(scored, key=lambda pair: pair[1]) for choose in (max, min))  # the first of equals
        if high < self.job.threshold:
            return "below --threshold"
        if self.job.keep == "best":
            return {"prompt": row["prompt"], "completion": best, "score": high}
        if high == low or best.strip() == worst.strip():
            return "with equal scores"
        return {"prompt": row["prompt"], "chosen": best, "rejected": worst, "chosen_score": high, "rejected_score": low}
