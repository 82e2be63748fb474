"""reward.kind = "none": what the rollout function says, or 0 for everything where the algorithm looks at no reward."""

from __future__ import annotations

import math

from asyncrl.protocols import Reward, Sample


def no_reward(sample: Sample) -> Reward:
    """The trajectory's own reward and parts; 0 where its rollout function set none (NaN)."""
    trajectory = sample.trajectory
    return Reward(
        value=0.0 if math.isnan(trajectory.reward) else trajectory.reward,
        parts=trajectory.reward_parts,
    )
