"""Data sets, workers and rewards for evaluations of fake models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.actors.rollout.evaluation import DatasetRewards, EvaluationWorker, evaluation_stage
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.bus.port import Bus
from asyncrl.config import EvaluationDataset, EvaluationSection
from asyncrl.environments.builtin import single_turn
from asyncrl.messages import SamplingParams
from asyncrl.policies.evaluation.questions import EvaluationSet, Question
from asyncrl.policies.evaluation.results import Measured
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes


def section(**changes: Any) -> EvaluationSection:
    """Return the section with one data set, "sums"."""
    return EvaluationSection(**{"datasets": (EvaluationDataset(name="sums", path="sums.jsonl", samples=2),)} | changes)


def sums(count: int = 5, *, samples: int = 2) -> EvaluationSet:
    """Return prompts whose answers are rewarded with the version that sampled them (``version_rewards``)."""
    return EvaluationSet(
        name="sums",
        questions=[
            Question(
                prompt=f"p{index}",
                tokens=np.array([1, 4 + index], np.int32),
                label="1",
                tags=("even",) if index % 2 == 0 else (),
            )
            for index in range(count)
        ],
        sampling=SamplingParams(max_new_tokens=4),
        measured=Measured(num_prompts=count, num_samples=samples, tags={"even": (count + 1) // 2}),
    )


def version_rewards(samples: Sequence[Sample]) -> Sequence[Reward]:
    """Return the policy version of the first token. The mean over an evaluation then shows whose answers it counted."""
    return [Reward(value=float(one.trajectory.version_spans[0].policy_version)) for one in samples]


def evaluating_worker(
    bus: Bus, engine: Any, *, name: str, is_dedicated: bool = False, load: str = "in_flight", verify: Any = None
) -> tuple[RolloutWorker, WeightFollower]:
    """Return a worker that evaluates, either besides training or exclusively."""
    channel: Any = fakes.Channel()
    if verify is not None:
        channel.verify = verify
    follower = WeightFollower(
        f"{name}.weights", bus, engine=engine, channel=channel, load=load, max_staleness=2, follows=not is_dedicated
    )
    shared = SharedEngine(engine, follower=follower, max_running=8)
    partial_rollouts = PartialRollouts(bus, worker=name, seconds=0, max_attempts=3, max_staleness=2)

    def maker(reward: Any, **changes: Any) -> GroupMaker:
        return GroupMaker(
            name, shared, rollout=single_turn, reward=reward, tokenizer=fakes.Tokenizer(), seed=0, **changes
        )

    rewards = DatasetRewards({"sums": fakes.Judge(version_rewards)})
    evaluation = evaluation_stage(
        bus,
        maker(rewards, need=VersionNeed.for_evaluation),
        rewards=rewards,
        tokenizer=fakes.Tokenizer(),
        max_attempts=3,
        keep_seconds=10.0,
        is_dedicated=is_dedicated,
    )
    if is_dedicated:
        alone = EvaluationWorker(name, bus, engine=shared, stages=[evaluation], partial_rollouts=partial_rollouts)
        return alone, follower
    training = training_stage(
        bus,
        maker(fakes.Judge(fakes.token_sum)),
        keep_seconds=10.0,
        partial_rollouts=partial_rollouts,
    )
    worker = RolloutWorker(name, bus, engine=shared, stages=[training, evaluation], partial_rollouts=partial_rollouts)
    return worker, follower
