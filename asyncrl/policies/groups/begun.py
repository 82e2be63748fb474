"""From which policy version on each outstanding group is sampled, as far as workers say. Pure.

A prompt may lie for some versions before a worker begins it, and all that time it gets no older: its tokens will be
those of the version that begins it. Each worker's heartbeat says which version it samples with, and the oldest version
in each group that it has begun. So a group's tokens are no older than

  what those that have begun it say, the last time that any did
  or, of one that nobody has begun: the oldest version that any worker samples with
  and in any case the version that admitted it, which is all that is known where no worker is heard.

A lie can only shorten a wait for what the liar has, or for what nobody has begun, and make no wait longer than it was.
Tests: tests/unit/policies/groups/test_begun.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.messages import Heartbeat, VersionSpan
from asyncrl.policies.groups.states import PublishedPrompt
from asyncrl.policies.health.faults import QUARANTINED
from asyncrl.policies.staleness.staleness import Forks, effective_version

_CANNOT_BEGIN = ("starting", QUARANTINED)


class Begun:
    """What was heard of the groups that are outstanding."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._oldest = -1
        """That any worker samples with; -1: no worker was heard."""

    def hear(self, workers: Iterable[Heartbeat], *, outstanding: Mapping[int, PublishedPrompt], forks: Forks) -> None:
        """``workers``: the newest heartbeats of all rollout workers"""
        told: dict[int, int] = {}
        versions: list[int] = []
        for beat in workers:
            if beat.phase in _CANNOT_BEGIN:
                continue
            versions.append(_effective(beat, beat.policy_version, forks))
            for group, version in beat.begun.items():
                group_id = int(group)
                if group_id in outstanding:
                    start = _effective(beat, version, forks)
                    told[group_id] = min(start, told.get(group_id, start))
        # Of a worker that is gone, until another takes the group over: it may go on from the tokens that are there.
        kept = {group_id: start for group_id, start in self._told.items() if group_id in outstanding}
        self._told, self._oldest = kept | told, min(versions, default=-1)

    def starts(self, outstanding: Mapping[int, PublishedPrompt]) -> list[int]:
        """Of each outstanding group of this history, the oldest version that may have sampled it, or will."""
        return [
            max(prompt.oldest_start, self._told.get(group_id, self._oldest))
            for group_id, prompt in outstanding.items()
            if prompt.oldest_start is not None
        ]


def _effective(beat: Heartbeat, version: int, forks: Forks) -> int:
    return effective_version(VersionSpan(start=0, incarnation=beat.incarnation, policy_version=version), forks)
