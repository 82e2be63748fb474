"""Watches a run and names its faults: continuously in `asyncrl run`, for a moment in `asyncrl doctor`.

Every POLL_SECONDS it stores a heartbeat of its own to see that the bus still stores, reads all heartbeats, and asks
policies/health/diagnosis.py. Ages count only seconds in which the monitor could hear: no actor gets older while the bus
is away, and a monitor that was frozen accuses no actor when it wakes.

Tests: tests/unit/actors/test_health_monitor.py; with real processes, tests/chaos/test_liveness.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable

from asyncrl.actors.presence import OwnProcess, PresenceTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError, ConfigError, Forbidden, NoAnswer
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import LEARNER, WATCHER
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import Finding, Observation

POLL_SECONDS = 1.0
ANSWER_SECONDS = 3.0
"""Time limit for the bus to store the monitor's own heartbeat."""
READ_SECONDS = 30.0
"""Time limit for reading all heartbeats; a large fleet has thousands."""
MOST_SECONDS = 2 * POLL_SECONDS
"""A longer time between two polls counts as this much: the monitor was not scheduled."""


class HealthMonitor:
    """consumes: actors, progress    waits for: the next poll    woken by: its own clock only"""

    def __init__(
        self, connect: Callable[[], Awaitable[Bus]], *, own_processes: Callable[[], Iterable[OwnProcess]] = lambda: ()
    ) -> None:
        """connect: opens the bus, retried until it works;  own_processes: those of this launcher"""
        self._connect = connect
        self._own_processes = own_processes
        self._bus: Bus | None = None
        self._presence = PresenceTracker()
        self._name = f"{WATCHER}-{uuid.uuid4().hex[:12]}"
        self._beats = 0
        self._polled = time.monotonic()  # end of the last poll
        self._last_answer: float | None = None  # monotonic time of the last successful poll; None: it failed
        self._bus_silent = self._bus_refuses = 0.0
        self._listened = self._leaderless = 0.0
        self._is_finished = False
        self.error: Exception | None = None
        """Error of the last poll, if the bus failed."""

    async def run(self, report: Callable[[list[Finding]], None]) -> None:
        """Pass the findings of every poll to ``report`` until cancelled."""
        try:
            while True:
                report(diagnose(await self.poll()))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self.close()

    async def poll(self) -> Observation:
        """Look at everything once. A bus that is away is an observation and raises nothing."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._store_heartbeat()
            async with asyncio.timeout(READ_SECONDS):
                beats = await self._read()
        except (AsyncRLError, OSError, TimeoutError) as error:
            self.error = error
            does_answer = await self._does_bus_answer()
            passed = min(time.monotonic() - self._polled, MOST_SECONDS + 2 * ANSWER_SECONDS)
            self._bus_silent = 0.0 if does_answer else self._bus_silent + passed
            self._bus_refuses += passed if does_answer else 0.0
            if self._last_answer is not None:
                self._last_answer = None
                self._presence.restart_silences()
        else:
            self.error, self._bus_silent, self._bus_refuses = None, 0.0, 0.0
            now = time.monotonic()
            seconds = 0.0 if self._last_answer is None else min(now - self._last_answer, MOST_SECONDS)
            self._last_answer = now
            self._listened += seconds
            self._presence.update(beats, seconds=seconds, own=self._own_processes())
            has_learner = any(one.beat.role == LEARNER for one in self._presence.statuses().values())
            self._leaderless = 0.0 if has_learner else self._leaderless + seconds
        self._polled = time.monotonic()
        return Observation(
            actors=self._presence.statuses(),
            listened=self._listened,
            leaderless=self._leaderless,
            bus_silent=self._bus_silent,
            bus_refuses=self._bus_refuses,
            bus_problem=str(self.error or ""),
            is_finished=self._is_finished,
            own_roles=self._presence.own_roles,
        )

    async def close(self) -> None:
        bus, self._bus = self._bus, None
        if bus is None:
            return
        if self.error is None:  # else the bus is away, and the entry expires by itself
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await bus.forget(ACTORS, key=self._name)
        await bus.close()

    def has_worked(self, host: str, pid: int) -> bool:
        """Return whether an own process ever got past its startup. ``host``: "" is this machine."""
        return self._presence.has_worked(host, pid)

    async def _store_heartbeat(self) -> None:
        if self._bus is None:
            self._bus = await self._connect()
        self._beats += 1
        own = Heartbeat(actor=self._name, role=WATCHER, beat=self._beats, host=socket.gethostname(), pid=os.getpid())
        with contextlib.suppress(Forbidden):  # an observer's role may not; the refusal shows that the bus answers
            await self._bus.put(ACTORS, own, key=self._name)

    async def _read(self) -> dict[str, Heartbeat]:
        assert self._bus is not None
        beats = await self._bus.states(ACTORS)  # read first: a finishing learner sets progress before it leaves
        progress = (await self._bus.states(PROGRESS)).get("")
        self._is_finished = progress is not None and progress.finished
        return beats

    async def _does_bus_answer(self) -> bool:
        """Ask the bus a short question, after it has not stored a heartbeat in time."""
        if self._bus is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._bus.states(PROGRESS)
        except (AsyncRLError, OSError, TimeoutError):
            return False
        return True


class FaultTracker:
    """Faults from the first poll that shows them to the second without them; each begins once and ends once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}
        self._present: dict[tuple[str, str], Finding] = {}
        self._missed: set[tuple[str, str]] = set()

    def update(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[tuple[Finding, float]]]:
        """Return the findings that begin, and those that have ended with the seconds that they lasted."""
        now, present = self._clock(), {finding.key: finding for finding in findings}
        begun = [finding for key, finding in present.items() if key not in self._present]
        gone = self._present.keys() - present.keys()
        ended = [(self._present[key], now - self._since.pop(key)) for key in sorted(gone & self._missed)]
        self._missed = gone - self._missed
        self._present = {key: self._present[key] for key in self._missed} | present
        self._since |= {finding.key: now for finding in begun}
        return begun, ended

    def seconds(self, finding: Finding) -> float:
        """Return for how long a present fault has lasted since it was first found."""
        return self._clock() - self._since[finding.key]

    def restart(self, finding: Finding) -> None:
        """Count a fault that a cure was tried for from now on."""
        self._since[finding.key] = self._clock()


def refusal(error: Exception | None) -> ConfigError | None:
    """Return an error of a poll that waiting cannot fix, or None: a wrong token stays wrong; a server may come back."""
    if isinstance(error, Forbidden):
        return ConfigError(str(error))
    return error if isinstance(error, ConfigError) and not isinstance(error, NoAnswer) else None
