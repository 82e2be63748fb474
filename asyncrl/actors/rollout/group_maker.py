"""Makes one trajectory group: its samples in parallel with the user's rollout function, then their rewards."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from asyncrl.actors.rollout.generation_session import GenerationSession, sample_seed
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.outages import Outages
from asyncrl.actors.rollout.partial_rollouts import GroupProgress
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.slots import SlotLease
from asyncrl.actors.rollout.teacher import Teachers
from asyncrl.actors.rollout.worker_images import SampleImages, WorkerImages
from asyncrl.config import RunConfig, plugins
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.errors import OUTAGES, EngineDied, EngineError, MessageError, Outage, RewardError, RolloutError
from asyncrl.logs import REASON
from asyncrl.messages import PromptGroup, Trajectory, TrajectoryGroup, replace
from asyncrl.messages.codec import decode, encode, has_more_values
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.images import ImageRef, check_images
from asyncrl.messages.rollout import label_text
from asyncrl.messages.user_copies import own_likeliest, own_prompt, own_support, read_only
from asyncrl.outage import outage_kind
from asyncrl.policies.groups.validation import reward_problems
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.port import Reward, RewardFn, Sample

MOST_EXPLAINED: Final = 100
_LARGEST_METADATA: Final = 2**16
_MOST_VALUES: Final = 2**10
_MOST_IN_GROUP: Final = 2**17
"""In the metadata of a trajectory, and of a whole group, which each trajectory has an equal share of. The learner
accepts only so many values in a message (messages/codec.py) and would blame the worker."""
_NO_PROMPT: Final = np.zeros(0, np.int32)

Rollout = tuple[Trajectory, ...]
"""The parts of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """How a group is made of its samples.

    sample_seconds  time limit of a rollout function per sample, without its generations; 0: no limit
    min_group       fewest successful samples with which a group is published despite failed ones, and ones without a
                    reward; 0: one such sample fails the group
    extra_samples   samples begun in addition to the requested ones; the first that finish form the group
    group_seconds   deadline after which the group is complete with min_group samples; 0: no deadline
    max_parts       maximum trajectories of a rollout; 0: any number
    largest_reward  maximum magnitude of a reward, of its parts, and of turn rewards (reward.largest)
    needs_reward    whether the run's reward is, or includes, the rollout function's reward
    temperature     rollout.temperature; a group names only another one

    A result beyond max_parts, largest_reward or needs_reward fails its sample. Samples that are cut off are the
    longest, which biases lengths. The group therefore carries their number.
    """

    sample_seconds: float = 0.0
    min_group: int = 0
    extra_samples: int = 0
    group_seconds: float = 0.0
    max_parts: int = 0
    largest_reward: float = math.inf
    needs_reward: bool = False
    temperature: float = 1.0

    @classmethod
    def from_run(cls, run: RunConfig) -> GroupRules:
        """Return the rules of training groups."""
        return cls(
            sample_seconds=run.rollout.timeout_seconds,
            min_group=run.rollout.min_group,
            extra_samples=run.rollout.extra_samples,
            group_seconds=run.rollout.group_seconds,
            max_parts=run.rollout.max_parts,
            largest_reward=run.reward.largest,
            needs_reward=run.reward.takes_given,
            temperature=run.rollout.temperature,
        )

    @property
    def cuts(self) -> bool:
        """Whether unfinished samples may be cut off."""
        return self.extra_samples > 0 or self.group_seconds > 0


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
        rules: GroupRules = GroupRules(),
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
        self._rules = rules
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
        failed = len(sampled) - len(made) + len(chosen) - len(rewarded)
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
        outages = self._outages_of("rollout function")
        try:
            return await outages.get_through(
                functools.partial(self._sample, prompt, index, progress),
                group_id=prompt.group_id,
                since=outages.num_through,
            )
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
        try:
            async with session.waiting(on="harness" if getattr(rollout, "has_harness", False) else "rollout"):
                with plugins.contain_exits():
                    made = await rollout(own_prompt(prompt), session, index=index)
            if images is not None and images.own_files:
                self._shown.setdefault(prompt.group_id, {}).update(images.own_files)
            return self._check(prompt, index, made, num_resumed=session.num_resumed)
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
        except Exception as error:  # user code may raise anything, which must fail the sample and not the worker
            if session.is_out_of_time:
                limit = f"rollout.timeout_seconds = {self._rules.sample_seconds:g}"
                raise RolloutError(f"the rollout function took longer than {limit} for a sample") from error
            kind = OUTAGES.get(outage_kind(error), RolloutError)
            raise kind(f"the rollout function raised {plugins.describe_raised(error)}") from error

    def _outages_of(self, what: str) -> Outages:
        return self._outages.setdefault(what, Outages(self.worker, waits=self.engine.waits, gate=self.engine.gate))

    def _check(self, prompt: PromptGroup, index: int, made: Any, *, num_resumed: int = 0) -> Rollout:
        return check_rollout(
            made,
            prompt,
            index=index,
            num_resumed=num_resumed,
            context_tokens=self.engine.context_tokens,
            rules=self._rules,
        )

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
        outages = self._outages_of("teacher")
        with self.engine.waits.waiting("its teacher", on="reward"):
            return await outages.get_through(
                functools.partial(self._teachers.score, prompt, rollouts),
                group_id=prompt.group_id,
                since=outages.num_through,
            )

    # -- rewards -------------------------------------------------------------------------------------------------------

    async def _reward_all(
        self, prompt: PromptGroup, rollouts: Sequence[Rollout], outages: Outages, *, since: int
    ) -> list[Rollout | RewardError]:
        """Return the rollouts with their rewards set; an error in place of a rollout that has none."""
        samples = [self._sample_of(prompt, parts) for parts in rollouts]
        rewards = await self._reward_when_there(samples, outages, group_id=prompt.group_id, since=since)
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

    async def _reward_when_there(
        self, samples: Sequence[Sample], outages: Outages, *, group_id: int, since: int
    ) -> Sequence[Reward | RewardError]:
        """Return the reward of each sample. Waits while the service that gives them is away.

        A service may answer for some samples only. Those that it leaves are asked again with the others, as long as
        they get fewer; then they have no reward.
        """
        partly: Sequence[Reward | RewardError] = ()
        away_counts: list[int] = []

        async def ask() -> Sequence[Reward | RewardError]:
            nonlocal partly
            partly = ()
            with self.engine.waits.waiting("its reward function", on="reward"):
                rewards = await self._reward(samples)
            if away := next((one for one in rewards if isinstance(one, Outage)), None):
                partly = rewards
                num_away = sum(isinstance(one, Outage) for one in rewards)
                outages.num_through += not away_counts or num_away < away_counts[-1]  # siblings got through
                away_counts.append(num_away)
                raise away
            return rewards

        while True:
            del away_counts[:-1]
            try:
                return await outages.get_through(ask, group_id=group_id, since=since)
            except Outage:
                if not partly:
                    raise
                # Others get through: those answers have no reward. But if some of them got through just now, the
                # service answers some requests, and it is no answer's fault.
                if away_counts[-1] == away_counts[0]:
                    return partly

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


