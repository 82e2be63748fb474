"""The waits that an actor reports, on a clock that the test controls."""

from __future__ import annotations

import pytest

from asyncrl.actors.wait_tracker import EngineLiveness, WaitTracker
from asyncrl.engines.port import EngineStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> WaitTracker:
    return WaitTracker(clock=clock)


def spend(waits: WaitTracker, clock: Clock, seconds: float) -> None:
    """Wait for the engine for ``seconds``."""
    with waits.waiting("an answer", on="engine", note=""):
        clock.now += seconds


def test_waits_of_one_kind_are_reported_once_with_the_longest(waits: WaitTracker, clock: Clock) -> None:
    with waits.waiting("weights", on="learner", note="of version 3"):
        clock.now += 2
        with (
            waits.waiting("weights", on="learner", note="of version 4"),
            waits.waiting("prompts", on="prompt-source", note=""),
        ):
            clock.now += 1
            found = [(wait.what, wait.seconds, wait.count) for wait in waits.now()]
            assert found == [("weights of version 3", 3, 2), ("prompts", 1, 1)]
    assert waits.now() == ()


def test_limit_follows_past_waits_and_forgets_one_that_was_a_hang(waits: WaitTracker, clock: Clock) -> None:
    with waits.waiting("an answer", on="engine", note=""):
        assert waits.now()[0].limit == 300  # no earlier waits to compare with
    for seconds in (3, 3, 1, 300, 4):
        spend(waits, clock, seconds)
    with waits.waiting("an answer", on="engine", note=""):
        assert (waits.now()[0].usual, waits.now()[0].limit) == (4, 16)


def test_wait_with_progress_is_no_stall_and_counts_whole_for_what_is_usual(waits: WaitTracker, clock: Clock) -> None:
    chunks = [0]
    for _ in range(3):
        with waits.waiting("the weight folder", on="folder", note="", progress=lambda: chunks[0]):
            for _ in range(10):
                clock.now += 5
                chunks[0] += 1
                assert waits.now()[0].seconds == 0
            clock.now += 7
            assert waits.now()[0].seconds == 7
    assert waits.usual_seconds("the weight folder", "folder") == 57


def test_failed_wait_does_not_count_for_what_is_usual(waits: WaitTracker, clock: Clock) -> None:
    with pytest.raises(ValueError, match="no"), waits.waiting("an answer", on="engine", note=""):
        clock.now += 50
        raise ValueError("no")
    for _ in range(2):
        spend(waits, clock, 1)
    assert waits.usual_seconds("an answer", "engine") == 0


def test_longest_part_of_a_paused_wait_counts_for_what_is_usual(waits: WaitTracker, clock: Clock) -> None:
    """A tool call splits the wait. A short last part says nothing about how long the tool takes."""
    for _ in range(3):
        with waits.waiting("its rollout function", on="rollout", note="") as wait:
            for _ in range(3):
                clock.now += 1
                with waits.pause(wait):
                    clock.now += 200
                clock.now += 90
            with waits.pause(wait):
                clock.now += 200
    assert waits.usual_seconds("its rollout function", "rollout") == 91


def test_engine_that_samples_tokens_is_alive(clock: Clock) -> None:
    answers = EngineLiveness(clock=clock)
    with answers.expect():
        for tokens in (10, 20, 30):
            clock.now += 100
            stats = EngineStats(running=1, tokens_generated=tokens, is_live=True)
            assert answers.waits(stats, is_loading=False)[0].seconds == 0
        clock.now += 7
        (wait,) = answers.waits(stats, is_loading=False)
        assert (wait.seconds, wait.limit) == (7, 400)  # as slow as this engine is
        assert answers.waits(stats, is_loading=True)[0].seconds == 0  # paused by a load: not the engine's fault
    assert answers.waits(stats, is_loading=False) == ()


def test_a_fast_engine_that_stops_between_two_tokens_is_stalled_after_ten_seconds(clock: Clock) -> None:
    answers = EngineLiveness(clock=clock)
    with answers.expect():
        for tokens in range(1, 30):
            clock.now += 2  # heartbeats
            stats = EngineStats(running=1, tokens_generated=1000 * tokens, is_live=True)
            answers.waits(stats, is_loading=False)
        clock.now += 11
        (wait,) = answers.waits(stats, is_loading=False)
        assert (wait.seconds, wait.limit) == (11, 10)


def test_the_first_answers_of_a_slow_engine_are_no_stall(clock: Clock) -> None:
    """On two cores, the prompts of a group may take a minute before the first token, and nothing is known by then."""
    answers = EngineLiveness(clock=clock)
    with answers.expect():
        for stats in (
            EngineStats(running=32, is_live=True),
            EngineStats(running=32, tokens_generated=32, is_live=True),
        ):
            clock.now += 90
            (wait,) = answers.waits(stats, is_loading=False)
            assert wait.seconds < wait.limit


def test_engine_without_streaming_is_measured_by_its_answers(clock: Clock) -> None:
    answers = EngineLiveness(clock=clock)
    for _ in range(3):
        with answers.expect():
            clock.now += 10
            assert answers.waits(EngineStats(running=1), is_loading=False)[0].limit == 300
    with answers.expect():
        clock.now += 10
        (wait,) = answers.waits(EngineStats(running=1, tokens_generated=8), is_loading=False)
        assert (wait.usual, wait.limit) == (10, 40)
