"""Text data sets: from the Hub, from files, or from a Python function; checked, tokenised, padded. Knows no task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import httpx

from hftune.config.importing import import_named
from hftune.data.files import FILE_FORMATS, file_format
from hftune.data.hub import failure, fetch
from hftune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

INSTEAD = f"task.dataset=json task.data_files.train=... task.data_files.eval=... ({', '.join(FILE_FORMATS)})"
"""What to name if the Hub cannot be reached."""
READ_BY = {"csv": {"keep_default_na": False, "na_values": [""]}}
"""How files are read. csv: only an empty cell is a missing value. pandas would take NA, null and None for one, too."""


def load_split(
    dataset: str,
    source_split: str,
    data_files: Mapping[str, Any] | None,
    split: str,
    data_dir: str | None = None,
    instead: str = INSTEAD,
    config: str | None = None,
    commit: str | None = None,
) -> datasets.Dataset:
    """Load the rows of one split ("train", "eval" or "test") of a data set.

    Args:
        dataset: a name on the Hub, with its ``commit``; imagefolder, with ``data_dir``; a folder; or ``module:function``,
            called with the split's name, which returns the rows as dictionaries. With data_files, one of FILE_FORMATS, or
            anything else: then their names tell the format.
        source_split: of the Hub's data set or the folder, such as "train", "test" or "train[:10%]".
        data_files: {"train": path, "eval": path}; they win over what ``dataset`` names.
        data_dir: folder of imagefolder; or a folder in the Hub's repository, which is read instead of all of it.
        instead: what to name if the Hub cannot be reached.
        config: of a data set of the Hub that has several, such as "wikitext-2-v1".

    Raises:
        DataError: it cannot be loaded, or has no rows.
    """
    if data_files:
        rows = _from_files(dataset, data_files[split], split)
    elif ":" in dataset:
        rows = _from_function(dataset, split)
    elif commit is not None:
        rows = _from_hub(dataset, commit, source_split, config, data_dir, instead)
    elif data_dir:
        said = f"task.data_dir={data_dir}"
        rows = load(dataset, said, instead, split=source_split, data_dir=str(Path(data_dir).expanduser()))
    else:
        rows = load(str(Path(dataset).expanduser()), f"task.dataset={dataset}", instead, name=config, split=source_split)
    if len(rows) == 0:
        raise DataError(f"The {split} split of {dataset} has no rows{_of(data_files, split)}.")
    return rows


def load_splits(
    dataset: str,
    data_files: Mapping[str, Any] | None,
    source_splits: Mapping[str, str],
    counts: Mapping[str, int | None],
    columns: Mapping[str, str],
    texts: Sequence[str],
    config: str | None = None,
    data_dir: str | None = None,
    commit: str | None = None,
    may_be_empty: bool = False,
) -> dict[str, datasets.Dataset]:
    """Load the splits of a text data set, drawn and checked.

    Args:
        source_splits, counts: of "train", "eval" and, where there is one, "test"; see ``load_split`` and ``rng``.
        columns: that must be there, by the key that names them: {"task.text_column": "text"}.
        texts: those of ``columns`` that must hold texts, none of them empty, unless they ``may_be_empty``.

    Raises:
        DataError: naming split, column and row.
    """
    loaded = {}
    for split, source_split in source_splits.items():
        rows = load_split(dataset, source_split, data_files, split, data_dir, config=config, commit=commit)
        rows = loaded[split] = subsample(rows, counts[split], seed=42)
        for key, column in columns.items():
            check_column(rows, key, column, split)
        for column in texts:
            check_texts(rows, column, split, may_be_empty)
    return loaded


def _of(data_files: Mapping[str, Any] | None, split: str) -> str:
    return f" ({data_files[split]})" if data_files else ""


def _from_function(name: str, split: str) -> datasets.Dataset:
    module, _, attribute = name.partition(":")
    function = import_named("task.dataset", name, module, attribute)
    return datasets.Dataset.from_list(list(function(split)))


def _from_files(dataset: str, files: str | Sequence[str], split: str) -> datasets.Dataset:
    patterns = [files] if isinstance(files, str) else files
    paths = [str(Path(path).expanduser()) if path.startswith("~") else path for path in patterns]
    kind = dataset if dataset in FILE_FORMATS else file_format(paths[0])
    return load_files(kind, f"task.data_files.{split}={files}", data_files={split: paths}, split=split)


def load_files(kind: str, said: str, **kwargs: Any) -> datasets.Dataset:
    """Call ``load`` for files of one of the formats of ``FORMAT_OF``."""
    return load("csv", said, sep="\t", **kwargs) if kind == "tsv" else load(kind, said, **kwargs)


def _from_hub(
    dataset: str, commit: str, source_split: str, config: str | None, data_dir: str | None, instead: str
) -> datasets.Dataset:
    """Load a split of exactly this commit, also from the cache alone."""
    said, instead = f"task.dataset={dataset}", f"Without the Hub, name files: {instead}."
    if data_dir:
        return _from_hub_folder(dataset, commit, source_split, data_dir, instead)
    if config:
        said += f" with task.dataset_config={config}"
    if not is_offline_mode():  # datasets does not tell why it cannot reach a repository; this does
        fetch("dataset", dataset, commit, ["README.md"], "task.dataset", instead)
    try:
        builder = datasets.load_dataset_builder(dataset, name=config, revision=commit)
        if builder.hash != commit:  # if the Hub does not answer, datasets takes the newest that is in its cache
            raise DataError(
                f"{said}: the cache has commit {builder.hash}, and commit {commit} is asked for. Run once without "
                f"HF_HUB_OFFLINE, or set task.dataset_revision={builder.hash}."
            )
        builder.download_and_prepare()
        return builder.as_dataset(split=source_split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise DataError(
            f"{said} has a loading script, and no program from the Hub is run. The Hub's own conversion of most such data sets "
            "is at task.dataset_revision=refs/convert/parquet, with a folder for each configuration: task.data_dir=..."
        ) from error
    except DatasetGenerationError as error:
        raise DataError(f"{said} cannot be read: {str(error.__cause__ or error).strip().rstrip('.')}.") from error
    except (OSError, httpx.HTTPError) as error:
        raise DataError(failure(error, "dataset", dataset, "task.dataset", instead)) from error
    except ValueError as error:  # datasets' word for an unknown split or configuration
        raise DataError(f"{said} cannot be loaded: {error}") from error


def _from_hub_folder(dataset: str, commit: str, source_split: str, data_dir: str, instead: str) -> datasets.Dataset:
    """Fetch a folder of a repository, and read it as one of this machine.

    Offline, datasets 5.2 does not find again what it loaded from the Hub with a data_dir.
    """
    name = data_dir.strip("/")
    folder = fetch("dataset", dataset, commit, [f"{name}/**"], "task.dataset", instead) / name
    said = f"task.dataset={dataset} with task.data_dir={data_dir}"
    if not folder.is_dir():
        raise DataError(f"{said}: commit {commit} has no such folder.")
    return load(str(folder), said, split=source_split)


def load(dataset: str, said: str, instead: str = INSTEAD, **kwargs: Any) -> datasets.Dataset:
    """Call ``datasets.load_dataset``; where that fails, say so in words that begin with ``said``, and what to name instead.

    Raises:
        DataError: it cannot be loaded.
    """
    try:
        return datasets.load_dataset(dataset, **READ_BY.get(dataset, {}), **kwargs)
    except StopIteration:  # how datasets' json reader meets a file without a line
        return []
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).strip().rstrip(".")
        raise DataError(f"{said} cannot be read as {dataset}: {reason}.") from error
    except (ConnectionError, FileNotFoundError) as error:
        raise DataError(f"{said} cannot be loaded: {error} Name files: {instead}.") from error
    except ValueError as error:  # datasets' word for an unknown split or configuration
        raise DataError(f"{said} cannot be loaded: {error}") from error


def subsample(rows: datasets.Dataset, count: int | None, seed: int) -> datasets.Dataset:
    """Keep ``count`` rows drawn at random, in their order; all where there are no more, or ``count`` is None."""
    return rows if count is None or count >= len(rows) else rows.select(drawn(len(rows), count, seed))


def drawn(num_rows: int, count: int | None, seed: int) -> np.ndarray:
    """Return the numbers of the rows that ``rng`` keeps: those of ``dataset.shuffle(seed).select(range(count))``."""
    if count is None or count >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:count])  # as datasets (5.0) shuffles; a test compares


def check_column(rows: datasets.Dataset, key: str, column: str, split: str) -> None:
    """Raise DataError unless ``column`` exists; the message lists those that do."""
    if column not in rows.column_names:
        hint = did_you_mean(column, rows.column_names)
        raise DataError(f"{key}={column} is not a column of the {split} split. It has: {', '.join(rows.column_names)}.{hint}")


def find_column(rows: datasets.Dataset, key: str, choices: Sequence[str]) -> str:
    """Return which of the columns there is, or raise DataError: none of them, or more than one."""
    found = [column for column in choices if column in rows.column_names]
    if len(found) == 1:
        return found[0]
    has = f"several of {', '.join(choices)}" if found else f"none of {', '.join(choices)}"
    raise DataError(
        f"{key} is not set, and the data have {has}. Set it to one of their columns: {', '.join(rows.column_names)}."
    )


def check_texts(rows: datasets.Dataset, column: str, split: str, may_be_empty: bool = False) -> None:
    """Raise DataError where a text is missing, not a text, or empty and must not be; the message names the first rows."""
    kind = rows.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not text.")
    try:
        empty = [place for place, text in enumerate(rows[column]) if text is None or not (may_be_empty or text.strip())]
    except UnicodeDecodeError as error:
        raise DataError(f"Column {column!r} of the {split} split is not UTF-8: {error}. Convert its file.") from error
    if empty:
        what = "no text" if may_be_empty else "an empty text"
        raise DataError(
            f"The {split} split has {what} in column {column!r} at row {_list(row_numbers(rows, empty))}. "
            "Remove such rows, or fill them."
        )


def check_inputs(texts: Sequence[Any]) -> None:
    """Raise DataError where one of the texts that a model is to answer is empty or no text."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            what = f"the file {text}; texts come from --text and --text-file" if isinstance(text, Path) else type(text).__name__
            raise DataError(f"Input {place} is {what}. This model answers texts.")
        if not text.strip():
            raise DataError(f"Input {place} is an empty text.")


