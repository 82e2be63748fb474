"""Which answers are checked, and which workers are quarantined for a mismatch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch, routing_mismatch


def sequence(*, age: int = 0, behavior: float = -1.0, tokens: int = 4) -> TrainingSequence:
    """Two prompt tokens, then ``tokens`` sampled tokens."""
    mask = np.arange(2 + tokens) >= 2
    return TrainingSequence(
        tokens=np.ones(2 + tokens, np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
        advantages=np.zeros(2 + tokens, np.float32),
        loss_weights=np.zeros(2 + tokens, np.float32),
        staleness=np.where(mask, age, 0).astype(np.int32),
    )


def looked(
    check: LogprobMismatch, sequences: list[TrainingSequence], workers: list[str], *, step: int, trainer: float
) -> list[str]:
    """Return the workers that one look quarantines when the trainer gives every token the logprob ``trainer``."""
    chosen = check.choose(sequences, workers, step=step)
    logprobs = {one.sequence: np.full(len(sequences[one.sequence]), trainer, np.float32) for one in chosen}
    return check.judge(chosen, sequences, logprobs)[1]


def test_the_freshest_and_the_oldest_answer_of_each_worker_are_checked() -> None:
    sequences = [sequence(age=age) for age in (3, 1, 2, 0)]
    chosen = LogprobMismatch(bound=0.5, every=10).choose(sequences, ["a", "a", "a", "b"], step=20)
    assert sorted((one.worker, one.age) for one in chosen) == [("a", 1), ("a", 3), ("b", 0)]


@pytest.mark.parametrize(("bound", "step"), [(0.5, 7), (0.0, 10)])
def test_nothing_is_checked_between_the_looks_or_when_it_is_off(bound: float, step: int) -> None:
    assert LogprobMismatch(bound=bound, every=10).choose([sequence()], ["a"], step=step) == []


def test_a_worker_over_the_bound_twice_is_quarantined_and_the_others_are_not() -> None:
    check = LogprobMismatch(bound=0.5, every=10)
    sequences = [sequence(behavior=-1.0), sequence(behavior=-3.0)]  # |trainer - behavior| is 0 and 2
    assert looked(check, sequences, ["good", "bad"], step=0, trainer=-1.0) == []
    assert looked(check, sequences, ["good", "bad"], step=1, trainer=-1.0) == ["bad"]


def test_who_was_over_the_bound_once_and_is_not_again_goes_free() -> None:
    check = LogprobMismatch(bound=0.5, every=10)
    assert looked(check, [sequence(behavior=-3.0)], ["w"], step=0, trainer=-1.0) == []
    assert looked(check, [sequence()], ["w"], step=1, trainer=-1.0) == []
    assert looked(check, [sequence(behavior=-3.0)], ["w"], step=10, trainer=-1.0) == []


def guilty_of(sequences: list[TrainingSequence], workers: list[str], *, looks: int = 3) -> list[str]:
    """Return the workers that ``looks`` looks at the same answers quarantine; the trainer gives every token -1."""
    check = LogprobMismatch(bound=0.5, every=1)
    return sorted({one for step in range(looks) for one in looked(check, sequences, workers, step=step, trainer=-1.0)})


def off(nats: float, *, age: int) -> TrainingSequence:
    return sequence(age=age, behavior=-1.0 - nats)


def test_no_worker_is_quarantined_for_a_policy_that_moves_fast() -> None:
    """Measured at learning rate 3e-3: no mismatch at age 0, and 0.7 to 2.7 nats for all workers at higher ages."""
    old = [off(0.7, age=1), off(1.5, age=2), off(2.7, age=3), off(1.4, age=1)]
    assert guilty_of(old, ["a", "b", "c", "d"]) == []
    assert guilty_of(old, ["a", "a", "b", "b"]) == []
    assert guilty_of([off(0.0, age=0), off(2.7, age=1)], ["a", "a"]) == []


def test_a_worker_without_fresh_answers_is_compared_with_the_others() -> None:
    assert guilty_of([off(0.1, age=2), off(3.0, age=2), off(0.2, age=3)], ["a", "bad", "c"]) == ["bad"]
    assert guilty_of([off(0.2, age=2), off(3.0, age=3)], ["a", "bad"]) == ["bad"]
    fast = [off(2.0, age=2), off(9.0, age=2), off(2.5, age=3)]
    assert guilty_of(fast, ["a", "bad", "c"]) == ["bad"]


def test_one_bad_worker_does_not_make_the_others_guilty_or_hide_behind_its_old_answers() -> None:
    assert guilty_of([off(0.1, age=0), off(3.0, age=0), off(3.0, age=4)], ["a", "bad", "bad"]) == ["bad"]


def test_who_was_off_when_fresh_is_quarantined_when_its_next_answers_are_old() -> None:
    check = LogprobMismatch(bound=0.5, every=10)
    assert looked(check, [off(3.0, age=0)], ["w"], step=0, trainer=-1.0) == []
    assert looked(check, [off(3.0, age=2)], ["w"], step=1, trainer=-1.0) == ["w"]


def test_what_routing_replay_is_good_for_is_the_mismatch_with_and_without_it() -> None:
    one = dataclasses.replace(
        sequence(),
        response_mask=np.array([False, True, True, False]),
        behavior_logprobs=np.array([0, -1, -2, 0], np.float32),
    )
    replayed, own = np.array([0, -1, -2, -9], np.float32), np.array([0, -1.5, -1, -9], np.float32)
    made = routing_mismatch({0: one}, {0: replayed}, {0: own})
    assert made == pytest.approx(
        {
            "mismatch/routing_replayed": 0.0,
            "mismatch/routing_replayed_k3": 0.0,
            "mismatch/routing_own": 0.75,
            "mismatch/routing_own_k3": (np.exp(-0.5) - 0.5 + np.e - 2) / 2,
        }
    )
