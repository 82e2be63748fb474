"""The evaluation stage: answers an evaluation's prompts with exactly the evaluated version.

  V1 Nothing begins before the engine has exactly the evaluated version, and the engine keeps it until every answer that
     has begun is done (LoadGate.pin).
  V2 place = "shared": a worker pins a version only with one of the evaluation's ``Evaluation.num_pinned`` leases. When
     a worker ends, its lease goes to another one.
  V3 A worker that pins a version older than the newest begins no training prompts; those in progress continue.
  V4 A group that needs the worker alone never runs beside another stage. A training group does not begin while a
     version is pinned; an evaluation group does not begin while training samples are in progress. Both are put back
     without using up an attempt.
Tests: tests/actors/test_evaluation.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.prompt_deliveries import PromptWork, Source
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.environments.port import Tokenizer
from asyncrl.errors import BusFull, MessageError, MessageTooLarge, RewardError, WeightsError
from asyncrl.messages import PromptGroup, TrajectoryGroup, replace
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers
from asyncrl.messages.roles import EVALUATION_WORKER, LEARNER
from asyncrl.messages.rollout import LONGEST_ERROR, label_text
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS, EVALUATION_PROMPTS, group_id_of
from asyncrl.policies.health.waits import SPACE_IN_LOG
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.port import Reward, RewardFn, Sample

FULL_LOG_SECONDS: Final = 1.0
"""Delay between attempts to publish to a full log: the bus does not announce free space."""
LONGEST_VOTE: Final = 64
"""Maximum characters of a vote. Longer votes are replaced by a digest: votes are compared and never read."""

Vote = Callable[[str, TrajectoryGroup], Awaitable[Sequence[str]]]
"""Maps a data set and the answers to one of its prompts to a vote per answer."""


def evaluation_stage(
    bus: Bus,
    maker: GroupMaker,
    *,
    rewards: DatasetRewards,
    tokenizer: Tokenizer,
    max_attempts: int,
    keep_seconds: float,
    is_dedicated: bool = False,
) -> Stage:
    """Return a stage that answers prompts of an evaluation with exactly the evaluated version.

    maker         with ``rewards`` and VersionNeed.for_evaluation
    is_dedicated  the worker only evaluates

    It has as many slots as the other stages together, in addition to theirs: training may wait for weights that an
    evaluation holds back, so neither takes the other's slots. A group that needs the worker alone has it across both.
    """
    slots = SampleSlots(maker.engine.slots.max_running, beside=maker.engine.slots)
    source = EvaluationSource(
        bus, maker, slots=slots, max_attempts=max_attempts, keep_seconds=keep_seconds, is_dedicated=is_dedicated
    )

    completions = CompletionReader(tokenizer)

    async def vote(dataset: str, group: TrajectoryGroup) -> Sequence[str]:
        read = [completions.read(parts[-1]) for parts in group.rollouts]
        keeps = rewards.keep_special_tokens(dataset)
        votes = await rewards.votes(dataset, [kept if keeps else plain for kept, plain in read])
        return [
            one if len(one) <= LONGEST_VOTE else hashlib.sha256(one.encode(errors="replace")).hexdigest()
            for one in votes
        ]

    sink = EvaluationSink(bus, worker=maker.worker, source=source, vote=vote, waits=maker.engine.waits)
    return Stage("evaluation", maker=maker, source=source, sink=sink, slots=slots)


class EvaluationWorker(RolloutWorker):
    """A worker whose engine only evaluates. Its follower does not follow: the stage pins versions."""

    role = EVALUATION_WORKER


class DatasetRewards:
    """The RewardFn of an evaluation: uses the reward of each data set."""

    def __init__(self, rewards: Mapping[str, RewardFn]) -> None:
        self._rewards = rewards
        self._log = logging.getLogger("asyncrl.evaluation")
        self._explained: set[str] = set()
        """Data sets whose failing vote was logged."""

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardError]:
        return await self._rewards[samples[0].dataset](samples)

    async def close(self) -> None:
        for reward in {id(reward): reward for reward in self._rewards.values()}.values():
            await reward.close()

    def keep_special_tokens(self, dataset: str) -> bool:
        return getattr(self._rewards[dataset], "keeps_special_tokens", True)

    async def votes(self, dataset: str, completions: Sequence[str]) -> list[str]:
        """Return each answer's vote by its data set's reward; the whole answer if that has no votes (GuardedReward)."""
        votes = getattr(self._rewards[dataset], "votes", None)
        if votes is None:  # rows name their own rewards
            return [completion.strip() for completion in completions]
        found: list[str]
        found, problem = await votes(completions)
        if problem and dataset not in self._explained:
            self._explained.add(dataset)
            self._log.warning("%s: its answers have no vote: %s", dataset, problem)
        return found


class EvaluationSource(Source):
    """Prompts of the pinned evaluation."""

    def __init__(
        self,
        bus: Bus,
        maker: GroupMaker,
        *,
        slots: SampleSlots,
        max_attempts: int,
        keep_seconds: float,
        is_dedicated: bool,
    ) -> None:
        """is_dedicated: the worker only evaluates, so it pins every version without a lease"""
        super().__init__(
            bus,
            EVALUATION_PROMPTS,
            maker,
            slots=slots,
            # Nothing of an answer is saved: tokens of another attempt might be of another version.
            partial_rollouts=PartialRollouts(bus, worker=maker.worker, seconds=0, max_attempts=max_attempts),
            keep_seconds=keep_seconds,
            what="evaluation prompts",
            on="",
        )
        self._is_dedicated = is_dedicated
        self._newest: Evaluation | None = None
        self._given_up = -1  # number of the evaluation whose version cannot be loaded here
        self._evaluation_changed = asyncio.Event()
        self.current: Evaluation | None = None
        """The evaluation whose version the engine has and keeps."""
        self._pinned_since = 0.0

    @property
    def is_open(self) -> bool:
        return self.current is not None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with super().open(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._watch(), name=f"{self._worker}.watch-evaluation"),
                group.create_task(self._take_part(), name=f"{self._worker}.pin-version"),
            ]
            yield
            for task in tasks:
                task.cancel()

    async def accept(self, work: PromptWork) -> bool:
        delivery, current = work.delivery, self.current
        prompt = delivery.message
        if prompt is None or group_id_of(delivery.key) != prompt.group_id:
            problem = delivery.problem or f"the prompt under key {delivery.key!r} is group {prompt and prompt.group_id}"
            self._bus.rejections.note(EVALUATION_PROMPTS.name, problem)
            await delivery.ack()  # the learner asks again
        elif current is None or prompt.group_id >= current.group_id(current.num_prompts):
            await work.retry()
        elif prompt.group_id < current.group_id(0):
            await delivery.ack()  # of an evaluation that is over
        elif work.needs_worker_alone and self._slots.num_running_beside:
            await work.retry()
        else:
            return True
        return False

    @property
    def in_progress(self) -> Evaluation | None:
        """The evaluation that needs answers, whether or not the engine has its version."""
        newest = self._newest
        return newest if newest is not None and not newest.is_over else None

    @property
    def pinned_seconds(self) -> float:
        """How long the engine has had the version of ``current``."""
        return 0.0 if self.current is None else time.monotonic() - self._pinned_since

    # -- which version -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """consumes: evaluation    waits for: an evaluation that begins or ends    woken by: the learner"""
        async with self._bus.watch(EVALUATION) as evaluations:
            async for evaluation in evaluations:
                self._newest = evaluation
                self._evaluation_changed.set()

    async def _take_part(self) -> None:
        """consumes: nothing    waits for: an evaluation, a lease, its version, its end    woken by: _watch"""
        while True:
            await self._until_evaluation(lambda: self._wanted() is not None)
            if (evaluation := self._wanted()) is None:
                continue
            pinning = asyncio.create_task(self._pin(evaluation), name=f"{self._worker}.pin")
            over = asyncio.create_task(self._until_evaluation(functools.partial(self._is_over, evaluation.number)))
            try:
                await asyncio.wait((pinning, over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                pinning.cancel()
                await asyncio.wait((pinning, over))
            if not pinning.cancelled() and (error := pinning.exception()) is not None:
                if not isinstance(error, WeightsError):
                    raise error
                self._log.warning("evaluation of version %d: %s", evaluation.weights.policy_version, error)
                self._given_up = evaluation.number
                await self._report_unable(evaluation, error)

    async def _report_unable(self, evaluation: Evaluation, error: WeightsError) -> None:
        """Tell the learner that this worker cannot load the version: it need not wait if no worker can."""
        problem = f"cannot load version {evaluation.weights.policy_version}: {error}"
        answers = EvaluationAnswers(
            number=evaluation.number, group_id=None, error=problem[:LONGEST_ERROR], worker=self._worker
        )
        with contextlib.suppress(BusFull):  # the learner then waits for its timeout
            key = f"{self._worker}/{evaluation.number}-{uuid.uuid4().hex[:12]}"
            await self._bus.publish(EVALUATION_ANSWERS, answers, key=key)

    async def _pin(self, evaluation: Evaluation) -> None:
        """Pin the evaluated version until cancelled."""
        async with self._lease(evaluation):
            await self._slots.until_unreserved()  # no await between this and ``pin``
            async with self._engine.gate.pin(evaluation.weights):
                self.current = evaluation
                self._pinned_since = time.monotonic()
                self.update()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.current = None
                    self.update()

    def _lease(self, evaluation: Evaluation) -> AbstractAsyncContextManager[None]:
        if self._is_dedicated:
            return contextlib.nullcontext()
        place = zlib.crc32(self._worker.encode()) % evaluation.num_pinned
        return self._bus.lease(f"evaluation-{place}", holder=self._worker)

    def _wanted(self) -> Evaluation | None:
        """Return the evaluation to take part in."""
        newest = self._newest
        if newest is None or newest.is_over or newest.number == self._given_up or self.is_draining:
            return None
        return newest if self._is_dedicated or newest.num_pinned else None

    def _is_over(self, number: int) -> bool:
        return self._newest is None or self._newest.number != number or self._newest.is_over

    async def _until_evaluation(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, which depends only on state set by ``_watch``. One task waits at a time."""
        while not condition():
            self._evaluation_changed.clear()
            await self._evaluation_changed.wait()


