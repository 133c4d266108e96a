"""``hftune predict``: run a finished model on texts, images or recordings. Independent of models and tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.commands.arguments import add_table, add_trust_code, check_at_least_1, read_text, writing
from hftune.data.table import WRITTEN
from hftune.errors import ConfigError

NOT_FOR_TABLES = ("text", "text_file", "messages", "chat", "system", "input", "masks", "track", "json")
"""Options that --data does not take."""
MAX_CHARACTERS = 500
"""Characters of a text that trackers get, as in predictions.jsonl."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run, such as outputs/bigbird, or its address; or one of its models")
    parser.add_argument("--text", action="append", default=[], help="a text; may be repeated")
    parser.add_argument(
        "--text-file", action="append", default=[], help="a UTF-8 file that holds one text; - is standard input"
    )
    parser.add_argument(
        "--messages",
        action="append",
        default=[],
        metavar="FILE",
        help="a jsonl file of chats to answer, each a list of messages, or {messages, tools}; - is standard input",
    )
    parser.add_argument("--chat", action="store_true", help="chat with the model in the terminal")
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument(
        "--input", nargs="+", action="extend", default=[], type=Path, help="files of images or recordings, or folders of them"
    )
    parser.add_argument(
        "--masks", type=Path, help="masks of the images to restore: a folder with files of the same names, or a file"
    )
    add_table(parser, "table to predict, on all processes")
    parser.add_argument(
        "--columns", help="columns to write, with commas: of --data and of the predictions, such as id,label (default: all)"
    )
    parser.add_argument("--probabilities", action="store_true", help="also the probability of each class")
    parser.add_argument(
        "--empty",
        choices=("refuse", "null"),
        default="refuse",
        help="rows of --data with an empty text: refuse them, or give them no prediction (default %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, help=f"file for the predictions of --data ({', '.join(WRITTEN)}); or folder for predicted images"
    )
    parser.add_argument(
        "--batch-size", type=int, help="number of inputs in a batch (default 8; for --data, that of the training's evaluations)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per input as output")
    parser.add_argument(
        "--track", action="store_true", help="record the predictions as a run of their own at the trackers of the run's recipe"
    )
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Print one line for each input; that of a file begins with its path. Write those of a table into a file."""
    check_at_least_1(options, "batch_size", "processes")
    if options.data is not None:
        return predict_table(options)
    if odd := [name for name in ("map", "columns", "mixed_precision", "processes") if getattr(options, name)]:
        raise ConfigError(f"--{odd[0].replace('_', '-')} is for tables: --data FILE.")
    if options.system is not None and not options.chat:
        raise ConfigError("--system is for --chat. Elsewhere, write a message with the role system.")
    inputs: list[Any] = [*options.text, *map(read_text, options.text_file)]
    check_inputs(options.input, options.masks)
    if options.output is not None and (options.chat or options.messages):
        raise ConfigError("--output is for --data, and for predicted images. Answers to chats go to standard output.")
    if options.chat:
        if inputs or options.input or options.messages:
            raise ConfigError("--chat reads its messages from the terminal. Leave the other inputs out.")
        from hftune.commands.predict_chat import chat

        return chat(options)
    if options.messages:
        from hftune.commands.predict_chat import read_chats

        inputs += [found for path in options.messages for found in read_chats(path)]
    if not inputs and not options.input:
        raise ConfigError("There is no input. Give --data, --text, --text-file, --messages, --chat or --input.")
    from hftune.checkpoints.run_folder import check_answers, open_run
    from hftune.commands.predict_data import check_probabilities, flat
    from hftune.tracking.jsonl import strict_json

    recipe, source = open_run(options.folder, options.trust_code, with_trackers=options.track)
    check_answers(recipe.task)
    check_probabilities(recipe.task, options.probabilities)
    is_audio = "audio" in getattr(recipe.task, "columns", {})
    inputs += image_inputs(options.input, options.masks, "recording" if is_audio else "image")
    if options.messages:
        from hftune.commands.predict_chat import check_chats

        check_chats(recipe.task, "--messages")
    paths = output_paths(inputs, options.output)
    if options.track:
        from hftune.commands.tracked import as_run

        recipe = as_run(recipe, source.parent, "predict")
    import numpy as np
    from PIL import Image

    from hftune.inference import load_model  # imports torch: only once the arguments are known to be valid
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    model = load_model(options.folder, trust_code=options.trust_code)
    answers = model.answers(inputs, options.batch_size or 8, probabilities=options.probabilities)
    rows, images = [], []
    for value, path, prediction in zip(inputs, paths, answers, strict=True):
        row = {**input_column(value), **save_images(flat(prediction), path)}
        print(strict_json(row, ensure_ascii=False) if options.json else "\t".join(map(str, row.values())), flush=True)
        if options.track:
            if not isinstance(value, (Path, tuple)):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)  # or a chat
                row = {"text": text[:MAX_CHARACTERS], **row}
            rows.append(row)
            found = [np.asarray(image.convert("RGB")) for image in prediction.values() if isinstance(image, Image.Image)]
            images += [(image, row["input"]) for image in found[: recipe.eval.show_samples - len(images)]]
    if options.track:
        from hftune.commands.tracked import track_predictions

        track_predictions(recipe, {"model": str(source), "samples": len(rows)}, rows, images)
    return 0


def predict_table(options: argparse.Namespace) -> int:
    """Predict the rows of --data, and print where they are. Under a launcher every process calls it."""
    if given := [name for name in NOT_FOR_TABLES if getattr(options, name)]:
        raise ConfigError(f"--{given[0].replace('_', '-')} does not go with --data.")
    from hftune.commands.predict_data import compute, prepare

    return compute(prepare(options), options, "hftune.commands.predict_rows")


def check_inputs(inputs: Sequence[Path], masks: Path | None) -> None:
    """Raise ConfigError if there is no such path."""
    for path in (*inputs, *([] if masks is None else [masks])):
        if not path.exists():
            raise ConfigError(f"--{'masks' if path == masks else 'input'} {path}: there is no such file or folder.")


def image_inputs(inputs: Sequence[Path], masks: Path | None, kind: str = "image") -> list[Any]:
    """Return image files, or pairs of image and mask, or, of that kind, recordings; and say what a folder holds besides.

    Images are paired by name if there are ``masks``, or if a folder holds image/ and mask/.

    Raises:
        ConfigError: a folder lacks images or masks.
        DataError: a folder has no files of that kind, or an image or a mask has no partner.
    """
    from hftune.data.files import list_images
    from hftune.data.restoration_images import paired
    from hftune.tracking.console import note

    are_pairs = masks is not None or any((path / "image").is_dir() and (path / "mask").is_dir() for path in inputs)
    found: list[Any] = []
    for path in inputs:
        image, mask = (path, masks) if masks is not None else (path / "image", path / "mask")
        if are_pairs and image.is_dir():
            columns = paired({"image": image, "mask": mask}, f"--input {path}")
            found += zip(columns["image"], columns["mask"], strict=True)
        elif are_pairs:
            for side in (image, mask):
                if not side.exists():
                    raise ConfigError(f"--input {side}: there is no such file or folder.")
            found.append((image, mask))
        elif path.is_dir():
            images = list_images(path, f"--input {path}", kind)
            found += images
            files = {file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")}
            if left_out := sorted(files.difference(images)):
                what, kinds = ("file is", kind) if len(left_out) == 1 else ("files are", f"{kind}s")
                said = f"--input {path}: {len(left_out):,} {what} left out as no {kinds}: {left_out[0]}"
                print(note(said), file=sys.stderr, flush=True)
        else:
            found.append(path)
    return found


def input_column(value: Any) -> dict[str, str]:
    """Return the column that names an input: the path of an image, or of a pair's image; none for a text."""
    path = value[0] if isinstance(value, tuple) else value
    return {"input": str(path)} if isinstance(path, Path) else {}


