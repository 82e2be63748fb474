"""reward.kind = "none": keep the reward that the rollout function set."""

from __future__ import annotations

import math

from asyncrl.errors import RewardError
from asyncrl.rewards.port import Sample


def no_reward(sample: Sample) -> float:
    """Return the trajectory's own reward. Its parts stay, as with every reward (guard.py).

    Raises RewardError if the rollout function set no reward (NaN).
    """
    trajectory = sample.trajectory
    if math.isnan(trajectory.reward):
        if trajectory.reward_parts.get("timeout"):  # the harness timed out (environments/agent/harnesses/load.py)
            raise RewardError(
                "reward none: the sample took longer than rollout.options.timeout_seconds, and nothing says its "
                'reward; set rollout.options.timeout_reward, or on_timeout = "fail"'
            )
        raise RewardError(
            "reward none: the rollout function set no reward; give one to trajectory(reward=...), 0 if the algorithm "
            "looks at none, or choose another reward.kind"
        )
    return trajectory.reward
