"""Assembles a rollout worker (its engine, the follower that updates its weights, its stages)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from importlib import metadata
from pathlib import Path

from asyncrl.actors.base import Actor
from asyncrl.actors.rollout.evaluation import DatasetRewards, EvaluationWorker, evaluation_stage
from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.group_rules import GroupRules
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.server_book import ServerBook
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.step_pause import StepPause
from asyncrl.actors.rollout.teacher import Teacher, Teachers
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.rollout.worker_images import WorkerImages
from asyncrl.adapters import learner_models, registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import check_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.port import Engine, Meeting, Pauses, SpansMachines
from asyncrl.environments import load as rollout_functions
from asyncrl.environments.port import Tokenizer
from asyncrl.images.processor import Placeholders
from asyncrl.images.store import ImageStore
from asyncrl.launch import colocated
from asyncrl.launch.assembly.model_servers import server_book, server_followers
from asyncrl.version import VERSION


async def build_worker(
    run: RunConfig,
    *,
    bus: Bus,
    name: str,
    is_dedicated: bool = False,
    beside_learner: int = 0,
    takes_turns: bool = True,
    meeting: Meeting | None = None,
) -> tuple[RolloutWorker, *tuple[Actor, ...]]:
    """Return the worker and the actors that follow the weights and the servers of the run, ready to be supervised.

    is_dedicated    it only evaluates
    beside_learner  number of engines on its GPU, if the learner is on it at the same time
    takes_turns     with run.colocated: it shares the learner's GPUs
    meeting         where the other machines of its engine come to, if it has any
    """
    engine = _engine(run, name, beside_learner=beside_learner, takes_turns=takes_turns, meeting=meeting)
    follower = WeightFollower(
        f"{name}.weights",
        bus,
        engine=engine,
        channel=registry.channel(run, bus=bus),
        load=run.load,
        max_staleness=run.max_staleness,
        every_steps=run.weights.every_steps,
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
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(run.model.path), trusts_code=run.model.trust_remote_code)
    servers = server_book(run)
    make = functools.partial(
        GroupMaker,
        name,
        shared,
        rollout=rollout_functions.load_rollout(run.rollout)(tokenizer),
        tokenizer=tokenizer,
        seed=run.run.seed,
        servers=servers,
        engine_build=_engine_build(run),
        images=_images(run, bus=bus),
    )
    keep_seconds = run.bus.ack_seconds / 3
    stages = []
    if not is_dedicated:
        maker = make(
            own_rollouts=rollout_functions.load_own_rollouts(run, tokenizer, of_evaluation=False),
            reward=registry.load_reward(run),
            rules=GroupRules.from_run(run),
            teachers=_teachers(run, servers, tokenizer),
        )
        stages.append(training_stage(bus, maker, partial_rollouts=partial_rollouts, keep_seconds=keep_seconds))
    if is_dedicated or (run.evaluation.is_on and run.evaluation.place == "shared"):
        rewards = DatasetRewards(registry.load_evaluation_rewards(run))
        maker = make(
            own_rollouts=rollout_functions.load_own_rollouts(run, tokenizer, of_evaluation=True),
            reward=rewards,
            rules=GroupRules(sample_seconds=run.rollout.timeout_seconds),
            need=VersionNeed.for_evaluation,
        )
        stages.append(
            evaluation_stage(
                bus,
                maker,
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
    others: list[Actor] = [follower, *server_followers(run, name, bus=bus, book=servers)]
    if beside_learner and (step_turn := colocated.step_turn(run, is_shared=True)) and isinstance(engine, Pauses):
        others.append(StepPause(f"{name}.pause", bus, engine=engine, turn=step_turn))
    return (worker, *others)


def _engine(run: RunConfig, name: str, *, beside_learner: int, takes_turns: bool, meeting: Meeting | None) -> Engine:
    engine = registry.engine(run, name=name)
    if meeting is not None and isinstance(engine, SpansMachines):
        engine.meet_at(meeting)
    if beside_learner:
        colocated.limit_memory(run, engine, num_engines=beside_learner)
    if run.run.colocated and takes_turns:
        engine = colocated.engine(run, engine)
    return engine


def _images(run: RunConfig, *, bus: Bus) -> WorkerImages | None:
    path = Path(run.model.path)
    if Placeholders.of(path) is None:
        return None
    return WorkerImages(ImageStore(objects=bus.objects()), model_path=path, most_pixels=run.images.max_pixels)


def _engine_build(run: RunConfig) -> str:
    """Return the engine's name and version on this machine, such as "sglang 0.5.16"."""
    kind = run.engine.kind
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        return f"{kind} {metadata.version(kind)}"
    return f"{kind} {VERSION}" if kind in registry.ENGINES else kind


def _teachers(run: RunConfig, servers: ServerBook, tokenizer: Tokenizer) -> Teachers | None:
    section = run.teacher
    if section is None or not section.is_served:
        return None
    made = {
        name: Teacher(name, kind=run.servers[name].kind, tokenizer=tokenizer, top_logprobs=section.top_logprobs)
        for name in learner_models.teachers(run)
    }
    return Teachers(made, default=section.server, key=section.key, servers=servers)
