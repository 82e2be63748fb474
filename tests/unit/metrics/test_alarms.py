"""A run that trains something other than it seems reports this once each time it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

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
from asyncrl.policies.metric import Metric, histogram

Row = dict[str, Metric]


def step(*, dropped: int, length: int = 400) -> Row:
    """64 answers of 100 tokens are trained; ``dropped`` answers are dropped."""
    row: Row = {"length/trained": histogram([100] * 64), "length/trained_mean": 100.0}
    row["length/dropped"] = histogram([length] * dropped)
    return row | ({"length/dropped_mean": float(length)} if dropped else {})


def waited(seconds: float, *, idle: float) -> Row:
    """A step of one second after ``seconds`` of waiting with a full batch."""
    return {"learner/straggler_wait_seconds": seconds} | split(waited=seconds, idle=idle)


def split(*, waited: float, idle: float, workers: int = 4, seconds: float = 1.0) -> Row:
    return {
        "learner/wait_seconds": waited,
        "learner/step_seconds": seconds,
        "rollout/idle_ratio": idle,
        "rollout/workers": float(workers),
    }


def truncated(shares: Sequence[float], *, first: int = 1) -> list[Row]:
    """Steps in which these shares of the answers were cut; the first one trains version ``first``."""
    return [
        {"weights/version": version, "length/truncated_fraction": share, "length/trained_mean": 512.0}
        for version, share in enumerate(shares, first)
    ]


def states(alarm: Alarm, rows: Sequence[Row]) -> list[bool]:
    """Return whether the alarm is on after each row."""
    found = []
    for row in rows:
        alarm.update(row)
        found.append(alarm.is_on)
    return found


STILL: Row = {"grad_norm": 0.0, "reward/mean": 0.25, "reward/same_in_group": 1.0}
NO_SIGNAL: Row = {"reward/std": 0.0, "reward/mean": 1.0, "grad_norm": 0.1}

SILENT: dict[str, tuple[Alarm, Sequence[Row]]] = {
    "mismatch: nothing was fresh": (MismatchAlarm(0.05), [{"mismatch/mean": 0.9}]),
    "mismatch: off": (MismatchAlarm(0.0), [{"mismatch/fresh_mean": 0.9}]),
    "drop: few answers": (DropAlarm(0.05), [step(dropped=0)] * 9 + [step(dropped=8)]),
    "drop: only the first steps": (DropAlarm(0.05), [step(dropped=64)] * 9),
    # A learner that falls back to an old checkpoint drops all samples of rolled-back versions at once.
    "drop: one burst": (DropAlarm(0.05), [step(dropped=n) for n in [0] * 3 + [320] + [0] * 20]),
    "drop: off": (DropAlarm(0.0), [step(dropped=64)] * 20),
    "stragglers: engines are the bottleneck": (StragglerAlarm(0.2, max_staleness=4), [waited(4.0, idle=0.0)] * 20),
    "stragglers: short": (StragglerAlarm(0.2, max_staleness=4), [waited(0.1, idle=0.4)] * 20),
    "stragglers: off": (StragglerAlarm(0.0, max_staleness=4), [waited(4.0, idle=0.4)] * 20),
    "split: fits": (SplitAlarm(0.3, warmup=0), [split(waited=0.1, idle=0.1)] * 30),
    "split: both idle": (SplitAlarm(0.3, warmup=0), [split(waited=1.0, idle=0.5)] * 30),  # the window is the limit
    "split: off": (SplitAlarm(0.0, warmup=0), [split(waited=9.0, idle=0.0)] * 30),
    "split: no workers": (SplitAlarm(0.3, warmup=0), [split(waited=9.0, idle=0.0, workers=0)] * 30),
    "split: warm-up": (SplitAlarm(0.3, warmup=3), [split(waited=3.0, idle=0.0)] * 12),
    "standstill: interrupted": (StandstillAlarm(), [STILL] * 9 + [{"grad_norm": 0.1}] + [STILL] * 9),
    "truncated: learned to use all tokens": (TruncationAlarm(), truncated([0.5] + [1.0] * 30)),
    "truncated: the beginning of an answer is enough": (
        TruncationAlarm(),
        [row | {"reward/mean": 0.4} for row in truncated([1.0] * 30)],
    ),
    "truncated: a resumed run": (TruncationAlarm(), truncated([1.0] * 30, first=40)),
    "stragglers: a run of seconds": (StragglerAlarm(0.2, max_staleness=4), [waited(0.9, idle=0.4)] * 30),
    "split: a run of seconds": (SplitAlarm(0.3, warmup=0), [split(waited=0.9, idle=0.0)] * 30),
    "no signal: rewards are not compared within groups": (
        NoSignalAlarm(has_groups=False),
        [{"reward/std": 0.5, "reward/same_in_group": 1.0, "grad_norm": 0.1}] * 30,
    ),
    "no signal: no gradient": (NoSignalAlarm(), [NO_SIGNAL | {"grad_norm": 0.0}] * 30),
}


@pytest.mark.parametrize("case", SILENT)
def test_alarm_stays_silent(case: str, caplog: pytest.LogCaptureFixture) -> None:
    alarm, rows = SILENT[case]
    assert not any(states(alarm, rows))
    assert not caplog.records


LOUD: dict[str, tuple[Alarm, Row, str]] = {
    "drop": (
        DropAlarm(0.05),
        step(dropped=16),
        "20 % of the answers of the last 10 steps were dropped as too stale, over metrics.drop_alarm = 0.05: they are "
        "400 tokens long on average, trained answers 100;",
    ),
    # The awaited answer lasts five steps of two seconds, or ten steps of one second.
    "stragglers": (
        StragglerAlarm(0.2, max_staleness=4),
        waited(1.0, idle=0.4),
        "with staleness.max_staleness = 10 (now 4) these groups would be finished in time; this costs speed, not "
        "correctness -> ",
    ),
    "split, learner idle": (
        SplitAlarm(0.3, warmup=0),
        split(waited=3.0, idle=0.0),
        "the learner was idle for 75 % of the time and engines for 0 %: GPUs of the learner would do more as GPUs "
        "of the engines; this costs speed, not correctness -> ",
    ),
    "split, engines idle": (
        SplitAlarm(0.3, warmup=0),
        split(waited=0.0, idle=0.6, seconds=2.0),
        "GPUs of the engines would do more as GPUs of the learner",
    ),
    "standstill": (
        StandstillAlarm(),
        STILL,
        "the last 10 steps trained nothing: gradients are 0. Rewards average 0.25, and the share of groups with equal "
        "rewards is 1; steps cost as much as before and the model learns nothing -> ",
    ),
    "no signal": (NoSignalAlarm(), NO_SIGNAL, "the rewards of every group were equal (1 on average in the last)"),
    "no signal, each group in its own way": (
        NoSignalAlarm(),
        {"reward/std": 0.5, "reward/same_in_group": 1.0, "reward/mean": 0.5, "grad_norm": 0.1},
        "the rewards of every group were equal (0.5 on average in the last)",
    ),
}


@pytest.mark.parametrize("case", LOUD)
def test_alarm_warns_once_after_ten_steps(case: str, caplog: pytest.LogCaptureFixture) -> None:
    alarm, row, text = LOUD[case]
    assert states(alarm, [row] * 30) == [False] * 9 + [True] * 21
    assert len(caplog.records) == 1
    assert text in caplog.text and text in alarm.text
    assert "\n" not in alarm.text and alarm.text.count(" -> ") == 1


def test_a_larger_bound_is_advised_only_as_far_as_the_learning_rate_allows() -> None:
    """A run with late groups was told 36 for 2, and then by the drift alarm to lower it."""
    alarm = StragglerAlarm(0.2, max_staleness=2)
    states(alarm, [waited(1.0, idle=0.4)] * 10)
    assert "as far as the learning rate allows" in alarm.text and 'staleness.discard = "tokens"' in alarm.text


ENDS: dict[str, tuple[Alarm, Row, Row]] = {
    "drop": (DropAlarm(0.05), step(dropped=8), step(dropped=0)),
    "stragglers": (StragglerAlarm(0.2, max_staleness=4), waited(1.0, idle=0.4), waited(0.0, idle=0.0)),
    "split, by the workers that are up": (
        SplitAlarm(0.3, warmup=0),
        split(waited=3.0, idle=0.0),
        split(waited=0.0, idle=0.0, workers=6),
    ),
    "standstill": (StandstillAlarm(), STILL, {"grad_norm": 0.1}),
    "no signal": (NoSignalAlarm(), NO_SIGNAL, {"reward/std": 0.01, "grad_norm": 0.1}),
}


@pytest.mark.parametrize("case", ENDS)
def test_alarm_ends_and_warns_again_when_it_begins_again(case: str, caplog: pytest.LogCaptureFixture) -> None:
    alarm, on, off = ENDS[case]
    found = states(alarm, [on] * 20 + [off] * 20 + [on] * 20)
    assert (found[19], found[39], found[59]) == (True, False, True)
    assert len(caplog.records) == 2


def test_mismatch_alarm_warns_once_per_rise(caplog: pytest.LogCaptureFixture) -> None:
    alarm = MismatchAlarm(0.05)
    seen = [alarm.update({"mismatch/fresh_mean": mean}) for mean in (0.01, 0.05, 0.06, 0.3, 0.02, math.nan)]
    assert [metrics["mismatch/alarm"] for metrics in seen] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert len(caplog.records) == 2
    assert "0.060 nats per token, over metrics.mismatch_alarm = 0.05" in caplog.text


def failing(groups: Sequence[int], *, samples: int = 0, incarnation: int = 0) -> list[Row]:
    """Steps that train 64 answers. groups: failed so far, of 8 answers each;  samples: failed ones in each step"""
    return [
        {
            "length/trained": histogram([100] * 64),
            "staleness/failed_groups": float(count),
            "staleness/failed_samples": float(samples),
            "learner/incarnation": float(incarnation),
        }
        for count in groups
    ]


def test_answers_without_a_reward_raise_an_alarm_that_names_their_share(caplog: pytest.LogCaptureFixture) -> None:
    """Eight of 72 answers of each step fail: as a whole group, or singly."""
    assert states(MissingAlarm(group_size=8), failing([1, 2, 3, 4])) == [False, False, True, True]
    assert states(MissingAlarm(group_size=8), failing([0] * 4, samples=8)) == [False, False, True, True]
    text = "11 % of the answers of the last 3 steps failed and have no reward, so they are in no baseline and are not"
    assert [record.getMessage()[: len(text)] for record in caplog.records] == [text] * 2


def test_few_failed_answers_and_those_of_an_earlier_incarnation_raise_no_alarm() -> None:
    assert not any(states(MissingAlarm(group_size=8), failing([1, 2])))
    assert not any(states(MissingAlarm(group_size=8), failing([0] * 30, samples=1)))
    assert not any(states(MissingAlarm(group_size=8), failing([40] * 20, incarnation=1)))


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_dropped_share_is_reported_at_every_step(threshold: float) -> None:
    alarm = DropAlarm(threshold)
    assert [alarm.update(step(dropped=16))["staleness/dropped_share"] for _ in range(20)] == [0.2] * 20


def test_truncation_alarm_warns_if_answers_are_cut_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    found = states(TruncationAlarm(), truncated([0.97] * 12 + [0.9, 1.0]))
    assert found == [False] * 9 + [True] * 3 + [False] * 2
    assert len(caplog.records) == 1
    assert "of each of the first 10 steps were cut at rollout.max_new_tokens, 512 tokens long" in caplog.text


def test_a_short_run_warns_before_it_ends() -> None:
    assert [steps_of(steps) for steps in (1, 8, 20, 40, 1000)] == [5, 5, 5, 10, 10]
    assert states(StandstillAlarm(steps=steps_of(8)), [STILL] * 8).count(True) == 4
