"""Makes one trajectory group: its samples in parallel with the user's rollout function, then their rewards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from asyncrl.actors.rollout.generation_session import GenerationSession, sample_seed
from asyncrl.actors.rollout.group_rules import GroupRules, Rollout, check_rollout
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.outages import Outages
from asyncrl.actors.rollout.partial_rollouts import GroupProgress
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.slots import SlotLease
from asyncrl.actors.rollout.teacher import Teachers
from asyncrl.actors.rollout.worker_images import SampleImages, WorkerImages
from asyncrl.config import plugins
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.errors import OUTAGES, EngineDied, EngineError, Outage, RewardError, RolloutError
from asyncrl.logs import REASON
from asyncrl.messages import PromptGroup, TrajectoryGroup, replace
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.rollout import label_text
from asyncrl.messages.user_copies import own_prompt
from asyncrl.outage import outage_kind
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.port import Reward, RewardFn, Sample

MOST_EXPLAINED: Final = 100


class GroupMaker:
    """Makes trajectory groups on one worker's engine."""

    def __init__(
        self,
        worker: str,
        engine: SharedEngine,
        *,
        rollout: RolloutFn,
        own_rollouts: Mapping[str, RolloutFn] = MappingProxyType({}),
        reward: RewardFn,
        tokenizer: Tokenizer,
        seed: int,
        rules: GroupRules | None = None,
        engine_build: str = "",
        servers: Mapping[str, ServerAddress] = MappingProxyType({}),
        teachers: Teachers | None = None,
        need: Callable[[PromptGroup], VersionNeed] = VersionNeed.for_training,
        images: WorkerImages | None = None,
    ) -> None:
        """
        own_rollouts  by data set, instead of ``rollout``
        seed          seed of the run; combined with group, sample and call index to seed each generation
        engine_build  name and version of the engine, for TrajectoryGroup.engine
        servers       the servers of [servers], for reward functions
        teachers      served teachers, which score each answer; None: none do
        need          the weights that generations of a group may start on
        images        the worker's images; None: its model reads text alone
        """
        self.worker = worker
        self.engine = engine
        self._rollout, self._own_rollouts = rollout, own_rollouts
        self._reward = reward
        self._completions = CompletionReader(tokenizer)
        self._seed = seed
        self._rules = rules or GroupRules()
        self._servers = servers
        self._engine_build = engine_build
        self._teachers = teachers
        self._need = need
        self._images = images
        self._shown: dict[int, dict[str, bytes]] = {}
        """By group in progress, the files of images that environments showed."""
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._explained: set[str] = set()
        """Reasons whose traceback is already in the log."""
        self._outages: dict[str, Outages] = {}
        """By what may need other services than the rest: the rollout function, and each reward."""

    async def close(self) -> None:
        await self._reward.close()
        if self._teachers is not None:
            await self._teachers.close()
        for rollout in (self._rollout, *self._own_rollouts.values()):
            closed = getattr(rollout, "close", lambda: None)()  # a class with child processes or a server
            if inspect.isawaitable(closed):
                await closed

    def num_samples(self, prompt: PromptGroup) -> int:
        """How many samples are begun for the group."""
        return prompt.group_size + self._rules.extra_samples

    async def make(self, prompt: PromptGroup, *, slots: SlotLease, progress: GroupProgress | None) -> TrajectoryGroup:
        """Make one group.

        Raises PromptError, RewardError or RolloutError if the group fails, another EngineError if it should be made
        again.
        """
        started, began = time.monotonic(), time.time()
        outages = self._outages_of(f"reward {prompt.dataset}/{prompt.reward}")
        since = outages.num_through
        try:
            sampled = await self._sample_all(prompt, slots, progress)
        finally:
            shown = self._shown.pop(prompt.group_id, {})
        made = self._drop_failed(prompt, sampled)
        chosen = first_rollouts(made, prompt.group_size)
        generated = time.monotonic()
        scored = self._drop_failed(prompt, await self._score_all(prompt, chosen))
        rewarded = self._drop_failed(prompt, await self._reward_all(prompt, scored, outages, since=since))
        missing = prompt.group_size - len(rewarded)
        failed = (len(sampled) - len(made)) + (len(chosen) - len(rewarded))  # to be made, and to be graded
        trajectories = tuple(part for parts in rewarded for part in parts)
        digests = {one.digest for part in trajectories for one in part.images} if shown else set()
        return TrajectoryGroup(
            group_id=prompt.group_id,
            prompt_tokens=prompt.prompt_tokens,
            trajectories=trajectories,
            image_files={digest: shown[digest] for digest in sorted(digests & shown.keys())},
            epoch=prompt.epoch,
            worker=self.worker,
            seconds=time.monotonic() - started,
            cancelled=missing,
            failed_samples=min(failed, missing),
            extra_samples=self._rules.extra_samples,
            began=began,
            reward_seconds=time.monotonic() - generated,
            label=label_text(prompt.label),
            engine=self._engine_build,
            temperature=prompt.sampling.own_temperature(self._rules.temperature),
        )

    # -- samples -------------------------------------------------------------------------------------------------------

    async def _sample_all(
        self, prompt: PromptGroup, slots: SlotLease, progress: GroupProgress | None
    ) -> list[Rollout | RolloutError]:
        """Make all samples in parallel; return those that were not cut off. The first failure cancels the others,
        unless the group may go without failed samples: then the error takes the sample's place."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sample_or_error(prompt, index, slots, progress))
                    for index in range(self.num_samples(prompt))
                ]
                if self._rules.cuts:
                    group.create_task(cut_samples(tasks, group_size=prompt.group_size, rules=self._rules))
        except ExceptionGroup as error:
            died, other = error.split(EngineDied)
            first = (died or other or error).exceptions[0]
            raise first from first.__cause__  # not from the group: the log should show where it was raised
        finished = [task.result() for task in tasks if not task.cancelled()]
        if not finished or (not self._rules.cuts and len(finished) < len(tasks)):
            raise RolloutError("the rollout function cancelled itself")
        return finished

    async def _sample_or_error(
        self, prompt: PromptGroup, index: int, slots: SlotLease, progress: GroupProgress | None
    ) -> Rollout | RolloutError:
        """Make one sample. Its error is raised unless the group may go without failed samples."""
        work = functools.partial(self._sample, prompt, index, progress)
        try:
            return await self._outages_of("rollout function").get_through(work, group_id=prompt.group_id)
        except RolloutError as error:
            if not self._rules.min_group:
                raise
            return error
        finally:
            slots.release()

    async def _sample(self, prompt: PromptGroup, index: int, progress: GroupProgress | None) -> Rollout:
        if progress is not None:
            progress.rewind(index)  # after an outage it runs again, on the same answers
        images = None if self._images is None else SampleImages(self._images, prompt)
        session = GenerationSession(
            self.engine,
            sampling=prompt.sampling,
            need=self._need(prompt),
            seed=functools.partial(sample_seed, self._seed, prompt.group_id, index),
            index=index,
            progress=progress,
            own_seconds=self._rules.sample_seconds,
            servers=self._servers,
            images=images,
        )
        rollout = self._own_rollouts.get(prompt.dataset, self._rollout)
        with self._name_errors(session):
            async with session.waiting(on="harness" if getattr(rollout, "has_harness", False) else "rollout"):
                with plugins.contain_exits():
                    made = await rollout(own_prompt(prompt), session, index=index)
            if images is not None and images.own_files:
                self._shown.setdefault(prompt.group_id, {}).update(images.own_files)
            return check_rollout(
                made,
                prompt,
                index=index,
                num_resumed=session.num_resumed,
                context_tokens=self.engine.context_tokens,
                rules=self._rules,
            )

    @contextlib.contextmanager
    def _name_errors(self, session: GenerationSession) -> Iterator[None]:
        """Turn what a rollout function raises into an EngineError, an Outage or a RolloutError: it may raise anything,
        which must fail its sample and not the worker."""
        try:
            yield
        except EngineError:
            raise
        except RolloutError as error:
            if isinstance(error, Outage) or not (found := outage_kind(error)):
                raise
            raise OUTAGES[found](str(error)) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the sample is cut off, or its group has ended
            raise RolloutError("the rollout function cancelled itself") from error
        except Exception as error:
            if session.is_out_of_time:
                limit = f"rollout.timeout_seconds = {self._rules.sample_seconds:g}"
                raise RolloutError(f"the rollout function took longer than {limit} for a sample") from error
            kind = OUTAGES.get(outage_kind(error), RolloutError)
            raise kind(f"the rollout function raised {plugins.describe_raised(error)}") from error

    def _outages_of(self, what: str) -> Outages:
        return self._outages.setdefault(what, Outages(self.worker, waits=self.engine.waits, gate=self.engine.gate))

    def _drop_failed(
        self, prompt: PromptGroup, samples: Sequence[Rollout | RolloutError | RewardError]
    ) -> list[Rollout]:
        """Return the samples that did not fail. Raises the first error if too few are left."""
        made = [sample for sample in samples if not isinstance(sample, RolloutError | RewardError)]
        failed = [sample for sample in samples if isinstance(sample, RolloutError | RewardError)]
        if failed and (not self._rules.min_group or len(made) < self._rules.min_group):
            raise failed[0] from failed[0].__cause__
        for error in failed:
            self._log.warning(
                "group %d continues without a failed sample: %s", prompt.group_id, error, extra={REASON: str(error)}
            )
            self.explain(error)
        return made

    async def _score_all(self, prompt: PromptGroup, rollouts: Sequence[Rollout]) -> Sequence[Rollout | RewardError]:
        """Return the rollouts with the logprobs of their teacher, if the run has a served one."""
        if self._teachers is None:
            return rollouts
        work = functools.partial(self._teachers.score, prompt, rollouts)
        with self.engine.waits.waiting("its teacher", on="reward"):
            return await self._outages_of("teacher").get_through(work, group_id=prompt.group_id)

    # -- rewards -------------------------------------------------------------------------------------------------------

    async def _reward_all(
        self, prompt: PromptGroup, rollouts: Sequence[Rollout], outages: Outages, *, since: int
    ) -> list[Rollout | RewardError]:
        """Return the rollouts with their rewards set; an error in place of a rollout that has none. Waits while the
        service that gives them is away."""
        samples = [self._sample_of(prompt, parts) for parts in rollouts]

        async def ask() -> Sequence[Reward | RewardError]:
            with self.engine.waits.waiting("its reward function", on="reward"):
                return await self._reward(samples)

        rewards = await outages.get_each_through(ask, group_id=prompt.group_id, since=since)
        return [
            reward if isinstance(reward, RewardError) else with_reward(parts, reward)
            for parts, reward in zip(rollouts, rewards, strict=True)
        ]

    def _sample_of(self, prompt: PromptGroup, parts: Rollout) -> Sample:
        """Return what the reward function gets of a rollout."""
        completion, plain = self._completions.read(parts[-1])
        return Sample(
            prompt=prompt.prompt,
            completion=completion,
            label=prompt.label,
            metadata=prompt.metadata,
            trajectory=parts[-1],
            prompt_tokens=prompt.prompt_tokens,
            dataset=prompt.dataset,
            reward=prompt.reward,
            parts=parts,
            plain=plain,
            servers=self._servers,
        )

    def explain(self, error: Exception) -> None:
        """Log the traceback of a user's function, once per reason."""
        reason, cause = str(error), error.__cause__
        if cause is not None and reason not in self._explained and len(self._explained) < MOST_EXPLAINED:
            self._explained.add(reason)
            self._log.info("where it was raised:", exc_info=cause)


