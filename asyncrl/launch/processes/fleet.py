"""The processes of one run, and how many workers `asyncrl run` keeps up: which are added, which leave, and their names.

The number of rollout workers may change while the run is up (``resize``, called by actors/fleet_scaler.py for
`asyncrl scale`). New workers get free GPUs or are refused. Workers that leave drain, quarantined ones first, then the
newest.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Final

from asyncrl.errors import NoRoom
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.roles import WORKER

DRAIN_SECONDS: Final = 120.0
"""How long processes may take to drain."""
HAND_OVER_SECONDS: Final = 15.0
"""Additional time for a leaving worker to hand over its work; then it is killed."""

NewWorker = Callable[[str, frozenset[int]], ChildProcess]
"""Creates a rollout worker with this name that uses none of these GPUs. Raises NoRoom."""


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
        self._new_worker = new_worker
        self._start = start
        self._over = over
        self.say = say
        self._size = sum(child.spec.role == WORKER for child in self.children)
        self._request = self._problem = ""

    def resize(self, size: FleetSize) -> None:
        """Start or drain workers until their number matches. ``status`` reports the result."""
        wanted = size.rollout_workers
        if self._over.is_set() or (size.request == self._request and wanted == self._size):
            return
        self._request, self._problem, self._size = size.request, "", wanted
        self.changed.set()
        workers = self.workers()
        for child in workers[wanted:]:
            child.drain()
            later = asyncio.get_running_loop().call_later
            later(DRAIN_SECONDS, child.signal, signal.SIGTERM)
            later(DRAIN_SECONDS + HAND_OVER_SECONDS, child.signal, signal.SIGKILL)
        try:
            added = [self._add_worker() for _ in range(wanted - len(workers))]
        except NoRoom as error:
            self.refuse_size(str(error))
            return
        if moved := added or workers[wanted:]:
            names = ", ".join(child.name for child in moved)
            self.say(f"{len(workers)} -> {wanted} rollout workers: {'+' if added else '-'} {names}")

    def status(self) -> FleetStatus:
        """Return the status of the workers that this run started; workers that joined by themselves do not count."""
        return FleetStatus(
            request=self._request,
            rollout_workers=self._size,
            workers=tuple(child.name for child in self.workers()),
            draining=tuple(child.name for child in self.children if child.is_leaving),
            problem=self._problem,
        )

    def workers(self) -> list[ChildProcess]:
        """Return the workers that are to stay. The last one leaves first: quarantined workers, then the newest."""
        workers = [
            one for one in self.children if one.spec.role == WORKER and one.is_kept_running and not one.is_leaving
        ]
        return sorted(workers, key=lambda child: child.name in self.quarantined)

    def refuse_size(self, reason: str) -> None:
        """Keep the present size, and report the reason."""
        size = self._size = len(self.workers())
        self._problem = f"{reason}; the fleet stays at {size} rollout worker{'s' * (size != 1)}"
        self.say(self._problem)
        self.changed.set()

    def remove(self, child: ChildProcess) -> None:
        """Record that a process will not be started again."""
        child.is_kept_running = False
        if child.spec.role == WORKER:
            self.children.remove(child)
        self.changed.set()

    def _add_worker(self) -> ChildProcess:
        taken = frozenset(gpu for one in self.children for gpu in one.spec.gpus)
        child = self._new_worker(self._free_name(), taken)
        child.is_added = True
        self.children.append(child)
        self._start(child)
        return child

    def _free_name(self) -> str:
        names = {child.name for child in self.children}
        return next(name for number in itertools.count() if (name := f"w{number}") not in names)
