"""The interpreter that has imported everything and serves forks; and what each process of a group does, such a fork.

Starting interpreters and importing costs far more than the small runs. The processes are like those of torchrun: real ones, with
its variables and an agent's store (which tests/support/runs.py keeps). What torchrun and accelerate launch themselves do is
tested where tests start them.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image
from torch._dynamo.utils import dump_compile_times
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hftune import Interrupted, Recipe, run, train
from hftune.config.own_code import hashes_of
from hftune.data import rows as data_rows
from hftune.distributed import consistency, garbage
from hftune.strategies.base import Strategy
from hftune.strategies.fully_sharded import ShardedWeights
from tests.support.tasks import few_digits, few_pictures, few_reviews
from tests.support.warm import Server

SUPPORT = Path(__file__).parent
IMPORTED = (
    *("hftune.training", "hftune.tasks", "hftune.models.bigbird", "hftune.models.unet", "hftune.metrics.restoration"),
    *("tests.support.tasks", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "sklearn.metrics"),
    *("hftune.strategies.pipeline", "hftune.models.transformer_lm", "transformers.models.bert.modeling_bert"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
    *("hftune.data.jieba_tokenizer", "hftune.data.labels", "hftune.data.notices", "encodings.utf_8_sig"),
    *("hftune.metrics.classification", "hftune.data.files", "hftune.data.rows", "transformers.pipelines"),
    *(
        "transformers.models.auto.processing_auto",
        *("transformers.models.bert.tokenization_bert", "transformers.models.bert.tokenization_bert_legacy"),
    ),
    *(
        "torch.distributed.run",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "accelerate.commands.accelerate_cli",
    ),
    *("hftune.cli", "rjieba", "tabulate", "fsspec.implementations.http"),
)
"""Before there are processes. What is missing here they import themselves, each of them."""

OPTIONAL = (
    *("mlflow.store.tracking.sqlalchemy_store", "rouge_score.rouge_scorer"),
    *("tensorboard.backend.event_processing.event_accumulator", "transformers.trainer"),
    *("wandb.sdk.launch", "wandb.apis.public"),
    "torch.profiler._cupti_monitor",  # since torch 2.13
)
"""Imported, too, where they are installed: what tests and tracked runs need of them takes seconds.

