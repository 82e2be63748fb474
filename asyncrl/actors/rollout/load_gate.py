"""When an engine may load other weights: what is announced, and who is generating.

VersionTracker  what is announced, and which version the engine should have
LoadGate        a readers/writer lock on the weights; generations read them, a load writes them
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.engines.port import Engine
from asyncrl.errors import EngineError, NotNow, WeightsError
from asyncrl.messages import PromptGroup, WeightVersion
from asyncrl.messages.roles import LEARNER
from asyncrl.policies.staleness.admission import version_to_begin

STARVED_SECONDS = 10.0
"""An idle engine whose only groups are of rolled-back versions begins them after this long without a new version."""


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
        known = self._versions.resumed_from(incarnation)
        return incarnation, version_to_begin(
            need.version[1],
            incarnation=need.version[0],
            engine_incarnation=incarnation,
            resumed_from=version if known is None else known,  # an unknown incarnation started at most at its weights
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
