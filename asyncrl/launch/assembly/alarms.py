"""Chooses the alarms that watch the metrics of a run."""

from __future__ import annotations

from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.metrics.alarms import (
    Alarm,
    DropAlarm,
    HoldAlarm,
    MismatchAlarm,
    NoSignalAlarm,
    SplitAlarm,
    StandstillAlarm,
    TruncationAlarm,
)
from asyncrl.policies.planning.allocation import Units


def alarms_of(run: RunConfig, *, are_sampled: bool) -> list[Alarm]:
    """are_sampled: whether engines sample the answers, rather than the data providing them"""
    alarms: list[Alarm] = [
        MismatchAlarm(run.metrics.mismatch_alarm),
        DropAlarm(run.metrics.drop_alarm),
        HoldAlarm(run.metrics.hold_alarm, max_staleness=run.max_staleness),
        StandstillAlarm(),
    ]
    if are_sampled and not run.rollout.ignore_eos:
        alarms.append(TruncationAlarm())
    if are_sampled and run.reward.judges:
        alarms.append(NoSignalAlarm())
    if are_sampled and (split := _split_alarm(run)) is not None:
        alarms.append(split)
    return alarms


def _split_alarm(run: RunConfig) -> SplitAlarm | None:
    """None if learner and engines take turns or share processors, so that neither can give any to the other."""
    gpus_per_engine = registry.engine_class(run).num_gpus(run)
    if (
        run.run.mode != "async"
        or run.run.colocated
        or not (gpus_per_engine and registry.backend_class(run).num_gpus(run) and has_gpus())
    ):
        return None
    units = Units.of(run.learner.layout, gpus_per_engine=gpus_per_engine)
    return SplitAlarm(
        run.metrics.split_alarm,
        copies=run.learner.layout.ranks // units.copy,
        units=units,
        warmup=2 * (run.max_staleness + 1),
    )


def has_gpus() -> bool:
    """Whether this process sees GPUs."""
    import torch

    return torch.cuda.is_available()
