"""Continuous batching and the rules of the training loop, simulated on their own clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.config.run import Mode
from asyncrl.messages import VersionSpan
from benchmarks.ideal_run import Decoding, GroupLengths, Ideal, Plan, Timing, version_spans

TIMING = Timing(
    seconds_per_token=1.0,
    seconds_per_sequence=0.25,
    capacity=2,
    load_seconds=3.0,
    train_tokens_per_second=100.0,
    train_seconds=5.0,
)


def test_a_decode_step_takes_longer_the_more_sequences_run() -> None:
    alone, together = Decoding(TIMING), Decoding(TIMING)
    alone.add(0, 4)
    together.add(0, 4)
    together.add(1, 8)
    assert alone.next_finish() == 4 * (1 + 0.25)
    assert together.next_finish() == 4 * (1 + 0.5)


def test_remaining_sequences_speed_up_when_one_ends() -> None:
    decoding = Decoding(TIMING)
    decoding.add(0, 4)
    decoding.add(1, 8)
    # Both run for 4 steps of 1.5 s, then one runs alone for 4 steps of 1.25 s.
    assert [ended.number for ended in decoding.advance(10.999)] == [0]
    assert [ended.number for ended in decoding.advance(11.0)] == [1]
    assert decoding.advance(20.0) == []
    assert decoding.busy_seconds == 11.0


def test_waiting_sequence_starts_when_a_slot_is_free() -> None:
    decoding = Decoding(TIMING)
    for number in range(3):
        decoding.add(number, 4)
    assert (decoding.running, decoding.queued) == (2, 1)
    ended = decoding.advance(100.0)
    # Two run for 4 steps of 1.5 s; the third enters at step 4 and needs another 4 x 1.25 s.
    assert [(e.number, e.entered) for e in ended] == [(0, 0.0), (1, 0.0), (2, 4.0)]
    assert decoding.busy_seconds == 6.0 + 5.0


def test_decoding_stops_while_weights_load() -> None:
    decoding = Decoding(TIMING)
    decoding.add(0, 4)
    decoding.advance(2.5)
    decoding.is_paused = True
    assert decoding.advance(50.0) == []
    decoding.is_paused = False
    assert decoding.next_finish() == 52.5


def test_every_token_knows_which_version_sampled_it() -> None:
    changes = [(-1.0, (0, 0)), (10.5, (0, 1)), (12.0, (0, 2)), (14.0, (0, 3))]
    spans = version_spans(changes, entered=10.0, length=4)
    assert spans == (
        VersionSpan(start=0, incarnation=0, policy_version=0),
        VersionSpan(start=1, incarnation=0, policy_version=1),
        VersionSpan(start=2, incarnation=0, policy_version=2),
    )


_PLAN = Plan(
    mode="async",
    workers=1,
    learner_machines=1,
    groups_per_batch=4,
    group_size=1,
    max_staleness=2,
    steps=1,
    warmup=0,
    seed=0,
)


def plan(**changes: Any) -> Plan:
    """Return a plan: one worker, one training copy of the model, batches of four answers, a staleness bound of two."""
    return dataclasses.replace(_PLAN, **changes)


def drawn(lengths: Sequence[int], *, seed: int) -> GroupLengths:
    """Return groups of one answer, each of a length that is drawn from ``lengths``."""
    return lambda group_id: [random.Random(f"{seed} {group_id}").choice(lengths)]


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
    lengths = drawn([10], seed=0)
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
    # 8 x 10 response tokens are 8 x 26 tokens with their prompts: 20.8 s per step. Generation never delays it.
    reached = Ideal(simulated, slow_learner, lambda group_id: [10, 10]).run()
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
    return Ideal(simulated, timing, drawn([10] * 7 + [120], seed=1))


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
    lengths = drawn([10] * 7 + [20], seed=1)
    ideal = Ideal(plan(warmup=6, steps=30, seed=1, eviction="wait"), timing, lengths)
    reached = ideal.run()
    assert ideal.lost == 0
    assert reached.engines_busy == pytest.approx(1.0)
    assert len(ideal.buffer) < ideal.plan.groups_per_batch
