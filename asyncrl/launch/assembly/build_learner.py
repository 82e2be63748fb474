"""Assembles the learner and the actors that run in its process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from asyncrl.actors.base import Actor
from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.batcher import Batcher
from asyncrl.actors.learner.best_model import BestModel
from asyncrl.actors.learner.checkpointer import Checkpointer
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.learner.failed_batches import FailedBatches
from asyncrl.actors.learner.group_filters import GroupFilters
from asyncrl.actors.learner.group_remover import GroupRemover
from asyncrl.actors.learner.history import HISTORY_FILE, History, last_incarnation, settings_of_incarnations
from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.actors.learner.learner import Learner
from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.learner.metrics_reporter import Gpus, MetricsReporter
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.prompt_source import PromptSource, Rows
from asyncrl.actors.learner.sample_files import RotatedLines
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleRecorder
from asyncrl.actors.learner.timeline import Timeline
from asyncrl.actors.learner.trainer import Trainer
from asyncrl.actors.learner.trajectory_reader import TrajectoryReader
from asyncrl.actors.learner.validator import Validator
from asyncrl.actors.learner.weight_publisher import WeightPublisher, WeightSender
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.adapters import registry
from asyncrl.audit.timeline import OLDER_FILE, TIMELINE_FILE
from asyncrl.backends.port import Backend
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config.record import as_table
from asyncrl.data.model_folder import ModelFolder, check_model
from asyncrl.data.sources import digests as digest_data
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.images.store import FOLDER, ImageStore
from asyncrl.launch import colocated, secret_files
from asyncrl.launch.assembly import data
from asyncrl.launch.assembly.recorders import open_recorders
from asyncrl.launch.checks import resume_checks, signal_files
from asyncrl.logs import print_line
from asyncrl.messages import SamplingParams
from asyncrl.messages.topics import PROGRESS
from asyncrl.metrics.alarms import (
    Alarm,
    DropAlarm,
    MismatchAlarm,
    MissingAlarm,
    NoSignalAlarm,
    SplitAlarm,
    StandstillAlarm,
    StragglerAlarm,
    TruncationAlarm,
    steps_of,
)
from asyncrl.metrics.drift import DriftAlarm
from asyncrl.metrics.ruin import CollapseAlarm, DivergenceAlarm, RewardFallAlarm
from asyncrl.metrics.sinks import open_sinks
from asyncrl.os_process import process_space
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.groups.validation import GroupValidation, PromptSpec
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.staleness.window import NeededWindow
from asyncrl.rewards.load import oddities as reward_oddities
from asyncrl.weights.after_write import load_after_write
from asyncrl.weights.port import WeightChannel


async def build_learner(
    run: RunConfig, *, bus: Bus, resume: bool, beside_engines: bool = False
) -> tuple[Learner, list[Actor]]:
    """Return the learner and the other actors of its process, ready to be supervised.

    beside_engines: engines are on the learner's GPUs at the same time
    """
    progress = (await bus.states(PROGRESS)).get("")
    state, restore_from = await _starting_point(
        run, bus=bus, resume=resume, newest_on_bus=-1 if progress is None else progress.incarnation
    )
    image_reader = await asyncio.to_thread(_image_reader, run, bus=bus)
    images = None if image_reader is None else image_reader.store
    rows = await asyncio.to_thread(data.open_rows, run, images=images)
    digests = await asyncio.to_thread(digest_data, run.data)
    files = await asyncio.to_thread(signal_files.digest_files, run)
    resume_checks.name_changes(run, state, data=digests, files=files)
    signal_files.record(files, run.run_directory, incarnation=state.incarnation)
    sets = await asyncio.to_thread(data.open_evaluation_sets, run, images=images) if run.evaluation.is_on else []
    if shown := {image.digest for its in sets for one in its.questions for image in one.images}:
        assert images is not None
        await asyncio.to_thread(images.publish, shown, is_kept=True)
    if not resume:
        await asyncio.to_thread(data.say_first_prompts, rows, sets, of_reward=reward_oddities(run.reward))
        _say_bound(run)
        await asyncio.to_thread(_say_replay, run)
    algorithm, channel, backend = registry.algorithm(run), registry.channel(run, bus=bus), registry.backend(run)
    if beside_engines:
        colocated.limit_learner(run, backend)
    recorders, validator = open_recorders(run, algorithm=algorithm), _validator(run, bus=bus, image_reader=image_reader)
    return assemble_learner(
        run,
        bus=bus,
        state=state,
        restore_from=restore_from,
        algorithm=algorithm,
        backend=backend,
        channel=channel,
        rows=rows,
        data_digests=digests,
        metrics=MetricsReporter(
            bus,
            open_sinks(run, resume=resume, step=state.step),
            alarms=choose_alarms(run, algorithm),
            has_behavior=_are_sampled(run),
            has_reward=_are_judged(run),
            samples=recorders.writers,
            timeline=_timeline(run),
            hooks=validator.hooks,
            gpus=Gpus(
                of_worker=registry.engine_class(run).num_gpus(run) or 1,
                of_learner=registry.backend_class(run).num_gpus(run) or 1,
                of_pools=registry.gpus_of_pool_workers(run),
                of_servers=sum(registry.gpus_of_servers(run).values()),
                are_shared=run.run.colocated,
            ),
        ),
        validator=validator,
        samples=recorders.samples,
        answers=recorders.answers,
        evaluation_sets=sets,
        max_failed_in_a_row=max(32, 2 * run.window),
        image_reader=image_reader,
    )


def assemble_learner(
    run: RunConfig,
    *,
    bus: Bus,
    state: LearnerState,
    restore_from: Path | None = None,
    algorithm: Algorithm,
    backend: Backend,
    channel: WeightChannel,
    rows: Rows,
    metrics: MetricsReporter,
    validator: Validator,
    data_digests: Mapping[str, str] = MappingProxyType({}),
    samples: SampleRecorder | None = None,
    answers: AnswerRecorder | None = None,
    admission: Admission | None = None,
    evaluation_sets: Sequence[EvaluationSet] = (),
    max_failed_in_a_row: int = 32,
    image_reader: ImageReader | None = None,
) -> tuple[Learner, list[Actor]]:
    """Assemble the learner and the other actors of its process from their parts.

    state, restore_from  the starting point: state of a checkpoint, and its backend folder
    data_digests         SHA-256 of each data file by its path, for the history
    samples, answers     recorders of groups and of evaluations; None: nothing is recorded
    admission            None: as the run file says
    image_reader         images of data and answers; None: the model reads text alone
    """
    directory, best = run.run_directory, run.checkpoint.best
    history = History(directory / HISTORY_FILE, incarnation=state.incarnation)
    history.begin(
        step=state.step,
        kept=state.history,
        max_staleness=run.max_staleness,
        settings=as_table(run),
        data=data_digests,
        host=process_space(),
    )
    table = saved_table.restore(state)
    changed, reconciled = asyncio.Event(), asyncio.Event()
    waits, workers = WaitTracker(), LiveWorkers(bus)
    progress = ProgressReporter(bus, table=table, history=history, waits=waits, samples=samples)
    remover = GroupRemover(
        table=table,
        progress=progress,
        validator=validator,
        changed=changed,
        max_failed_in_a_row=max_failed_in_a_row,
    )
    evaluator = None
    if evaluation_sets:
        evaluator = Evaluator(
            bus,
            section=run.evaluation,
            sets=evaluation_sets,
            seed=run.run.seed,
            last_step=run.run.steps,
            channel=channel,
            metrics=metrics,
            table=table,
            waits=waits,
            best=BestModel(directory / "best", metric=best, resume_points=table.resume_points) if best else None,
            recorder=answers,
        )
    publisher = WeightPublisher(
        bus,
        channel,
        waits=waits,
        resumed_from=state.policy_version,
        evaluator=evaluator,
        after_write=load_after_write(run.weights.after_write),
        models=registry.kept_models(run),
    )
    trainer = Trainer(
        run,
        backend=backend,
        algorithm=algorithm,
        weights=publisher,
        waits=waits,
        restore_from=restore_from,
        profile=registry.profiler(run),
        turn=colocated.learner_turn(run),
        start_turn=colocated.start_turn(run),
        step_turn=colocated.step_turn(run, is_shared=False),
    )
    learner = Learner(
        "learner",
        bus,
        run=run,
        table=table,
        reader=TrajectoryReader(
            bus,
            table=table,
            validator=validator,
            remover=remover,
            progress=progress,
            changed=changed,
            reconciled=reconciled,
            experts_in=Path(run.learner.experts_directory) if run.learner.experts_directory else None,
        ),
        validator=validator,
        remover=remover,
        batcher=Batcher(
            run,
            table=table,
            progress=progress,
            changed=changed,
            algorithm=algorithm,
            picks=None if samples is None else samples.picks,
            workers=workers,
            hooks=validator.hooks,
            shares_prefixes=registry.shared_prefixes(run).is_on,
            image_reader=image_reader,
        ),
        trainer=trainer,
        checkpointer=Checkpointer(run, bus, table=table, trainer=trainer, progress=progress),
        progress=progress,
        metrics=metrics,
        workers=workers,
        failed_batches=FailedBatches(directory),
        evaluator=evaluator,
    )
    prompts = PromptSource(
        "prompts",
        bus,
        rows=rows,
        admission=admission or Admission.from_run(run),
        sampling=sampling_params(run),
        max_tokens=_max_tokens(run),
        group_size=run.rollout.group_size,
        table=table,
        changed=changed,
        reconciled=reconciled,
        tickets=validator.tickets,
        are_sampled=_are_sampled(run),
        reissue_seconds=run.rollout.reissue_seconds,
        window=NeededWindow.from_run(run) if _are_sampled(run) else None,
        images=None if image_reader is None else image_reader.store,
    )
    senders = []
    if channel.sender is not None:
        senders.append(WeightSender("weights", bus, sender=channel.sender, publisher=publisher))
    return learner, [prompts, *senders]


def _timeline(run: RunConfig) -> Timeline | None:
    most_bytes, folder = run.metrics.timeline_max_bytes, run.run_directory
    if not most_bytes:
        return None
    return Timeline(RotatedLines(folder / TIMELINE_FILE, older=folder / OLDER_FILE, most_bytes=most_bytes))


def choose_alarms(run: RunConfig, algorithm: Algorithm) -> list[Alarm]:
    """Return the alarms that mean something in this run."""
    steps, are_sampled = steps_of(run.run.steps), _are_sampled(run)
    alarms: list[Alarm] = [
        DivergenceAlarm(),
        CollapseAlarm(),
        MismatchAlarm(run.metrics.mismatch_alarm),
        DropAlarm(run.metrics.drop_alarm),
        MissingAlarm(group_size=run.rollout.group_size),
        StragglerAlarm(run.metrics.straggler_alarm, max_staleness=run.max_staleness),
        StandstillAlarm(steps=steps),
    ]
    if are_sampled and not run.rollout.ignore_eos:
        alarms.append(TruncationAlarm(steps=steps))
    if are_sampled:
        alarms.append(RewardFallAlarm(steps=steps))
    if are_sampled and not algorithm.loss.is_supervised:
        alarms.append(DriftAlarm(run.metrics.drift_alarm, loss=algorithm.loss.name))
    if are_sampled and run.reward.judges:
        alarms.append(NoSignalAlarm(has_groups=run.rollout.group_size > 1, steps=steps))
    if are_sampled and _may_move_gpus(run):
        alarms.append(SplitAlarm(run.metrics.split_alarm, warmup=2 * (run.max_staleness + 1)))
    return alarms


def _may_move_gpus(run: RunConfig) -> bool:
    """Whether learner and engines have GPUs of their own and work at the same time."""
    if run.run.mode != "async" or run.run.colocated:
        return False
    import torch

    counts = registry.engine_class(run).num_gpus(run), registry.backend_class(run).num_gpus(run)
    return all(counts) and torch.cuda.is_available()


def sampling_params(run: RunConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=run.rollout.max_new_tokens,
        temperature=run.rollout.temperature,
        top_p=run.rollout.top_p,
        top_k=run.rollout.top_k,
        ignore_eos=run.rollout.ignore_eos,
        stop=run.rollout.stop,
        stop_token_ids=run.rollout.stop_token_ids,
        min_new_tokens=run.rollout.min_new_tokens,
        max_context_tokens=run.rollout.max_context_tokens,
        top_logprobs=run.rollout.top_logprobs,
    )


def _num_likeliest(run: RunConfig, vocabulary_size: int) -> dict[str, int]:
    """Return how many likeliest tokens answers must have at each place, by the field of a trajectory."""
    asked = {
        "likeliest": run.rollout.top_logprobs,
        "teacher_likeliest": run.teacher.top_logprobs if run.teacher else 0,
    }
    return {name: min(count, vocabulary_size) for name, count in asked.items() if count}


def _image_reader(run: RunConfig, *, bus: Bus) -> ImageReader | None:
    store = ImageStore(objects=bus.objects(), folder=run.run_directory / FOLDER)
    return ImageReader.of_run(run, store=store)


def _validator(run: RunConfig, *, bus: Bus, image_reader: ImageReader | None) -> Validator:
    model = check_model(Path(run.model.path))
    run_files = [*settings_of_incarnations(run.run_directory / HISTORY_FILE), as_table(run)]
    bound = run.learner.quarantine_mismatch if _are_sampled(run) else 0.0
    return Validator(
        bus,
        validation=GroupValidation(
            vocabulary_size=model.vocab_size,
            context_tokens=model.context_tokens,
            largest_reward=run.reward.largest,
            are_answers_whole=all(not one["rollout"].get("min_group") for one in run_files),
            are_sampled=_are_sampled(run),
            are_whole=all(map(_gives_one, run_files)),
            max_parts=_max_parts(run_files),
            asked_before=_prompt_limits(run_files),
            needs_teacher=run.has_served_teacher,
            likeliest=_num_likeliest(run, model.vocab_size),
            **_expert_limits(model),
        ),
        logprob_check=LogprobMismatch(bound=bound, every=run.learner.logprob_check_every),
        filters=GroupFilters(
            registry.filters(run),
            max_in_a_row=max(1000, 20 * run.window),
            max_raised=max(32, 2 * run.window),
            cap=run.algorithm.filter_cap,
            keeps_at_cap=run.algorithm.filter_cap_action == "keep",
        ),
        tickets=Tickets(secret_files.ticket_secret(run)),
        hooks=Hooks(run.algorithm.hooks),
        temperatures=[one["rollout"]["temperature"] for one in run_files] if _are_sampled(run) else (),
        image_reader=image_reader,
    )


def _gives_one(run_file: Mapping[str, Any]) -> bool:
    """Whether every rollout function of the settings gives one trajectory.  run_file: settings of an incarnation"""
    own = (file.get("function", "") for file in run_file["data"]["files"])
    return all(rollout_functions.traits(name).gives_one for name in (run_file["rollout"]["function"], *own) if name)


def _max_parts(run_files: Sequence[Mapping[str, Any]]) -> int:
    """Return the maximum number of parts of a rollout in any incarnation of the run; 0: no limit."""
    found = [one["rollout"].get("max_parts", 0) for one in run_files]
    return max(found) if all(found) else 0


def _expert_limits(model: ModelFolder) -> dict[str, Any]:
    """Return the limits on experts in answers. They also cover earlier incarnations, whatever this one replays."""
    if (experts := model.experts) is None:
        return {}
    return {"num_experts": experts.num_experts, "experts_shape": (experts.num_layers, experts.experts_per_token)}


_ANY: Final = 2**31


def _max_tokens(run: RunConfig) -> int:
    """Return the maximum number of tokens of an answer. A user's rollout function may take turns up to the model's
    context."""
    return run.rollout.max_new_tokens if rollout_functions.gives_one(run) else _ANY


def _prompt_limits(run_files: Sequence[Mapping[str, Any]]) -> PromptSpec:
    """Return what a prompt that is still on the bus may ask for. ``run_files``: settings of every incarnation"""
    rollouts = [one["rollout"] for one in run_files]
    built_in = all(map(_gives_one, run_files))
    return PromptSpec(
        samples=frozenset(rollout["group_size"] for rollout in rollouts),
        max_tokens=max(rollout["max_new_tokens"] for rollout in rollouts) if built_in else _ANY,
        max_prompt_tokens=max(one["data"]["max_prompt_tokens"] for one in run_files),
    )


def _are_sampled(run: RunConfig) -> bool:
    """Whether answers come from a policy with logprobs; answers given by the data have none."""
    return rollout_functions.traits(run.rollout.function).samples


def _are_judged(run: RunConfig) -> bool:
    """Whether answers have rewards, of [reward], of their rows or of the rollout function."""
    sets_none = rollout_functions.traits(run.rollout.function).gives_one
    return run.reward.judges or bool(run.data.reward_key) or not sets_none


def _say_bound(run: RunConfig) -> None:
    """Print the staleness bound if the run chose it."""
    if run.why_staleness_bound and _are_sampled(run):
        print_line(f"staleness       at most {run.max_staleness}, {run.why_staleness_bound}")


def _say_replay(run: RunConfig) -> None:
    """Print why the learner of a mixture does not replay the engine's experts, if the run chose that."""
    if run.rollout.routing_replay != "auto" or check_model(Path(run.model.path)).experts is None:
        return
    if not (replay := registry.routing_replay(run)).is_on:
        print_line(f"routing replay  {replay}")


