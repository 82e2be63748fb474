"""Small prompt groups as workers publish them."""

from __future__ import annotations

import numpy as np

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan


def span(version: int, start: int = 0, epoch: int = 0) -> VersionSpan:
    return VersionSpan(start=start, incarnation=epoch, policy_version=version)


def trajectory(*, version: int = 0, length: int = 3, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        tokens=np.arange(4, 4 + length, dtype=np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.full(length, -0.5, np.float32),
        version_spans=(span(version),),
        reward=reward,
    )


def group(
    group_id: int, *, version: int = 0, error: str = "", rewards: tuple[float, ...] = (0.0, 1.0)
) -> TrajectoryGroup:
    made = () if error else tuple(trajectory(version=version, reward=reward) for reward in rewards)
    return TrajectoryGroup(group_id=group_id, prompt_tokens=np.array([1, 2], np.int32), trajectories=made, error=error)
