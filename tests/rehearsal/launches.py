"""Counts the kernels of a micro-batch, forward and backward: of the model as transformers has it, and as hftune trains it.

    python -m tests.rehearsal.launches [recipe ...]     with recipes, kernel by kernel

On a simulated GPU, in bf16, of twelve samples. What torch has as one kernel on GPUs counts as one.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

from tests.rehearsal import simulated_cuda

RECIPES = ("yelp_demo", "chats_demo", "seq2seq_demo")
HEADER = ("recipe", "transformers", "hftune, padded", "hftune, packed")


def main() -> None:
    begin()
    counts = {recipe: all_counts(recipe) for recipe in sys.argv[1:] or RECIPES}
    for recipe in sys.argv[1:]:
        for kernel in sorted(set().union(*counts[recipe])):
            print(f"{kernel:45}", *(f"{each[kernel]:6}" for each in counts[recipe]))
    rows = [[recipe, *(f"{sum(each.values())}" for each in own)] for recipe, own in counts.items()]
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *rows)]
    print("", *lines, sep="\n", flush=True)
    os._exit(0)  # autograd's threads of simulated devices do not end


def begin() -> None:
    simulated_cuda.install()
    os.environ["ACCELERATE_USE_CPU"] = "false"
    fuse_attention()


def fuse_attention() -> None:
    """Let torch's attention be one kernel each way, as on a GPU; of a simulated one it is computed by many."""
    import torch

    compute = torch.nn.functional.scaled_dot_product_attention

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, options: dict[str, Any], *inputs: Any) -> Any:
            with simulated_cuda.one_kernel("attention"), torch.enable_grad():
                context.inputs = [
                    value if value is None else value.detach().requires_grad_(value.is_floating_point()) for value in inputs
                ]
                context.output = compute(*context.inputs, **options)
            return context.output.detach()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            wanted = [value for value in context.inputs if value is not None and value.requires_grad]
            with simulated_cuda.one_kernel("attention backward"):
                found = iter(torch.autograd.grad(context.output, wanted, gradient))
            return None, *(next(found) if value is not None and value.requires_grad else None for value in context.inputs)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        return Fused.apply(options, query, key, value, attn_mask)

    torch.nn.functional.scaled_dot_product_attention = attention


def all_counts(name: str) -> list[Counter[str]]:
    from hftune import Recipe

    words = ("train.batch_size=12", "train.micro_batch_size=12", "train.micro_batch_tokens=null", "train.parts=1")
    recipe = Recipe.load(name, *words, "train.mixed_precision=bf16", "task.max_train_samples=48", "task.max_eval_samples=4")
    return [theirs(recipe), *(ours(recipe, packing) for packing in ("off", "auto"))]


def ours(recipe: Any, packing: str) -> Counter[str]:
    """Count what the second step of a training launches."""
    from hftune.build import Parts, build_model, load_datasets, plan_batches
    from hftune.distributed.accelerator import start_accelerator
    from hftune.optim import build_optimizer
    from hftune.settle import settle_packing
    from hftune.strategies.data_parallel import DataParallel

    recipe = replace(recipe, train=replace(recipe.train, packing=packing))
    datasets = load_datasets(recipe)
    parts = Parts(datasets, plan_batches(recipe, datasets["train"]), build_model(recipe), 4)
    strategy = DataParallel(start_accelerator(recipe.train), recipe.task)
    settle_packing(recipe, strategy, parts)
    strategy.prepare(parts.model, build_optimizer(parts.model, recipe))
    counts = Counter[str]()
    for step, batch in enumerate(strategy.batches(datasets["train"], islice(parts.plan.epoch(0), 2), 0)):
        before = Counter(simulated_cuda.launches())
        strategy.forward_backward(batch, recipe.seed, step)
        counts = Counter(simulated_cuda.launches()) - before
        strategy.sharding.clear_gradient()
    return counts


def theirs(recipe: Any) -> Counter[str]:
    """Count what the model's own loss and its gradient launch."""
    import torch

    from hftune.build import load_datasets

    data, model = load_datasets(recipe)["train"], recipe.task.build_model().cuda().train()
    counts = Counter[str]()
    for step in range(2):
        rows = [data[index] for index in range(12 * step, 12 * step + 12)]
        batch = {name: value.cuda() for name, value in recipe.task.collate(rows).items()}
        batch = {
            name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "labels", "token_type_ids")
        }
        before = Counter(simulated_cuda.launches())
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        counts = Counter(simulated_cuda.launches()) - before
        model.zero_grad()
    return counts


if __name__ == "__main__":
    main()
