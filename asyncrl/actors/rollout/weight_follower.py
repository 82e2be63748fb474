"""Keeps one engine on the newest weights without a barrier: no engine waits for another's load.

    weight versions -> VersionTracker -> LoadGate: when (load_gate.py) -> Loader: how (weight_loader.py) -> engine

The learner never waits for an engine, and never calls one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrl.actors.base import Actor
from asyncrl.actors.rollout.load_gate import LoadGate, VersionTracker
from asyncrl.actors.rollout.weight_loader import Loader, NoLearner, Unreadable
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Engine
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.topics import SENT, WEIGHTS
from asyncrl.weights.port import WeightChannel

ATTEMPTS: Final = 5
RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS: Final = 10.0


class WeightFollower(Actor):
    """Watches ``weights`` and loads the newest version when the gate allows it. Versions in between are skipped.

    While a folder cannot be read, the follower waits: a newer one may come. If the engine fails to load ATTEMPTS
    folders in a row, the worker ends.
    """

    role = "weight-follower"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        engine: Engine,
        channel: WeightChannel,
        load: str,
        max_staleness: int = 0,
        every_steps: int = 1,
        follows: bool = True,
    ) -> None:
        """
        load           in_flight, drain or on_demand (LoadGate)
        max_staleness, every_steps  of the run (admission.version_to_begin)
        follows        False loads only pinned versions
        """
        super().__init__(name, bus)
        self._engine = engine
        self._channel = channel
        self._follows = follows
        self.versions = VersionTracker()
        self.gate = LoadGate(engine, self.versions, load=load, max_staleness=max_staleness, every_steps=every_steps)
        self.loader = Loader(
            name,
            bus,
            engine=engine,
            channel=channel,
            versions=self.versions,
            gate=self.gate,
            waits=self.waits,
            takes_turns=load == "in_flight" and follows,
        )
        self.failed_attempts = 0
        """Failed attempts in a row, at any version."""
        self._failed_loads = 0  # of these, in the engine; an unreadable folder is no fault of the worker

    async def start(self) -> None:
        """Join the learner, if it sends weights, before anything runs: a group's first collective takes longer."""
        if not self._follows or self._engine.weight_updater is None:
            return
        self.loader.receiver = self._channel.receiver(
            self._engine.weight_updater, engine=self.name.removesuffix(".weights")
        )
        if self.loader.receiver is not None and SENT in await self.bus.states(WEIGHTS):
            try:
                await self.loader.receive(self.loader.receiver, takes_turns=False)
            except WeightsError as error:
                self.log.warning("%s; it is tried again with the next version", error)

    async def run(self) -> None:
        """consumes: weights    waits for: a newer version, and idleness unless in_flight    woken by: the learner"""
        async with asyncio.TaskGroup() as group:
            if self._follows:
                group.create_task(self._watch(is_sent=False), name=f"{self.name}.watch-folders")
            if self.loader.receiver is not None:
                group.create_task(self._watch(is_sent=True), name=f"{self.name}.watch-sent")
            elif self._follows and self._channel.sender is not None:
                group.create_task(self._need_folders(), name=f"{self.name}.need-folders")
            while True:
                await self.gate.until_load_due()
                target = self.versions.target
                try:
                    if await self.loader.load():
                        self.failed_attempts = self._failed_loads = 0
                        self.problem = ""
                except WeightsError as error:
                    await self._wait_to_retry(target, error)

    async def _watch(self, *, is_sent: bool) -> None:
        async with self.bus.watch(WEIGHTS, key=SENT if is_sent else "") as versions:
            async for version in versions:
                self.versions.update(version, is_sent=is_sent)
                self.gate.notify()

    async def _need_folders(self) -> None:
        """For an engine that cannot receive weights: ask for each version's folder, which may not be written otherwise.

        consumes: weights    waits for: a version sent from memory, the learner's answer    woken by: the learner
        """
        async with self.bus.watch(WEIGHTS, key=SENT) as versions:
            async for version in versions:
                await self._need_folder(version)

    async def _need_folder(self, version: WeightVersion) -> None:
        def is_there() -> bool:
            return self.versions.newest >= version.version

        while not is_there() and not await self.loader.ask_for_folder():
            await self.gate.wait_for(is_there, seconds=RETRY_SECONDS)

    async def _wait_to_retry(self, target: tuple[int, int], error: WeightsError) -> None:
        """Wait before the next attempt, but not if another version is wanted. Raises the error of a broken engine."""
        # Version 4 could not be read because 5 is announced, and its folder was removed: no fault, load 5 at once.
        if self.versions.target != target:
            self.log.info("version %d: %s", target[1], error)
            return
        if not isinstance(error, NoLearner):
            self.failed_attempts += 1
        attempt = max(1, self.failed_attempts)
        self._failed_loads = 0 if isinstance(error, Unreadable) else self._failed_loads + 1
        if str(error) != self.problem:
            self.log.warning("version %d, attempt %d: %s", target[1], attempt, error)
        self.problem = str(error)
        if self.versions.pinned is not None and self.failed_attempts >= ATTEMPTS:
            self.failed_attempts = self._failed_loads = 0
            self.gate.give_up_pin(str(error))  # the learner evaluates the version on another worker
            return
        if self._failed_loads >= ATTEMPTS:
            raise error
        tried = self._candidates
        seconds = min(attempt * RETRY_SECONDS, LAST_RETRY_SECONDS)
        with self.waits.waiting("weights that it can read", on=LEARNER, note=f"of version {target[1]}"):
            await self.gate.wait_for(lambda: self._candidates != tried, seconds=seconds)

    @property
    def _candidates(self) -> tuple[WeightVersion | None, ...]:
        """The versions that could be loaded; also differ if one is announced again at another place."""
        return self.versions.pinned, self.versions.sent, self.versions.stored
