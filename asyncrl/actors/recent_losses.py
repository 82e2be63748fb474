"""Recent losses of the bus, as the health monitor reports them. Pure.

Tests: tests/unit/actors/test_health_monitor.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.bus.port import Loss
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.faults import LostPart

LOSS_SECONDS = 10.0
"""How long a repaired part of the bus is still reported: longer than `asyncrl doctor` listens."""


class RecentLosses:
    """Keeps losses of the bus while they last and LOSS_SECONDS longer: they may be repaired before the next look."""

    def __init__(self) -> None:
        self._losses: dict[str, tuple[float, float, Loss]] = {}  # name -> first and last seen
        self.is_blind = False
        """Heartbeats or progress cannot be read now."""
        self.hides_beats = False
        """Heartbeats stored before the last look are gone or cannot be read."""

    def note(self, losses: Iterable[Loss], *, now: float) -> None:
        found = list(losses)
        for loss in found:
            since = self._losses[loss.name][0] if loss.name in self._losses else now
            self._losses[loss.name] = (since, now, loss)
        gone = {topic for loss in found if loss.is_gone for topic in loss.topics}
        self.is_blind = bool(gone & {ACTORS.name, PROGRESS.name})
        self.hides_beats = self.is_blind or any(ACTORS.name in loss.topics for loss in found)

    def lately(self, now: float) -> tuple[LostPart, ...]:
        self._losses = {name: one for name, one in self._losses.items() if now - one[1] <= LOSS_SECONDS}
        return tuple(
            LostPart(
                name=loss.name,
                problem=loss.problem,
                is_gone=loss.is_gone,
                topics=loss.topics,
                is_repaired=loss.is_repaired,
                seconds=now - since,
            )
            for since, _, loss in self._losses.values()
        )
