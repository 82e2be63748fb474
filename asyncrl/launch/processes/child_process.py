"""One process of a run across its restarts: how it is started, how often it may restart, and how each start ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Final

from asyncrl.actors.presence import OwnProcess
from asyncrl.errors import INTERRUPTED, AsyncRLError, NoRoom
from asyncrl.launch.port import LaunchedProcess, Launcher, ProcessSpec
from asyncrl.messages.roles import ENGINE_NODE, LEARNER, LEARNER_RANK

BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 30.0
WORKING_SECONDS = 10.0
"""A process that worked and was up for this long is restarted at once."""
HEALTHY_SECONDS = 600.0
"""A process that worked and was up for this long gets all its restarts back."""
DRAIN_SECONDS: Final = 120.0
"""How long processes may take to drain."""
HAND_OVER_SECONDS: Final = 15.0
"""Additional time for a leaving worker to hand over its work; then it is killed."""


@dataclass(slots=True)
class RestartPolicy:
    """How often a process may be restarted, and how long to wait before each restart.

    A process that had started is restarted at once. The wait of others doubles, up to LONGEST_BACK_OFF_SECONDS: one
    that always dies in its start is restarted after 0, 1, 2, 4, ... seconds.
    """

    restarts: int
    used: int = 0
    failed_starts: int = 0
    """Consecutive failed starts."""

    def next_delay(self, uptime_seconds: float, *, is_free: bool = False, has_worked: bool = True) -> float | None:
        """Return the seconds to wait before the next start; None if no restart is left.

        is_free     the process is not to blame, so this restart is not counted
        has_worked  it was seen at work; one that hangs in its start for an hour was not
        """
        if has_worked and uptime_seconds >= HEALTHY_SECONDS:
            self.used = 0
        if not is_free:
            if self.used >= self.restarts:
                return None
            self.used += 1
        if has_worked and uptime_seconds >= WORKING_SECONDS:
            self.failed_starts = 0
            return 0.0
        self.failed_starts += 1
        if self.failed_starts == 1:
            return 0.0
        return min(BACK_OFF_SECONDS * 2.0 ** (self.failed_starts - 2), LONGEST_BACK_OFF_SECONDS)

    def __str__(self) -> str:
        return f"restart {self.used} of {self.restarts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one start of a process ended.

    code         as returned by ``LaunchedProcess.wait``
    reason       the reason as text
    has_no_room  it was not started, because no GPUs are free
    node, pid    of the process; "" and 0 if it was not started
    """

    code: int
    reason: str
    uptime_seconds: float
    has_no_room: bool = False
    node: str = ""
    pid: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ChildProcess:
    """A name in the run, and the process that has it now."""

    spec: ProcessSpec
    restarts: RestartPolicy
    restart_arguments: tuple[str, ...] = ()
    """Added to the command from the second start on, or from the first one if ``resumed``."""
    resumed: bool = False
    is_kept_running: bool = False
    is_added: bool = False
    """The worker was added while the run was up: if it cannot work, the run goes on without it."""
    is_scaled: bool = True
    """Whether `asyncrl scale` counts it, if it is a rollout worker."""
    is_leaving: bool = False
    """It was told to drain while the run continues, so its exit is not a failure."""
    standby_arguments: tuple[str, ...] = ()
    """Added to the command of a start while ``is_standby``."""
    is_standby: bool = False
    """A learner that waits to take over (swap.py): the run does not depend on it yet."""
    gone: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set while it is not kept running: it ended and is not restarted."""
    starts: int = 0
    no_restart: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Once set, the process is not started again."""
    fault: str = ""
    """Reason why the manager killed it."""
    process: LaunchedProcess | None = None
    since: float = 0.0
    """Monotonic time of the last start or exit."""

    @property
    def name(self) -> str:
        return self.spec.name

    def own_processes(self) -> list[OwnProcess]:
        """Return the process for the health monitor.

        Empty once it is no longer kept running, and for ranks and engine nodes, which are not actors.
        """
        if not self.is_kept_running or self.is_standby or self.spec.role in (LEARNER_RANK, ENGINE_NODE):
            return []
        pid, host = (self.process.pid, self.process.node) if self.process is not None else (0, "")
        seconds = time.monotonic() - self.since
        return [
            OwnProcess(
                name=LEARNER if self.spec.role == LEARNER else self.name,
                role=self.spec.role,
                pid=pid,
                host=host,
                seconds=seconds,
                is_leaving=self.is_leaving,
            )
        ]

    async def run_once(self, launcher: Launcher) -> Exit:
        """Start the process and wait for its exit. A failed start counts as an exit."""
        began, self.since = time.monotonic(), time.monotonic()
        self.fault, has_no_room, node, pid = "", False, "", 0
        extra = self.restart_arguments if self.resumed or self.starts else ()
        extra += self.standby_arguments if self.is_standby else ()
        try:
            spec = replace(self.spec, arguments=(*self.spec.arguments, *extra))
            self.process = await self._start(launcher, spec)
            if self.process is None:
                return Exit(code=INTERRUPTED, reason=f"{self.name} was not started", uptime_seconds=0.0)
            self.starts, node, pid = self.starts + 1, self.process.node, self.process.pid
            if self.no_restart.is_set():  # it was told to drain while it started
                self.process.signal(signal.SIGTERM)
            code = await self.process.wait()
            reason = f"{self.name} ended with {self._describe(code)}"
        except AsyncRLError as error:
            code, reason = error.exit_code, f"{self.name} does not start: {error}"
            has_no_room = isinstance(error, NoRoom)
        finally:
            self.process, self.since = None, time.monotonic()
        uptime = self.since - began
        return Exit(code=code, reason=reason, uptime_seconds=uptime, has_no_room=has_no_room, node=node, pid=pid)

    def _describe(self, code: int) -> str:
        text = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL and not self.fault and not self.no_restart.is_set():
            return f"{text} (out of memory? lower rollout.max_running or learner.micro_batch_tokens)"
        if code in (INTERRUPTED, -signal.SIGTERM) and not self.no_restart.is_set():
            return f"{text} (told to end by a signal that is not of this run; `asyncrl scale` removes workers)"
        return f"{text} ({self.fault})" if self.fault else text

    async def _start(self, launcher: Launcher, spec: ProcessSpec) -> LaunchedProcess | None:
        """Start the process; None if ``no_restart`` is set first. A launcher may wait long for free GPUs."""
        start = asyncio.ensure_future(launcher.start(spec))
        given_up = asyncio.ensure_future(self.no_restart.wait())
        try:
            await asyncio.wait({start, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return await start if start.done() else None
        finally:
            start.cancel()
            given_up.cancel()
            await asyncio.wait({start, given_up})  # until a partial start is undone

    async def back_off(self, seconds: float) -> None:
        """Wait before the next start. Ends early if there will be none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.no_restart.wait(), seconds)

    def drain(self) -> None:
        """Tell the process to finish its work and leave for good. One that takes too long is told to hand it over, and
        then killed."""
        self.is_leaving = True
        self.no_restart.set()
        self.signal(signal.SIGTERM)
        later = asyncio.get_running_loop().call_later
        later(DRAIN_SECONDS, self.signal, signal.SIGTERM)
        later(DRAIN_SECONDS + HAND_OVER_SECONDS, self.signal, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is up."""
        if self.process is not None:
            self.process.signal(number)
