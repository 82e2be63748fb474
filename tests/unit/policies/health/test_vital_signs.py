"""One sentence on a run, and the five numbers to watch."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.policies.health.faults import Finding
from asyncrl.policies.health.vital_signs import verdict, vital_signs

FIRST = {"reward/mean": 0.1, "entropy": 2.4}
HEALTHY = {
    "reward/mean": 0.9,
    "reward/same_in_group": 0.4,
    "entropy": 0.3,
    "mismatch/mean": 0.2,
    "learner/idle_ratio": 0.03,
    "rollout/idle_ratio": 0.4,
}


def test_a_healthy_run_shows_five_numbers_with_what_is_normal() -> None:
    found = vital_signs(HEALTHY, FIRST)
    assert [(sign.title, sign.value) for sign in found] == [
        ("reward", "0.9, was 0.1"),
        ("groups with equal rewards", "40%"),
        ("entropy", "0.3, was 2.4"),
        ("trainer and engine apart", "0.2"),
        ("idle", "learner 3%, engines 40%"),
    ]
    assert all(sign.is_normal and sign.normal for sign in found)
    assert verdict(HEALTHY, ()) == (True, "healthy: no fault and no alarm")


def test_numbers_outside_their_range_are_marked() -> None:
    ruined = HEALTHY | {"mismatch/fresh_mean": 0.2, "alarm/collapse": 1.0, "alarm/reward_fell": 1.0}
    ruined |= {"reward/same_in_group": 1.0, "learner/idle_ratio": 0.8, "rollout/idle_ratio": 0.7}
    assert not any(sign.is_normal for sign in vital_signs(ruined, FIRST))


def test_equal_rewards_are_normal_once_the_reward_has_risen() -> None:
    for now, is_normal in (
        ({"reward/mean": 1.0}, True),
        ({"reward/mean": 0.1}, False),
        ({"alarm/standstill": 1.0}, False),
    ):
        (sign,) = vital_signs(HEALTHY | {"reward/same_in_group": 1.0} | now, FIRST)[1:2]
        assert sign.is_normal is is_normal


def test_supervised_fine_tuning_is_judged_by_its_loss() -> None:
    assert [sign.title for sign in vital_signs({"loss": 0.5}, {"loss": 3.0})] == ["loss"]
    assert vital_signs({}, {}) == []


def test_the_sentence_names_the_worst_fault_with_its_cost_and_remedy() -> None:
    stall = Finding(fault="engine", actor="w0", cause="w0's engine has not answered", remedy="look at its log")
    held = replace(stall, fault="stragglers", cause="learner holds back a batch")
    ruin = replace(stall, fault="diverged", cause="learner diverged", cost="the model gets worse")
    is_good, why = verdict(HEALTHY, [held, ruin, stall])
    assert is_good is False
    assert why.startswith("not healthy: w0's engine has not answered; this costs time, not correctness -> look at")
    assert why.endswith("(and 2 more)")
    assert "learner diverged" in verdict(HEALTHY, [held, ruin])[1]


def test_a_run_that_is_over_is_judged_by_the_alarms_of_its_steps() -> None:
    is_good, why = verdict(HEALTHY | {"alarm/diverged": 1.0}, ())
    assert is_good is False and "the learner trains a model that has diverged" in why and " -> stop" in why
    assert verdict(HEALTHY, (), {"alarm/diverged": 7})[0] is None
    assert "until step 7 the learner trains a model that has diverged" in verdict(HEALTHY, (), {"alarm/diverged": 7})[1]
    assert verdict({}, ()) == (None, "no step is trained yet")
