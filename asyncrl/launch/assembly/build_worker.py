"""Assembles a rollout worker (its engine, the follower that updates its weights, its stages)."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from asyncrl.actors.rollout.evaluation import DatasetRewards, EvaluationWorker, evaluation_stage
from asyncrl.actors.rollout.group_maker import GroupMaker, GroupRules
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import VersionNeed, WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import check_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments import load as rollout_functions
from asyncrl.launch import colocated


async def build_worker(
    run: RunConfig, *, bus: Bus, name: str, is_dedicated: bool = False, beside_learner: int = 0
) -> tuple[RolloutWorker, WeightFollower]:
    """Return the worker and its weight follower, ready to be supervised.

    is_dedicated    it only evaluates
    beside_learner  number of engines on its GPU, if the learner is on it at the same time
    """
    engine = registry.engine(run, name=name)
    if run.run.colocated:
        engine = colocated.engine(run, engine)
    if beside_learner:
        colocated.limit_memory(run, engine, num_engines=beside_learner)
    follower = WeightFollower(
        f"{name}.weights",
        bus,
        engine=engine,
        channel=registry.channel(run, bus=bus),
        load=run.load,
        max_staleness=run.max_staleness,
        follows=not is_dedicated,
    )
    model = await asyncio.to_thread(check_model, Path(run.model.path))
    shared = SharedEngine(
        engine,
        follower=follower,
        max_running=run.rollout.max_running,
        context_tokens=model.context_tokens,
        request_tokens=registry.context_tokens(run),
    )
    partial_rollouts = PartialRollouts(
        bus,
        worker=name,
        seconds=0 if is_dedicated else run.rollout.partial_save_seconds,
        max_attempts=run.rollout.max_attempts,
        vocabulary_size=model.vocab_size,
        # with "tokens", tokens sampled after those too old are trained
        max_staleness=None if run.staleness.discard == "tokens" else run.max_staleness,
    )
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(run.model.path))
    make = functools.partial(
        GroupMaker,
        name,
        shared,
        rollout=rollout_functions.load_rollout(run.rollout)(tokenizer),
        tokenizer=tokenizer,
        seed=run.run.seed,
    )
    keep_seconds = run.bus.ack_seconds / 3
    stages = []
    if not is_dedicated:
        rules = GroupRules(
            sample_seconds=run.rollout.timeout_seconds,
            min_group=run.rollout.min_group,
            extra_samples=run.rollout.extra_samples,
            group_seconds=run.rollout.group_seconds,
            max_parts=run.rollout.max_parts,
            largest_reward=run.reward.largest,
            needs_reward=run.reward.takes_given,
        )
        maker = make(reward=registry.load_reward(run), rules=rules)
        stages.append(training_stage(bus, maker, partial_rollouts=partial_rollouts, keep_seconds=keep_seconds))
    if is_dedicated or (run.evaluation.is_on and run.evaluation.place == "shared"):
        rewards = DatasetRewards(registry.load_evaluation_rewards(run))
        rules = GroupRules(sample_seconds=run.rollout.timeout_seconds)
        stages.append(
            evaluation_stage(
                bus,
                make(reward=rewards, rules=rules, need=VersionNeed.for_evaluation),
                rewards=rewards,
                tokenizer=tokenizer,
                max_attempts=run.rollout.max_attempts,
                keep_seconds=keep_seconds,
                is_dedicated=is_dedicated,
            )
        )
    kind = EvaluationWorker if is_dedicated else RolloutWorker
    turn = colocated.start_turn(run) if beside_learner else None
    worker = kind(name, bus, engine=shared, stages=stages, partial_rollouts=partial_rollouts, start_turn=turn)
    return worker, follower
