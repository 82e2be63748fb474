"""Samples for reward functions, and rewards loaded as a run loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl import config
from asyncrl.messages import Trajectory, VersionSpan
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.load import load_reward
from asyncrl.rewards.port import Reward, RewardFn, Sample


def sample(
    completion: str = "", *, label: Any = None, prompt: str = "", metadata: dict[str, Any] | None = None
) -> Sample:
    return Sample(
        prompt=prompt,
        completion=completion,
        label=label,
        metadata=metadata or {},
        trajectory=Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, np.bool_),
            behavior_logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        ),
        prompt_tokens=np.zeros(1, np.int32),
    )


def load(kind: str, *, timeout_seconds: float = 30.0, **options: Any) -> GuardedReward:
    return load_reward(config.RewardSection(kind=kind, timeout_seconds=timeout_seconds, options=options))


async def rewards(reward: RewardFn, samples: Sequence[Sample]) -> list[Reward]:
    """Return the rewards of samples that all have one."""
    found = await reward(samples)
    assert all(isinstance(one, Reward) for one in found), found
    return [one for one in found if isinstance(one, Reward)]


async def values(reward: GuardedReward, *samples: Sample) -> list[float]:
    try:
        return [each.value for each in await rewards(reward, samples)]
    finally:
        await reward.close()
