"""Keeps one engine on the newest weights without a barrier: no engine waits for another's load.

    VersionTracker  what is announced, and which version the engine should have
    LoadGate        when: a readers/writer lock on the weights; generations read them, a load writes them
    Loader          how: from the learner's memory, or else from a folder
    WeightFollower  the actor: watches announcements, loads what is due, and tries again

The learner never waits for an engine, and never calls one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from asyncrl.actors.base import Actor
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Engine
from asyncrl.errors import EngineError, NotNow, WeightsError
from asyncrl.messages import PromptGroup, WeightVersion
from asyncrl.messages.roles import FOLLOWER, LEARNER, SENDER
from asyncrl.messages.topics import SENT, TRANSFERS, WEIGHTS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.policies.staleness.admission import version_to_begin
from asyncrl.weights.port import LoadReport, Receiver, WeightChannel

ATTEMPTS: Final = 5
RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS: Final = 10.0
STARVED_SECONDS = 10.0
"""An idle engine whose only groups are of rolled-back versions begins them after this long without a new version."""
LOADING_SHARE: Final = 1 / 8
"""Share of the engines, rounded up, that may be paused for a load at the same time."""
TURN_SECONDS = 300.0
LOADS: Final = 20
"""Longest wait for a turn to load, in loads of usual duration, but at least TURN_SECONDS."""
ANSWER_SECONDS: Final = 10.0


class VersionTracker:
    """Which versions are announced, and which one the engine should have: the newest, unless one is pinned.

    stored  newest version with a folder
    sent    newest version that the learner sends from its memory
    pinned  version that an evaluation needs, perhaps an older one
    """

    def __init__(self) -> None:
        self.stored: WeightVersion | None = None
        self.sent: WeightVersion | None = None
        self.pinned: WeightVersion | None = None
        self._resume_points: dict[int, int] = {}

    def update(self, weights: WeightVersion, *, is_sent: bool) -> None:
        """Record an announcement."""
        self._resume_points[weights.incarnation] = weights.resumed_from
        if is_sent:
            self.sent = weights
        else:
            self.stored = weights

    @property
    def newest(self) -> tuple[int, int]:
        """(incarnation, policy_version) of the newest announced version; below all others if there is none."""
        return max((one.version for one in (self.stored, self.sent) if one is not None), default=(-1, -1))

    @property
    def target(self) -> tuple[int, int]:
        """(incarnation, policy_version) that the engine should have."""
        return self.newest if self.pinned is None else self.pinned.version

    def is_due(self, version: tuple[int, int]) -> bool:
        """Whether an engine with ``version`` should load another one."""
        return self.newest > version if self.pinned is None else self.pinned.version != version

    def resumed_from(self, incarnation: int) -> int | None:
        """Return the version that an incarnation of the learner started from; None if it has announced nothing."""
        return self._resume_points.get(incarnation)

    @property
    def num_engines(self) -> int:
        """Number of engines in the run, as last announced; 0 if unknown."""
        return max((one.num_engines for one in (self.stored, self.sent) if one is not None), default=0)


@dataclass(frozen=True, slots=True)
class VersionNeed:
    """The weights that a generation may start on: ``version`` or a newer one; only ``version`` if is_exact."""

    version: tuple[int, int]
    is_exact: bool = False

    @classmethod
    def for_training(cls, prompt: PromptGroup) -> VersionNeed:
        return cls((prompt.incarnation, prompt.min_policy_version))

    @classmethod
    def for_evaluation(cls, prompt: PromptGroup) -> VersionNeed:
        return cls((prompt.incarnation, prompt.policy_version), is_exact=True)


class LoadGate:
    """A readers/writer lock on the weights of one engine: generations are its readers, a load is its writer.

    in_flight  a load enters at once, between two tokens; generations in progress continue with the new weights
    drain      a load that is due keeps new generations out and enters when none runs
    on_demand  the same, but a load is due only once a prompt asks for newer weights than the engine has

    Example, on_demand: the engine has version 3 and two generations run. A prompt that needs version 4 demands it; from
    now on no generation starts. When the two have ended, the load enters; then every waiter may start, on version 4.

    All methods run on one event loop. Every change of state wakes all waiters; each checks its own condition.
    """

    def __init__(
        self, engine: Engine, versions: VersionTracker, *, load: str, max_staleness: int, every_steps: int
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._load = load
        self._max_staleness = max_staleness
        self._every_steps = every_steps
        self._num_running = 0
        self._is_loading = False  # while True, the engine's version may change at any moment
        self._demanded = (-1, -1)
        self._starved_at = (-1, -1)
        self._is_draining = False
        self._pin_problem = ""
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    # -- readers -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def sampling(self, need: VersionNeed, *, waits: WaitTracker) -> AsyncIterator[None]:
        """Wait until the engine may start a generation; count it as running while the block is open.

        Raises EngineError if it needs exactly another version than the engine has. Raises NotNow if this worker drains
        and the version is not announced: it may never come, and another worker can wait for it.
        """
        if need.is_exact:
            if self._engine.version != need.version:
                raise EngineError(
                    f"the engine has version {self._engine.version}, but the evaluation needs {need.version}"
                )
        elif not self._may_start(need):
            note = f"of version {need.version[1]}"
            with waits.waiting("weights", on=LEARNER, note=note):
                await self._until_it_may_start(need)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:  # only a load waits for the end of generations
                self.notify()

    async def _until_it_may_start(self, need: VersionNeed) -> None:
        while not self._may_start(need):
            needed = self._oldest(need)
            if needed > self._demanded:  # the history may have changed since the last look
                self._demanded = needed
                self.notify()
            if self._is_draining and needed > self._versions.target:
                raise NotNow(f"weights of version {needed[1]} are not announced, and this worker drains")
            await self._wait_unless_starved()

    def _may_start(self, need: VersionNeed) -> bool:
        version = self._engine.version
        is_starved = version[0] > need.version[0] and self._starved_at == version
        return (version >= self._oldest(need) or is_starved) and not self._keeps_out_generations

    def _oldest(self, need: VersionNeed) -> tuple[int, int]:
        """Return the oldest version of the engine's history that may start the generation."""
        incarnation, version = self._engine.version
        resumed_from = self._versions.resumed_from(incarnation)
        return incarnation, version_to_begin(
            need.version[1],
            incarnation=need.version[0],
            engine_incarnation=incarnation,
            resumed_from=version
            if resumed_from is None
            else resumed_from,  # an unknown incarnation started at most at its weights
            max_staleness=self._max_staleness,
            every_steps=self._every_steps,
        )

    async def _wait_unless_starved(self) -> None:
        """Wait for a change. An idle engine that stays at one version for too long begins groups of rolled-back
        versions: the groups that would bring the learner to the requested version may be lost, and too old is better
        than never."""
        version = self._engine.version
        try:
            async with asyncio.timeout(STARVED_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            if self._engine.version == version and not self._num_running:
                self._starved_at = version
                self.notify()

    def drain(self) -> None:
        """From now on, no generation waits for a version that is not announced."""
        self._is_draining = True
        self.notify()

    async def until_draining(self) -> None:
        """Wait until this worker drains."""
        await self._until(lambda: self._is_draining)

    # -- the writer ----------------------------------------------------------------------------------------------------

    async def until_load_due(self) -> None:
        """Wait until the engine should and may load the tracker's target."""
        await self._until(self._is_load_due)

    def _is_load_due(self) -> bool:
        if self._load == "in_flight":
            return self._versions.is_due(self._engine.version)
        return self._keeps_out_generations and not self._num_running

    @property
    def _keeps_out_generations(self) -> bool:
        """Whether a load is due that must not happen while something runs."""
        version, target = self._engine.version, self._versions.target
        if self._load == "in_flight" or not self._versions.is_due(version):
            return False
        if self._versions.pinned is not None or self._load == "drain":
            return True
        is_new_history = target[0] > version[0]  # version numbers are not comparable
        return is_new_history or self._demanded > version

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While open, the engine switches to other weights."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False
            self.notify()

    # -- one version for an evaluation ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def pin(self, weights: WeightVersion) -> AsyncIterator[None]:
        """Wait until the engine has exactly this version, newer or older than before; keep it while the block is open.

        One at a time. Raises WeightsError if the version cannot be loaded.
        """
        self._versions.pinned = weights
        self.notify()
        try:
            await self._until(lambda: self._versions.pinned is None or self._has(weights))
            if self._versions.pinned is None:
                raise WeightsError(self._pin_problem)
            yield
        finally:
            self._versions.pinned = None
            self.notify()

    def give_up_pin(self, problem: str) -> None:
        """The pinned version cannot be loaded: ``pin`` raises."""
        self._versions.pinned, self._pin_problem = None, problem
        self.notify()

    def _has(self, weights: WeightVersion) -> bool:
        return not self._is_loading and self._engine.version == weights.version

    @property
    def is_pinned(self) -> bool:
        """Whether a version is pinned, or waited for."""
        return self._versions.pinned is not None

    @property
    def is_behind(self) -> bool:
        """Whether newer weights exist that the engine may not load now."""
        return self._versions.pinned is not None and self._versions.newest > self._versions.pinned.version

    # -- changes -------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake all waiters: something that their conditions depend on has changed."""
        self._changed.set()
        self._changed = asyncio.Event()
        for on_change in list(self._listeners):
            on_change()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def wait_for(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        """Wait for a condition at most ``seconds``; return whether it came."""
        try:
            async with asyncio.timeout(seconds):
                await self._until(condition)
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While open, call ``on_change`` after every change."""
        self._listeners.append(on_change)
        try:
            yield
        finally:
            self._listeners.remove(on_change)


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
            with (
                self._gate.loading(),
                self._waits.waiting("its engine to receive weights", on="load"),
            ):
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
            with (
                self._gate.loading(),
                self._waits.waiting("its engine to load weights", on="load", note=note),
            ):
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


class Unreadable(WeightsError):
    """A version's folder or objects are missing or not as announced. No other worker could read them."""


class NoLearner(Unreadable):
    """No learner answers, and no newer folder is there. Not counted: the learner is what is missing."""
