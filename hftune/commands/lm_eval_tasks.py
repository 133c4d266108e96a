"""``hftune evaluate --lm-eval``: a finished language model on the tasks of EleutherAI's lm-eval, an optional package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hftune.config import Recipe
from hftune.config.recipe import type_name
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, did_you_mean, is_number, message_of


def check_lm_eval(recipe: Recipe) -> None:
    """Refuse what lm-eval cannot evaluate, before anything is loaded, or raise ConfigError."""
    if find_spec("lm_eval") is None:
        raise ConfigError('--lm-eval needs the package lm-eval, which is not installed: pip install "hftune[lm-eval]".')
    if getattr(recipe.task, "auto_class", None) != "AutoModelForCausalLM":
        raise ConfigError(f"--lm-eval is for causal language models and chat models, not for {type_name(type(recipe.task))}.")
    if ProcessInfo.from_environment().world_size > 1:
        raise ConfigError("--lm-eval evaluates in one process. Start it without a launcher.")


def evaluate_by_lm_eval(recipe: Recipe, folder: Path, names: str) -> dict[str, float]:
    """Return the scores of a finished model by task, metric and, if it is not none, filter: "hellaswag/acc_norm".

    Args:
        names: tasks or groups of lm-eval, or paths of tasks of one's own (.yaml), separated by commas. A model of chats gets
            the questions in its chat template.

    Raises:
        ConfigError: there is no such task, or its data cannot be loaded.
    """
    import lm_eval
    import torch
    import yaml
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hftune.inference import load_export
    from hftune.tasks.chat_task import ChatTask

    words = [word.strip() for word in names.split(",") if word.strip()]
    own = [Path(word).expanduser() for word in words if word.endswith((".yaml", ".yml"))]
    if missing := [path for path in own if not path.is_file()]:
        raise ConfigError(f"--lm-eval {missing[0]}: there is no such file.")
    tasks = [word for word in words if not word.endswith((".yaml", ".yml"))]
    # Of its own tasks it reads thousands of files.
    manager = TaskManager(include_path=[str(path.parent) for path in own] or None, include_defaults=bool(tasks))
    for path in own:
        settings = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # it may have !function
        if not isinstance(settings, dict) or not isinstance(settings.get("task"), str):
            raise ConfigError(
                f"--lm-eval {path}: it has no task, the name under which lm-eval knows it. Add a line task: NAME."
            )
        tasks.append(settings["task"])
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        hint = did_you_mean(unknown[0], manager.all_tasks)
        raise ConfigError(f"--lm-eval {unknown[0]} is no task of lm-eval {lm_eval.__version__}.{hint}")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = load_export(recipe.task, folder).to(device).eval()
    scorer = HFLM(model, backend="causal", tokenizer=recipe.task.text_tokenizer, batch_size=recipe.eval.batch_size)
    try:
        found: Any = lm_eval.simple_evaluate(
            scorer, tasks=tasks, task_manager=manager, apply_chat_template=isinstance(recipe.task, ChatTask), log_samples=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lm-eval {names}: {message_of(error)}.") from error
    scores = {}
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and is_number(value):
                scores[f"{task}/{metric}" + (f"/{kind}" if kind != "none" else "")] = float(value)
    return scores
