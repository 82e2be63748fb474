"""Continuous batching, on a clock that is passed as an argument."""

from __future__ import annotations

from asyncrl.messages import VersionSpan
from asyncrl.planning.simulation import Decoding, Timing, version_spans

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
