"""One process of a run over all its lives: what it is started with, how often it may be, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field, replace

from asyncrl.actors.watcher import Launched
from asyncrl.errors import AsyncRLError, NoRoom
from asyncrl.launchers.port import LaunchedProcess, Launcher, ProcessSpec

BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 30.0
HEALTHY_SECONDS = 600.0
"""A process that has worked and lived so long has all its restarts again."""


@dataclass(slots=True)
class Budget:
    """How often a process may be started again, and how long to wait before: longer each time it fails to start."""

    restarts: int
    used: int = 0
    failed_starts: int = 0
    """In a row."""

    def pause(self, lived_seconds: float, *, has_worked: bool) -> float | None:
        """Seconds to wait for the next start; None when there is none.

        Who worked is missed and waits for nothing; nor does who died once while it started, as that was perhaps not
        heard to work yet.
        """
        if has_worked and lived_seconds >= HEALTHY_SECONDS:
            self.used = 0
        if self.used >= self.restarts:
            return None
        self.used += 1
        doubled = BACK_OFF_SECONDS * 2 ** (self.failed_starts - 1)
        back_off = min(doubled, LONGEST_BACK_OFF_SECONDS) if self.failed_starts else 0.0
        if has_worked and lived_seconds >= back_off:
            self.failed_starts = 0
            return 0.0
        self.failed_starts += 1
        return float(back_off)

    def __str__(self) -> str:
        return f"restart {self.used} of {self.restarts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a life ended.

    code         as ``LaunchedProcess.ended`` gives it
    reason       for a person
    has_no_room  it never began: no GPUs are free
    node, pid    of the process, if there was one
    """

    code: int
    reason: str
    lived_seconds: float
    has_no_room: bool = False
    node: str = ""
    pid: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """One name in the run, and the process that has it now."""

    spec: ProcessSpec
    budget: Budget
    restart_arguments: tuple[str, ...] = ()
    resumed: bool = False
    is_kept: bool = False
    is_hired: bool = False
    """It came while the run was up."""
    is_leaving: bool = False
    """It was asked to drain while the run goes on: its end is no failure."""
    is_configured: bool = False
    """A life of it has worked: when a later one says that its run file is wrong, it is a bus that it cannot reach."""
    lives: int = 0
    dismissed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """It is not started again."""
    fault: str = ""
    """What we killed it for."""
    process: LaunchedProcess | None = None
    since: float = 0.0
    """Monotonic time of the last start or end."""
    _asked: int = field(default=0, repr=False)
    """A signal that came while no process was there to take it."""

    @property
    def name(self) -> str:
        return self.spec.name

    def launched(self) -> list[Launched]:
        """What the watcher should know of it."""
        if not self.is_kept:
            return []
        pid, host = (self.process.pid, self.process.node) if self.process is not None else (0, "")
        seconds = time.monotonic() - self.since
        return [
            Launched(
                name=self.name,
                role=self.spec.role,
                pid=pid,
                host=host,
                seconds=seconds,
                is_leaving=self.is_leaving,
            )
        ]

    async def live(self, launcher: Launcher) -> End:
        """One life of it, to its end. What keeps it from starting is the end of a life too."""
        began, self.since = time.monotonic(), time.monotonic()
        self.fault, has_no_room = "", False
        node, pid = "", 0
        extra = self.restart_arguments if self.resumed or self.lives else ()
        try:
            spec = replace(self.spec, arguments=(*self.spec.arguments, *extra))
            self.process = await self._start(launcher, spec)
            if self.process is None:
                return End(code=0, reason=f"{self.name} was not started", lived_seconds=0.0)
            self.lives += 1
            if self._asked:
                self.process.signal(self._asked)
            node, pid = self.process.node, self.process.pid
            code = await self.process.ended()
            reason = f"{self.name} ended with {_reason(code)}" + (f" ({self.fault})" if self.fault else "")
        except AsyncRLError as error:
            code, reason = error.exit_code, f"{self.name} does not start: {error}"
            has_no_room = isinstance(error, NoRoom)
        finally:
            self.process, self.since = None, time.monotonic()
        lived_seconds = self.since - began
        return End(code=code, reason=reason, lived_seconds=lived_seconds, has_no_room=has_no_room, node=node, pid=pid)

    async def _start(self, launcher: Launcher, spec: ProcessSpec) -> LaunchedProcess | None:
        """None when it is dismissed first: a launcher may wait long for room."""
        start = asyncio.ensure_future(launcher.start(spec))
        dismissed = asyncio.ensure_future(self.dismissed.wait())
        try:
            await asyncio.wait({start, dismissed}, return_when=asyncio.FIRST_COMPLETED)
            return await start if start.done() else None
        finally:
            start.cancel()
            dismissed.cancel()
            await asyncio.wait({start, dismissed})  # until what was begun is undone

    async def rest(self, seconds: float) -> None:
        """Before the next life; cut short when there is to be none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dismissed.wait(), seconds)

    def dismiss(self) -> None:
        """Have it drain, for good."""
        self.is_leaving = True
        self.dismissed.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """To its process; to the next one when it is about to be started."""
        if self.process is not None:
            self.process.signal(number)
        else:
            self._asked = number


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
