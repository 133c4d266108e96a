"""``hftune predict --chat`` and ``--messages``: chats with a finished model, typed or from a file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hftune.commands.arguments import read_text
from hftune.config.recipe import type_name
from hftune.errors import ConfigError, DataError
from hftune.task import Task
from hftune.tracking.console import note

HELP = "Type a message and press Enter. /new starts a new chat, /exit or Ctrl-D ends; Ctrl-C stops an answer."


def check_chats(task: Task, option: str) -> None:
    """Refuse a task that answers no chats, or raise ConfigError."""
    from hftune.tasks.chat_task import ChatTask

    if not isinstance(task, ChatTask) or (option != "--messages" and not task.generates):
        raise ConfigError(
            f"{option} is for models that answer chats, as those of the recipe sft, not for {type_name(type(task))}."
        )


def read_chats(path: str) -> list[Any]:
    """Return the chats of a jsonl file: on each line a list of messages, or a mapping with messages and, optionally, tools.

    Raises:
        ConfigError: the file cannot be read, or a line is neither.
    """
    chats = []
    for number, line in enumerate(read_text(path, "--messages").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--messages {path}: line {number} is not valid JSON: {error}.") from error
        if not isinstance(value, list) and not (isinstance(value, dict) and "messages" in value):
            raise ConfigError(f'--messages {path}: line {number} is neither a list of messages nor {{"messages": [...]}}.')
        chats.append(value)
    if not chats:
        raise ConfigError(f"--messages {path} holds no chats.")
    return chats


def chat(options: argparse.Namespace) -> int:
    """Chat in the terminal until the input ends. Answers are written as they are generated."""
    from hftune.checkpoints.run_folder import open_run

    check_chats(open_run(options.folder, options.trust_code)[0].task, "--chat")
    from hftune.inference import load_model  # imports torch: only once the arguments are known to be valid
    from hftune.tracking.console import hide_progress_bars

    hide_progress_bars()
    trained = load_model(options.folder, trust_code=options.trust_code)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    is_typed = sys.stdin.isatty()
    if is_typed:
        print(note(HELP), flush=True)
    messages = list(begin)
    while True:
        try:
            text = input("> " if is_typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if is_typed else "")
            return 0
        if text == "/exit":
            return 0
        if text in ("/new", ""):
            messages = list(begin) if text else messages
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            answer = write_answer(trained, asked)
        except DataError as error:
            print(note(str(error)), flush=True)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}] if answer.strip() else messages


def write_answer(trained: Any, messages: list[dict[str, Any]]) -> str:
    """Write the answer to a chat while it is generated, and return it, or as much as there was at Ctrl-C."""
    from transformers import TextStreamer

    class Kept(TextStreamer):
        """Writes an answer to standard output, and keeps it."""

        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            super().on_finalized_text(text, stream_end)

    task = trained.recipe.task
    written = Kept(task.text_tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        task.reply(trained.model, messages, written)
    except KeyboardInterrupt:
        print(flush=True)
    return written.text
