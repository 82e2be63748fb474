"""The processes of one run, and how many workers `asyncrl run` keeps up: which are added, which leave, and their names.

The number of rollout workers may change while the run is up. FleetScaler reads the requested number from the bus and
reports the actual one there. New workers get free GPUs or are refused. Workers that leave drain, quarantined ones
first, then the newest.

    asyncrl scale RUN --rollout-workers 3 -> state "fleet" -> FleetScaler -> Fleet.resize -> w2 is started
                                             state "fleet_status" <- FleetScaler <- Fleet.status
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError, NoRoom
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.messages import Event
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.roles import LEARNER_RANK, WORKER
from asyncrl.messages.topics import EVENTS, FLEET, FLEET_STATUS, METRICS
from asyncrl.policies.fleet_size import Change, FleetSizer

RETRY_SECONDS = 1.0

log = logging.getLogger("asyncrl.fleet")

NewWorker = Callable[[str, frozenset[int]], ChildProcess]
"""Creates a rollout worker with this name that uses none of these GPUs. Raises NoRoom."""


class Fleet:
    """The processes of a run. ``changed`` is set when ``status`` may have changed."""

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
        self._size = sum(child.spec.role == WORKER and child.is_scaled for child in self.children)
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
            one
            for one in self.children
            if one.spec.role == WORKER and one.is_scaled and one.is_kept_running and not one.is_leaving
        ]
        return sorted(workers, key=lambda child: child.name in self.quarantined)

    def is_kept_running(self, name: str) -> bool:
        return any(child.name == name and child.is_kept_running for child in self.children)

    def refuse_size(self, reason: str) -> None:
        """Keep the present size, and report the reason."""
        size = self._size = len(self.workers())
        self._problem = f"{reason}; the fleet stays at {size} rollout worker{'s' * (size != 1)}"
        self.say(self._problem)
        self.changed.set()

    def remove(self, child: ChildProcess) -> None:
        """Record that a process will not be started again."""
        child.is_kept_running = False
        if child.spec.role == WORKER or child.is_leaving or child.is_standby:
            self.children.remove(child)
        child.gone.set()
        self.changed.set()

    def ranks_of(self, learner: ChildProcess) -> list[ChildProcess]:
        """Return the other ranks of a learner, if they are processes of their own (learner.machines)."""
        return [one for one in self.children if one.spec.role == LEARNER_RANK and one.spec.meets == learner.name]

    def add(self, child: ChildProcess) -> None:
        """Keep another process running."""
        child.gone.clear()
        self.children.append(child)
        self._start(child)

    def _add_worker(self) -> ChildProcess:
        taken = frozenset(gpu for one in self.children for gpu in one.spec.gpus)
        child = self._new_worker(self._free_name(), taken)
        child.is_added = True
        self.add(child)
        return child

    def _free_name(self) -> str:
        names = {child.name for child in self.children}
        return next(name for number in itertools.count() if (name := f"w{number}") not in names)


class FleetScaler:
    """consumes: fleet, metrics    publishes: fleet_status, fleet    waits for: a new size, a changed fleet, a step"""

    def __init__(self, connect: Callable[[], Awaitable[Bus]], fleet: Fleet, *, rule: FleetSizer | None = None) -> None:
        """connect: opens the bus, retried until it works;  rule: None leaves the size to `asyncrl scale`"""
        self._connect = connect
        self._fleet = fleet
        self._rule = rule
        self._own_request = ""
        """Request id of the last size of the rule."""
        self._requested: FleetSize | None = None

    async def run(self) -> None:
        """Run until cancelled. While the bus is away, the fleet keeps its size."""
        while True:
            try:
                await self._run_on(await self._connect())
            except* (AsyncRLError, OSError, TimeoutError) as problem:
                log.debug("fleet size: %s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def _run_on(self, bus: Bus) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_requests(bus))
                group.create_task(self._report(bus))
                if self._rule is not None:
                    group.create_task(self._decide(bus, self._rule))
        finally:
            await bus.close()

    async def _follow_requests(self, bus: Bus) -> None:
        async with bus.watch(FLEET) as sizes:
            async for size in sizes:
                self._requested = size
                self._fleet.resize(size)

    async def _decide(self, bus: Bus, rule: FleetSizer) -> None:
        newest = 0
        async with bus.watch(METRICS) as steps:
            async for row in steps:
                if row.step == newest:
                    continue
                newest, status = row.step, self._fleet.status()
                if status.problem and status.request == self._own_request:
                    rule.limit_to(status.rollout_workers)
                if (change := rule.update(row.numbers, own=status.rollout_workers)) is not None:
                    await self._request(bus, change, before=status.rollout_workers)

    async def _request(self, bus: Bus, change: Change, *, before: int) -> None:
        self._own_request = uuid.uuid4().hex
        self._fleet.say(f"rollout.most_workers: {before} -> {change.workers} rollout workers: {change.because}")
        await bus.put(FLEET, FleetSize(rollout_workers=change.workers, request=self._own_request))
        data = {"from": before, "to": change.workers, "because": change.because}
        event = Event(kind="resized", actor="fleet", time=time.time(), data=data)
        await bus.publish(EVENTS, event, key=f"fleet/resized-{self._own_request}")

    async def _report(self, bus: Bus) -> None:
        while True:
            self._fleet.changed.clear()
            status, requested = self._fleet.status(), self._requested
            await bus.put(FLEET_STATUS, status)
            if requested is not None and requested.request == status.request:
                actual = FleetSize(rollout_workers=status.rollout_workers, request=status.request)
                if actual != requested:  # it was refused: a resumed run starts with the actual size
                    await bus.put(FLEET, actual)
            await self._fleet.changed.wait()