# -- what a rollout function may return --------------------------------------------------------------------------------


def check_rollout(
    made: Any,
    prompt: PromptGroup,
    *,
    index: int,
    num_resumed: int,
    context_tokens: int,
    rules: GroupRules = GroupRules(),
) -> tuple[Trajectory, ...]:
    """Return the parts of rollout ``index``.  Raises RolloutError, TypeError or ValueError if it cannot be trained.

    num_resumed: number of its first sampled tokens that earlier attempts sampled. With several parts, contexts may grow
    in parallel, so it is unknown which parts contain these tokens. All sampled tokens of all parts then count as
    resumed (policies/groups/resumed_tokens).
    """
    trajectories = made if isinstance(made, list | tuple) else (made,)
    if not trajectories:
        raise ValueError("it gave no trajectory")
    if 0 < rules.max_parts < len(trajectories):
        raise ValueError(f"it gave {len(trajectories)} trajectories, and rollout.max_parts = {rules.max_parts}")
    for one in trajectories:
        if not isinstance(one, Trajectory):
            raise TypeError(f"it gave a {type(one).__name__}, not a Trajectory")
        of_part = prompt.prompt_tokens if not len(one.prompt_tokens) else one.prompt_tokens
        length = len(of_part) + len(one.tokens)
        if length > context_tokens:  # the learner would blame this worker
            raise ValueError(f"prompt and answer have {length} tokens, the model's context {context_tokens}")
        if not one.response_mask.any():
            raise ValueError("its trajectory has no token that the model sampled: there is nothing to train")
    is_alone = len(trajectories) == 1
    given = _given_reward(trajectories)
    _check_reward(given, needed=rules.needs_reward and not prompt.reward, largest=rules.largest_reward)
    for one in trajectories:
        turns = {f"the reward of turn {turn.start}": turn.reward for turn in one.turn_rewards}
        _refuse(reward_problems(turns, {}, largest=rules.largest_reward))
    parts = []
    for number, one in enumerate(trajectories):
        sampled = int(one.response_mask.sum())
        parts.append(
            replace(
                one,
                # A rollout function may keep and reuse its arrays, and a reward must not write to them.
                tokens=read_only(one.tokens),
                response_mask=read_only(one.response_mask),
                behavior_logprobs=read_only(one.behavior_logprobs),
                experts=read_only(one.experts),
                support=own_support(one.support),
                likeliest=own_likeliest(one.likeliest),
                rollout=index,
                part=number,
                prompt_tokens=_NO_PROMPT
                if np.array_equal(one.prompt_tokens, prompt.prompt_tokens)
                else read_only(one.prompt_tokens),
                images=_images_of(one, prompt),
                resumed=min(num_resumed, sampled) if is_alone or not num_resumed else sampled,
                reward=given.reward,
                reward_parts=dict(given.reward_parts),
                metadata=_own_metadata(one, most=_MOST_IN_GROUP // (prompt.group_size * len(trajectories))),
            )
        )
    return tuple(parts)


def _own_metadata(one: Trajectory, *, most: int) -> dict[str, Any]:
    """Return a copy as the learner will get it. Raises ValueError for what cannot be sent.

    most  values that its share of a group's message has room for
    """
    if not one.metadata:
        return {}
    try:
        data = encode(one.metadata)
        own = decode(data, dict[str, Any])
    except MessageError as error:
        raise ValueError(f"the metadata of its trajectory: {error}") from error
    if len(data) > _LARGEST_METADATA:
        raise ValueError(
            f"the metadata of its trajectory has {len(data):,} bytes, and {_LARGEST_METADATA:,} are allowed"
        )
    if has_more_values(data, most := min(most, _MOST_VALUES)):
        raise ValueError(f"the metadata of its trajectory has more than {most:,} values; join them in a text")
    return own


def _images_of(one: Trajectory, prompt: PromptGroup) -> tuple[ImageRef, ...]:
    """Return the images of a trajectory: a function that knows of none leaves those of the group's prompt to us."""
    continues = not len(one.prompt_tokens) or np.array_equal(one.prompt_tokens, prompt.prompt_tokens)
    names_them = any(image.start < len(prompt.prompt_tokens) for image in one.images)
    images = (*prompt.images, *one.images) if continues and not names_them else one.images
    before = len(prompt.prompt_tokens) if continues else len(one.prompt_tokens)
    check_images(images, num_tokens=before + len(one.tokens))
    return images


def first_rollouts(rollouts: Sequence[tuple[Trajectory, ...]], count: int) -> Sequence[tuple[Trajectory, ...]]:
    """Return the first ``count`` rollouts: with extra samples, more may end at the same moment. A chosen extra sample
    takes the number of a missing one."""
    if all(parts[0].rollout < count for parts in rollouts):
        return rollouts
    chosen = enumerate(rollouts[:count])
    return [tuple(replace(part, rollout=number) for part in parts) for number, parts in chosen]


def with_reward(parts: Rollout, reward: Reward) -> Rollout:
    """Return the parts of a rollout with its reward set."""
    return tuple(replace(one, reward=float(reward.value), reward_parts=dict(reward.parts)) for one in parts)


def _check_reward(given: Trajectory, *, needed: bool, largest: float) -> None:
    """Check the reward that a rollout function set or left out.  needed: whether it counts. Raises RolloutError."""
    is_set = not math.isnan(given.reward)
    if needed and not is_set and given.reward_parts.get("timeout"):  # the harness hit its limit (harnesses/load.py)
        raise RolloutError(
            "the sample took longer than rollout.options.timeout_seconds, and nothing says its reward; set "
            'rollout.options.timeout_reward, or on_timeout = "fail"'
        )
    if needed and not is_set:
        raise RolloutError(
            "the rollout function set no reward; give one to trajectory(reward=...), or let the harness give one, 0 if "
            "the algorithm looks at none, or choose another reward.kind"
        )
    rewards = {"the reward": given.reward} if needed else {}
    _refuse(reward_problems(rewards, given.reward_parts, largest=largest))


def _refuse(problems: Iterator[str]) -> None:
    if (problem := next(problems, "")) != "":
        raise RolloutError(f"the result of the rollout function cannot be trained: {problem}")


def _given_reward(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the last trajectory with a reward, which is the rollout's. Raises ValueError if rewards differ."""
    given = [one for one in trajectories if not math.isnan(one.reward)]
    if any((one.reward, one.reward_parts) != (given[-1].reward, given[-1].reward_parts) for one in given):
        raise ValueError(f"its trajectories have the rewards {[one.reward for one in given]}, but a rollout has one")
    return given[-1] if given else trajectories[-1]
