"""How much of the engines an evaluation pins to its version: the number of workers, and the share of engine time. Pure.

Tests: tests/unit/policies/test_evaluation.py.
"""

from __future__ import annotations


def num_pinned(share: float, num_workers: int) -> int:
    """Return how many workers may keep a version for an evaluation: at most ``share`` of them, but at least one."""
    return max(1, int(share * num_workers))


class EngineTime:
    """Tracks since when each worker that answered has had the evaluated version, on the caller's clock."""

    def __init__(self, *, began: float) -> None:
        """began: start of the evaluation; earlier time does not count"""
        self._began = began
        self._since: dict[str, float] = {}

    def record(self, worker: str, *, pinned_seconds: float, now: float) -> None:
        """Record an answer from a worker that had pinned the version for ``pinned_seconds`` when it answered."""
        since = max(self._began, now - pinned_seconds)
        self._since[worker] = min(since, self._since.get(worker, since))

    def share(self, *, num_engines: int, now: float) -> float:
        """Return the share of all engine time since the start that workers have spent with the version.

        A worker that has answered counts until now, even if it has ended since. A worker that has not answered is
        unknown and does not count.
        """
        passed = (now - self._began) * max(1, num_engines, len(self._since))
        return sum(now - since for since in self._since.values()) / passed if passed > 0 else 0.0
