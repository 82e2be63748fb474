"""The loop's rules on a clock of their own."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.config.run import Mode
from asyncrl.policies.planning.allocation import drawn
from asyncrl.policies.planning.ideal import Ideal, Plan
from asyncrl.policies.planning.timing import Timing


@pytest.mark.parametrize("load_seconds", [0.0, 3.0])
def test_the_ideal_synchronous_run_is_the_formula(load_seconds: float) -> None:
    plan = Plan(
        mode="sync",
        workers=2,
        learner_machines=4,
        groups_per_batch=4,
        group_size=1,
        max_staleness=0,
        warmup=2,
        steps=5,
        seed=0,
    )
    timing = Timing(
        seconds_per_token=1.0,
        seconds_per_sequence=0.25,
        capacity=8,
        load_seconds=load_seconds,
        train_tokens_per_second=100.0,
        train_seconds=5.0,
    )
    lengths = drawn([[10]], group_size=1, seed=0)
    # Each of the 2 workers decodes 2 answers of 10 tokens: 10 x (1 + 2 x 0.25) = 15 s. The step trains 4 x (10 + 16
    # prompt) tokens on 4 machines: 104 / 400 + 5 = 5.26 s.
    step_seconds = load_seconds + 15 + 5.26
    assert Ideal(plan, timing, lengths).tokens_per_second() == pytest.approx(40 / step_seconds)


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_an_ideal_run_cannot_train_faster_than_its_learner(mode: Mode) -> None:
    plan = Plan(
        mode=mode,
        workers=7,
        learner_machines=1,
        groups_per_batch=4,
        group_size=2,
        max_staleness=1 if mode == "one_step_off" else 4,
        warmup=10,
        steps=30,
        seed=0,
    )
    slow_learner = Timing(
        seconds_per_token=0.01,
        seconds_per_sequence=0.0,
        capacity=8,
        load_seconds=0.0,
        train_tokens_per_second=10.0,
        train_seconds=0.0,
    )
    lengths = drawn([[10]], group_size=2, seed=0)
    # A batch of 8 x 10 response tokens is 8 x 26 with its prompts: 20.8 s a step, and generation never holds it up.
    reached = Ideal(plan, slow_learner, lengths).run()
    assert reached.tokens_per_second == pytest.approx(80 / 20.8)
    assert reached.learner_busy == pytest.approx(1.0)


def test_a_run_that_waits_for_late_groups_loses_none_where_one_that_drops_does() -> None:
    """One answer in eight is so long that it spans more versions than the bound allows."""
    plan = Plan(
        mode="async",
        workers=1,
        learner_machines=1,
        groups_per_batch=4,
        group_size=1,
        max_staleness=2,
        warmup=6,
        steps=30,
        seed=1,
    )
    timing = Timing(
        seconds_per_token=0.1,
        seconds_per_sequence=0.0,
        capacity=64,
        load_seconds=0.0,
        train_tokens_per_second=1e6,
        train_seconds=1.0,
    )
    lengths = drawn([[10]] * 7 + [[120]], group_size=1, seed=1)
    waits, drops = (Ideal(dataclasses.replace(plan, eviction=way), timing, lengths) for way in ("wait", "drop"))
    waits.run(), drops.run()
    assert (waits.lost, drops.lost > 0) == (0, True)
