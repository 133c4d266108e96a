"""Real chat templates: what is trained is what inference feeds and what the model would then write, token by token."""

import hashlib
import itertools
import re

import pytest

from hftune.data.chats import NO_LABEL, ChatError, ChatFormat, messages_of
from tests.support.chat_oracle import CHATS, EXPECTED, generated, tokenizer_of, tools_of_kind
from tests.support.chat_tokenizers import TEMPLATES


def trained_runs(sample):
    """Return the runs of trained tokens of a sample, each with all tokens before it."""
    tokens = [*sample.input_ids, sample.labels[-1]]
    runs = []
    for is_trained, run in itertools.groupby(enumerate(sample.labels, 1), key=lambda place: place[1] != NO_LABEL):
        places = [place for place, _ in run]
        if is_trained:
            assert [sample.labels[place - 1] for place in places] == tokens[places[0] : places[-1] + 1], "the next token each"
            runs.append((tokens[: places[0]], tokens[places[0] : places[-1] + 1]))
    return runs


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_trained_is_what_inference_feeds_and_the_model_writes(name, kind):
    answers = generated(name, kind)
    tokenizer, stops = tokenizer_of(name)
    form = ChatFormat(tokenizer, stops=stops)
    messages = messages_of({"messages": CHATS[kind]})
    if isinstance(answers, str):
        with pytest.raises(ChatError, match=re.escape(answers)):
            form.samples(messages, tools_of_kind(kind))
        return
    samples = form.samples(messages, tools_of_kind(kind))
    runs = sorted((run for sample in samples for run in trained_runs(sample)), key=lambda run: len(run[0]))
    assert len(runs) == len(answers)
    for (prompt, text), (context, trained) in zip(answers, runs, strict=True):
        assert context == prompt, tokenizer.decode(context)
        assert tokenizer.decode(trained) == text
        assert [token for token in trained if token in form.stops] == trained[-1:], "generation ends there, and not before"
    if kind == "turns":
        assert len(samples) == EXPECTED[name].samples


def test_each_template_is_the_file_that_its_source_has():
    lines = (TEMPLATES / "SOURCES.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    for name, _family, licence, _where, digest in rows:
        content = (TEMPLATES / name.strip("`")).read_bytes()
        assert hashlib.sha256(content).hexdigest().startswith(digest.strip("`")), name
        assert licence in ("Apache-2.0", "MIT")
    assert {name.strip("`") for name, *_ in rows} == {path.name for path in TEMPLATES.glob("*.jinja")}
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == EXPECTED.keys()
