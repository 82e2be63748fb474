"""Keeps one engine on the newest weights without a barrier: no engine waits for another's load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from asyncrl.actors.base import Actor
from asyncrl.actors.rollout.load_turns import turn_to_load
from asyncrl.actors.rollout.transfer_offer import offered
from asyncrl.actors.rollout.update_account import UpdateAccount
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Engine
from asyncrl.errors import EngineError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.roles import FOLLOWER, LEARNER, SENDER
from asyncrl.messages.topics import SENT, WEIGHTS
from asyncrl.messages.weight_transfer import TransferOffer
from asyncrl.policies.health.waits import FIRST_SECONDS
from asyncrl.policies.staleness.admission import version_to_begin
from asyncrl.weights.port import Intake, LoadReport, Receiver

Verify = Callable[[WeightVersion], Path]
Progress = Callable[[], int]
ReceiverOf = Callable[[Intake], Receiver | None]

ATTEMPTS = 5
RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 10.0
STARVED_SECONDS = 10.0
"""An idle engine whose only groups belong to a lost history begins them after this long without a new version."""


class WeightFollower(Actor):
    """Watches ``weights`` and loads the newest version when the policy of ``load`` allows.

    in_flight  at once, between two tokens; generations in progress continue with the new weights
    drain      as soon as nothing runs; new generations wait for the load
    on_demand  when a prompt asks for newer weights than the engine has, and nothing runs

    Versions published during a load are skipped. Weights sent from the learner's memory are preferred to its folder; if
    sending fails, the folder is loaded once it exists. While a folder cannot be read, the follower waits: the learner
    may store it again, or publish a newer one. If the engine fails to load folders ATTEMPTS times in a row, the worker
    ends. In flight, engines take turns with leases of the bus: an eighth of them may be paused (load_turns.py).
    An evaluation needs one version for a while and holds it (``held``): nothing newer is loaded during that time.
    """

    role = "weight-follower"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        engine: Engine,
        verify: Verify,
        load: str,
        progress: Progress = lambda: 0,
        receiver_of: ReceiverOf = lambda intake: None,
        max_staleness: int = 0,
        follows: bool = True,
    ) -> None:
        """
        verify, progress, receiver_of  methods of the WeightChannel
        max_staleness                  of the run (admission.version_to_begin)
        follows                        False loads only held versions
        """
        super().__init__(name, bus)
        self._engine = engine
        self._verify = verify
        self._progress = progress
        self._load = load
        self._receiver_of = receiver_of
        self._receiver: Receiver | None = None
        self._max_staleness = max_staleness
        self._follows = follows
        self._held: WeightVersion | None = None
        self._held_problem = ""
        self._is_loading = False  # while True, the engine's version may change at any moment
        self._listeners: list[Callable[[], None]] = []
        self._forks: dict[int, int] = {}  # incarnation -> version that it started from, as announced
        self._newest: dict[str, WeightVersion] = {}  # by key: SENT or "" (folders)
        self._running = self._failures = 0  # _failures: consecutive failures of sending
        self._starved_at = self._demanded = (-1, -1)  # a demand ends with its history
        self._changed = asyncio.Condition()
        self.account, self.last_load = UpdateAccount(), LoadReport(pause_seconds=0.0, load_seconds=0.0)
        self.loads, self.loaded_at = 0, 0.0
        self.failed_reads = self._failed_loads = 0  # in a row; _failed_loads: by the engine

    async def start(self) -> None:
        """Join the learner, if it sends weights, before anything runs: a group's first collective takes longer."""
        if (intake := self._engine.intake) is not None:
            self._receiver = self._receiver_of(intake)
        if self._receiver is not None and SENT in await self.bus.states(WEIGHTS):
            try:
                await self._receive(self._receiver, turn=contextlib.nullcontext())
            except WeightsError as error:
                self.log.warning("%s; it is tried again with the next version", error)

    async def run(self) -> None:
        """consumes: weights    waits for: a newer version, and idleness unless in_flight    woken by: the learner"""
        async with asyncio.TaskGroup() as group:
            keys = ("", SENT) if self._receiver else ("",)
            for key in keys if self._follows else ():
                group.create_task(self._watch(key), name=f"{self.name}.watch-{key or 'folders'}")
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._may_load)
                await self._catch_up()
                await self._notify()

    @contextlib.asynccontextmanager
    async def generation(
        self, min_policy_version: int, *, incarnation: int = 0, waits: WaitTracker | None = None
    ) -> AsyncIterator[None]:
        """Entered once the engine's weights are new enough and no load waits for idleness; a generation runs inside.

        min_policy_version, incarnation  of the prompt group
        waits                            wait tracker of the waiting actor; None: the follower's own
        """

        def needed() -> tuple[int, int]:
            current, version = self._engine.version
            return current, version_to_begin(
                min_policy_version,
                incarnation=incarnation,
                engine_incarnation=current,
                fork=self._forks.get(current, version),  # for an unknown incarnation, at most its weights
                max_staleness=self._max_staleness,
            )

        def may_begin() -> bool:
            is_of_lost_history = self._engine.version[0] > incarnation
            is_starved = is_of_lost_history and self._starved_at == self._engine.version
            return (self._engine.version >= needed() or is_starved) and not self._wants_quiet()

        async with self._changed:
            note = f"of version {min_policy_version}"
            with (waits or self.waits).waiting("weights", on=LEARNER, note=note, first=FIRST_SECONDS):
                while not may_begin():
                    if needed() > self._demanded:
                        self._demanded = needed()
                        self._changed.notify_all()
                    await self._wait_for_change()
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:  # only a load waits for the end of generations; hundreds may wait for weights
                await asyncio.shield(self._notify())

    @contextlib.asynccontextmanager
    async def held(self, weights: WeightVersion) -> AsyncIterator[None]:
        """Entered once the engine has exactly this version, newer or older than before. The engine keeps it inside.

        One at a time. Raises WeightsError if the version cannot be loaded.
        """
        self._held, self._held_problem = weights, ""  # before the first await: see ``is_held``
        try:
            async with self._changed:
                self._tell()
                self._changed.notify_all()
                note = f"of version {weights.policy_version}"
                with self.waiting("the weights of an evaluation", note=note):
                    await self._changed.wait_for(lambda: self._held is None or self._has_exactly(weights))
                if self._held is None:
                    raise WeightsError(self._held_problem)
            yield
        finally:
            self._held = None
            self._tell()
            await asyncio.shield(self._notify())

    @contextlib.asynccontextmanager
    async def exactly(self, order: tuple[int, int]) -> AsyncIterator[None]:
        """Run a generation inside that begins with this version. Raises EngineError if the engine has another one."""
        if self._engine.version != order:
            raise EngineError(f"the engine has version {self._engine.version}, but the evaluation needs {order}")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                await asyncio.shield(self._notify())

    @property
    def is_held(self) -> bool:
        """Whether a version is held, or waited for to be held."""
        return self._held is not None

    @property
    def is_held_back(self) -> bool:
        """Whether newer weights exist that the engine may not load now."""
        return self._held is not None and self._newest_announced > self._held.order

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While open, call ``on_change`` whenever ``is_held_back`` may have changed."""
        self._listeners.append(on_change)
        try:
            yield
        finally:
            self._listeners.remove(on_change)

    def _tell(self) -> None:
        for on_change in list(self._listeners):
            on_change()

    async def _wait_for_change(self) -> None:
        """Wait for a change; call with ``_changed`` held. An idle engine that stays at one version for too long begins
        groups of a lost history. Groups that would bring the learner to the requested version may be lost, and too old
        is better than never."""
        version = self._engine.version
        try:
            async with asyncio.timeout(STARVED_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            if self._engine.version == version and self._running == 0:
                self._starved_at = version
                self._changed.notify_all()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self, key: str) -> None:
        async with self.bus.watch(WEIGHTS, key=key) as versions:
            async for version in versions:
                async with self._changed:
                    self._forks[version.incarnation] = version.fork
                    if key != SENT or self._failures < ATTEMPTS:
                        self._newest[key] = version
                    self._tell()
                    self._changed.notify_all()

    # -- when ----------------------------------------------------------------------------------------------------------

    @property
    def _newest_order(self) -> tuple[int, int]:
        """Order of the version that the engine should have."""
        return self._newest_announced if self._held is None else self._held.order

    @property
    def _newest_announced(self) -> tuple[int, int]:
        return max((weights.order for weights in self._newest.values()), default=(-1, -1))

    def _has_exactly(self, weights: WeightVersion) -> bool:
        return not self._is_loading and self._engine.version == weights.order

    def _is_newer(self) -> bool:
        """Return whether a newer version exists; if one is held, whether the engine has another version."""
        if self._held is not None:
            return self._engine.version != self._held.order
        return self._newest_order > self._engine.version

    def _wants_quiet(self) -> bool:
        """Return whether a load is due that must not happen while something runs."""
        if not self._is_newer() or self._load == "in_flight":
            return False
        if self._held is not None:
            return True
        is_new_history = self._newest_order[0] > self._engine.version[0]  # version numbers are not comparable
        return self._load == "drain" or is_new_history or self._demanded > self._engine.version

    def _may_load(self) -> bool:
        return self._is_newer() and (self._load == "in_flight" or (self._wants_quiet() and self._running == 0))

    # -- how -----------------------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        for attempt in itertools.count(1):
            tried, order = self._wanted, self._newest_order
            try:
                await self._take()
                self.failed_reads = self._failed_loads = 0
                return
            except WeightsError as error:
                self.failed_reads += 1  # of any version: the next one may come before the last attempt at this one
                self._failed_loads = 0 if isinstance(error, _Unreadable) else self._failed_loads + 1
                is_overtaken = self._newest_order > order  # a slow worker may find that its version was removed
                if str(error) != self.problem or attempt <= ATTEMPTS:
                    level = logging.INFO if is_overtaken else logging.WARNING
                    self.log.log(level, "version %d, attempt %d: %s", order[1], attempt, error)
                self.problem = str(error)
                if attempt >= ATTEMPTS and self._held is not None and self._held.order == order:
                    self._held, self._held_problem, self._failed_loads = None, str(error), 0
                    self._tell()
                    return  # the learner evaluates the version on another worker
                if self._failed_loads >= ATTEMPTS and not is_overtaken:
                    raise
            with self.waiting("weights that it can read", on=LEARNER, note=f"of version {order[1]}"):
                if await self._superseded(tried, seconds=min(attempt * RETRY_SECONDS, LAST_RETRY_SECONDS)):
                    return

    async def _take(self) -> None:
        """Load the newest version, from the learner's memory or else from its folder. Raises WeightsError."""
        held = self._held
        sent = self._newest.get(SENT) if held is None else None
        is_newest = sent is not None and sent.order == self._newest_order
        if self._receiver is not None and sent is not None and is_newest and self._failures < ATTEMPTS:
            try:
                await self._receive(self._receiver, turn=self._turn())
                self._failures = 0
                return
            except WeightsError as error:
                self._failures += 1
                self.log.warning("%s; loading version %d from its folder instead", error, sent.policy_version)
                if self._newest[SENT] is sent or self._failures == ATTEMPTS:
                    del self._newest[SENT]
                if self._failures == ATTEMPTS:
                    self.log.warning("transfers failed %d times in a row; using weight folders from now on", ATTEMPTS)
        stored = held or self._newest.get("")
        if stored is None or (held is None and stored.order <= self._engine.version):
            return  # the folder is still being written
        note = f"of version {stored.policy_version}"
        with self.waiting("the weight folder", on="folder", note=note, progress=self._progress):
            try:
                folder = await asyncio.to_thread(self._verify, stored)
            except WeightsError as error:
                raise _Unreadable(str(error)) from error
        async with self._turn():
            with self._loading(held) as is_wanted:
                if not is_wanted:
                    return
                with self.waiting("its engine to load weights", on="load", note=note, first=FIRST_SECONDS):
                    report = await self._engine.load(replace(stored, uri=str(folder)))
            self._note(report)

    async def _receive(self, receiver: Receiver, *, turn: contextlib.AbstractAsyncContextManager[None]) -> None:
        if not receiver.request.has_joined:
            offer = await self._offer(receiver)
            with self.waiting("its engine to meet the learner", on="load", first=FIRST_SECONDS):
                await receiver.join(offer)
        async with turn:
            offer = await self._offer(receiver)
            note = f"of version {offer.policy_version}"
            with self._loading(None) as is_wanted:
                if not is_wanted:
                    return
                with self.waiting("its engine to receive weights", on="load", note=note, first=FIRST_SECONDS):
                    report = await receiver.receive(offer)
            self._note(report)

    @contextlib.contextmanager
    def _loading(self, held: WeightVersion | None) -> Iterator[bool]:
        """Yield whether the load is still wanted: ``_held`` is still ``held``. While open, ``held()`` keeps waiting."""
        self._is_loading = self._held is held
        try:
            with self.account.load():
                yield self._is_loading
        finally:
            self._is_loading = False

    async def _offer(self, receiver: Receiver) -> TransferOffer:
        with self.waiting("the learner's offer of weights", on=SENDER):
            return await offered(self.bus, receiver)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Take a turn to load. Only generating engines take turns: the pause of an idle engine delays nothing."""
        if self._load != "in_flight" or not self._follows:
            yield
            return
        num_engines = max((weights.num_engines for weights in self._newest.values()), default=0)
        async with contextlib.AsyncExitStack() as stack:
            with self.waiting("its turn to load weights", on=FOLLOWER):
                turn = turn_to_load(self.bus, worker=self.name, num_engines=num_engines, last=self.last_load)
                await stack.enter_async_context(turn)
            yield

    def _note(self, report: LoadReport) -> None:
        self.last_load, self.loaded_at, self.problem = report, time.time(), ""
        self.loads += 1
        pause, whole = report.pause_seconds, report.load_seconds
        self.log.info("loaded version %d: paused %.3f s, %.3f s in all", self._engine.version[1], pause, whole)

    @property
    def _wanted(self) -> Mapping[str, WeightVersion]:
        """Versions that can be loaded, by key."""
        return dict(self._newest) if self._held is None else {"held": self._held}

    async def _superseded(self, tried: Mapping[str, WeightVersion], *, seconds: float) -> bool:
        """Return whether another version, or the same one at another place, is wanted within ``seconds``."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._wanted != tried)
        except TimeoutError:
            return False
        return True


class _Unreadable(WeightsError):
    """A version's folder or objects are missing or not as announced. No other worker could read them."""
