"""Keeps one engine on the newest weights, without a barrier: nobody waits for anybody else's load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from asyncrl.actors.base import Actor
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.protocols import Bus, Engine, LoadReport
from asyncrl.topics import WEIGHTS

Verify = Callable[[WeightVersion], Path]

ATTEMPTS = 5
RETRY_SECONDS = 1.0


class WeightFollower(Actor):
    """Watches ``weights`` and loads the newest version when the policy of ``load`` allows.

    in_flight  at once, between two tokens; generations in progress go on with the new weights
    drain      as soon as nothing runs; new generations wait for it
    on_demand  when a prompt asks for newer weights than the engine has, and nothing runs

    Versions published while it was busy are skipped. A version that cannot be read (collected, torn, wrong checksum)
    is tried again until a newer one comes; after ATTEMPTS it ends the worker, or prompts that ask for it would wait on.
    """

    role = "weight-follower"

    def __init__(self, name: str, bus: Bus, *, engine: Engine, verify: Verify, load: str) -> None:
        super().__init__(name, bus)
        self._engine = engine
        self._verify = verify
        self._load = load
        self._newest: WeightVersion | None = None
        self._running = 0
        self._demanded = 0
        self._changed = asyncio.Condition()
        self.last_load = LoadReport(pause_seconds=0.0, load_seconds=0.0)
        self.loads = 0

    async def run(self) -> None:
        """consumes: weights    waits for: a newer version, and quiet unless in_flight    woken by: learner publishes"""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name=f"{self.name}.watch")
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._may_load)
                    weights = self._newest
                assert weights is not None
                await self._take(weights)
                await self._notify()

    @contextlib.asynccontextmanager
    async def generation(self, min_policy_version: int) -> AsyncIterator[None]:
        """Entered when the engine's weights are new enough, and no load waits for quiet; counts as running inside."""
        async with self._changed:
            if self._engine.version[1] < min_policy_version:
                self._demanded = max(self._demanded, min_policy_version)
                self._changed.notify_all()
            with self.waiting(f"weights of version {min_policy_version}"):
                await self._changed.wait_for(
                    lambda: self._engine.version[1] >= min_policy_version and not self._wants_quiet()
                )
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        async with self.bus.watch(WEIGHTS) as versions:
            async for version in versions:
                async with self._changed:
                    self._newest = version
                    self._changed.notify_all()

    def _is_newer(self) -> bool:
        return self._newest is not None and self._newest.order > self._engine.version

    def _wants_quiet(self) -> bool:
        """A load is due that must not happen while something runs."""
        if not self._is_newer() or self._load == "in_flight":
            return False
        assert self._newest is not None
        is_new_history = self._newest.run_epoch > self._engine.version[0]  # its numbers do not compare with ours
        return self._load == "drain" or is_new_history or self._demanded > self._engine.version[1]

    def _may_load(self) -> bool:
        return self._is_newer() and (self._load == "in_flight" or (self._wants_quiet() and self._running == 0))

    async def _take(self, weights: WeightVersion) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await asyncio.to_thread(self._verify, weights)
                self.last_load = await self._engine.load(weights)
                self.loads += 1
                return
            except WeightsError as error:
                self.log.warning("version %d, attempt %d: %s", weights.policy_version, attempt, error)
                if attempt == ATTEMPTS:
                    raise
            if await self._superseded(weights):
                return

    async def _superseded(self, weights: WeightVersion) -> bool:
        """Whether a newer version is announced within RETRY_SECONDS."""
        try:
            async with asyncio.timeout(RETRY_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._newest is not weights)
        except TimeoutError:
            return False
        return True
