"""Assembles a rollout worker (its engine, the follower that updates its weights, its stages)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncrl.actors.rollout.evaluation import EvaluationWorker, evaluation_stage
from asyncrl.actors.rollout.over_sampling import OverSampling
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.rollout_parts import RolloutLimits
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.stragglers import Stragglers
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import check_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.port import Engine
from asyncrl.environments import load as rollout_functions
from asyncrl.launch import colocated


async def build_worker(
    run: RunConfig, *, bus: Bus, name: str, is_dedicated: bool = False
) -> tuple[RolloutWorker, WeightFollower]:
    """Return the worker and its weight follower, ready to be supervised.

    is_dedicated: it only evaluates
    """
    engine = registry.engine(run, name=name)
    if run.run.colocated:
        engine = colocated.engine(run, engine)
    follower = _follower(run, bus=bus, engine=engine, name=name, is_dedicated=is_dedicated)
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
        # with "tokens", tokens sampled after those too old are trained
        max_staleness=None if run.staleness.parts == "tokens" else run.max_staleness,
    )
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(run.model.path))
    answering: dict[str, Any] = {
        "worker": name,
        "engine": shared,
        "rollout": rollout_functions.load_rollout(run.rollout)(tokenizer),
        "tokenizer": tokenizer,
        "seed": run.run.seed,
        "max_attempts": run.rollout.max_attempts,
        "keep_seconds": run.bus.ack_seconds / 3,
        "sample_seconds": run.rollout.timeout_seconds,
    }
    stages = []
    if not is_dedicated:
        training = _training(run)
        stages.append(training_stage(bus, partial_rollouts=partial_rollouts, **training, **answering))
    if is_dedicated or (run.evaluation.is_on and run.evaluation.place == "shared"):
        stages.append(
            evaluation_stage(
                bus,
                rewards=registry.load_evaluation_rewards(run),
                max_running=run.rollout.max_running,
                is_dedicated=is_dedicated,
                **answering,
            )
        )
    kind = EvaluationWorker if is_dedicated else RolloutWorker
    return kind(name, bus, engine=shared, stages=stages, partial_rollouts=partial_rollouts), follower


def _follower(run: RunConfig, *, bus: Bus, engine: Engine, name: str, is_dedicated: bool) -> WeightFollower:
    weights = registry.channel(run, bus=bus)
    return WeightFollower(
        f"{name}.weights",
        bus,
        engine=engine,
        verify=weights.verify,
        load=run.load,
        progress=lambda: weights.progress,
        receiver_of=lambda intake: None if is_dedicated else weights.receiver(intake, engine=name),
        max_staleness=run.max_staleness,
        follows=not is_dedicated,
    )


def _training(run: RunConfig) -> dict[str, Any]:
    """What a training stage needs besides what every stage does. Raises ConfigError."""
    return {
        "reward": registry.load_reward(run),
        "stragglers": _stragglers(run),
        "over_sampling": OverSampling(
            extra=run.rollout.extra_samples, seconds=run.rollout.group_seconds, at_least=run.rollout.min_group
        ),
        "min_group": run.rollout.min_group,
        "limits": RolloutLimits(
            max_parts=run.rollout.max_parts, largest=run.reward.largest, needs_reward=run.reward.takes_given
        ),
    }


def _stragglers(run: RunConfig) -> Stragglers | None:
    """None: wait for every sample of a group."""
    if run.staleness.stragglers != "partial":
        return None
    return Stragglers(
        max_staleness=run.max_staleness,
        min_group=run.staleness.min_group,
        are_waited_for=run.staleness.waits,
    )
