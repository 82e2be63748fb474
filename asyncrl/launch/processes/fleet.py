"""The processes of one run, and how many workers `asyncrl run` keeps up: which are added, which leave, and their names.

The number of rollout workers and of reward workers may change while the run is up (``resize``, called by
actors/fleet_scaler.py for `asyncrl scale`). New workers get free GPUs or are refused. Workers that leave drain,
quarantined ones first, then the newest.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Final

from asyncrl.errors import NoRoom
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.messages.fleet import FleetSize, FleetStatus
from asyncrl.policies.health.faults import REWARD_WORKER, WORKER

DRAIN_SECONDS: Final = 120.0
"""How long processes may take to drain."""
HAND_OVER_SECONDS: Final = 15.0
"""Additional time for a leaving worker to hand over its work; then it is killed."""

LETTERS: Final = {WORKER: "w", REWARD_WORKER: "r"}
"""Roles that may have any number of workers, and the first letter of their names."""
WORDS: Final = {WORKER: "rollout worker", REWARD_WORKER: "reward worker"}

NewWorker = Callable[[str, str, frozenset[int]], ChildProcess]
"""Creates a worker with this role and name that uses none of these GPUs. Raises NoRoom."""


class Fleet:
    """Processes that a FleetScaler resizes (actors/fleet_scaler.py)."""

    def __init__(
        self,
        children: Sequence[ChildProcess],
        *,
        new_worker: NewWorker,
        start: Callable[[ChildProcess], None],
        over: asyncio.Event,
        say: Callable[[str], None],
    ) -> None:
        """start: keeps one more process running;  over: once set, the fleet no longer changes"""
        self.children = list(children)
        self.changed = asyncio.Event()
        self.quarantined: set[str] = set()
        """Names of quarantined workers at the health monitor's last look."""
        self._new_worker, self._start, self._over, self.say = new_worker, start, over, say
        self._taken: set[str] = set()  # names of workers that this run did not start
        self._sizes = {role: sum(child.spec.role == role for child in self.children) for role in LETTERS}
        self._request = self._problem = ""

    def resize(self, size: FleetSize) -> None:
        """Start or drain workers until their numbers match. ``status`` reports the result."""
        asked = {WORKER: size.rollout_workers, REWARD_WORKER: size.reward_workers}
        wanted = {role: count for role, count in asked.items() if count is not None}
        is_new = any(self._sizes[role] != count for role, count in wanted.items())
        if self._over.is_set() or (size.request == self._request and not is_new):
            return
        self._request, self._problem = size.request, ""
        for role, count in wanted.items():
            self._resize(role, count)
        self.changed.set()

    def _resize(self, role: str, wanted: int) -> None:
        self._sizes[role] = wanted
        workers = self.workers(role)
        for child in workers[wanted:]:
            child.drain()
            later = asyncio.get_running_loop().call_later
            later(DRAIN_SECONDS, child.signal, signal.SIGTERM)
            later(DRAIN_SECONDS + HAND_OVER_SECONDS, child.signal, signal.SIGKILL)
        try:
            added = [self._add_worker(role) for _ in range(wanted - len(workers))]
        except NoRoom as error:
            self.refuse_size(role, str(error))
            return
        if moved := added or workers[wanted:]:
            names = ", ".join(child.name for child in moved)
            self.say(f"{len(workers)} -> {wanted} {WORDS[role]}s: {'+' if added else '-'} {names}")

    def status(self) -> FleetStatus:
        """Return the status of the workers that this run started; workers that joined by themselves do not count."""
        return FleetStatus(
            request=self._request,
            rollout_workers=self._sizes[WORKER],
            workers=tuple(child.name for child in self.workers(WORKER)),
            reward_workers=self._sizes[REWARD_WORKER],
            graders=tuple(child.name for child in self.workers(REWARD_WORKER)),
            draining=tuple(child.name for child in self.children if child.is_leaving),
            problem=self._problem,
        )

    def workers(self, role: str) -> list[ChildProcess]:
        """Return the workers that are to stay. The last one leaves first: quarantined workers, then the newest."""
        workers = [one for one in self.children if one.spec.role == role and one.is_kept_running and not one.is_leaving]
        return sorted(workers, key=lambda child: child.name in self.quarantined)

    def refuse_size(self, role: str, reason: str) -> None:
        """Keep the present size, and report the reason."""
        size = self._sizes[role] = len(self.workers(role))
        self._problem = f"{reason}; the fleet stays at {size} {WORDS[role]}{'s' * (size != 1)}"
        self.say(self._problem)
        self.changed.set()

    def ended(self, child: ChildProcess) -> None:
        """Record that a process will not be started again."""
        child.is_kept_running = False
        if child.spec.role in LETTERS:
            self.children.remove(child)
        self.changed.set()

    def rename(self, child: ChildProcess, *, besides: Collection[str]) -> None:
        """Rename a worker whose name is used by a worker that this run did not start."""
        self._taken.add(taken := child.name)
        child.spec = child.spec.renamed(self._free_name(child.spec.role, besides=besides))
        self.say(f"{taken!r} is the name of a {WORDS[child.spec.role]} that is not ours: ours is {child.name!r} now")
        self.changed.set()

    def _add_worker(self, role: str) -> ChildProcess:
        taken = frozenset(gpu for one in self.children for gpu in one.spec.gpus)
        child = self._new_worker(role, self._free_name(role), taken)
        child.is_added = True
        self.children.append(child)
        self._start(child)
        return child

    def _free_name(self, role: str, *, besides: Collection[str] = ()) -> str:
        names = {child.name for child in self.children} | self._taken | set(besides)
        return next(name for number in itertools.count() if (name := f"{LETTERS[role]}{number}") not in names)
