"""Builds the training stage, and a rollout worker with only this stage."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.actors.rollout.over_sampling import OverSampling
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.rollout_parts import ANY, RolloutLimits
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.rollout.stragglers import Stragglers
from asyncrl.actors.rollout.training_sink import TrainingSink
from asyncrl.actors.rollout.training_source import TrainingSource
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Engine
from asyncrl.environments.port import RolloutFn, Tokenizer
from asyncrl.rewards.port import RewardFn


def training_stage(
    bus: Bus,
    *,
    worker: str,
    engine: SharedEngine,
    rollout: RolloutFn,
    reward: RewardFn,
    tokenizer: Tokenizer,
    seed: int,
    max_attempts: int,
    keep_seconds: float,
    partial_rollouts: PartialRollouts,
    sample_seconds: float = 0.0,
    limits: RolloutLimits = ANY,
    stragglers: Stragglers | None = None,
    over_sampling: OverSampling | None = None,
    min_group: int = 0,
    groups_ahead: Callable[[], int] | None = None,
) -> Stage:
    """Return a stage that turns prompt groups into rewarded trajectory groups. See ``training_worker``."""
    source = TrainingSource(
        bus,
        worker=worker,
        engine=engine,
        partial_rollouts=partial_rollouts,
        max_attempts=max_attempts,
        keep_seconds=keep_seconds,
        groups_ahead=groups_ahead,
    )
    return Stage(
        "training",
        worker=worker,
        engine=engine,
        source=source,
        sink=TrainingSink(bus, worker=worker, waits=engine.waits),
        rollout=rollout,
        reward=reward,
        tokenizer=tokenizer,
        seed=seed,
        sample_seconds=sample_seconds,
        limits=limits,
        stragglers=stragglers,
        over_sampling=over_sampling,
        min_group=min_group,
    )


def training_worker(
    name: str,
    bus: Bus,
    *,
    engine: Engine,
    follower: WeightFollower,
    rollout: RolloutFn,
    reward: RewardFn,
    tokenizer: Tokenizer,
    seed: int,
    max_running: int,
    max_attempts: int,
    keep_seconds: float,
    context_tokens: int = 2**31,
    sample_seconds: float = 0.0,
    limits: RolloutLimits = ANY,
    stragglers: Stragglers | None = None,
    over_sampling: OverSampling | None = None,
    min_group: int = 0,
    partial_rollouts: PartialRollouts | None = None,
    groups_ahead: Callable[[], int] | None = None,
) -> RolloutWorker:
    """Return a worker with only the training stage.

    max_running       maximum samples in progress
    max_attempts      a group begun this often without a result fails
    keep_seconds      interval between renewals of a delivery
    context_tokens    context length of the engine's model in tokens, prompt included
    sample_seconds    time limit of a rollout function per sample, without its generations; 0: no limit
    min_group         fewest successful samples with which a group is published despite failed ones; 0: one failed
                      sample fails the group
    limits            limits on the results of the rollout function
    stragglers        None waits for every sample of a group
    over_sampling     None begins only the requested samples, without a deadline
    partial_rollouts  None saves and resumes nothing
    groups_ahead      returns how many groups to hold beyond those with free slots; None measures it
    """
    if partial_rollouts is None:
        partial_rollouts = PartialRollouts(bus, worker=name, seconds=0, max_attempts=max_attempts, max_staleness=0)
    shared = SharedEngine(
        engine,
        follower=follower,
        max_running=max_running,
        context_tokens=context_tokens,
    )
    training = training_stage(
        bus,
        worker=name,
        engine=shared,
        rollout=rollout,
        reward=reward,
        tokenizer=tokenizer,
        seed=seed,
        max_attempts=max_attempts,
        keep_seconds=keep_seconds,
        partial_rollouts=partial_rollouts,
        sample_seconds=sample_seconds,
        limits=limits,
        stragglers=stragglers,
        over_sampling=over_sampling,
        min_group=min_group,
        groups_ahead=groups_ahead,
    )
    return RolloutWorker(name, bus, engine=shared, stages=[training], partial_rollouts=partial_rollouts)
