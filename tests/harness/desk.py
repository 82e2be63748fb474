"""A batcher without its learner: the table that it takes groups from, and the progress it reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.batcher import Batcher, PreparedBatch
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.config.learner import LearnerSection
from asyncrl.config.run import DataSection, ModelSection
from asyncrl.config.staleness import StalenessSection
from asyncrl.messages import Heartbeat, Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.roles import WORKER
from asyncrl.policies.advantages.advantage import Advantage
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.groups.states import BufferedGroup, Outcome
from asyncrl.policies.groups.table import GroupTable


def group(group_id: int, *, version: int = 0) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=[1, 2],  # type: ignore[arg-type]
        response_mask=[True, True],  # type: ignore[arg-type]
        behavior_logprobs=[-1.0, -1.0],  # type: ignore[arg-type]
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
        reward=1.0,
    )
    return TrajectoryGroup(group_id=group_id, prompt_tokens=[5], trajectories=(trajectory,) * 2)  # type: ignore[arg-type]


def counting() -> tuple[Algorithm, list[int]]:
    """Return grpo, and a list that grows by one for each group that is prepared."""
    calls: list[int] = []

    def function(group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
        calls.extend(np.unique(group))
        return np.zeros(len(sequence))

    return with_advantage(function), calls


def with_advantage(function: Callable[..., NDArray[np.float64]]) -> Algorithm:
    """Return grpo with the advantages that ``function`` computes from each batch's groups and sequences."""
    row = resolve(ALGORITHMS["grpo"])

    class Own(Advantage):
        def formula(self, group: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.float64]:
            return function(group, sequence)

    return dataclasses.replace(row, advantage=Own())


class Reporter:
    """Records drops; publishes nothing to a bus."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.after_drop: Callable[[], None] = lambda: None

    async def announce(self, outcome: Outcome) -> None:
        self.dropped += outcome.group_ids

    async def progress(self) -> None:
        self.after_drop()


class Desk:
    """A batcher of two-group batches, and its group table with 100 published groups."""

    def __init__(
        self,
        *,
        max_staleness: int = 2,
        wait_for_stragglers: bool = False,
        version: int = 0,
        wait_seconds: float = 0.0,
        begun: dict[int, int] | None = None,
    ) -> None:
        """begun: groups that a worker reports as begun, with their versions; None: there is no worker"""
        self.begun = begun or {}
        run = RunConfig(
            model=ModelSection(path=""),
            data=DataSection(path=""),
            learner=LearnerSection(groups_per_batch=2, micro_batch_tokens=64),
            staleness=StalenessSection(
                max_staleness=max_staleness,
                eviction="wait" if wait_for_stragglers else "drop",
                wait_seconds=wait_seconds,
            ),
        )
        self.table = published(100, version=version)
        self.changed = asyncio.Event()
        algorithm, self.prepared = counting()
        self.reporter = Reporter()
        self.wait = OpenWait("trajectories", WORKER, "", 0.0, 0.0, 0.0)
        self.batcher = Batcher(
            run,
            table=self.table,
            progress=self.reporter,  # type: ignore[arg-type]
            changed=self.changed,
            algorithm=algorithm,
            workers=None if begun is None else self,  # type: ignore[arg-type]
        )
        self._sequence = 0

    @contextlib.asynccontextmanager
    async def ahead(self) -> AsyncIterator[None]:
        """While the context is open, batches are prepared ahead, as during a step."""
        async with asyncio.TaskGroup() as owner:
            task = owner.create_task(self.batcher.prepare_ahead(owner=owner))
            yield
            task.cancel()

    async def beats(self) -> list[Heartbeat]:
        said = {str(group_id): version for group_id, version in self.begun.items()}
        return [Heartbeat(actor="w0", role=WORKER, policy_version=self.table.policy_version, begun=said)]

    async def prepare(self, groups: Sequence[BufferedGroup]) -> PreparedBatch:
        async with asyncio.TaskGroup() as owner:
            return await self.batcher.prepare(groups, owner=owner)

    def arrive(self, *group_ids: int, version: int = 0) -> None:
        for group_id in group_ids:
            self._sequence += 1
            self.table.arrive(self._sequence, group(group_id, version=version), now=0.0)
        self.changed.set()

    def start(self, *, of: dict[int, int]) -> None:
        """Mark these outstanding groups as begun at these versions."""
        for group_id, version in of.items():
            self.table.publish(group_id, position=group_id, oldest_start=version)

    async def take(self) -> list[int] | None:
        taken = await self.batcher.take(self.wait)
        return None if taken is None else ids(taken)


def published(count: int, *, version: int = 0) -> GroupTable:
    """Return a table of ``count`` outstanding groups after ``version`` steps."""
    table = GroupTable(step=version)
    for group_id in range(count):
        table.publish(group_id, position=group_id)
    return table


def ids(groups: Sequence[BufferedGroup]) -> list[int]:
    return [one.group_id for one in groups]
