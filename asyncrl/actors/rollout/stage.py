"""A stage: takes prompt groups from a source, makes trajectory groups, and passes them to a sink.

A worker has one stage for each use of its engine; all stages share the engine's slots. Training reads prompts from the
bus (training_source.py) and publishes trajectories to the log (training_sink.py). Other uses bring their own source and
sink: evaluation reads prompts from its own topic, and the agent endpoint treats each session as a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from asyncrl.actors.rollout.drain_patience import DrainPatience
from asyncrl.actors.rollout.generation_session import GenerationSession, sample_seed
from asyncrl.actors.rollout.group_progress import GroupProgress
from asyncrl.actors.rollout.over_sampling import OverSampling
from asyncrl.actors.rollout.rollout_parts import ANY, RolloutLimits, first_of, parts_of, rewarded
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.slots import SampleSlots, SlotLease
from asyncrl.actors.rollout.stage_ports import Sink, Source, WorkItem
from asyncrl.actors.rollout.stragglers import Stragglers
from asyncrl.actors.rollout.user_tasks import contain_exits
from asyncrl.config import plugins
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.errors import EngineDied, EngineError, NotNow, PromptError, RewardError, RolloutError
from asyncrl.logs import REASON
from asyncrl.messages import PromptGroup, Trajectory, TrajectoryGroup
from asyncrl.messages.rollout import failed_group
from asyncrl.rewards.port import RewardFn, Sample

MOST_EXPLAINED: Final = 100


class Stage:
    """Makes the groups of one source, as many in parallel as slots allow."""

    def __init__(
        self,
        name: str,
        *,
        worker: str,
        engine: SharedEngine,
        source: Source,
        sink: Sink,
        rollout: RolloutFn,
        reward: RewardFn,
        tokenizer: Tokenizer,
        seed: int,
        sample_seconds: float = 0.0,
        limits: RolloutLimits = ANY,
        stragglers: Stragglers | None = None,
        over_sampling: OverSampling | None = None,
        min_group: int = 0,
        weights: Callable[[PromptGroup], AbstractAsyncContextManager[None]] | None = None,
        slots: SampleSlots | None = None,
    ) -> None:
        """
        seed            seed of the run; combined with group, sample and call index to seed each generation
        sample_seconds  time limit of a rollout function per sample, without its generations; 0: no limit
        min_group       fewest successful samples with which a group is published despite failed ones; 0: one failed
                        sample fails the group
        limits          limits on the results of the rollout function
        weights         entered around each generation, once the engine may sample for this group; None: once its
                        weights are as new as the prompt asks for
        slots           slots of this stage; None shares those of the engine
        """
        self.name = name
        self._worker = worker
        self._engine = engine
        self._slots = slots or engine.slots
        self._source, self._sink = source, sink
        self._rollout, self._reward, self._tokenizer = rollout, reward, tokenizer
        self._seed = seed
        self._sample_seconds = sample_seconds
        self._limits = limits
        self._stragglers = stragglers
        self._over_sampling = over_sampling or OverSampling()
        self._min_group = min_group
        self._weights = weights or engine.new_enough_for
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._waits_on = "harness" if getattr(rollout, "has_harness", False) else "rollout"
        self._patience = DrainPatience()
        self._explained: set[str] = set()
        """Reasons whose traceback is already in the log."""

    async def run(self) -> None:
        """consumes: groups of its source    waits for: a group, a free slot    woken by: the source, the slots

        Returns when the source has ended and every group is done. Raises EngineDied and BusError.
        """
        contain_exits()
        async with self._source.open(), asyncio.TaskGroup() as group:
            while (item := await self._source.next()) is not None:
                slots = await self._take_slots(item)
                name = f"{self._worker}.{self.name}.group-{item.group_id}"
                group.create_task(self._process(item, slots), name=name)

    def drain(self) -> None:
        """Begin nothing more, and limit the wait of begun groups for their weights."""
        self._source.drain()
        self._patience.drain()

    async def close(self) -> None:
        await self._reward.close()
        closed = getattr(self._rollout, "close", lambda: None)()  # a class with child processes or a server
        if inspect.isawaitable(closed):
            await closed

    def learner_is_at(self, policy_version: int) -> None:
        if self._stragglers is not None:
            self._stragglers.learner_is_at(policy_version)

    async def _take_slots(self, item: WorkItem) -> SlotLease:
        count = 0 if item.prompt is None or item.problem else item.prompt.group_size + self._over_sampling.extra
        try:
            if item.needs_worker_alone:
                return await self._slots.take_alone(count)
            return await self._slots.take(count)
        except BaseException:
            item.close()
            raise

    # -- one group ---------------------------------------------------------------------------------------------------

    async def _process(self, item: WorkItem, slots: SlotLease) -> None:
        """Take one group from its source to its sink."""
        try:
            ticket = "" if item.prompt is None else item.prompt.ticket
            await self._sink.publish(await self._make(item, slots), ticket=ticket)
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
        """Make one group. Raises EngineError if it should be retried."""
        prompt = item.prompt
        if prompt is None or item.problem:
            return failed_group(item.group_id, worker=self._worker, error=item.problem, prompt=prompt)
        started, began = time.monotonic(), time.time()
        progress = await item.begin()
        try:
            sampled = await self._generate(prompt, slots, progress)
            made = self._without_failed(prompt, sampled)
            chosen = first_of(made, prompt.group_size)
            generated = time.monotonic()
            rollouts = await self._rewarded(prompt, chosen)
        except (PromptError, RewardError, RolloutError) as error:
            self._log.warning("group %d failed: %s", prompt.group_id, error, extra={REASON: str(error)})
            self._explain(error)
            return failed_group(prompt.group_id, worker=self._worker, error=str(error), prompt=prompt)
        except EngineError as error:
            if isinstance(error, EngineDied | NotNow) or not item.is_last_attempt:
                raise
            problem = f"gave up after {item.attempt} attempts, the last: {error}"
            return failed_group(prompt.group_id, worker=self._worker, error=problem, prompt=prompt)
        return TrajectoryGroup(
            group_id=prompt.group_id,
            prompt_tokens=prompt.prompt_tokens,
            trajectories=tuple(part for parts in rollouts for part in parts),
            epoch=prompt.epoch,
            worker=self._worker,
            seconds=time.monotonic() - started,
            cancelled=prompt.group_size - len(rollouts),
            failed_samples=min(len(sampled) - len(made), prompt.group_size - len(rollouts)),
            extra_samples=self._over_sampling.extra,
            began=began,
            reward_seconds=time.monotonic() - generated,
        )

    async def _generate(
        self, prompt: PromptGroup, slots: SlotLease, progress: GroupProgress | None
    ) -> list[tuple[Trajectory, ...] | RolloutError]:
        """Return the parts of each sample of a group, made in parallel, without cut samples. The first failure cancels
        the others, unless the group may go without failed samples: then the error takes the sample's place."""
        count = prompt.group_size + self._over_sampling.extra
        sessions = [self._session(prompt, index, progress) for index in range(count)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sample_or_error(prompt, index, session, slots))
                    for index, session in enumerate(sessions)
                ]
                if self._stragglers is not None:
                    asked_at = prompt.min_policy_version or prompt.policy_version  # 0: republished, or at the start
                    versions = functools.partial(_first_versions, sessions)
                    group.create_task(
                        self._stragglers.cut(tasks, versions, asked_at=asked_at, min_without_failed=self._min_group)
                    )
                if self._over_sampling.is_on:
                    group.create_task(self._over_sampling.cut(tasks, group_size=prompt.group_size))
        except ExceptionGroup as error:
            died, other = error.split(EngineDied)
            first = (died or other or error).exceptions[0]
            raise first from first.__cause__  # not from the group: the log should show where it was raised
        if self._stragglers is None and not self._over_sampling.is_on and any(task.cancelled() for task in tasks):
            raise RolloutError("the rollout function cancelled itself")
        if not (ended := [task.result() for task in tasks if not task.cancelled()]):
            raise RolloutError("the rollout function cancelled itself")
        return ended

    async def _sample_or_error(
        self, prompt: PromptGroup, index: int, session: GenerationSession, slots: SlotLease
    ) -> tuple[Trajectory, ...] | RolloutError:
        """Make one sample. Its error is raised unless the group may go without failed samples."""
        try:
            return await self._sample(prompt, index, session, slots)
        except RolloutError as error:
            if not self._min_group:
                raise
            return error

    def _without_failed(
        self, prompt: PromptGroup, samples: Sequence[tuple[Trajectory, ...] | RolloutError]
    ) -> list[tuple[Trajectory, ...]]:
        """Return the samples that did not fail. Raises the first RolloutError if too few are left."""
        made = [sample for sample in samples if not isinstance(sample, RolloutError)]
        failed = [sample for sample in samples if isinstance(sample, RolloutError)]
        if failed and len(made) < self._min_group:
            raise failed[0] from failed[0].__cause__
        for error in failed:
            self._log.warning(
                "group %d continues without a failed sample: %s", prompt.group_id, error, extra={REASON: str(error)}
            )
            self._explain(error)
        return made

    def _session(self, prompt: PromptGroup, index: int, progress: GroupProgress | None) -> GenerationSession:
        return GenerationSession(
            self._engine,
            sampling=prompt.sampling,
            weights=functools.partial(self._weighted, prompt),
            seed=functools.partial(sample_seed, self._seed, prompt.group_id, index),
            index=index,
            progress=progress,
            own_seconds=self._sample_seconds,
            check_result=functools.partial(self._parts, prompt, index),
        )

    def _parts(self, prompt: PromptGroup, index: int, made: Any, *, num_resumed: int = 0) -> tuple[Trajectory, ...]:
        return parts_of(
            made,
            prompt,
            index=index,
            num_resumed=num_resumed,
            context_tokens=self._engine.context_tokens,
            limits=self._limits,
        )

    @contextlib.asynccontextmanager
    async def _weighted(self, prompt: PromptGroup) -> AsyncIterator[None]:
        """Entered once the engine may sample for the group. Raises NotNow after too long a wait in a drain."""
        async with contextlib.AsyncExitStack() as stack:
            async with self._patience.limited(f"weights of version {prompt.min_policy_version}"):
                await stack.enter_async_context(self._weights(prompt))
            yield

    async def _sample(
        self, prompt: PromptGroup, index: int, session: GenerationSession, slots: SlotLease
    ) -> tuple[Trajectory, ...]:
        try:
            async with session.waiting(on=self._waits_on):
                with plugins.contain_exits():
                    made = await self._rollout(prompt, session, index=index)
            return self._parts(prompt, index, made, num_resumed=session.num_resumed)
        except (EngineError, RolloutError):
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the sample is cut, or its group has ended
            raise RolloutError("the rollout function cancelled itself") from error
        except Exception as error:  # user code may raise anything, which must fail the sample and not the worker
            if session.is_out_of_time:
                limit = f"rollout.timeout_seconds = {self._sample_seconds:g}"
                raise RolloutError(f"the rollout function took longer than {limit} for a sample") from error
            raise RolloutError(f"the rollout function raised {plugins.describe_raised(error)}") from error
        finally:
            slots.release()

    async def _rewarded(
        self, prompt: PromptGroup, rollouts: Sequence[tuple[Trajectory, ...]]
    ) -> list[list[Trajectory]]:
        samples = [
            Sample(
                prompt=prompt.prompt,
                completion=self._tokenizer.decode(parts[-1].tokens, skip_special_tokens=True),
                label=prompt.label,
                metadata=prompt.metadata,
                trajectory=parts[-1],
                prompt_tokens=prompt.prompt_tokens,
                dataset=prompt.dataset,
                reward=prompt.reward,
                parts=parts,
            )
            for parts in rollouts
        ]
        with self._engine.waits.waiting("its reward function", on="reward"):
            rewards = await self._reward(samples)
        return [rewarded(parts, reward) for parts, reward in zip(rollouts, rewards, strict=True)]

    def _explain(self, error: Exception) -> None:
        """Log the traceback of a user's function, once per reason."""
        reason, cause = str(error), error.__cause__
        if cause is not None and reason not in self._explained and len(self._explained) < MOST_EXPLAINED:
            self._explained.add(reason)
            self._log.info("where it was raised:", exc_info=cause)


def _first_versions(sessions: Sequence[GenerationSession]) -> list[int]:
    return [session.first_version for session in sessions if session.first_version is not None]
