"""Builds the evaluation stage of a worker, and a worker with only this stage."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.actors.rollout.evaluation_sink import EvaluationSink
from asyncrl.actors.rollout.evaluation_source import EvaluationSource
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.bus.port import Bus
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.roles import EVALUATION_WORKER
from asyncrl.rewards.port import Reward, RewardFn, Sample

LONGEST_VOTE: Final = 64
"""Maximum characters of a vote. Longer votes are replaced by a digest: votes are compared and never read."""


class DatasetRewards:
    """The RewardFn of an evaluation: uses the reward of each data set."""

    def __init__(self, rewards: Mapping[str, RewardFn]) -> None:
        self._rewards = rewards
        self._log = logging.getLogger("asyncrl.evaluation")
        self._explained: set[str] = set()
        """Data sets whose failing vote was logged."""

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        return await self._rewards[samples[0].dataset](samples)

    async def close(self) -> None:
        for reward in {id(reward): reward for reward in self._rewards.values()}.values():
            await reward.close()

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


def evaluation_stage(
    bus: Bus,
    *,
    worker: str,
    engine: SharedEngine,
    rollout: RolloutFn,
    rewards: Mapping[str, RewardFn],
    tokenizer: Tokenizer,
    seed: int,
    max_running: int,
    max_attempts: int,
    keep_seconds: float,
    sample_seconds: float = 0.0,
    is_dedicated: bool = False,
) -> Stage:
    """Return a stage that answers prompts of an evaluation with exactly the evaluated version.

    rewards      name of a data set -> its reward
    max_running  samples in progress, in addition to those of other stages: training may wait for weights that an
                 evaluation holds back, so neither takes the other's slots; a group that needs the worker alone has it
                 across both
    """
    slots = SampleSlots(max_running, beside=engine.slots)
    source = EvaluationSource(
        bus,
        worker=worker,
        engine=engine,
        slots=slots,
        max_attempts=max_attempts,
        keep_seconds=keep_seconds,
        is_dedicated=is_dedicated,
    )
    by_dataset = DatasetRewards(rewards)

    async def votes(dataset: str, group: TrajectoryGroup) -> Sequence[str]:
        texts = [tokenizer.decode(parts[-1].tokens, skip_special_tokens=True) for parts in group.rollouts]
        return [_short(vote) for vote in await by_dataset.votes(dataset, texts)]

    return Stage(
        "evaluation",
        worker=worker,
        engine=engine,
        source=source,
        sink=EvaluationSink(
            bus,
            worker=worker,
            current=lambda: source.in_progress,
            held_seconds=lambda: source.held_seconds,
            is_draining=lambda: source.is_draining,
            prompt_of=source.prompt_of,
            vote=votes,
            waits=engine.waits,
        ),
        rollout=rollout,
        reward=by_dataset,
        tokenizer=tokenizer,
        seed=seed,
        sample_seconds=sample_seconds,
        weights=lambda prompt: engine.follower.exactly((prompt.incarnation, prompt.policy_version)),
        slots=slots,
    )


def _short(vote: str) -> str:
    return vote if len(vote) <= LONGEST_VOTE else hashlib.sha256(vote.encode(errors="replace")).hexdigest()


class EvaluationWorker(RolloutWorker):
    """A worker whose engine only evaluates. Its follower does not follow: the stage holds versions."""

    role = EVALUATION_WORKER