Not for unit tests, few of which need them. Not where another interpreter has done so: then this one has other variables, for
the Hub, and its runs need none of them.
"""

DEMOS = ("articles", "digits", "pictures", "reviews", "shapes")
"""Made before there are processes; what is missing here each process makes once."""

COMMANDS = ("hftune.run", "hftune.cli", "hftune.doctor")


def main(folder: Path) -> None:
    """Import everything, and serve forks until the standard input is closed: see tests/support/warm.py.

    The output is the path of the program that asks for a fork.
    """
    tempfile.tempdir = os.environ["HF_DATASETS_CACHE"]  # for wandb's folder, which tests/conftest.py removes with this one
    Path(tempfile.tempdir).mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # as hftune does before it imports wandb
    for name in IMPORTED:
        importlib.import_module(name)
    for name in () if {"TESTS_WARM_PYTHON", "TESTS_UNIT"} & set(os.environ) else OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)
    for part in ("train", "eval"):  # each is made once a process
        few_reviews(part), few_digits(part), few_pictures(part)
    consistency.code(), consistency.packages()  # what processes compare before they train
    hashes_of(["tests.support.tasks"])  # likewise
    for name in ("yelp_demo", "mnist_demo", "bigbird_demo", "restoration_demo", str(SUPPORT / "next_token.yaml")):
        Recipe.load(name).to_yaml()  # the defaults of their tasks are read once a process
    tempfile.tempdir = None
    get_checkpoint_conversion_mapping("bert")  # makes those of all models, which the first export of a process does otherwise
    Image.init()  # imports a module for each format
    dynamic_rendezvous.get_method_name = str  # for a log: it looks for each frame's function in all modules, a second of CPU
    hasten()
    if "TESTS_DEMOS" in os.environ and "TESTS_WARM_PYTHON" not in os.environ:  # all processes of xdist are forks of this one
        for name, part in product(DEMOS, ("train", "eval")):
            data_rows._from_function(f"hftune.data.demo:{name}", part)
    gc.freeze()  # a collection in a child would copy what all share
    server = Server(folder, sys.stdin.fileno())
    print(server.executable, flush=True)
    server.serve()


def hasten() -> None:
    """Spare each of many hundred processes what takes a tenth of a second and changes no result.

    These are counting the objects that this interpreter has frozen,
    generating a demo's data, of which most runs use a few rows, and what libraries that were imported here do at the end of a
    process: taking operators back, writing a table into a log that nobody keeps, removing the temporary folders of this one.
    """
    original = data_rows._from_function
    once = cache(original)

    def from_function(name: str, split: str) -> Any:
        return (once if name.startswith("hftune.data.demo") else original)(name, split)

    data_rows._from_function = from_function
    atexit.unregister(dump_compile_times)
    if "wandb" in sys.modules:
        from wandb.sdk.artifacts.artifact import Artifact
        from wandb.sdk.data_types._private import MEDIA_TMP

        for temporary in (MEDIA_TMP, Artifact._TMP_DIR):
            atexit.unregister(temporary.cleanup)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    garbage.gc = SimpleNamespace(**{**vars(gc), "get_freeze_count": lambda: 1})


def work(jobs: list[Any], as_typed: bool) -> None:
    """Be one process of a group: train each job, or run it if it is a command or a script."""
    before = dict(os.environ)
    for source, overrides, stop, extra in jobs:
        os.environ.clear()  # accelerate writes there, too
        os.environ.update({**before, **extra})
        if source in COMMANDS:
            sys.argv = [source, *overrides]
            if code := importlib.import_module(source).main(overrides):
                run.leave(code)
            continue
        if source.endswith(".py"):
            sys.argv, sys.path[0] = [source, *overrides], str(Path(source).parent)
            runpy.run_path(source, run_name="__main__")
            continue
        if as_typed:
            if code := run.main([f"recipe={source}", *overrides]):
                run.leave(code)
            continue
        faulthandler.enable(2)
        recipe = Recipe.load(source, *overrides)
        with weighed(Path(recipe.output_dir)):
            if stop is None:
                train(recipe)
            else:
                with terminated_after(*stop):
                    train_until_interrupted(recipe)


def train_until_interrupted(recipe: Recipe) -> None:
    """Train; fail if nothing stops it, or a test of resuming would pass that compares two unbroken runs."""
    try:
        train(recipe)
    except Interrupted:
        return
    raise AssertionError(f"{recipe.output_dir} was to be stopped, but was trained to its end.")


@contextmanager
def weighed(folder: Path) -> Iterator[None]:
    """Write down, beside the folder, what Run.weighed and Run.has_copied read: bytes on each process, and whole copies."""
    original, original_copy = Strategy.optimizer_step, ShardedWeights.whole_copy

    def whole_copy(self: ShardedWeights) -> Any:
        folder.with_name(f"{folder.name}-copied").touch()
        return original_copy(self)

    def own(tensors: Iterable[Any]) -> int:
        parts = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        return sum(part.numel() * part.element_size() for part in parts if part.ndim)

    def optimizer_step(self: Strategy, lr: float) -> None:
        parameters = [value for group in self.sharding.optimizer.param_groups for value in group["params"]]
        found = {"weights": own(parameters), "gradient": own(value.grad for value in parameters)}
        original(self, lr)
        state = self.sharding.bare_optimizer.state
        found["moments"] = own(value for values in state.values() for value in values.values() if hasattr(value, "ndim"))
        if not (path := folder.with_name(f"{folder.name}-bytes-{self.process_index}.json")).exists():
            path.write_text(json.dumps(found))

    Strategy.optimizer_step, ShardedWeights.whole_copy = optimizer_step, whole_copy
    try:
        yield
    finally:
        Strategy.optimizer_step, ShardedWeights.whole_copy = original, original_copy


@contextmanager
def terminated_after(step: int, rank: int) -> Iterator[None]:
    """Send one process SIGTERM as soon as it has taken so many optimizer steps: the step after that is the last."""
    taken, original = 0, Strategy.optimizer_step

    def optimizer_step(self: Strategy, lr: float) -> None:
        nonlocal taken
        original(self, lr)
        taken += 1
        if taken == step and self.process_index == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    Strategy.optimizer_step = optimizer_step
    try:
        yield
    finally:
        Strategy.optimizer_step = original


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        work(**json.loads(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
