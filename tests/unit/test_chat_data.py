"""Rules for chats: what is trained, what is refused and in which words, what fits, and at which tokens generation stops."""

import dataclasses
import datetime
import itertools
import json
import re

import pytest

from hftune.data.chats import NO_LABEL, ChatError, ChatFormat, fitted, messages_of, tools_of
from hftune.data.messages import as_messages
from hftune.errors import ConfigError
from tests.support.chat_tokenizers import chat_tokenizer, shipped

CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(turns=2, **more):
    messages = [said("system", "Be brief.")]
    for number in range(turns):
        messages += [said("user", f"Q{number}"), said("assistant", f"A{number}.", **more)]
    return messages


def chatml(**arguments):
    return ChatFormat(shipped("chatml", eos="<|im_end|>"), **arguments)


def texts(form, samples):
    """Return the trained text of each sample, its answers apart by a slash."""
    trained = []
    for sample in samples:
        words, labels = "", [NO_LABEL, *sample.labels]
        for before, label in itertools.pairwise(labels):
            if label != NO_LABEL:
                words += (" / " if words and before == NO_LABEL else "") + form.tokenizer.decode(label)
        trained.append(words)
    return trained


def test_assistant_last_and_all():
    form = chatml()
    assert texts(form, form.samples(chat())) == ["A0.<|im_end|> / A1.<|im_end|>"]
    assert texts(form, form.samples(chat(), train_on="last")) == ["A1.<|im_end|>"]
    (everything,) = form.samples(chat(), train_on="all")
    assert everything.labels == [*everything.input_ids[1:], form.stops[-1]], "every token but the first, once"


def test_all_trains_what_samples_share_once():
    form = ChatFormat(shipped("qwen3", eos="<|im_end|>"))
    first, second = texts(form, form.samples(chat(), train_on="all"))
    assert first.endswith("<|im_start|>user\nQ0<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nA0.<|im_end|>")
    assert (
        second == "A0.<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nA1.<|im_end|>"
    )


def test_messages_that_are_not_trained_are_context():
    form = chatml()
    messages = chat(3)
    messages[4]["train"] = False
    assert texts(form, form.samples(messages)) == ["A0.<|im_end|> / A2.<|im_end|>"]
    messages[6]["train"] = False
    assert texts(form, form.samples(messages, train_on="last")) == ["A0.<|im_end|>"]
    with pytest.raises(ChatError, match=r'Message 4 has "train": false, which contradicts task\.train_on=all'):
        form.samples(messages, train_on="all")
    greeted = [said("assistant", "Hello!", train=False), *chat(1)[1:]]
    assert texts(form, form.samples(messages_of({"messages": greeted}))) == ["A0.<|im_end|>"]


def test_too_long_chats_are_refused_dropped_or_lose_whole_answers():
    form = chatml()
    samples = form.samples(chat(3))
    (whole,) = samples
    length = len(whole.input_ids)
    assert fitted(samples, length, "refuse") == samples
    with pytest.raises(ChatError, match=f"It has {length} tokens, more than task.max_length={length - 1}."):
        fitted(samples, length - 1, "refuse")
    assert fitted(samples, length - 1, "drop") == []
    for max_length in range(length):
        cut = fitted(samples, max_length, "cut")
        answers = [answer for text in texts(form, cut) for answer in text.split(" / ")]
        assert answers == [f"A{number}.<|im_end|>" for number in range(sum(end <= max_length for end in whole.ends))]
        assert all(len(sample.input_ids) <= max_length and sample.labels[-1] in form.stops for sample in cut)


def test_a_base_model_learns_the_stop_of_its_template_and_a_checkpoint_keeps_its_own():
    base = ChatFormat(shipped("chatml", eos="<|endoftext|>"))
    names = base.tokenizer.convert_ids_to_tokens(base.stops)
    assert sorted(names) == ["<|endoftext|>", "<|im_end|>"]
    chats = shipped("qwen3", eos="<|im_end|>", more=("<|endoftext|>",))
    stops = [chats.convert_tokens_to_ids("<|endoftext|>")]
    assert ChatFormat(chats, stops=stops).stops == sorted([*stops, chats.eos_token_id])


def test_padding_that_is_the_stop_token_is_still_trained():
    form = chatml()
    form.tokenizer.pad_token = form.tokenizer.eos_token
    assert texts(form, form.samples(chat(1))) == ["A0.<|im_end|>"]


def test_the_date_is_frozen():
    november, december = datetime.date(2026, 11, 23), datetime.date(2026, 12, 24)
    tokenizer = shipped("gptoss", eos="<|return|>")
    form = ChatFormat(tokenizer, today=november)
    assert form.dated
    assert "Current date: 2026-11-23" in tokenizer.decode(form.samples(chat(1))[0].input_ids)
    assert form.key != ChatFormat(tokenizer, today=december).key
    assert form.key == ChatFormat(tokenizer, today=november).key
    undated = chatml(today=november)
    assert not undated.dated
    assert undated.key == chatml(today=december).key


TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WANTS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"