def output_paths(inputs: Sequence[Any], output: Path | None) -> list[Path | None]:
    """Return the path in ``output`` to which a predicted image would be written, for each input.

    Raises:
        ConfigError: two inputs have the same name, an input is in that folder, or the folder cannot be created.
    """
    if output is None:
        return [None] * len(inputs)
    paths = [Path(input_column(value).get("input", str(index))) for index, value in enumerate(inputs)]
    stems = [path.stem for path in paths]
    if any(path.resolve().parent == output.resolve() for path in paths):
        raise ConfigError(
            f"--output {output} is the folder of the inputs, which would be overwritten. Name a different folder."
        )
    if repeated := [stem for stem, count in Counter(stems).items() if count > 1]:
        raise ConfigError(f"--output {output}: two inputs have the name {repeated[0]}. Predict their folders one by one.")
    with writing(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)
    return [output / f"{stem}.png" for stem in stems]


def save_images(prediction: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Write the image in a prediction, if any, and return the prediction with its path instead.

    Raises:
        ConfigError: there is an image and no path for it, or it cannot be written.
    """
    from PIL import Image

    row = dict(prediction)
    for name, value in prediction.items():
        if isinstance(value, Image.Image):
            if path is None:
                raise ConfigError("The predictions are images. Name a folder for them: --output FOLDER.")
            with writing(f"--output {path}"):
                value.save(path)
            row[name] = str(path)
    return row