def row_numbers(rows: datasets.Dataset, places: Sequence[int]) -> list[int]:
    """Translate places in ``rows`` to 0-based rows of the file it was drawn from."""
    indices = rows._indices
    return list(places) if indices is None else [indices.column(0)[place].as_py() for place in places]


def _list(numbers: Sequence[int], most: int = 3) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def tokenizer_key(tokenizer: Any) -> list:
    """Return what a tokenizer's output depends on, free of the truncation that its last call left in it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else dict(tokenizer.init_kwargs)
    backend.update(truncation=None, padding=None)
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), json.dumps(backend, sort_keys=True, default=str)]


def tokenize(batch: dict[str, list], tokenizer: Any, column: str, max_length: int) -> dict[str, list]:
    """Tokenise texts; note each one's length in tokens, special tokens included, and whether it was cut at the end."""
    ids, cut = to_ids(batch[column], tokenizer, max_length)
    return {"input_ids": ids, "length": [len(row) for row in ids], "cut": cut}


def to_ids(texts: Sequence[str], tokenizer: Any, max_length: int) -> tuple[list[list[int]], list[bool]]:
    """Return each text's ids, at most ``max_length`` of them, and whether it had more."""
    settings = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    ids = tokenizer(list(texts), truncation=True, max_length=max_length, **settings)["input_ids"]
    cut = [len(row) == max_length for row in ids]
    if full := [text for text, is_full in zip(texts, cut, strict=True) if is_full]:  # cut, or just of this length
        uncut = iter(tokenizer(full, **settings)["input_ids"])
        cut = [is_full and len(next(uncut)) > max_length for is_full in cut]
    return ids, cut


def cut_notices(datasets: Mapping[str, datasets.Dataset], column: str, what: str) -> list[str]:
    """Say which share of the rows was cut in tokenising, by the flags in ``column``; nothing where none was."""
    shares = {split: np.mean(rows.with_format("numpy", columns=[column])[:][column]) for split, rows in datasets.items()}
    said = " and ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share)
    return [f"{what} are cut at the end: {said}."] if said else []


def lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Return the lengths of a tokenised data set, reading that column alone."""
    return dataset.with_format("numpy", columns=["length"])[:]["length"].astype(np.int32)


def pad(rows: Sequence[Sequence[int]], value: int) -> tuple[Tensor, Tensor]:
    """Pad sequences of ids on the right: ids (N, longest) and attention mask (N, longest), int64."""
    import torch

    counts_N = torch.tensor([len(row) for row in rows])
    ids_NT = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)
    mask_NT = (torch.arange(ids_NT.shape[1]) < counts_N[:, None]).long()
    return ids_NT, mask_NT
