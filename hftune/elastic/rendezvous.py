"""How the machines of an elastic job meet, again and again, as torchrun's agent sees it. Independent of training.

torchrun and accelerate launch use this behind the rendezvous backend "hftune" (handler.py) if the number of machines is a
range: ``--nnodes 1:4``, or ``--num_machines 4 --rdzv_conf min_machines=1``. Who is in the job is decided in membership.py;
here an agent attends: it gives a sign of life, watches the others, opens or connects to the store of each round, and tells its
processes.

torch's own backend c10d loses the job with rank 0 or with the machine of the store, and lets newcomers and survivors wait for
each other without end (torch 2.13: the address of the store is told in the first round only).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from hftune.distributed import rounds
from hftune.distributed.failure_report import STOPPED
from hftune.distributed.network import JOIN_TIMEOUT, hang_up
from hftune.distributed.signals import STARTED_BY
from hftune.elastic.attendance import BEAT_S, CONNECT_S, LEAVE_S, PLACE_S, Attendance
from hftune.elastic.membership import Machine, Membership, Phase, State
from hftune.elastic.parameters import words_of_launcher
from hftune.elastic.places import connect
from hftune.launchers.rendezvous import REMINDER_S, allow_open_files, leave, say

FINISH_S = 300.0
"""For the other machines to finish, once this one has."""
END_S = 15.0
"""For the processes of the other machines to end once those of the first one have."""
ROLE = "torchelastic/role_info/"
"""Beginning of the keys under which torchrun's agents tell each other their numbers of processes."""


