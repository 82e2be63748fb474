"""Check that repeated training followed the rule: groups of the same incarnation, at most as often as allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.policies.audit.entries import HistoryEntry, steps


def replays(history: Sequence[HistoryEntry]) -> tuple[int, dict[int, str]]:
    """Return how often groups were trained again, and group id -> problem.  ``history``: a present one"""
    problems: dict[int, str] = {}
    incarnation, count = -1, 0
    trained: set[int] = set()
    again: Counter[int] = Counter()
    for entry, begun, _ in steps(history):
        if entry.incarnation != incarnation:
            incarnation, trained, again = entry.incarnation, set(), Counter()
        staleness = begun.settings.get("staleness", {})
        times = staleness.get("replay_times", 1) if staleness.get("replay_groups", 0) else 0
        for group_id, _sequence in entry.replayed:
            count += 1
            again[group_id] += 1
            if group_id not in trained:
                problems[group_id] = f"step {entry.step} trained it again, and none before had"
            elif again[group_id] > times:
                problems[group_id] = f"trained again {again[group_id]} times, {times} are allowed"
        trained.update(entry.groups)
    return count, problems
