"""Which alarms look at the metrics of a run's steps."""

from __future__ import annotations

from asyncrl.config import RunConfig
from asyncrl.metrics.alarms import (
    Alarm,
    DropAlarm,
    HoldAlarm,
    MismatchAlarm,
    NoSignalAlarm,
    StandstillAlarm,
    TruncationAlarm,
)


def alarms_of(run: RunConfig, *, are_sampled: bool) -> list[Alarm]:
    """are_sampled: whether engines sample the answers, and no data gives them"""
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
    return alarms
