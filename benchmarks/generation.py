"""Measure an evaluation of titles: the loss, and titles generated from its forward pass instead of from the sources again.

    python benchmarks/generation.py [--tokens 512 1024] [--beams 1 4] [--rounds 3]

"twice": a forward pass for the loss, then transformers' ``generate``, which reads each source once more for each beam. "once":
``generate`` starts from the cache of that forward pass, as ``TitleGeneration`` evaluates. Both must give the same titles. The
second table compares TransformerLM's ``generate`` with and without its cache; both must give the same texts.

Models are new and wide enough for their random weights to disagree on the next token; the titles are of equal length. Seconds
are the CPU time of one thread, the median of rounds in which the contenders take turns. Goal: 2.5 times with 4 beams.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from contest import take_turns
from record import parse_options, print_table, save
from transformers import BigBirdConfig, GenerationConfig

from hftune.models.bigbird import PrefixLM, PrefixLMConfig, build_encoder_decoder
from hftune.models.generation import continued
from hftune.models.transformer_lm import TransformerLM, TransformerLMConfig
from hftune.tasks import TitleGeneration

PAD, START, END = 0, 1, 2
IDS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
VOCAB = 8000
ARCHITECTURES = ("prefix_lm", "encoder_decoder")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        titles, gain = compare_titles(options)
        texts, texts_gain = compare_texts(options)
    sources = f"sources of {options.tokens[-1]} tokens, {options.beams[-1]} beams, {options.layers} layers of {options.width}"
    measured = {
        f"loss and titles, {name}, {sources}": f"{gain[name]:.1f} x reading them again" for name in options.architectures
    }
    measured[f"TransformerLM, {options.texts[-1]} tokens generated"] = f"{texts_gain:.1f} x without its cache"
    save(__file__, options, [titles, texts], measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024], help="of the longest source of a batch")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--rows", type=int, default=2, help="sources in a batch")
    parser.add_argument("--title", type=int, default=20, help="tokens of a title")
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 128], help="tokens that TransformerLM generates")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    sizes = {"tokens": [64], "beams": [2], "rows": 2, "title": 4, "texts": [8], "width": 64, "layers": 1}
    return parse_options(parser, {**sizes, "rounds": 1})


def compare_titles(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """Print a line for each architecture, length and number of beams; return the table, and each architecture's last gain."""
    rows, gains = [], {}
    for name in options.architectures:
        model = build_model(name, options)
        task = TitleGeneration(architecture=name)
        task.text_tokenizer = SimpleNamespace(pad_token_id=PAD, cls_token_id=START, sep_token_id=END)
        for tokens in options.tokens:
            batch = task.collate(examples(tokens, options))
            for beams in options.beams:
                length = {"min_new_tokens": options.title, "max_new_tokens": options.title}
                model.generation_config = GenerationConfig(**IDS, **length, num_beams=beams)
                twice, once = race(
                    {
                        "twice": partial(read_twice, model, task, batch),
                        "once": partial(read_once, model, task, batch),
                    },
                    options.rounds,
                )
                gains[name] = twice / once
                rows.append((name, tokens, beams, f"{twice:.2f}", f"{once:.2f}", f"{gains[name]:.2f}x"))
    title = (
        f"Loss and titles of {options.title} tokens for {options.rows} sources, {options.layers} layers of {options.width}; "
        f"CPU s, {options.threads} thread, median of {options.rounds} rounds; the titles are the same"
    )
    return print_table(title, ("", "source", "beams", "twice", "once", "gain"), rows), gains


def build_model(name: str, options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    fields = {
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "intermediate_size": 4 * options.width,
        "max_position_embeddings": max(options.tokens) + options.title + 8,
        "vocab_size": VOCAB,
        "initializer_range": 0.1,  # five times BERT's: the next token is not a matter of rounding
    }
    if name == "prefix_lm":
        return PrefixLM(PrefixLMConfig(**fields, pad_token_id=PAD)).eval()
    special = {"start_token_id": START, "end_token_id": END, "pad_token_id": PAD}
    return build_encoder_decoder(None, BigBirdConfig(**fields, pad_token_id=PAD), **special, **fields).eval()


def examples(tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return sources from ``tokens`` down to three quarters of that, as in a sorted batch, and titles."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(count: int) -> list[int]:
        return [START, *torch.randint(3, VOCAB, (count - 2,), generator=generator).tolist(), END]

    lengths = [tokens - index * tokens // (4 * options.rows) for index in range(options.rows)]
    return [{"source": draw(length), "title": draw(options.title + 1), "index": 0} for length in lengths]


def read_twice(model: Any, task: TitleGeneration, batch: Mapping[str, Any]) -> list[list[int]]:
    """Compute what the loss needs, then generate titles from the sources; return the titles' tokens."""
    model(**task.inputs(batch))
    return generate(model, task, batch, {})


def read_once(model: Any, task: TitleGeneration, batch: Mapping[str, Any]) -> list[list[int]]:
    """Compute what the loss needs, and generate titles from that."""
    outputs = model(**task.evaluation_inputs(batch))
    return generate(model, task, batch, continued(outputs, batch["title"].shape[1], model.generation_config))


def generate(model: Any, task: TitleGeneration, batch: Mapping[str, Any], read: Mapping[str, Any]) -> list[list[int]]:
    if task.architecture == "encoder_decoder":
        return model.generate(batch["source"], attention_mask=batch["source_mask"], **read)[:, 1:].tolist()
    start = batch["title"][:, :1]
    inputs = task.inputs({**batch, "title": start, "labels": start})
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    return model.generate(**prompt, **read)[:, prompt["input_ids"].shape[1] :].tolist()


def compare_texts(options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Print a line for each number of tokens that TransformerLM generates; return the table and the last gain."""
    torch.manual_seed(0)
    longest = max(options.texts) + 32
    config = TransformerLMConfig(
        vocab_size=VOCAB,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        max_position_embeddings=longest,
    )
    model, rows, gain = TransformerLM(config).eval(), [], 0.0
    prompt = torch.randint(3, VOCAB, (options.rows, 32))
    for tokens in options.texts:
        settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": PAD}
        write = {
            f"use_cache={cached}": partial(model.generate, prompt, use_cache=cached, **settings) for cached in (False, True)
        }
        without, cached = race({name: lambda call=call: call().tolist() for name, call in write.items()}, options.rounds)
        gain = without / cached
        rows.append(("transformer_lm", 32, tokens, f"{without:.2f}", f"{cached:.2f}", f"{gain:.2f}x"))
    title = f"Texts of {options.rows} prompts, continued greedily by TransformerLM; CPU s; texts are the same"
    return print_table(title, ("", "prompt", "generated", "without a cache", "with a cache", "gain"), rows), gain


def race(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> list[float]:
    """Return each contender's median CPU seconds, after a first call that is not timed and in which all must agree.

    Raises:
        RuntimeError: they do not return the same.
    """
    results = [contender() for contender in contenders.values()]
    if any(result != results[0] for result in results):
        raise RuntimeError(f"{' and '.join(contenders)} do not generate the same.")

    def timed(contender: Callable[[], Any], turn: int) -> float:
        began = time.process_time()
        contender()
        return time.process_time() - began

    times = take_turns({name: partial(timed, contender) for name, contender in contenders.items()}, rounds)
    return [median(seconds) for seconds in times.values()]


if __name__ == "__main__":
    main()
