# ruff: noqa: RUF001 - the tokens of DeepSeek have full-width bars
"""What language models are fed and write under their chat templates: the oracle for hftune.data.chats, of which it knows nothing.

It asks transformers for the tokens that inference feeds before each answer. What the model then writes is in EXPECTED, by hand.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tests.support.chat_tokenizers import shipped

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one": [said("user", "Hello"), said("assistant", "It is sunny.")],
    "turns": [
        said("system", "Be brief."),
        *itertools.chain(*([said("user", f"Q{i}"), said("assistant", f"A{i}. It is {i}.")] for i in range(3))),
    ],
    "thoughts": [
        *itertools.chain(
            *([said("user", f"Q{i}"), said("assistant", f"A{i}.", reasoning_content=f"hm {i}")] for i in range(2))
        ),
    ],
    "call": [
        said("user", "Weather?"),
        said("assistant", None, tool_calls=[CALL]),
        said("tool", "sunny", name="weather", tool_call_id="abcdefghi"),
        said("assistant", "It is sunny."),
    ],
    "spaces": [said("user", "Hello"), said("assistant", "\n\n  two \n")],
}


@dataclass
class Expected:
    """What a model writes: ``says`` an answer, ``thinks`` thoughts and an answer, ``calls`` a tool. None: refused."""

    says: str
    thinks: str | None = None
    calls: str | None = None
    spaces: str = "\n\n  two \n"
    samples: int = 1
    """Of a chat of three turns."""
    eos: str = "<|im_end|>"
    stops: tuple[str, ...] = ()
    """Further tokens of the checkpoint's generation_config."""
    bos: str = "<s>"
    options: dict = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def answer(self, message, kind):
        """Return what the model generates in the place of this message, or None if the chat is to be refused."""
        if message.get("tool_calls"):
            return self.calls
        content = self.spaces if kind == "spaces" else message["content"]
        if "reasoning_content" in message:
            return self.thinks and self.thinks.format(content, thought=message["reasoning_content"])
        return self.says.format(content)


QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
QWEN35_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call><|im_end|>"
MISTRAL_CALL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]</s>'
NO_THOUGHTS = "Message 1: the chat template leaves out 'hm 0'."
NO_CALLS = "Message 1: the chat template leaves out 'weather'."
DEEPSEEK = {"eos": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>"}
PHI = {"eos": "<|endoftext|>", "stops": ("<|end|>", "<|assistant|>", "<|endoftext|>")}

QWEN35 = Expected(
    "\n</think>\n\n{}<|im_end|>",
    thinks="{thought}\n</think>\n\n{}<|im_end|>",
    calls="\n</think>\n\n" + QWEN35_CALL,
    spaces="two",
    samples=3,
)
EXPECTED = {
    "chatml": Expected("{}<|im_end|>"),
    "alpaca": Expected("{}</s>", eos="</s>"),
    "qwen2_5": Expected("{}<|im_end|>", calls=QWEN_CALL, stops=("<|endoftext|>",)),
    "qwen3": Expected(
        "<think>\n\n</think>\n\n{}<|im_end|>",
        thinks="<think>\n{thought}\n</think>\n\n{}<|im_end|>",
        calls="<think>\n\n</think>\n\n" + QWEN_CALL,
        spaces="  two \n",
        samples=3,
        stops=("<|endoftext|>",),
    ),
    "qwen3_instruct_2507": Expected("{}<|im_end|>", calls=QWEN_CALL),
    "qwen3_vl": Expected("{}<|im_end|>", calls=QWEN_CALL),
    "qwen3_5_think": QWEN35,
    "qwen3_5_nothink": Expected(
        "{}<|im_end|>",
        calls=QWEN35_CALL,
        spaces="two",
        samples=3,
        refused={"thoughts": "the chat template prompts for an answer with '\\n</think>"},
    ),
    "qwen3_6": QWEN35,
    "glm4moe": Expected(
        "\n<think></think>\n{}<|user|>",
        thinks="\n<think>{thought}</think>\n{}<|user|>",
        calls="\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call><|observation|>",
        spaces="two",
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
    ),
    "gptoss": Expected(
        "<|channel|>final<|message|>{}<|return|>",
        thinks="<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
        calls=' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        samples=3,
        eos="<|return|>",
        stops=("<|call|>", "<|endoftext|>"),
    ),
    "gemma4": Expected(
        "{}<turn|>",
        calls='<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>',
        spaces="two",
        eos="<turn|>",
        stops=("<|tool_response>",),
    ),
    "gemma4_v5": Expected(
        "{}<turn|>",
        thinks="<|channel>thought\n{thought}\n<channel|>{}<turn|>",
        calls='<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>',
        spaces="two",
        eos="<turn|>",
        stops=("<|tool_response>",),
    ),
    "phi3": Expected("{}<|end|>", **PHI),
    "phi3_5": Expected("{}<|end|>", **PHI),
    "phi_4": Expected("{}<|im_end|>"),
    "mistral_v1": Expected(" {}</s>", eos="</s>"),
    "mistral_v2v3": Expected(" {}</s>", calls=MISTRAL_CALL.replace("]", "] ", 1), spaces="two", samples=3, eos="</s>"),
    "mistral_v3_tekken": Expected("{}</s>", calls=MISTRAL_CALL, samples=3, eos="</s>"),
    "mistral_v7_tekken": Expected("{}</s>", eos="</s>"),
    "deepseek_v3": Expected(
        "{}<｜end▁of▁sentence｜>",
        **DEEPSEEK,
        refused={
            "call": 'Message 1: the chat template refuses the chat up to here: can only concatenate str (not "dict") to str'
        },
    ),
    "deepseekv3": Expected(
        "",
        **DEEPSEEK,
        refused={
            "call": 'Message 1: the chat template refuses the chat up to here: can only concatenate str (not "dict") to str',
            **dict.fromkeys(("one", "turns", "thoughts", "spaces"), "the chat template prompts for an answer with"),
        },
    ),
    "deepseek_r1_distill": Expected(
        "", **DEEPSEEK, refused=dict.fromkeys(CHATS, "the chat template prompts for an answer with")
    ),
}


def tools_of_kind(kind):
    """Return the tools that a chat of CHATS offers."""
    return [TOOL] if kind == "call" else None


def tokenizer_of(name):
    """Return a tokenizer for a template, and the tokens at which its checkpoint's generation stops."""
    expected = EXPECTED[name]
    tokenizer = shipped(name, eos=expected.eos, bos=expected.bos, more=expected.stops)
    return tokenizer, [tokenizer.convert_tokens_to_ids(text) for text in expected.stops]


def generated(name, kind):
    """Return, for each answer of a chat, the tokens that inference feeds and the text that the model writes then.

    A reason in the place of all that, if the template cannot have the model write this chat.
    """
    chat, expected = CHATS[kind], EXPECTED[name]
    tokenizer, _ = tokenizer_of(name)
    answers = {place: expected.answer(message, kind) for place, message in enumerate(chat) if message["role"] == "assistant"}
    if kind in expected.refused or None in answers.values():
        return expected.refused.get(kind) or (NO_THOUGHTS if kind == "thoughts" else NO_CALLS)
    prompts = (
        tokenizer.apply_chat_template(chat[:place], tools=tools_of_kind(kind), add_generation_prompt=True) for place in answers
    )
    return [(prompt["input_ids"], text) for prompt, text in zip(prompts, answers.values(), strict=True)]
