"""A stage: takes prompt groups from a source, makes trajectory groups, and passes them to a sink.

A worker has one stage for each use of its engine. Training reads prompts from the bus and publishes trajectories to the
log (training.py); evaluation reads prompts from its own topic (evaluation.py). A new use of a worker's engine is one
file with a source and a sink, combined in a Stage where the worker is built.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from asyncrl.actors.rollout.group_maker import GroupMaker, contain_task_exits
from asyncrl.actors.rollout.partial_rollouts import GroupProgress
from asyncrl.actors.rollout.slots import SampleSlots, SlotLease
from asyncrl.errors import EngineDied, EngineError, NotNow, PromptError, RewardError, RolloutError
from asyncrl.logs import REASON
from asyncrl.messages import PromptGroup, TrajectoryGroup
from asyncrl.messages.rollout import failed_group


class WorkItem(Protocol):
    """One prompt group that a source has handed out."""

    @property
    def group_id(self) -> int: ...

    @property
    def prompt(self) -> PromptGroup | None:
        """The prompt; None only if there is a ``problem``."""
        ...

    @property
    def problem(self) -> str:
        """Why the group cannot be made and is published as failed; "" if it can."""
        ...

    @property
    def attempt(self) -> int:
        """Attempt number, from 1."""
        ...

    @property
    def is_last_attempt(self) -> bool:
        """Whether an engine failure now fails the group; otherwise the group is made again."""
        ...

    @property
    def needs_worker_alone(self) -> bool:
        """Whether nothing else may run on the engine while this group does."""
        ...

    async def begin(self) -> GroupProgress | None:
        """Called before anything is generated. Return the group's progress so far; None: nothing of it is saved."""
        ...

    async def finish(self) -> None:
        """The result is published, so the group need not be made again."""
        ...

    async def retry(self) -> None:
        """This attempt failed: any worker may make the group again soon."""
        ...

    async def give_back(self) -> None:
        """This worker leaves: another one should make the group, and this does not count as an attempt."""
        ...

    def close(self) -> None:
        """Release the item. Unless ``finish()`` was called, the group is redelivered."""
        ...


class Source(Protocol):
    """Supplies a stage's groups."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """While open, ``next`` may be called. Leaving abandons everything unfinished."""
        ...

    async def next(self) -> WorkItem | None:
        """Return the next group, preferably once a slot is free; None if no more will come."""
        ...

    def drain(self) -> None:
        """Hand out nothing more: ``next`` returns None soon. May be called before ``open``."""
        ...


class Sink(Protocol):
    """Receives a stage's results."""

    async def publish(self, group: TrajectoryGroup, *, prompt: PromptGroup | None) -> None:
        """Publish a group, even a failed one. Return once it cannot be lost any more; the source then forgets it.

        prompt  its prompt; None if that could not be read
        """
        ...


class Stage:
    """Makes the groups of one source, as many in parallel as slots allow."""

    def __init__(
        self, name: str, *, maker: GroupMaker, source: Source, sink: Sink, slots: SampleSlots | None = None
    ) -> None:
        """slots: slots of this stage; None shares those of the engine"""
        self.name = name
        self._maker = maker
        self._source = source
        self._sink = sink
        self._slots = slots or maker.engine.slots
        self._log = logging.getLogger(f"asyncrl.{maker.worker}")

    async def run(self) -> None:
        """consumes: groups of its source    waits for: a group, a free slot    woken by: the source, the slots

        Returns when the source has ended and every group is done. Raises EngineDied and BusError.
        """
        contain_task_exits()
        async with self._source.open(), asyncio.TaskGroup() as group:
            while (item := await self._source.next()) is not None:
                slots = await self._take_slots(item)
                name = f"{self._maker.worker}.{self.name}.group-{item.group_id}"
                group.create_task(self._process(item, slots), name=name)

    def drain(self) -> None:
        """Begin nothing more."""
        self._source.drain()

    async def close(self) -> None:
        await self._maker.close()

    async def _take_slots(self, item: WorkItem) -> SlotLease:
        count = 0 if item.prompt is None or item.problem else self._maker.num_samples(item.prompt)
        try:
            if item.needs_worker_alone:
                return await self._slots.take_alone(count)
            return await self._slots.take(count)
        except BaseException:
            item.close()
            raise

    async def _process(self, item: WorkItem, slots: SlotLease) -> None:
        """Take one group from its source to its sink."""
        try:
            group = await self._make(item, slots)
            await self._sink.publish(group, prompt=item.prompt)
            await item.finish()
        except EngineDied:
            raise
        except NotNow as error:
            self._log.warning("group %d: given back: %s", item.group_id, error)
            await item.give_back()
        except EngineError as error:
            self._log.warning("group %d: attempt %d failed: %s", item.group_id, item.attempt, error)
            await item.retry()
        finally:
            item.close()
            slots.close()

    async def _make(self, item: WorkItem, slots: SlotLease) -> TrajectoryGroup:
        """Make one group, or a failed one. Raises EngineError if it should be made again."""
        prompt = item.prompt
        if prompt is None or item.problem:
            return failed_group(item.group_id, worker=self._maker.worker, error=item.problem, prompt=prompt)
        progress = await item.begin()
        try:
            return await self._maker.make(prompt, slots=slots, progress=progress)
        except (PromptError, RewardError, RolloutError) as error:
            self._log.warning("group %d failed: %s", prompt.group_id, error, extra={REASON: str(error)})
            self._maker.explain(error)
            problem = str(error)
        except EngineError as error:
            if isinstance(error, EngineDied | NotNow) or not item.is_last_attempt:
                raise
            problem = f"gave up after {item.attempt} attempts, the last: {error}"
        return failed_group(prompt.group_id, worker=self._maker.worker, error=problem, prompt=prompt)
