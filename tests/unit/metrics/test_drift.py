"""A policy that leaves its tokens behind is reported; numerics and single steps are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncrl.metrics.drift import DriftAlarm
from tests.unit.metrics.test_alarms import Row, states


def steps(k3s: Sequence[float], *, entropy: float = 0.09) -> list[Row]:
    return [{"offpolicy/k3": k3, "entropy": entropy} for k3 in k3s]


def test_drift_is_k3_over_the_entropy() -> None:
    assert DriftAlarm(0.2).update({"offpolicy/k3": 0.03, "entropy": 0.09}) == {"offpolicy/drift": pytest.approx(0.3)}


@pytest.mark.parametrize(
    "rows",
    [
        steps([0.001] * 40),  # what bfloat16 rounds away
        steps([0.0] * 40, entropy=0.0),  # certain, and in sync
        steps([0.03, 0.03, 0.0, 0.0, 0.0] * 8),  # single steps
        steps([0.5] * 40, entropy=2.7),  # far, but the policy hardly knows anything yet
        [{"loss": 1.0}] * 40,  # nothing is compared
    ],
)
def test_a_policy_that_stays_near_its_tokens_raises_no_alarm(rows: Sequence[Row]) -> None:
    assert not any(states(DriftAlarm(0.2), rows))


def test_a_policy_that_leaves_its_tokens_behind_is_reported_once_with_what_to_lower(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarm = DriftAlarm(0.2)
    rows = [row | {"staleness/mean": 4.0, "learner/learning_rate": 2e-5} for row in steps([0.001] * 5 + [0.03] * 5)]
    assert states(alarm, rows) == [False] * 7 + [True] * 3  # three of five steps are far
    assert len(caplog.records) == 1
    assert "was 0.3 times its entropy away" in alarm.text
    assert "at staleness 4 and learning rate 2e-05" in alarm.text
    assert alarm.text.endswith("-> lower learner.learning_rate or staleness.max_staleness: their product matters")


@pytest.mark.parametrize(("loss", "is_advised"), [("ppo_clip", True), ("reinforce", True), ("topr", False)])
def test_another_loss_is_advised_only_to_a_run_that_leaves_old_tokens_to_its_correction(
    loss: str, is_advised: bool
) -> None:
    alarm = DriftAlarm(0.2, loss=loss)
    states(alarm, steps([0.03] * 5))
    assert alarm.text.endswith('; or, with GRPO, set algorithm.loss = "topr", correction = "none"') == is_advised


def test_the_alarm_ends_at_half_the_threshold_and_may_begin_again() -> None:
    rows = steps([0.03] * 5 + [0.015] * 5 + [0.005] * 5 + [0.03] * 5)
    on = states(DriftAlarm(0.2), rows)
    assert on[4:10] == [True] * 6  # 0.15 is over half of 0.2
    assert not on[14]
    assert on[19]


def test_zero_turns_the_alarm_off() -> None:
    assert not any(states(DriftAlarm(0.0), steps([1.0] * 10)))
