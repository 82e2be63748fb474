"""How many groups keep the learner fed: the part of the admission window that a run opens. Pure.

With a full window (admission.py), a run whose learner is the limit trains every token at the largest staleness and
gains nothing: the groups wait in the buffer. What it needs can be read whenever it asks for a batch of B groups:

    needed = window - groups that are finished + B

Example: B = 4 and a window of 20. When the learner asks, 15 groups are finished: 11 of them are spare, and a window of
9 would have served. If only 1 is finished, the learner waits for 3, and needs a window of 23 to be served at once.

If it waits although it has a batch, for groups that would become too old (staleness.eviction), it needs the full
window: what the engines sample meanwhile is what it trains next.

The window is the largest need of the last STEPS steps, and a quarter of a batch more. So it holds the longest answers
and the slowest step of that time, opens again within a step when workers die or answers grow, and is full where the
engines are the limit: groups then wait for an engine, and do not age. After each step at least one batch is admitted or
finished, so the learner cannot starve (tests/unit/policies/staleness/test_window.py).

Where the learner is the limit, staleness falls from 4.0 to 1.8 of 4 (docs/results/performance.md).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from asyncrl.config import RunConfig

STEPS: Final = 12
"""More than the steps that a change of the window takes to show."""


class NeededWindow:
    """size: groups to keep outstanding, from groups_per_batch to ``largest``. It begins with two batches: one in
    training and one in generation."""

    def __init__(self, *, groups_per_batch: int, largest: int) -> None:
        self._count, self._largest = groups_per_batch, largest
        self._margin = max(1, groups_per_batch // 4)
        self._needs: deque[int] = deque(maxlen=STEPS)
        self.size = min(2 * groups_per_batch, largest)

    @classmethod
    def from_run(cls, run: RunConfig) -> NeededWindow | None:
        """Return the window of the run; None where it is always full: staleness.admission, modes without slack, where
        steps wait for a version that others skip (weights.every_steps), and in the order of the prompts, where groups
        that are finished wait for one before them and feed no learner."""
        if run.run.mode != "async" or run.staleness.admission == "full":
            return None
        if run.weights.every_steps > 1 or run.staleness.order == "in_order":
            return None
        return cls(groups_per_batch=run.learner.groups_per_batch, largest=run.window)

    def observe(self, *, finished: int, unfinished: int, waited: bool = False) -> None:
        """Take in what the learner finds when a step is done and it asks for the next batch, or while it waits for it.

        finished    groups that wait to be trained
        unfinished  groups that are published and not finished. With those that are finished they may be more than
                    ``size``, if it has just become smaller
        waited      whether the learner has waited for old groups before the last step
        """
        need = max(self.size, finished + unfinished) - finished + self._count
        self._needs.append(self._largest if waited else need)
        self.size = min(self._largest, max(self._needs) + self._margin)
