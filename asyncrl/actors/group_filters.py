"""The run's group filters, asked one group after the other; one that fails, or lets nothing through, ends the run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl.errors import HopelessError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.filters import GroupFilter


class GroupFilters:
    """filters: by their names in the run file; max_in_a_row: how many groups may be passed over one after the other."""

    def __init__(self, filters: Mapping[str, GroupFilter], *, max_in_a_row: int) -> None:
        self._filters = filters
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def keep(self, group: TrajectoryGroup) -> bool:
        """Whether every filter keeps it.

        Raises HopelessError where one raises, and where so many groups in a row were passed over that the run would
        sample for ever and never step.
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
                        f"algorithm.filters: the last {self._in_a_row} groups were all passed over, the newest by "
                        f"{name}, with rewards {rewards}; look at the reward and the prompts, or remove the filter"
                    )
                return False
        self._in_a_row = 0
        return True


def ask(function: GroupFilter, group: TrajectoryGroup) -> bool:
    """What ``function`` says of the group. Raises TypeError where that is not True or False, and what it raises."""
    answer = function(group)
    if not isinstance(answer, bool | np.bool_):
        raise TypeError(f"a filter gives True to keep a group or False, not {answer!r:.50}")
    return bool(answer)


def sample_group() -> TrajectoryGroup:
    """Two answers of two tokens, rewarded 0 and 1, to try filters on."""
    return TrajectoryGroup(
        group_id=0,
        prompt_tokens=np.zeros(2, np.int32),
        trajectories=tuple(
            Trajectory(
                tokens=np.ones(2, np.int32),
                response_mask=np.ones(2, np.bool_),
                behavior_logprobs=np.full(2, -1.0, np.float32),
                version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=0),),
                reward=reward,
            )
            for reward in (0.0, 1.0)
        ),
    )
