"""The port of rewards: user-supplied ("package.module:object" in the run file) or one of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import RewardError
from asyncrl.messages import Trajectory
from asyncrl.policies.groups.validation import MOST_PARTS as MOST_PARTS
from asyncrl.policies.groups.validation import part_problem as part_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reward function's view of one rollout.

    prompt      the prompt as tokenised, chat template included
    completion  all tokens of the trajectory decoded, without special tokens; includes text from an environment
    dataset     in evaluation, name of the data set; in training with several data files, name of the row's file
    reward      name of the row's own reward (data.reward_key); empty: reward.kind
    trajectory  its reward and reward_parts are set by the rollout function; NaN and empty if it set none. If the
                rollout has several parts, the last part
    parts       all trajectories of the rollout, in order
    """

    prompt: str
    completion: str
    label: Any
    metadata: Mapping[str, Any]
    trajectory: Trajectory
    prompt_tokens: NDArray[np.int32]
    dataset: str = ""
    reward: str = ""
    parts: tuple[Trajectory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A rollout's reward. At most MOST_PARTS parts, named as ``part_problem`` requires; each is metric reward/NAME."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardFn(Protocol):
    """Rewards one group. If it raises, the group fails with the reason; the worker continues.

    A RewardError takes the place of the reward of a sample that has none. If it raises an Outage, the worker waits and
    calls it again.
    """

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardError]: ...

    async def close(self) -> None: ...
