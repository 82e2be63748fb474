"""The policy version from which each outstanding group is sampled, according to the workers. Pure.

A prompt may wait for several versions before a worker starts it. It does not age while it waits, because the version
that starts the group samples its tokens. The heartbeat of each worker reports the version it samples with, and the
oldest version in each group that it has started. The tokens of a group are no older than the newer of two versions:

  reported  the start in the newest report of the workers that have started the group; if no worker has started it, the
            oldest version that any worker samples with
  admitted  the version that admitted the group, which is all that is known without any heartbeat

A worker that reports wrong versions can only shorten the learner's wait, for its own groups and for groups that no
worker has started; it cannot lengthen any wait.
Tests: tests/unit/policies/groups/test_table.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.messages import Heartbeat, VersionSpan
from asyncrl.messages.roles import BEGINS_NOTHING
from asyncrl.policies.groups.states import PublishedPrompt
from asyncrl.policies.staleness.staleness import ResumePoints, effective_version


class StartedGroups:
    """The starts of the outstanding groups, as reported by the workers."""

    def __init__(self) -> None:
        self._reported: dict[int, int] = {}
        self._oldest = -1
        """Oldest version that any worker samples with; -1 without any heartbeat."""

    def update(
        self, workers: Iterable[Heartbeat], *, outstanding: Mapping[int, PublishedPrompt], resume_points: ResumePoints
    ) -> None:
        """Take in the newest reports.  ``workers``: the newest heartbeats of all rollout workers"""
        reported: dict[int, int] = {}
        versions: list[int] = []
        for beat in workers:
            if beat.phase in BEGINS_NOTHING:
                continue
            versions.append(_effective(beat, beat.policy_version, resume_points))
            for group, version in beat.begun.items():
                group_id = int(group)
                if group_id in outstanding:
                    start = _effective(beat, version, resume_points)
                    reported[group_id] = min(start, reported.get(group_id, start))
        # Keep the report of a worker that is gone until another one takes over: it may resume from the saved tokens.
        kept = {group_id: start for group_id, start in self._reported.items() if group_id in outstanding}
        self._reported, self._oldest = kept | reported, min(versions, default=-1)

    def starts(self, outstanding: Mapping[int, PublishedPrompt]) -> list[int]:
        """Return the oldest version that may sample, or has sampled, each outstanding group of this history."""
        return [
            max(prompt.oldest_start, self._reported.get(group_id, self._oldest))
            for group_id, prompt in outstanding.items()
            if prompt.oldest_start is not None
        ]


def _effective(beat: Heartbeat, version: int, resume_points: ResumePoints) -> int:
    return effective_version(VersionSpan(start=0, incarnation=beat.incarnation, policy_version=version), resume_points)
