"""How busy engines are: measured in the worker, and as rates between two steps in the learner.

A heartbeat carries gauges of the last seconds, for whoever looks now, and counters since the start, because a step may
take much longer than a heartbeat: an engine that wrote for 30 of 40 seconds was 25 % idle, whatever it does at the end.

Tests: tests/unit/actors/test_activity.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from asyncrl.messages import Heartbeat, replace
from asyncrl.policies.health.waits import BEAT_SECONDS

SECONDS: Final = "rollout/up_seconds"
BUSY_SECONDS: Final = "rollout/busy_seconds"
TOKENS: Final = "rollout/tokens"
TOKENS_PER_SECOND: Final = "rollout/tokens_per_second"
IDLE_RATIO: Final = "rollout/idle_ratio"

_Counters = tuple[float, float, float]
"""Seconds, busy seconds, and sampled tokens since the start."""


class Activity:
    """Measures how busy an engine is: since the start, and in the last window of at least ``window_seconds``."""

    def __init__(
        self,
        *,
        num_sampled: Callable[[], int],
        window_seconds: float = BEAT_SECONDS / 2,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_sampled: number of tokens sampled so far"""
        self._num_sampled = num_sampled
        self._window_seconds = window_seconds
        self._now = now
        self._began = now()
        self._running = 0
        self._busy_since = 0.0
        self._busy = 0.0  # seconds, without the present ones
        self._rates = (0.0, 1.0)
        self._read: _Counters = (0.0, 0.0, 0)  # at the end of the last window

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While open, the engine is busy."""
        if self._running == 0:
            self._busy_since = self._now()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy += self._now() - self._busy_since

    def counters(self) -> dict[str, float]:
        """Return seconds, busy seconds and sampled tokens since the start."""
        seconds, busy, tokens = self._so_far()
        return {SECONDS: seconds, BUSY_SECONDS: busy, TOKENS: tokens}

    def _so_far(self) -> _Counters:
        now = self._now()
        return now - self._began, self._busy + (now - self._busy_since if self._running else 0.0), self._num_sampled()

    def rates(self) -> tuple[float, float]:
        """Return (tokens per second, share of time with nothing running) of the last window.

        Heartbeats and scrapes of Prometheus both read it. Neither must cut the other's window short.
        """
        now = self._so_far()
        if now[0] - self._read[0] >= self._window_seconds:
            self._rates, self._read = _rates(self._read, now), now
        return self._rates


class ActivityBetweenSteps:
    """Replaces the gauges of heartbeats by rates since the step before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[_Counters, tuple[float, float]]] = {}
        """By the life of a worker: its counters at the last step, and the rates that they gave."""

    def update(self, workers: Sequence[Heartbeat]) -> list[Heartbeat]:
        """Return the newest heartbeats of all workers at the end of a step with its rates.

        A worker that has sent none since the last step keeps its rates; one that is new has those of its gauges.
        """
        known, self._before, found = self._before, {}, []
        for beat in workers:
            if not all(name in beat.numbers for name in (SECONDS, BUSY_SECONDS, TOKENS)):
                found.append(beat)
                continue
            now = beat.numbers[SECONDS], beat.numbers[BUSY_SECONDS], beat.numbers[TOKENS]
            rates = beat.numbers.get(TOKENS_PER_SECOND, 0.0), beat.numbers.get(IDLE_RATIO, 1.0)
            if (before := known.get(beat.life)) is not None:
                rates = _rates(before[0], now) if now[0] > before[0][0] else before[1]
            self._before[beat.life] = now, rates
            numbers = dict(beat.numbers) | dict(zip((TOKENS_PER_SECOND, IDLE_RATIO), rates, strict=True))
            found.append(replace(beat, numbers=numbers))
        return found


def _rates(before: _Counters, now: _Counters) -> tuple[float, float]:
    """Return (tokens per second, share of time with nothing running) between two readings."""
    seconds, busy, tokens = (b - a for a, b in zip(before, now, strict=True))
    return max(0.0, tokens) / seconds, min(1.0, max(0.0, 1.0 - busy / seconds))
