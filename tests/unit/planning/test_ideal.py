"""The rules of the training loop, simulated on their own clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncrl.config.run import Mode
from asyncrl.planning.allocation import drawn
from asyncrl.planning.simulation import Ideal, Timing
from tests.harness.planning import plan


@pytest.mark.parametrize("load_seconds", [0.0, 3.0])
def test_the_ideal_synchronous_run_is_the_formula(load_seconds: float) -> None:
    simulated = plan(mode="sync", workers=2, learner_machines=4, max_staleness=0, warmup=2, steps=5)
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
    assert Ideal(simulated, timing, lengths).tokens_per_second() == pytest.approx(40 / step_seconds)


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_an_ideal_run_cannot_train_faster_than_its_learner(mode: Mode) -> None:
    bound = 1 if mode == "one_step_off" else 4
    simulated = plan(mode=mode, workers=7, group_size=2, max_staleness=bound, warmup=10, steps=30)
    slow_learner = Timing(
        seconds_per_token=0.01,
        seconds_per_sequence=0.0,
        capacity=8,
        load_seconds=0.0,
        train_tokens_per_second=10.0,
        train_seconds=0.0,
    )
    lengths = drawn([[10]], group_size=2, seed=0)
    # 8 x 10 response tokens are 8 x 26 tokens with their prompts: 20.8 s per step. Generation never delays it.
    reached = Ideal(simulated, slow_learner, lengths).run()
    assert reached.tokens_per_second == pytest.approx(80 / 20.8)
    assert reached.learner_busy == pytest.approx(1.0)


def with_late_groups(**changes: Any) -> Ideal:
    """One answer in eight is so long that it spans more versions than the bound allows."""
    timing = Timing(
        seconds_per_token=0.1,
        seconds_per_sequence=0.0,
        capacity=64,
        load_seconds=0.0,
        train_tokens_per_second=1e6,
        train_seconds=1.0,
    )
    simulated = dataclasses.replace(plan(warmup=6, steps=30, seed=1), **changes)
    return Ideal(simulated, timing, drawn([[10]] * 7 + [[120]], group_size=1, seed=1))


def test_a_run_that_waits_for_late_groups_loses_none_where_one_that_drops_does() -> None:
    waits, drops = (with_late_groups(eviction=way) for way in ("wait", "drop"))
    waits.run(), drops.run()
    assert (waits.lost, drops.lost > 0) == (0, True)


def test_a_run_that_leaves_out_old_tokens_neither_waits_nor_loses_a_group() -> None:
    """With the same long answers, their trained tokens count, and the learner waits for none of them."""
    waits, tokens = with_late_groups(eviction="wait"), with_late_groups(too_old="tokens")
    waited, left_out = waits.run(), tokens.run()
    assert tokens.lost == 0
    assert left_out.learner_busy > waited.learner_busy
    assert left_out.tokens_per_second > waited.tokens_per_second


def test_prompt_waiting_in_an_engine_does_not_age() -> None:
    """One engine with two slots serves a window of twelve groups. If age counted from the prompt, every group would be
    late, and the learner would hold each step for groups that no worker has begun."""
    timing = Timing(
        seconds_per_token=0.1,
        seconds_per_sequence=0.0,
        capacity=2,
        load_seconds=0.0,
        train_tokens_per_second=1e6,
        train_seconds=0.1,
    )
    lengths = drawn([[10]] * 7 + [[20]], group_size=1, seed=1)
    ideal = Ideal(plan(warmup=6, steps=30, seed=1, eviction="wait"), timing, lengths)
    reached = ideal.run()
    assert ideal.lost == 0
    assert reached.engines_busy == pytest.approx(1.0)
    assert len(ideal.buffer) < ideal.plan.groups_per_batch
