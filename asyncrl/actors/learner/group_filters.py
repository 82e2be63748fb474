"""Applies the run's group filters. A filter that raises, or that rejects too many groups in a row, ends the run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl.errors import HopelessError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.batching.filters import GroupFilter


class GroupFilters:
    """filters: by their names in the run file; max_in_a_row: how many consecutive groups may be filtered."""

    def __init__(self, filters: Mapping[str, GroupFilter], *, max_in_a_row: int) -> None:
        self._filters = filters
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def keep(self, group: TrajectoryGroup) -> bool:
        """Whether every filter keeps the group.

        Raises HopelessError if a filter raises, or if so many consecutive groups were filtered that the run would
        sample forever without a step.
        """
        for name, function in self._filters.items():
            try:
                is_kept = ask(function, group)
            except Exception as error:  # whatever a user's function raises
                problem = f"algorithm.filters: {name} raised {type(error).__name__}: {error} on group {group.group_id}"
                raise HopelessError(problem) from error
            if not is_kept:
                self._in_a_row += 1
                if self._in_a_row >= self._max_in_a_row:
                    rewards = [trajectory.reward for trajectory in group.trajectories]
                    raise HopelessError(
                        f"algorithm.filters: the last {self._in_a_row} groups were all filtered, the newest by "
                        f"{name}, with rewards {rewards}; check the reward and the prompts, or remove the filter"
                    )
                return False
        self._in_a_row = 0
        return True


def ask(function: GroupFilter, group: TrajectoryGroup) -> bool:
    """The filter's decision. Raises TypeError unless it is True or False, and whatever ``function`` raises."""
    answer = function(group)
    if not isinstance(answer, bool | np.bool_):
        raise TypeError(f"a filter must return True to keep a group or False, not {answer!r:.50}")
    return bool(answer)


def sample_group() -> TrajectoryGroup:
    """A group to try filters on: two answers of two tokens, with rewards 0 and 1."""
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
