"""Applies the run's group filters. If a filter raises on a group, the group fails with the reason.

The run ends if a filter raises on too many groups in a row, or if too many groups in a row are filtered. With a cap on
filtered groups between two steps, the run ends at the cap, or continues with groups that a filter would reject.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Final

import numpy as np

from asyncrl.config import plugins
from asyncrl.errors import FilterError, HopelessError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.user_copies import own_group
from asyncrl.policies.batching.filters import GroupFilter

_LONGEST_REASON: Final = 60
_MOST_REASONS: Final = 50


class GroupFilters:
    """Decides which groups to keep.

    filters       name in the run file -> filter
    max_in_a_row  how many consecutive groups may be filtered
    max_raised    how many consecutive groups may fail because a filter raised
    cap           groups that may be filtered between two steps; 0: any number
    keeps_at_cap  keep groups at the cap instead of ending the run
    """

    def __init__(
        self,
        filters: Mapping[str, GroupFilter],
        *,
        max_in_a_row: int,
        max_raised: int = 32,
        cap: int = 0,
        keeps_at_cap: bool = False,
    ) -> None:
        self._filters = filters
        self._cap, self._keeps_at_cap = cap, keeps_at_cap
        self._max_in_a_row, self._max_raised = max_in_a_row, max_raised
        self._in_a_row = self._raised = 0
        self.rejected_by = ""
        """The filter that rejected the last rejected group."""
        self.num_kept_at_cap = 0
        """Groups that were kept although a filter rejects them."""
        self.num_by: dict[str, int] = {}
        """Groups that were rejected since the start, by FILTER or FILTER/REASON."""

    def keep(self, group: TrajectoryGroup, *, since_step: int = 0, is_counted: bool = True) -> bool:
        """Return whether every filter, or else the cap, keeps the group.

        since_step  groups filtered since the last step
        is_counted  False for a group that an earlier incarnation left: it counts towards no end of the run

        Raises FilterError if a filter raises. Raises HopelessError if so many groups were filtered, or raised on, that
        the run would sample forever without a step.
        """
        for name, function in self._filters.items():
            try:
                answer = ask(function, group)
            except Exception as error:  # user code may raise anything
                problem = f"algorithm.filters: {name} raised {plugins.describe_raised(error)}"
                self.note_raised(problem, what="a filter", cause=error, is_counted=is_counted)
                raise FilterError(problem) from error
            if answer is not True:
                self._raised = 0
                self.rejected_by = f"{name}: {answer}" if answer else name
                if 0 < self._cap <= since_step and (is_counted or self._keeps_at_cap):
                    return self._keep_at_cap(group)
                self._count(name, answer)
                self._in_a_row += is_counted
                if self._in_a_row >= self._max_in_a_row:
                    raise HopelessError(
                        f"algorithm.filters: the last {self._in_a_row} groups were all filtered, the newest by "
                        f"{name}, with rewards {group.rewards}; check the reward and the prompts, or remove the filter"
                    )
                return False
        self._in_a_row = self._raised = 0
        return True

    def note_raised(self, problem: str, *, what: str, cause: BaseException, is_counted: bool) -> None:
        """Count a group on which ``what`` raised. Raises HopelessError after too many in a row."""
        self._raised += is_counted
        if self._raised >= self._max_raised:
            raise HopelessError(f"{problem}; {what} raised on each of the last {self._raised} groups") from cause

    def _count(self, name: str, reason: str | bool) -> None:
        """Count a rejected group by its filter and, if it gave one, by its reason; too many reasons are one."""
        short = name.rpartition(":")[2]
        by = f"{short}/{reason}" if reason else short
        if by not in self.num_by and len(self.num_by) >= _MOST_REASONS:
            by = f"{short}/other"
        self.num_by[by] = self.num_by.get(by, 0) + 1

    def _keep_at_cap(self, group: TrajectoryGroup) -> bool:
        """Keep a group at the cap. Raises HopelessError if the cap ends the run."""
        if not self._keeps_at_cap:
            raise HopelessError(
                f"algorithm.filter_cap: {self._cap} groups were filtered since the last step, and the next would be "
                f"rejected by {self.rejected_by}, with rewards {group.rewards}; "
                'raise it, or set filter_cap_action = "keep"'
            )
        self._in_a_row = 0
        self.num_kept_at_cap += 1
        return True


def ask(function: GroupFilter, group: TrajectoryGroup) -> bool | str:
    """Return the filter's decision: True to keep the group, False, or the reason to reject it.

    Raises TypeError for anything else, and any error of ``function``.
    """
    with plugins.contain_exits():
        answer: object = function(own_group(group))
    if inspect.iscoroutine(answer):
        answer.close()  # otherwise Python warns that it was never awaited
    if not isinstance(answer, bool | np.bool_):
        if isinstance(answer, str) and 0 < len(answer) <= _LONGEST_REASON and answer.isprintable():
            return answer
        raise TypeError(f"a filter must return True to keep a group or False, not {answer!r:.50}")
    return bool(answer)


def sample_group() -> TrajectoryGroup:
    """Return a group to try filters on: two answers of two tokens, with rewards 0 and 1."""
    return TrajectoryGroup(
        group_id=0,
        prompt_tokens=np.zeros(2, np.int32),
        trajectories=tuple(
            Trajectory(
                tokens=np.ones(2, np.int32),
                response_mask=np.ones(2, np.bool_),
                behavior_logprobs=np.full(2, -1.0, np.float32),
                version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
                reward=reward,
            )
            for reward in (0.0, 1.0)
        ),
    )
