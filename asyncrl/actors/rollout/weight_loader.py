"""How weights get into an engine: received from the learner's memory, or else loaded from a folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from asyncrl.actors.rollout.load_gate import LoadGate, VersionTracker
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Engine
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.roles import FOLLOWER, SENDER
from asyncrl.messages.topics import TRANSFERS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.weights.port import LoadReport, Receiver, WeightChannel

LOADING_SHARE: Final = 1 / 8
"""Share of the engines, rounded up, that may be paused for a load at the same time."""
TURN_SECONDS = 300.0
LOADS: Final = 20
"""Longest wait for a turn to load, in loads of usual duration, but at least TURN_SECONDS."""
ANSWER_SECONDS: Final = 10.0


class Unreadable(WeightsError):
    """A version's folder or objects are missing or not as announced. No other worker could read them."""


class NoLearner(Unreadable):
    """No learner answers, and no newer folder is there. Not counted: the learner is what is missing."""


class Loader:
    """Brings the tracker's target into the engine: one attempt per call.

    Weights sent from the learner's memory are preferred to its folder. If sending fails, the folder is loaded once it
    exists.
    """

    def __init__(
        self,
        worker: str,
        bus: Bus,
        *,
        engine: Engine,
        channel: WeightChannel,
        versions: VersionTracker,
        gate: LoadGate,
        waits: WaitTracker,
        takes_turns: bool,
    ) -> None:
        """takes_turns: the engine generates while it loads, so few engines may load at a time"""
        self._worker = worker
        self._bus = bus
        self._engine = engine
        self._channel = channel
        self._versions = versions
        self._gate = gate
        self._waits = waits
        self._takes_turns = takes_turns
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self.receiver: Receiver | None = None
        self.last = LoadReport(pause_seconds=0.0, load_seconds=0.0)
        self.loads = 0
        self.loaded_at = 0.0

    async def load(self) -> bool:
        """Try once. Return False if there is nothing to load any more, or not yet. Raises WeightsError."""
        pinned, sent = self._versions.pinned, self._versions.sent
        stored = pinned or self._versions.stored
        if pinned is None and self.receiver is not None and sent is not None and sent.version == self._versions.newest:
            try:
                return await self.receive(self.receiver)
            except WeightsError as error:
                is_there = stored is not None and stored.version >= sent.version
                if is_there or await self.ask_for_folder():
                    self._log.warning("%s; loading version %d from its folder instead", error, sent.policy_version)
                    if self._versions.sent is sent:
                        self._versions.sent = None
                        self._gate.notify()  # until the folder is there, generations go on with the old weights
                elif stored is None or stored.version <= self._engine.version:
                    raise NoLearner(str(error)) from error  # both are tried until one answers
        if stored is None or (pinned is None and stored.version <= self._engine.version):
            return False  # the folder is still being written
        return await self._load_folder(stored)

    async def receive(self, receiver: Receiver, *, takes_turns: bool | None = None) -> bool:
        """Receive what the learner sends now, which may be newer than announced. Raises WeightsError."""
        with self._waits.waiting("its engine to meet the learner", on="load"):
            await receiver.join(self._ask)
        async with self._turn(self._takes_turns if takes_turns is None else takes_turns):
            if self._versions.pinned is not None:
                return False
            with self._gate.loading(), self._waits.waiting("its engine to receive weights", on="load"):
                report = await receiver.receive(self._ask)
        self._note(report)
        return True

    async def ask_for_folder(self) -> bool:
        """Have the learner write the folder of its newest version, or of the next. Return whether it has answered."""
        try:
            await self._ask(TransferRequest(engine=self._worker, group=self._worker, num_ranks=1, by_folder=True))
        except WeightsError:
            return False
        return True

    async def _ask(self, request: TransferRequest) -> TransferOffer:
        """Ask the learner for weights, or where to meet. Raises WeightsError."""
        with self._waits.waiting("the learner's offer of weights", on=SENDER):
            offer = await self._bus.ask(TRANSFERS, request, seconds=ANSWER_SECONDS)
        if offer is None:
            raise WeightsError("no learner answers the request for weights")
        if offer.problem:
            raise WeightsError(f"the learner sends no weights: {offer.problem}")
        return offer

    async def _load_folder(self, weights: WeightVersion) -> bool:
        pinned = self._versions.pinned
        note = f"of version {weights.policy_version}"
        with self._waits.waiting("the weight folder", on="folder", note=note, progress=lambda: self._channel.progress):
            try:
                folder = await asyncio.to_thread(self._channel.verify, weights)
            except WeightsError as error:
                raise Unreadable(str(error)) from error
        async with self._turn(self._takes_turns):
            if self._versions.pinned is not pinned:
                return False
            with self._gate.loading(), self._waits.waiting("its engine to load weights", on="load", note=note):
                report = await self._engine.load(replace(weights, uri=str(folder)))
        self._note(report)
        return True

    @contextlib.asynccontextmanager
    async def _turn(self, takes_turns: bool) -> AsyncIterator[None]:
        """Wait until few enough engines of the run are paused for a load. Idle engines take no turns."""
        if not takes_turns:
            yield
            return
        # 16 engines have ceil(16 / 8) = 2 leases, load-0 and load-1; about eight engines share each of them.
        num_turns = max(1, math.ceil(self._versions.num_engines * LOADING_SHARE))
        name = f"load-{zlib.crc32(self._worker.encode()) % num_turns}"
        seconds = max(TURN_SECONDS, LOADS * self.last.load_seconds)
        async with contextlib.AsyncExitStack() as stack:
            try:
                with self._waits.waiting("its turn to load weights", on=FOLLOWER):
                    async with asyncio.timeout(seconds):
                        await stack.enter_async_context(self._bus.lease(name, holder=self._worker))
            except TimeoutError:  # a worker that never gives up its turn delays the others only for a while
                self._log.warning("no turn to load weights (%s) in %.0f s; loading without one", name, seconds)
            yield

    def _note(self, report: LoadReport) -> None:
        self.last = report
        self.loads += 1
        self.loaded_at = time.time()
        self._log.info(
            "loaded version %d: paused %.3f s, %.3f s in all",
            self._engine.version[1],
            report.pause_seconds,
            report.load_seconds,
        )
