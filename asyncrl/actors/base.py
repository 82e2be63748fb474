"""Actor base class: start, run, drain, stop; heartbeats and reported waits."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import math
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping

from asyncrl.actors.process_resources import used_shares
from asyncrl.actors.startup_probe import StartSigns, judged
from asyncrl.actors.wait_tracker import OpenWait, WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError
from asyncrl.messages import Heartbeat, Wait, replace
from asyncrl.messages.topics import ACTORS
from asyncrl.policies.health.faults import BEAT_SECONDS, PATIENCE_SECONDS
from asyncrl.policies.health.fleet import CLOCK, JUMP_SECONDS

CLOCK_SECONDS = 60.0
FORGET_SECONDS = 2.0


class Actor(abc.ABC):
    """Lifecycle: start() -> run() -> stop(), with drain() at any time in between.

    start  acquire resources (connect, load a model). An exception fails the process.
    run    work until the input ends, or until drained or cancelled. An exception means that this process is broken.
    drain  ask run to take no new work, finish what it holds and return.
    stop   release resources. Always called, even after a failed start.
    """

    role = "actor"

    def __init__(self, name: str, bus: Bus) -> None:
        self.name = name
        self.bus = bus
        self.draining = asyncio.Event()
        self.log = logging.getLogger(f"asyncrl.{name}")
        self.phase = "starting"
        """Phase of the actor: "starting", then "running" once the supervisor has started it."""
        self.life = uuid.uuid4().hex
        self.problem = ""
        """The last problem that is not solved yet, in one line; the code that solves it clears it."""
        self.waits = WaitTracker()

    async def start(self) -> None:  # noqa: B027 - nothing to acquire is a fine default
        pass

    @abc.abstractmethod
    async def run(self) -> None: ...

    def drain(self) -> None:
        """End in order, as on SIGTERM or Ctrl-C. On a second call, an actor may end faster."""
        self.draining.set()

    async def stop(self) -> None:  # noqa: B027
        pass

    def waiting(
        self,
        what: str,
        *,
        on: str = "",
        note: str = "",
        first: float = PATIENCE_SECONDS,
        progress: Callable[[], int] | None = None,
    ) -> contextlib.AbstractContextManager[OpenWait]:
        """While open, report on the bus that this actor waits for ``what``, and since when.

        on        who could end the wait: a role, or one of faults.PARTS
        note      text appended to ``what``; waits with the same ``what`` are compared with each other
        first     for a part: seconds that the first wait of this kind may take
        progress  counter that rises while the awaited work makes progress
        """
        return self.waits.waiting(what, on=on, note=note, first=first, progress=progress)

    def heartbeat(self) -> Heartbeat:
        """Return what this actor does now."""
        incarnation, policy_version = self.version
        return Heartbeat(
            actor=self.name,
            role=self.role,
            incarnation=incarnation,
            policy_version=policy_version,
            phase="draining" if self.draining.is_set() else self.phase,
            waits=self.present_waits(),
            problem=self.problem,
            host=socket.gethostname(),
            pid=os.getpid(),
            life=self.life,
            numbers=self.numbers(),
        )

    def present_waits(self) -> tuple[Wait, ...]:
        return self.waits.now()

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, policy_version) that this actor works with."""
        return (0, 0)

    def numbers(self) -> dict[str, float]:
        """Return gauges and counters for the heartbeat."""
        return {}


class HeartbeatSender(Actor):
    """Sends heartbeats for the actors of a process: they are alive, what they wait for, and their numbers.

    A heartbeat is sent every ``interval`` seconds, and its entry expires after five intervals. An actor that is gone,
    frozen or cut off therefore disappears from ``actors`` by itself. Heartbeats are more frequent during startup, so
    that the end of startup is known soon: launchers restart a process without delay if it had started. The supervisor
    starts the sender before the actors and stops it after them, so an actor that hangs during startup is visible.
    """

    def __init__(
        self, *actors: Actor, interval: float = BEAT_SECONDS, about: Mapping[str, float] | None = None
    ) -> None:
        """``about``: constant numbers of the process (launch/checks/own_code.py)"""
        super().__init__(f"{actors[0].name}.heartbeat", actors[0].bus)
        self._actors = actors
        self._interval = interval
        self._clock = ClockShift()
        self._about = dict(about or {})
        self._signs = StartSigns()

    async def run(self) -> None:
        beat = 0
        while True:
            beat += 1
            shift = self._clock.look(wall=time.time(), monotonic=time.monotonic())
            is_starting = any(actor.phase == "starting" for actor in self._actors)
            quiet = await asyncio.to_thread(self._signs.look) if is_starting else 0.0
            of_process = {**used_shares(), **self._about, CLOCK: time.time()}
            for actor in self._actors:
                heartbeat = replace(actor.heartbeat(), beat=beat, clock_shift=shift)
                if actor is self._actors[0]:  # numbers of the process are sent once
                    heartbeat = replace(heartbeat, numbers={**heartbeat.numbers, **of_process})
                heartbeat = replace(heartbeat, waits=judged(heartbeat.waits, quiet_seconds=quiet))
                await self.bus.put(ACTORS, heartbeat, key=actor.name, is_sure=False)
            await asyncio.sleep(self._interval / 4 if is_starting else self._interval)

    async def stop(self) -> None:
        """Remove the entries of actors that end in order. If the bus is away, the entries expire by themselves."""
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(FORGET_SECONDS):
                for actor in self._actors:
                    await self.bus.forget(ACTORS, key=actor.name)


class ClockShift:
    """Seconds of the wall clock's last jump against the monotonic clock, if within CLOCK_SECONDS; else 0.

    A jump is more than JUMP_SECONDS within CLOCK_SECONDS, or between two consecutive looks however far apart. A clock
    that is set back and then corrected has jumped twice: the second jump is measured from the first.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # since the last jump
        self._jump = 0.0
        self._jumped = -math.inf

    def look(self, *, wall: float, monotonic: float) -> float:
        self._seen.append((monotonic, wall - monotonic))
        while len(self._seen) > 2 and monotonic - self._seen[0][0] > CLOCK_SECONDS:
            self._seen.popleft()
        moved = self._seen[-1][1] - self._seen[0][1]
        if abs(moved) > JUMP_SECONDS:
            self._jump, self._jumped = moved, monotonic
            self._seen = deque([self._seen[-1]])
        return self._jump if monotonic - self._jumped <= CLOCK_SECONDS else 0.0
