"""Findings of what somebody deleted, purged, replaced or altered on the bus. Most are mended when they are said."""

from __future__ import annotations

from asyncrl.policies.health.faults import Finding, LostPart, Observation


def present(seen: Observation) -> list[Finding]:
    """Parts of the bus that somebody deleted, purged, replaced or altered."""
    return [_finding(part) for part in seen.bus_losses]


def _finding(part: LostPart) -> Finding:
    remedy = (
        "the learner has made it again and publishes again what was on it"
        if part.is_mended
        else "the learner makes it again, and all who need it wait; if no learner is up, start it with --resume"
    )
    return Finding(
        fault="altered" if part.problem.startswith("was altered") else "lost",
        actor=part.name,
        cause=f"nats-server: {part.name} {part.problem}",
        remedy=f"{remedy}; somebody with the server's own password did it, or its store was replaced",
        seconds=part.seconds,
    )
