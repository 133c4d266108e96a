"""What hftune, TRL, axolotl and LLaMA-Factory train on the same chats, under 23 real chat templates.

    python benchmarks/chat_templates.py [--templates qwen3 gptoss]

The templates, the chats and the oracle are those of tests/unit/test_chat_templates.py. The other tools are asked for the tokens
and labels that their trainers would make, with their defaults for training on the assistant alone, LLaMA-Factory with its own
templates for the models; a tool that is not installed has no column. A chat is exact if every answer is predicted from the very
tokens that inference feeds, and trained as the model writes it, with its end and nothing else. Otherwise:

    context    other tokens stand before an answer than those that inference feeds
    other      an answer is written in another way than the model writes it
    part       not all of an answer is trained
    no end     an answer is trained, but not the token at which generation stops
    more       something is trained that nobody's answer is
    refused    the tool raises an error
    trained    hftune refuses the chat, since the template leaves out a part of it or prompts in another way; the tool does not
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import parse_options, print_table, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.chat_oracle import CHATS, EXPECTED, generated, tokenizer_of, tools_of_kind  # noqa: E402

NONE = -100
ORDER = ("exact", "more", "no end", "part")
"""Verdicts on labels, the worst last."""
LLAMA_FACTORY = {
    **{name: name for name in ("alpaca", "chatml", "qwen3", "gemma4")},
    **{"qwen2_5": "qwen", "qwen3_instruct_2507": "qwen3_nothink", "qwen3_vl": "qwen3_vl_nothink", "qwen3_5_think": "qwen3_5"},
    **{"qwen3_5_nothink": "qwen3_5_nothink", "qwen3_6": "qwen3_6", "glm4moe": "glm4_moe", "gptoss": "gpt_oss"},
    **{"gemma4_v5": "gemma4", "phi3": "phi", "phi3_5": "phi", "phi_4": "phi4", "deepseek_v3": "deepseek3"},
    **{
        "mistral_v1": "mistral",
        "mistral_v2v3": "mistral",
        "mistral_v3_tekken": "ministral",
        "mistral_v7_tekken": "mistral_small",
    },
    **{"deepseekv3": "deepseekr1", "deepseek_r1_distill": "deepseekr1"},
}
"""LLaMA-Factory's own templates for these models: it does not use theirs."""

Samples = list[tuple[list[int], list[int]]]
"""Tokens, and for each of them itself if it is trained, or else NONE."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates", nargs="*", choices=[*EXPECTED], default=[*EXPECTED], help="default: all")
    options = parse_options(parser, smoke={"templates": ["chatml", "qwen3", "deepseekv3"]})
    logging.disable(logging.WARNING)
    tools = {"hftune": hftune_samples, "trl": trl_samples, "axolotl": axolotl_samples, "llamafactory": llamafactory_samples}
    installed = {tool: samples for tool, samples in tools.items() if importlib.util.find_spec(tool) is not None}
    verdicts = {
        (name, tool): {kind: judged(name, kind, samples) for kind in CHATS}
        for name in options.templates
        for tool, samples in installed.items()
    }
    rows = [[name, *(summary(verdicts[name, tool]) for tool in installed)] for name in options.templates]
    table = print_table("What is trained", ["template", *map(titled, installed)], rows)
    save(__file__, options, [table], totals(verdicts, installed))


def totals(verdicts: Mapping[tuple[str, str], Mapping[str, str]], tools: Iterable[str]) -> dict[str, str]:
    """Return how many chats each tool trains exactly."""
    names = {name for name, _ in verdicts}
    possible = [(name, kind) for name in names for kind in CHATS if not isinstance(generated(name, kind), str)]
    counts = {tool: sum(verdicts[name, tool][kind] == "exact" for name, kind in possible) for tool in tools}
    what = f"of {len(possible)} chats under {len(names)} chat templates, trained exactly"
    return {what: ", ".join(f"{titled(tool)} {count}" for tool, count in counts.items())}


def titled(tool: str) -> str:
    """Return the name of a tool with its version."""
    return tool if tool == "hftune" else f"{tool} {version(tool)}"


def summary(verdicts: Mapping[str, str]) -> str:
    """Return the chats by verdict, those that are exact first and only counted."""
    kinds = {verdict: [kind for kind in verdicts if verdicts[kind] == verdict] for verdict in dict.fromkeys(verdicts.values())}
    exact = f"{len(kinds.pop('exact', []))} exact"
    return "; ".join([exact, *(f"{verdict}: {', '.join(found)}" for verdict, found in sorted(kinds.items()))])


def judged(name: str, kind: str, samples: Callable[[str, str], Samples]) -> str:
    """Return what is to be said of the samples of a chat; see the top of this file."""
    answers, (tokenizer, stops) = generated(name, kind), tokenizer_of(name)
    try:
        made = samples(name, kind)
    except Exception:  # each tool has its own ways to refuse a chat
        return "refused"
    if isinstance(answers, str):
        return "trained"
    wanted: list[set[int]] = [set() for _ in made]
    worst = "exact"
    for prompt, text in answers:
        spans = {place: _span(tokenizer, sample, prompt, text) for place, sample in enumerate(made)}
        if not any(spans.values()):
            return "other" if any(tokens[: len(prompt)] == prompt for tokens, _ in made) else "context"
        found = {place: span for place, span in spans.items() if span}
        verdicts = [_trained(made[place][1], span, {*stops, tokenizer.eos_token_id}) for place, span in found.items()]
        worst = max(worst, min(verdicts, key=ORDER.index), key=ORDER.index)
        for place, span in found.items():
            wanted[place].update(span)
    trained = [{place for place, label in enumerate(labels) if label != NONE} for _, labels in made]
    has_more = any(places - answers_places for places, answers_places in zip(trained, wanted, strict=True))
    return max(worst, "more" if has_more else "exact", key=ORDER.index)


def _span(tokenizer: Any, sample: tuple[list[int], list[int]], prompt: list[int], text: str) -> range | None:
    """Return the positions of an answer, with that of its end, if the prompt and it begin the sample."""
    tokens, body = sample[0], text[: text.rindex("<")]  # all ends begin with it
    if tokens[: len(prompt)] != prompt:
        return None
    for stop in range(len(prompt), len(tokens) + 1):
        if tokenizer.decode(tokens[len(prompt) : stop]) == body:
            return range(len(prompt), stop + 1)
    return None


def _trained(labels: list[int], span: range, stops: set[int]) -> str:
    """Return the verdict on the labels of an answer."""
    if any(labels[place] == NONE for place in span[:-1]):
        return "part"
    return "exact" if span[-1] < len(labels) and labels[span[-1]] in stops else "no end"


def hftune_samples(name: str, kind: str) -> Samples:
    from hftune.data.chats import ChatFormat, messages_of

    tokenizer, stops = tokenizer_of(name)
    samples = ChatFormat(tokenizer, stops=stops).samples(messages_of({"messages": CHATS[kind]}), tools_of_kind(kind))
    return [([*sample.input_ids, sample.labels[-1]], [NONE, *sample.labels]) for sample in samples]


def _chat(kind: str) -> list[dict[str, Any]]:
    """Return a chat with an empty text beside tool calls, which not all tools take to be missing."""
    return [{**message, "content": message["content"] or ""} for message in CHATS[kind]]


def trl_samples(name: str, kind: str) -> Samples:
    """What SFTTrainer tokenizes with assistant_only_loss=True."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    tokenizer, _ = tokenizer_of(name)
    template = None if has_generation_markers(tokenizer.chat_template) else get_training_chat_template(tokenizer)
    settings = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(_chat(kind), tools=tools_of_kind(kind), **settings)
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return [(found["input_ids"], [token if mask else NONE for token, mask in pairs])]