class EvaluationSink:
    """Publishes to ``evaluation_answers``. A Sink (stage.py)."""

    def __init__(self, bus: Bus, *, worker: str, source: EvaluationSource, vote: Vote, waits: WaitTracker) -> None:
        """
        source  knows the evaluation in progress; answers to other evaluations are no longer needed
        vote    maps a data set and the answers to one of its prompts to a vote per answer
        """
        self._bus = bus
        self._worker = worker
        self._source = source
        self._vote = vote
        self._waits = waits
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def publish(self, group: TrajectoryGroup, *, prompt: PromptGroup | None) -> None:
        """Publish answers, even if other versions sampled part of them: the learner counts those and asks again.

        Returns once the answers are in the log or no longer needed.
        """
        dataset = "" if prompt is None else prompt.dataset
        evaluation = self._needed_by(group.group_id)
        if evaluation is None:
            return  # the evaluation ended without these answers
        votes = await self._vote(dataset, group) if group.trajectories else ()
        answers = EvaluationAnswers(
            number=evaluation.number,
            group_id=group.group_id,
            dataset=dataset,
            answers=tuple(
                Answer(
                    reward=parts[-1].reward,
                    length=sum(len(one.tokens) for one in parts),
                    version_spans=tuple(span for one in parts for span in one.version_spans),
                    finish_reason=parts[-1].finish_reason,
                    vote=vote,
                )
                for parts, vote in zip(group.rollouts, votes, strict=True)
            ),
            error=group.error,
            worker=self._worker,
            pinned_seconds=self._source.pinned_seconds,
        )
        if prompt is not None and prompt.recorded_place >= 0 and group.trajectories:
            label = label_text(prompt.label)
            answers = replace(answers, group=_whole(group), place=prompt.recorded_place, label=label)
        await self._store(answers, group_id=group.group_id)

    def _needed_by(self, group_id: int) -> Evaluation | None:
        evaluation = self._source.in_progress
        return evaluation if evaluation is not None and evaluation.index(group_id) is not None else None

    async def _store(self, answers: EvaluationAnswers, *, group_id: int) -> None:
        """Store the answers under a new key: a prompt with rejected answers is asked again and needs another key."""
        key = f"{self._worker}/{group_id}-{uuid.uuid4().hex[:12]}"
        while self._needed_by(group_id) is not None:
            try:
                await self._bus.publish(EVALUATION_ANSWERS, answers, key=key)
                return
            except BusFull:
                answers = replace(answers, group=None)  # what is counted must not wait for what is only for reading
                with self._waits.waiting(SPACE_IN_LOG, on=LEARNER):
                    await asyncio.sleep(FULL_LOG_SECONDS)
            except (MessageTooLarge, MessageError) as error:
                self._log.warning("the answers to group %d are not recorded: %s", group_id, error)
                failed = replace(answers, answers=(), error=str(error))
                answers = replace(answers, group=None) if answers.group is not None else failed


def _whole(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return a copy for people, without the experts."""
    bare: TrajectoryGroup = replace(
        group, trajectories=tuple(replace(one, experts=NO_EXPERTS) for one in group.trajectories)
    )
    return bare
