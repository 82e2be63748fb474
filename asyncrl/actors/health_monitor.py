"""Watches a run and names its faults: continuously in `asyncrl run`, for a moment in `asyncrl doctor`.

Every LOOK_SECONDS it reads all heartbeats, stores a heartbeat of its own to see that the bus still stores, and asks
policies/health/diagnosis.py. Ages count only seconds in which the monitor could hear: no actor gets older while the bus
is away, and a monitor that was frozen accuses no actor when it wakes. On a busy machine its looks are far apart; then
the heartbeats of other actors show how much time has passed.

Tests: tests/unit/actors/test_health_monitor.py; with real processes, tests/chaos/test_liveness.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from asyncrl.actors.presence import WATCHER, Launched, PresenceTracker, process_state
from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError, ConfigError, Forbidden, NoAnswer
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import (
    BUS_SECONDS,
    LEARNER,
    Finding,
    Observation,
)

LOOK_SECONDS = 1.0
LARGE_FLEET = 128
"""With more actors than this, the interval doubles: a look costs the bus one message per actor."""
ANSWER_SECONDS = 3.0
"""Time limit of the bus for one look."""
AGAIN_SECONDS = 2.0
"""Time limit for the next look, which follows at once while the failure is too short to be reported."""
_BREATH_SECONDS = 0.2


class HealthMonitor:
    """consumes: actors, progress    waits for: the next look    woken by: its own clock only"""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        *,
        launched: Callable[[], Iterable[Launched]] = lambda: (),
        server: Callable[[], int] = lambda: 0,
    ) -> None:
        """connect: opens the bus, retried until it works;  launched: own processes;  server: pid of an own server"""
        self._connect = connect
        self._launched = launched
        self._server = server
        self._bus: Bus | None = None
        self._presence = PresenceTracker(host=socket.gethostname(), process=process_state)
        self._name = f"{WATCHER}-{uuid.uuid4().hex[:12]}"
        self._beats = 0
        self._answered: float | None = None  # monotonic time of the last successful look; until then no age counts
        self._looked = time.monotonic()
        self._silent = self._refuses = 0.0
        self._server_pid = 0
        self._listened = 0.0
        self._leaderless = math.inf  # seconds since the last heartbeat of a learner
        self._pause = LOOK_SECONDS
        self._is_finished = False
        self._since = Since()
        self.error: Exception | None = None
        """Error of the last look, if the bus failed."""

    async def run(self, report: Callable[[list[Finding]], None]) -> None:
        """Pass the findings of every look to ``report`` until cancelled."""
        try:
            while True:
                observation = await self.look()
                report(self._since.counted(diagnose(observation), observation.listened))
                await asyncio.sleep(_BREATH_SECONDS if self._is_in_doubt else self._pause)
        finally:
            await self.close()

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the last look failed, but the failure is too short to be reported yet."""
        return 0.0 < max(self._silent, self._refuses) <= BUS_SECONDS

    async def look(self) -> Observation:
        """Look at everything once. A bus that is away is an observation and raises nothing."""
        try:
            async with asyncio.timeout(AGAIN_SECONDS if self._is_in_doubt else ANSWER_SECONDS):
                beats, self._is_finished = await self._read()
        except (AsyncRLError, OSError, TimeoutError) as error:
            self.error = error
            is_read_too_slowly = isinstance(error, TimeoutError) and await self._answers()
            self._silent = 0.0 if is_read_too_slowly else self._silent + self._passed()
            # Whether the bus stores is unknown.
        else:
            now = time.monotonic()
            self._silent = 0.0
            elapsed = 0.0 if self._answered is None else now - self._answered
            heard = min(elapsed, 2 * self._pause)
            self._pause = LOOK_SECONDS if len(beats) <= LARGE_FLEET else 2 * LOOK_SECONDS
            if self.error is not None:
                self._presence.excuse()
            self._answered = now
            self._listened += heard
            self._presence.hear(beats, seconds=heard, elapsed=elapsed, launched=self._launched())
            learners = [one.seconds for one in self._presence.present().values() if one.beat.role == LEARNER]
            self._leaderless = min(learners, default=self._leaderless + heard)
            self._refuses = 0.0 if await self._stores() else self._refuses + self._passed()
        self._looked = time.monotonic()
        if self._server_pid != (pid := self._server()):  # the server was restarted
            self._server_pid, self._silent, self._refuses = pid, 0.0, 0.0
        return Observation(
            actors=self._presence.present(),
            listened=self._listened,
            leaderless=self._leaderless,
            bus_silent=self._silent,
            bus_refuses=self._refuses,
            bus_problem=str(self.error or ""),
            bus_process=process_state(pid),
            is_finished=self._is_finished,
            own_roles=self._presence.own_roles,
        )

    async def _answers(self) -> bool:
        """Return whether the bus answers a short question. If it does, it is not to blame: there are more heartbeats
        than can be read in time. No heartbeat is read then, and no actor is accused."""
        if self._bus is None:
            return False
        try:
            async with asyncio.timeout(AGAIN_SECONDS):
                await self._bus.states(PROGRESS)
        except (AsyncRLError, OSError, TimeoutError):
            return False
        return True

    def _passed(self) -> float:
        """Return seconds since the last look in which it could hear; a freeze counts as one look at most."""
        return min(time.monotonic() - self._looked, ANSWER_SECONDS + 2 * self._pause)

    def has_worked(self, host: str, pid: int) -> bool:
        """Return whether an own process ever got past its startup. ``host``: "" is this machine."""
        return self._presence.has_worked(host, pid)

    def names(self) -> set[str]:
        """Return the names of actors heard recently."""
        return self._presence.names()

    async def close(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):  # the entry expires by itself
                async with asyncio.timeout(ANSWER_SECONDS):
                    await bus.forget(ACTORS, key=self._name)
            await bus.close()

    async def _read(self) -> tuple[dict[str, Heartbeat], bool]:
        if self._bus is None:
            self._bus = await self._connect()
        beats = await self._bus.states(ACTORS)  # read first: a finishing learner sets progress before it leaves
        progress = (await self._bus.states(PROGRESS)).get("")
        return beats, progress is not None and progress.finished

    async def _stores(self) -> bool:
        assert self._bus is not None
        self._beats += 1
        own = Heartbeat(actor=self._name, role=WATCHER, beat=self._beats, host=socket.gethostname(), pid=os.getpid())
        try:
            async with asyncio.timeout(AGAIN_SECONDS if self._is_in_doubt else ANSWER_SECONDS):
                await self._bus.put(ACTORS, own, key=self._name)
        except Forbidden:  # an observer's role cannot test whether the bus stores
            pass
        except (AsyncRLError, OSError, TimeoutError) as error:
            self.error = error
            return False
        self.error = None
        return True


