"""A run that trains something other than it seems reports this once each time it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from asyncrl.metrics.alarms import (
    DropAlarm,
    HoldAlarm,
    MismatchAlarm,
    NoSignalAlarm,
    SplitAlarm,
    StandstillAlarm,
    TruncationAlarm,
)
from asyncrl.policies.metric import Metric, histogram


def test_mismatch_alarm_warns_once_per_rise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarm = MismatchAlarm(0.05)
    seen = [alarm.update({"mismatch/fresh_mean": mean}) for mean in (0.01, 0.05, 0.06, 0.3, 0.02, math.nan)]
    assert [metrics["mismatch/alarm"] for metrics in seen] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert len(caplog.records) == 2
    assert "0.060 nats per token, over metrics.mismatch_alarm = 0.05" in caplog.text


def test_mismatch_alarm_is_silent_without_fresh_samples_or_threshold(caplog: pytest.LogCaptureFixture) -> None:
    assert MismatchAlarm(0.05).update({"mismatch/mean": 0.9}) == {}
    assert MismatchAlarm(0.0).update({"mismatch/fresh_mean": 0.9}) == {}
    assert not caplog.records


def step(*, dropped: int, length: int = 400) -> dict[str, Metric]:
    """64 answers of 100 tokens are trained; ``dropped`` answers are dropped."""
    row: dict[str, Metric] = {"length/trained": histogram([100] * 64), "length/trained_mean": 100.0}
    row["length/dropped"] = histogram([length] * dropped)
    return row | ({"length/dropped_mean": float(length)} if dropped else {})


def test_drop_alarm_warns_with_the_lengths_of_dropped_answers(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DropAlarm(0.05)
    shares = [alarm.update(step(dropped=16))["staleness/dropped_share"] for _ in range(30)]
    assert shares == [0.2] * 30
    assert len(caplog.records) == 1
    assert "20 % of the answers of the last 10 steps were dropped as too stale" in caplog.text
    assert "they are 400 tokens long on average, trained answers 100" in caplog.text


def test_few_dropped_answers_raise_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DropAlarm(0.05)
    for _ in range(9):
        alarm.update(step(dropped=0))
    assert alarm.update(step(dropped=8)) == {"staleness/dropped_share": 8 / (8 + 640)}
    assert not caplog.records


def test_drop_alarm_ignores_the_first_steps(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DropAlarm(0.05)
    for _ in range(9):
        alarm.update(step(dropped=64))
    assert not caplog.records


def test_one_burst_of_drops_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """A learner that falls back to an old checkpoint drops all samples of the lost history at once."""
    alarm = DropAlarm(0.05)
    for dropped in [0] * 3 + [320] + [0] * 20:
        alarm.update(step(dropped=dropped))
    assert not caplog.records


def test_drop_alarm_warns_again_after_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DropAlarm(0.05)
    for dropped in [8] * 20 + [0] * 20 + [8] * 20:
        alarm.update(step(dropped=dropped))
    assert len(caplog.records) == 2


def test_dropped_share_is_reported_without_threshold(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DropAlarm(0.0)
    for _ in range(20):
        assert alarm.update(step(dropped=64)) == {"staleness/dropped_share": 0.5}
    assert not caplog.records


def held(seconds: float, *, idle: float) -> dict[str, Metric]:
    """A step of one second after ``seconds`` of waiting with a full batch."""
    return {
        "learner/held_seconds": seconds,
        "learner/wait_seconds": seconds,
        "learner/step_seconds": 1.0,
        "rollout/idle_ratio": idle,
    }


def test_hold_alarm_names_the_bound_that_avoids_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The awaited answer lasts five steps of two seconds, or ten steps of one second."""
    alarm = HoldAlarm(0.2, max_staleness=4)
    for _ in range(9):
        assert alarm.update(held(1.0, idle=0.4)) == {}
    assert not alarm.is_on
    for _ in range(20):
        alarm.update(held(1.0, idle=0.4))
    assert alarm.is_on and len(caplog.records) == 1
    assert "50 % of the last 10 steps' time" in caplog.text
    assert "set staleness.max_staleness to at least 10 (now 4)" in caplog.text
    assert 'staleness.parts = "tokens" to end these waits' in caplog.text


def test_waiting_with_busy_engines_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    for alarm, row in (
        (HoldAlarm(0.2, max_staleness=4), held(4.0, idle=0.0)),  # engines are the bottleneck
        (HoldAlarm(0.2, max_staleness=4), held(0.1, idle=0.4)),
        (HoldAlarm(0.0, max_staleness=4), held(4.0, idle=0.4)),
    ):
        for _ in range(20):
            alarm.update(row)
    assert not caplog.records


