"""How many prompt groups may be outstanding: staleness is bounded before generation, at no cost in tokens.

One formula for the three modes. With B groups per batch, a group published and not lost (dropped or buried) belongs to
one of the batches that may be open at once:

    may publish = B x (batches released + 1 + slack) - (published - lost)

    mode          a batch is released when   slack           so at most outstanding
    sync          its step is done           0               B
    one_step_off  it is taken to train       0               2B (one training, one generating)
    async         its step is done           max_staleness   B x (max_staleness + 1)

A group is born fresh: it carries the version at which it was published, and no worker starts it on older weights. With
a full window it is trained max_staleness versions later, so older weights at its start would be over the bound.
The window saves work; the check at take time (buffer.py) is the guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule of one run. ``total_groups`` is what the whole run trains: no group is generated for nothing."""

    mode: str
    groups_per_batch: int
    max_staleness: int
    total_groups: int

    def may_publish(self, *, published: int, lost: int, batches_taken: int, steps_done: int) -> int:
        """Groups that may be published now, >= 0."""
        released = batches_taken if self.mode == "one_step_off" else steps_done
        slack = self.max_staleness if self.mode == "async" else 0
        open_groups = min(self.groups_per_batch * (released + 1 + slack), self.total_groups)
        return max(0, open_groups - (published - lost))
