"""How many prompt groups may be outstanding: staleness is bounded before generation, at no cost in tokens.

One formula for the three modes. With B groups per batch, a group published and not lost (dropped or failed) belongs to
one of the batches that may be open at once:

    may publish = B x (batches released + 1 + slack) - (published - lost)

    mode          a batch is released when   slack           so at most outstanding
    sync          its step is done           0               B
    one_step_off  it is taken to train       0               2B (one training, one generating)
    async         its step is done           max_staleness   B x (max_staleness + 1)

A group is born fresh: it carries the version at which it was published, and no worker starts it on older weights. With
a full window it is trained max_staleness versions later, so older weights at its start would be over the bound.

Steps count as far as workers can get their weights: what a step releases is published when its version, or a newer one,
is announced. It could not begin before; and a learner that dies in between leaves no prompt that nobody can begin.
The window saves work; the check when a batch is taken (groups/selection.py) is the guarantee. A bound that adapts
(adaptive.py) takes the place of max_staleness in the slack of async, and never in the check.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule of one run. ``total_groups`` is what the whole run trains: no group is generated for nothing."""

    mode: str
    groups_per_batch: int
    max_staleness: int
    total_groups: int

    @classmethod
    def of(cls, run: RunConfig) -> Admission:
        """The rule that the run file asks for."""
        return cls(
            mode=run.run.mode,
            groups_per_batch=run.learner.groups_per_batch,
            max_staleness=run.max_staleness,
            total_groups=run.run.steps * run.learner.groups_per_batch,
        )

    @property
    def most(self) -> int:
        """Groups that are never all outstanding: the window and a batch more."""
        return self.groups_per_batch * (self.max_staleness + 2)

    def may_publish(
        self,
        *,
        published: int,
        lost: int,
        batches_taken: int,
        steps_done: int,
        bound: int | None = None,
        obtainable: int | None = None,
    ) -> int:
        """Groups that may be published now, >= 0.

        bound       the adapted one; None is max_staleness
        obtainable  newest policy version that workers can get; None where no policy samples. What is published asks for
                    version min(steps_done, obtainable)
        """
        if obtainable is not None:
            steps_done, batches_taken = min(steps_done, obtainable), min(batches_taken, obtainable + 1)
        released = batches_taken if self.mode == "one_step_off" else steps_done
        widest = self.max_staleness if bound is None else min(bound, self.max_staleness)
        slack = widest if self.mode == "async" else 0
        open_groups = min(self.groups_per_batch * (released + 1 + slack), self.total_groups)
        return max(0, open_groups - (published - lost))


def version_to_begin(
    min_policy_version: int, *, incarnation: int, engine_incarnation: int, fork: int, max_staleness: int
) -> int:
    """The oldest version that may begin a group which was published in ``incarnation``, of an engine's
    ``engine_incarnation``.

    Where they differ the learner fell back to version ``fork``, and what the group asks for belongs to a lost history.
    The log brings the new one up to there, or as far as it may train what the old one sampled: through the step from
    fork + max_staleness. At the version after that the rest is dropped as stale, so whatever is left is next.

    A group that begins earlier would be among the dropped; one that waited longer might wait for ever, as the learner
    may need it to get there. It may not get there even so, where the new incarnation loses groups of the log (a
    quarantine): a worker that has nothing else to do begins after a while anyway (WeightFollower).
    """
    if engine_incarnation <= incarnation:
        return min_policy_version
    return min(min_policy_version, fork + max_staleness + 1)