async def _starting_point(
    run: RunConfig, *, bus: Bus, resume: bool, newest_on_bus: int
) -> tuple[LearnerState, Path | None]:
    """Return the learner's starting state and the backend folder to restore.  newest_on_bus: newest incarnation on the
    bus, or -1"""
    if not resume:
        if checkpoint.list_complete(run.run_directory / "checkpoints") or newest_on_bus >= 0:
            raise ConfigError(
                f"run.name: {run.run.name!r} already has a run in {run.run_directory} or on its bus; go on with "
                "--resume, or start another with --set run.name=NAME"
            )
        return LearnerState.fresh(), None
    found = await resume_checks.find_checkpoint(run, bus=bus)
    state, folder = found if found is not None else (LearnerState.fresh(), None)
    if run.run.steps < state.step:
        raise ConfigError(f"run.steps is {run.run.steps}, but the checkpoint is at step {state.step} already")
    if state.groups_per_batch not in (0, run.learner.groups_per_batch):
        raise ConfigError(
            f"learner.groups_per_batch: the checkpoint was made with {state.groups_per_batch}; the window "
            f"counts in it. Resume with that, not {run.learner.groups_per_batch}, or start another run"
        )
    recorded = last_incarnation(run.run_directory / HISTORY_FILE)
    incarnation = max(state.incarnation, newest_on_bus, recorded) + 1
    resume_points = state.resume_points | {incarnation: state.policy_version}
    return dataclasses.replace(state, incarnation=incarnation, resume_points=resume_points), folder
