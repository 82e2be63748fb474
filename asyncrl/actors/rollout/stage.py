"""A stage: takes prompt groups from a source, makes trajectory groups, and passes them to a sink.

A worker has one stage for each use of its engine. Training reads prompts from the bus and publishes trajectories to the
log (training.py); evaluation reads prompts from its own topic (evaluation.py).

    Source.next -> _take_slots -> GroupMaker.make -> Sink.publish -> PromptWork.finish
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.prompt_deliveries import PromptWork, Source
from asyncrl.actors.rollout.slots import SampleSlots, SlotLease
from asyncrl.errors import EngineDied, EngineError, NotNow, PromptError, RewardError, RolloutError
from asyncrl.logs import REASON
from asyncrl.messages import PromptGroup, TrajectoryGroup
from asyncrl.messages.rollout import failed_group


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

    async def _take_slots(self, item: PromptWork) -> SlotLease:
        count = 0 if item.prompt is None or item.problem else self._maker.num_samples(item.prompt)
        try:
            if item.needs_worker_alone:
                return await self._slots.take_alone(count)
            return await self._slots.take(count)
        except BaseException:
            item.close()
            raise

    async def _process(self, item: PromptWork, slots: SlotLease) -> None:
        """Take one group from its source to its sink."""
        try:
            group = await self._make(item, slots)
            await self._sink.publish(group, prompt=item.prompt)
            await item.finish()
        except EngineDied:
            raise
        except NotNow as error:
            self._log.warning("group %d: given back: %s", item.group_id, error, extra={REASON: str(error)})
            await item.give_back()
        except EngineError as error:
            self._log.warning(
                "group %d: attempt %d failed: %s", item.group_id, item.attempt, error, extra={REASON: str(error)}
            )
            await item.retry()
        finally:
            item.close()
            slots.close()

    async def _make(self, item: PromptWork, slots: SlotLease) -> TrajectoryGroup:
        """Make one group, or a failed one. Raises EngineError if it should be made again."""
        prompt = item.prompt
        if prompt is None or item.problem:  # not of its making, but it is the one that writes
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
