"""Findings about parts of the bus that were deleted, purged, replaced or altered; most are repaired when reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrl.messages.topics import ACTORS, EVENTS
from asyncrl.policies.health.faults import Finding, LostPart, Observation

_MENDED: Final = "the learner has made it again and publishes again what was on it"
_OF_TOPIC: Final[Mapping[str, str]] = {
    ACTORS.name: "the learner has made it again if it was deleted, and every actor sends another heartbeat at once",
    EVENTS.name: "what was in it is gone; `asyncrl tap` and the board show what comes now, and nothing else needs it",
}
"""Remedies for topics whose lost messages are not published again."""


def present(seen: Observation) -> list[Finding]:
    """Return a finding for each part of the bus that was deleted, purged, replaced or altered."""
    return [_finding(part) for part in seen.bus_losses]


def _finding(part: LostPart) -> Finding:
    remedy = (
        next((_OF_TOPIC[topic] for topic in part.topics if topic in _OF_TOPIC), _MENDED)
        if part.is_repaired
        else "the learner makes it again, and all who need it wait; if no learner is up, start it with --resume"
    )
    return Finding(
        fault="altered" if part.problem.startswith("was altered") else "lost",
        actor=part.name,
        cause=f"nats-server: {part.name} {part.problem}",
        remedy=f"{remedy}; somebody with the server's own password did it, or its store was replaced",
        seconds=part.seconds,
    )
