"""Measures one engine of a run: a real rollout worker on a bus in memory, without training.

Prompts, rollout function, tools and rewards are those of the run. For a while the worker is kept as full as in a run
with one engine. Then it drains, which shows its speed with few sequences. Every started group is completed, so long
answers are not underrepresented.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from asyncrl.actors.base import Actor
from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import EngineError
from asyncrl.launch.assembly import data
from asyncrl.launch.assembly.build_learner import sampling_params
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.assembly.model_servers import model_server_actor
from asyncrl.messages import Progress, TrajectoryGroup
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.planning.simulation import DecodeReading
from asyncrl.planning.together import Together
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.admission import Admission

LOOK_SECONDS: Final = 0.5
DRAIN: Final = 9
"""Times as long as it was full an engine may drain: the longest answers count as much as the others."""
LEVELS: Final = 4
"""Resolution for merging readings by running sequences and by tokens of each: levels per doubling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasured:
    """groups: complete ones, as sampled;  num_failed: groups without an answer;  num_unfinished: answers in progress at
    the end;  most_running: maximum number of sequences at once;  cache_tokens: see EngineStats"""

    readings: tuple[DecodeReading, ...]
    groups: tuple[TrajectoryGroup, ...]
    num_failed: int
    num_unfinished: int
    most_running: float
    cache_tokens: int


def measure_engine(
    run: RunConfig, together: Together | None = None, *, seconds: float, dry_seconds: float | None = None
) -> EngineMeasured:
    """Measure with a full engine for ``seconds``, then drain it for at most ``dry_seconds`` (None: DRAIN times as
    long).

    together: measure it only full, in the memory that the learner leaves, while the learner trains

    Blocks. Raises ConfigError, also if there is no room beside the learner, and errors of the engine.
    """
    return asyncio.run(
        _measure(run, together, seconds=seconds, dry_seconds=DRAIN * seconds if dry_seconds is None else dry_seconds)
    )


async def _measure(run: RunConfig, together: Together | None, *, seconds: float, dry_seconds: float) -> EngineMeasured:
    bus = await registry.own_bus(run)
    try:
        beside = 0 if together is None else 1
        worker, *followers = await build_worker(run, bus=bus, name="engine", beside_learner=beside)
        prompts = PromptSource(
            "prompts",
            bus,
            rows=await asyncio.to_thread(data.open_rows, run),
            admission=Admission(mode="async", groups_per_batch=1, max_staleness=run.window - 1, total_groups=2**31),
            sampling=sampling_params(run),
            group_size=run.rollout.group_size,
            table=GroupTable(),
            are_sampled=False,  # no new weights will come
        )
        probe = _Probe(bus, worker=worker, seconds=seconds, dry_seconds=dry_seconds, together=together)
        servers = [model_server_actor(run, name, bus=bus) for name in run.started_servers]
        await supervise(probe, *servers, *followers, prompts, owns_process=False)
        return probe.measured()
    finally:
        await bus.close()


class _Probe(Actor):
    """consumes: trajectories    publishes: progress, which admits prompts    owns: the worker"""

    role = "learner"

    def __init__(
        self, bus: Bus, *, worker: RolloutWorker, seconds: float, dry_seconds: float, together: Together | None
    ) -> None:
        super().__init__("probe", bus)
        self._worker, self._seconds, self._dry_seconds, self._together = worker, seconds, dry_seconds, together
        self._groups: list[TrajectoryGroup] = []
        self._failed: list[str] = []
        self._looks: list[DecodeReading] = []
        self._num_unfinished = self._cache_tokens = 0
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        await self._worker.start()

    async def stop(self) -> None:
        await self._worker.stop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._look()), group.create_task(self._read())]
            work = group.create_task(self._worker.run())
            if self._together is None:
                await asyncio.wait((work,), timeout=self._seconds)
                self._worker.drain()
                await asyncio.wait((work,), timeout=self._dry_seconds)
            else:
                await self._sample_beside(work, self._together)
            stats = self._worker.engine_stats()
            self._num_unfinished = max(stats.running + stats.queued, int(not work.done()))  # or it is being graded
            sequence = await self.bus.last_sequence(TRAJECTORIES)
            while len(self._groups) + len(self._failed) < sequence:
                self._arrived.clear()
                await self._arrived.wait()
            for task in (*tasks, work):
                task.cancel()

    async def _sample_beside(self, work: asyncio.Task[None], together: Together) -> None:
        """Sample until the learner's steps are over, and keep the looks of their time alone."""

        async def until(is_so: Callable[[], object]) -> None:
            while not work.done() and not is_so():  # asyncio cannot wait for another process
                await asyncio.wait((work,), timeout=LOOK_SECONDS)

        await until(lambda: self._worker.engine_stats().running)
        together.engine_samples.set()
        await until(together.steps_begin.is_set)
        self._looks.clear()
        await until(together.steps_end.is_set)

    def measured(self) -> EngineMeasured:
        """Return the measurements. Raises EngineError if nothing was sampled."""
        if not self._groups and self._together is None:
            why = f": {self._failed[0]}" if self._failed else ""
            raise EngineError(
                f"no group was finished in {self._seconds + self._dry_seconds:.0f} s{why}; give more --seconds, or see "
                "what is wrong with `asyncrl run`"
            )
        return EngineMeasured(
            readings=tuple(joined(self._looks)),
            groups=tuple(self._groups),
            num_failed=len(self._failed),
            num_unfinished=self._num_unfinished,
            cache_tokens=self._cache_tokens,
            most_running=max((look.running for look in self._looks), default=0.0),
        )

    async def _read(self) -> None:
        """consumes: trajectories    waits for: the next trajectory"""
        await self._let_in()
        async with self.bus.read(TRAJECTORIES) as records:
            async for record in records:
                message = record.message
                if message is None or message.error:
                    self._failed.append(record.problem if message is None else message.error)
                else:
                    self._groups.append(message)
                self._arrived.set()
                await self._let_in()

    async def _let_in(self) -> None:
        done = len(self._groups) + len(self._failed)
        await self.bus.put(PROGRESS, Progress(incarnation=0, step=done, policy_version=0))

    async def _look(self) -> None:
        """consumes: nothing    waits for: the clock    woken by: the clock"""
        stats, since = self._worker.engine_stats(), time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            before, began = stats, since
            stats, since = self._worker.engine_stats(), time.monotonic()
            running = (before.running + stats.running) / 2
            tokens = stats.tokens_generated - before.tokens_generated
            context = (before.context_tokens + stats.context_tokens) / 2
            self._cache_tokens = stats.cache_tokens
            self._looks.append(DecodeReading(running=running, tokens=tokens, seconds=since - began, context=context))


def joined(looks: Iterable[DecodeReading]) -> Iterator[DecodeReading]:
    """Merge readings with similar numbers of sequences of similar lengths, because tokens arrive in bursts.

    Readings without sequences are left out.
    """
    levels: dict[tuple[int, int], list[DecodeReading]] = {}
    for look in looks:
        if look.running > 0:
            length = max(1.0, look.context / look.running)
            place = round(LEVELS * math.log2(look.running)), round(LEVELS * math.log2(length))
            levels.setdefault(place, []).append(look)
    for _, level in sorted(levels.items()):
        seconds = sum(look.seconds for look in level)
        yield DecodeReading(
            running=sum(look.running * look.seconds for look in level) / seconds,
            tokens=sum(look.tokens for look in level),
            seconds=seconds,
            context=sum(look.context * look.seconds for look in level) / seconds,
        )
