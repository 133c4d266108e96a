"""What torchrun's parameters and the launcher's command line say of an elastic job: its range, its times, where it meets.

Independent of rounds.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import uuid
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hftune.config import Recipe
from hftune.distributed.consistency import fingerprint
from hftune.distributed.network import PORT, is_own_address, outward_interfaces, resolve, route_to
from hftune.distributed.rounds import AGENT_S, REFUSED
from hftune.elastic.attendance import BEAT_S, KEEP_ALIVE_S, LAST_CALL_S, REGROUP_EVERY_S, RETURN_S, Attendance, Times
from hftune.elastic.copies import Copies
from hftune.elastic.membership import Machine
from hftune.elastic.places import FolderPlace, Place, StorePlace, connect
from hftune.errors import ConfigError
from hftune.launchers.rendezvous import FixedRendezvous, join_timeout_s, leave

MAX_KEEP_ALIVE_S = AGENT_S / 2
"""Of ``keep_alive``: processes wait for AGENT_S for their launcher to know who is lost."""


def attend(params: RendezvousParameters) -> tuple[Attendance, str, bool]:
    """Return who takes part for this launcher, the name of the meeting place, and whether this process serves that.

    Raises:
        SystemExit: a parameter is invalid, or nothing answers.
    """
    config, most = params.config, params.max_nodes
    least = _number(config, "min_machines", params.min_nodes)
    if not (least.is_integer() and 1 <= least <= most):
        leave(f"--rdzv_conf min_machines={config['min_machines']} is no whole number from 1 to the most, {most}.", REFUSED)
    recipe = recipe_of_launcher()
    times = Times(
        join=join_timeout_s(config.get("join_timeout")),
        last_call=_number(config, "last_call", LAST_CALL_S),
        keep_alive=_number(config, "keep_alive", KEEP_ALIVE_S, least=BEAT_S),
        regroup_every=_number(config, "regroup_every", REGROUP_EVERY_S if recipe is None else recipe.parallel.regroup_every_s),
    )
    if times.keep_alive > MAX_KEEP_ALIVE_S:
        leave(
            f"--rdzv_conf keep_alive={times.keep_alive:g} is more than {MAX_KEEP_ALIVE_S:g} s: the processes would give up "
            "before their launcher knows which machine is lost.",
            REFUSED,
        )
    try:
        place, where, address, is_host = _find_place(params, times)
    except (ConfigError, OSError) as error:
        leave(str(error))
    me = Machine(uuid.uuid4().hex, socket.gethostname(), address)
    attendance = Attendance(place, me, int(least), most, times, fingerprint(recipe))
    if isinstance(place, StorePlace) and not is_host:  # it may have been started again, while a job trains on
        attendance.return_s = RETURN_S
    if recipe is not None:
        folder, copies = recipe.folder, recipe.checkpoint.copies
        attendance.copies = Copies(folder, copies, recipe.resume, attendance.is_here)
        attendance.starts_over = recipe.resume != "auto"
    return attendance, where, is_host


def words_of_launcher() -> tuple[str, list[str]]:
    """Return the module that this launcher is to start, and the words of the recipe; none if it is not one of hftune's."""
    modules = [index for index, (before, _) in enumerate(pairwise(sys.argv)) if before in ("-m", "--module")]
    if not modules or not (module := sys.argv[modules[0] + 1]).startswith("hftune."):
        return "", []
    words = [word for word in sys.argv[modules[0] + 2 :] if "=" in word and not word.startswith("-")]
    return module, words if any(word.startswith("recipe=") for word in words) else []


def recipe_of_launcher() -> Recipe | None:
    """Return the recipe in this launcher's command line; None if it does not train a recipe.

    Raises:
        SystemExit: the recipe is invalid.
    """
    _, words = words_of_launcher()
    if not words:
        return None
    sys.path.insert(0, str(Path.cwd()))  # as for the processes, which are started with python -m
    try:
        return Recipe.from_argv(words)
    except ConfigError as error:
        leave(str(error), REFUSED)
    finally:
        sys.path.pop(0)


def _number(config: dict[str, Any], name: str, default: float, least: float = 0.0) -> float:
    try:
        value = float(config.get(name, default))
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        leave(f"--rdzv_conf {name}={config.get(name, default)} is not a number of at least {least:g}.", REFUSED)
    return value


def _find_place(params: RendezvousParameters, times: Times) -> tuple[Place, str, str, bool]:
    """Return the meeting place, its name, this machine's address, and whether this process serves the place."""
    where = params.config.get("meeting") or params.endpoint
    if not where:
        raise ConfigError(
            "rdzv_backend hftune needs a place where the machines meet: --rdzv-endpoint HOST:PORT of a machine that stays, or "
            "--rdzv_conf meeting=FOLDER on a file system that all share."
        )
    if "/" in where:
        return FolderPlace(Path(where), params.run_id), where, params.local_addr or own_address(), False
    try:
        host, port = parse_rendezvous_endpoint(where, PORT)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    meeting = FixedRendezvous(host, port, params.max_nodes, params.run_id, times.join, params.config)
    store, is_host = meeting.find_store()
    if not is_host and store.check([f"hftune/machines/{params.run_id}/joined"]):
        raise ConfigError(
            f"A job with a fixed number of machines meets at {host}:{port}. Give this one another port or another --rdzv-id."
        )
    address = params.local_addr or route_to(resolve(host)).address
    return StorePlace(store, params.run_id, lambda: connect(host, port, 2 * BEAT_S)), f"{host}:{port}", address, is_host


def own_address() -> str:
    """Return the address at which other machines reach this one.

    Raises:
        ConfigError: it is unclear which one; the message says how to give it.
    """
    listed = outward_interfaces()
    if (name := os.environ.get("GLOO_SOCKET_IFNAME", "")) in listed:
        return listed[name][0]
    if len(listed) == 1:
        return next(iter(listed.values()))[0]
    with suppress(ConfigError):
        if not (address := resolve(socket.gethostname())).startswith("127.") and is_own_address(address):
            return address
    if not listed:
        return "127.0.0.1"
    raise ConfigError(
        f"This machine has several addresses: {', '.join(f'{one[0]} ({name})' for name, one in listed.items())}. Say at which "
        "the other machines reach it: torchrun --local-addr ADDRESS, or GLOO_SOCKET_IFNAME=INTERFACE."
    )
