"""How many prompt groups may be outstanding. This bounds staleness before generation, at no cost in tokens.

One formula covers the three modes. With B groups per batch, each group that is published and not lost (dropped,
failed or filtered) belongs to one of the batches that may be open at once:

    may publish = B x (batches released + 1 + slack) - (published - lost)

    mode          a batch is released when   slack           so at most outstanding
    sync          its step is done           0               B
    one_step_off  it is taken to train       0               2B (one training, one generating)
    async         its step is done           max_staleness   B x (max_staleness + 1)

A group starts fresh: it carries the version at which it was published, and no worker starts it on older weights. With a
full window the group is trained max_staleness versions later, so starting on older weights would exceed the bound.

A step counts only once workers can get its weights: the groups that it releases are published when its version, or a
newer one, is announced. They could not start earlier, and a learner that dies in between leaves no prompt behind that
no worker can start. The window only saves work; the guarantee is the check when a batch is taken (groups/selection.py).

In async a window smaller than the full one may do: as many groups as keep the learner fed (window.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The admission rule of a run. ``total_groups``: groups that the run trains, so that no more are generated."""

    mode: str
    groups_per_batch: int
    max_staleness: int
    total_groups: int

    @classmethod
    def from_run(cls, run: RunConfig) -> Admission:
        """Return the rule that the run file asks for."""
        return cls(
            mode=run.run.mode,
            groups_per_batch=run.learner.groups_per_batch,
            max_staleness=run.max_staleness,
            total_groups=run.run.steps * run.learner.groups_per_batch,
        )

    @property
    def most(self) -> int:
        """An upper limit that the number of outstanding groups never reaches: the window plus one batch."""
        return self.groups_per_batch * (self.max_staleness + 2)

    def may_publish(
        self,
        *,
        published: int,
        lost: int,
        batches_taken: int,
        steps_done: int,
        obtainable: int | None = None,
        window: int | None = None,
    ) -> int:
        """Return how many groups may be published now, >= 0.

        obtainable: newest policy version that workers can get; None if no policy samples. A published group asks for
                    version min(steps_done, obtainable)
        window:     groups that may be outstanding at most, in async; None: as many as the bound allows
        """
        if obtainable is not None:
            steps_done, batches_taken = min(steps_done, obtainable), min(batches_taken, obtainable + 1)
        released = batches_taken if self.mode == "one_step_off" else steps_done
        slack = self.max_staleness if self.mode == "async" else 0
        full = self.groups_per_batch * (1 + slack)
        open_groups = self.groups_per_batch * released + (full if window is None else min(window, full))
        open_groups = min(open_groups, self.total_groups)
        return max(0, open_groups - (published - lost))


def version_to_begin(
    min_policy_version: int,
    *,
    incarnation: int,
    engine_incarnation: int,
    resumed_from: int,
    max_staleness: int,
    every_steps: int = 1,
) -> int:
    """Return the oldest version of ``engine_incarnation`` that may start a group published in ``incarnation``.

    If the two differ, the learner fell back to version ``resumed_from``, and the version that the group asks for was
    rolled back. Groups on the log bring the new incarnation up to that version, or as far as it may train samples of
    the old incarnation: through the step from resumed_from + max_staleness. At the version after that, the remaining
    groups on the log are dropped as stale, and the groups that have not started are next.

    A group that starts earlier would be dropped with them. A group that waits longer might wait forever, because the
    learner may need it to get that far. If the new incarnation loses groups of the log (a quarantine), the learner may
    not get that far anyway, so an idle worker starts the group after a while (WeightFollower).

    Of versions that only every ``every_steps``-th step announces, it is the last one up to there: the next one may need
    the groups that wait for it.
    """
    if engine_incarnation <= incarnation:
        return min_policy_version
    reached = min(min_policy_version, resumed_from + max_staleness + 1)
    return reached - reached % every_steps