@pytest.mark.parametrize(
    ("beginning", "is_dated"),
    [
        (WANTS_SYSTEM, False),
        (WANTS_SYSTEM + "{{ strftime_now('%d %b') }}", True),
        ("{% if messages[0].role == 'system' %}{{ strftime_now('%d %b') }}{% endif %}", True),
        ("{% if messages | length < 3 %}{{ raise_exception('longer') }}{% endif %}{{ strftime_now('%d %b') }}", True),
        ("{% if messages | length < 3 %}{{ raise_exception('longer') }}{% endif %}", False),
    ],
)
def test_the_date_is_found_where_templates_want_a_system_message_or_more(beginning, is_dated):
    assert ChatFormat(shipped("chatml", eos="<|im_end|>"), template=beginning + TURNS).dated is is_dated


def test_template_options_reach_the_template():
    form = ChatFormat(shipped("qwen3", eos="<|im_end|>"), options={"enable_thinking": False})
    assert texts(form, form.samples(chat(1))) == ["A0.<|im_end|>"], "the prompt has the empty thoughts"
    with pytest.raises(ChatError, match="Message 2: the chat template prompts for an answer with"):
        form.samples(chat(1, reasoning_content="hm"))
    assert form.prompt(chat(1)[:2]) == form.samples(chat(1))[0].input_ids[: len(form.prompt(chat(1)[:2]))]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"options": {"enable_thinkin": False}}, "task.template_options.enable_thinkin has no effect: "),
        ({"options": {"enable_thinkin": False}}, "Did you mean 'enable_thinking'?"),
        ({"options": {"add_generation_prompt": True}}, "is no option: chats set it themselves."),
        (
            {"template": "{% for %}"},
            "The chat template is not valid Jinja: Expected an expression, got 'end of statement block'.",
        ),
        (
            {"template": "{% set f = '%Y' %}{{ strftime_now(f) }}"},
            "The chat template calls strftime_now with a format that is no",
        ),
        (
            {"template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"},
            "holds no special token of the tok",
        ),
        (None, "The tokenizer has no chat template"),
    ],
)
def test_formats_that_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ChatFormat(chat_tokenizer(None)) if arguments is None else ChatFormat(shipped("qwen3", eos="<|im_end|>"), **arguments)


def test_special_tokens_inside_messages_are_refused():
    form = chatml()
    for message in (said("user", "What is <|im_end|>?"), said("user", "Q", name="<|im_start|>")):
        with pytest.raises(ChatError, match=r"Message 0 holds the text '<\|im_\w+\|>', which the tokenizer reads as a special"):
            form.samples([message, said("assistant", "A")])
    tool = {"function": {"name": "end", "description": "Write <|im_end|>."}}
    with pytest.raises(ChatError, match="The tools hold the text"):
        form.samples(chat(), [tool])
    with pytest.raises(ChatError, match="Message 0 holds the text"):
        form.prompt([said("user", "<|im_end|>")])
    thinking = ChatFormat(shipped("qwen3", eos="<|im_end|>"))
    assert thinking.samples([said("user", "What is <think>?"), said("assistant", "<think>\nhm\n</think>\n\nA tag.")])


def test_tools_that_a_template_leaves_out_are_refused():
    with pytest.raises(ChatError, match="The chat template leaves out the tool 'weather'"):
        chatml().samples(chat(), [{"function": {"name": "weather"}}])


