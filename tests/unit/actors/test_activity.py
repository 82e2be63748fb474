"""How busy an engine is counts what runs, over the time that is asked for."""

from __future__ import annotations

from asyncrl.actors.activity import IDLE_RATIO, TOKENS_PER_SECOND, Activity, ActivityBetweenSteps
from asyncrl.messages import Heartbeat


class Worker:
    """An engine on a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 50.0
        self.tokens = 0
        self.activity = Activity(num_sampled=lambda: self.tokens, window_seconds=1.0, now=lambda: self.now)

    def spend(self, seconds: float, *, tokens: int = 0) -> None:
        self.now += seconds
        self.tokens += tokens

    def beat(self, life: str = "a") -> Heartbeat:
        tokens_per_second, idle = self.activity.rates()
        gauges = {TOKENS_PER_SECOND: tokens_per_second, IDLE_RATIO: idle}
        return Heartbeat(actor="w0", role="rollout-worker", life=life, numbers=self.activity.counters() | gauges)


def test_an_engine_whose_answers_take_long_is_busy_and_writes_tokens_all_the_time() -> None:
    worker = Worker()
    with worker.activity.running():
        for _ in range(5):
            worker.spend(2, tokens=60)
            assert worker.activity.rates() == (30.0, 0.0)
    worker.spend(2)
    assert worker.activity.rates() == (0.0, 1.0)


def test_rates_of_a_step_cover_the_whole_step() -> None:
    """30 of 40 seconds were busy, and the last heartbeat saw none of them."""
    worker, steps = Worker(), ActivityBetweenSteps()
    steps.update([worker.beat()])
    with worker.activity.running():
        worker.spend(30, tokens=600)
    worker.spend(8)
    worker.activity.rates()
    worker.spend(2)
    beat = worker.beat()
    assert (beat.numbers[TOKENS_PER_SECOND], beat.numbers[IDLE_RATIO]) == (0.0, 1.0)
    (of_step,) = steps.update([beat])
    assert (of_step.numbers[TOKENS_PER_SECOND], of_step.numbers[IDLE_RATIO]) == (15.0, 0.25)
    (same,) = steps.update([beat])  # a short step: the worker has sent nothing since
    assert same == of_step


def test_a_worker_that_was_restarted_begins_anew() -> None:
    worker, steps = Worker(), ActivityBetweenSteps()
    worker.spend(100, tokens=1000)
    steps.update([worker.beat()])
    again = Worker()
    with again.activity.running():
        again.spend(2, tokens=10)
    (found,) = steps.update([again.beat(life="b")])
    assert (found.numbers[TOKENS_PER_SECOND], found.numbers[IDLE_RATIO]) == (5.0, 0.0)
    assert steps.update([Heartbeat(actor="w1", role="rollout-worker")])[0].numbers == {}
