"""``hftune evaluate``: evaluate a finished model or a checkpoint, print and write its metrics, and record them at trackers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hftune.checkpoints.run_folder import check_checkpoint, check_model, here
from hftune.commands.arguments import add_trust_code, check_output, run_path, writing
from hftune.config.addresses import is_address
from hftune.data.sources import held_out_key, names_eval_data
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, did_you_mean, first_line, is_number

if TYPE_CHECKING:
    from hftune.config import Recipe
    from hftune.reevaluation import Score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="output folder of a run, such as outputs/yelp, its address, or recipe=PATH.yaml; then overrides, KEY=VALUE",
    )
    parser.add_argument("--checkpoint", type=run_path, help="checkpoint to evaluate instead of the model")
    parser.add_argument(
        "--split", default="eval", help="split to evaluate on: eval, test or one of eval.sets (default %(default)s)"
    )
    parser.add_argument(
        "--lm-eval",
        metavar="TASKS",
        help="evaluate a language model on these tasks of lm-eval instead, such as hellaswag,tasks/own.yaml",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the metrics")
    parser.add_argument(
        "--track", action="store_true", help="record the evaluation as a run of its own at the trackers of track.with"
    )
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Print a table of the metrics. Under a launcher every process calls it."""
    given = words = [recipe_in(word) for word in options.words]
    if not options.track and not any(word.startswith("replace=") for word in words):
        # Trackers are not used, and may name environment variables of the other machine.
        words = [*words, "replace=[track]"]
    from hftune.config import Recipe

    recipe = Recipe.from_argv(words, options.trust_code)
    if options.split not in (known := ("eval", "test", *recipe.eval.sets)):
        raise ConfigError(f"--split {options.split} is not one of {', '.join(known)}.{did_you_mean(options.split, known)}")
    split = f"eval/{options.split}" if options.split in recipe.eval.sets else options.split
    if split == "eval" and recipe.eval.is_off:
        recipe = with_evaluation(recipe)
    recipe.validate()
    source = next(word for word in given if word.startswith("recipe=")).partition("=")[2]
    model = Path(source).expanduser().with_name("model")  # beside the recipe file, which may have been moved
    if is_address(source):
        model = here(f"{source.rpartition('/')[0]}/model")
    elif not source.endswith(".yaml") or not model.is_dir():
        model = here(f"{recipe.output_dir}/model") if is_address(str(recipe.output_dir)) else recipe.folder / "model"
    checkpoint = None if options.checkpoint is None else here(options.checkpoint, key="--checkpoint")
    if checkpoint is None:
        check_model(model)
    else:
        check_checkpoint(checkpoint)
    if options.output is not None and ProcessInfo.from_environment().is_main:
        check_output(options.output)
    if options.lm_eval is not None:
        return run_lm_eval(recipe, model, options)
    tracked_as = None
    if options.track:
        from hftune.commands.tracked import as_run, track_evaluation

        tracked_as = as_run(recipe, model.parent, "evaluate")
    from hftune.reevaluation import evaluate  # imports torch: only once the arguments are known to be valid
    from hftune.tracking.console import hide_progress_bars, warning

    hide_progress_bars()
    shown = 0 if tracked_as is None else recipe.eval.show_samples
    score = evaluate(recipe, model, checkpoint, split, shown)
    if score.is_main:
        report(score, options.output)
        if tracked_as is not None:
            try:
                track_evaluation(tracked_as, score, split)
            except Exception as error:  # whatever a tracker's package raises: the metrics are printed by now
                reason = str(error) if isinstance(error, ConfigError) else first_line(error)
                print(warning(f"The evaluation was not recorded at the trackers: {reason}"), flush=True)
    return 0


def run_lm_eval(recipe: Recipe, model: Path, options: argparse.Namespace) -> int:
    """Evaluate on tasks of lm-eval, print the scores and write them."""
    from hftune.commands.lm_eval_tasks import check_lm_eval, evaluate_by_lm_eval
    from hftune.tracking.console import hide_progress_bars, short, table
    from hftune.tracking.jsonl import strict_json

    for name in ("checkpoint", "track", "split"):
        if getattr(options, name) not in (None, False, "eval"):
            raise ConfigError(f"--{name} does not go with --lm-eval, which scores a finished model and prints. Leave it out.")
    check_lm_eval(recipe)
    hide_progress_bars()
    scores = evaluate_by_lm_eval(recipe, model, options.lm_eval)
    if options.output is not None:
        with writing(f"--output {options.output}"):
            options.output.write_text(strict_json({"metrics": scores, "model": str(model)}, indent=2) + "\n", encoding="utf-8")
    print(table({**{name: short(value) for name, value in scores.items()}, "model": str(model)}), flush=True)
    return 0


def with_evaluation(recipe: Recipe) -> Recipe:
    """Return the recipe of a run that never evaluates as one that does, or raise ConfigError if it names no data for it."""
    if not names_eval_data(recipe.task) and held_out_key(recipe.task) is None:
        keys = (name for name in ("data_files", "query") if getattr(recipe.task, name, None))
        key = f"{name}.eval" if (name := next(keys, None)) else "eval_split"
        raise ConfigError(f"This run has no evaluation data (eval.every=never). Name some: task.{key}=..., or --split test.")
    return replace(recipe, eval=replace(recipe.eval, every="epoch"))


def report(score: Score, output: Path | None) -> None:
    """Write the metrics to ``output``, if given, and print them: written first, as nobody may be reading what is printed."""
    from hftune.tracking.console import note, short, table
    from hftune.tracking.jsonl import strict_json

    if output is not None:
        values = {name: getattr(score, name) for name in ("metrics", "model", "num_samples", "world_size")}
        with writing(f"--output {output}"):
            output.write_text(strict_json(values, indent=2) + "\n", encoding="utf-8")
    for sentence in score.notices:
        print(note(sentence))
    rows = {name: short(value) for name, value in score.metrics.items() if is_number(value)}
    print(table({**rows, "samples": f"{score.num_samples:,}", "model": score.model}), flush=True)


def recipe_in(word: str) -> str:
    """Return the recipe of a run if a word is its output folder; otherwise the word.

    Raises:
        ConfigError: it is the path of something else.
    """
    folder = here(word, "model")
    path = folder / "recipe.yaml"
    if path.is_file():
        return f"recipe={path}"
    if "=" not in word and (folder.is_dir() or len(folder.parts) > 1) and folder.suffix not in (".yaml", ".yml"):
        what = " holds no recipe.yaml" if folder.is_dir() else ": there is no such folder"
        raise ConfigError(f"{word}{what}. Name the output folder of a run, such as outputs/yelp.")
    return word
