"""The actors of a process, put together: the learner with what runs beside it, and a rollout worker."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from asyncrl import app, auxiliary, checkpoint, rollout_functions
from asyncrl.actors.base import Actor
from asyncrl.actors.batch_feed import BatchFeed, BatchSettings
from asyncrl.actors.examiner import Examiner
from asyncrl.actors.group_filters import GroupFilters
from asyncrl.actors.learner import Learner, LearnerSettings
from asyncrl.actors.prompt_source import PromptSource
from asyncrl.actors.reporter import Reporter
from asyncrl.actors.rollout_worker import RolloutWorker
from asyncrl.actors.salvage import Salvage
from asyncrl.actors.stragglers import Stragglers
from asyncrl.actors.training_step import TrainingStep
from asyncrl.actors.weight_follower import WeightFollower
from asyncrl.actors.weight_sender import WeightSender
from asyncrl.checkpoint import LearnerState, PromptState
from asyncrl.config import RunConfig
from asyncrl.config.record import as_table
from asyncrl.data.model_folder import check_model
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.history import HISTORY_FILE, History
from asyncrl.messages import Sampling
from asyncrl.metrics.alarms import DropAlarm, MismatchAlarm
from asyncrl.metrics.sinks import open_sinks
from asyncrl.policies.adaptive import AdaptiveBound
from asyncrl.policies.admission import Admission
from asyncrl.policies.buffer import Buffer
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.rescoring import Rescoring
from asyncrl.policies.staleness import age_weight
from asyncrl.policies.vetting import Vetting
from asyncrl.protocols import Bus
from asyncrl.topics import PROGRESS

# -- learner -----------------------------------------------------------------------------------------------------------


async def build_learner(run: RunConfig, *, bus: Bus, resume: bool) -> tuple[Learner, list[Actor]]:
    """The learner, and the actors that run beside it in its process; ready to be supervised."""
    progress = (await bus.states(PROGRESS)).get("")
    state, restore_from = _starting_point(run, resume=resume, last_epoch=-1 if progress is None else progress.run_epoch)
    buffer = Buffer(
        max_staleness=run.max_staleness,
        order=run.staleness.order,
        forks=state.forks,
        groups=Ledger.from_json(state.groups),
        consumed=Ledger.from_json(state.consumed),
    )
    prompts = await _prompt_source(run, bus=bus, state=state, buffer=buffer)
    algorithm, channel, backend = app.algorithm(run), app.channel(run, bus=bus), app.backend(run)
    history = History(run.run_directory / HISTORY_FILE, run_epoch=state.run_epoch)
    history.begin(step=state.step, kept=state.history, max_staleness=run.max_staleness, settings=as_table(run))
    learner = Learner(
        "learner",
        bus,
        settings=_learner_settings(run),
        state=state,
        restore_from=restore_from,
        buffer=buffer,
        prompts=prompts,
        feed=BatchFeed(
            _batch_settings(run),
            buffer=buffer,
            prompts=prompts,
            algorithm=algorithm,
            bound=AdaptiveBound.of(run.staleness, largest=run.max_staleness).resumed(state.bound),
        ),
        backend=backend,
        training=TrainingStep(backend, algorithm=algorithm, **auxiliary.training_options(run)),
        channel=channel,
        reporter=Reporter(
            bus,
            open_sinks(run, resume=resume),
            alarms=(MismatchAlarm(run.metrics.mismatch_alarm), DropAlarm(run.metrics.drop_alarm)),
            has_behavior=_are_sampled(run),
        ),
        history=history,
        filters=GroupFilters(app.filters(run), max_in_a_row=max(1000, 20 * run.window)),
        examiner=_examiner(run, bus=bus),
    )
    senders = [WeightSender("weights", bus, sender=channel.sender)] if channel.sender is not None else []
    return learner, [prompts, *senders]


async def _prompt_source(run: RunConfig, *, bus: Bus, state: LearnerState, buffer: Buffer) -> PromptSource:
    rows = await asyncio.to_thread(app.open_rows, run)
    return PromptSource(
        "prompts",
        bus,
        rows=rows,
        admission=Admission(
            mode=run.run.mode,
            groups_per_batch=run.learner.groups_per_batch,
            max_staleness=run.max_staleness,
            total_groups=run.run.steps * run.learner.groups_per_batch,
        ),
        sampling=Sampling(
            max_new_tokens=run.rollout.max_new_tokens,
            temperature=run.rollout.temperature,
            top_p=run.rollout.top_p,
            top_k=run.rollout.top_k,
            ignore_eos=run.rollout.ignore_eos,
        ),
        group_size=run.rollout.group_size,
        state=state.prompts,
        groups=buffer.groups,
        policy_version=state.policy_version,
        run_epoch=state.run_epoch,
        forks=state.forks,
        are_sampled=_are_sampled(run),
    )


def _learner_settings(run: RunConfig) -> LearnerSettings:
    return LearnerSettings(
        steps=run.run.steps,
        mode=run.run.mode,
        learning_rate=run.learner.learning_rate,
        warmup_steps=run.learner.warmup_steps,
        checkpoint_directory=run.run_directory / "checkpoints",
        checkpoint_every=run.checkpoint.every_steps,
        checkpoint_keep=run.checkpoint.keep,
        keep_log=run.checkpoint.keep_log,
        max_buried_in_a_row=max(32, 2 * run.window),
        max_skipped_steps=run.learner.max_skipped_steps,
        publish_every=run.weights.every_steps,
    )


def _batch_settings(run: RunConfig) -> BatchSettings:
    return BatchSettings(
        groups_per_batch=run.learner.groups_per_batch,
        max_staleness=run.max_staleness,
        wait_for_stragglers=run.staleness.eviction == "wait",
        are_stragglers_cut=run.staleness.stragglers == "partial",
        shares=run.learner.data_parallel,
        micro_batch_tokens=run.learner.micro_batch_tokens,
        age_weight=age_weight(run.staleness.weight, rate=run.staleness.weight_rate, max_staleness=run.max_staleness),
    )


def _examiner(run: RunConfig, *, bus: Bus) -> Examiner:
    model = check_model(Path(run.model.path))
    bound = run.learner.quarantine_mismatch if _are_sampled(run) else 0.0
    return Examiner(
        bus,
        vetting=Vetting(
            vocabulary_size=model.vocab_size, context_tokens=model.context_tokens, are_sampled=_are_sampled(run)
        ),
        rescoring=Rescoring(bound=bound, every=run.learner.rescore_every),
        shares=run.learner.data_parallel,
    )


def _are_sampled(run: RunConfig) -> bool:
    """Answers come from a policy, with its logprobs; given ones have none."""
    return run.rollout.function != "given"


def _starting_point(run: RunConfig, *, resume: bool, last_epoch: int) -> tuple[LearnerState, Path | None]:
    """Where the learner starts, and the backend folder to restore. ``last_epoch``: the newest the bus knows, or -1."""
    found = checkpoint.latest(run.run_directory / "checkpoints")
    if not resume:
        if found is not None or last_epoch >= 0:
            raise ConfigError(
                f"run.name: {run.run.name!r} already has a run in {run.run_directory} or on its bus; go on with "
                "--resume, or start another with --set run.name=NAME"
            )
        return _fresh(), None
    state, folder = found if found is not None else (_fresh(), None)
    if run.run.steps < state.step:
        raise ConfigError(f"run.steps is {run.run.steps}, but the checkpoint is at step {state.step} already")
    if state.groups_per_batch not in (0, run.learner.groups_per_batch):
        raise ConfigError(
            f"learner.groups_per_batch: the checkpoint was made with {state.groups_per_batch}; the window "
            f"counts in it. Resume with that, not {run.learner.groups_per_batch}, or start another run"
        )
    run_epoch = max(state.run_epoch, last_epoch) + 1
    forks = state.forks | {run_epoch: state.policy_version}
    return dataclasses.replace(state, run_epoch=run_epoch, forks=forks), folder


def _fresh() -> LearnerState:
    return LearnerState(
        run_epoch=0,
        step=0,
        policy_version=0,
        groups={"watermark": 0, "beyond": []},
        consumed={"watermark": 1, "beyond": []},
        prompts=PromptState(),
    )


# -- rollout worker ----------------------------------------------------------------------------------------------------


async def build_worker(run: RunConfig, *, bus: Bus, name: str) -> tuple[RolloutWorker, WeightFollower]:
    """The worker and what keeps its engine's weights new, ready to be supervised."""
    engine = app.engine(run, name=name)
    weights = app.channel(run, bus=bus)
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(run.model.path))
    follower = WeightFollower(
        f"{name}.weights",
        bus,
        engine=engine,
        verify=weights.verify,
        load=run.load,
        progress=lambda: weights.progress,
        max_staleness=run.max_staleness,
    )
    worker = RolloutWorker(
        name,
        bus,
        engine=engine,
        follower=follower,
        rollout=rollout_functions.load_rollout(run.rollout, table=app.ROLLOUTS)(tokenizer),
        reward=app.load_reward(run),
        tokenizer=tokenizer,
        seed=run.run.seed,
        max_running=run.rollout.max_running,
        max_attempts=run.rollout.max_attempts,
        keep_seconds=run.bus.ack_seconds / 3,
        stragglers=Stragglers(
            max_staleness=run.max_staleness,
            min_group=run.staleness.min_group,
            are_waited_for=run.staleness.eviction == "wait",
        )
        if run.staleness.stragglers == "partial"
        else None,
        salvage=Salvage(
            bus,
            worker=name,
            seconds=run.rollout.salvage_seconds,
            max_attempts=run.rollout.max_attempts,
            max_staleness=run.max_staleness,
        ),
    )
    return worker, follower
