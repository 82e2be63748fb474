"""Findings about parts of the bus that were deleted, purged, replaced or altered; most are repaired when reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrl.messages.topics import ACTORS, EVENTS
from asyncrl.policies.health.faults import Finding, LostPart, Observation

_MENDED: Final = "the learner has created it again and republishes its messages"
_OF_TOPIC: Final[Mapping[str, str]] = {
    ACTORS.name: "the learner has created it again if it was deleted, and every actor sends a new heartbeat at once",
    EVENTS.name: "its messages are gone, but only `asyncrl tap` and the board read them; both show new messages",
}
"""Remedies for topics whose lost messages are not published again."""


def present(seen: Observation) -> list[Finding]:
    """Return a finding for each part of the bus that was deleted, purged, replaced or altered."""
    return [_finding(part) for part in seen.bus_losses]


def _finding(part: LostPart) -> Finding:
    remedy = (
        next((_OF_TOPIC[topic] for topic in part.topics if topic in _OF_TOPIC), _MENDED)
        if part.is_repaired
        else "the learner creates it again, and processes that need it wait; if no learner is up, "
        "start one with --resume"
    )
    return Finding(
        fault="altered" if part.problem.startswith("was altered") else "lost",
        actor=part.name,
        cause=f"nats-server: {part.name} {part.problem}",
        remedy=f"{remedy}; a client with the server's own password did this, or the server's store was replaced",
        seconds=part.seconds,
    )
