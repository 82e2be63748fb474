"""Actor base class: start, run, drain, stop; heartbeats and reported waits."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Mapping

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError
from asyncrl.messages import Heartbeat, Wait, replace
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.waits import BEAT_SECONDS

FORGET_SECONDS = 2.0


async def until_finished(bus: Bus) -> None:
    """consumes: progress    waits for: the end of the run    woken by: the learner"""
    async with bus.watch(PROGRESS) as states:
        async for progress in states:
            if progress.finished:
                return


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
            problem=self.problem[:LONGEST_ERROR],
            host=socket.gethostname(),
            pid=os.getpid(),
            life=self.life,
            numbers=self.numbers(),
        )

    def present_waits(self) -> tuple[Wait, ...]:
        return self.waits.now()

    async def server_metrics(self) -> str:
        """Return the metrics of the inference server behind this actor, in Prometheus' text format; "" without any."""
        return ""

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
        """about: constant numbers of the process (launch/checks/shared_settings.py)"""
        super().__init__(f"{actors[0].name}.heartbeat", actors[0].bus)
        self._actors = actors
        self._interval = interval
        self._about = dict(about or {})

    async def run(self) -> None:
        beat = 0
        while True:
            beat += 1
            for actor in self._actors:
                heartbeat = replace(actor.heartbeat(), beat=beat)
                if actor is self._actors[0]:  # numbers of the process are sent once
                    heartbeat = replace(heartbeat, numbers={**heartbeat.numbers, **self._about})
                await self.bus.put(ACTORS, heartbeat, key=actor.name, is_sure=False)
            is_starting = any(actor.phase == "starting" for actor in self._actors)
            await asyncio.sleep(self._interval / 4 if is_starting else self._interval)

    async def stop(self) -> None:
        """Remove the entries of actors that end in order. If the bus is away, the entries expire by themselves."""
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(FORGET_SECONDS):
                for actor in self._actors:
                    await self.bus.forget(ACTORS, key=actor.name)