class ElasticRendezvous(RendezvousHandler):
    """What torchrun's agent asks: to meet for a round, and whether a round is over."""

    def __init__(self, attendance: Attendance, where: str, is_host: bool, run_id: str):
        self.attendance, self.where, self.run_id, self.is_host = attendance, where, run_id, is_host
        self.round = -1
        """The round that this agent is in, or was in last."""
        self.folder = rounds.AgentFolder(Path(tempfile.mkdtemp(prefix="hftune-agent-")))
        self.local_world_size = 1
        self.store: Any = None
        """Of the round."""
        self._members: list[Machine] = []
        self._server: TCPStore | None = None
        self._told: rounds.Over | None = None
        self._ended_at: float | None = None
        self._has_left = self._is_leaving = self._misses_place = False
        self._inner_handlers: dict[int, Any] = {}
        os.environ[rounds.FOLDER] = str(self.folder.path)
        allow_open_files()
        atexit.register(self._end)
        sys.excepthook = self._end_after
        attendance.on_change = self._tell_processes

    def get_backend(self) -> str:
        return "hftune"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """The end is in the document."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines for the next round.

        Raises:
            SystemExit: they did not come in time, the job has ended, or no other round helps.
        """
        if (failure := self.folder.verdict()) is not None:
            leave(failure.text.removeprefix("hftune: "), failure.code)
        self._hear_signals()
        if self.round < 0 and self.attendance.job is None:
            self.attendance.start()
        self._meet()
        place = RendezvousStoreInfo(*self._address)
        return RendezvousInfo(RoundStore(self), self.machine_rank, len(self._members), place)

    def num_nodes_waiting(self) -> int:
        """Say whether the round is over: more than 0 lets the agent end its processes and meet for the next one."""
        self._hear_signals()
        if not self._has_place():
            return 0
        membership = self.attendance.membership
        assert membership is not None
        has_ended = self._has_ended(membership)
        if has_ended and self._ends_in_s() < 0:
            leave("The job has ended, and the processes of this machine wait for others: they are ended.", 0)
        if self._goes_on(membership) or self._is_leaving or has_ended:
            return 0
        return 1

    def shutdown(self) -> bool:
        """Leave by word. The others go on if this machine has failed."""
        self._end()
        return True

    def sizes(self) -> list[int] | None:
        """Return the machines' numbers of processes, by machine rank; None if the round is over before all have told."""
        store, keys = self.store, [f"{ROLE}{rank}" for rank in range(len(self._members))]
        with suppress(DistError):  # the machine that serves the store is lost
            while not store.check(keys):
                membership = self.attendance.membership
                if membership is None or not self._goes_on(membership) or self.attendance.unanswered_s > PLACE_S:
                    return None
                self.attendance.wait(BEAT_S / 10)
            return [json.loads(value)["local_world_size"] for value in store.multi_get(keys)]
        return None

    @property
    def machine_rank(self) -> int:
        """Of this machine in the round."""
        return [one.id for one in self._members].index(self.attendance.me.id)

    # Meeting

    def _meet(self) -> None:
        """Take part until a round has begun with this machine."""
        attendance, began, reminder_s, tried, looked = self.attendance, time.monotonic(), REMINDER_S / 3, 0, -1
        attendance.say(ready_after=self.round)
        while True:
            attendance.wait(BEAT_S / 10)
            self._check_place()
            if attendance.refusal is not None:
                leave(f"{self.where}: {attendance.refusal}", rounds.REFUSED)
            if attendance.comes_later and not attendance.is_prepared:
                self._prepare()
                began = time.monotonic()
            membership, waited_s = attendance.membership, time.monotonic() - began
            if membership is None:
                if attendance.earlier is not None and waited_s > reminder_s:
                    names = ", ".join(map(str, attendance.earlier.machines.values()))
                    say(f"An earlier launch has left {names} here. Waiting for up to {PLACE_S:.0f} s to see who is alive.")
                    reminder_s += REMINDER_S
                continue
            self._check_job(membership)
            if membership.conflict:
                leave(membership.conflict, rounds.REFUSED)
            is_running = membership.phase is Phase.RUNNING and membership.round > self.round
            if is_running and attendance.me.id in membership.members:
                break
            # Not during a round, in which the folder fills, and not in the attending thread: long ledgers take a while to read.
            if membership.departures != looked:
                looked = membership.departures
                attendance.say(state=State() if attendance.copies is None else attendance.copies.state(), looked=looked)
            is_chosen = membership.phase is Phase.MEETING and attendance.me.id in membership.chosen
            if is_chosen and membership.attempt > tried and self._connect(membership):
                tried = membership.attempt
            is_short = membership.phase is Phase.GATHERING and not membership.awaited
            if is_short and waited_s > attendance.times.join:
                longer = f"Waited {waited_s:.0f} s; {JOIN_TIMEOUT}={2 * waited_s:.0f} waits longer."
                leave(f"{self._situation(membership)} {longer}", STOPPED)
            if waited_s > reminder_s:
                ends = f" Waiting for {attendance.times.join - waited_s:.0f} s more."
                say(self._situation(membership) + (ends if is_short and len(membership.machines) < membership.least else ""))
                reminder_s += REMINDER_S
        self._begin(membership)

    def _prepare(self) -> None:
        """Do what this machine can do by itself before it asks to be let in; stop halfway if the others need it at once.

        Raises:
            SystemExit: it cannot, or the job has ended meanwhile.
        """
        attendance, (module, words) = self.attendance, words_of_launcher()
        if module == "hftune.run" and words:
            say(f"A job runs at {self.where}. {attendance.me} prepares data and model before it asks to be let in.")
            command = [sys.executable, "-m", "hftune.elastic.newcomer", *words]
            with subprocess.Popen(command, env={**os.environ, STARTED_BY: str(os.getpid())}) as process:
                try:
                    while attendance.comes_later and process.poll() is None:
                        self._check_place()
                        attendance.wait(BEAT_S / 5)
                finally:
                    code = process.poll()
                    process.kill()
            if code:
                refused = f"{attendance.me} could not prepare data and model (exit code {code}), and is not let in."
                leave(refused, rounds.REFUSED if code == rounds.REFUSED else 1)
        if attendance.comes_later and attendance.earlier is not None and attendance.earlier.phase is Phase.ENDED:
            leave(f"The job at {self.where} has ended without this machine.", 0)
        attendance.is_prepared = True
        attendance.say()

    def _connect(self, membership: Membership) -> bool:
        """Open this round's store, or connect to it; return False while nobody has opened it."""
        attendance = self.attendance
        if membership.chosen[0] == attendance.me.id:
            self._server = self.store = TCPStore(attendance.me.address, 0, is_master=True, wait_for_workers=False)
            opened = (membership.attempt, attendance.me.address, self._server.port)
            attendance.say(opened=opened, connected=membership.attempt)
            return True
        if membership.store is None:
            return False
        with suppress(DistError, OSError):  # the others notice, and leave this machine or the first one out
            self.store = connect(*membership.store, CONNECT_S - 2)
            attendance.say(connected=membership.attempt)
        return True

    def _begin(self, membership: Membership) -> None:
        """Write down the round that has begun."""
        before, self._members = self._members, membership.here(membership.members)
        assert membership.store is not None
        self._address = membership.store
        self.round, self._told = membership.round, None
        self.attendance.say(ready_after=None)
        if self.attendance.copies is not None:
            self.attendance.copies.begin(self.round, self.attendance.me, self._members)
        os.environ[rounds.ROUND], os.environ[rounds.JOB] = str(self.round), membership.job  # the processes inherit them
        count = len(self._members)
        why = f" {membership.over.reason}." if membership.over is not None and before else ""
        say(f"Round {self.round}: {count} machine{'s' if count > 1 else ''}, {', '.join(map(str, self._members))}.{why}")

    def _goes_on(self, membership: Membership) -> bool:
        """Whether this agent's round runs, and it is in it."""
        is_here = self.attendance.me.id in membership.machines and membership.job == self.attendance.job
        return is_here and membership.phase is Phase.RUNNING and membership.round == self.round

    def _tell_processes(self, membership: Membership) -> None:
        """Tell the processes of this machine that their round is over. By the attending thread, as they wait for it."""
        if self.round < 0 or self._goes_on(membership) or membership.round > self.round:
            return
        if self._has_ended(membership) or membership.job != self.attendance.job:
            return
        over = membership.over
        if over is None or self.attendance.me.id not in membership.machines:
            over = rounds.Over("The other machines go on without this one, which they did not reach for a while", False)
        if over != self._told:
            self.folder.note(self.round, over)
            self._told = over
            if not over.is_planned:  # this agent may wait for an answer of the machine that is lost
                hang_up(self._address[1])

    # Words, and ends

    def _situation(self, membership: Membership) -> str:
        """Say what this machine waits for."""
        me, here = self.attendance.me, membership.machines.values()
        if membership.phase is Phase.RUNNING:
            number = len(membership.members)
            why = (
                f"there are {number} already, as many as may train together: it steps in if one is lost"
                if number >= membership.most
                else "it is let in at the next checkpoint"
            )
            return f"{me} waits, as round {membership.round} runs: {why}."
        if membership.phase is Phase.MEETING:
            return f"{me} waits until {', '.join(map(str, membership.here(membership.chosen)))} have reached each other."
        if membership.awaited:
            return f"{me} waits for {', '.join(map(str, membership.awaited))} to end the last round."
        names, least = ", ".join(map(str, here)), membership.least
        count = f"{len(here)} machine{'s are' if len(here) != 1 else ' is'} here ({names})"
        if len(here) >= least and membership.round < 0:
            return f"{count}; waiting up to {self.attendance.times.last_call:.0f} s for more, {membership.most} at most."
        return f"{count}, and at least {least} are needed. Start the same command on more machines; they meet at {self.where}."

    def _has_place(self) -> bool:
        """Whether the meeting place answers. If nothing serves it any more, the round goes on for as long as it lasts.

        But if this machine is cut off, others may begin a round without it.
        """
        if self.attendance.unanswered_s < PLACE_S:
            self._misses_place = False
            return True
        if not isinstance(self.attendance.error, ConnectionRefusedError):
            self._check_place()
        if not self._misses_place:
            say(f"{self._unanswered()} Training goes on, but no machine can be replaced.")
            self._misses_place = True
        return False

    def _check_place(self) -> None:
        """End the launcher if the meeting place, which it needs now, does not answer."""
        if self.attendance.unanswered_s > PLACE_S:
            leave(f"{self._unanswered()} The same command goes on from the newest checkpoint.", STOPPED)

    def _unanswered(self) -> str:
        why = f" ({self.attendance.error})" if self.attendance.error is not None else ""
        return (
            f"The place where the machines meet, {self.where}, has not answered for {self.attendance.unanswered_s:.0f} s{why}: "
            "what serves it has ended, or this machine is cut off."
        )

    def _check_job(self, membership: Membership) -> None:
        """End the launcher if there is nothing left to do."""
        if self._has_ended(membership):
            leave(f"The job at {self.where} has ended without this machine.", 0)
        if membership.job != self.attendance.job:  # not code 0, which says that the training is complete
            leave(
                f"Another job has begun at {self.where} while this machine was not heard of. The same command takes part "
                "in it.",
                STOPPED,
            )

    def finish(self) -> None:
        """Wait for the other machines to finish: this one may serve their store."""
        copies = self.attendance.copies
        if copies is not None:
            copies.complete()
        self.attendance.say(is_done=True)
        until = time.monotonic() + FINISH_S
        while time.monotonic() < until and self.attendance.unanswered_s < PLACE_S:
            membership = self.attendance.membership
            if membership is None or membership.job != self.attendance.job or self.attendance.me.id not in membership.machines:
                return
            if membership.phase is Phase.RUNNING and self.attendance.me.id not in membership.members:
                return  # the others train on without it
            if membership.phase is Phase.ENDED:
                until = min(until, time.monotonic() + self._ends_in_s())
                if all(one.is_done for one in membership.here(membership.members)):
                    return
            if copies is not None:
                until = max(until, copies.moved_at + FINISH_S)
            self.attendance.wait(BEAT_S)

    def _has_ended(self, membership: Membership) -> bool:
        """Whether the job is known to have ended; another one may have begun at the same place since."""
        if membership.phase is Phase.ENDED and membership.job == self.attendance.job:
            self._ends_in_s()
        return self._ended_at is not None

    def _ends_in_s(self) -> float:
        """Return the seconds that the processes of all machines have from now to end by themselves, as the job has ended."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        return self._ended_at + END_S - time.monotonic()

    def _end(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        if (copies := self.attendance.copies) is not None:
            copies.complete()
            copies.stop()
        membership = self.attendance.membership
        if membership is not None and self.attendance.unanswered_s < PLACE_S:
            is_done = membership.phase is Phase.ENDED
            self.attendance.leave("" if is_done else f"{self.attendance.me} has left")
            until = time.monotonic() + LEAVE_S
            with suppress(OSError, RuntimeError, ValueError):  # who serves the place does so until all have read of the end
                while self.is_host and membership.machines and time.monotonic() < until:
                    time.sleep(BEAT_S / 5)
                    membership = Membership.parse(self.attendance.place.read())
        self.attendance.stop()
        shutil.rmtree(self.folder.path, ignore_errors=True)

    def _end_after(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Describe the end of an agent after a signal, which is nobody's mistake: its processes have left a checkpoint."""
        if kind is not SignalException:
            sys.__excepthook__(kind, error, traceback)
            return
        self._end()
        say(f"This machine has left the job after {signal.Signals(error.sigval).name}.")  # type: ignore[attr-defined]
        sys.stdout.flush()
        os._exit(STOPPED)  # Python's own code would be 1

    def _hear_signals(self) -> None:
        """Let the others know at once of a signal that ends this agent; torch's agent sets its handlers in each round."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler != self._hear:
                self._inner_handlers[number] = handler
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        self._is_leaving = True
        self.attendance.say(is_leaving=True)
        inner = self._inner_handlers[number]
        if not callable(inner):
            sys.exit(128 + number)
        inner(number, frame)


class RoundStore:
    """What torchrun's agent takes for its store: agents tell each other their numbers of processes there, and that they finish.

    An agent that asks while the round is over already must not wait for the others.
    """

    def __init__(self, meeting: ElasticRendezvous):
        self._meeting = meeting
        self.timeout = timedelta(seconds=60)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        if key.startswith(ROLE):
            self._meeting.local_world_size = json.loads(value)["local_world_size"]
        with suppress(DistError):  # as in ``sizes``
            self._meeting.store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return all machines' numbers of processes; of none if the round is over already."""
        sizes = self._meeting.sizes()
        role = {"role": "default", "rank": 0}
        return [json.dumps({**role, "local_world_size": size}).encode() for size in sizes or [0] * len(keys)]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Ignore the ranks that the first machine's agent gives: each machine counts for itself."""

    def get(self, key: str) -> bytes:
        """Return the first rank of this machine's processes and the number of all processes, twice: there is one role."""
        rank, own = self._meeting.machine_rank, self._meeting.local_world_size
        sizes = self._meeting.sizes() or [own] * (rank + 1)  # if the round is over, so are these processes, at once
        first, total = sum(sizes[:rank]), sum(sizes)
        return json.dumps([first, total, first, total]).encode()

    def add(self, key: str, amount: int) -> int:
        """Ignore the count of machines that have finished; ``wait`` asks the document."""
        return 0

    def wait(self, keys: list[str]) -> None:
        """Wait for the other machines to finish, as nothing else is waited for."""
        self._meeting.finish()