def axolotl_samples(name: str, kind: str) -> Samples:
    """What a data set of type chat_template becomes, with the template of the tokenizer."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    tokenizer, _ = tokenizer_of(name)
    prompter = ChatTemplatePrompter(tokenizer, chat_template=tokenizer.chat_template, max_length=4096)
    settings = {"train_on_inputs": False, "sequence_len": 4096, "roles_to_train": ["assistant"], "train_on_eos": "turn"}
    row = {"messages": _chat(kind), "tools": tools_of_kind(kind)}
    found = ChatTemplateStrategy(prompter, tokenizer=tokenizer, **settings).tokenize_prompt(row)
    return [([*found["input_ids"]], [*found["labels"]])]


def llamafactory_samples(name: str, kind: str) -> Samples:
    """What its supervised stage makes: the pairs of encode_multiturn, joined as SupervisedDatasetProcessor does."""
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))  # imported for models that hear
    from llamafactory.data.template import TEMPLATES

    template, (tokenizer, _) = deepcopy(TEMPLATES[LLAMA_FACTORY[name]]), tokenizer_of(name)
    if template.replace_eos:
        tokenizer.eos_token = template.stop_words[0]
    system, messages = _llamafactory_messages(_chat(kind), template.thought_words)
    tools = json.dumps([tool["function"] for tool in tools_of_kind(kind) or []]) if tools_of_kind(kind) else None
    tokens: list[int] = []
    labels: list[int] = []
    for turn, (source, target) in enumerate(template.encode_multiturn(tokenizer, messages, system, tools)):
        masked = [NONE] * len(source)
        if template.efficient_eos and turn:
            masked[0] = tokenizer.eos_token_id
        tokens, labels = tokens + source + target, labels + masked + target
    if template.efficient_eos:
        tokens, labels = [*tokens, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]
    return [(tokens, labels)]


def _llamafactory_messages(chat: Sequence[dict[str, Any]], thought_words: Sequence[str]) -> tuple[str | None, list[dict]]:
    """Return a chat as its converters hand it on: the system prompt apart, thoughts inside the content, calls as JSON."""
    system, messages = None, []
    for message in chat:
        role, content = {"tool": "observation"}.get(message["role"], message["role"]), message["content"]
        if role == "system":
            system = content
            continue
        if "reasoning_content" in message:
            content = f"{thought_words[0]}{message['reasoning_content']}{thought_words[1]}{content}"
        if message.get("tool_calls"):
            role, content = "function", json.dumps([call["function"] for call in message["tool_calls"]])
        messages.append({"role": role, "content": content})
    return system, messages


if __name__ == "__main__":
    main()
