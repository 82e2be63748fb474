"""The pipeline benchmark's arm: the real loop on simulated parts trains what its plan says, and its row is complete."""

from __future__ import annotations

import pytest

from asyncrl.config.run import Mode
from asyncrl.planning.simulation import Plan, Timing
from benchmarks.arm import Evaluating, run_arm
from benchmarks.simulated import Lengths

FAST = Timing(
    seconds_per_token=1e-3,
    seconds_per_sequence=0.0,
    capacity=8,
    load_seconds=0.0,
    train_tokens_per_second=1e6,
    train_seconds=0.02,
)
LENGTHS = Lengths("constant", mean=10, maximum=10)


def plan_of(mode: Mode) -> Plan:
    return Plan(
        mode=mode,
        workers=2,
        learner_machines=1,
        groups_per_batch=2,
        group_size=2,
        max_staleness=2,
        warmup=2,
        steps=6,
        seed=0,
    )


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
async def test_every_step_behind_the_warm_up_is_counted_and_none_is_staler_than_its_bound(mode: Mode) -> None:
    plan = plan_of(mode)
    row = await run_arm(plan, timing=FAST, lengths=LENGTHS)
    assert row["steps"] == 4
    assert row["length_mean"] == 10
    assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= plan.bound
    assert row["tokens_per_second"] > 0
    assert row["evaluations"] == 0


@pytest.mark.parametrize("engines", [0, 1])
async def test_evaluations_beside_training_are_counted_too(engines: int) -> None:
    evaluating = Evaluating(num_prompts=2, engines=engines)
    row = await run_arm(plan_of("async"), timing=FAST, lengths=LENGTHS, evaluating=evaluating)
    assert row["steps"] == 4
    assert row["evaluations_complete"] == row["evaluations"] >= 1
    assert row["evaluation_tokens"] == 2 * 10 * row["evaluations"]
