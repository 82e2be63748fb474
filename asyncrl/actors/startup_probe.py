"""Whether a starting actor makes progress: reading a model may take minutes, but a hang reads nothing.

Checked with each heartbeat while the actor starts. A start that neither computes nor reads counts as a stall after
PATIENCE_SECONDS; otherwise the limit is FIRST_SECONDS. Where the system does not report work, FIRST_SECONDS applies.

Tests: tests/unit/actors/test_startup_probe.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from asyncrl import os_process
from asyncrl.messages import Wait, replace
from asyncrl.os_process import Work
from asyncrl.policies.health.faults import PATIENCE_SECONDS

_CPU_SECONDS: Final = 0.05
_READ_BYTES: Final = 2**16
"""Smaller changes between two heartbeats are the cost of sending heartbeats."""


class StartSigns:
    """Signs of progress of one process and its children. ``work``: os_process.work; returns None if unsupported."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, work: Callable[[], Work | None] = os_process.work
    ) -> None:
        self._clock, self._work = clock, work
        self._seen = Work(cpu_seconds=0.0, read_bytes=0)
        self._since = clock()

    def look(self) -> float:
        """Return seconds without a sign of progress. Blocks for a moment."""
        work, now = self._work(), self._clock()
        if (
            work is None
            or abs(work.cpu_seconds - self._seen.cpu_seconds) >= _CPU_SECONDS  # the sum falls when a child ends
            or abs(work.read_bytes - self._seen.read_bytes) >= _READ_BYTES
        ):
            self._since = now
        self._seen = work or self._seen
        return now - self._since


def judged(waits: Sequence[Wait], *, quiet_seconds: float) -> tuple[Wait, ...]:
    """Return a heartbeat's waits; waits for a startup that was quiet for too long say so and have a shorter limit."""
    if quiet_seconds <= PATIENCE_SECONDS:
        return tuple(waits)
    said = f", which has neither computed nor read for {quiet_seconds:.0f} s"
    return tuple(
        replace(wait, what=wait.what + said, limit=PATIENCE_SECONDS) if wait.on == "start" else wait for wait in waits
    )
