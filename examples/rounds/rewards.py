"""A reward for hftune sample; run as a script, it writes the prompts: questions of the demo's chats, new in each round."""

import json
from pathlib import Path

from hftune.data.demo import chats


def exact(prompt, answer, solution):
    """Return 1 for the right answer, else 0. ``solution`` is the column of the prompts that is called so."""
    return float(answer == solution)


if __name__ == "__main__":
    rows = chats("train")[4000:]
    for index in range(3):
        chosen = [row["messages"] for row in rows[600 * index : 600 * (index + 1)]]
        lines = [json.dumps({"prompt": chat[:-1], "solution": chat[-1]["content"]}) for chat in chosen]
        Path(f"prompts_{index}.jsonl").write_text("\n".join(lines))