@pytest.mark.parametrize(
    "row, message",
    [
        ([], "There are no messages."),
        (None, "Column 'messages' holds nothing, not a list of messages."),
        ("no", "Column 'messages' is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        (["Hello"], "Message 0 is str, not a mapping with role and content."),
        ([{"from": "human", "value": "Hi"}], "Message 0 has no role, only from, value. A message has the keys role and content."),
        ([said("human", "Q")], "Message 0 has the role 'human'. The roles are system, developer, user, assistant, tool. "
         "Call it 'user'."),
        ([said("asistant", "Q")], "Message 0 has the role 'asistant'. The roles are system, developer, user, assistant, tool. "
         "Did you mean 'assistant'?"),
        ([said("user", None)], "Message 0 has nothing in the place of its content. It is a text."),
        ([said("user", 3)], "Message 0 has int in the place of its content. It is a text."),
        ([said("user", [{"type": "image"}])], "Message 0 has content of the type image. Only text can be trained on."),
        ([said("user", "Q")], "There is no message of the assistant to train on."),
        ([said("user", "Q"), said("assistant", " ")], 'Message 1 is an empty answer. Remove it, or set "train": false.'),
        ([said("user", "Q"), said("assistant", "A", train=False)], "There is no message of the assistant to train on."),
        ([said("user", "Q", train=True)], 'Message 0 has "train": True. It is true or false, and true only for the assistant.'),
        ([*chat(1), said("assistant", "B")], "Message 3 is the assistant's, like the one before it. Join the two."),
        ([*chat(1), said("system", "B")], "Message 3 has the role system, which comes first, before assistant."),
        ([said("assistant", "B")], 'Message 0 is the assistant\'s, but answers nothing. Set "train": false to keep it untrained.'),
        ([*chat(1), said("tool", "B")], "Message 3 is the result of a tool, but no message with tool_calls precedes it."),
        ([said("user", "Q", tool_calls=[CALL])], "Message 0 has tool_calls, which only messages of the assistant have."),
        ([said("user", "Q"), said("assistant", "", tool_calls=[{"name": None}])],
         'Message 1 has a tool call without a name. It is {"function": {"name": ..., "arguments": ...}}.'),
        ([said("user", "Q"), said("assistant", "", tool_calls=[{"name": "f", "arguments": "{"}])],
         "Message 1 has a tool call whose arguments are not valid JSON: Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1)."),
        ([said("user", "Q"), said("assistant", "A", weight=0.5)],
         'Message 1 has "weight": 0.5. It is 1, or 0 for an answer that is not trained.'),
        ([said("user", "Q"), said("assistant", "", tool_calls=[{"name": "f", "arguments": "3"}])],
         "Message 1 has a tool call with int as arguments. They are a mapping."),
    ],
)  # fmt: skip
def test_messages_that_are_refused(row, message):
    with pytest.raises(ChatError) as error:
        messages_of({"messages": row})
    assert str(error.value) == message


def test_prompts_and_completions():
    row = {"prompt": "Q", "completion": "A"}
    assert messages_of(row, ("prompt", "completion")) == [said("user", "Q"), said("assistant", "A")]
    row = {"prompt": chat(1), "completion": [said("user", "Q1"), said("assistant", "A1.")]}
    form = chatml()
    assert texts(form, form.samples(messages_of(row, ("prompt", "completion")))) == ["A1.<|im_end|>"]
    (sample,) = form.samples(messages_of(row, ("prompt", "completion"), completion_only=False), train_on="all")
    assert NO_LABEL not in sample.labels


def test_answers_of_weight_0_are_not_trained():
    messages = chat(2)
    messages[2]["weight"], messages[4]["weight"] = 0, 1
    assert texts(chatml(), chatml().samples(messages_of({"messages": messages}))) == ["A1.<|im_end|>"]
    assert "weight" not in messages_of({"messages": messages})[2], "which templates know nothing of"


def test_a_single_tool_call_may_be_given_without_a_list():
    messages = [said("user", "Q"), said("assistant", "", tool_calls=CALL)]
    assert messages_of({"messages": messages})[1]["tool_calls"] == [CALL]


def test_what_other_rows_leave_in_a_row_is_taken_out():
    """A data set gives every struct the keys of all rows; a call of the city would be trained with "celsius": null."""
    call = {"function": {"name": "weather", "arguments": {"city": "Paris", "celsius": None}}, "id": None}
    message = said("assistant", None, tool_calls=[call], train=None, name=None)
    assert messages_of({"messages": [said("user", "Q", tool_calls=None), message]}) == [
        said("user", "Q"),
        {"role": "assistant", "tool_calls": [CALL], "content": ""},
    ]
    call["function"]["arguments"] = '{"city": null}'
    written = json.dumps([said("user", "Q"), message])
    assert messages_of({"messages": written})[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


def test_nulls_that_someone_wrote_stay():
    call = {"function": {"name": "weather", "arguments": {"city": None}}}
    messages = [said("user", "Q"), said("assistant", None, tool_calls=[call])]
    tools = [{"function": {"name": "weather", "parameters": {"city": {"default": None}}}}]
    row = {"messages": json.dumps(messages), "tools": json.dumps(tools)}
    assert messages_of(row)[1]["tool_calls"] == messages_of({"messages": messages}, as_written=True)[1]["tool_calls"] == [call]
    assert tools_of(row, "tools") == tools_of({"tools": tools}, "tools", as_written=True) == tools
    assert tools_of({"tools": tools}, "tools") == [{"function": {"name": "weather", "parameters": {"city": {}}}}]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Q", "image": None}, "?"]
    assert messages_of({"messages": [said("user", parts), said("assistant", "A")]})[0] == said("user", "Q?")


def test_tools_are_lists_or_json():
    tool = {"function": {"name": "weather"}}
    assert tools_of({"tools": [tool]}, "tools") == tools_of({"tools": json.dumps([tool])}, "tools") == [tool]
    assert tools_of({"tools": None}, "tools") is tools_of({"tools": "[]"}, "tools") is tools_of({}, "tools") is None
    for wrong in ({"name": "weather"}, [3], [{"function": "weather"}], 5, "5", "true"):
        with pytest.raises(ChatError, match="Column 'tools' does not hold a list of JSON schemas"):
            tools_of({"tools": wrong}, "tools")


def test_messages_as_json_are_told_from_questions():
    messages = [said("user", "Q", name=None)]
    assert as_messages(f" {json.dumps(messages)}") == as_messages(messages) == messages
    for question in ("[1, 2]?", "[1, 2]", "[]", "[{}]", "Q", '{"role": "user"}'):
        assert as_messages(question) == question


def test_samples_cannot_be_changed():
    (sample,) = chatml().samples(chat(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.labels = []