class Since:
    """Tracks how long faults that are concluded from waits have lasted. A long wait for a working actor is not a long
    deadlock.

    Example: one worker writes a long answer while all others wait for it, then dies. Only then does every actor wait
    for another, and usually the worker's prompts are redelivered soon.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}

    def counted(self, findings: Iterable[Finding], listened: float) -> list[Finding]:
        """Limit joint findings to the time since they appeared. ``listened``: seconds heard until this look."""
        found = list(findings)
        self._first = {finding.key: self._first.get(finding.key, listened) for finding in found}
        return [
            replace(finding, seconds=min(finding.seconds, listened - self._first[finding.key]))
            if finding.is_joint
            else finding
            for finding in found
        ]


class Lasting:
    """Findings from the first look that shows them to the second without them; each begins once and ends once."""

    def __init__(self) -> None:
        self._now: dict[tuple[str, str], Finding] = {}
        self._missed: set[tuple[str, str]] = set()

    def update(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Return (begun, ended) findings."""
        present = {finding.key: finding for finding in findings}
        begun = [finding for key, finding in present.items() if key not in self._now]
        ended = [finding for key, finding in self._now.items() if key in self._missed and key not in present]
        self._missed = self._now.keys() - present.keys() - {finding.key for finding in ended}
        self._now = {key: self._now[key] for key in self._missed} | present
        return begun, ended


def refusal(error: Exception | None) -> ConfigError | None:
    """Return an error of a look that waiting cannot fix, or None: a wrong token stays wrong; a server may come back."""
    if isinstance(error, Forbidden):
        return ConfigError(str(error))
    return error if isinstance(error, ConfigError) and not isinstance(error, NoAnswer) else None