def test_hold_alarm_warns_again_after_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    alarm = HoldAlarm(0.2, max_staleness=4)
    for row in [held(1.0, idle=0.4)] * 20 + [held(0.0, idle=0.0)] * 20 + [held(1.0, idle=0.4)] * 20:
        alarm.update(row)
    assert len(caplog.records) == 2


def split(*, waited: float, idle: float, workers: int = 4) -> dict[str, Metric]:
    return {
        "learner/wait_seconds": waited,
        "learner/step_seconds": 1.0,
        "rollout/idle_ratio": idle,
        "rollout/workers": float(workers),
    }


def split_alarm(threshold: float = 0.3, *, warmup: int = 0) -> SplitAlarm:
    return SplitAlarm(threshold, warmup=warmup)


def test_split_alarm_warns_once_while_one_side_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    alarm = split_alarm(warmup=3)
    for _ in range(12):
        assert alarm.update(split(waited=3.0, idle=0.0)) == {}
    assert not alarm.is_on
    for _ in range(20):
        alarm.update(split(waited=3.0, idle=0.0))
    assert alarm.is_on and len(caplog.records) == 1
    assert "the learner was idle for 75 % of the time and engines for 0 %: give GPUs of the learner to the engines" in (
        caplog.text
    )


def test_split_alarm_can_favour_the_learner(caplog: pytest.LogCaptureFixture) -> None:
    alarm = split_alarm()
    for _ in range(12):
        alarm.update(split(waited=0.0, idle=0.6))
    assert "give GPUs of the engines to the learner" in caplog.text


def test_balanced_split_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    for alarm, row in (
        (split_alarm(), split(waited=0.1, idle=0.1)),
        (split_alarm(), split(waited=1.0, idle=0.5)),  # both idle: the window or a long tail is the limit
        (split_alarm(0.0), split(waited=9.0, idle=0.0)),
        (split_alarm(), split(waited=9.0, idle=0.0, workers=0)),
    ):
        for _ in range(30):
            alarm.update(row)
    assert not caplog.records


def test_split_alarm_starts_over_when_workers_change(caplog: pytest.LogCaptureFixture) -> None:
    alarm = split_alarm()
    for row in [split(waited=3.0, idle=0.0)] * 12 + [split(waited=0.0, idle=0.0, workers=6)] * 20:
        alarm.update(row)
    assert len(caplog.records) == 1 and not alarm.is_on


def test_standstill_alarm_warns_once_per_standstill(caplog: pytest.LogCaptureFixture) -> None:
    alarm = StandstillAlarm()
    still: dict[str, Metric] = {"grad_norm": 0.0, "reward/mean": 0.25, "reward/same_in_group": 1.0}
    for row in [still] * 9 + [{"grad_norm": 0.1}] + [still] * 9:
        assert alarm.update(row) == {}
    assert not caplog.records
    for _ in range(30):
        alarm.update(still)
    assert len(caplog.records) == 1
    assert "the last 10 steps trained nothing" in caplog.text
    assert "Rewards average 0.25, and the share of groups with equal rewards is 1" in caplog.text


def test_truncation_alarm_warns_if_answers_are_cut_from_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def states(alarm: TruncationAlarm, *, first: int, shares: Sequence[float]) -> list[bool]:
        found = []
        for version, share in enumerate(shares, first):
            numbers = {"weights/version": version, "length/truncated_fraction": share, "length/trained_mean": 512.0}
            alarm.update(numbers)
            found.append(alarm.is_on)
        return found

    alarm = TruncationAlarm()
    assert states(alarm, first=1, shares=[0.97] * 12 + [0.9, 1.0]) == [False] * 9 + [True] * 3 + [False] * 2
    assert len(caplog.records) == 1
    assert "of each of the first 10 steps were cut at rollout.max_new_tokens, 512 tokens long" in caplog.text
    assert not any(states(TruncationAlarm(), first=1, shares=[0.5] + [1.0] * 30))  # learned to use all tokens
    assert not any(states(TruncationAlarm(), first=40, shares=[1.0] * 30))  # a resumed run: the cause is unknown
    assert len(caplog.records) == 1


def test_no_signal_alarm_warns_while_weights_move(caplog: pytest.LogCaptureFixture) -> None:
    alarm = NoSignalAlarm()
    for _ in range(30):
        alarm.update({"reward/std": 0.0, "reward/mean": 1.0, "grad_norm": 0.0})  # StandstillAlarm covers this
    assert not alarm.is_on
    for _ in range(11):
        alarm.update({"reward/std": 0.0, "reward/mean": 1.0, "grad_norm": 0.1})
    assert alarm.is_on
    assert len(caplog.records) == 1
    assert "in each of the last 10 steps all rewards were equal (1 in the last)" in caplog.text
    alarm.update({"reward/std": 0.01, "grad_norm": 0.1})
    assert not alarm.is_on
