"""What one actor waits for: on whom, for how long, and how long such waits usually take.

Durations are monotonic: changes of the wall clock do not begin, hide or end a wait. A wait for a part of the actor's
own process (its engine, its reward function, a disk) has a limit before it counts as a stall. The limit is learned from
earlier waits of the same kind (``usual_seconds``, ``stall_limit``): until some have ended, nothing is unusual.

Tests: tests/unit/actors/test_wait_tracker.py.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncrl.engines.port import EngineStats
from asyncrl.messages import Wait
from asyncrl.policies.health.waits import PARTS, stall_limit, usual_seconds

_REMEMBERED = 32


@dataclass(slots=True)
class OpenWait:
    """One open wait. ``since``: on the WaitTracker's clock; ``longest``: seconds of the longest stretch so far."""

    what: str
    on: str
    note: str
    usual: float
    limit: float
    since: float
    longest: float = 0.0
    pauses: int = 0
    progress: Callable[[], int] | None = None
    seen: int = 0
    alive: float = 0.0

    def seconds(self, now: float) -> float:
        if self.progress is not None and (found := self.progress()) != self.seen:
            self.seen, self.alive = found, now
        return 0.0 if self.pauses else now - max(self.since, self.alive)


class WaitTracker:
    """The waits of one actor, open and past."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[OpenWait] = []
        self._past: dict[tuple[str, str], deque[float]] = {}

    @contextlib.contextmanager
    def waiting(
        self,
        what: str,
        *,
        on: str = "",
        note: str = "",
        progress: Callable[[], int] | None = None,
    ) -> Iterator[OpenWait]:
        """While open, report on the bus that the actor waits for ``what``, and since when.

        on        who could end the wait: a role, or one of policies.health.waits.PARTS
        note      text appended to ``what``; waits with the same ``what`` are compared with each other
        progress  counter that rises while the work progresses; only the time since it last rose counts
        """
        usual, longest = self.usual_seconds(what, on), 0.0
        if (part := PARTS.get(on)) is not None:
            usual = usual if part.patience is None else 0.0
            longest = stall_limit(usual) if part.patience is None else part.patience
        since = self._clock()
        wait = OpenWait(what, on, note, usual, longest, since, progress=progress, alive=since)
        self._open.append(wait)
        try:
            yield wait
            self._past.setdefault((what, on), deque(maxlen=_REMEMBERED)).append(self._longest(wait))
        finally:
            self._open = [other for other in self._open if other is not wait]

    @contextlib.contextmanager
    def pause(self, wait: OpenWait) -> Iterator[None]:
        """While open, ``wait`` does not count: the other side has called us back. It starts again afterwards."""
        if not wait.pauses:
            wait.longest = self._longest(wait)
        wait.pauses += 1
        try:
            yield
        finally:
            wait.pauses -= 1
            wait.since = self._clock()

    def _longest(self, wait: OpenWait) -> float:
        return max(wait.longest, self._clock() - wait.since)

    def usual_seconds(self, what: str, on: str) -> float:
        """Return how long the last _REMEMBERED waits of this kind took at most, as a rule; 0 if it is not known."""
        return usual_seconds(self._past.get((what, on), ()))

    def now(self) -> tuple[Wait, ...]:
        """Return one entry per kind with its longest wait, longest first."""
        now = self._clock()
        kinds: dict[tuple[str, str], list[OpenWait]] = {}
        for wait in self._open:
            if not wait.pauses:
                kinds.setdefault((wait.what, wait.on), []).append(wait)
        longest = [(max(waits, key=lambda wait: wait.seconds(now)), len(waits)) for waits in kinds.values()]
        found = [
            Wait(
                what=f"{wait.what} {wait.note}".strip(),
                on=wait.on,
                seconds=wait.seconds(now),
                usual=wait.usual,
                limit=wait.limit,
                count=count,
            )
            for wait, count in longest
        ]
        return tuple(sorted(found, key=lambda wait: -wait.seconds))


class EngineLiveness:
    """An engine's signs of life, checked with each heartbeat: an answer may take long, the next token may not.

    How long the next token usually takes is learned from the times between signs of life, and until there are some of
    them from whole answers: on a slow CPU, the prompts of a group alone may take a minute.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expected = 0
        self._tokens = 0
        self._alive = clock()
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._answers: deque[float] = deque(maxlen=_REMEMBERED)

    @contextlib.contextmanager
    def expect(self) -> Iterator[None]:
        """While open, the engine owes an answer."""
        began = self._clock()
        if not self._expected:
            self._alive = began
        self._expected += 1
        try:
            yield
            self._answers.append(self._clock() - began)
        finally:
            self._expected -= 1
            self._alive = self._clock()

    def waits(self, stats: EngineStats, *, is_loading: bool) -> tuple[Wait, ...]:
        """Return the wait for the engine's next sign of life, if one is due. None is due while it loads weights."""
        now = self._clock()
        if stats.tokens_generated != self._tokens or is_loading:
            if stats.is_live and self._expected and not is_loading:
                self._gaps.append(now - self._alive)
            self._tokens, self._alive = stats.tokens_generated, now
        if not self._expected:
            return ()
        usual = usual_seconds(self._gaps) or usual_seconds(self._answers)
        what = "the next token of an answer" if self._expected == 1 else f"the next token of {self._expected} answers"
        limit, seconds = stall_limit(usual), now - self._alive
        return (Wait(what=what, on="engine", seconds=seconds, usual=usual, limit=limit, count=self._expected),)
