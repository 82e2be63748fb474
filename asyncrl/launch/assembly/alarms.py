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
    if are_sampled and _may_move_gpus(run):
        alarms.append(SplitAlarm(run.metrics.split_alarm, warmup=2 * (run.max_staleness + 1)))
    return alarms


def _may_move_gpus(run: RunConfig) -> bool:
    """Whether learner and engines have GPUs of their own and work at the same time."""
    if run.run.mode != "async" or run.run.colocated:
        return False
    counts = registry.engine_class(run).num_gpus(run), registry.backend_class(run).num_gpus(run)
    return all(counts) and has_gpus()


def has_gpus() -> bool:
    """Whether this process sees GPUs."""
    import torch

    return torch.cuda.is_available()
