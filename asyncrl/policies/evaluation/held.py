"""How much of the engines an evaluation holds back: how many workers it may, and what part of their time it took. Pure.

Tests: tests/unit/policies/evaluation/test_held.py.
"""

from __future__ import annotations


def num_held(share: float, num_workers: int) -> int:
    """Workers that may keep a version for an evaluation: at most this share of them, but one where that is none."""
    return max(1, int(share * num_workers))


class EngineTime:
    """Since when each worker that answered has had the evaluated version. All times are of the caller's clock."""

    def __init__(self, *, began: float) -> None:
        """began: when the evaluation did; nothing before that counts"""
        self._began = began
        self._since: dict[str, float] = {}

    def heard(self, worker: str, *, held_seconds: float, now: float) -> None:
        """An answer has come of a worker that had the version for so many seconds when it gave it."""
        since = max(self._began, now - held_seconds)
        self._since[worker] = min(since, self._since.get(worker, since))

    def share(self, *, num_engines: int, now: float) -> float:
        """Seconds that workers have had the version, of those that all engines of the run had since it began.

        A worker has it until now, also one that has ended meanwhile. One that has given no answer is not known of.
        """
        passed = (now - self._began) * max(1, num_engines, len(self._since))
        return sum(now - since for since in self._since.values()) / passed if passed > 0 else 0.0
