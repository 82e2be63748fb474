"""The port of rewards: user-supplied ("package.module:object" in the run file) or one of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import RewardError
from asyncrl.messages import Trajectory
from asyncrl.messages.control import ServerAddress
from asyncrl.policies.groups.validation import CATEGORY as CATEGORY
from asyncrl.policies.groups.validation import MOST_PARTS as MOST_PARTS
from asyncrl.policies.groups.validation import part_problem as part_problem
from asyncrl.rewards.answers import after_thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reward function's view of one rollout.

    prompt      the prompt as tokenised, chat template included
    completion  all tokens of the trajectory decoded; includes text from an environment. Special tokens that the model
                sampled are part of it (<think>, <|channel|>), except those that end an answer; all are left out with
                reward.keep_special_tokens = false
    dataset     in evaluation, name of the data set; in training with several data files, name of the row's file
    reward      name of the row's own reward (data.reward_key); empty: reward.kind
    trajectory  its reward and reward_parts are set by the rollout function; NaN and empty if it set none. If the
                rollout has several parts, the last part
    parts       all trajectories of the rollout, in order
    plain       completion without any special token; None: the same
    marked      completion with its special tokens if these are left out of ``completion``; None: the same
    servers     address of each server of [servers] by name: ``sample.servers["judge"].url`` is the base URL of OpenAI's
                protocol, ``.key`` its key, ``.model`` the model's name there. Reading one that is away raises an Outage
    kept        what reward functions returned for it, by the function's id, while siblings wait for a service

    A function gets its own copies of label and metadata, and the arrays are read-only: what it does with them changes
    nothing for other samples, and nothing that is trained.
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
    plain: str | None = None
    marked: str | None = None
    servers: Mapping[str, ServerAddress] = field(default_factory=dict, compare=False, repr=False)
    kept: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def answer(self) -> str:
        """What follows the last thought in the completion (</think>, or harmony's final channel), without special
        tokens. All of it if there is no thought; "" if the thought never ends."""
        marked = self.completion if self.marked is None else self.marked
        return after_thinking(marked, prompt=self.prompt)


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
