"""Continuous batching, simulated on a clock that is passed in."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.messages import VersionSpan
from asyncrl.planning.timing import Timing


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sequence.  entered: the engine's position (decode steps so far) when the sequence began"""

    number: int
    entered: float
    length: int


@dataclass(slots=True)
class Decoding:
    """The continuous batch of one engine, advanced from event to event; in between, all sequences decode equally fast.

    ``position`` counts decode steps. A sequence that enters at position p with length n finishes at p + n.
    """

    timing: Timing
    now: float = 0.0
    position: float = 0.0
    busy_seconds: float = 0.0
    is_paused: bool = False
    _running: list[tuple[float, int, float, int]] = field(default_factory=list)  # (finish, number, entered, length)
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, number: int, length: int) -> None:
        """Add a sequence of ``length`` tokens at ``now``; it runs if a slot is free, else it waits for one."""
        if len(self._running) < self.timing.capacity:
            heapq.heappush(self._running, (self.position + length, number, self.position, length))
        else:
            self._waiting.append((number, length))

    def next_finish(self) -> float:
        """Return when the next sequence ends if nothing is added; infinity if none runs or decoding is paused."""
        if not self._running or self.is_paused:
            return math.inf
        left = max(0.0, self._running[0][0] - self.position)
        return self.now + left * self.timing.decode_step(len(self._running))

    def advance(self, now: float) -> list[Finished]:
        """Decode until ``now``; return what has ended, in order. A slot that becomes free is filled at that moment."""
        ended: list[Finished] = []
        while (finish := self.next_finish()) <= now:
            self.busy_seconds += finish - self.now
            self.now, self.position = finish, max(self.position, self._running[0][0])
            _, number, entered, length = heapq.heappop(self._running)
            ended.append(Finished(number, entered, length))
            if self._waiting:
                self.add(*self._waiting.popleft())
        if self._running:
            self.busy_seconds += now - self.now
            if not self.is_paused:
                self.position += (now - self.now) / self.timing.decode_step(len(self._running))
        self.now = now
        return ended

    def places(self) -> Iterator[tuple[int, float | None]]:
        """Yield each unfinished sequence with the position at which it began; None if it waits for a slot."""
        yield from ((number, entered) for _, number, entered, _ in self._running)
        yield from ((number, None) for number, _ in self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)


def version_spans(
    changes: Sequence[tuple[float, tuple[int, int]]], *, entered: float, length: int
) -> tuple[VersionSpan, ...]:
    """Return the version of each token. ``changes``: (position, version), rising, the first before ``entered``."""
    first = bisect_right(changes, entered, key=lambda change: change[0]) - 1
    starts: dict[int, tuple[int, int]] = {}
    for position, version in itertools.islice(changes, first, None):
        start = max(0, math.ceil(position - entered))
        if start >= length:
            break
        starts[start] = version
    return tuple(VersionSpan(start=s, incarnation=v[0], policy_version=v[1]) for s, v in starts.items())