async def cut_samples(samples: Sequence[asyncio.Task[Any]], *, group_size: int, rules: GroupRules) -> None:
    """Cancel unfinished samples once enough are made: group_size, or min_group after the deadline.

    consumes: nothing    waits for: samples, the deadline    woken by: a sample that ends, the clock
    """
    clock = asyncio.get_running_loop().time
    enough = group_size
    deadline = clock() + rules.group_seconds if rules.group_seconds else None
    pending = set(samples)
    while pending:
        left = None if deadline is None else max(0.0, deadline - clock())
        _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if deadline is not None and clock() >= deadline:
            enough, deadline = rules.min_group, None
        if sum(map(_is_made, samples)) >= enough:
            for sample in pending:
                sample.cancel()
            return


def _is_made(sample: asyncio.Task[Any]) -> bool:
    """Return whether a sample has ended and was neither cut off nor failed."""
    if not sample.done() or sample.cancelled() or sample.exception() is not None:
        return False
    return not isinstance(sample.result(), RolloutError)


def first_rollouts(rollouts: Sequence[Rollout], count: int) -> Sequence[Rollout]:
    """Return the first ``count`` rollouts: with extra samples, more may end at the same moment. A chosen extra sample
    takes the number of a missing one."""
    if all(parts[0].rollout < count for parts in rollouts):
        return rollouts
    chosen = enumerate(rollouts[:count])
    return [tuple(replace(part, rollout=number) for part in parts) for number, parts in chosen]


def with_reward(parts: Rollout, reward: Reward) -> Rollout:
    """Return the parts of a rollout with its reward set."""
    return tuple(replace(one, reward=float(reward.value), reward_parts=dict(reward.parts)) for one in parts)
